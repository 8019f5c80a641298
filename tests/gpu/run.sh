#!/usr/bin/env bash
# Everything that needs a GPU. tests/gpu/run.sh [build] [smoke] [tests] [benchmarks] [sanitizer]: these stages, or all but smoke.
#
#   build       installs the package, for this GPU alone; WHEEL=FILE installs that wheel instead of building one
#   smoke       some tests of each part, at most 3 minutes: shows whether anything works
#   tests       the tests marked gpu; JOBS=N runs N at a time, if pytest-xdist is installed
#   benchmarks  benchmarks/gpu_*.py, or those that BENCHMARKS names ("gpu_kernels gpu_nccl")
#   sanitizer   compute-sanitizer's memcheck over tests of the kernels
#
# Each stage but the build takes less than 10 minutes. The script writes gpu.json and gpu.log into $OUT, or into build/gpu.
# Each step adds its result to a gpu.json of the same commit and GPU, and replaces any other gpu.json.
# PYTHON names the interpreter whose packages are used, COMMIT the commit where there is no .git.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-$PWD/build/gpu}
stages=" ${*:-build tests benchmarks sanitizer} "
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/gpu.log
fail() { printf 'tests/gpu/run.sh: %s\n' "$*" | tee -a "$log" >&2; exit 1; }
say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS" | tee -a "$log"; }
asked() { [[ $stages == *" $1 "* ]]; }
for stage in $stages; do
  [[ " build smoke tests benchmarks sanitizer " == *" $stage "* ]] || fail "there is no stage $stage: build, smoke, tests, benchmarks, sanitizer"
done
if asked build; then : >"$log"; fi

# Limits in seconds, which variables may change. A step that runs longer is ended and has failed.
smoke_seconds=170 tests_seconds=${TESTS_SECONDS:-540} test_seconds=120 sanitizer_seconds=${SANITIZER_SECONDS:-270}
declare -A seconds=([gpu_kernels]=120 [gpu_nccl]=150 [gpu_training]=${TRAINING_SECONDS:-280})
export XLA_PYTHON_CLIENT_PREALLOCATE=false # JAX would take most of the memory

gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null) && [ -n "$gpus" ] ||
  fail "there is no GPU here: nvidia-smi finds none"
"$python" -c 'import cupy; assert cupy.cuda.runtime.getDeviceCount(); (cupy.arange(3) + 1).sum()' >>"$log" 2>&1 ||
  fail "CuPy cannot use the GPU ($gpus): pip install 'cupy-cuda12x' or 'cupy-cuda13x'; $log says why"
"$python" -c 'import pytest' || fail "pip install pytest"
top=$PWD
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || true)}

# report tests|benchmark|sanitizer NAME STATUS [TEXT]: adds the result of a step to gpu.json.
report() {
  "$python" - "$out" "$gpus" "$commit" "$@" <<'PY'
import datetime, importlib.metadata, json, os, pathlib, platform, sys
import xml.etree.ElementTree as tree

out, (gpus, commit, kind, name, status) = pathlib.Path(sys.argv[1]), sys.argv[2:7]
packages = ("numpy", "torch", "jax", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
versions = {}
for package in packages:
    try:
        versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        continue
whole = out / "gpu.json"
found = json.loads(whole.read_text()) if whole.exists() else {}
if (found.get("commit"), found.get("gpus")) != (commit, gpus.splitlines()):
    found = {"benchmarks": {}, "benchmarks_that_failed": [], "sanitizer": {}}
now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
found |= {"when": now, "commit": commit, "gpus": gpus.splitlines(), "python": platform.python_version(), "packages": versions}
if kind == "tests":
    cases = out / "tests.xml"
    suites = tree.parse(cases).getroot().iter("testsuite") if cases.exists() else ()
    counts = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, 0))
    found["tests"] = {"exit": int(status), **counts}
    cases.unlink(missing_ok=True)
else:
    failed = [other for other in found["benchmarks_that_failed"] if other != name]
    found["benchmarks_that_failed"] = failed + [name] * (status != "0")
if kind == "benchmark":
    numbers = out / f"{name}.json"
    found["benchmarks"].pop(name, None)
    if numbers.exists():
        found["benchmarks"][name] = json.loads(numbers.read_text())
        numbers.unlink()
if kind == "sanitizer":
    found["sanitizer"][name] = sys.argv[7]
new = out / "gpu.json.new"
new.write_text(json.dumps(found, indent=1) + "\n")
os.replace(new, whole)
PY
}

if asked build; then
  say "build"
  generation=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | tr -d . | paste -sd ';')
  CMAKE_ARGS="-DPYCOLLECTIVE_CUDA_ARCHITECTURES=$generation" "$python" -m pip install -v --no-build-isolation --no-deps "${WHEEL:-.}" >>"$log" 2>&1 ||
    { tail -n 40 "$log" >&2; fail "the build failed"; }
fi
# Started outside the repository, Python imports the installed package.
(cd "$out" && "$python" -c 'import pycollective._core as c; assert c.cuda.built(), "the package was built without CUDA"; print("core", c.__version__, c.__file__)') 2>&1 |
  tee -a "$log" || fail "build the package with nvcc first: tests/gpu/run.sh build"

# run_tests SECONDS OPTIONS: runs tests marked gpu, one at a time or JOBS at a time. Interrupted runs still write their results.
run_tests() {
  local limit=$1 workers=()
  shift
  if [ -n "${JOBS:-}" ] && "$python" -c 'import xdist' 2>>"$log"; then workers=(-n "$JOBS" --dist worksteal); fi
  if "$python" -c 'import pytest_timeout' 2>>"$log"; then workers+=(--timeout "$test_seconds" --timeout-method thread); fi
  (cd "$out" && timeout -s INT -k 20 "$limit" "$python" -m pytest -q -m gpu -W default --rootdir "$top" -c "$top/pyproject.toml" -p no:cacheprovider \
    ${workers[@]+"${workers[@]}"} --junitxml "$out/tests.xml" "$@" 2>&1) | tee -a "$log"
}

tests=0
if asked smoke; then
  say "smoke"
  steps=test_steps_on_gpu.py nccl=test_nccl_on_gpu.py
  run_tests "$smoke_seconds" "$top/tests/gpu/$steps::test_no_step_waits_for_the_device" "$top/tests/gpu/$nccl::test_collectives_of_one_rank_use_nccl" \
    "$top/tests/gpu/$nccl::test_registered_memory_of_nccl_works" "$top/tests/gpu/test_on_device.py" "$top/tests/gpu/test_kernels.py" -k "not (combine_gives or converts) or float32-sum" || tests=$?
  report tests tests "$tests"
fi
if asked tests; then
  say "tests marked gpu"
  run_tests "$tests_seconds" "$top/tests/gpu" || tests=$?
  report tests tests "$tests"
fi

broken=()
if asked benchmarks; then
  shopt -s nullglob
  for benchmark in benchmarks/gpu_*.py; do
    name=$(basename "$benchmark" .py) status=0
    [[ " ${BENCHMARKS:-$name} " == *" $name "* ]] || continue
    limit=${seconds[$name]:-120}
    say "$name, at most $limit s"
    options=()
    [ "$name" = gpu_training ] && options=(--seconds $((limit - 40)))
    (cd "$out" && timeout -k 10 "$limit" "$python" "$top/$benchmark" ${options[@]+"${options[@]}"} --out "$out/$name.json" 2>&1) | tee -a "$log" || status=$?
    [ "$status" -eq 0 ] || broken+=("$name")
    report benchmark "$name" "$status"
  done
fi

if asked sanitizer; then
  # Memcheck alone, since no kernel uses shared memory; few tests, since compute-sanitizer makes them hundreds of times slower.
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1 || true)
  if [ -z "$sanitizer" ]; then
    say "no compute-sanitizer here"
  else
    say "compute-sanitizer, at most $sanitizer_seconds s"
    name=compute-sanitizer-memcheck status=0 said=$out/memcheck.txt
    (cd "$out" && PYCOLLECTIVE_QUICK=1 timeout -k 10 "$sanitizer_seconds" "$sanitizer" --tool memcheck --target-processes all --error-exitcode 9 "$python" -m pytest -q -x -m gpu \
      --rootdir "$top" -c "$top/pyproject.toml" -p no:cacheprovider -k "float or int32 or bool or aligned" "$top/tests/gpu/test_kernels.py" 2>&1) |
      tee -a "$log" "$said" || status=$?
    text="nothing found"
    if [ "$status" -ne 9 ] && refusal=$(grep -iEm 1 '^=+ +Error: .*(not supported|unsupported|permission)' "$said"); then
      text="refused: $refusal" status=0 # the device, or its owner, forbids the tool: no kernel was checked
    elif [ "$status" -eq 124 ]; then
      text="not done in $sanitizer_seconds s"
    elif [ "$status" -ne 0 ]; then
      text="exit status $status"
    elif ! { grep -qE 'SUMMARY: 0 errors' "$said" && grep -qE '[0-9]+ passed' "$said"; }; then
      text="no kernel was checked: the output has no summary, or no test that passed" status=1
    fi
    rm -f "$said"
    say "$name: $text"
    [ "$status" -eq 0 ] || broken+=("$name")
    report sanitizer "$name" "$status" "$text"
  fi
fi

[ ! -e "$out/gpu.json" ] || "$python" -c 'import json, sys; found = json.load(open(sys.argv[1])); print(json.dumps({key: found.get(key) for key in ("gpus", "tests", "sanitizer", "benchmarks_that_failed")}))' "$out/gpu.json"
[ "$tests" -eq 0 ] || fail "tests failed (exit status $tests): $log"
[ ${#broken[@]} -eq 0 ] || fail "failed: ${broken[*]}"
