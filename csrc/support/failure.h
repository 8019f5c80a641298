// The failure of a collective call. The bindings translate a Failure to the matching Python error.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pycollective {

enum class FailureKind { timeout, mismatch, peer_lost, aborted };

// Programs branch on the attributes; the text is for people.
class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, const std::string& message, std::vector<int> ranks = {},
          std::vector<std::string> calls = {})
      : std::runtime_error(message), kind(kind), kind_for_peers(kind) {
    if (!ranks.empty() || !calls.empty()) {
      about_ = std::make_shared<const About>(About{std::move(ranks), std::move(calls), {}});
    }
  }
  FailureKind kind;
  // The kind that peers raise. A rank that leaves in a call aborts its own call, and its peers lose
  // a rank.
  FailureKind kind_for_peers;

  // The ranks that are lost or late, whose calls differ, or that aborted the group. Ascending
  // numbers in the group that failed.
  const std::vector<int>& ranks() const { return about().ranks; }
  // The descriptions of the calls. A mismatch has one for each rank, or none; another failure has
  // at most one, the call that was running.
  const std::vector<std::string>& calls() const { return about().calls; }
  // The address of each of ranks(), empty for a rank of this host. The list is empty if all ranks
  // are on this host.
  const std::vector<std::string>& hosts() const { return about().hosts; }
  // Returns a copy with hosts() filled in; `addresses` has the address of each rank of the group.
  Failure with_hosts(const std::vector<std::string>& addresses) const {
    About known{ranks(), calls(), {}};
    for (int rank : known.ranks) {
      auto place = static_cast<std::size_t>(rank);
      known.hosts.push_back(place < addresses.size() ? addresses[place] : std::string());
    }
    return with(std::move(known));
  }
  // Returns a copy with this description of the call that was running.
  Failure with_call(std::string call) const { return with({ranks(), {std::move(call)}, hosts()}); }

 private:
  struct About {
    std::vector<int> ranks;
    std::vector<std::string> calls, hosts;
  };
  Failure with(About about) const {
    Failure copy = *this;
    copy.about_ = std::make_shared<const About>(std::move(about));
    return copy;
  }
  const About& about() const {
    static const About nothing;
    return about_ ? *about_ : nothing;
  }
  std::shared_ptr<const About> about_;  // shared: a copy allocates no memory
};

}  // namespace pycollective
