#!/usr/bin/env bash
# Builds the core without CUDA and with sanitizers, then for aarch64, and tests it. CI runs
# this script beside the other tests.
#
#     tests/other_builds.sh
#
# The script needs a virtual environment with the extra [dev], and GCC; for aarch64 root on Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "the core's tests under AddressSanitizer and UBSan, then ThreadSanitizer"
threaded=(tests/core/test_{direct,suite,communicator,messages,message_traffic,async,split}.py)
tests/sanitize.sh address "${threaded[@]}" tests/core/test_{empty,several_parts,collectives}.py tests/device
tests/sanitize.sh thread "${threaded[@]}" \
  tests/nn/test_nn_conv_kernels.py::test_calls_from_many_threads_give_the_same_bits \
  tests/nn/test_nn_conv_kernels.py::test_interpreter_end_with_threads_in_kernels_is_clean

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tests/aarch64.sh "$folder"
