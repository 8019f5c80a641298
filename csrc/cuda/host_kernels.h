// Runs the kernels' code on the host, one thread after the other, so that their arithmetic and
// addresses are tested without a GPU. Throws std::logic_error for an access that would fail on a
// GPU.
#pragma once

#include <cstddef>
#include <vector>

#include "device/runtime.h"

namespace pycollective::cuda {

// Like Runtime::combine, pack and unpack, on a device with this number of multiprocessors.
void combine_on_host(DType dtype, Op op, void* const* targets, int num_targets,
                     const void* const* sources, int num_sources, std::size_t count, int size,
                     int multiprocessors);
void pack_on_host(void* packed, DType packed_type, const std::vector<device::Piece>& pieces,
                  DType piece_type, double scale, bool unpacks, int multiprocessors);

}  // namespace pycollective::cuda
