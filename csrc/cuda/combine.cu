#include "cuda/combine.h"
#include "cuda/kernels.h"

namespace pycollective::cuda {
namespace {

// The launch bounds limit the registers, so that four blocks run at once on a multiprocessor.
template <class T, class O, int kSources>
__global__ void __launch_bounds__(kThreads, 4)
    combine_kernel(const __grid_constant__ Combination arrays) {
  combine_as<T, O, kSources>(arrays, {blockIdx.x, gridDim.x, threadIdx.x});
}

}  // namespace

void start_combine(DType dtype, Op op, void* const* targets, int num_targets,
                   const void* const* sources, int num_sources, std::size_t count, int size,
                   int multiprocessors, cudaStream_t stream) {
  with_kernel(dtype, op, num_sources, [&]<class T, class O, int kSources>(std::size_t factor) {
    Combination c = combination<T, kSources>(op, targets, num_targets, sources, num_sources,
                                             count * factor, size, multiprocessors);
    if (count == 0) return;
    unsigned blocks = blocks_of(c, sizeof(T), kTileVectors<kSources>, multiprocessors);
    void* arguments[] = {&c};
    check(cudaLaunchKernel(combine_kernel<T, O, kSources>, dim3(blocks), dim3(kThreads), arguments,
                           0, stream),
          "starting the kernel that combines arrays");
  });
}

}  // namespace pycollective::cuda
