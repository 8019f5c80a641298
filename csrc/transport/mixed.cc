#include "transport/mixed.h"

#include <stdexcept>
#include <utility>

namespace pycollective {

class MixedEndpoint final : public Endpoint {
 public:
  MixedEndpoint(MixedGroup& group, int rank)
      : group_(group),
        shm_(group.shm_->endpoint(group.place(rank))),
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
    int place = group_.place(peer);
    return place < 0 ? tcp_.try_send(peer, data, bytes) : shm_.try_send(place, data, bytes);
  }

  Piece try_receive(int peer, std::size_t remaining) override {
    return try_receive_into(peer, remaining, nullptr);
  }

  Piece try_receive_into(int peer, std::size_t remaining, void* target) override {
    int place = group_.place(peer);
    Piece piece = place < 0 ? tcp_.try_receive_into(peer, remaining, target)
                            : shm_.try_receive_into(place, remaining, target);
    wanted_ = piece.data ? Wanted::nothing : place < 0 ? Wanted::tcp : Wanted::memory;
    return piece;
  }

  void release(int peer) override {
    int place = group_.place(peer);
    place < 0 ? tcp_.release(peer) : shm_.release(place);
  }

  std::uint64_t moved() const override { return shm_.moved() + tcp_.moved(); }

  void progress() override {
    shm_.progress();
    tcp_.progress();
  }

  bool flushed() override { return shm_.flushed() && tcp_.flushed(); }
  bool flushed_to(int peer) override {
    int place = group_.place(peer);
    return place < 0 ? tcp_.flushed_to(peer) : shm_.flushed_to(place);
  }

  void check() override {
    tcp_.check();
    shm_.check();
  }

  CallRecord call() const override { return tcp_.call(); }
  void fail(const Failure& failure) noexcept override { group_.fail(failure); }

  // Sleeper ------------------------------------------------------------------------------------

  SpinLimit spin_limit() override {
    return waits_for_tcp() ? socket_spin_limit(group_.in_crowd())
                           : memory_spin_limit(group_.in_crowd());
  }

  void announce_sleep() override {
    in_poll_ = waits_for_tcp();
    announced_ = waits_for_memory();
    if (announced_ && in_poll_) group_.shm_->set_in_poll(true);
    if (announced_) shm_.announce_sleep();
  }

  bool sleep(Clock::duration limit) override {
    // The poll after the announcement may have changed what this rank waits for.
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
  // The transport of the last message that had not come.
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
  // To the peers of this host, that this rank sleeps; and whether it does in a poll().
  bool announced_ = false;
  bool in_poll_ = false;
};

MixedGroup::MixedGroup(int rank, const std::vector<std::vector<int>>& streams,
                       const std::vector<int>& pipes, std::shared_ptr<ShmGroup> memory,
                       std::vector<int> hosts)
    : shm_(std::move(memory)),
      hosts_(std::move(hosts)),
      places_(hosts_.size(), -1),
      tcp_(rank, streams, pipes, /*others=*/true) {
  if (hosts_.size() != streams.size()) throw std::invalid_argument("a host for every rank");
  std::vector<int> here;
  for (int r = 0; r < size(); ++r) {
    auto place = static_cast<std::size_t>(r);
    bool local = hosts_[place] == hosts_[static_cast<std::size_t>(rank)];
    if (!local && streams[place].size() < 2) {
      throw std::invalid_argument("a rank of another host needs a connection for messages");
    }
    if (!local) continue;
    places_[place] = static_cast<int>(here.size());
    here.push_back(r);
  }
  if (shm_->size() != static_cast<int>(here.size())) {
    throw std::invalid_argument("the memory is of another number of ranks than this host has");
  }
  shm_->name_ranks(here, tcp_.addresses());
  // The calls of a rank of this host are known through the memory alone.
  tcp_.also_ask([memory = shm_, places = places_](int peer) {
    const int place = places[static_cast<std::size_t>(peer)];
    return place < 0 ? std::string() : memory->describe(place);
  });
  endpoint_ = std::make_unique<MixedEndpoint>(*this, rank);
  shm_->end_polls_by([this, here](int place) { tcp_.wake(here[static_cast<std::size_t>(place)]); });
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
  // The first reason is everybody's.
  const Failure reason = this->failure().value_or(failure);
  shm_->fail(reason);
  tcp_.fail(reason);
}

// What this rank knows of its own end stands in the failure over TCP.
std::optional<Failure> MixedGroup::failure() const {
  std::optional<Failure> found = tcp_.failure();
  return found ? found : shm_->failure();
}

void MixedGroup::leave(int rank) noexcept {
  // Other hosts may not have heard what came through memory, nor this host what came over TCP.
  if (auto failed = shm_->failure()) tcp_.fail(*failed);
  tcp_.leave(rank);
  if (auto failed = tcp_.failure()) shm_->fail(*failed);
  shm_->leave(place(rank));
}

void MixedGroup::abandon() noexcept { tcp_.abandon(); }

std::string_view MixedGroup::transport() const {
  return one_host() ? "shared memory" : "shared memory and TCP";
}

std::uint64_t MixedGroup::calls(int rank) const {
  return place(rank) < 0 ? tcp_.calls(rank) : shm_->calls(place(rank));
}

std::string MixedGroup::describe(int rank) const {
  return place(rank) < 0 ? tcp_.describe(rank) : shm_->describe(place(rank));
}

void MixedGroup::call_ranks(const std::vector<std::string>& titles) {
  tcp_.call_ranks(titles);
  std::vector<std::string> here;
  for (int r = 0; r < size(); ++r) {
    if (place(r) >= 0) here.push_back(titles[static_cast<std::size_t>(r)]);
  }
  shm_->call_ranks(here);
}

}  // namespace pycollective
