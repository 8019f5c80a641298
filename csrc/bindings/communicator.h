// What the bindings of a communicator's calls have in common, on host arrays and on devices'.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <variant>

#include "executor/communicator.h"
#include "schedule/tabulated.h"

namespace pycollective {

// An algorithm by name, or one that a user has written.
using Named = std::variant<std::string, std::shared_ptr<TabulatedAlgorithm>>;

// "auto" means what the communicator's table says for so many bytes. Throws std::invalid_argument.
const Algorithm& algorithm_of(Communicator& self, Collective collective, const Named& named,
                              std::size_t bytes);

void check_root(int root, int size);

// Carries out a message and waits for it. Called with the interpreter, which it lets go of unless
// the message is short and the peer is there.
void exchange(Communicator& self, Message& message, double timeout);

}  // namespace pycollective
