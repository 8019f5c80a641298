#!/usr/bin/env bash
# Builds the core in the other ways that there are, and tests each: CI does it beside the slow tests.
#
#     tests/other_builds.sh FOLDER
#
# FOLDER takes what is built. It needs a virtual environment with the extra [dev], and GCC.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?"a folder for what is built"}

echo "a build without CUDA says so and imports without extras (not optimised: that is quicker)"
python3 -m venv "$work/plain"
"$work/plain/bin/pip" install -v . -C cmake.define.PYCOLLECTIVE_CUDA=OFF -C build-dir="$work/build-plain" \
  -C cmake.build-type=Debug >"$work/plain.log" 2>&1 || { tail -n 50 "$work/plain.log"; exit 1; }
grep 'pycollective: CPU core only' "$work/plain.log"
(cd "$work" && "$work/plain/bin/python" -c "
import pycollective as pc, sys
c, = pc.local_group(1)
print(c.all_reduce([1.0, 2.0]))
assert not pc._core.cuda.built()
assert not {'cupy', 'safetensors', 'threadpoolctl', 'tqdm', 'sklearn', 'matplotlib'} & set(sys.modules)")

echo "the core's tests under AddressSanitizer and UBSan, then ThreadSanitizer"
threaded=(tests/core/test_{direct,suite,communicator,messages,message_traffic,async,split}.py)
tests/sanitize.sh address "${threaded[@]}" tests/core/test_{empty,several_parts,collectives}.py tests/device
tests/sanitize.sh thread "${threaded[@]}" \
  tests/nn/test_nn_conv_kernels.py::test_{calls_from_many_threads_give_the_same_bits,threads_that_are_in_kernels_when_the_interpreter_ends}
