"""Run one contestant of compare.py: a rank of a group, or all replicas of a process.

    python benchmarks/compare_ranks.py KIND [--call broadcast] [--sizes 16 1048576] [--seconds 0.15]

The program is started by compare.py. Every contestant and every call go through the same two steps. The
step `check` compares the result with values computed here, and ends the launch if one differs. The step
`measure` times calls, as compare.py describes. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

TINY = 1e-30
"""Initial values of sums in place, small because each call multiplies them by the number of ranks."""
LARGEST = 1e38
REPEATS = 5
MANY = 8
"""Number of arrays in a call of all_reduce_many."""
PARTS = ("gather", "scatter", "all_gather", "reduce_scatter", "all_to_all")
"""Calls whose whole buffer has a part of each rank."""
KI, MI = 1 << 10, 1 << 20
MEMORY_RATE_FROM = MI
"""Bytes from which the memory's rate is measured, too."""
COPIES_FROM = 4 * KI
"""Bytes from which Bare makes copies, and not a handshake alone."""
HANDSHAKES = 100
RING = 1 << 20  # bytes


# Right results ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The ranks' contributions to a call, and one rank's correct result.

    Attributes
    ----------
    size : int
        Bytes of the whole buffer: of broadcast's array, of the result of gather and all_gather, of the
        input of scatter, reduce_scatter and all_to_all. The ranks' parts are rounded down.
    """

    call: str
    size: int
    rank: int
    ranks: int

    @property
    def count(self) -> int:
        """Number of items of the whole buffer."""
        count = self.size // 4
        return count - count % self.ranks if self.call in PARTS else count

    @property
    def given(self) -> int:
        """Number of items of this rank's input."""
        return self.count // self.ranks if self.call in ("gather", "all_gather") else self.count

    @property
    def got(self) -> int:
        """Number of items of this rank's result."""
        return (
            self.count // self.ranks if self.call in ("scatter", "reduce_scatter") else self.count
        )

    def of(self, rank: int) -> Any:
        """Return a rank's input: small whole numbers, so that every sum is exact."""
        return np.resize(np.arange(1, 18, dtype=np.float32), self.given) * np.float32(rank + 1)

    def expected(self) -> Any:
        """Return this rank's correct result, or None if it gets none."""
        length = self.count // self.ranks
        part = slice(self.rank * length, (self.rank + 1) * length)
        total = self.of(0) * np.float32(self.ranks * (self.ranks + 1) // 2)
        match self.call:
            case "broadcast":
                return self.of(0)
            case "reduce":
                return total if self.rank == 0 else None
            case "gather" if self.rank:
                return None
            case "gather" | "all_gather":
                return np.concatenate([self.of(r) for r in range(self.ranks)])
            case "scatter":
                return self.of(0)[part]
            case "reduce_scatter":
                return total[part]
            case "all_to_all":
                return np.concatenate([self.of(r)[part] for r in range(self.ranks)])
            case "send_recv":
                return self.of(self.rank ^ 1)
            case "barrier":
                return None
        return total


def wrong(call: str, size: int, rank: int) -> NoReturn:
    """End this process at once, and with it the other ranks, which may wait for this one."""
    print(
        f"WRONG a wrong result of {call} of {size} bytes on rank {rank}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


# Groups of processes ----------------------------------------------------------------------------

IN_PLACE = frozenset({"all_reduce", "all_reduce_async", "all_reduce_many"})
Runs = dict[str, Callable[[], Any]]


class Group:
    """One rank of a contestant's group.

    Attributes
    ----------
    barrier : callable
        A barrier: it returns when every rank has called it.
    sums : frozenset of str
        Calls that add to their input in place, so that its values grow.
    """

    rank: int
    size: int
    barrier: Callable[[], Any]
    sums = IN_PLACE
    right = True  # False: result() does not return the result of the call

    def array(self, count: int) -> Any:
        """Return an array of the contestant's kind of memory."""
        return np.empty(count, np.float32)

    def calls(self, x: Any, out: Any) -> Runs:
        """Return the calls on two arrays; each call returns when this rank has the result."""
        raise NotImplementedError

    def call(self, call: str, size: int, x: Any, out: Any) -> Callable[[], Any] | None:
        """Return one of the calls, or None if the contestant does not have it."""
        return self.calls(x, out).get(call)

    def divisor(self, call: str, size: int) -> int:
        """Return the number by which a time is divided: a message is half of a round trip."""
        return 2 if call == "send_recv" else 1

    def result(self, call: str, x: Any, out: Any) -> Any:
        """Return the result of the last call."""
        return x if call == "broadcast" or call in self.sums else out

    @property
    def other(self) -> int:
        """The rank with which this one exchanges messages."""
        return self.rank ^ 1


class Pycollective(Group):
    """Calls on ordinary arrays."""

    def __init__(self, comm: Any = None) -> None:
        import pycollective

        self.comm = pycollective.init() if comm is None else comm
        self.rank, self.size, self.barrier = self.comm.rank, self.comm.size, self.comm.barrier

    def memory_rate(self, size: int) -> float:
        from pycollective.benchmark import memory_rate

        return memory_rate(self.comm, size)

    def calls(self, x: Any, out: Any) -> Runs:
        comm, other, many = self.comm, self.other, np.array_split(x, MANY)
        whole, parts = (x, out) if self.rank == 0 else (None, None)
        return {
            "all_reduce": lambda: comm.all_reduce(x, out=x),
            "all_reduce_async": lambda: comm.all_reduce(x, out=x, async_op=True).wait(),
            "all_reduce_many": lambda: comm.all_reduce_many(many, out=many),
            "broadcast": lambda: comm.broadcast(x, out=x),
            "reduce": lambda: comm.reduce(x, out=parts),
            "gather": lambda: comm.gather(x, out=parts),
            "scatter": lambda: comm.scatter(whole, out=out),
            "all_gather": lambda: comm.all_gather(x, out=out),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=out),
            "all_to_all": lambda: comm.all_to_all(x, out=out),
            "barrier": comm.barrier,
            "send_recv": (
                (lambda: (comm.send(x, other), comm.recv(out, other)))
                if self.rank < other
                else (lambda: (comm.recv(out, other), comm.send(x, other)))
            ),
        }


class Empty(Pycollective):
    """Calls on arrays of comm.empty()."""

    def array(self, count: int) -> Any:
        return self.comm.empty(count, np.float32)


class Shared(Pycollective):
    """Calls on ordinary arrays made under shared_arrays()."""

    def array(self, count: int) -> Any:
        import pycollective

        with pycollective.shared_arrays():
            return super().array(count)


class Ring:
    """Shared memory that is used again and again, so that it stays in the caches."""

    block = 128 * KI // 4  # items of one copy

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __getitem__(self, span: slice) -> Any:
        begin = span.start % max(len(self.memory) - self.block, 1)
        return self.memory[begin : begin + span.stop - span.start]


class Bare(Pycollective):
    """The copies and the handshake that each implementation of a call on ordinary arrays needs.

    Processes cannot see each other's ordinary arrays. So bytes for another rank are copied twice: into
    memory that both map, and out of it. Bytes that stay with a rank are copied once. Reductions read
    the peer's bytes in place of the second copy. np.copyto and np.add make these copies, in blocks of
    128 KiB. Each rank writes to a ring of 1 MiB. No rank waits for another.

    Then the ranks make one handshake, or two for all_reduce. In a handshake, which has no Python, each
    rank writes its own cache line and waits until it has seen the lines of the others. With more ranks
    than cores, a rank that waits yields its core, so that every rank runs once in each handshake. A
    call of a few bytes is a handshake alone. If each rank has a core, Python calls for 100 of them at
    once. Otherwise it calls for each one, as for each call of pycollective or MPI: the cores then change
    between the interpreters of their ranks.
    """

    right = False

    @property
    def crowded(self) -> bool:
        """True if there are more ranks than cores."""
        return self.size > len(os.sched_getaffinity(0))

    def divisor(self, call: str, size: int) -> int:
        if size >= COPIES_FROM:
            return super().divisor(call, size)
        return 1 if self.crowded else HANDSHAKES

    def call(self, call: str, size: int, x: Any, out: Any) -> Callable[[], Any]:
        lines = self.shared_memory(4 * KI).view(np.uint8)
        if size < COPIES_FROM:
            rounds = 1 if self.crowded else HANDSHAKES
            return lambda: self.handshake(lines, rounds)
        call = call.removesuffix("_async")
        memory = self.shared_memory(self.size * min(size, RING)).reshape(self.size, -1)
        memory[self.rank] = TINY
        copies = self.copies(call, x, out, [Ring(row) for row in memory])
        rounds = 2 if call == "all_reduce" else 1
        return lambda: (copies(), self.handshake(lines, rounds))

    def handshake(self, lines: Any, rounds: int) -> None:
        """Make some handshakes, in a cache line for each rank."""
        from pycollective import _core

        _core.measure_handshake(lines, self.rank, self.size, rounds, self.crowded)

    def shared_memory(self, size: int) -> Any:
        """Return memory that all ranks map, as float32."""
        memfd = os.memfd_create("bare") if self.rank == 0 else -1
        if memfd >= 0:
            os.ftruncate(memfd, size)
        process, descriptor = self.comm.broadcast(np.array([os.getpid(), memfd]), 0)
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), size), np.float32)
        self.comm.barrier()
        if memfd >= 0:
            os.close(memfd)
        return mapped

    def copies(self, call: str, x: Any, out: Any, rings: list[Ring]) -> Callable[[], Any]:
        """Return a function that makes this rank's copies."""
        rank, mine, root = self.rank, rings[self.rank], self.rank == 0
        peers = [r for r in range(self.size) if r != rank]
        n = x.size
        part = n if call in ("gather", "all_gather") else n // self.size
        steps = []  # of (function, target, source)

        def add(function: Any, target: Any, source: Any, begin: int = 0, end: int = n) -> None:
            for at in range(begin, end, Ring.block):
                span = slice(at, min(at + Ring.block, end))
                steps.append((function, target[span], source[span]))

        def of(rank: int, array: Any) -> Any:
            return array[rank * part : (rank + 1) * part]

        def without_own(target: Any, source: Any) -> None:
            add(copy, target, source, 0, rank * part)
            add(copy, target, source, (rank + 1) * part, n)

        copy, plus = np.copyto, lambda target, source: np.add(target, source, out=target)
        match call:
            case "broadcast":
                add(copy, mine if root else out, x if root else rings[0])
            case "send_recv":
                add(copy, mine, x)
                add(copy, out, rings[self.other])
            case "reduce" if root:
                add(copy, out, x)
                for peer in peers:
                    add(plus, out, rings[peer])
            case "gather" if root:
                add(copy, of(0, out), x)
                for peer in peers:
                    add(copy, of(peer, out), rings[peer])
            case "reduce" | "gather":
                add(copy, mine, x)
            case "scatter" if root:
                without_own(mine, x)
                add(copy, out, x, 0, part)
            case "scatter":
                add(copy, out, rings[0], 0, part)
            case "all_gather":
                add(copy, mine, x)
                add(copy, of(rank, out), x)
                for peer in peers:
                    add(copy, of(peer, out), rings[peer])
            case "reduce_scatter" | "all_to_all":
                without_own(mine, x)
                adds = call == "reduce_scatter"
                add(copy, out if adds else of(rank, out), of(rank, x), 0, part)
                for peer in peers:
                    target = out if adds else of(peer, out)
                    add(plus if adds else copy, target, rings[peer], 0, part)
            case "all_reduce":
                without_own(mine, x)
                for peer in peers:
                    add(plus, of(rank, x), rings[peer], 0, part)
                add(copy, mine, of(rank, x), 0, part)
                for peer in peers:
                    add(copy, of(peer, x), rings[peer], 0, part)

        def run() -> None:
            with np.errstate(over="ignore"):  # a peer may be calls ahead: sums may overflow
                for function, target, source in steps:
                    function(target, source)

        return run


class Mpi(Group):
    def __init__(self) -> None:
        from mpi4py import MPI

        self.place, self.op, self.comm = MPI.IN_PLACE, MPI.SUM, MPI.COMM_WORLD
        self.rank, self.size, self.barrier = self.comm.rank, self.comm.size, self.comm.Barrier

    def calls(self, x: Any, out: Any) -> Runs:
        comm, other, many = self.comm, self.other, np.array_split(x, MANY)
        whole, parts = (x, out) if self.rank == 0 else (None, None)
        place, op = self.place, self.op
        return {
            "all_reduce": lambda: comm.Allreduce(place, x, op=op),
            "all_reduce_async": lambda: comm.Iallreduce(place, x, op=op).Wait(),
            "all_reduce_many": lambda: [comm.Allreduce(place, array, op=op) for array in many],
            "broadcast": lambda: comm.Bcast(x),
            "reduce": lambda: comm.Reduce(x, parts, op=op),
            "gather": lambda: comm.Gather(x, parts),
            "scatter": lambda: comm.Scatter(whole, out),
            "all_gather": lambda: comm.Allgather(x, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out, op=op),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "barrier": comm.Barrier,
            "send_recv": (
                (lambda: (comm.Send(x, other), comm.Recv(out, other)))
                if self.rank < other
                else (lambda: (comm.Recv(out, other), comm.Send(x, other)))
            ),
        }


class Gloo(Group):
    sums = IN_PLACE | {"reduce"}

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.tensor, self.dist = torch.from_numpy, dist
        self.rank, self.size, self.barrier = dist.get_rank(), dist.get_world_size(), dist.barrier

    def calls(self, x: Any, out: Any) -> Runs:
        dist, other, given, got = self.dist, self.other, self.tensor(x), self.tensor(out)
        many, whole, parts = given.chunk(MANY), None, None
        if self.rank == 0:
            whole, parts = list(given.chunk(self.size)), list(got.chunk(self.size))
        return {
            "all_reduce": lambda: dist.all_reduce(given),
            "all_reduce_async": lambda: dist.all_reduce(given, async_op=True).wait(),
            "all_reduce_many": lambda: [dist.all_reduce(t) for t in many],
            "broadcast": lambda: dist.broadcast(given, 0),
            "reduce": lambda: dist.reduce(given, 0),
            "gather": lambda: dist.gather(given, parts, 0),
            "scatter": lambda: dist.scatter(got, whole, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(got, given),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(got, given),
            "all_to_all": lambda: dist.all_to_all_single(got, given),
            "barrier": dist.barrier,
            "send_recv": (
                (lambda: (dist.send(given, other), dist.recv(got, other)))
                if self.rank < other
                else (lambda: (dist.recv(got, other), dist.send(given, other)))
            ),
        }


class JaxProcesses(Group):
    sums = frozenset()

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(where, self.size, self.rank)
        self.jax, self.split = jax, NamedSharding(Mesh(jax.devices(), "i"), P("i"))
        self.sum = jax.jit(
            jax.shard_map(
                lambda a: jax.lax.psum(a, "i"), mesh=self.split.mesh, in_specs=P("i"), out_specs=P()
            )
        )
        self.barrier = self.calls(np.ones(1, np.float32), None)["all_reduce"]

    def calls(self, x: Any, out: Any) -> Runs:
        given = self.jax.make_array_from_process_local_data(self.split, x)

        def run() -> None:
            self.last = self.sum(given).block_until_ready()

        return {"all_reduce": run}

    def result(self, call: str, x: Any, out: Any) -> Any:
        return np.asarray(self.last.addressable_data(0))


class TensorflowProcesses(Group):
    sums = frozenset()

    def __init__(self) -> None:
        import tensorflow as tf

        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self.tf = tf
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.barrier = self.calls(np.ones(1, np.float32), None)["all_reduce"]

    def calls(self, x: Any, out: Any) -> Runs:
        tf, strategy = self.tf, self.strategy

        def reduce(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        step = tf.function(lambda value: strategy.run(reduce, args=(value,)))
        given = tf.constant(x)

        def run() -> None:
            self.last = step(given)

        return {"all_reduce": run}

    def result(self, call: str, x: Any, out: Any) -> Any:
        return self.strategy.experimental_local_results(self.last)[0].numpy()


PROCESSES: dict[str, Callable[[], Group]] = {
    "pycollective": Pycollective,
    "empty": Empty,
    "shared": Shared,
    "bare": Bare,
    "gloo": Gloo,
    "mpi": Mpi,
    "jax": JaxProcesses,
    "tensorflow": TensorflowProcesses,
}


# The two steps ----------------------------------------------------------------------------------


def check(group: Group, call: str, size: int) -> tuple[Callable[[], Any], Any]:
    """Make a call's arrays, call once and compare the result; return the call and its input."""
    values = Values(call, size, group.rank, group.size)
    x, out = group.array(values.given), group.array(values.got)
    x[:] = values.of(group.rank)
    out[:] = -1
    run = group.call(call, size, x, out)
    if run is None:
        raise SystemExit(f"LEFT OUT it has no {call}")
    run()
    want = values.expected()
    if group.right and want is not None and not np.array_equal(group.result(call, x, out), want):
        wrong(call, size, group.rank)
    return run, x


def slowest(group: Group, seconds: float) -> float:
    """Return the largest of all ranks' times, by a sum of an array with an item for each rank."""
    times = np.zeros(group.size, np.float32)
    times[group.rank] = seconds
    group.calls(times, times)["all_reduce"]()
    return float(np.max(group.result("all_reduce", times, times)))


def measure(
    run: Callable[[], Any],
    seconds: float,
    *,
    barrier: Callable[[], Any] = lambda: None,
    slowest: Callable[[float], float] = lambda seconds: seconds,
    renew: Callable[[], Any] | None = None,
    most: int = 0,
) -> dict[str, float]:
    """Time a call: the median of five means, each of as many calls as fit into ``seconds``.

    Parameters
    ----------
    barrier : callable
        A barrier of the ranks, called before the clock starts.
    slowest : callable
        A function that returns the largest of all ranks' times.
    renew : callable, optional
        A function that restores small values of sums in place; it is not timed, nor is the next call.
    most : int
        Number of calls after which `renew` is needed.
    """
    clock = time.perf_counter

    def mean(calls: int) -> float:
        total, left = 0.0, calls
        while left:
            now = min(left, most) if renew else left
            if renew:
                renew()
                run()  # brings the caches into the state after any other call
            barrier()
            begin = clock()
            for _ in range(now):
                run()
            total += clock() - begin
            left -= now
        return slowest(total) / calls

    def fit(seconds: float, means: list[float]) -> int:
        return max(1, int(seconds / max(float(np.median(means)), 1e-8)))

    mean(3)
    first = [mean(5) for _ in range(3)]  # several, so that one slow mean does not count
    first = [mean(fit(seconds / 20, first)) for _ in range(3)]
    means: list[float] = []
    for _ in range(REPEATS):
        means.append(mean(fit(seconds, means or first)))
    micro = [m * 1e6 for m in means]
    return {"us": float(np.median(micro)), "us_of_repeats": micro, "calls": fit(seconds, means)}


def calls_until_renewed(ranks: int) -> int:
    """Return the number of timed sums in place for which values below 2 TINY stay finite."""
    return int(math.log(LARGEST / (2 * TINY)) / math.log(max(2, ranks))) - 1


def time_size(group: Group, call: str, size: int, seconds: float) -> dict[str, Any]:
    run, x = check(group, call, size)
    fresh = np.random.default_rng(group.rank).random(x.size, dtype=np.float32) * TINY + TINY

    def renew() -> None:
        x[:] = fresh

    renew()
    found = measure(
        run,
        seconds,
        barrier=group.barrier,
        slowest=lambda elapsed: slowest(group, elapsed),
        renew=renew if call in group.sums else None,
        most=calls_until_renewed(group.size),
    )
    divisor = group.divisor(call, size)
    found["us"] /= divisor
    found["us_of_repeats"] = [us / divisor for us in found["us_of_repeats"]]
    if (
        call == "all_reduce"
        and isinstance(group, Pycollective)
        and group.right
        and size >= MEMORY_RATE_FROM
    ):
        found["memory_gb_s"] = group.memory_rate(size) / 1e9
    return found


def time_sizes(group: Group, call: str, sizes: list[int], seconds: float) -> dict[str, Any]:
    return {str(size): time_size(group, call, size, seconds) for size in sizes}


# Replicas of one process ------------------------------------------------------------------------


def pycollective_threads(n: int, call: str, sizes: list[int], seconds: float) -> dict[str, Any]:
    import pycollective

    results: list[dict[str, Any]] = [{} for _ in range(n)]

    def work(comm: Any) -> None:
        try:
            results[comm.rank] = time_sizes(Pycollective(comm), call, sizes, seconds)
        except BaseException as error:
            comm.abort(str(error))
            raise

    comms = pycollective.local_group(n)
    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(results):
        raise SystemExit("a replica failed")
    return results[0]


def tensorflow_replicas(n: int, eager: bool) -> Callable[[int], Callable[[], Any]]:
    import tensorflow as tf

    device = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * n
    tf.config.set_logical_device_configuration(device, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)])
    op = tf.distribute.ReduceOp.SUM

    def make(size: int) -> Callable[[], Any]:
        x = np.random.default_rng(0).random(max(1, size // 4), dtype=np.float32) + 1
        given = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(x * (context.replica_id_in_sync_group + 1))
        )
        if eager:
            run = lambda: strategy.extended.reduce_to(op, given, given)  # noqa: E731
        else:
            reduce = lambda v: tf.distribute.get_replica_context().all_reduce(op, v)  # noqa: E731
            step = tf.function(lambda v: strategy.run(reduce, args=(v,)))
            run = lambda: step(given)  # noqa: E731
        got = strategy.experimental_local_results(run())[n - 1].numpy()
        if not np.allclose(got, x * (n * (n + 1) // 2), rtol=1e-5):
            wrong("all_reduce", size, 0)
        return run

    return make


def jax_replicas(n: int) -> Callable[[int], Callable[[], Any]]:
    import jax

    if len(jax.devices()) < n:
        raise SystemExit("LEFT OUT JAX has too few devices")
    reduce = jax.pmap(lambda a: jax.lax.psum(a, "i"), "i", devices=jax.devices()[:n])

    def make(size: int) -> Callable[[], Any]:
        x = np.random.default_rng(0).random((n, max(1, size // 4)), dtype=np.float32) + 1
        given = jax.pmap(lambda a: a)(x)
        run = lambda: reduce(given).block_until_ready()  # noqa: E731
        if not np.allclose(np.asarray(run()[n - 1]), x.sum(0), rtol=1e-5):
            wrong("all_reduce", size, 0)
        return run

    return make


# The machine ------------------------------------------------------------------------------------


def raw_tcp(seconds: float) -> dict[str, Any]:
    """Measure two processes on the loopback: latency of 8 bytes one way, bytes per second both ways."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        a = socket.create_connection(listener.getsockname())
    else:
        a, _ = listener.accept()
    listener.close()
    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found: dict[str, Any] = {}
    for how in ("blocking", "spinning"):
        a.setblocking(how == "blocking")
        times = []
        for _ in range(2000):
            begin = time.perf_counter()
            if child:
                a.send(b"12345678")
                _receive(a)
            else:
                _receive(a)
                a.send(b"12345678")
            times.append(time.perf_counter() - begin)
        found[f"one_way_us_{how}"] = float(np.median(times)) * 1e6 / 2
    total = int(256 * MI * max(0.25, seconds))
    for how, stream in (("threads", _both_by_threads), ("polling", _both_by_polling)):
        rates = []
        for _ in range(5):
            begin = time.perf_counter()
            stream(a, total)
            rates.append(2 * total / (time.perf_counter() - begin) / 1e9)
        found[f"both_ways_gb_s_{how}"] = float(np.median(rates))
    a.close()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return found


def _both_by_threads(sock: socket.socket, total: int) -> None:
    sock.setblocking(True)
    data, into = bytes(MI), bytearray(MI)

    def send() -> None:
        for _ in range(total // MI):
            sock.sendall(data)

    sender = threading.Thread(target=send)
    sender.start()
    left = total
    while left:
        left -= sock.recv_into(into, min(left, MI))
    sender.join()


def _both_by_polling(sock: socket.socket, total: int) -> None:
    sock.setblocking(False)
    data, into = bytes(MI), bytearray(MI)
    unsent = unread = total
    while unsent or unread:
        if unread:
            with contextlib.suppress(BlockingIOError):
                unread -= sock.recv_into(into, min(unread, MI))
        if unsent:
            with contextlib.suppress(BlockingIOError):
                unsent -= sock.send(memoryview(data)[: min(unsent, MI)])


def _receive(sock: socket.socket) -> None:
    while True:
        try:
            if len(sock.recv(8)) == 8:
                return
            raise SystemExit("the raw connection broke")
        except BlockingIOError:
            continue


# ------------------------------------------------------------------------------------------------


REPLICAS: dict[str, Callable[[int], Callable[[int], Callable[[], Any]]]] = {
    "tensorflow-function": lambda n: tensorflow_replicas(n, eager=False),
    "tensorflow-eager": lambda n: tensorflow_replicas(n, eager=True),
    "jax-replicas": jax_replicas,
}
KINDS = [*PROCESSES, *REPLICAS, "threads", "raw-tcp"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("kind", choices=KINDS)
    p.add_argument(
        "--call", default="all_reduce", help="all_reduce for replicas of other libraries"
    )
    p.add_argument("--sizes", nargs="*", type=int, default=[], help="bytes of the whole buffer")
    p.add_argument("--seconds", type=float, default=0.15, help="of each of the 5 repeats (0.15)")
    p.add_argument("--replicas", type=int, default=2)
    args = p.parse_args()
    rank = 0
    if args.kind == "raw-tcp":
        found = raw_tcp(args.seconds)
    elif args.kind == "threads":
        found = pycollective_threads(args.replicas, args.call, args.sizes, args.seconds)
    elif args.kind in REPLICAS:
        make = REPLICAS[args.kind](args.replicas)
        found = {str(size): measure(make(size), args.seconds) for size in args.sizes}
    else:
        group = PROCESSES[args.kind]()
        rank, found = group.rank, time_sizes(group, args.call, args.sizes, args.seconds)
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
