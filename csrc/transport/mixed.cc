#include "transport/mixed.h"

#include <stdexcept>
#include <utility>

namespace pycollective {

class MixedEndpoint final : public Endpoint {
 public:
  MixedEndpoint(MixedGroup& group, int rank)
      : group_(group),
        shm_(group.shm_->endpoint(group.local_rank(rank))),
        tcp_(group.tcp_.endpoint(rank)),
        rank_(rank) {}

  int rank() const override { return rank_; }

  void enter(const CallRecord& call) override {
    tcp_.enter(call);
    try {
      shm_.enter(call);
    } catch (...) {
      tcp_.leave();
      throw;
    }
    wanted_ = Wanted::nothing;
  }

  void leave() noexcept override {
    shm_.leave();
    tcp_.leave();
  }

  Board* board() override { return group_.one_host() ? shm_.board() : nullptr; }

  bool try_send(int peer, const void* data, std::size_t bytes) override {
    int local = group_.local_rank(peer);
    return local < 0 ? tcp_.try_send(peer, data, bytes) : shm_.try_send(local, data, bytes);
  }

  Piece try_receive(int peer, std::size_t remaining) override {
    return try_receive_into(peer, remaining, nullptr);
  }

  Piece try_receive_into(int peer, std::size_t remaining, void* target) override {
    int local = group_.local_rank(peer);
    Piece piece = local < 0 ? tcp_.try_receive_into(peer, remaining, target)
                            : shm_.try_receive_into(local, remaining, target);
    wanted_ = piece.data ? Wanted::nothing : local < 0 ? Wanted::tcp : Wanted::memory;
    return piece;
  }

  void release(int peer) override {
    int local = group_.local_rank(peer);
    local < 0 ? tcp_.release(peer) : shm_.release(local);
  }

  std::uint64_t moved() const override { return shm_.moved() + tcp_.moved(); }

  void progress() override {
    shm_.progress();
    tcp_.progress();
  }

  bool flushed() override { return shm_.flushed() && tcp_.flushed(); }
  bool flushed_to(int peer) override {
    int local = group_.local_rank(peer);
    return local < 0 ? tcp_.flushed_to(peer) : shm_.flushed_to(local);
  }

  void check() override {
    tcp_.check();
    shm_.check();
  }

  CallRecord call() const override { return tcp_.call(); }
  void fail(const Failure& failure) noexcept override { group_.fail(failure); }

  // Sleeper ------------------------------------------------------------------------------------

  SpinLimit spin_limit() override {
    return waits_for_tcp() ? socket_spin_limit(group_.is_oversubscribed())
                           : memory_spin_limit(group_.is_oversubscribed());
  }

  void announce_sleep() override {
    in_poll_ = waits_for_tcp();
    announced_ = waits_for_memory();
    if (announced_ && in_poll_) group_.shm_->set_in_poll(true);
    if (announced_) shm_.announce_sleep();
  }

  bool sleep(Clock::duration limit) override {
    // The poll after announce_sleep() may have changed the transport for which this rank waits.
    if (waits_for_memory() != announced_ || waits_for_tcp() != in_poll_) return true;
    if (!in_poll_) return shm_.sleep(limit);
    return (announced_ && shm_.has_failed()) || tcp_.sleep(limit);
  }

  void end_sleep() override {
    if (announced_) shm_.end_sleep();
    if (announced_ && in_poll_) group_.shm_->set_in_poll(false);
  }

  bool has_failed() override { return shm_.has_failed() || tcp_.has_failed(); }

  void check_peers() override {
    tcp_.check_peers();
    shm_.check_peers();
  }

 private:
  // The transport of the last message that had not arrived.
  enum class Wanted { nothing, memory, tcp };

  Group& group() override { return group_; }
  bool waits_for_tcp() { return wanted_ == Wanted::tcp || !tcp_.flushed(); }
  bool waits_for_memory() {
    return wanted_ == Wanted::memory || !shm_.flushed() || !waits_for_tcp();
  }

  MixedGroup& group_;
  Endpoint& shm_;
  Endpoint& tcp_;
  int rank_;
  Wanted wanted_ = Wanted::nothing;
  // True if this rank has announced its sleep in the memory, and if it sleeps in a poll().
  bool announced_ = false;
  bool in_poll_ = false;
};

MixedGroup::MixedGroup(int rank, const std::vector<std::vector<int>>& streams,
                       const std::vector<int>& pipes, std::shared_ptr<ShmGroup> memory,
                       std::vector<int> hosts)
    : shm_(std::move(memory)),
      hosts_(std::move(hosts)),
      local_ranks_(hosts_.size(), -1),
      tcp_(rank, streams, pipes, /*others=*/true) {
  if (hosts_.size() != streams.size())
    throw std::invalid_argument("`hosts` must have a number for every rank");
  std::vector<int> here;
  for (int r = 0; r < size(); ++r) {
    auto index = static_cast<std::size_t>(r);
    bool local = hosts_[index] == hosts_[static_cast<std::size_t>(rank)];
    if (!local && streams[index].size() < 2) {
      throw std::invalid_argument("rank " + std::to_string(r) +
                                  " is on another host and needs a connection for messages");
    }
    if (!local) continue;
    local_ranks_[index] = static_cast<int>(here.size());
    here.push_back(r);
  }
  if (shm_->size() != static_cast<int>(here.size())) {
    throw std::invalid_argument("the memory has " + std::to_string(shm_->size()) +
                                " ranks, and this host has " + std::to_string(here.size()));
  }
  shm_->name_ranks(here, tcp_.addresses());
  // Ranks of this host announce their calls in the memory only.
  tcp_.set_describe([memory = shm_, local_ranks = local_ranks_](int peer) {
    const int local = local_ranks[static_cast<std::size_t>(peer)];
    return local < 0 ? std::string() : memory->describe(local);
  });
  endpoint_ = std::make_unique<MixedEndpoint>(*this, rank);
  shm_->end_polls_by([this, here](int local) { tcp_.wake(here[static_cast<std::size_t>(local)]); });
}

MixedGroup::~MixedGroup() {
  leave(tcp_.rank());
  shm_->end_polls_by({});
}

Endpoint& MixedGroup::endpoint(int rank) {
  if (rank != tcp_.rank()) throw std::logic_error("this process has another rank of the group");
  return *endpoint_;
}

void MixedGroup::fail(const Failure& failure) noexcept {
  // Both transports report the first failure.
  const Failure reason = this->failure().value_or(failure);
  shm_->fail(reason);
  tcp_.fail(reason);
}

// The failure over TCP comes first: it has this rank's own reason.
std::optional<Failure> MixedGroup::failure() const {
  std::optional<Failure> found = tcp_.failure();
  return found ? found : shm_->failure();
}

void MixedGroup::leave(int rank) noexcept {
  // Passes a failure of one transport to the ranks of the other one.
  if (auto failed = shm_->failure()) tcp_.fail(*failed);
  tcp_.leave(rank);
  if (auto failed = tcp_.failure()) shm_->fail(*failed);
  shm_->leave(local_rank(rank));
}

void MixedGroup::abandon() noexcept { tcp_.abandon(); }

std::string_view MixedGroup::transport() const {
  return one_host() ? "shared memory" : "shared memory and TCP";
}

std::uint64_t MixedGroup::calls(int rank) const {
  return local_rank(rank) < 0 ? tcp_.calls(rank) : shm_->calls(local_rank(rank));
}

std::string MixedGroup::describe(int rank) const {
  return local_rank(rank) < 0 ? tcp_.describe(rank) : shm_->describe(local_rank(rank));
}

void MixedGroup::set_titles(const std::vector<std::string>& titles) {
  tcp_.set_titles(titles);
  std::vector<std::string> here;
  for (int r = 0; r < size(); ++r) {
    if (local_rank(r) >= 0) here.push_back(titles[static_cast<std::size_t>(r)]);
  }
  shm_->set_titles(here);
}

}  // namespace pycollective
