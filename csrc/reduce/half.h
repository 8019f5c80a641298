// float16 and bfloat16 are storage types: they are widened to float32, combined, and narrowed again
// (to nearest, ties to even). NaNs stay NaNs and keep their sign.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// The conversions of one type; items are passed as their bits.
struct HalfType {
  void (*widen)(float* to, const std::uint16_t* from, std::size_t count);
  void (*narrow)(std::uint16_t* to, const float* from, std::size_t count);
};

const HalfType& float16();   // with F16C if the processor has it
const HalfType& bfloat16();  // with integer operations, which vectorize everywhere

// The float16 conversions that every processor can run; they give the same bits.
const HalfType& portable_float16();

}  // namespace pycollective
