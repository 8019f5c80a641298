// How a collective call fails. The bindings turn a Failure into the Python error of its kind.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pycollective {

enum class FailureKind { timeout, mismatch, peer_lost, aborted };

// The text is for people; programs read the rest.
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
  // A rank that leaves in a call aborts its own call, and peers lose the rank.
  FailureKind kind_for_peers;

  // The ranks that are lost or late, whose calls differ, or that aborted the group: their numbers
  // in the group that failed, in ascending order.
  const std::vector<int>& ranks() const { return about().ranks; }
  // A mismatch has the call of each rank, or no call. Other failures have at most one call, which
  // was under way.
  const std::vector<std::string>& calls() const { return about().calls; }
  // The address of each rank, which is empty for a rank of this host. No addresses: all ranks are
  // on this host.
  const std::vector<std::string>& hosts() const { return about().hosts; }
  // The same failure, with the hosts among the addresses of the group's ranks.
  Failure with_hosts(const std::vector<std::string>& addresses) const {
    About known{ranks(), calls(), {}};
    for (int rank : known.ranks) {
      auto place = static_cast<std::size_t>(rank);
      known.hosts.push_back(place < addresses.size() ? addresses[place] : std::string());
    }
    Failure found = *this;
    found.about_ = std::make_shared<const About>(std::move(known));
    return found;
  }

 private:
  struct About {
    std::vector<int> ranks;
    std::vector<std::string> calls, hosts;
  };
  const About& about() const {
    static const About nothing;
    return about_ ? *about_ : nothing;
  }
  std::shared_ptr<const About> about_;  // shared, so that a copy allocates no memory
};

}  // namespace pycollective
