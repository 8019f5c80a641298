#include "executor/measure.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>

#include "algorithms/algorithms.h"
#include "executor/communicator.h"
#include "transport/thread.h"

namespace pycollective {
namespace {

Clock::time_point in_a_minute() { return Clock::now() + std::chrono::minutes(1); }

void wait_for(const std::atomic<unsigned>& counter, unsigned value, int spins = 1000) {
  Clock::time_point deadline;
  for (int polls = 0; counter.load(std::memory_order_acquire) < value; ++polls) {
    if (polls < spins) continue;
    if (polls == spins) deadline = in_a_minute();
    std::this_thread::yield();
    if (Clock::now() > deadline)
      throw std::runtime_error("a rank did not finish the measurement within a minute");
  }
}

// An all-reduce among threads with only a counter and a pointer for each rank.
class PlainLoop {
 public:
  explicit PlainLoop(int ranks)
      : ranks_(ranks), states_(new RankState[static_cast<std::size_t>(ranks)]) {}

  void all_reduce(int rank, float* data, std::size_t count) {
    auto& me = states_[static_cast<std::size_t>(rank)];
    auto p = static_cast<std::size_t>(ranks_);
    me.data = data;
    barrier(rank);
    auto begin = [&](std::size_t r) { return count * r / p; };
    auto r = static_cast<std::size_t>(rank);
    std::size_t first = begin(r), length = begin(r + 1) - first;
    const auto& sum = reduction(DType::f32, Op::sum);
    for (std::size_t q = 0; q < p; ++q) {
      if (q != r) sum.combine(data + first, data + first, states_[q].data + first, length);
    }
    barrier(rank);
    for (std::size_t q = 0; q < p; ++q) {
      if (q == r) continue;
      std::memcpy(data + begin(q), states_[q].data + begin(q), (begin(q + 1) - begin(q)) * 4);
    }
    barrier(rank);
  }

 private:
  struct alignas(64) RankState {
    std::atomic<unsigned> turn{0};
    float* data = nullptr;
  };

  void barrier(int rank) {
    unsigned turn = states_[static_cast<std::size_t>(rank)].turn.fetch_add(1) + 1;
    for (int q = 0; q < ranks_; ++q) wait_for(states_[static_cast<std::size_t>(q)].turn, turn);
  }

  int ranks_;
  std::unique_ptr<RankState[]> states_;
};

void plain_ring(Endpoint& endpoint, int rank, int ranks, float* data, std::size_t count) {
  CallRecord call;
  endpoint.enter(call);
  int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  std::size_t chunk =
      ((count + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks) + 15) / 16 *
      16;
  const auto& sum = reduction(DType::f32, Op::sum);
  auto until = [&](auto done) {
    if (done()) return;
    auto attempt = [&] { return done() ? Progress::done : Progress::blocked; };
    if (!endpoint.wait(attempt, in_a_minute(), {})) endpoint.time_out();
  };
  auto turn_of = [&](int turn, bool adds) {
    auto part = [&](int i) {
      auto c = static_cast<std::size_t>(((rank + i) % ranks + ranks) % ranks);
      std::size_t first = std::min(c * chunk, count), last = std::min(first + chunk, count);
      return std::pair{data + first, last - first};
    };
    auto [out, sent] = part(adds ? -turn : 1 - turn);
    auto [in, received] = part(adds ? -turn - 1 : -turn);
    if (sent) {
      until([&, p = out, n = sent] { return endpoint.try_send(next, p, n * 4); });
    }
    if (!received) return;
    const void* arrived = nullptr;
    until([&, n = received] {
      return (arrived = endpoint.try_receive(previous, n * 4).data) != nullptr;
    });
    if (adds) {
      sum.combine(in, in, arrived, received);
    } else {
      std::memcpy(in, arrived, received * 4);
    }
    endpoint.release(previous);
  };
  for (int turn = 0; turn < ranks - 1; ++turn) turn_of(turn, true);
  for (int turn = 0; turn < ranks - 1; ++turn) turn_of(turn, false);
  until([&] { return endpoint.flushed(); });
  endpoint.leave();
}

}  // namespace

std::vector<double> measure_all_reduce(const std::string& how, int ranks, std::size_t bytes,
                                       int iterations) {
  if (ranks < 2 || iterations < 1 || bytes < 4) {
    throw std::invalid_argument(
        "measure_all_reduce needs 2 ranks, 1 iteration and 4 bytes or more");
  }
  const Algorithm* algorithm =
      how == "executor" ? &ring_all_reduce() : find_algorithm(Collective::all_reduce, how);
  auto group = std::make_shared<ThreadGroup>(ranks);
  PlainLoop loop(ranks);
  std::atomic<unsigned> started{0};
  auto n = static_cast<std::size_t>(ranks);
  std::vector<std::vector<double>> seconds(n);
  std::vector<std::exception_ptr> errors(n);
  std::size_t count = bytes / 4;

  auto work = [&](int rank) {
    Communicator communicator(group, rank);
    std::vector<float> data(count);
    Array array{data.data(), data.data(), {static_cast<std::int64_t>(count)}, count, 4, "float32"};
    auto once = [&] {
      if (algorithm) {
        const Reducing sum{DType::f32, Op::sum};
        communicator.run(communicator.prepare(*algorithm, array, 0, &sum),
                         {Clock::now(), in_a_minute(), {}});
      } else if (how == "plain_ring") {
        plain_ring(group->endpoint(rank), rank, ranks, data.data(), count);
      } else if (how == "plain_loop") {
        loop.all_reduce(rank, data.data(), count);
      } else {
        throw std::invalid_argument(
            "unknown measurement '" + how +
            "': use executor, plain_ring, plain_loop or an algorithm's name");
      }
    };
    for (std::size_t i = 0; i < count; ++i) {
      data[i] = static_cast<float>(rank + static_cast<int>(i % 7));
    }
    once();
    for (std::size_t i = 0; i < count; ++i) {
      if (data[i] !=
          static_cast<float>(ranks * (ranks - 1) / 2 + ranks * static_cast<int>(i % 7))) {
        throw std::runtime_error(how + " returned a wrong sum");
      }
    }
    // Sums of small numbers stay finite for 16 calls of 64 ranks.
    auto fill_with_small = [&] {
      for (std::size_t i = 0; i < count; ++i) data[i] = 1e-30f * static_cast<float>(i % 7 + 1);
    };
    fill_with_small();
    started.fetch_add(1);
    wait_for(started, static_cast<unsigned>(ranks));
    auto& times = seconds[static_cast<std::size_t>(rank)];
    times.reserve(static_cast<std::size_t>(iterations));
    for (int i = 0; i < iterations; ++i) {
      if (i % 16 == 15) fill_with_small();
      auto begin = Clock::now();
      once();
      times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          work(rank);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
          group->fail({FailureKind::aborted, "the measurement failed", {rank}});
        }
      });
    }
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  std::vector<double> slowest(static_cast<std::size_t>(iterations));
  for (std::size_t i = 0; i < slowest.size(); ++i) {
    for (const auto& times : seconds) slowest[i] = std::max(slowest[i], times[i]);
  }
  return slowest;
}

Rates measure_rates(int ranks, std::size_t bytes, int iterations) {
  if (ranks < 1 || iterations < 1 || bytes < 4) {
    throw std::invalid_argument("measure_rates needs 1 rank, 1 iteration and 4 bytes or more");
  }
  struct Span {
    Clock::time_point begin, end;
  };
  auto n = static_cast<std::size_t>(ranks), count = bytes / 4;
  std::vector<std::vector<float>> sums(n), copies(n);
  std::vector<std::vector<Span>> added(n), copied(n);  // by rank and iteration
  std::vector<std::exception_ptr> errors(n);
  std::atomic<unsigned> arrivals{0};

  // As in an all-reduce, each rank reads data that its neighbour wrote last, so no data is in the
  // reader's cache.
  auto work = [&](std::size_t rank) {
    const auto& sum = reduction(DType::f32, Op::sum);
    std::size_t neighbour = (rank + n - 1) % n;
    sums[rank].assign(count, 0);
    copies[rank].assign(count, 0);
    float *own_sums = sums[rank].data(), *own_copies = copies[rank].data();
    unsigned barriers = 0;
    auto together = [&](auto move) {
      arrivals.fetch_add(1);
      wait_for(arrivals, ++barriers * static_cast<unsigned>(ranks));
      auto begin = Clock::now();
      move();
      return Span{begin, Clock::now()};
    };
    together([] {});  // all ranks have allocated their vectors
    for (int i = 0; i < iterations; ++i) {
      added[rank].push_back(
          together([&] { sum.combine(own_sums, own_sums, copies[neighbour].data(), count); }));
      copied[rank].push_back(
          together([&] { std::memcpy(own_copies, sums[neighbour].data(), count * 4); }));
    }
    together([] {});  // no rank reads another rank's vectors any more
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < n; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          work(rank);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  // The rate of the median iteration, from the first rank's start to the last rank's end.
  auto rate = [&](const std::vector<std::vector<Span>>& spans) {
    std::vector<double> seconds;
    for (std::size_t i = 0; i < static_cast<std::size_t>(iterations); ++i) {
      Span whole = spans[0][i];
      for (const auto& of_rank : spans) {
        whole.begin = std::min(whole.begin, of_rank[i].begin);
        whole.end = std::max(whole.end, of_rank[i].end);
      }
      seconds.push_back(std::chrono::duration<double>(whole.end - whole.begin).count());
    }
    auto middle = seconds.begin() + iterations / 2;
    std::nth_element(seconds.begin(), middle, seconds.end());
    return static_cast<double>(count * 4) / *middle;
  };
  return {rate(copied), rate(added)};
}

double measure_handshake(std::byte* lines, int rank, int ranks, int rounds, bool oversubscribed) {
  auto line = [lines](int r) -> std::atomic<unsigned>& {
    return *reinterpret_cast<std::atomic<unsigned>*>(lines +
                                                     static_cast<std::size_t>(r) * kCacheLine);
  };
  const unsigned last = line(rank).load() + static_cast<unsigned>(rounds);
  const auto begin = Clock::now();
  for (unsigned round = line(rank).load() + 1; round <= last; ++round) {
    line(rank).store(round, std::memory_order_release);
    for (int r = 0; r < ranks; ++r) wait_for(line(r), round, oversubscribed ? 0 : 1000);
  }
  return std::chrono::duration<double>(Clock::now() - begin).count() / rounds;
}

}  // namespace pycollective
