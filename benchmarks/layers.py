"""Compare every layer and operation of the package with PyTorch and JAX, forward and gradients.

    python benchmarks/layers.py --peers TORCH/bin/python JAX/bin/python --json layers.json
    python benchmarks/layers.py --only gelu Conv2D --batches 16 --seconds 0.2

A row is one layer, activation, loss, metric, optimizer or tensor operation with a gradient, at one shape
and one batch, in float32. The names come from the package's registry, and layer_cases.py has their
shapes, their arguments and the peers' counterparts. A name without a case there gets a row with one
generic shape and no peers if it can be built without arguments. Otherwise the report lists it under
"No case yet".

Peers
    PyTorch runs with contiguous and with channels_last images, and its faster time counts. JAX runs with
    jit. Each contestant has its own process and all cores: ours with this interpreter, the peers with
    the first of --peers that has torch or jax. A row says so if it has no peer. Peers compute a metric
    of one batch; ours also accumulates. JAX has no optimizers.

Checks
    Each peer first compares its results with ours. The results are outputs and gradients of all
    inputs and weights (in losses, of the predictions only). Of an optimizer they are the parameters
    after one step, of a metric the result after one update. Differences above 1e-3 of the largest
    value end the comparison with exit status 1. Random results are not compared.

Timing
    The contestants take turns for --rounds rounds. In each round, calls are repeated for --seconds, and
    at least 3 times after one call to warm up. A contestant counts with its fastest call.

The --json file is written after each row and read at the start. A row that is in the file is not run
again unless it failed. So a long comparison can be stopped and resumed. --again runs all rows.
Close other programs. --batches 16 --seconds 0.02 --rounds 1 is a trial.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compare import cores, has, table, time_text
from layer_cases import CASES, NOT_MEASURED, Case

TOLERANCE = 1e-3
GENERIC = {"layers": "N 56 56 64", "activations": "N 56 56 64", "losses": "N 1000 p; N 1000 p",
           "metrics": "N 1000 p; N 1000 p", "optimizers": "1024 1000",
           "operations": "N 56 56 64 p"}  # fmt: skip
OURS, PEERS = "pycollective", {"torch": "PyTorch", "jax": "JAX"}
Row = tuple[str, str, int, int]  # kind, name, number of the case, batch

# The registry ---------------------------------------------------------------------------------------


def registry() -> dict[str, dict[str, Any]]:
    """Return all classes and functions to measure, by kind and name, each under its first name."""
    from pycollective import nn
    from pycollective.keras import registration
    from pycollective.tensor.ops._define import DIFFERENTIABLE

    for name in dir(nn):
        getattr(nn, name)  # modules register their operations when they are imported
    found: dict[str, dict[str, Any]] = {}
    for kind in [k for k in CASES if k != "operations"]:
        importlib.import_module(f"pycollective.keras.{kind}")
        # Functions of layers, losses and metrics are what the classes call.
        measured = inspect.isfunction if kind == "activations" else inspect.isclass
        found[kind] = {
            target.__name__: target
            for (module, name), target in sorted(registration._public.items())
            if module == f"keras.{kind}" and measured(target) and name not in NOT_MEASURED
        }
    known = found["activations"]
    found["operations"] = {
        name: target
        for name, target in sorted(DIFFERENTIABLE.items())
        if name not in known and target not in known.values() and name not in NOT_MEASURED
    }
    return found


def needs_arguments(kind: str, target: Any) -> bool:
    """Return True if a name has no generic row: a class with arguments, or a function of several."""
    parameters = [*inspect.signature(target).parameters.values()]
    required = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    return len(required) > (1 if kind in ("activations", "operations") else 0)


def cases_of(kind: str, name: str, target: Any) -> list[Case]:
    """Return the cases of a name, or its generic case, or nothing."""
    if name in CASES[kind]:
        return CASES[kind][name]
    return [] if needs_arguments(kind, target) else [Case(GENERIC[kind], random=True)]


def without_case() -> set[str]:
    """Return the names that have neither a case nor a generic shape."""
    return {
        f"{kind}.{name}"
        for kind, targets in registry().items()
        for name, target in targets.items()
        if not cases_of(kind, name, target)
    }


def rows(batches: list[int], only: list[str] | None) -> Iterator[tuple[str, Row, Case]]:
    """Yield the title, the key and the case of each row."""
    for kind, targets in registry().items():
        for name, target in targets.items():
            for number, case in enumerate(cases_of(kind, name, target)):
                for batch in batches if "N" in case.shapes.split() else batches[:1]:
                    if only and name not in only and kind not in only:
                        continue
                    shapes = case.shapes.replace("N ", f"{batch} ")
                    title = f"{kind}.{name}({case.arguments}) of {shapes}"
                    yield title, (kind, name, number, batch), case


def arrays_of(case: Case, batch: int) -> list[Any]:
    """Return the inputs of a case."""
    random = np.random.default_rng(0)
    found: list[Any] = []
    for text in case.shapes.split(";"):
        words = text.split()
        how = "" if words[-1].isdigit() or words[-1] == "N" else words.pop()
        shape = [batch if word == "N" else int(word) for word in words]
        if how.startswith("<"):
            found.append(random.integers(0, int(how[1:]), shape).astype(np.int32))
        elif how == "h":
            found.append(
                np.eye(shape[-1], dtype=np.float32)[random.integers(0, shape[-1], shape[:-1])]
            )
        elif how:
            x = random.uniform(0.05, 0.95, shape).astype(np.float32)
            found.append(x / x.sum(-1, keepdims=True) if how == "s" else x)
        else:
            found.append(random.standard_normal(shape, dtype=np.float32))
    return found


# Contestants: each returns functions of one call by the name of a format -----------------------------

Steps = dict[str, Callable[[], tuple[list[Any], list[Any]]]]


def with_gradient(kind: str, arrays: list[Any]) -> list[int]:
    """Return the numbers of the inputs whose gradients count."""
    if kind == "metrics":
        return []
    every = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
    return every[-1:] if kind == "losses" else every


def our_steps(row: Row, case: Case, data: dict[str, list[Any]]) -> Steps:
    import pycollective as tf
    from pycollective import nest

    kind, name, _, batch = row
    target = registry()[kind][name]
    arrays = arrays_of(case, batch)
    inputs = [tf.constant(a) for a in arrays]
    sources = [inputs[i] for i in with_gradient(kind, arrays)]
    names = dict(zip("xyz", inputs, strict=False)) if kind != "optimizers" else {}
    if kind in ("activations", "operations"):
        text = f"f({case.arguments or ', '.join(names)})"
        call = eval(f"lambda: {text}", {"f": target, **names})
    else:
        instance = eval(f"cls({case.arguments})", {"cls": target})
    if kind == "layers":
        options = (
            {"training": True} if "training" in inspect.signature(instance.call).parameters else {}
        )
        argument = inputs if len(inputs) > 1 else inputs[0]
        instance(argument, **options)
        random = np.random.default_rng(1)
        for v in instance.trainable_variables:
            v.assign(0.1 * random.standard_normal(v.shape, dtype=np.float32))
        data["weights"] = [v.numpy() for v in instance.trainable_variables]
        sources += instance.trainable_variables

        def call() -> Any:
            return instance(argument, **options)
    elif kind == "losses":

        def call() -> Any:
            return instance(*inputs)
    elif kind == "metrics":

        def update() -> tuple[list[Any], list[Any]]:
            instance.update_state(*inputs)
            return [instance.result()], []

        return {"": update}
    elif kind == "optimizers":
        variables = [tf.Variable(a) for a in arrays]
        gradients = [tf.constant(0.1 * a) for a in arrays]

        def apply() -> tuple[list[Any], list[Any]]:
            instance.apply_gradients(zip(gradients, variables, strict=True))
            return [v.value() for v in variables], []

        return {"": apply}
    random = np.random.default_rng(2)
    shapes = [y.shape for y in nest.flatten(call())]
    data["cotangents"] = [np.asarray(random.standard_normal(s), np.float32) for s in shapes]
    cotangents = [tf.constant(c) for c in data["cotangents"]]

    def step() -> tuple[list[Any], list[Any]]:
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = nest.flatten(call())
        return outputs, tape.gradient(outputs, sources, output_gradients=cotangents)

    return {"": step}


def torch_steps(row: Row, case: Case, data: dict[str, list[Any]]) -> Steps:
    import torch

    kind, name, _, batch = row
    arrays = arrays_of(case, batch)
    space = {"torch": torch, "xp": torch, "F": torch.nn.functional}
    if kind == "optimizers":
        parameters = [torch.nn.Parameter(torch.from_numpy(a)) for a in arrays]
        for p, a in zip(parameters, arrays, strict=True):
            p.grad = torch.from_numpy(np.float32(0.1) * a)
        optimizer = eval(case.torch, space | {"p": parameters})

        def apply() -> tuple[list[Any], list[Any]]:
            optimizer.step()
            return parameters, []

        return {"": apply}
    images = kind == "layers" and case.transposed and arrays[0].ndim == 4
    order = (2, 3, 0, 1) if "Depthwise" in name else (3, 2, 0, 1)  # of a kernel
    back = tuple(map(int, np.argsort(order)))

    def step_of(memory: Any) -> Callable[[], tuple[list[Any], list[Any]]]:
        def tensor(a: Any, axes: tuple[int, ...]) -> Any:
            moved = images and a.ndim == 4
            t = torch.from_numpy(a)
            return t.permute(axes).contiguous(memory_format=memory) if moved else t.clone()

        inputs = [tensor(a, (0, 3, 1, 2)) for a in arrays]
        weights = [tensor(a, order) for a in data["weights"]]
        cotangents = [tensor(c, (0, 3, 1, 2)) for c in data["cotangents"]]
        sources = [inputs[i] for i in with_gradient(kind, arrays)] + weights
        for s in sources:
            s.requires_grad_()
        names = {**dict(zip("xyz", inputs, strict=False)), **dict(zip("wb", weights, strict=False))}
        call = eval(f"lambda: {case.torch}", space | names)

        def nhwc(t: Any) -> Any:
            return t.permute(0, 2, 3, 1) if images and t.dim() == 4 else t

        def step() -> tuple[list[Any], list[Any]]:
            found = call()
            outputs = list(found) if isinstance(found, (tuple, list)) else [found]
            gradients = torch.autograd.grad(outputs, sources, cotangents) if sources else ()
            count = len(sources) - len(weights)
            kernels = [g.permute(back) if images and g.dim() == 4 else g for g in gradients[count:]]
            return [nhwc(y) for y in outputs], [nhwc(g) for g in gradients[:count]] + kernels

        return step

    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    return {f: step_of(m) for f, m in formats.items() if images or f == "contiguous"}


def jax_steps(row: Row, case: Case, data: dict[str, list[Any]]) -> Steps:
    import jax
    from jax import lax
    from jax import numpy as jnp

    nhwc = ("NHWC", "HWIO", "NHWC")

    def conv(x: Any, w: Any, stride: int, padding: str, dilation: int = 1, groups: int = 1) -> Any:
        return lax.conv_general_dilated(
            x, w, (stride,) * 2, padding, rhs_dilation=(dilation,) * 2, dimension_numbers=nhwc,
            feature_group_count=groups,
        )  # fmt: skip

    def depthwise(x: Any, w: Any) -> Any:
        return conv(x, w.transpose(0, 1, 3, 2), 1, "SAME", 1, x.shape[-1])

    def normalized(x: Any, w: Any, b: Any, axes: tuple[int, ...]) -> Any:
        mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-3) * w + b

    space = {
        "jax": jax, "jnp": jnp, "xp": jnp, "lax": lax, "conv": conv, "depthwise": depthwise,
        "NHWC": nhwc,
        "batch_norm": lambda x, w, b: normalized(x, w, b, tuple(range(x.ndim - 1))),
        "layer_norm": lambda x, w, b: normalized(x, w, b, (-1,)),
    }  # fmt: skip
    arrays = arrays_of(case, row[3])
    chosen = with_gradient(row[0], arrays)
    names = [*"xyz"[: len(arrays)], *"wb"[: len(data["weights"])]]
    call = eval(f"lambda {', '.join(names)}: {case.jax}", space)
    every = [jnp.asarray(a) for a in [*arrays, *data["weights"]]]
    chosen += range(len(arrays), len(every))
    cotangents = [jnp.asarray(c) for c in data["cotangents"]]

    @jax.jit
    def run(every: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        def forward(*sources: Any) -> list[Any]:
            given = dict(zip(chosen, sources, strict=True))
            return jax.tree.leaves(call(*(given.get(i, a) for i, a in enumerate(every))))

        if not chosen:
            return forward(), []
        outputs, pull = jax.vjp(forward, *(every[i] for i in chosen))
        return outputs, list(pull(cotangents))

    return {"": lambda: jax.block_until_ready(run(every, cotangents))}


# A contestant's process ------------------------------------------------------------------------------


def to_numpy(value: Any) -> Any:
    """Return a result of any contestant as a dense NumPy array."""
    if type(value).__name__ == "IndexedSlices":
        import pycollective as tf

        value = tf.convert_to_tensor(value)
    if getattr(value, "is_sparse", False):
        value = value.to_dense()
    return np.asarray(value.detach() if hasattr(value, "detach") else value)


def difference(name: str, found: Any, expected: Any) -> str:
    """Return a text if two results differ by more than the tolerance."""
    if found.shape != expected.shape:
        return f"{name} has shape {expected.shape}, not {found.shape}"
    if not expected.size:
        return ""
    error = float(np.max(np.abs(found.astype(np.float64) - expected)))
    limit = TOLERANCE * max(float(np.max(np.abs(found))), 1e-6)
    return "" if error <= limit else f"{name} differs by {error:.3g} (at most {limit:.3g})"


def prepare(who: str, row: Row, case: Case, file: str) -> tuple[Steps, str]:
    """Make a contestant's steps; ours writes its results to ``file``, and peers compare theirs."""
    data: dict[str, list[Any]] = {"weights": [], "cotangents": [], "outputs": [], "gradients": []}
    if who != OURS:
        with np.load(file) as kept:
            for key in kept.files:
                data[key.split()[0]].append(kept[key])
        steps = {"torch": torch_steps, "jax": jax_steps}[who](row, case, data)
    else:
        steps = our_steps(row, case, data)
    wrong = []
    for form, step in steps.items():
        outputs, gradients = step()
        results = {"outputs": outputs, "gradients": gradients}
        for key, values in results.items():
            found = [to_numpy(v) for v in values]
            if who == OURS:
                data[key] = found
            elif not case.random:
                wrong += [
                    f"{text} ({PEERS[who]} {form})".replace(" )", ")")
                    for i, (f, e) in enumerate(zip(found, data[key], strict=True))
                    if (text := difference(f"{key}[{i}]", f, e))
                ]
    if who == OURS:
        np.savez(file, **{f"{k} {i:03}": a for k, v in data.items() for i, a in enumerate(v)})
    return steps, "; ".join(wrong)


def fastest(step: Callable[[], Any], seconds: float) -> float:
    """Return the shortest of the repeated calls, in microseconds."""
    step()
    best, calls, end = math.inf, 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - begin)
        calls += 1
    return best * 1e6


def serve(who: str) -> None:
    """Answer requests, one JSON object a line, until the input ends."""
    row: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {"us": {}, "wrong": ""}
        try:
            if asked["row"] != row:
                steps: Steps = {}  # frees the memory of the last row
                steps, answer["wrong"] = prepare(
                    who, asked["row"], Case(**asked["case"]), asked["file"]
                )
                row = asked["row"]
            answer["us"] = {f: fastest(step, asked["seconds"]) for f, step in steps.items()}
        except Exception as error:
            row = None
            answer["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print("ANSWER " + json.dumps(answer), flush=True)


class Contestant:
    """A process that measures rows."""

    def __init__(self, who: str, python: str) -> None:
        self.who = who
        self._process = subprocess.Popen(
            [python, __file__, "--serve", who], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise SystemExit(f"The process of {self.who} ended with status {process.wait()}")

    def close(self) -> None:
        self._process.communicate()


# The comparison ---------------------------------------------------------------------------------------


def measure(
    row: Row, case: Case, contestants: list[Contestant], args: argparse.Namespace, file: str
) -> dict[str, Any]:
    """Return a row's shortest times by contestant and format, and what failed."""
    result: dict[str, Any] = {"us": {}, "failed": [], "notes": []}
    request = {"row": row, "case": vars(case), "file": file, "seconds": args.seconds}
    racing = [c for c in contestants if c.who == OURS or getattr(case, c.who)]
    for _ in range(args.rounds):
        for contestant in list(racing):
            answer = contestant.ask(request)
            if answer["wrong"]:
                result["failed"].append(answer["wrong"])
            if "failed" in answer:
                racing.remove(contestant)
                ours = contestant.who == OURS
                where = "failed" if ours and row[1] in CASES[row[0]] else "notes"
                no_case = "no case yet: " if ours and where == "notes" else ""
                result[where].append(f"{no_case}{contestant.who}: {answer['failed']}")
                if ours:
                    return result
            for form, us in answer["us"].items():
                name = f"{PEERS.get(contestant.who, OURS)} {form}".strip()
                result["us"][name] = min(us, result["us"].get(name, math.inf))
    return result


def report_of(done: dict[str, dict[str, Any]], missing: set[str]) -> str:
    """Return the table, worst ratio first; rows without a peer follow."""

    def cells(title: str, result: dict[str, Any]) -> tuple[float, list[str]]:
        times = dict(result["us"])
        ours = times.pop(OURS, math.nan)
        peer = min(times, key=times.__getitem__, default="")
        ratio = ours / times[peer] if peer else -1.0
        kind, _, what = title.partition(".")
        best = [time_text(times[peer]), peer, f"**{ratio:.2f}**"] if peer else ["", "no peer", ""]
        notes = "; ".join([*result["failed"], *result["notes"]])
        return ratio, [
            kind,
            f"`{what}`",
            time_text(ours) if ours == ours else "–",
            *best,
            notes.replace("|", "/"),
        ]

    found = sorted((cells(*item) for item in done.items()), key=lambda c: -c[0])
    ratios = [ratio for ratio, _ in found if ratio > 0]
    lines = table(
        ["kind", "call", "ours, µs", "best peer, µs", "peer", "ours / peer", "notes"],
        [line for _, line in found],
    )
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        above = sum(ratio > 1.1 for ratio in ratios)
        lines.append(
            f"{len(ratios)} rows with a peer: geometric mean {mean:.2f}, {above} rows above 1.1."
        )
    lines.append(f"No case yet: {', '.join(sorted(missing)) or 'none'}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", nargs="+", metavar="NAME",
                   help="names such as gelu Conv2D, or kinds: " + " ".join(CASES))  # fmt: skip
    p.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64], help="(1 16 64)")
    p.add_argument("--seconds", type=float, default=0.2, help="of a contestant's round (0.2)")
    p.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    p.add_argument("--peers", nargs="*", default=[sys.executable], metavar="PYTHON",
                   help="the first one that has a module is used (this interpreter)")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="results, also to resume from")
    p.add_argument("--again", action="store_true", help="run rows that the JSON file has, too")
    p.add_argument("--markdown", type=Path, metavar="FILE",
                   help="write the table there, not to the output")  # fmt: skip
    p.add_argument("--serve", choices=[OURS, *PEERS], help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.serve:
        serve(args.serve)
        return

    report: dict[str, Any] = {"benchmark": "layers", "rows": {}}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text())
    machine = {"machine": platform.machine(), "cores": cores(), "system": platform.system()}
    if report.setdefault("machine", machine) != machine:
        raise SystemExit(f"{args.json} was measured on another machine: {report['machine']}")
    unknown = {*(args.only or ())} - {*CASES}.union(*registry().values())
    if unknown:
        p.error(f"--only {' '.join(sorted(unknown))}: the registry has no such name or kind")
    contestants = [Contestant(OURS, sys.executable)]
    for peer, title in PEERS.items():
        python = next((python for python in args.peers if has(python, peer)), None)
        if python:
            contestants.append(Contestant(peer, python))
        else:
            print(f"# {title}: not installed", file=sys.stderr)
    done = report["rows"]
    with tempfile.TemporaryDirectory() as folder:
        for title, row, case in rows(args.batches, args.only):
            if title in done and not done[title]["failed"] and not args.again:
                continue
            print(f"# {title}", file=sys.stderr, flush=True)
            done[title] = measure(row, case, contestants, args, str(Path(folder, "results.npz")))
            if args.json:
                temporary = args.json.with_suffix(".part")
                temporary.write_text(json.dumps(report, indent=1) + "\n")
                temporary.replace(args.json)
    for contestant in contestants:
        contestant.close()
    text = report_of(done, without_case())
    if args.markdown:
        args.markdown.write_text(text)
    else:
        print(text)
    failed = [f"{title}: {x}" for title, result in done.items() for x in result["failed"]]
    if failed:
        raise SystemExit("\n".join(["FAILED", *failed]))


if __name__ == "__main__":
    main()
