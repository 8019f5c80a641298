"""`in_parallel` when a part throws, and when the system refuses threads: a compiled C++ program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CORE = Path(__file__).parents[2] / "csrc"
_PROGRAM = """
#include <pthread.h>

#include <cerrno>
#include <new>
#include <numeric>
#include <vector>

#include "support/parallel.h"

bool refuses = false;
extern "C" int __real_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
extern "C" int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                                     void* (*function)(void*), void* argument) {
  return refuses ? EAGAIN : __real_pthread_create(thread, attributes, function, argument);
}

int sum(int parts) {
  std::vector<int> done(static_cast<std::size_t>(parts));
  pycollective::in_parallel(parts, [&](int part) { done[static_cast<std::size_t>(part)] = 1; });
  return std::accumulate(done.begin(), done.end(), 0);
}

int main() {
  refuses = true;
  if (sum(4) != 4) return 1;
  refuses = false;
  for (int failing = 0; failing < 4; ++failing) {
    for (int turn = 0; turn < 200; ++turn) {
      try {
        pycollective::in_parallel(4, [&](int part) {
          if (part == failing) throw std::bad_alloc();
        });
        return 2;
      } catch (const std::bad_alloc&) {
      }
      if (sum(4) != 4) return 3;
    }
  }
}
"""

pytestmark = [
    pytest.mark.slow,  # compiling takes seconds
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs a linker with --wrap"),
]


def test_exceptions_reach_the_caller_and_missing_threads_do_not_matter(tmp_path: Path) -> None:
    source, program = tmp_path / "program.cc", tmp_path / "program"
    source.write_text(_PROGRAM)
    files = [source, _CORE / "support/parallel.cc", _CORE / "support/cores_linux.cc"]
    options = ["-std=c++20", "-O1", "-pthread", f"-I{_CORE}", "-Wl,--wrap=pthread_create"]
    # The call to pthread_create() is in libstdc++: --wrap finds it only in the static library.
    subprocess.run(["g++", *options, "-static-libstdc++", *files, "-o", program], check=True)
    assert subprocess.run([program], timeout=60).returncode == 0
