#include "transport/mixed.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "support/tuning.h"
#include "support/waiter.h"

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

  void wait(const std::function<Progress()>& attempt, Clock::time_point deadline,
            const Interrupt& interrupt) override {
    TcpGroup& tcp = group_.tcp_;
    int looks = 0;  // in vain, since the last progress
    auto next_look_up = Clock::now() + kWaitSlice;
    std::uint64_t moved_before = tcp.moved();
    for (Progress progress = attempt();; progress = attempt()) {
      bool interrupted = false;
      if (progress == Progress::blocked) {
        int spins = spins_now();
        bool moved = tcp.moved() != moved_before;
        moved_before = tcp.moved();
        looks = moved ? 0 : looks + 1;
        if (looks <= spins) {
          pause();
          // Bytes that keep coming do not keep a rank from its deadline.
          if (!moved || Clock::now() < next_look_up) continue;
        } else if (looks <= spins + kYields) {
          std::this_thread::yield();
        } else {
          progress = sleep(attempt, next_look_up, &interrupted);
        }
      }
      if (progress == Progress::done) return;
      if (progress == Progress::moved) looks = 0;
      if (interrupted && interrupt) interrupt();  // before what the peers say of theirs
      auto now = Clock::now();
      bool look_up = now >= next_look_up;
      if (look_up || looks > spins_now() + kYields) tcp.read_control();
      if (group_.shm_->has_failed() || tcp.has_failed()) {
        // What has come already may be all that this call needs: then the next one fails.
        while ((progress = attempt()) == Progress::moved) continue;
        if (progress == Progress::done) return;
        if (interrupt) interrupt();
        check();
      }
      if (!look_up) continue;
      next_look_up = now + kWaitSlice;
      tcp.say_what_i_call();
      if (interrupt) interrupt();
      group_.shm_->look_up();
      if (now >= deadline) time_out();
    }
  }

  void check() override {
    shm_.check();
    tcp_.check();
  }

  void fail(FailureKind kind, const std::string& message) noexcept override {
    group_.fail(kind, message);
  }

 private:
  // For what the last look in vain was.
  enum class Wanted { nothing, memory, tcp };

  bool waits_for_tcp() const { return wanted_ == Wanted::tcp || group_.tcp_.sending(); }
  bool waits_for_memory() const {
    return wanted_ == Wanted::memory || group_.shm_->sending() || !waits_for_tcp();
  }

  // A look at a connection is a system call.
  int spins_now() const {
    if (group_.in_crowd()) return kCrowdedSpins;
    return waits_for_tcp() ? kTcpSpins : kSpins;
  }

  Progress sleep(const std::function<Progress()>& attempt, Clock::time_point until,
                 bool* interrupted) {
    auto limit = until - Clock::now();
    if (limit <= Clock::duration::zero()) return Progress::blocked;
    if (!waits_for_memory()) {
      *interrupted = !group_.tcp_.sleep(limit);
      return Progress::blocked;
    }
    WaitQueue& queue = group_.shm_->queue();
    std::uint32_t heard = queue.announce_sleep();
    Progress progress = attempt();
    if (progress == Progress::blocked && !group_.shm_->has_failed()) {
      // The bell does not ring for connections.
      futex_wait(queue.bell, heard,
                 waits_for_tcp() ? std::min<Clock::duration>(limit, kMixedSlice) : limit);
    }
    queue.end_sleep();
    return progress;
  }

  void time_out() {
    group_.fail(FailureKind::timeout, describe_timeout(group_, rank_, awaited()));
    check();
  }

  MixedGroup& group_;
  Endpoint& shm_;
  Endpoint& tcp_;
  int rank_;
  Wanted wanted_ = Wanted::nothing;
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
  shm_->name_ranks(std::move(here));
  endpoint_ = std::make_unique<MixedEndpoint>(*this, rank);
}

MixedGroup::~MixedGroup() { leave(tcp_.rank()); }

Endpoint& MixedGroup::endpoint(int rank) {
  if (rank != tcp_.rank()) throw std::logic_error("this process has another rank of the group");
  return *endpoint_;
}

void MixedGroup::fail(FailureKind kind, const std::string& message) noexcept {
  // The first reason is everybody's.
  std::optional<Failure> before = failure();
  const std::string reason = before ? before->what() : message;
  if (before) kind = before->kind;
  shm_->fail(kind, reason);
  tcp_.fail(kind, reason);
}

std::optional<Failure> MixedGroup::failure() const {
  std::optional<Failure> found = shm_->failure();
  return found ? found : tcp_.failure();
}

void MixedGroup::leave(int rank) noexcept {
  // Other hosts may not have heard what came through memory, nor this host what came over TCP.
  if (auto failed = shm_->failure()) tcp_.fail(failed->kind, failed->what());
  tcp_.leave(rank);
  if (auto failed = tcp_.failure()) shm_->fail(failed->kind, failed->what());
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

}  // namespace pycollective
