// Shared by the bindings of calls on host arrays and on device arrays.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <variant>

#include "executor/communicator.h"
#include "schedule/tabulated.h"

namespace pycollective {

// An algorithm by name, or one written by a user.
using Named = std::variant<std::string, std::shared_ptr<TabulatedAlgorithm>>;

// Returns the algorithm; "auto" selects from the communicator's table for this number of bytes.
// Throws std::invalid_argument.
const Algorithm& algorithm_of(Communicator& self, Collective collective, const Named& named,
                              std::size_t bytes);

void check_root(int root, int size);

// Sends or receives a message and waits for it. The caller holds the GIL, which is released unless
// the message is short and the peer is ready.
void exchange(Communicator& self, Message& message, double timeout);

}  // namespace pycollective
