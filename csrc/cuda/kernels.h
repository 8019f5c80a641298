// Launches of the kernels, for runtime.cc. The current device must be the stream's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "device/runtime.h"

namespace pycollective::cuda {

// Throws std::runtime_error with the failed action `what` and CUDA's message.
void check(cudaError_t status, const char* what);

void start_combine(DType dtype, Op op, void* const* targets, int num_targets,
                   const void* const* sources, int num_sources, std::size_t count, int size,
                   int multiprocessors, cudaStream_t stream);
void start_pack(void* packed, DType packed_type, const std::vector<device::Piece>& pieces,
                DType piece_type, double scale, bool unpacks, int multiprocessors,
                cudaStream_t stream);

}  // namespace pycollective::cuda
