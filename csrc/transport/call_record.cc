#include <algorithm>
#include <cstring>
#include <sstream>
#include <string_view>

#include "transport/transport.h"

namespace pycollective {

std::string CallRecord::describe() const {
  std::string text = std::string(collective) + " #" + std::to_string(number);
  if (dtype[0] == 0) return text;
  // The hash stands for the letters and lengths that are not in the record.
  std::ostringstream hash;
  hash << std::hex << (detail & 0xffff);
  text += " (" + std::string(dtype);
  if (std::strlen(dtype) == sizeof dtype - 1) text += "…" + hash.str();
  text += "[";
  for (int i = 0; i < std::min(dims, kMaxDims); ++i) {
    if (shape[i] == kNextArray) {
      text += "] [";
      continue;
    }
    if (i && shape[i - 1] != kNextArray) text += ", ";
    text += shape[i] < 0 ? "*" : std::to_string(shape[i]);
  }
  if (dims > kMaxDims) text += (shape[kMaxDims - 1] == kNextArray ? "… " : ", … ") + hash.str();
  text += "]";
  if (op[0]) text += std::string(", ") + op;
  if (algorithm[0]) text += std::string(", ") + algorithm;
  if (root >= 0) text += ", root " + std::to_string(root);
  return text + ")";
}

void CallRecord::name_reproducible() {
  set_name(algorithm, std::string(algorithm) + ", reproducible");
}

namespace {

// The finalizer of splitmix64.
std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
  hash += word + 0x9e3779b97f4a7c15;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

}  // namespace

void CallRecord::seal() {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  auto mix_name = [&hash](std::string_view name) {
    for (std::size_t i = 0; i == 0 || i < name.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, name.data() + i, std::min(name.size() - i, sizeof word));
      hash = mix(hash, word);
    }
  };
  mix_name(collective);
  mix_name(algorithm);
  mix_name(op);
  mix_name(dtype);
  hash = mix(hash, static_cast<std::uint64_t>(root));
  hash = mix(hash, static_cast<std::uint64_t>(dims));
  for (int i = 0; i < std::min(dims, kMaxDims); ++i) {
    hash = mix(hash, static_cast<std::uint64_t>(shape[i]));
  }
  identity = mix(hash, detail);
}

std::uint64_t fingerprint_after(std::uint64_t before, std::uint64_t identity) {
  return mix(before, identity);
}

void CallHistory::add(const CallRecord& call) {
  ++number_;
  fingerprint_ = fingerprint_after(fingerprint_, call.identity);
  if (number_ == 1 || records_[record_ % kLength].identity != call.identity) {
    records_[++record_ % kLength] = call;
  }
  entries_[number_ % kLength] = {fingerprint_, record_};
}

CallRecord CallHistory::record_of(std::uint64_t number) const {
  const Entry& entry = entries_[number % kLength];
  CallRecord call = records_[entry.record % kLength];
  call.number = number;
  call.fingerprint = entry.fingerprint;
  return call;
}

}  // namespace pycollective
