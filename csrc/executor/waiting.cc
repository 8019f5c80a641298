#include "executor/waiting.h"

#include <algorithm>
#include <cstdio>

#include "support/tuning.h"

namespace pycollective {
namespace {

constexpr std::size_t kMaxDescribed = 8;  // ranks that a warning describes

}  // namespace

std::string in_seconds(Clock::duration duration) {
  char text[32];
  double seconds = std::chrono::duration<double>(duration).count();
  std::snprintf(text, sizeof text, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

bool is_long(const Warning& warning, Clock::time_point began, Clock::time_point deadline,
             Clock::time_point now) {
  return warning.tell && now - began >= std::min(warning.after, (deadline - began) / 2);
}

void LongWait::check(const std::vector<int>& awaited, bool moved) {
  if (waiting_.interrupt) waiting_.interrupt();
  auto now = Clock::now();
  if (moved) since_ = now;
  if (now - last_heartbeat_ >= kHeartbeatInterval) {
    last_heartbeat_ = now;
    group_.send_heartbeat();
  }
  if (now >= waiting_.deadline) return;  // the call is about to fail
  // Progress restarts the wait. The warning then comes after half of the whole timeout, not after
  // half of the remaining time.
  if (warned_ || !is_long(warning_, since_, since_ + (waiting_.deadline - waiting_.began), now))
    return;
  warned_ = true;
  std::vector<int> absent, present;
  std::uint64_t number = group_.calls(rank_);
  for (int r = 0; r < group_.size(); ++r) {
    if (r != rank_ && group_.calls(r) < number) absent.push_back(r);
  }
  for (int r : awaited) {
    if (std::find(absent.begin(), absent.end(), r) == absent.end()) present.push_back(r);
  }
  std::string text =
      group_.describe(rank_) + " and has waited " + in_seconds(now - since_) + " for ";
  if (absent.empty()) {
    text += present.empty() ? "the other ranks" : list_ranks(group_, present);
    text += ", although all ranks have entered this call";
  } else {
    text += list_ranks(group_, absent) + " to enter this call: ";
    for (std::size_t i = 0; i < std::min(absent.size(), kMaxDescribed); ++i) {
      if (i) text += "; ";
      text += group_.describe(absent[i]);
    }
    if (!present.empty()) {
      text += ". In this call it waits for data of " + list_ranks(group_, present);
    }
  }
  warning_.tell(text + ". It gives up in " + in_seconds(waiting_.deadline - now) + ".");
}

}  // namespace pycollective
