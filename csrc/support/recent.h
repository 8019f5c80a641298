// A cache for a program that repeats itself. A new entry replaces the oldest one.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace pycollective {

template <class Entry, std::size_t N>
class Recent {
 public:
  // Returns an entry that matches, nullptr if there is none. Tries the last result first.
  template <class Matches>
  const Entry* find(Matches&& matches) {
    if (entries_[last_] && matches(*entries_[last_])) return &*entries_[last_];
    for (std::size_t i = 0; i < N && entries_[i]; ++i) {
      if (!matches(*entries_[i])) continue;
      last_ = i;
      return &*entries_[i];
    }
    return nullptr;
  }

  const Entry* add(Entry entry) {
    last_ = std::exchange(oldest_, (oldest_ + 1) % N);
    return &entries_[last_].emplace(std::move(entry));
  }

 private:
  std::array<std::optional<Entry>, N> entries_;  // the first ones, before all are in use
  std::size_t last_ = 0, oldest_ = 0;
};

}  // namespace pycollective
