#include "transport/group.h"

namespace pycollective {

std::string Group::describe_ranks() const {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    if (r) text += "; ";
    text += describe(r);
  }
  return text;
}

std::string describe_rank(int rank, bool busy, const CallRecord& call) {
  std::string text = "rank " + std::to_string(rank);
  if (busy) return text + " is in " + call.describe();
  if (call.number == 0) return text + " has not called anything yet";
  return text + " has finished " + call.describe() + " and called nothing since";
}

std::string describe_mismatch(int rank, const CallRecord& call, int peer, const CallRecord& other) {
  return describe_mismatch(rank, call.describe(), peer, other.describe());
}

std::string describe_mismatch(int rank, const std::string& call, int peer,
                              const std::string& other) {
  if (peer < rank) return describe_mismatch(peer, other, rank, call);
  return "ranks made calls that do not belong together: rank " + std::to_string(rank) + " called " +
         call + ", rank " + std::to_string(peer) + " called " + other +
         ". All ranks must make the same calls in the same order, with equal shape, dtype, op, "
         "algorithm and root.";
}

}  // namespace pycollective
