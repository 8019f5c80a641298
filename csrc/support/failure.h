// How a collective call fails. The bindings turn a Failure into the Python error of its kind.
#pragma once

#include <stdexcept>
#include <string>

namespace pycollective {

enum class FailureKind { timeout, mismatch, peer_lost, aborted };

class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  FailureKind kind;
};

}  // namespace pycollective
