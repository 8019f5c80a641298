"""Compare the backend "pycollective" of torch.distributed with gloo, in one run.

    python benchmarks/compare_torch.py [--ranks 2 4] [--seconds 0.3] [--json FILE]
    python benchmarks/compare_torch.py --gbit 10 [--seconds 0.3] [--json FILE]
    python benchmarks/compare_torch.py --table FILE

With `--gbit`, two ranks run in two network namespaces, joined by a link of this rate (0: without a
limit), as in `links.py`. Both backends use TCP then. The contestant "raw" is a plain connection that
exchanges the bytes of the call in both directions at once: the limit of the machine.

`--json` adds the run to those of the file, and `--table` prints the medians of its runs.

Both backends run in the same processes, in turns. Each number is the slowest rank's median of a call.
The contestant "shared" is this backend with tensors in memory that all ranks map. The row "adapter" is
the time of a call in a group of one rank, less that of the communicator's own call.

DDP's synchronization is a step with it less a step in `no_sync()`. The contestant "unsent" is DDP with a
hook that sends nothing, for its own copies.
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


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def calls(ranks, nbytes, group, in_shared_memory):
    """Return the calls on tensors of about this many bytes in all."""
    count = max(nbytes // 4 // ranks, 1)

    def ones(count):
        if not in_shared_memory:
            return torch.ones(count)
        cpu = torch.device("cpu")
        made = group._get_backend(cpu).allocate_tensor(count, dtype=torch.float32, device=cpu)
        return made.fill_(1)

    whole, part, other = ones(count * ranks), ones(count), ones(count * ranks)
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
    """Return the median time of a call, of the slowest rank; all ranks make as many calls."""
    for _ in range(WARMUP):
        call()
    begin = time.perf_counter()
    call()
    turns = torch.tensor(seconds / max(time.perf_counter() - begin, 1e-5))
    dist.all_reduce(turns, dist.ReduceOp.MIN, group=group)
    times = []
    for _ in range(min(max(int(turns), 5), 2000)):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


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
    x = torch.ones(2, width)

    def step():
        network(x).sum().backward()

    def alone():
        with network.no_sync():
            network(x).sum().backward()

    return median(step, seconds, group) - median(alone, seconds, group)


def enter(namespace):
    """Give this thread, and those that it starts, the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns() to {namespace} failed")


def rank_main(rank, ranks, path, seconds, results, namespaces):
    torch.set_num_threads(1)
    if namespaces:
        enter(namespaces[rank])
    store = f"file://{path}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    (sock,) = links.connect(rank, 1, 1) if namespaces else (None,)
    found = {}
    for size in SIZES:
        for name in ("pycollective", "raw" if namespaces else "shared", "gloo"):
            group = groups.get(name, groups["pycollective"])
            made = (
                raw_calls(size, sock)
                if name == "raw"
                else calls(ranks, size, group, name == "shared")
            )
            for what, call in made.items():
                found[f"{what} {size} {name}"] = 1e6 * median(call, seconds, group)
    for parameters in (26_000, 8_000_000):
        for what, in_buckets in (("DDP", False), ("DDP, gradients in buckets", True)):
            for name in BACKENDS:
                took = ddp(parameters, groups[name], 3 * seconds, in_buckets)
                found[f"{what} {parameters} {name}"] = 1e6 * took
            took = ddp(parameters, groups["pycollective"], 3 * seconds, in_buckets, unsent=True)
            found[f"{what} {parameters} unsent"] = 1e6 * took
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
        ours = [
            lambda: group.allreduce([x], options).wait(),
            lambda: comm.all_reduce(array, out=array),
            lambda: dist.all_reduce(x),
        ]
        times = []
        for call in ours:
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
    rows: dict[tuple[str, str], list[str]] = {}
    for key, took in middle.items():
        rest, _, name = key.rpartition(" ")
        if name == "gloo" or " ranks " not in rest:
            continue
        ranks, _, call = rest.partition(" ranks ")
        kinds = {"shared": ", shared memory", "unsent": ", nothing sent", "raw": ", raw sockets"}
        what = call.rpartition(" ")[0] + kinds.get(name, "")
        share = took / middle[f"{rest} gloo"]
        rows.setdefault((ranks, what), []).append(f"{took:,.0f} ({share:.2f})")
    sizes = " | ".join("8 B,1 KiB,64 KiB,1 MiB,16 MiB".split(","))
    lines = [f"| ranks | call | {sizes} |", f"|---|---|{'---|' * len(SIZES)}"]
    lines += [f"| {ranks} | {what} | {' | '.join(found)} |"
              for (ranks, what), found in rows.items() if len(found) == len(SIZES)]  # fmt: skip
    lines += ["", "| ranks | synchronization of | 26,000 parameters | 8,000,000 parameters |",
              "|---|---|---|---|"]  # fmt: skip
    lines += [f"| {ranks} | {what} | {' | '.join(found)} |"
              for (ranks, what), found in rows.items() if len(found) == 2]  # fmt: skip
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--gbit", type=float, help="two namespaces with a link of this rate; 0: no limit"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number")
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
                rank_main, (ranks, f"{folder}/store", arguments.seconds, results, names), ranks
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
