// The kernels' own code, run by the processor, thread after thread: their arithmetic and the
// addresses that they take are tested without a GPU. An access that a GPU would refuse throws
// std::logic_error.
#pragma once

#include <cstddef>
#include <vector>

#include "device/runtime.h"

namespace pycollective::cuda {

// As Runtime::combine, pack and unpack, on a device with so many multiprocessors.
void rehearse_combine(DType dtype, Op op, void* const* targets, int num_targets,
                      const void* const* sources, int num_sources, std::size_t count, int size,
                      int multiprocessors);
void rehearse_pack(void* packed, DType packed_type, const std::vector<device::Piece>& pieces,
                   DType piece_type, double scale, bool unpacks, int multiprocessors);

}  // namespace pycollective::cuda
