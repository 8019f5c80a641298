"""`Recent` (csrc/support/recent.h): the cache of repeated calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "csrc"
PROGRAM = """
#include "support/recent.h"
#include <cstdlib>
#include <memory>

using Cache = pycollective::Recent<std::shared_ptr<int>, 3>;

void expect(bool condition) { if (!condition) std::abort(); }

int value_of(Cache& cache, int wanted) {
  auto* found = cache.find([&](const std::shared_ptr<int>& entry) { return *entry == wanted; });
  return found ? **found : -1;
}

int main() {
  Cache cache;
  expect(value_of(cache, 0) == -1);
  auto first = std::make_shared<int>(0);
  expect(**cache.add(first) == 0);
  for (int i = 1; i < 3; ++i) cache.add(std::make_shared<int>(i));
  for (int i : {2, 0, 1, 1, 0}) expect(value_of(cache, i) == i);
  expect(first.use_count() == 2);
  cache.add(std::make_shared<int>(3));  // in the place of the oldest, although it was used last
  expect(first.use_count() == 1);
  expect(value_of(cache, 0) == -1);
  for (int i : {1, 2, 3}) expect(value_of(cache, i) == i);
  cache.add(std::make_shared<int>(4));
  expect(value_of(cache, 1) == -1);
  for (int i : {2, 3, 4}) expect(value_of(cache, i) == i);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_recent_full_cache_forgets_the_oldest_entry(tmp_path):
    source, program = tmp_path / "test.cc", tmp_path / "test"
    source.write_text(PROGRAM)
    subprocess.run(["g++", "-std=c++20", f"-I{CORE}", source, "-o", program], check=True)
    subprocess.run([program], check=True)
