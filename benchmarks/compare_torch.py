"""Compare the backend "pycollective" of torch.distributed with gloo, in one run.

    python benchmarks/compare_torch.py [--ranks 2 4] [--seconds 0.3] [--sizes 8 1024]
                                       [--parameters 26000] [--json FILE]
    python benchmarks/compare_torch.py --gbit 10 [--seconds 0.3] [--json FILE]
    python benchmarks/compare_torch.py --table FILE

With `--gbit`, two ranks run in two network namespaces, joined by a link of this rate (0: without a
limit), as in `links.py`. Both backends use TCP then. The contestant "raw" is a plain connection that
exchanges the bytes of the call in both directions at once: the limit of the machine.

`--json` adds the run to those of the file, and `--table` prints the medians of its runs.

Both backends run in the same processes, in turns. Each number is the slowest rank's median of a call.
The contestant "shared" is this backend with tensors in memory that all ranks map. The row "adapter" is
the time of a call in a group of one rank, less that of the communicator's own call.

The time of DDP's synchronization is that of a step, less that of a step in `no_sync()`. The contestant
"unsent" has a hook that sends nothing, so that DDP's own copies remain.

The rows "overlap" are of eight layers, with a bucket of gradients for each. The share that is hidden
behind the backward pass is 1 - (step - step in `no_sync()`) / (the buckets' all-reduces alone). It is
negative if a step is slower than a step in `no_sync()` and the all-reduces after it.
Needs PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import links
import tcp_limit
import torch
import torch.distributed as dist
from torch import nn

import pycollective.torch

BACKENDS = ("pycollective", "gloo")
WARMUP = 20  # the first calls of a size choose the faster way to copy
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
PARAMETERS = (26_000, 8_000_000)
LAYERS = 8  # of the network for the overlap
OVERLAP = ("step", "step in no_sync()", "all-reduces alone")


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def ones(count, group, in_shared_memory):
    if not in_shared_memory:
        return torch.ones(count)
    cpu = torch.device("cpu")
    tensor = group._get_backend(cpu).allocate_tensor(count, dtype=torch.float32, device=cpu)
    return tensor.fill_(1)


def calls(ranks, nbytes, group, in_shared_memory):
    """Return the calls on tensors of about this many bytes in all."""
    count = max(nbytes // 4 // ranks, 1)
    whole, part, other = (
        ones(n, group, in_shared_memory) for n in (count * ranks, count, count * ranks)
    )
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(other, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }


def raw_calls(nbytes, sock):
    """Return for each call an exchange of its bytes over a plain connection of two ranks."""

    def exchange(count):
        source, target = bytearray(count), bytearray(count)
        return lambda: tcp_limit.exchange(sock, memoryview(source), memoryview(target))

    half = exchange(nbytes // 2)
    return {"all_reduce": exchange(nbytes)} | dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all"), half
    )


def median(call, seconds, group):
    """Return the slowest rank's median time of a call; all ranks make equally many calls."""
    return medians([call], seconds, group)[0]


def medians(calls, seconds, group):
    """Return the median time of each call, as `median`. Several calls are made in turns.

    The ranks begin each of several calls together, since the call before need not synchronize them.
    """
    for _ in range(WARMUP):
        for call in calls:
            call()
    begin = time.perf_counter()
    for call in calls:
        call()
    took = (time.perf_counter() - begin) / len(calls)
    turns = torch.tensor(seconds / max(took, 1e-5))
    dist.all_reduce(turns, dist.ReduceOp.MIN, group=group)
    times = [[] for _ in calls]
    for _ in range(min(max(int(turns), 5), 2000)):
        for call, found in zip(calls, times, strict=True):
            if len(calls) > 1:
                dist.barrier(group=group)
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
    slowest = torch.tensor([statistics.median(found) for found in times], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def sends_nothing(_, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def ddp(parameters, group, seconds, in_buckets, unsent=False):
    """Return the time of a step's synchronization.

    With ``in_buckets``, DDP keeps the gradients in its buckets, and those of this package are in shared
    memory.
    """
    width = int((parameters / 2) ** 0.5)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    network = nn.parallel.DistributedDataParallel(
        layers, process_group=group, gradient_as_bucket_view=in_buckets
    )
    if unsent:
        network.register_comm_hook(None, sends_nothing)
    elif in_buckets and dist.get_backend(group) == "pycollective":
        network.register_comm_hook(group, pycollective.torch.shared_buckets)
    step, alone = medians(steps(network, torch.ones(2, width)), seconds, group)
    return step - alone


def steps(network, x):
    """Return a step with synchronization, and a step without it."""

    def step():
        network(x).sum().backward()

    def alone():
        with network.no_sync():
            network(x).sum().backward()

    return step, alone


def overlap(parameters, group, seconds, in_shared_memory):
    """Return the times of a step, of a step in `no_sync()`, and of its all-reduces alone."""
    width = int((parameters / LAYERS) ** 0.5)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    count = sum(p.numel() for p in layers[0].parameters())
    network = nn.parallel.DistributedDataParallel(
        layers, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=4 * count / 2**20
    )
    if in_shared_memory:
        network.register_comm_hook(group, pycollective.torch.shared_buckets)
    buckets = [ones(count, group, in_shared_memory) for _ in range(LAYERS)]

    def all_reduces():
        for work in [dist.all_reduce(b, group=group, async_op=True) for b in buckets]:
            work.wait()

    return medians([*steps(network, torch.ones(64, width)), all_reduces], seconds, group)


def enter(namespace):
    """Give this thread, and those that it starts, the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns() to {namespace} failed")


def rank_main(rank, ranks, path, arguments, results, namespaces):
    seconds = arguments.seconds
    torch.set_num_threads(1)
    if namespaces:
        enter(namespaces[rank])
    store = f"file://{path}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    (sock,) = links.connect(rank, 1, 1) if namespaces else (None,)
    found = {}
    for size in arguments.sizes:
        for name in ("pycollective", "raw" if namespaces else "shared", "gloo"):
            group = groups.get(name, groups["pycollective"])
            functions = (
                raw_calls(size, sock)
                if name == "raw"
                else calls(ranks, size, group, name == "shared")
            )
            for what, call in functions.items():
                found[f"{what} {size} {name}"] = 1e6 * median(call, seconds, group)
    for parameters in arguments.parameters:
        for what, in_buckets in (("DDP", False), ("DDP, gradients in buckets", True)):
            for name in BACKENDS:
                took = ddp(parameters, groups[name], 3 * seconds, in_buckets)
                found[f"{what} {parameters} {name}"] = 1e6 * took
            took = ddp(parameters, groups["pycollective"], 3 * seconds, in_buckets, unsent=True)
            found[f"{what} {parameters} unsent"] = 1e6 * took
        for name in ("pycollective", "gloo") if namespaces else ("pycollective", "shared", "gloo"):
            group = groups.get(name, groups["pycollective"])
            times = overlap(parameters, group, 3 * seconds, name == "shared")
            for what, took in zip(OVERLAP, times, strict=True):
                found[f"overlap: {what} {parameters} {name}"] = 1e6 * took
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


def adapter():
    """Return the microseconds that a call of PyTorch's takes beyond the communicator's own."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("pycollective", init_method=store, rank=0, world_size=1)
        (comm,) = pycollective.local_group(1)
        x = torch.ones(2)
        array, group = x.numpy(), dist.group.WORLD
        options = dist.AllreduceOptions()
        options.asyncOp = False
        ways = [
            lambda: group.allreduce([x], options).wait(),
            lambda: comm.all_reduce(array, out=array),
            lambda: dist.all_reduce(x),
        ]
        times = []
        for call in ways:
            begin = time.perf_counter()
            for _ in range(20_000):
                call()
            times.append(1e6 * (time.perf_counter() - begin) / 20_000)
        dist.destroy_process_group()
    return {"adapter": times[0] - times[1], "dist.all_reduce of one rank": times[2]}


def table(runs):
    """Return the medians of runs as a table of Markdown: µs, and the share of gloo's time."""
    every = dict.fromkeys(key for run in runs for key in run["microseconds"])
    middle = {
        key: statistics.median(took for run in runs if (took := run["microseconds"].get(key)))
        for key in every
    }
    kinds = {"shared": ", shared memory", "unsent": ", nothing sent", "raw": ", raw sockets"}
    of_bytes: dict[tuple[str, str], dict[int, str]] = {}
    of_parameters: dict[tuple[str, str], dict[int, str]] = {}
    hidden: list[str] = []
    for key, took in middle.items():
        rest, _, name = key.rpartition(" ")
        if " ranks " not in rest:
            continue
        ranks, _, call = rest.partition(" ranks ")
        what, _, size = call.rpartition(" ")
        if what == f"overlap: {OVERLAP[0]}":
            times = [middle[f"{ranks} ranks overlap: {part} {size} {name}"] for part in OVERLAP]
            cells = [f"{int(size):,}", *(f"{time:,.0f}" for time in times)]
            share = 1 - (times[0] - times[1]) / times[2]
            label = "pycollective, shared memory" if name == "shared" else name
            hidden.append(f"| {ranks} | {label} | {' | '.join(cells)} | {share:.2f} |")
        elif name != "gloo" and not what.startswith("overlap"):
            rows = of_parameters if what.startswith("DDP") else of_bytes
            cell = f"{took:,.0f} ({took / middle[f'{rest} gloo']:.2f})"
            rows.setdefault((ranks, what + kinds.get(name, "")), {})[int(size)] = cell
    lines: list[str] = []
    for first, rows, label in (
        ("call", of_bytes, in_bytes),
        ("synchronization of", of_parameters, "{:,} parameters".format),
    ):
        sizes = sorted({size for found in rows.values() for size in found})
        lines += [f"| ranks | {first} | {' | '.join(map(label, sizes))} |"]
        lines += [f"|---|---|{'---|' * len(sizes)}"]
        lines += [f"| {ranks} | {what} | {' | '.join(found.get(size, '') for size in sizes)} |"
                  for (ranks, what), found in rows.items()]  # fmt: skip
        lines += [""]
    if hidden:
        lines += [f"| ranks | backend | parameters | {' | '.join(OVERLAP)} | hidden |",
                  f"|{'---|' * 7}", *hidden]  # fmt: skip
    return "\n".join(lines)


def in_bytes(count):
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if count >> power:
            return f"{count >> power} {unit}"
    return f"{count} B"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--gbit", type=float, help="two namespaces with a link of this rate; 0: no limit"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the calls")
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=PARAMETERS, help="of the models"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a file of --json, and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    report = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "microseconds": adapter(),
    }
    print(report)
    over_tcp = arguments.gbit is not None
    if over_tcp:
        report["link_gbit_s"] = arguments.gbit
        variables = dict.fromkeys(["GLOO_SOCKET_IFNAME", "PYCOLLECTIVE_SOCKET_IFNAME"], "eth0")
        variables["PYCOLLECTIVE_TRANSPORT"] = "tcp"
        os.environ |= variables
    for ranks in [2] if over_tcp else arguments.ranks:
        with contextlib.ExitStack() as cleanup:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory())
            names = cleanup.enter_context(links.link(arguments.gbit, 1)) if over_tcp else ()
            results = f"{folder}/results"
            torch.multiprocessing.spawn(
                rank_main, (ranks, f"{folder}/store", arguments, results, names), ranks
            )
            found = json.loads(Path(results).read_text())
        for key, ours in found.items():
            what, _, name = key.rpartition(" ")
            if name != "gloo":
                share = ours / found[f"{what} gloo"]
                print(f"{ranks} ranks {key:36} {ours:10.1f} µs, {share:.2f} of gloo's")
        report["microseconds"] |= {f"{ranks} ranks {key}": took for key, took in found.items()}
    if arguments.json:
        runs = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*runs, report], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
