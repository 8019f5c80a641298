#include "cuda/kernels.h"
#include "cuda/pack.h"

namespace pycollective::cuda {
namespace {

static_assert(sizeof(Packing) <= 4096, "the arguments of a launch have at most 4 KiB");

template <class From, class To>
__global__ void __launch_bounds__(kThreads, 4)
    pack_kernel(const __grid_constant__ Packing packing) {
  pack_as<From, To>(packing, {blockIdx.x, gridDim.x, threadIdx.x});
}

}  // namespace

void start_pack(void* packed, DType packed_type, const std::vector<device::Piece>& pieces,
                DType piece_type, double scale, bool unpacks, int multiprocessors,
                cudaStream_t stream) {
  DType from = unpacks ? packed_type : piece_type, to = unpacks ? piece_type : packed_type;
  with_conversion(from, to, scale, [&]<class From, class To>(std::size_t factor) {
    for (Packing& p : packings(packed, pieces, factor, scale, unpacks)) {
      void* arguments[] = {&p};
      check(cudaLaunchKernel(pack_kernel<From, To>, dim3(blocks_of(p, multiprocessors)),
                             dim3(kThreads), arguments, 0, stream),
            "starting the kernel that packs arrays");
    }
  });
}

}  // namespace pycollective::cuda
