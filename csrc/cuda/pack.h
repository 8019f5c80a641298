// The work of one thread in the kernels that pack and unpack, and the choice of the kernel for two
// types. Also compiles for the host, where host_kernels.cc runs it.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/access.h"
#include "cuda/geometry.h"

namespace pycollective::cuda {

// Vectors, or single items, that a thread reads before it uses the first one.
inline constexpr int kVectorsAtOnce = 4;
template <class T>
inline constexpr int kSinglesAtOnce = sizeof(T) == 8 ? 4 : 8;

// Integer types represent data that is only copied. Other numbers are multiplied in float32 (in
// float64 if a type is float64), and the product is then rounded to the target's type.
template <class From, class To>
PYCOLLECTIVE_INLINE To converted(From value, double scale) {
  if constexpr (std::is_integral_v<From>) {
    return value;
  } else {
    using Wide = std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>,
                                    double, float>;
    Wide product = static_cast<Wide>(widened(value)) * static_cast<Wide>(scale);
    return narrowed<To>(static_cast<Computed<To>>(product));
  }
}

template <class From, class To, int kLanes>
PYCOLLECTIVE_INLINE Lanes<To, kLanes> converted(const Lanes<From, kLanes>& source, double scale) {
  Lanes<To, kLanes> result;
  PYCOLLECTIVE_UNROLLED
  for (int i = 0; i < kLanes; ++i) result.items[i] = converted<From, To>(source.items[i], scale);
  return result;
}

// One thread's share of at most kTileItems items.
template <class From, class To>
PYCOLLECTIVE_INLINE void convert_tile(const void* from, void* to, unsigned items, double scale,
                                      unsigned thread) {
  constexpr int kLanes = kVectorBytes / std::max(sizeof(From), sizeof(To));
  using Source = Lanes<From, kLanes>;
  using Target = Lanes<To, kLanes>;
  const bool wide = is_aligned(from, Source::kBytes) && is_aligned(to, Target::kBytes);
  const unsigned vectors = wide ? items / kLanes : 0;
  for (unsigned i = thread; i < vectors; i += kVectorsAtOnce * kThreads) {
    Source read[kVectorsAtOnce];
    PYCOLLECTIVE_UNROLLED
    for (int u = 0; u < kVectorsAtOnce; ++u) {
      unsigned v = i + u * kThreads;
      if (v < vectors) read[u].read(at(from, v * Source::kBytes));
    }
    PYCOLLECTIVE_UNROLLED
    for (int u = 0; u < kVectorsAtOnce; ++u) {
      unsigned v = i + u * kThreads;
      if (v < vectors) converted<From, To>(read[u], scale).write(at(to, v * Target::kBytes));
    }
  }
  constexpr int kSingles = kSinglesAtOnce<From>;
  const bool from_aligned = is_aligned(from, sizeof(From)), to_aligned = is_aligned(to, sizeof(To));
  for (unsigned i = vectors * kLanes + thread; i < items; i += kSingles * kThreads) {
    Lanes<From, 1> single[kSingles];
    PYCOLLECTIVE_UNROLLED
    for (int u = 0; u < kSingles; ++u) {
      unsigned item = i + u * kThreads;
      if (item < items) single[u].read(at(from, item * sizeof(From)), from_aligned);
    }
    PYCOLLECTIVE_UNROLLED
    for (int u = 0; u < kSingles; ++u) {
      unsigned item = i + u * kThreads;
      if (item < items) {
        converted<From, To>(single[u], scale).write(at(to, item * sizeof(To)), to_aligned);
      }
    }
  }
}

// The work of one thread.
template <class From, class To>
PYCOLLECTIVE_INLINE void pack_as(const Packing& p, Thread self) {
  for (std::size_t tile = self.block; tile < p.first_tile[p.num_pieces]; tile += self.blocks) {
    int piece = 0;  // the last piece that begins at or before the tile
    for (int end = p.num_pieces; end - piece > 1;) {
      int middle = (piece + end) / 2;
      (p.first_tile[middle] <= tile ? piece : end) = middle;
    }
    const Packing::Part& part = p.pieces[piece];
    const std::size_t begin = (tile - p.first_tile[piece]) * kTileItems;
    const std::size_t left = part.count - begin;
    const unsigned items = left < kTileItems ? static_cast<unsigned>(left) : kTileItems;
    const void* from = p.unpacks ? p.packed : part.address;
    void* to = p.unpacks ? part.address : p.packed;
    convert_tile<From, To>(at(from, (begin + (p.unpacks ? part.offset : 0)) * sizeof(From)),
                           at(to, (begin + (p.unpacks ? 0 : part.offset)) * sizeof(To)), items,
                           p.scale, self.thread);
  }
}

// Calls run<From, To>(factor); an item counts as `factor` items of these types. Throws
// std::invalid_argument if there is no conversion.
template <class Run>
void with_conversion(DType from, DType to, double scale, Run&& run) {
  if (from == to && scale == 1) {
    switch (std::size_t item = item_size(from)) {
      case 1:
        return run.template operator()<std::uint8_t, std::uint8_t>(1);
      case 2:
        return run.template operator()<std::uint16_t, std::uint16_t>(1);
      case 4:
        return run.template operator()<std::uint32_t, std::uint32_t>(1);
      default:
        return run.template operator()<std::uint64_t, std::uint64_t>(item / 8);
    }
  }
  auto is_complex = [](DType d) { return d == DType::c64 || d == DType::c128; };
  auto real = [](DType d) {
    return d == DType::c64 ? DType::f32 : d == DType::c128 ? DType::f64 : d;
  };
  const std::size_t factor = is_complex(from) ? 2 : 1;
  auto with_source = [&]<class From>() -> bool {
    switch (real(to)) {
      case DType::f32:
        run.template operator()<From, float>(factor);
        return true;
      case DType::f64:
        if constexpr (is_half<From>) {
          return false;
        } else {
          run.template operator()<From, double>(factor);
          return true;
        }
      case DType::f16:
        if constexpr (std::is_same_v<From, double>) {
          return false;
        } else {
          run.template operator()<From, Float16>(factor);
          return true;
        }
      case DType::bf16:
        if constexpr (std::is_same_v<From, double>) {
          return false;
        } else {
          run.template operator()<From, Bfloat16>(factor);
          return true;
        }
      default:
        return false;
    }
  };
  bool found = false;
  if (is_complex(from) == is_complex(to)) {
    switch (real(from)) {
      case DType::f32:
        found = with_source.template operator()<float>();
        break;
      case DType::f64:
        found = with_source.template operator()<double>();
        break;
      case DType::f16:
        found = with_source.template operator()<Float16>();
        break;
      case DType::bf16:
        found = with_source.template operator()<Bfloat16>();
        break;
      default:
        break;
    }
  }
  if (!found) {
    throw std::invalid_argument(
        "cannot pack " + std::string(to_string(from)) + " as " + std::string(to_string(to)) +
        " times " + std::to_string(scale) +
        ": possible are halves and float32, float32 and float64, complex64 and complex128; "
        "for a scale of 1, also equal types");
  }
}

}  // namespace pycollective::cuda
