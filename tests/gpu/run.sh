#!/usr/bin/env bash
# Everything that needs a GPU: builds the package here, runs the tests marked gpu and the benchmarks benchmarks/gpu_*.py.
# Writes gpu.json and gpu.log into $OUT, or into build/gpu. PYTHON names the interpreter whose packages are used.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-$PWD/build/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/gpu.log
: >"$log"
fail() { printf 'tests/gpu/run.sh: %s\n' "$*" | tee -a "$log" >&2; exit 1; }
say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS" | tee -a "$log"; }

gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null) && [ -n "$gpus" ] ||
  fail "there is no GPU here: nvidia-smi finds none"
"$python" -c 'import cupy; assert cupy.cuda.runtime.getDeviceCount(); (cupy.arange(3) + 1).sum()' >>"$log" 2>&1 ||
  fail "CuPy cannot use the GPU ($gpus): pip install 'cupy-cuda12x' or 'cupy-cuda13x'; $log says why"
"$python" -c 'import pytest' || fail "pip install pytest"

say "build"
"$python" -m pip install -v --no-build-isolation --no-deps . >>"$log" 2>&1 || { tail -n 40 "$log" >&2; fail "the build failed"; }
(cd "$out" && "$python" -c 'import pycollective._core as c; print("core", c.__version__, "with CUDA" if c.cuda.built() else "without CUDA")') | tee -a "$log"

say "tests marked gpu"
top=$PWD
tests=0
# From elsewhere, so that the package is the one that was installed.
(cd "$out" && "$python" -m pytest -q -m gpu -W default --rootdir "$top" -c "$top/pyproject.toml" -p no:cacheprovider \
  --junitxml "$out/tests.xml" "$top/tests" 2>&1) | tee -a "$log" || tests=$?

shopt -s nullglob
broken=()
# A few of each kind of kernel: compute-sanitizer makes them hundreds of times slower.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1 || true)
for tool in memcheck racecheck; do
  [ -n "$sanitizer" ] || { say "no compute-sanitizer here"; break; }
  say "compute-sanitizer: $tool"
  (cd "$out" && PYCOLLECTIVE_QUICK=1 timeout 600 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -x -m gpu \
    --rootdir "$top" -c "$top/pyproject.toml" -p no:cacheprovider -k "float or int32 or bool or aligned" "$top/tests/gpu/test_kernels.py" 2>&1) |
    tee -a "$log" || broken+=("compute-sanitizer-$tool")
done
for benchmark in benchmarks/gpu_*.py; do
  name=$(basename "$benchmark" .py)
  say "$name"
  (cd "$out" && "$python" "$top/$benchmark" --out "$out/$name.json" 2>&1) | tee -a "$log" || broken+=("$name")
done

GPUS=$gpus TESTS=$tests BROKEN=${broken[*]-} COMMIT=$(git rev-parse HEAD 2>/dev/null || true) "$python" - "$out" <<'PY'
import datetime, importlib.metadata, json, os, pathlib, platform, sys
import xml.etree.ElementTree as tree

out = pathlib.Path(sys.argv[1])
packages = ("numpy", "torch", "jax", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
versions = {}
for name in packages:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
report = out / "tests.xml"
suites = tree.parse(report).getroot().iter("testsuite") if report.exists() else ()
counts = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
for suite in suites:
    for key in counts:
        counts[key] += int(suite.get(key, 0))
found = {
    "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "commit": os.environ["COMMIT"],
    "gpus": os.environ["GPUS"].splitlines(),
    "python": platform.python_version(),
    "packages": versions,
    "tests": {"exit": int(os.environ["TESTS"]), **counts},
    "benchmarks": {p.stem: json.loads(p.read_text()) for p in sorted(out.glob("gpu_*.json"))},
    "benchmarks_that_failed": os.environ["BROKEN"].split(),
}
report.unlink(missing_ok=True)
for path in out.glob("gpu_*.json"):
    path.unlink()
(out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
print(json.dumps({key: found[key] for key in ("gpus", "tests", "benchmarks_that_failed")}))
PY
[ "$tests" -eq 0 ] || fail "tests failed (exit status $tests): $log"
[ ${#broken[@]} -eq 0 ] || fail "failed: ${broken[*]}"
