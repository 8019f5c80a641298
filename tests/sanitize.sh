#!/usr/bin/env bash
# Builds the core with a sanitizer and runs the core's tests on it.
#
#     tests/sanitize.sh address|thread [pytest arguments]
#
# "address" finds wrong memory accesses and undefined behaviour, "thread" data races. The script needs
# a virtual environment with this package, the extra [dev], cmake and ninja (pip) and GCC. Python itself
# is not instrumented: the sanitizer's library is loaded before it.
set -euo pipefail
kind=${1:?"address or thread"}
shift
top=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake -S "$top" -B "$work/build" -G Ninja -DPYCOLLECTIVE_CUDA=OFF -DPYCOLLECTIVE_SANITIZE="$kind" \
  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 -DSKBUILD_PROJECT_VERSION=0 \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=6 \
  -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$(command -v python)" \
  >"$work/log" || { cat "$work/log"; exit 1; }
grep 'pycollective: CPU core only (PYCOLLECTIVE_CUDA=OFF)' "$work/log"
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/core)
targets=(_core)
[[ " ${tests[*]}" != *" tests/nn"* ]] || targets+=(_nn)
cmake --build "$work/build" -j "$(nproc)" --target "${targets[@]}" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
# Tests of the core alone import the kernels of neural networks, which need not be instrumented.
kernels=$(cd "$work" && python -c "import pycollective._nn; print(pycollective._nn.__file__)")
cp -r "$top/pycollective" "$work/pycollective"
rm -f "$work"/pycollective/_*.so
cp "$kernels" "$work/pycollective/"
cp "$work"/build/_*.so "$work/pycollective/"

compiler=${CXX:-c++}
case $kind in
  address) library=libasan.so ;;
  thread) library=libtsan.so ;;
esac
# libstdc++ comes first too: otherwise the sanitizer does not find how exceptions are thrown.
export LD_PRELOAD="$("$compiler" -print-file-name="$library") $("$compiler" -print-file-name=libstdc++.so.6)"
# CPython keeps memory until it ends, which is no leak of ours.
# Reports go to files: pytest captures stderr, and loses it when the process ends.
export ASAN_OPTIONS="log_path=$work/report detect_leaks=0 allocator_may_return_null=1"
export UBSAN_OPTIONS="log_path=$work/report print_stacktrace=1"
export TSAN_OPTIONS="log_path=$work/report exitcode=66 suppressions=$top/tests/thread_sanitizer.supp"
export PYTHONPATH="$work" OPENBLAS_NUM_THREADS=1
export PYCOLLECTIVE_SANITIZED=1  # tests are shorter then
status=0
# Run in $work, so that Python imports this build of the core.
(cd "$work" && python -c "import pycollective._core as c, os; assert os.getcwd() in c.__file__ and not c.cuda.built()" &&
  python -m pytest -q -p no:cacheprovider --durations=5 -c "$top/pyproject.toml" --rootdir "$top" "${tests[@]/#tests/$top/tests}") || status=$?
unset LD_PRELOAD
cat "$work"/report* 2>/dev/null || true
exit "$status"
