// float16 and bfloat16 are never computed with: they are widened to float32, combined, and narrowed
// again (to nearest, ties to even). NaNs stay NaNs, with their sign.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// One of the two types, as its bits.
struct HalfType {
  void (*widen)(float* to, const std::uint16_t* from, std::size_t count);
  void (*narrow)(std::uint16_t* to, const float* from, std::size_t count);
};

const HalfType& float16();   // by F16C where the processor has it
const HalfType& bfloat16();  // by bits, which vectorises everywhere

// The float16 that every processor can run; the same bits.
const HalfType& portable_float16();

}  // namespace pycollective
