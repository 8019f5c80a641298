// Shared parts of the verifier and the simulator for many ranks. Both walk through the steps of all
// ranks in one thread, each rank as far as it can go. Memory holds only the current state, not the
// plans.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "schedule/step.h"

namespace pycollective {

// Called regularly with the share of the steps that is done. An exception from it ends the walk.
using Watch = std::function<void(double)>;

// The position of each rank in its steps.
class Walk {
 public:
  Walk(const Algorithm& algorithm, int size, int repeats, const Watch& watch)
      : algorithm_(algorithm), size_(size), repeats_(repeats), watch_(watch) {
    ranks_.resize(static_cast<std::size_t>(size));
    blocks_.resize(block_of(size - 1) + 1);
    for (int r = 0; r < size; ++r) {
      begin(r);
      wake(r);
    }
  }

  // Returns true if a rank may be able to advance. Before the walk moves to the next block, the
  // ranks of two neighbouring blocks advance as far as they can. Their data then stays in the
  // second-level cache.
  bool any() const { return queued_ > 0; }
  int pop() {
    while (blocks_[block_].first < 0 && blocks_[after(block_)].first < 0) block_ = after(block_);
    Block& block = blocks_[blocks_[block_].first < 0 ? after(block_) : block_];
    int r = block.first;
    block.first = of(r).next;
    --queued_;
    of(r).queued = false;
    return r;
  }
  void wake(int r) {
    if (of(r).queued) return;
    of(r).queued = true;
    of(r).waits_for = -1;
    of(r).next = -1;
    if (queued_++ == 0) block_ = block_of(r);
    Block& block = blocks_[block_of(r)];
    (block.first < 0 ? block.first : of(block.last).next) = r;
    block.last = r;
  }
  // Rank r can advance when `peer` sends to it or reads from it.
  void wait(int r, int peer) { of(r).waits_for = peer; }
  void wake_if_waiting(int r, int peer) {
    if (of(r).waits_for == peer) wake(r);
  }

  bool done(int r) const { return of(r).step == nullptr; }
  int number(int r) const { return of(r).number; }
  const Step& step(int r) const { return *of(r).step; }
  void advance(int r) {
    of(r).step = of(r).steps.next();
    ++of(r).number;
    if ((++walked_ & kReportMask) == 0 && watch_) {
      if (total_ == 0) total_ = estimate();
      watch_(std::min(1.0, static_cast<double>(walked_) / total_));
    }
  }
  // Restarts the rank's steps, and returns true, unless the rank has made all repeats.
  bool repeat(int r) {
    if (of(r).repeated + 1 >= repeats_) return false;
    ++of(r).repeated;
    begin(r);
    return true;
  }
  int repeated(int r) const { return of(r).repeated; }
  std::uint64_t walked() const { return walked_; }

  // Describes the ranks that wait, and their steps; empty if all ranks are done.
  std::string waiting() const {
    std::string text;
    for (int r = 0; r < size_; ++r) {
      if (done(r)) continue;
      if (!text.empty()) text += "; ";
      if (text.size() > 300) return text + "…";
      text += "rank " + std::to_string(r) + " waits in step " + std::to_string(number(r)) + " (" +
              to_string(step(r)) + ")";
    }
    return text;
  }

 private:
  static constexpr std::uint64_t kReportMask = (1 << 20) - 1;
  static constexpr int kCounted = 16;
  static constexpr int kBlock = 128;
  struct Rank {
    Steps steps;
    const Step* step = nullptr;  // the next step; nullptr when all are done
    int number = 0, repeated = 0, waits_for = -1;
    bool queued = false;
    int next = -1;  // the rank after this one in the queue of its block; -1: none
  };
  // A queue of the ranks that can advance.
  struct Block {
    int first = -1, last = -1;
  };
  static std::size_t block_of(int r) { return static_cast<std::size_t>(r / kBlock); }
  std::size_t after(std::size_t block) const { return block + 1 == blocks_.size() ? 0 : block + 1; }
  void begin(int r) {
    of(r).steps = algorithm_.steps(r, size_);
    of(r).step = of(r).steps.next();
    of(r).number = 0;
  }

  // Estimates the number of all ranks' steps: counts those of the root and of a sample of the other
  // ranks.
  double estimate() const {
    auto count = [&](int r) {
      double steps = 0;
      for ([[maybe_unused]] const Step& step : algorithm_.steps(r, size_)) ++steps;
      return steps;
    };
    double others = size_ - 1, counted = std::min(kCounted, size_ - 1), sum = 0;
    for (int i = 0; i < counted; ++i) {
      sum += count(1 + static_cast<int>((i + 0.5) / counted * others));
    }
    return repeats_ * (count(0) + (counted ? sum / counted * others : 0));
  }

  Rank& of(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  const Rank& of(int r) const { return ranks_[static_cast<std::size_t>(r)]; }

  const Algorithm& algorithm_;
  int size_, repeats_;
  const Watch& watch_;
  std::vector<Rank> ranks_;
  std::vector<Block> blocks_;
  std::size_t block_ = 0, queued_ = 0;
  std::uint64_t walked_ = 0;
  double total_ = 0;  // estimated number of steps; 0: not estimated yet
};

// Messages in flight, in order for each ordered pair of ranks. Each receiver has a mailbox for one
// message, which suffices for a ring; further messages are in a hash table.
template <class Message>
class Mailboxes {
 public:
  explicit Mailboxes(int size) : boxes_(static_cast<std::size_t>(size)), entries_(16) {}

  void put(int from, int to, const Message& message) {
    Box& box = boxes_[static_cast<std::size_t>(to)];
    ++count_;
    if (box.from < 0 && box.others == 0) {
      box.from = from;
      box.message = message;
      return;
    }
    ++box.others;
    put_other(key(from, to), message);
  }

  // Returns false if there is no message.
  bool take(int from, int to, Message* message) {
    Box& box = boxes_[static_cast<std::size_t>(to)];
    if (box.from == from) {  // older than the pair's messages in the table
      box.from = -1;
      *message = box.message;
    } else if (box.others == 0 || !take_other(key(from, to), message)) {
      return false;
    } else {
      --box.others;
    }
    --count_;
    return true;
  }

  bool has(int from, int to) const {
    const Box& box = boxes_[static_cast<std::size_t>(to)];
    if (box.from == from) return true;
    return box.others != 0 && entries_[find(key(from, to))].key != kFree;
  }

  std::size_t count() const { return count_; }

  // Returns the ranks of any message in flight.
  void any(int* from, int* to) const {
    for (std::size_t r = 0; r < boxes_.size(); ++r) {
      if (boxes_[r].from >= 0) *from = boxes_[r].from, *to = static_cast<int>(r);
    }
    for (const Entry& entry : entries_) {
      if (entry.key == kFree) continue;
      *from = static_cast<int>(entry.key >> 32);
      *to = static_cast<int>(entry.key & 0xffffffff);
    }
  }

 private:
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  struct Box {
    int from = -1;
    std::uint32_t others = 0;  // messages to this rank in the table
    Message message;
  };
  struct Entry {
    std::uint64_t key = kFree;
    std::uint32_t first = 0, last = 0;  // a list of the pair's messages
  };
  struct Node {
    Message message;
    std::uint32_t next;
  };

  static std::uint64_t key(int from, int to) {
    return static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint32_t>(to);
  }
  std::size_t home(std::uint64_t key) const {
    return static_cast<std::size_t>(key * 0x9e3779b97f4a7c15 >> 20) & (entries_.size() - 1);
  }
  // Returns the pair's entry, or the free entry for it (linear probing).
  std::size_t find(std::uint64_t key) const {
    std::size_t i = home(key);
    while (entries_[i].key != kFree && entries_[i].key != key) i = (i + 1) & (entries_.size() - 1);
    return i;
  }

  void put_other(std::uint64_t key, const Message& message) {
    std::uint32_t node = free_;
    if (node == kNone) {
      node = static_cast<std::uint32_t>(nodes_.size());
      nodes_.push_back({message, kNone});
    } else {
      free_ = nodes_[node].next;
      nodes_[node] = {message, kNone};
    }
    std::size_t i = find(key);
    if (entries_[i].key == key) {
      nodes_[entries_[i].last].next = node;
      entries_[i].last = node;
      return;
    }
    entries_[i] = {key, node, node};
    if (++pairs_ * 4 > entries_.size() * 3) grow();
  }

  bool take_other(std::uint64_t key, Message* message) {
    std::size_t i = find(key);
    if (entries_[i].key == kFree) return false;
    std::uint32_t node = entries_[i].first;
    *message = nodes_[node].message;
    entries_[i].first = nodes_[node].next;
    nodes_[node].next = free_;
    free_ = node;
    if (entries_[i].first == kNone) erase(i);
    return true;
  }

  // Closes the gap, so that linear probing still finds the entries after it.
  void erase(std::size_t gap) {
    --pairs_;
    std::size_t mask = entries_.size() - 1;
    for (std::size_t i = (gap + 1) & mask; entries_[i].key != kFree; i = (i + 1) & mask) {
      std::size_t wanted = home(entries_[i].key);
      if (((i - wanted) & mask) < ((i - gap) & mask)) continue;
      entries_[gap] = entries_[i];
      gap = i;
    }
    entries_[gap].key = kFree;
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.key != kFree) entries_[find(entry.key)] = entry;
    }
  }

  std::vector<Box> boxes_;
  std::vector<Entry> entries_;
  std::vector<Node> nodes_;
  std::uint32_t free_ = kNone;
  std::size_t pairs_ = 0, count_ = 0;
};

}  // namespace pycollective
