// The verifier for more than 64 ranks: the content of a chunk is a number instead of a set.
//
// Rank r's contribution to chunk c is a_r b_c modulo the prime p = 2^61 - 1, with a_r and b_c
// random; a reduction adds numbers. A chunk that holds each contribution to c exactly once has the
// value (sum of all a_r) b_c. Any other collection of contributions is another polynomial of degree
// two in the random numbers. It agrees with that value with probability at most 2 / p for each
// comparison (Schwartz 1980, Zippel 1979).
//
// Memory: one number for each chunk of a rank's output and scratch, 800 MB for a ring among 10,000
// ranks. The values of inputs are computed when needed. A message holds no values: the receiver
// reads the sender's chunks, as threads do. The walk may be further in the sender than in the
// receiver. A hash of the sent chunks shows whether the sender has overwritten them. A chunk of the
// data may be stored at its own index only, so that comparing indices suffices.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>

#include "schedule/verify.h"
#include "schedule/walk.h"
#include "support/huge_pages.h"

namespace pycollective {
namespace {

constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;

std::uint64_t add(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = a + b;
  return sum >= kPrime ? sum - kPrime : sum;
}

std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  Wide product = static_cast<Wide>(a) * b;
  return add(static_cast<std::uint64_t>(product) & kPrime,
             static_cast<std::uint64_t>(product >> 61));
}

// Returns 1 … p - 1, the same for the same number (the mixing of SplitMix64; Steele, Lea and Flood
// 2014).
std::uint64_t random_of(std::uint64_t number) {
  std::uint64_t z = (number + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return (z ^ z >> 31) % (kPrime - 1) + 1;
}

struct Message {
  Span span;               // of the sender
  int step;                // of the sender
  std::uint64_t checksum;  // hash of the span's values; in a barrier, the index of a copy of the
                           // sender's knowledge
};

// in_parts: true if chunks are ranks' parts, as the function in_parts() returns for the collective.
template <bool in_parts>
class Fingerprints {
 public:
  Fingerprints(const Algorithm& algorithm, int size, const Watch& watch)
      : shape_(algorithm.collective(), algorithm.num_chunks(size), algorithm.num_scratch(size),
               size),
        collective_(shape_.collective),
        chunks_(shape_.chunks),
        size_(size),
        walk_(algorithm, size, 1, watch),
        mailboxes_(size) {
    if (collective_ == Collective::all_to_all && size > kMostChunks / size) {
      throw std::invalid_argument("an all_to_all among " + std::to_string(size) +
                                  " ranks has too many chunks to be verified");
    }
    std::mt19937_64 random(20090214);
    for (int r = 0; r < size; ++r) {
      ranks_.push_back(random() % (kPrime - 1) + 1);
      everyone_ = add(everyone_, ranks_.back());
      before_.push_back(everyone_);
      const Content own = initial_content(collective_, r, size, 0);
      bool contributes = in_parts || own.end > own.begin;
      if (!contributes) ranks_.back() = 0;
    }
    chunk_numbers_.resize(static_cast<std::size_t>(in_parts ? size : chunks_));
    for (std::size_t c = 0; c < chunk_numbers_.size(); ++c) {
      chunk_numbers_[c] = random_of(c);
      complete_.push_back(multiply(everyone_, chunk_numbers_[c]));
    }
    values_.resize(static_cast<std::size_t>(std::max({size, chunks_, shape_.scratch})));
    auto scratch = static_cast<std::size_t>(shape_.scratch);
    root_cells_ = static_cast<std::size_t>(outputs(0)) + scratch;
    rank_cells_ = static_cast<std::size_t>(outputs(1)) + scratch;
    std::size_t cells = begin(size);
    cells_.reset(static_cast<std::uint64_t*>(std::calloc(cells + 1, sizeof(std::uint64_t))));
    if (!cells_) throw std::bad_alloc();
    prefer_huge_pages(cells_.get(), (cells + 1) * sizeof(std::uint64_t));
    if (in_parts) scratch_chunks_.resize(scratch * static_cast<std::size_t>(size), -1);
    if (collective_ == Collective::barrier) {
      words_ = static_cast<std::size_t>(size + 63) / 64;
      knowledge_.resize(static_cast<std::size_t>(size) * words_);
      for (int r = 0; r < size; ++r) knowledge(r)[r / 64] |= std::uint64_t{1} << r % 64;
    }
  }

  void collect_marks(std::vector<std::pair<int, std::size_t>>* marks) { marks_ = marks; }
  void ignore_marks() { check_marks_ = false; }

  std::string run() {
    for (int r = 0; r < size_ && fits(r);) ++r;
    while (walk_.any() && problem_.empty()) {
      int r = walk_.pop();
      while (!walk_.done(r) && execute(r)) {
        walk_.advance(r);
        if (!fits(r)) break;
      }
    }
    if (problem_.empty()) check_ended();
    if (problem_.empty()) check_result();
    return problem_;
  }

 private:
  static constexpr int kMostChunks = 2147483647;

  int inputs(int r) const { return shape_.chunks_of(r, Buffer::input); }
  int outputs(int r) const { return shape_.chunks_of(r, Buffer::output); }
  // The index of a rank's first cell.
  std::size_t begin(int r) const {
    return r == 0 ? 0 : root_cells_ + static_cast<std::size_t>(r - 1) * rank_cells_;
  }
  std::uint64_t number_of(int chunk) const {
    auto c = static_cast<std::size_t>(chunk);
    return c < chunk_numbers_.size() ? chunk_numbers_[c] : random_of(c);
  }
  std::uint64_t complete(int chunk) const {
    auto c = static_cast<std::size_t>(chunk);
    return c < complete_.size() ? complete_[c] : multiply(everyone_, random_of(c));
  }
  std::uint64_t value_of(const Content& content) const {
    if (content.end == content.begin) return 0;
    if (content.end - content.begin == 1) {
      return multiply(ranks_[static_cast<std::size_t>(content.begin)], number_of(content.chunk));
    }
    // Several contributions are always those of ranks 0 to end - 1.
    return multiply(before_[static_cast<std::size_t>(content.end - 1)], number_of(content.chunk));
  }
  // Returns an index within the buffer: the first part follows the last one.
  int wrapped(int r, Buffer buffer, int i) const {
    if (!in_parts || buffer == Buffer::scratch) return i;
    return index_of_part(i, buffer == Buffer::input ? inputs(r) : outputs(r));
  }
  std::size_t place(int r, Buffer buffer, int i) const {
    i = wrapped(r, buffer, i);
    if (buffer == Buffer::scratch) i += outputs(r);
    return begin(r) + static_cast<std::size_t>(i);
  }
  int& scratch_chunk(int r, int i) {
    return scratch_chunks_[static_cast<std::size_t>(r) * static_cast<std::size_t>(shape_.scratch) +
                           static_cast<std::size_t>(i)];
  }
  // Returns the chunk stored at an index, or -1 for scratch that is still empty.
  int chunk_at(int r, Buffer buffer, int i) {
    if (!in_parts) return buffer == Buffer::scratch ? i % chunks_ : i;
    if (buffer == Buffer::scratch) return scratch_chunk(r, i);
    i = wrapped(r, buffer, i);
    return buffer == Buffer::input ? initial_content(collective_, r, size_, i).chunk
                                   : final_content(collective_, r, size_, i).chunk;
  }

  bool fail(int r, const std::string& what) {
    problem_ = "rank " + std::to_string(r) + ", step " + std::to_string(walk_.number(r)) + " (" +
               to_string(walk_.step(r)) + "): " + what;
    return false;
  }

  // Returns the initial value at an index of the input.
  std::uint64_t input_value(int r, int i) const {
    if (in_parts) return value_of(initial_content(collective_, r, size_, i));
    return multiply(ranks_[static_cast<std::size_t>(r)],
                    chunk_numbers_[static_cast<std::size_t>(i)]);
  }

  // Returns the index in the output that an index of the input shares in place, or -1.
  int shared_place(int r, int i) const {
    if (!in_parts) return i < outputs(r) ? i : -1;
    if (!can_be_in_place(collective_)) return -1;
    if (outputs(r) == size_) return r;
    return inputs(r) == size_ && i == r && outputs(r) == 1 ? 0 : -1;
  }

  // Returns the value at an index of rank r's buffer, 0 if it was never written. Sets *lost if a
  // call in place would have overwritten the value.
  std::uint64_t read(int r, Buffer buffer, int i, bool* lost) const {
    if (buffer != Buffer::input) return cells_[place(r, buffer, i)];
    i = wrapped(r, buffer, i);
    std::uint64_t value = input_value(r, i);
    int shared = shared_place(r, i);
    if (shared >= 0) {
      std::uint64_t now = cells_[place(r, Buffer::output, shared)];
      *lost = *lost || (now != 0 && now != value);
    }
    return value;
  }

  struct Seen {
    std::uint64_t checksum = 0;
    bool lost = false, unwritten = false;
  };
  // Reads a span into values_.
  Seen read(int r, const Span& span) {
    Seen seen;
    for (int i = 0; i < span.count; ++i) {
      std::uint64_t value = read(r, span.buffer, span.first + i, &seen.lost);
      values_[static_cast<std::size_t>(i)] = value;
      seen.checksum = seen.checksum * 0x9e3779b97f4a7c15 + value;
      seen.unwritten = seen.unwritten || value == 0;
    }
    return seen;
  }

  // Returns false if the rank's next step cannot be executed. Called once for each step.
  bool fits(int r) {
    if (walk_.done(r)) return true;
    Misfit misfit = find_misfit(walk_.step(r), r, shape_);
    return misfit == Misfit::none || fail(r, explain(misfit, walk_.step(r), r, shape_));
  }

  bool execute(int r) {
    const Step& step = walk_.step(r);
    switch (step.verb) {
      case Verb::send:
        return send(r, step);
      case Verb::recv:
      case Verb::recv_reduce:
        return receive(r, step);
      case Verb::copy:
      case Verb::reduce:
        return local(r, step);
    }
    return true;
  }

  bool send(int r, const Step& step) {
    if (mailboxes_.has(r, step.peer)) return walk_.wait(r, step.peer), false;
    Seen seen = read(r, step.source);
    if (seen.lost) return fail(r, kLost);
    if (seen.unwritten) return fail(r, "sends a chunk that was never written");
    Message message{step.source, walk_.number(r), words_ ? keep(r) : seen.checksum};
    mailboxes_.put(r, step.peer, message);
    walk_.wake_if_waiting(step.peer, r);
    return true;
  }

  bool receive(int r, const Step& step) {
    Message message;
    if (!mailboxes_.take(step.peer, r, &message)) return walk_.wait(r, step.peer), false;
    walk_.wake_if_waiting(step.peer, r);  // the peer may wait to send its next message
    auto sender = [&] { return "rank " + std::to_string(step.peer); };
    if (message.span.count != step.target.count) {
      return fail(r, sender() + " sent " + std::to_string(message.span.count) + " chunks");
    }
    if (words_) learn(r, static_cast<std::size_t>(message.checksum));
    Seen now = read(step.peer, message.span);
    if (!words_ && (now.lost || now.checksum != message.checksum)) {
      return fail(r, sender() + " has overwritten the chunks that it sent in step " +
                         std::to_string(message.step) + " before it was read");
    }
    return write(r, step, step.peer, message.span);
  }

  bool local(int r, const Step& step) {
    return read(r, step.source).lost ? fail(r, kLost) : write(r, step, r, step.source);
  }

  // Writes values_, which were read from `from` of rank `owner`, or their reduction with the rank's
  // own chunks.
  bool write(int r, const Step& step, int owner, const Span& from) {
    for (int i = 0; i < step.target.count; ++i) {
      const Span& target = step.target;
      if (target.buffer == Buffer::input) return fail(r, "writes to the input");
      std::uint64_t value = values_[static_cast<std::size_t>(i)];
      int chunk = chunk_at(owner, from.buffer, from.first + i);
      if (value == 0) return fail(r, "reads a chunk that was never written");
      bool reduces = step.verb == Verb::recv_reduce || step.verb == Verb::reduce;
      if (reduces) {
        const Span& own = step.verb == Verb::reduce ? target : step.source;
        bool lost = false;
        std::uint64_t other = read(r, own.buffer, own.first + i, &lost);
        if (lost) return fail(r, kLost);
        if (other == 0) return fail(r, "reads a chunk that was never written");
        if (chunk_at(r, own.buffer, own.first + i) != chunk) {
          return fail(r, "reduces different chunks");
        }
        value = add(value, other);
        if (!mark(r, step, !is_prefix(collective_) && value == complete(chunk))) return false;
      }
      if (in_parts && target.buffer == Buffer::scratch) {
        scratch_chunk(r, target.first + i) = chunk;
      } else if (int wanted = chunk_at(r, target.buffer, target.first + i); wanted != chunk) {
        return fail(r, "puts chunk " + std::to_string(chunk) + " where chunk " +
                           std::to_string(wanted) + " belongs");
      }
      cells_[place(r, target.buffer, target.first + i)] = value;
    }
    return true;
  }

  bool mark(int r, const Step& step, bool is_complete) {
    if (marks_) {
      if (is_complete) marks_->push_back({r, static_cast<std::size_t>(walk_.number(r))});
    } else if (check_marks_ && step.completes != is_complete) {
      return fail(r, step.completes ? "is marked complete and is not"
                                    : "completes the chunk and is not marked so");
    }
    return true;
  }

  void check_ended() {
    std::string waiting = walk_.waiting();
    if (!waiting.empty()) {
      problem_ = "deadlock: " + waiting;
    } else if (mailboxes_.count()) {
      int from = 0, to = 0;
      mailboxes_.any(&from, &to);
      problem_ = "rank " + std::to_string(from) + " sends to rank " + std::to_string(to) +
                 " a message that is never received";
    }
  }

  void check_result() {
    for (int r = 0; r < size_ && problem_.empty(); ++r) {
      if (words_) {
        check_knows_everyone(r);
        continue;
      }
      for (int i = 0; i < outputs(r); ++i) {
        std::uint64_t value = cells_[place(r, Buffer::output, i)];
        if (value == value_of(final_content(collective_, r, size_, i))) continue;
        problem_ = "rank " + std::to_string(r) + " ends with a wrong output[" + std::to_string(i) +
                   "]: " + (value ? "not the right contributions, each once" : "never written");
        break;
      }
    }
  }

  // In a barrier: the bits of rank r, one for each rank. A bit is 1 if rank r knows that the bit's
  // rank has entered. Messages carry a copy of the sender's bits.
  std::uint64_t* knowledge(int r) { return &knowledge_[static_cast<std::size_t>(r) * words_]; }
  std::size_t keep(int r) {
    std::size_t copy = kept_.size();
    if (unused_.empty()) {
      kept_.emplace_back();
    } else {
      copy = unused_.back();
      unused_.pop_back();
    }
    kept_[copy].assign(knowledge(r), knowledge(r) + words_);
    return copy;
  }
  void learn(int r, std::size_t copy) {
    for (std::size_t i = 0; i < words_; ++i) knowledge(r)[i] |= kept_[copy][i];
    unused_.push_back(copy);
  }
  void check_knows_everyone(int r) {
    for (int p = 0; p < size_; ++p) {
      if (knowledge(r)[p / 64] >> p % 64 & 1) continue;
      problem_ = "rank " + std::to_string(r) + " leaves the barrier before rank " +
                 std::to_string(p) + " has entered";
      return;
    }
  }

  static constexpr const char* kLost = "in place: reads input that has been overwritten";

  Shape shape_;
  Collective collective_;
  int chunks_, size_;
  Walk walk_;
  Mailboxes<Message> mailboxes_;
  std::vector<std::uint64_t> ranks_;          // a_r; 0 if the rank's input does not matter
  std::uint64_t everyone_ = 0;                // the sum of all a_r
  std::vector<std::uint64_t> before_;         // sums of a_0 … a_r
  std::vector<std::uint64_t> chunk_numbers_;  // b_c of the first chunks
  std::vector<std::uint64_t> complete_;       // complete values of these chunks
  std::size_t root_cells_ = 0, rank_cells_ = 0;
  // Output and scratch of each rank. Steps access distant addresses: huge pages avoid most
  // of the TLB misses.
  std::unique_ptr<std::uint64_t[], decltype(&std::free)> cells_{nullptr, &std::free};
  std::vector<int> scratch_chunks_;
  std::vector<std::uint64_t> values_;
  std::size_t words_ = 0;  // words of a rank's bits; 0 unless the collective is a barrier
  std::vector<std::uint64_t> knowledge_;
  std::vector<std::vector<std::uint64_t>> kept_;
  std::vector<std::size_t> unused_;
  std::vector<std::pair<int, std::size_t>>* marks_ = nullptr;
  bool check_marks_ = true;
  std::string problem_;
};

std::string with_fingerprints(const Algorithm& algorithm, int size, const Watch& watch, auto work) {
  if (in_parts(algorithm.collective())) {
    Fingerprints<true> fingerprints(algorithm, size, watch);
    return work(fingerprints);
  }
  Fingerprints<false> fingerprints(algorithm, size, watch);
  return work(fingerprints);
}

}  // namespace

std::string verify_by_fingerprints(const Algorithm& algorithm, int size, Marks marks,
                                   const Watch& watch) {
  return with_fingerprints(algorithm, size, watch, [&](auto& fingerprints) {
    if (marks == Marks::ignored) fingerprints.ignore_marks();
    return fingerprints.run();
  });
}

std::vector<std::pair<int, std::size_t>> complete_by_fingerprints(const Algorithm& algorithm,
                                                                  int size) {
  std::vector<std::pair<int, std::size_t>> marks;
  with_fingerprints(algorithm, size, {}, [&](auto& fingerprints) {
    fingerprints.collect_marks(&marks);
    return fingerprints.run();
  });
  return marks;
}

}  // namespace pycollective
