// How a collective call fails. The bindings turn a Failure into the Python error of its kind.
#pragma once

#include <stdexcept>
#include <string>

namespace pycollective {

enum class FailureKind { timeout, mismatch, peer_lost, aborted };

class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, const std::string& message) : Failure(kind, kind, message) {}
  Failure(FailureKind kind, FailureKind kind_for_peers, const std::string& message)
      : std::runtime_error(message), kind(kind), kind_for_peers(kind_for_peers) {}
  FailureKind kind;
  FailureKind
      kind_for_peers;  // a rank that leaves in a call aborts its own call, and peers lose it
};

}  // namespace pycollective
