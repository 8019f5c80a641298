// Objects that last as long as the process.
#pragma once

namespace pycollective {

// The one T of the process, made when it is first asked for. It is never destroyed: threads may
// still be in calls that use it when the process ends and its statics are destroyed.
template <class T>
T& lasting() {
  static T& made = *new T;
  return made;
}

}  // namespace pycollective
