#pragma once

#include <cstddef>

namespace pycollective {

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace pycollective
