// One call of a kernel on several cores.
#pragma once

#include <functional>

#include "nn/window.h"

namespace pycollective::nn {

// Where part `part` of `count` things begins, and the part before it ends.
inline Index begin_of_part(Index count, int part, int parts) { return count * part / parts; }

// Into how many parts a kernel divides its images, and on how many threads it works at most; as
// many as there are cores unless set_threads() says something else.
int threads();
void set_threads(int count);

// Calls body(0), ..., body(parts - 1), some of them in other threads, and returns when all have
// returned. The threads are shared by all callers: one that finds them at work for somebody else
// does everything itself. `body` must not throw.
void in_parallel(int parts, const std::function<void(int)>& body);

}  // namespace pycollective::nn
