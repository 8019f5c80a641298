#include "transport/pipes.h"

#include <algorithm>
#include <cstring>

namespace pycollective {
namespace {

constexpr std::uint64_t kOddFactor = 0x9e3779b97f4a7c15;

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * kOddFactor;
  return hash ^ (hash >> 32);
}

}  // namespace

Envelope::Envelope(std::string_view name, const std::int64_t* lengths, int count,
                   std::uint64_t size)
    : bytes(size), dims(count) {
  set_name(type, name);
  std::copy_n(lengths, std::min(dims, kMaxDims), shape);
  for (char letter : name) identity = mixed(identity, static_cast<unsigned char>(letter));
  identity = mixed(identity, static_cast<std::uint64_t>(dims));
  for (int i = 0; i < dims; ++i) identity = mixed(identity, static_cast<std::uint64_t>(lengths[i]));
}

std::string Envelope::describe() const {
  std::string text(type, strnlen(type, sizeof type));
  text += "[";
  for (int i = 0; i < std::min(dims, kMaxDims); ++i) {
    if (i) text += ", ";
    text += std::to_string(shape[i]);
  }
  if (dims > kMaxDims) text += ", …";
  return text + "]";
}

}  // namespace pycollective
