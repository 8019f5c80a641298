// Objects that last as long as the process.
#pragma once

namespace pycollective {

// Returns the only T of the process, created by the first call. It is never destroyed, because
// threads may still use it while the process destroys its statics.
template <class T>
T& lasting() {
  static T& instance = *new T;
  return instance;
}

}  // namespace pycollective
