#include "cuda/host_kernels.h"

#include <stdexcept>
#include <string>

#include "cuda/combine.h"
#include "cuda/pack.h"

namespace pycollective::cuda {
namespace {

template <class Work>
void on_threads(unsigned blocks, Work&& work) {
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < kThreads; ++thread) work(Thread{block, blocks, thread});
  }
}

}  // namespace

void check_access(const void* place, std::size_t bytes) {
  if (is_aligned(place, bytes)) return;
  throw std::logic_error("a kernel would access " + std::to_string(bytes) + " unaligned bytes");
}

void combine_on_host(DType dtype, Op op, void* const* targets, int num_targets,
                     const void* const* sources, int num_sources, std::size_t count, int size,
                     int multiprocessors) {
  with_kernel(dtype, op, num_sources, [&]<class T, class O, int kSources>(std::size_t factor) {
    Combination c = combination<T, kSources>(op, targets, num_targets, sources, num_sources,
                                             count * factor, size, multiprocessors);
    on_threads(blocks_of(c, sizeof(T), kTileVectors<kSources>, multiprocessors),
               [&](Thread self) { combine_as<T, O, kSources>(c, self); });
  });
}

void pack_on_host(void* packed, DType packed_type, const std::vector<device::Piece>& pieces,
                  DType piece_type, double scale, bool unpacks, int multiprocessors) {
  DType from = unpacks ? packed_type : piece_type, to = unpacks ? piece_type : packed_type;
  with_conversion(from, to, scale, [&]<class From, class To>(std::size_t factor) {
    for (const Packing& p : packings(packed, pieces, factor, scale, unpacks)) {
      on_threads(blocks_of(p, multiprocessors), [&](Thread self) { pack_as<From, To>(p, self); });
    }
  });
}

}  // namespace pycollective::cuda
