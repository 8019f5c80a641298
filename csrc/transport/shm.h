// Ranks that are processes of one host, through shared memory.
//
// Every ordered pair of ranks has a channel: a ring of kShmSlots slots of kShmSlotBytes each. A
// sender copies its message in, part by part as there is room; the receiver reduces or copies
// straight out of the ring. Small messages travel in the slot's own cache lines. Whoever waits
// sleeps on a futex in the shared memory. Whoever holds the descriptor of the memory may join, and
// nobody else.
//
// A failure is written into the memory, so that all ranks hear of it: a rank that gives up writes
// its own; for one that is killed, whoever watches the processes (`pycollective run`) writes it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "support/shared_memory.h"
#include "transport/group.h"

namespace pycollective {

class ShmGroup final : public Group {
 public:
  // Makes the memory of a group of `size` ranks.
  static std::shared_ptr<ShmGroup> create(int size);
  // Maps the memory behind a descriptor. Throws std::invalid_argument if no group is in it.
  static std::shared_ptr<ShmGroup> open(int descriptor);
  ~ShmGroup() override;

  int size() const override;
  int descriptor() const { return memory_.descriptor(); }
  // Takes the place of a rank; throws std::invalid_argument if it is taken or there is none.
  void join(int rank);
  void leave(int rank) noexcept override;
  void abandon() noexcept override { rank_ = -1; }
  std::string_view transport() const override { return "shared memory"; }
  // A process that is lost to another group is lost to this one as well.
  void follow(std::shared_ptr<ShmGroup> other) { followed_ = std::move(other); }
  // Whether the rank has joined and not left.
  bool is_in(int rank) const;

  Endpoint& endpoint(int rank) override;
  void fail(FailureKind kind, const std::string& message) noexcept override;
  std::optional<Failure> failure() const override;
  std::shared_ptr<Pipes> pipes(int rank) override;
  bool has_left(int rank) const override;
  std::string describe_ranks() const override;

 private:
  friend class ShmEndpoint;
  struct Header;
  struct RankState;
  struct Channel;

  explicit ShmGroup(SharedMemory memory);
  static std::size_t bytes_for(int size);
  Header& header() const;
  RankState& state(int rank) const;
  Channel& channel(int from, int to) const;
  std::byte* slots(int from, int to) const;
  CallRecord call_of(int rank, std::uint64_t number) const;
  void check() const;

  SharedMemory memory_;
  int spins_;
  std::unique_ptr<Endpoint> endpoint_;  // of the rank that this process has
  int rank_ = -1;
  std::shared_ptr<ShmGroup> followed_;
};

}  // namespace pycollective
