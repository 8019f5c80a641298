#include "transport/group.h"

#include <algorithm>

#include "support/tuning.h"

namespace pycollective {

std::string Group::describe_ranks() const {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    if (r) text += "; ";
    text += describe(r);
  }
  return text;
}

TitledRank Group::titled(int rank) const {
  const int known_as = number(rank);
  const auto place = static_cast<std::size_t>(rank);
  std::lock_guard lock(titles_mutex_);
  return {known_as, place < titles_.size() ? titles_[place] : "rank " + std::to_string(known_as)};
}

void Group::set_titles(const std::vector<std::string>& titles) {
  std::lock_guard lock(titles_mutex_);
  titles_ = titles;
}

namespace {

constexpr std::size_t kMaxNamed = 8;  // ranks that a text names

}  // namespace

std::string list_ranks(const Group& group, const std::vector<int>& ranks) {
  if (ranks.size() == 1) return group.title(ranks[0]);
  std::string text = "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMaxNamed); ++i) {
    if (i) text += ", ";
    text += std::to_string(ranks[i]);
  }
  if (ranks.size() > kMaxNamed)
    text += " and " + std::to_string(ranks.size() - kMaxNamed) + " more";
  return text;
}

std::string describe_rank(const std::string& title, bool busy, const CallRecord& call,
                          const std::string& message) {
  std::string text = title;
  if (!message.empty()) text += " waits in " + message + " and";
  if (busy) return text + " is in " + call.describe();
  if (call.number == 0) return text + " has made no collective call yet";
  return text + " has finished " + call.describe() + " and made no collective call since";
}

void Group::close(int rank) {
  leave(rank);
  Endpoint& own = endpoint(rank);
  std::optional<Failure> failed = failure();
  if (!failed || failed->kind != FailureKind::mismatch || own.is_reported()) return;
  own.mark_reported();
  throw *failed;
}

void Group::fail_as(const Group& whole, const std::vector<int>& members) {
  if (std::optional<Failure> failed = whole.failure()) fail(failure_for_part(*failed, members));
}

Failure failure_for_part(const Failure& failure, const std::vector<int>& members) {
  const std::vector<int>& named = failure.ranks();
  const bool has_call_of_each =
      failure.kind == FailureKind::mismatch && failure.calls().size() == named.size();
  std::vector<int> ranks;
  std::vector<std::string> calls;
  for (std::size_t r = 0; r < members.size(); ++r) {
    auto found = std::find(named.begin(), named.end(), members[r]);
    if (found == named.end()) continue;
    ranks.push_back(static_cast<int>(r));
    if (has_call_of_each) {
      calls.push_back(failure.calls()[static_cast<std::size_t>(found - named.begin())]);
    }
  }
  if (failure.kind != FailureKind::mismatch) calls = failure.calls();
  return {failure.kind, std::string("in the group that this one was split from: ") + failure.what(),
          std::move(ranks), std::move(calls)};
}

Failure timeout_failure(Group& group, int rank, const std::vector<int>& awaited,
                        const CallRecord& call) {
  std::vector<int> absent, stopped;
  const std::vector<int> silent = group.silent(kSilence);
  for (int r = 0; r < group.size(); ++r) {
    const bool is_silent = std::find(silent.begin(), silent.end(), r) != silent.end();
    if (r != rank && group.calls(r) < group.calls(rank)) {
      // A rank with heartbeats waits in an earlier call for the silent rank.
      if (is_silent || silent.empty()) absent.push_back(r);
    } else if (is_silent) {
      stopped.push_back(r);
    }
  }
  std::string text = group.title(rank) + " waited until its deadline";
  if (!absent.empty()) {
    text += " for " + list_ranks(group, absent) +
            (absent.size() == 1 ? ", which has" : ", which have") + " not entered this call";
  }
  if (!stopped.empty()) {
    text += (absent.empty() ? " for " : ", and for ") + list_ranks(group, stopped) +
            (stopped.size() == 1 ? ", which is" : ", which are") +
            " in this call but silent (is the process stopped or swapped out?)";
  }
  if (absent.empty() && stopped.empty() && !awaited.empty()) {
    text += " for data of " + list_ranks(group, awaited) +
            ", although all ranks have entered this call";
  }
  std::vector<int> late = absent;
  late.insert(late.end(), stopped.begin(), stopped.end());
  if (late.empty()) late = awaited;
  std::sort(late.begin(), late.end());
  late.erase(std::unique(late.begin(), late.end()), late.end());
  return {FailureKind::timeout,
          text + ". " + group.describe_ranks(),
          std::move(late),
          {call.describe()}};
}

Failure peer_left_failure(const TitledRank& peer, std::uint64_t calls, const TitledRank& me,
                          const CallRecord& call) {
  return {FailureKind::peer_lost,
          peer.title + " has left the group after " + std::to_string(calls) +
              (calls == 1 ? " call" : " calls") + ", while " + me.title + " is in " +
              call.describe(),
          {peer.rank},
          {call.describe()}};
}

KnownCalls known_calls(const CallHistory& history) {
  KnownCalls calls;
  for (std::uint64_t n = history.number(); history.has(n); --n) {
    calls.emplace_back(history.record_of(n));
  }
  return calls;
}

Difference find_difference(const KnownCalls& mine, const KnownCalls& theirs) {
  Difference found;
  std::uint64_t agreed = 0;  // the last call with equal fingerprints
  for (const KnownCall& call : mine) {
    for (const KnownCall& other : theirs) {
      if (call.number != other.number) continue;
      if (call.fingerprint == other.fingerprint) {
        agreed = std::max(agreed, call.number);
      } else if (!found.mine || call.number < found.mine->number) {
        found.mine = &call;
        found.theirs = &other;
      }
    }
  }
  found.is_first = found.mine && agreed + 1 == found.mine->number;
  return found;
}

Failure mismatch_failure(const TitledRank& me, const KnownCalls& mine, const TitledRank& peer,
                         const KnownCalls& theirs) {
  if (peer.rank < me.rank) return mismatch_failure(peer, theirs, me, mine);
  Difference found = find_difference(mine, theirs);
  auto last_of = [](const KnownCalls& calls) {
    auto earlier = [](const KnownCall& a, const KnownCall& b) { return a.number < b.number; };
    auto last = std::max_element(calls.begin(), calls.end(), earlier);
    return last == calls.end() ? std::string("an unknown call") : last->text;
  };
  std::string my_call = found.mine ? found.mine->text : last_of(mine),
              their_call = found.mine ? found.theirs->text : last_of(theirs);
  std::string text = "ranks made calls that do not belong together: " + me.title + " called " +
                     my_call + ", " + peer.title + " called " + their_call + ". ";
  if (my_call == their_call) {
    text += found.mine && !found.is_first
                ? "These two are equal: an earlier call differed, and is not recorded any more. "
                : "They differ in something that is not shown, such as counts, or the steps of an "
                  "algorithm. ";
  }
  text +=
      "All ranks must make the same calls in the same order, with equal shape, dtype, op, "
      "algorithm and root.";
  return {FailureKind::mismatch,
          text,
          {me.rank, peer.rank},
          {std::move(my_call), std::move(their_call)}};
}

}  // namespace pycollective
