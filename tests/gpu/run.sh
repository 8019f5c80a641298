#!/usr/bin/env bash
# Everything that needs a GPU: builds the package here, runs the tests marked gpu, the benchmarks benchmarks/gpu_*.py, and
# compute-sanitizer over the kernels' tests. tests/gpu/run.sh [build] [tests] [benchmarks] [sanitizer]: these stages, or all;
# each but the build takes less than 10 minutes. Writes gpu.json and gpu.log into $OUT, or into build/gpu; gpu.json after each
# step, into what other stages of the same commit and GPU have left there. PYTHON names the interpreter whose packages are used.
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
  [[ " build tests benchmarks sanitizer " == *" $stage "* ]] || fail "there is no stage $stage: build, tests, benchmarks, sanitizer"
done
if asked build; then : >"$log"; fi

# Seconds. What runs longer is ended, and has failed.
tests_seconds=540 sanitizer_seconds=270
declare -A seconds=([gpu_kernels]=120 [gpu_nccl]=150 [gpu_training]=280)

gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null) && [ -n "$gpus" ] ||
  fail "there is no GPU here: nvidia-smi finds none"
"$python" -c 'import cupy; assert cupy.cuda.runtime.getDeviceCount(); (cupy.arange(3) + 1).sum()' >>"$log" 2>&1 ||
  fail "CuPy cannot use the GPU ($gpus): pip install 'cupy-cuda12x' or 'cupy-cuda13x'; $log says why"
"$python" -c 'import pytest' || fail "pip install pytest"
top=$PWD
commit=$(git rev-parse HEAD 2>/dev/null || true)

# report tests|benchmark|sanitizer NAME STATUS [TEXT]: puts what a step gave into gpu.json.
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
  "$python" -m pip install -v --no-build-isolation --no-deps . >>"$log" 2>&1 || { tail -n 40 "$log" >&2; fail "the build failed"; }
  (cd "$out" && "$python" -c 'import pycollective._core as c; print("core", c.__version__, "with CUDA" if c.cuda.built() else "without CUDA")') | tee -a "$log"
fi

tests=0
if asked tests; then
  say "tests marked gpu"
  # From elsewhere, so that the package is the one that was installed. Interrupted tests still write what they found.
  (cd "$out" && timeout -s INT -k 20 "$tests_seconds" "$python" -m pytest -q -m gpu -W default --rootdir "$top" -c "$top/pyproject.toml" \
    -p no:cacheprovider --junitxml "$out/tests.xml" "$top/tests" 2>&1) | tee -a "$log" || tests=$?
  report tests tests "$tests"
fi

broken=()
if asked benchmarks; then
  shopt -s nullglob
  for benchmark in benchmarks/gpu_*.py; do
    name=$(basename "$benchmark" .py) status=0
    limit=${seconds[$name]:-120}
    say "$name, at most $limit s"
    options=()
    [ "$name" = gpu_training ] && options=(--seconds $((limit - 80)))
    (cd "$out" && timeout -k 10 "$limit" "$python" "$top/$benchmark" ${options[@]+"${options[@]}"} --out "$out/$name.json" 2>&1) | tee -a "$log" || status=$?
    [ "$status" -eq 0 ] || broken+=("$name")
    report benchmark "$name" "$status"
  done
fi

if asked sanitizer; then
  # A few of each kind of kernel: compute-sanitizer makes them hundreds of times slower.
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1 || true)
  for tool in memcheck racecheck; do
    [ -n "$sanitizer" ] || { say "no compute-sanitizer here"; break; }
    say "compute-sanitizer: $tool, at most $sanitizer_seconds s"
    name=compute-sanitizer-$tool status=0 said=$out/$tool.txt
    (cd "$out" && PYCOLLECTIVE_QUICK=1 timeout -k 10 "$sanitizer_seconds" "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 9 "$python" -m pytest -q -x -m gpu \
      --rootdir "$top" -c "$top/pyproject.toml" -p no:cacheprovider -k "float or int32 or bool or aligned" "$top/tests/gpu/test_kernels.py" 2>&1) |
      tee -a "$log" "$said" || status=$?
    text="nothing found"
    if [ "$status" -ne 9 ] && refusal=$(grep -iEm 1 '^=+ +Error: .*(not supported|unsupported|permission)' "$said"); then
      text="refused: $refusal" status=0 # by the device, or whoever lends it: nothing was looked at
    elif [ "$status" -eq 124 ]; then
      text="not done in $sanitizer_seconds s"
    elif [ "$status" -ne 0 ]; then
      text="exit status $status"
    elif ! { grep -qE 'SUMMARY: 0 (errors|hazards)' "$said" && grep -qE '[0-9]+ passed' "$said"; }; then
      text="no kernel was looked at: no summary of it, or no test that passed" status=1
    fi
    rm -f "$said"
    say "$name: $text"
    [ "$status" -eq 0 ] || broken+=("$name")
    report sanitizer "$name" "$status" "$text"
  done
fi

[ ! -e "$out/gpu.json" ] || "$python" -c 'import json, sys; found = json.load(open(sys.argv[1])); print(json.dumps({key: found.get(key) for key in ("gpus", "tests", "sanitizer", "benchmarks_that_failed")}))' "$out/gpu.json"
[ "$tests" -eq 0 ] || fail "tests failed (exit status $tests): $log"
[ ${#broken[@]} -eq 0 ] || fail "failed: ${broken[*]}"
