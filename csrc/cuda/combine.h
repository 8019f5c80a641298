// The work of one thread in the kernels that combine arrays, and the choice of the kernel for a
// dtype and an operation. Also compiles for the host, where host_kernels.cc runs it.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/access.h"
#include "cuda/geometry.h"

namespace pycollective::cuda {

// Vectors that a thread reads before it uses the first one, if the number of sources is a runtime
// value.
inline constexpr int kReadAtOnce = 4;

// The same, if the number of sources is a constant: 1,024 threads then have 128 KiB of reads in
// flight on each multiprocessor.
inline constexpr int kUnderWay = 8;

// True if 2, 4 and 8 sources have kernels with a constant number of sources: the common cases.
// Other numbers use kernels with kSources = 0.
template <class T, class O>
inline constexpr bool is_specialised =
    std::is_same_v<O, arithmetic::Sum> && (std::is_floating_point_v<T> || is_half<T>);

// Vectors of each source that a thread processes at once.
template <int kSources>
inline constexpr int kTurn = kSources ? kUnderWay / kSources : 1;

// Vectors of each source that a block processes at once (a tile of cut()). 0 means no tiles: each
// thread processes one vector.
template <int kSources>
inline constexpr std::size_t kTileVectors =
    kTurn<kSources> > 1 ? std::size_t{kTurn<kSources>} * kThreads : 0;

// The type of a vector's items: bitwise operations on bytes use words.
template <class T, class O>
using Lane =
    std::conditional_t<std::is_same_v<T, std::uint8_t> && (std::is_same_v<O, arithmetic::And> ||
                                                           std::is_same_v<O, arithmetic::Or> ||
                                                           std::is_same_v<O, arithmetic::Xor>),
                       std::uint32_t, T>;

// A partial result.
template <class T, int kLanes, class O>
struct Result {
  Computed<T> items[kLanes];

  PYCOLLECTIVE_INLINE void begin(const Lanes<T, kLanes>& source) {
    PYCOLLECTIVE_UNROLLED
    for (int i = 0; i < kLanes; ++i) items[i] = widened(source.items[i]);
  }

  PYCOLLECTIVE_INLINE void add(const Lanes<T, kLanes>& source) {
    PYCOLLECTIVE_UNROLLED
    for (int i = 0; i < kLanes; ++i) items[i] = O::of(items[i], widened(source.items[i]));
  }

  PYCOLLECTIVE_INLINE void write(const Combination& c, std::size_t offset, bool aligned) {
    if constexpr (std::is_same_v<O, arithmetic::Sum>) {
      if (c.size) {
        PYCOLLECTIVE_UNROLLED
        for (int i = 0; i < kLanes; ++i) items[i] = arithmetic::quotient(items[i], c.size);
      }
    }
    Lanes<T, kLanes> written;
    PYCOLLECTIVE_UNROLLED
    for (int i = 0; i < kLanes; ++i) written.items[i] = narrowed<T>(items[i]);
    PYCOLLECTIVE_NOT_UNROLLED
    for (int k = 0; k < c.num_targets; ++k) written.write(at(c.targets[k], offset), aligned);
  }
};

// Combines the items at an offset (in bytes) of any number of sources.
template <class T, int kLanes, class O>
PYCOLLECTIVE_INLINE void combine_any(const Combination& c, std::size_t offset, bool aligned) {
  Result<T, kLanes, O> result{};
  PYCOLLECTIVE_NOT_UNROLLED
  for (int first = 0; first < c.num_sources; first += kReadAtOnce) {
    Lanes<T, kLanes> read[kReadAtOnce];
    PYCOLLECTIVE_UNROLLED
    for (int k = 0; k < kReadAtOnce; ++k) {
      if (first + k < c.num_sources) read[k].read(at(c.sources[first + k], offset), aligned);
    }
    PYCOLLECTIVE_UNROLLED
    for (int k = 0; k < kReadAtOnce; ++k) {
      if (k == 0 && first == 0) {
        result.begin(read[k]);
      } else if (first + k < c.num_sources) {
        result.add(read[k]);
      }
    }
  }
  result.write(c, offset, aligned);
}

// Combines the vectors at several offsets of kSources sources. All are read before the first one is
// used.
template <class T, int kLanes, class O, int kSources, int kOffsets>
PYCOLLECTIVE_INLINE void combine_known(const Combination& c,
                                       const std::size_t (&offsets)[kOffsets]) {
  Lanes<T, kLanes> read[kOffsets][kSources];
  PYCOLLECTIVE_UNROLLED
  for (int u = 0; u < kOffsets; ++u) {
    PYCOLLECTIVE_UNROLLED
    for (int k = 0; k < kSources; ++k) read[u][k].read(at(c.sources[k], offsets[u]));
  }
  PYCOLLECTIVE_UNROLLED
  for (int u = 0; u < kOffsets; ++u) {
    Result<T, kLanes, O> result;
    result.begin(read[u][0]);
    PYCOLLECTIVE_UNROLLED
    for (int k = 1; k < kSources; ++k) result.add(read[u][k]);
    result.write(c, offsets[u], true);
  }
}

// The work of one thread.
template <class T, class O, int kSources>
PYCOLLECTIVE_INLINE void combine_as(const Combination& c, Thread self) {
  using L = Lane<T, O>;
  constexpr int kLanes = kVectorBytes / sizeof(L);
  const std::size_t front = c.cut.head * sizeof(T);
  if constexpr (kTileVectors<kSources> > 0) {
    for (std::size_t tile = self.block; tile < c.cut.tiles; tile += self.blocks) {
      std::size_t offsets[kTurn<kSources>];
      PYCOLLECTIVE_UNROLLED
      for (int u = 0; u < kTurn<kSources>; ++u) {
        offsets[u] = front + ((tile * kTurn<kSources> + u) * kThreads + self.thread) * kVectorBytes;
      }
      combine_known<L, kLanes, O, kSources>(c, offsets);
    }
  }
  const std::size_t threads = self.blocks * kThreads;
  const std::size_t number = self.block * kThreads + self.thread;  // of this thread
  for (std::size_t v = c.cut.tiles * kTileVectors<kSources> + number; v < c.cut.vectors;
       v += threads) {
    const std::size_t offsets[1] = {front + v * kVectorBytes};
    if constexpr (kSources) {
      combine_known<L, kLanes, O, kSources>(c, offsets);
    } else {
      combine_any<L, kLanes, O>(c, offsets[0], true);
    }
  }
  // The items before the first vector and after the last one.
  const std::size_t in_vectors = c.cut.vectors * (kVectorBytes / sizeof(T));
  for (std::size_t i = number; i < c.count - in_vectors; i += threads) {
    const std::size_t item = i < c.cut.head ? i : i + in_vectors;
    combine_any<T, 1, O>(c, item * sizeof(T), c.cut.aligned);
  }
}

// Calls run<T, O, kSources>(factor) for a number of sources. An item of the table's type counts as
// `factor` items of T. Types whose results have the same bits share a kernel.
template <class T, class O, class Run>
void with_sources(int sources, std::size_t factor, Run&& run) {
  if constexpr (is_specialised<T, O>) {
    if (sources == 2) return run.template operator()<T, O, 2>(factor);
    if (sources == 4) return run.template operator()<T, O, 4>(factor);
    if (sources == 8) return run.template operator()<T, O, 8>(factor);
  }
  run.template operator()<T, O, 0>(factor);
}

template <class O, class Run>
void with_type(DType dtype, int sources, Run&& run) {
  using namespace arithmetic;
  auto use = [&]<class T>() {
    if constexpr (is_complex<T> && std::is_same_v<O, Sum>) {
      with_sources<decltype(T::real), O>(sources, 2, run);
    } else if constexpr (std::is_same_v<O, Sum>) {
      with_sources<T, O>(sources, 1, run);  // also divides, which depends on the sign
    } else if constexpr (O::template takes<Computed<T>>) {
      with_sources<typename O::template Same<T>, O>(sources, 1, run);
    }
  };
  switch (dtype) {
    case DType::boolean:
      return;  // handled by with_kernel()
    case DType::i8:
      return use.template operator()<std::int8_t>();
    case DType::i16:
      return use.template operator()<std::int16_t>();
    case DType::i32:
      return use.template operator()<std::int32_t>();
    case DType::i64:
      return use.template operator()<std::int64_t>();
    case DType::u8:
      return use.template operator()<std::uint8_t>();
    case DType::u16:
      return use.template operator()<std::uint16_t>();
    case DType::u32:
      return use.template operator()<std::uint32_t>();
    case DType::u64:
      return use.template operator()<std::uint64_t>();
    case DType::f16:
      return use.template operator()<Float16>();
    case DType::bf16:
      return use.template operator()<Bfloat16>();
    case DType::f32:
      return use.template operator()<float>();
    case DType::f64:
      return use.template operator()<double>();
    case DType::c64:
      return use.template operator()<Complex<float>>();
    case DType::c128:
      return use.template operator()<Complex<double>>();
  }
}

// Throws std::invalid_argument if the table does not have the operation for the dtype.
template <class Run>
void with_kernel(DType dtype, Op op, int sources, Run&& run) {
  using namespace arithmetic;
  if (!reduction(dtype, op).combine) throw std::invalid_argument(std::string(refusal(dtype, op)));
  const bool truths = dtype == DType::boolean;
  const std::size_t item = item_size(dtype);
  switch (op) {
    case Op::sum:
    case Op::mean:
      return with_type<Sum>(dtype, sources, run);
    case Op::prod:
      return with_type<Prod>(dtype, sources, run);
    case Op::min:
      return truths ? with_sources<Truth, And>(sources, 1, run)
                    : with_type<Min>(dtype, sources, run);
    case Op::max:
      return truths ? with_sources<Truth, Or>(sources, 1, run)
                    : with_type<Max>(dtype, sources, run);
    case Op::band:
      return truths ? with_sources<Truth, And>(sources, 1, run)
                    : with_sources<std::uint8_t, And>(sources, item, run);
    case Op::bor:
      return truths ? with_sources<Truth, Or>(sources, 1, run)
                    : with_sources<std::uint8_t, Or>(sources, item, run);
    case Op::bxor:
      return truths ? with_sources<Truth, Xor>(sources, 1, run)
                    : with_sources<std::uint8_t, Xor>(sources, item, run);
  }
}

// Returns the kernel's argument for arrays whose items count as `factor` items of T.
template <class T, int kSources>
Combination combination(Op op, void* const* targets, int num_targets, const void* const* sources,
                        int num_sources, std::size_t count, int size, int multiprocessors) {
  Combination made{};
  if (num_sources < 1 || num_sources > device::kMaxArrays || num_targets < 1 ||
      num_targets > device::kMaxArrays) {
    throw std::invalid_argument("one launch combines 1 to " + std::to_string(device::kMaxArrays) +
                                " sources into 1 to " + std::to_string(device::kMaxArrays) +
                                " targets, not " + std::to_string(num_sources) + " into " +
                                std::to_string(num_targets));
  }
  for (int k = 0; k < num_sources; ++k) made.sources[k] = sources[k];
  for (int k = 0; k < num_targets; ++k) made.targets[k] = targets[k];
  made.num_sources = num_sources;
  made.num_targets = num_targets;
  made.count = count;
  made.size = op == Op::mean ? size : 0;
  made.cut = cut(made, sizeof(T), kTileVectors<kSources>, multiprocessors);
  return made;
}

}  // namespace pycollective::cuda
