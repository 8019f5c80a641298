// Starts threads with a clear error when the system refuses.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace pycollective {

// Starts a thread. Throws std::runtime_error with advice if the system starts no further thread.
template <class Call>
std::jthread start_thread(Call&& call) {
  try {
    return std::jthread(std::forward<Call>(call));
  } catch (const std::system_error& error) {
    throw std::runtime_error(std::string("the system starts no further thread: ") + error.what() +
                             ". Raise the limits on threads (ulimit -u, pids.max of a container) "
                             "or on memory (ulimit -v), or use fewer threads");
  }
}

}  // namespace pycollective
