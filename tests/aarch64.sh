#!/usr/bin/env bash
# Builds the core for aarch64 with a cross compiler, and runs tests under qemu-user.
#
#     tests/aarch64.sh FOLDER            the tests of CI: a selection, and an eighth of all fast tests
#     tests/aarch64.sh FOLDER all        all fast tests, in 30 to 60 minutes
#     tests/aarch64.sh FOLDER ARGUMENTS  pytest with these arguments
#
# The script puts Debian's Python for arm64 and the build into FOLDER. It needs root on Debian, and a
# virtual environment with the extra [dev].
# qemu-user keeps the memory order of x86-64, so these tests do not find a missing memory order.
set -euo pipefail
work=$(realpath -m "${1:?"a folder for the build"}")/aarch64
shift
cd "$(dirname "$0")/.."
top=$PWD root=$work/root
mkdir -p "$root" "$work"/apt/{lists,cache/archives}/partial
touch "$work/apt/status"

echo "aarch64: cross compiler, qemu-user, Debian's Python for arm64"
# apt has a state of its own here, so that the machine keeps its architectures.
arm64=(-o Dir::State="$work/apt" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache"
  -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root)
if ! { apt-get -qq update && apt-get -qq install -y g++-aarch64-linux-gnu qemu-user && apt-get -qq "${arm64[@]}" update &&
  apt-get -qq "${arm64[@]}" install -d -y --no-install-recommends libpython3-dev python3 libstdc++6
} >"$work/apt.log" 2>&1 </dev/null; then
  tail -n 5 "$work/apt.log"
  echo "NOT RUN: tests on aarch64 (apt-get did not install a cross compiler, qemu-user and Python for arm64)"
  exit 0
fi
for package in "$work"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
include=$(echo "$root"/usr/include/python3.*)
version=${include##*/python}
packages=(numpy pytest hypothesis ml_dtypes h5py matplotlib pillow pyyaml safetensors scikit-learn shtab tensorboard threadpoolctl tqdm)
# --compile: Python under qemu takes far longer to compile these packages.
pip install -q --compile --target "$work/site" --only-binary=:all: --python-version "$version" \
  --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 "${packages[@]}"

cmake -S . -B "$work/build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_BUILD_TYPE=None \
  -DCMAKE_CXX_FLAGS="-O1 -isystem $root/usr/include" -DPYCOLLECTIVE_CUDA=OFF \
  -DSKBUILD_PROJECT_VERSION=0.0.0 -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=6 \
  -DPython_EXECUTABLE="$(command -v python)" -DPython_INCLUDE_DIR="$include" \
  -DPYTHON_MODULE_EXTENSION=.so >"$work/log" || { cat "$work/log"; exit 1; }
cmake --build "$work/build" -j "$(nproc)" >"$work/log" 2>&1 || { tail -n 50 "$work/log"; exit 1; }
rm -rf "$work/pycollective"
cp -r pycollective "$work/pycollective"
rm -f "$work"/pycollective/_*.so
cp "$work"/build/_*.so "$work/pycollective/"

# Python takes this file for its own program, so that tests start it again under qemu.
cat >"$work/python" <<END
#!/bin/sh
PYTHONHOME=$root/usr exec qemu-aarch64 -0 "\$0" -L $root $root/usr/bin/python$version "\$@"
END
chmod +x "$work/python"
export PYTHONPATH=$work:$work/site
cd "$work"
"$work/python" -c "import platform, pycollective as pc; print(platform.machine(), pc._core.compiler)"
pytest() {
  timeout 1800 "$work/python" -m pytest -q -o cache_dir="$work/cache" --durations=5 -c "$top/pyproject.toml" --rootdir "$top" "$@"
}
# Some tests compile a stand-in for a device.
mkdir -p "$work/bin"
for name in cc c++ g++; do
  compiler=aarch64-linux-gnu-g++
  [ $name != cc ] || compiler=aarch64-linux-gnu-gcc
  printf '#!/bin/sh\nexec %s -isystem %s/usr/include "$@"\n' $compiler "$root" >"$work/bin/$name"
  chmod +x "$work/bin/$name"
done
# qemu keeps data about each page that is mapped, so it cannot map 16 GiB.
export PATH=$work/bin:$PATH PYCOLLECTIVE_ARENA=$((256 << 20))

if [ $# -gt 0 ] && [ "$1" != all ]; then
  pytest "${@/#tests/$top/tests}"
  exit
fi
parts=1 part=0
if [ $# = 0 ]; then
  pytest "$top"/tests/core/test_{arrays,async}.py "$top"/tests/nn/test_nn_{copies,record,update,windows}.py \
    "$top"/tests/nn/test_nn_dense.py::test_{dense_kernels_equal_the_definition,bad_input_is_named} \
    "$top"/tests/launch/test_processes.py::test_bits_are_those_of_threads
  commit=$(git -C "$top" rev-parse --short=7 HEAD || date +%s)
  parts=8 part=$((0x$commit % 8)) # another eighth with each commit
fi
# qemu-user has no limits of memory and threads, no seccomp filters and no process_vm_readv. It forks
# no process with threads, and executes no other program for aarch64. Memory of its own grows with
# pages and threads, and blocks of files that are punched out stay.
cannot="calls_invalid_arguments_raise_clear_errors or async_call_without_a_thread_raises
  or close_after_a_message_without_memory_returns or many_groups_of_threads_leave_nothing_behind
  or recent_full_cache_forgets_the_oldest_entry or forked_process_runs_a_strategy
  or dropped_block_returns_its_memory or rank_without_membarrier_is_woken
  or messages_are_timed_after_each_page or (share_the_copies and False)"
files=("$top"/tests/*/test_*.py) chosen=() failed=0
for ((i = part; i < ${#files[@]}; i += parts)); do chosen+=("${files[i]}"); done
echo "aarch64: part $((part + 1)) of $parts of the fast tests, ${#chosen[@]} files"
for ((i = 0; i < ${#chosen[@]}; i += 12)); do
  some=("${chosen[@]:i:12}" -k "not ($(echo $cannot))")
  # Programs are ten times slower here, and some tests have deadlines: a test that fails runs once more.
  pytest "${some[@]}" || pytest --last-failed "${some[@]}" || failed=1
done
exit $failed
