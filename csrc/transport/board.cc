#include "transport/board.h"

#include <utility>

namespace pycollective {

Board::Board(std::byte* memory, int rank, std::vector<WaitQueue*> queues, bool with_staging)
    : peers(queues.size()),
      sources(queues.size()),
      targets(queues.size() + 1),
      memory_(memory),
      stride_(bytes_for_rank(static_cast<int>(queues.size()), with_staging)),
      input_bytes_(with_staging ? input_staging_bytes(static_cast<int>(queues.size()))
                                : 4 * kOneShotBytes),
      output_bytes_(with_staging ? output_staging_bytes(static_cast<int>(queues.size())) : 0),
      has_staging_(with_staging),
      rank_(rank),
      queues_(std::move(queues)),
      own_queue_(queues_[static_cast<std::size_t>(rank)]) {}

bool Board::is_slot_free(std::uint64_t next) {
  const std::uint64_t last = next - 1;
  if (all_posted >= last) return true;
  bool all_have_posted = true;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const Slot& theirs = slot(r, last);  // a peer keeps this slot until this rank has posted `next`
    if (theirs.sequence.load(std::memory_order_acquire) == last) {
      if (theirs.fingerprint != posted_fingerprint) mismatch(r);
    } else if (has_released(r, next)) {
      all_have_posted = false;  // the peer compares the calls before it posts `next`
    } else {
      return false;
    }
  }
  if (all_have_posted) all_posted = last;
  return true;
}

std::size_t Board::bytes_for(int size, bool with_staging) {
  return static_cast<std::size_t>(size) * bytes_for_rank(size, with_staging);
}

std::size_t Board::bytes_for_rank(int size, bool with_staging) {
  return kStagingAt + (with_staging ? input_staging_bytes(size) + output_staging_bytes(size)
                                    : 4 * kOneShotBytes);
}

}  // namespace pycollective
