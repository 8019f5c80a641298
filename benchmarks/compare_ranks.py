"""One contestant of compare.py: a rank of a group, or all replicas of a process; compare.py starts it.

    python benchmarks/compare_ranks.py KIND --sizes 8 1048576 [--seconds 0.5] [--replicas 2]

An all-reduce, float32 sum, in place where the contestant can. Results are checked before the timing, and
nothing is timed on zeros. The time of an iteration is the slowest rank's. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

REFILL = 50
"""Calls in place after which the numbers begin again small: sums grow."""
TINY = np.float32(1e-30)
MI = 1 << 20
LIMITS_FROM = MI


class Call:
    """An all-reduce that can be repeated.

    Attributes
    ----------
    run : callable
        Makes the call and returns when this rank has the result.
    result : callable
        The result as an array, after a call.
    array : ndarray or None
        The array that it works on in place, if it does.
    """

    def __init__(
        self, run: Callable[[], Any], result: Callable[[], Any], array: Any = None
    ) -> None:
        self.run, self.result, self.array = run, result, array


# Groups of processes: rank, size, barrier(), call(x) -> Call ------------------------------------


class Pycollective:
    def __init__(self) -> None:
        import pycollective

        self.comm = pycollective.init()
        self.rank, self.size, self.barrier = self.comm.rank, self.comm.size, self.comm.barrier

    def call(self, x: Any) -> Call:
        return Call(lambda: self.comm.all_reduce(x, out=x), lambda: x, x)

    def limit(self, size: int) -> float:
        from pycollective.benchmark import memory_rate

        return memory_rate(self.comm, size)


class Registered(Pycollective):
    """With memory of the group, comm.empty()."""

    def call(self, x: Any) -> Call:
        if not hasattr(self.comm, "empty"):
            raise SystemExit("LEFT OUT this pycollective has no comm.empty()")
        y = self.comm.empty(x.shape, x.dtype)
        y[:] = x
        return super().call(y)


class Gloo:
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.size, self.barrier = dist.get_rank(), dist.get_world_size(), dist.barrier

    def call(self, x: Any) -> Call:
        tensor = self.torch.from_numpy(x)
        return Call(lambda: self.dist.all_reduce(tensor), lambda: x, x)


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size, self.barrier = self.comm.rank, self.comm.size, self.comm.Barrier

    def call(self, x: Any) -> Call:
        place, op = self.MPI.IN_PLACE, self.MPI.SUM
        return Call(lambda: self.comm.Allreduce(place, x, op=op), lambda: x, x)


class JaxProcesses:
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

    def call(self, x: Any) -> Call:
        given = self.jax.make_array_from_process_local_data(self.split, x)
        last: list[Any] = [None]

        def run() -> None:
            last[0] = self.sum(given).block_until_ready()

        return Call(run, lambda: np.asarray(last[0].addressable_data(0)))

    def barrier(self) -> None:
        self.call(np.ones(1, np.float32)).run()


class TensorflowProcesses:
    def __init__(self) -> None:
        import tensorflow as tf

        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self.tf = tf
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def call(self, x: Any) -> Call:
        tf, strategy = self.tf, self.strategy

        def reduce(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        step = tf.function(lambda value: strategy.run(reduce, args=(value,)))
        given = tf.constant(x)
        last: list[Any] = [None]

        def run() -> None:
            last[0] = step(given)

        return Call(run, lambda: strategy.experimental_local_results(last[0])[0].numpy())

    def barrier(self) -> None:
        self.call(np.ones(1, np.float32)).run()


PROCESSES: dict[str, Callable[[], Any]] = {
    "pycollective": Pycollective,
    "registered": Registered,
    "gloo": Gloo,
    "mpi": Mpi,
    "jax": JaxProcesses,
    "tensorflow": TensorflowProcesses,
}


def slowest(group: Any, times: Any) -> Any:
    """Return the largest of all ranks' times, by a sum of an array that each fills its own row of."""
    rows = np.zeros((group.size, len(times)), np.float32)
    rows[group.rank] = times
    call = group.call(rows.reshape(-1))
    call.run()
    return np.asarray(call.result()).reshape(rows.shape).max(axis=0)


def time_size(group: Any, size: int, seconds: float) -> dict[str, float]:
    count, n = max(1, size // 4), group.size
    pattern = (np.arange(count) % 17 + 1).astype(np.float32)
    call = group.call(pattern * np.float32(group.rank + 1))
    call.run()
    if not np.array_equal(call.result(), pattern * np.float32(n * (n + 1) // 2)):
        raise SystemExit(f"wrong sum at {size} bytes")
    fresh = np.random.default_rng(group.rank).random(count, dtype=np.float32) * TINY + TINY

    def refill() -> None:
        if call.array is not None:
            call.array[:] = fresh

    refill()
    clock = time.perf_counter
    for _ in range(3):
        call.run()
    first = np.empty(7)
    for i in range(len(first)):
        begin = clock()
        call.run()
        first[i] = clock() - begin
    estimate = float(np.median(slowest(group, first)))  # one hiccup does not count
    iterations = int(max(5, min(5000, seconds / max(estimate, 1e-7))))
    times = np.empty(iterations)
    group.barrier()
    for i in range(iterations):
        if i % REFILL == 0:
            refill()
            group.barrier()
            call.run()  # with caches as after any call
        begin = clock()
        call.run()
        times[i] = clock() - begin
    return summary(slowest(group, times))


def summary(times: Any) -> dict[str, float]:
    return {
        "us": float(np.median(times)) * 1e6,
        "p99_us": float(np.percentile(times, 99)) * 1e6,
        "iterations": len(times),
    }


# Replicas of one process ------------------------------------------------------------------------


def time_alone(run: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Time what one thread calls for all replicas."""
    for _ in range(3):
        run()
    clock = time.perf_counter
    begin = clock()
    for _ in range(5):
        run()
    iterations = int(max(5, min(5000, seconds / max((clock() - begin) / 5, 1e-7))))
    times = np.empty(iterations)
    for i in range(iterations):
        begin = clock()
        run()
        times[i] = clock() - begin
    return summary(times)


class _Replica(Pycollective):
    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size, self.barrier = comm.rank, comm.size, comm.barrier


def pycollective_threads(n: int, sizes: list[int], seconds: float) -> dict[str, Any]:
    import pycollective

    results: list[dict[str, Any]] = [{} for _ in range(n)]

    def work(comm: Any) -> None:
        try:
            results[comm.rank] = time_sizes(_Replica(comm), sizes, seconds)
        except BaseException as error:
            comm.abort(str(error))
            raise

    comms = pycollective.local_group(n)
    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
            one = lambda v: tf.distribute.get_replica_context().all_reduce(op, v)  # noqa: E731
            step = tf.function(lambda v: strategy.run(one, args=(v,)))
            run = lambda: step(given)  # noqa: E731
        got = strategy.experimental_local_results(run())[n - 1].numpy()
        if not np.allclose(got, x * (n * (n + 1) // 2), rtol=1e-5):
            raise SystemExit(f"wrong sum at {size} bytes")
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
            raise SystemExit(f"wrong sum at {size} bytes")
        return run

    return make


# The machine ------------------------------------------------------------------------------------


def raw_tcp(seconds: float) -> dict[str, Any]:
    """Two processes on the loopback: one-way latency of 8 bytes, and bytes a second both ways."""
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


def time_sizes(group: Any, sizes: list[int], seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in sizes:
        found[str(size)] = time_size(group, size, seconds)
        if hasattr(group, "limit") and size >= LIMITS_FROM:
            found[str(size)]["memory_gb_s"] = group.limit(size) / 1e9
    return found


REPLICAS: dict[str, Callable[[int], Callable[[int], Callable[[], Any]]]] = {
    "tensorflow-function": lambda n: tensorflow_replicas(n, eager=False),
    "tensorflow-eager": lambda n: tensorflow_replicas(n, eager=True),
    "jax-replicas": jax_replicas,
}
KINDS = [*PROCESSES, *REPLICAS, "threads", "raw-tcp"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("kind", choices=KINDS)
    p.add_argument("--sizes", nargs="*", type=int, default=[])
    p.add_argument("--seconds", type=float, default=0.5, help="about how long each size takes")
    p.add_argument("--replicas", type=int, default=2)
    args = p.parse_args()
    rank = 0
    if args.kind == "raw-tcp":
        found = raw_tcp(args.seconds)
    elif args.kind == "threads":
        found = pycollective_threads(args.replicas, args.sizes, args.seconds)
    elif args.kind in REPLICAS:
        make = REPLICAS[args.kind](args.replicas)
        found = {str(size): time_alone(make(size), args.seconds) for size in args.sizes}
    else:
        group = PROCESSES[args.kind]()
        rank, found = group.rank, time_sizes(group, args.sizes, args.seconds)
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
