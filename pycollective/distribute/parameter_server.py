"""`ParameterServerStrategy`: variables on servers, and workers that train asynchronously."""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycollective.arguments import seconds, whole
from pycollective.cluster import rules
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.cluster.tf_config import TFConfigClusterResolver
from pycollective.distribute.central_storage import AggregatingVariable
from pycollective.distribute.creation import create_by_first
from pycollective.distribute.devices import Device, visible_gpus
from pycollective.distribute.launched_tasks import cluster_of_launcher
from pycollective.distribute.mirrored import MirroredExtended
from pycollective.distribute.per_worker_variable import PerWorkerVariable
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_threads import ReplicaThreads
from pycollective.distribute.server import (
    Chief,
    Server,
    all_made_here,
    check_ports,
    worker_of_this_process,
)
from pycollective.distribute.server_connections import Servers
from pycollective.distribute.server_variables import ServerVariable, of_one_element
from pycollective.distribute.sharded import ShardedVariable
from pycollective.distribute.shared_values import ROWS_FROM
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.worker_threads import created_beside, current_worker
from pycollective.errors import NotAvailableError
from pycollective.tensor import (
    Tensor,
    TensorShape,
    Variable,
    VariableSynchronization,
    as_tensor,
)

_log = logging.getLogger("pycollective")

#: The minimum bytes of a shard of the partitioner "balanced".
_LEAST_SHARD = 256 << 10

#: The number of elements of an initial value above which there is a warning, as in TensorFlow.
_LARGE = 10**9


class _ParameterServerExtended(MirroredExtended):
    """The replicas of a worker, and variables on servers in turn."""

    input_per_replica = False

    def __init__(
        self,
        devices: Sequence[Device],
        workers: int,
        servers: int,
        partitioner: Callable[..., Sequence[int]] | str | None,
        lock_free: bool,
        tasks: Chief | Server | None = None,
    ) -> None:
        super().__init__(devices)
        self.updates_variables_once = len(devices) > 1
        #: True if the replicas need an `AggregatingVariable` for each variable.
        self._aggregates = self.updates_variables_once or devices[0].kind == "GPU"
        #: In a cluster: the chief's connections, or the worker that this process is; else None.
        self.tasks = tasks
        #: This process's connections to the parameter servers of a cluster.
        self.servers: Servers | None = None
        if tasks is not None:
            self.servers = tasks.servers if isinstance(tasks, Chief) else tasks.connected()
        #: True from the first scheduled function on.
        self.started = False
        self.num_parameter_workers = workers
        self.num_servers = servers
        #: True: a variable is created on the server with the fewest bytes; else on the servers in turn.
        self._balanced = isinstance(partitioner, str)
        self._partitioner: Callable[..., Sequence[int]] | None = (
            self._balanced_shards if isinstance(partitioner, str) else partitioner
        )
        self._lock_free = lock_free
        self._placed = 0
        #: The bytes that were assigned to each server.
        self._bytes = [0] * servers
        #: Without a cluster: for each server, the number of its variables, and their bytes.
        self._loads = [(0, 0)] * servers
        #: The changes of the loads by variables that the program has dropped. The garbage collector may
        #: append a change in a thread that holds a lock.
        self._ended: deque[tuple[int, int, int]] = deque()

    def start_afresh(self) -> None:
        """Create the locks and threads, also in a copy or in a forked process."""
        super().start_afresh()
        self._placing = threading.Lock()
        #: The threads of replicas that no run uses.
        self._idle_threads: deque[ReplicaThreads] = deque()

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return tuple(_server_name(number) for number in range(self.num_servers))

    def begin_pass(self) -> None:
        """Raise ValueError outside of the workers."""
        if current_worker.get() is None:
            raise ValueError(
                "To use this dataset, you need to pass this dataset to "
                "ClusterCoordinator.create_per_worker_dataset."
            )

    @contextmanager
    def _threads_of_run(self) -> Iterator[ReplicaThreads]:
        """Yield the threads for a run; workers that are threads run their replicas at the same time."""
        try:
            threads = self._idle_threads.pop()
        except IndexError:
            threads = ReplicaThreads(self.num_local_replicas)
        try:
            yield threads
        finally:
            if threads.usable:
                self._idle_threads.append(threads)

    def load(self) -> dict[str, dict[str, int]]:
        """Return the variables of each server and their bytes; in a cluster also updates and traffic."""
        while self._ended:
            self._add_load(*self._ended.popleft())
        names = ("variables", "bytes", "updates", "bytes sent", "bytes received")
        loads = self._loads if self.servers is None else self.servers.loads()
        return {
            device: dict(zip(names, load, strict=False))
            for device, load in zip(self.parameter_devices, loads, strict=True)
        }

    # Variables -------------------------------------------------------------------------------

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a variable on the next server, or one with shards on the next servers."""
        return create_by_first(self.strategy, lambda: self._create(next_creator, **kwargs))

    def _create(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        name = kwargs.get("name") or "Variable"
        initial: Any = kwargs.get("initial_value")
        if initial is None:
            raise ValueError(
                f"variable {name!r}: it looks like you are using `ParameterServerStrategy`, and "
                "trying to create a variable without specifying `initial_value`. This is not "
                "allowed. Please specify the `initial_value`."
            )
        if kwargs.pop("per_worker_variable", False):
            parts = []
            for number in range(self.num_parameter_workers):
                variable = next_creator(**{**kwargs, "name": f"{name}/worker_{number}"})
                parts.append(self._on_next_server(variable))
            return PerWorkerVariable(parts, name)
        if kwargs.get("synchronization") is VariableSynchronization.ON_READ:
            return self._aggregating(self._on_next_server(next_creator(**kwargs)))
        shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
        by_parts = callable(initial) and _takes_partitions(initial)
        if by_parts and (shape is None or dtype is None):
            by_parts = False
        if not by_parts:
            value = initial() if callable(initial) else initial
            initial = kwargs["initial_value"] = as_tensor(value, dtype)
            if shape is not None and TensorShape(shape) != initial.shape:
                return next_creator(**kwargs)  # raises the error for both shapes
            shape, dtype = initial.shape, initial.dtype
        shape = TensorShape(shape)
        row = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        beside, owners = created_beside.get(), []
        if beside is not None:
            owners = [part.local() for part in _parts(beside)]
            if len(owners) > 1 and shape != beside.shape:
                owners = owners[:1]
            lengths = [len(part) for part in owners] if len(owners) > 1 else [0]
        else:
            lengths = self._lengths(shape, dtype)
        servers = []
        for n, length in enumerate(lengths):
            size = row * (length or (*shape, 1)[0])
            shard_name = f"{name}/{n}" if n else name
            servers.append(self._next_server(shard_name, size, *owners[n : n + 1]))
        if len(servers) == 1:
            variable = self._on_server(next_creator(**kwargs), servers[0], *owners[:1])
            return self._aggregating(variable)
        if not by_parts and math.prod(shape) > _LARGE:
            _log.warning(
                "variable %r: its initial value has %d elements, and this task makes all of them before "
                "it divides them among the servers. An initial_value with the arguments partition_shape "
                "and partition_offset makes the rows of one shard at a time; give shape and dtype too",
                name,
                math.prod(shape),
            )
        shards, begin = [], 0
        for number, (length, server) in enumerate(zip(lengths, servers, strict=True)):
            part = TensorShape((length, *shape[1:]))
            if by_parts:
                offset = (begin, *[0] * (len(shape) - 1))
                value = initial(partition_shape=part, partition_offset=offset)
            else:
                value = Tensor(initial.array[begin : begin + length])
            shard_name = f"{name}/part_{number}"
            changed = {**kwargs, "initial_value": value, "shape": part, "name": shard_name}
            shard = next_creator(**changed)
            shard = self._on_server(shard, server, *owners[number : number + 1])
            shards.append(self._aggregating(shard))
            begin += length
        return ShardedVariable(shards, name)

    def _aggregating(self, variable: Variable) -> Variable:
        """Return the variable for the replicas, whose assignments are aggregated within the worker."""
        if not self._aggregates:
            return variable
        shared = AggregatingVariable(self.strategy, variable)
        shared.device = variable.device
        return shared

    def _lengths(self, shape: TensorShape, dtype: Any) -> list[int]:
        """Return the number of rows of each shard, from the partitioner; ``[0]`` without shards."""
        if self._partitioner is None or not len(shape):
            return [0]
        counts = self._partitioner(shape=shape, dtype=dtype)
        if (
            not isinstance(counts, (list, tuple))
            or not counts
            or not isinstance(counts[0], (int, np.integer))
            or counts[0] < 1
            or any(count != 1 for count in counts[1:])
        ):
            raise ValueError(
                "variable_partitioner must return a list/tuple whose elements are 1 besides the first "
                f"element (non-zero), got: {counts!r}"
            )
        rows = int(shape[0])
        shards = max(1, min(int(counts[0]), rows))
        base, rest = divmod(rows, shards)
        return [base + (number < rest) for number in range(shards)]

    def _balanced_shards(self, shape: Any, dtype: Any) -> list[int]:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        shards = max(1, min(self.num_servers, size // _LEAST_SHARD))
        return [shards, *[1] * (len(shape) - 1)]

    def _next_server(self, name: str, size: int, beside: Variable | None = None) -> int:
        """Return the server of a new variable, which is that of ``beside`` if given; count the bytes."""
        if beside is None and self.started and self.servers is not None:
            return self.servers.server_of(name)
        with self._placing:
            if beside is not None:
                place = _server_of(beside)
            elif self._balanced:
                place = self._bytes.index(min(self._bytes))
            else:
                self._placed += 1
                place = (self._placed - 1) % self.num_servers
            self._bytes[place] += size
            return place

    def _on_next_server(self, variable: Variable) -> Variable:
        size = variable.like().array.nbytes
        return self._on_server(variable, self._next_server(variable.name, size))

    def _on_server(
        self, variable: Variable, server: int, beside: Variable | None = None
    ) -> Variable:
        """Assign a new variable to a server; with ``beside``, as a slot of another one."""
        if self.servers is not None:
            variable = self.servers.create(variable, server, beside)
        variable._distribute_strategy = self.strategy
        variable.device = _server_name(server)
        like = variable.like().array
        if like.ndim > 1 and like.nbytes >= ROWS_FROM and like.dtype.kind in "fV":
            variable._by_rows, variable._like = True, of_one_element(like)
        # Counters and sums must lose no addition, so they keep their locks.
        keeps_lock = (
            variable.synchronization is VariableSynchronization.ON_READ or not variable.ndim
        )
        variable._lock_free = self._lock_free and not keeps_lock
        if (
            variable._lock_free
            and self.servers is not None
            and isinstance(variable, ServerVariable)
            and variable._block is None
        ):
            raise NotAvailableError(
                "consistency='hogwild' needs the memory of the parameter servers: start all tasks on "
                "one host, without PYCOLLECTIVE_TRANSPORT=tcp, or leave consistency out"
            )
        if self.servers is None:
            self._add_load(server, 1, like.nbytes)
            ended = weakref.finalize(variable, self._ended.append, (server, -1, -like.nbytes))
            ended.atexit = False
        return variable

    def _add_load(self, server: int, variables: int, size: int) -> None:
        with self._placing:
            before, bytes_before = self._loads[server]
            self._loads[server] = before + variables, bytes_before + size

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Create variables in the block on the server of a variable of this strategy.

        The new variables have no shards. One in the shape of a `ShardedVariable` is an exception, and
        gets the same shards on the same servers.
        """
        with super().colocate_vars_with(colocate_with_variable):
            token = created_beside.set(colocate_with_variable)
            try:
                yield
            finally:
                created_beside.reset(token)


def _parts(variable: Variable) -> list[Variable]:
    return variable.variables if isinstance(variable, ShardedVariable) else [variable]


def _server_name(server: int) -> str:
    return f"/job:ps/replica:0/task:{server}/device:CPU:0"


def _server_of(variable: Variable) -> int:
    assert variable.device is not None
    return int(variable.device.split("task:")[1].split("/")[0])


def _takes_partitions(function: Callable[..., Any]) -> bool:
    """Return True if an initializer makes the rows of one shard by itself."""
    try:
        names = inspect.signature(function).parameters.keys()
    except ValueError:  # a function in C, such as time.time
        return False
    return {"partition_shape", "partition_offset"} <= names


class ParameterServerStrategy(Strategy):
    """Asynchronous training: variables are on servers, and each worker trains on its own.

    `ClusterCoordinator` schedules functions on the workers. Each worker has a replica on each GPU that
    it sees, or one replica on the CPU. Values that its replicas assign are aggregated.

    Without a cluster, servers and workers are threads of this process. In a cluster, every task runs
    the same program. The constructor returns on the chief, and on a worker, which runs the program up
    to the first scheduled function. On a parameter server the constructor serves until the chief ends,
    and then ends the process. The cluster's evaluator connects to no other task: its servers and
    workers are threads, as without a cluster.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        The cluster and this process's task; by default that of ``TF_CONFIG``, if it has one. Else the
        processes of another launcher that `pycollective.init` knows are the cluster. Rank 0 is the
        chief, the next ``num_ps`` ranks are parameter servers, and the others are workers. A worker
        whose address has port 0, such as ``10.0.0.7:0``, chooses its port, and may begin later than
        the chief.
    variable_partitioner : callable or str, optional
        A function ``variable_partitioner(shape=, dtype=)`` that returns the number of shards of each
        axis, 1 for all axes but the first, such as the partitioners of
        ``tf.distribute.experimental.partitioners``. By default no variable has shards. ``"balanced"``
        makes shards of at least 256 KiB, at most one for each server. It puts each variable and shard
        on the server with the fewest bytes.
    num_workers, num_ps : int
        The numbers of workers and of parameter servers; a cluster has its own.
    consistency : {"locked", "hogwild"}
        ``"locked"``: updates of a variable are made one after the other, and a value that was read
        never changes. ``"hogwild"``: updates write to the memory that other workers read and update
        at the same time. This needs no copy, but updates can be lost in part. Counters and metrics are
        always locked.
    snapshot_dir : path, optional
        A directory in which each parameter server of a cluster writes its variables.
    snapshot_seconds : float
        The interval of the snapshots.
    recover : bool
        True: if a parameter server of a cluster is lost, wait until it is started again. Its variables
        return to its last snapshot, and scheduled functions continue. False: `ClusterCoordinator` raises
        UnavailableError.

    Raises
    ------
    UnavailableError
        A task of the cluster does not listen within 180 seconds.
    RendezvousError
        A task's address is taken, or the cluster's hosts have no secret.
    FailedPreconditionError
        The parameter servers already serve another chief.
    ValueError
        The cluster has no parameter server, no worker or a task of unknown type. It does not have this
        task. A parameter server's address has port 0. There is no worker or no server.
        ``consistency`` is unknown. ``recover`` is True without a ``snapshot_dir``. The workers have
        different numbers of GPUs.
    TypeError
        ``cluster_resolver``, ``variable_partitioner`` or a number has another type.
    """

    extended: _ParameterServerExtended
    #: The strategy's `ClusterCoordinator`, once there is one. A copy has the original's, until
    #: `ClusterCoordinator` makes its own.
    coordinator: Any = None

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | str | None = None,
        *,
        num_workers: int = 2,
        num_ps: int = 2,
        consistency: str = "locked",
        snapshot_dir: str | None = None,
        snapshot_seconds: float = 60.0,
        recover: bool = False,
    ) -> None:
        num_ps, num_workers = whole("num_ps", num_ps), whole("num_workers", num_workers)
        cluster, task, number = _cluster_of(cluster_resolver, num_ps)
        if cluster is not None:
            num_ps, num_workers = cluster.num_tasks("ps"), cluster.num_tasks("worker")
            if worker_of_this_process() is None and all_made_here(cluster):
                cluster = None
        if num_ps < 1:
            raise ValueError(f"There must be at least one ps. num_ps is {num_ps}.")
        if num_workers < 1:
            raise ValueError(f"There must be at least one worker. num_workers is {num_workers}.")
        if consistency not in ("locked", "hogwild"):
            raise ValueError(f"consistency must be 'locked' or 'hogwild', got {consistency!r}")
        snapshot_seconds = seconds("snapshot_seconds", snapshot_seconds)
        if recover and snapshot_dir is None:
            raise ValueError(
                "recover=True needs snapshot_dir, from which a server restores variables"
            )
        known = variable_partitioner in (None, "balanced")
        if not known and not callable(variable_partitioner):
            raise TypeError(
                "variable_partitioner must be a function of shape and dtype, or 'balanced', got "
                f"{variable_partitioner!r}"
            )
        tasks: Chief | Server | None = None
        if cluster is not None:
            snapshots = {"snapshot_dir": snapshot_dir, "snapshot_seconds": snapshot_seconds}
            tasks = _task_of(cluster, task, number, recover, snapshots)
        super().__init__(
            _ParameterServerExtended(
                _devices_of_replicas(tasks),
                num_workers,
                num_ps,
                variable_partitioner,
                consistency == "hogwild",
                tasks,
            )
        )
        self._warned = False
        _log.info(
            "ParameterServerStrategy with %d workers and %d parameter servers, %s",
            num_workers,
            num_ps,
            self._kind(),
        )

    def _kind(self) -> str:
        """Return a text that says where the workers run."""
        return "threads of this process" if self.extended.tasks is None else "other processes"

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function once for each replica of this worker; see `Strategy.run`.

        Call this method in a function that `ClusterCoordinator.schedule` runs on a worker. Elsewhere
        the function runs in the caller's thread, with a warning in the log.
        """
        self._warn_outside_workers()
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Reduce a value over this worker's replicas; see `Strategy.reduce`, and `run`."""
        self._warn_outside_workers()
        return super().reduce(reduce_op, value, axis)

    def _warn_outside_workers(self) -> None:
        if current_worker.get() is None and not self._warned:
            self._warned = True
            _log.warning(
                "It is detected that a function used with "
                "`tf.distribute.experimental.ParameterServerStrategy` is executed locally on the "
                "coordinator. This is inefficient but may be valid for one-off tasks such as inferring "
                "output signature. To properly distribute functions to run on workers, `run` or "
                "`reduce` should be used within a function passed to "
                "`tf.distribute.experimental.coordinator.ClusterCoordinator.schedule`."
            )

    def describe(self) -> str:
        """Return a line about the workers, and one for each server with its variables and its load.

        In a cluster, a server's load has the updates of its variables, and the bytes that it has sent
        and received over connections. Tasks that map the variables need no connection.
        """
        extended = self.extended
        lines = [f"workers: {extended.num_parameter_workers} {self._kind()}"]
        if extended.num_local_replicas > 1:
            lines[0] += f", each with {extended.num_local_replicas} replicas"
        for name, load in extended.load().items():
            line = f"{name}: {load['variables']} variables, {load['bytes']:,} bytes"
            if "updates" in load:
                line += f"; {load['updates']:,} updates, {load['bytes sent']:,} bytes sent"
                line += f", {load['bytes received']:,} received"
            lines.append(line)
        return "\n".join(lines)


def _devices_of_replicas(tasks: Chief | Server | None) -> Sequence[Device]:
    """Return the devices of a worker's replicas: all GPUs that it sees, or the CPU."""
    gpus = visible_gpus()
    if isinstance(tasks, Chief):
        if tasks.gpus_of_worker is None:
            tasks.gpus_of_worker = len(gpus)
        if tasks.gpus_of_worker != len(gpus):
            return [Device("CPU", number) for number in range(max(1, tasks.gpus_of_worker))]
    return gpus or [Device("CPU", 0)]


def _cluster_of(
    resolver: ClusterResolver | None, num_ps: int
) -> tuple[ClusterSpec | None, str | None, int]:
    """Return the cluster with this process's task, if there is one."""
    source = "cluster_resolver"
    if resolver is None:
        if not TFConfigClusterResolver.applies(os.environ):
            return cluster_of_launcher(num_ps) or (None, None, 0)
        source, resolver = "TF_CONFIG", TFConfigClusterResolver()
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver or None, not {resolver!r}")
    cluster = resolver.cluster_spec()
    if not cluster.jobs:
        raise ValueError(
            f"Cluster spec must be non-empty in {source}; leave it out to run servers and workers as "
            "threads of this process"
        )
    rules.validate(cluster, None, None)
    if resolver.task_type == "evaluator":
        _log.warning(
            "this is the cluster's evaluator: its servers and workers are threads of this process, and "
            "it connects to no other task. Restore the chief's checkpoints, and do not train"
        )
        return None, None, 0
    for job in ("ps", "worker"):
        if not rules.task_count(cluster, job):
            raise ValueError(f"There must be at least one {job}. The {source} has none.")
    check_ports(cluster)
    task, number = resolver.task_type, resolver.task_id
    if task not in (None, "", "chief"):  # the cluster need not have the chief
        rules.validate(cluster, task, number)
    return cluster, task, number or 0


def _task_of(
    cluster: ClusterSpec, task: str | None, number: int, recover: bool, snapshots: dict[str, Any]
) -> Chief | Server:
    """Become a task of a cluster: connect the chief, serve as a parameter server, or be a worker."""
    worker = worker_of_this_process()
    if worker is not None:
        return worker
    if task in ("ps", "worker"):
        server = Server(cluster, task, number, **snapshots)
        if task == "ps":
            server.join()
        return server
    chief = Chief(cluster, recover)
    atexit.register(chief.end)
    return chief
