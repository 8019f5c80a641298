"""The process group of the backend "pycollective"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend
from torch.autograd import _profiler_enabled, _record_function_with_args_enter

from pycollective import comm
from pycollective.comm.arrays import Array
from pycollective.dtypes import bfloat16
from pycollective.errors import CollectiveError
from pycollective.torch.join import join
from pycollective.torch.messages import Messages
from pycollective.torch.work import Watcher, Work, torch_error, torch_errors

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Pairs = list[tuple[Array, Array]]

_SUM = dist.AllreduceOptions()
"""The default options of every call: a sum, asynchronous, with the group's timeout."""

_NAMES = {
    int(getattr(dist.ReduceOp, of_torch)): name
    for of_torch, name in {
        "SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max",
        "BAND": "and", "BOR": "or", "BXOR": "xor", "PREMUL_SUM": "scaled sum",
    }.items()
}  # fmt: skip
_OF_BOOLS = {"sum": "or", "prod": "and"}

_AS_BYTES = {
    getattr(torch, name): torch.uint8
    for name in dir(torch)
    if name.startswith("float8") or name.startswith("float4")
} | {torch.complex32: torch.int32}
"""The dtypes that NumPy does not have; they can be moved, but not reduced."""
_SAME_SIZE = _AS_BYTES | {torch.bfloat16: torch.int16}


_IS_WRITABLE = np.from_dlpack(torch.zeros(1)).flags.writeable  # not before NumPy 2.1


class _OtherDeviceError(TypeError):
    """A tensor is not on a CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            f"the backend 'pycollective' is for tensors on CPUs, not on {device}: name a backend for "
            "each device, such as init_process_group('cpu:pycollective,cuda:nccl'), or call "
            "tensor.cpu()"
        )
        self.device = device


def _host(tensor: Any) -> Array:
    """Return an array that shares the tensor's memory."""
    if not tensor.is_cpu:
        raise _OtherDeviceError(tensor.device)
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout} cannot be sent: call tensor.to_dense()"
        )
    if tensor.is_neg() or tensor.is_conj():
        remedy = "resolve_neg" if tensor.is_neg() else "resolve_conj"
        raise TypeError(
            f"a view that PyTorch has not computed cannot be sent: call tensor.{remedy}()"
        )
    same_size = _SAME_SIZE.get(tensor.dtype)
    if same_size is None:
        return _shared(tensor.detach() if tensor.requires_grad else tensor)
    array = _shared(tensor.detach().view(same_size))
    if same_size is torch.int16 and bfloat16 is not None:
        return array.view(bfloat16)
    return array


def _shared(tensor: Any) -> Array:
    # After Tensor.numpy(), PyTorch refuses to resize the tensor's storage for ever.
    return cast(Array, np.from_dlpack(tensor) if _IS_WRITABLE else tensor.numpy())


def _reduced(tensor: Any, op: Any, after: _Pairs) -> tuple[Array, Array, str]:
    """Return a tensor's contribution, an array for its result, and the name of the operation.

    Both arrays are flat. `_flat` explains ``after``.
    """
    target, name = _flat(tensor, after), _NAMES[int(op.op)]
    if tensor.dtype in _AS_BYTES or (bfloat16 is None and tensor.dtype is torch.bfloat16):
        remedy = (
            "pip install ml_dtypes" if bfloat16 is None else "cast to torch.bfloat16 or float32"
        )
        raise TypeError(f"{tensor.dtype} cannot be reduced: {remedy}")
    if tensor.dtype is torch.bool:
        name = _OF_BOOLS.get(name, name)
    if name == "scaled sum":
        return _host((tensor.detach() * op.factor).to(tensor.dtype)).reshape(-1), target, "sum"
    return target, target, name


def _call(label: str) -> Callable[[_Method], _Method]:
    """Return a decorator of calls: it raises PyTorch's errors, and shows the call to the profiler.

    The call on tensors of another device goes to the backend of that device.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            try:
                if label and _profiler_enabled():
                    return self._profiled(label, method, args, kwargs)
                return method(self, *args, **kwargs)
            except (CollectiveError, TimeoutError) as error:
                raise torch_error(error) from error
            except _OtherDeviceError as other:
                group = self._group_on(other.device)
                if group is None:
                    raise
            return getattr(group, method.__name__)(*args, **kwargs)

        return cast(_Method, call)

    return decorate


def _base() -> Any:
    """Return the base class of PyTorch with which a backend in Python is complete.

    PyTorch 2.13 cannot construct a `Backend` from Python. In 2.14 and 2.15 a backend's work loses
    the rank that sent a message. In these versions, a subclass of `dist.ProcessGroup` gets the
    calls directly from Python.
    """

    class Received(dist.Work):  # type: ignore[misc]
        def _source_rank(self) -> int:
            return 0

    class Probe(Backend):  # type: ignore[misc]
        def recv_anysource(self, tensors: Any, tag: int) -> Received:
            return Received()

    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    try:
        group._register_backend(torch.device("cpu"), kind, Probe(0, 1))
        group.recv_anysource([torch.empty(1)], 0)._source_rank()
    except (TypeError, RuntimeError):
        return dist.ProcessGroup
    return Backend


class _Name(Backend):  # type: ignore[misc]
    """The object that PyTorch's flight recorder, from 2.15 on, asks for the name of a backend."""

    def getBackendName(self) -> str:
        return "pycollective"


class ProcessGroup(_base()):  # type: ignore[misc]
    """A process group of PyTorch whose calls run on a communicator of this package.

    The methods are those that ``torch.distributed`` and PyTorch's C++ code call. A synchronous call
    is done when the method returns.

    Parameters
    ----------
    store : torch.distributed.Store
        The store of the group, through which the ranks exchange their addresses.
    rank, size : int
        This process's rank, and the number of ranks.
    timeout : datetime.timedelta
        The time that a call waits for the other ranks.
    """

    supports_splitting = True
    supports_coalescing = supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        if isinstance(self, dist.ProcessGroup) and hasattr(_distributed_c10d, "FlightRecorderHook"):
            self._recorded = _Name(rank, size)
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(torch.device("cpu"), kind, self._recorded)
            self._set_default_backend(kind)
        with torch_errors():
            self._comm = join(store, rank, size, timeout.total_seconds())
        self._name = self._description = ""
        self._messages = Messages(self._comm)
        self._watcher = Watcher()
        self._coalesced: list[Work] | None = None
        self._on_devices: dict[str, Any] = {}
        self._shared: set[int] = set()  # addresses of memory that share() made

    # The group ----------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "pycollective"

    name = _get_backend_name = getBackendName

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the object with the backend's methods: for CPUs this one, else another group."""
        return self if torch.device(device).type == "cpu" else self._group_on(torch.device(device))

    def _group_on(self, device: torch.device) -> Any:
        """Return the group for another device, if ``init_process_group`` got a backend for it."""
        if not dist.is_initialized() or not isinstance(self, dist.ProcessGroup):
            return None  # the program made this group itself, or PyTorch chooses among the backends
        if device.type not in self._on_devices:
            pairs = (pair.split(":") for pair in dist.get_backend_config(self).split(","))
            name = dict(pair for pair in pairs if len(pair) == 2).get(device.type)
            if name in (None, "pycollective"):
                return None
            self._on_devices[device.type] = dist.new_group(
                dist.get_process_group_ranks(self),
                timeout=timedelta(seconds=self._comm.timeout),
                backend=name,
                use_local_synchronization=True,
            )
        return self._on_devices[device.type]

    @property
    def options(self) -> Any:
        """The options that PyTorch hands to the groups into which it splits this one."""
        return Backend.Options(self.name(), timedelta(seconds=self._comm.timeout))

    def split(self, store: Any, ranks: list[int], opts: Any) -> ProcessGroup:
        """Return the group of these ranks; called by ``dist.split_group`` on these ranks."""
        if self._comm.rank not in ranks:  # PyTorch's C++ code crashes if a split returns None
            raise ValueError(f"rank {self._comm.rank} is not one of the new group's ranks, {ranks}")
        return type(self)(store, ranks.index(self._comm.rank), len(ranks), opts._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; called by ``destroy_process_group``."""
        self._watcher.copy_all()
        self._messages.close()
        try:
            with torch_errors():
                self._comm.close()
        finally:
            self._watcher.close()
            # A DeviceMesh keeps this object, and a closed communicator keeps its shared memory:
            # replace the communicator.
            (self._comm,) = comm.local_group(1, timeout=self._comm.timeout)
            self._comm.close()
            self._messages = Messages(self._comm)

    def abort(self) -> None:
        """Fail all calls of all ranks."""
        self._comm.abort(f"rank {self._comm.rank} called abort()")

    # Every call ---------------------------------------------------------------------------------

    def _profiled(self, label: str, method: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that PyTorch's profiler shows, from its beginning to the end of its work."""
        record = _record_function_with_args_enter(f"{self.name()}:{label}", *_tensors(args))
        # The profiler's state belongs to this thread. A callback that PyTorch attaches to a future takes
        # the state along: a record that another thread ends itself would have no end.
        ended: Any = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, ended)

        def end() -> None:
            ended.set_result(None)

        try:
            work = method(self, *args, **kwargs)
        except BaseException:
            end()
            raise
        self._watcher.at_end(work, end)
        return work

    def _options(self, opts: Any) -> dict[str, Any]:
        """Return the options of a call of the communicator; calls without a timeout are faster."""
        seconds = opts.timeout.total_seconds()
        if seconds <= 0 or seconds == self._comm.timeout:
            return {"async_op": opts.asyncOp}
        return {"async_op": opts.asyncOp, "timeout": seconds}

    def _run(
        self, opts: Any, result: Any, method: Callable[..., Any], *args: Any,
        after: _Pairs | None = None, **kwargs: Any,
    ) -> Work:  # fmt: skip
        """Make a call, then copy between the arrays of ``after``; return the work."""
        options = self._options(opts)
        work = method(*args, **kwargs, **options)
        if not options["async_op"]:
            self._watcher.copy_ended()
            _copy(after)
            return Work(result)
        if after:
            work = _copying(work, after)
            self._watcher.keep(work)
        return self._begun(result, work)

    def _begun(self, result: Any, work: comm.Work[Any], **about: Any) -> Work:
        made = Work(result, work, self._watcher, **about)
        if self._coalesced is not None:
            self._coalesced.append(made)
        return made

    def _all(self, result: Any, works: Sequence[Work]) -> Work:
        """Return one work for several works."""
        begun = [work._work for work in works if work._work is not None]
        if not begun:
            return Work(result)
        joined = comm.Work.joined(begun, lambda: None)
        in_order = all(work._in_order for work in works)
        return Work(result, joined, self._watcher, in_order=in_order)

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return self._all([work._result for work in works], works)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self.end_coalescing()

    # Memory -------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        """Return True for CPUs; PyTorch's C++ code gives the index of a CPU only."""
        return isinstance(device, int) or bool(torch.device(device).type == "cpu")

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        """Return a flat tensor in memory that all ranks of this host map, for faster calls."""
        if torch.device(device).type != "cpu":
            raise _OtherDeviceError(torch.device(device))
        return torch.from_numpy(self._comm.empty(size * dtype.itemsize, np.uint8)).view(dtype)

    def share(self, tensor: Any) -> None:
        """Move the memory of a tensor and of all its views to memory that all ranks of this host map.

        Arrays of NumPy that were made from the tensor before keep the old memory, which is freed.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._shared:
            return
        shared = self.allocate_tensor(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
        self._shared.add(shared.data_ptr())
        shared.untyped_storage().copy_(storage)
        storage._swap_data_ptr_(shared.untyped_storage())

    # Collectives --------------------------------------------------------------------------------

    @_call("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = _SUM) -> Work:
        (tensor,) = tensors = _listed(tensors)
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, opts)
        after: _Pairs = []
        source, target, op = _reduced(tensor, opts.reduceOp, after)
        return self._run(opts, tensors, self._comm.all_reduce, source, op, out=target, after=after)

    def allreduce_sparse(self, tensors: Any, opts: Any = _SUM) -> Work:
        return self.allreduce(tensors, opts)

    @_call("all_reduce")
    def allreduce_coalesced(self, tensors: Any, opts: Any = _SUM) -> Work:
        if not tensors:
            raise ValueError("the list of tensors to reduce is empty")
        after: _Pairs = []
        parts = [_reduced(tensor, opts.reduceOp, after) for tensor in tensors]
        if len({(part[1].dtype, part[2]) for part in parts}) > 1:
            return self._all(tensors, [self.allreduce([tensor], opts) for tensor in tensors])
        sources, targets, ops = zip(*parts, strict=True)
        return self._run(
            opts, tensors, self._comm.all_reduce_many, sources, ops[0], out=list(targets),
            after=after,
        )  # fmt: skip

    def _all_reduce_sparse(self, tensor: Any, opts: Any) -> Work:
        """Gather the elements of all ranks, and add those with equal indices."""
        if opts.reduceOp.op != dist.ReduceOp.SUM:
            raise TypeError(
                "sparse tensors can only be added: use ReduceOp.SUM, or tensor.to_dense()"
            )
        coalesced = tensor.detach().coalesce()
        options = self._options(opts) | {"async_op": False}
        shapes = self._comm.all_gather(np.array([tensor.shape]), **options).tolist()
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"the ranks' sparse tensors have different shapes: {shapes}")
        parts = [_host(coalesced.indices().t().contiguous()), _host(coalesced.values())]
        indices, values = (self._comm.all_gather(p, ragged=True, **options) for p in parts)
        total = torch.sparse_coo_tensor(
            torch.from_numpy(indices).t(),
            _like(values, tensor),
            tensor.shape,
            check_invariants=False,
        )
        with torch.no_grad():
            tensor.copy_(total.coalesce())
        return Work([tensor])

    @_call("broadcast")
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        (tensor,) = tensors = _listed(tensors)
        after: _Pairs = []
        array = _flat(tensor, after)
        return self._run(
            opts, tensors, self._comm.broadcast, array, opts.rootRank, out=array,
            after=None if self._comm.rank == opts.rootRank else after,
        )  # fmt: skip

    @_call("reduce")
    def reduce(self, tensors: Any, opts: Any) -> Work:
        (tensor,) = tensors = _listed(tensors)
        after: _Pairs = []
        source, target, op = _reduced(tensor, opts.reduceOp, after)
        return self._run(
            opts, tensors, self._comm.reduce, source, op, opts.rootRank, out=target,
            after=after if self._comm.rank == opts.rootRank else None,
        )  # fmt: skip

    @_call("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Work:
        return self._all_gather(outputs[0], inputs[0], opts)

    def _all_gather(self, into: Any, tensor: Any, opts: Any) -> Work:
        self._check_parts("outputs", into, tensor, rows_may_differ=True)
        is_ragged = len({part.numel() for part in into}) > 1
        target, after = self._joined(into)
        return self._run(
            opts, [into], self._comm.all_gather, _host(tensor).reshape(-1), out=target, after=after,
            **({"ragged": True} if is_ragged else {}),
        )  # fmt: skip

    @_call("all_gather")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Work:
        works = [
            self._all_gather([row[i] for row in outputs], tensor, opts)
            for i, tensor in enumerate(inputs)
        ]
        return self._all(outputs, works)

    @_call("all_gather_into_tensor")
    def all_gather_single(self, output: Any, tensor: Any, opts: Any = _SUM) -> Work:
        _check_dtypes(output, tensor)
        after: _Pairs = []
        source, target = _host(tensor).reshape(-1), _flat(output, after)
        return self._run(opts, [output], self._comm.all_gather, source, out=target, after=after)

    _allgather_base = all_gather_single

    @_call("")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all(outputs, [self.all_gather_single(*pair, opts) for pair in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_call("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        (tensor,), after, target = inputs, None, None
        if self._comm.rank == opts.rootRank:
            self._check_parts("outputs", outputs[0], tensor)
            target, after = self._joined(outputs[0])
        return self._run(
            opts, outputs, self._comm.gather, _host(tensor).reshape(-1), opts.rootRank,
            out=target, after=after,
        )  # fmt: skip

    @_call("gather")
    def gather_single(self, output: Any, tensor: Any, opts: Any) -> Work:
        after: _Pairs = []
        target = None
        if self._comm.rank == opts.rootRank:
            _check_dtypes(output, tensor)
            target = _flat(output, after)
        return self._run(
            opts, [output], self._comm.gather, _host(tensor).reshape(-1), opts.rootRank,
            out=target, after=after,
        )  # fmt: skip

    gather_into_tensor = gather_single

    @_call("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        after: _Pairs = []
        source = None
        if self._comm.rank == opts.rootRank:
            self._check_parts("inputs", inputs[0], outputs[0])
            source = self._concatenated(inputs[0])
        return self._run(
            opts, outputs, self._comm.scatter, source, opts.rootRank,
            out=_flat(outputs[0], after), after=after,
        )  # fmt: skip

    @_call("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Work:
        (output,), (parts,) = outputs, inputs
        self._check_parts("inputs", parts, output, rows_may_differ=True)
        if len({part.numel() for part in parts}) > 1:
            return self._reduce_scatter_uneven(output, parts, opts)
        sources = [_reduced(part, opts.reduceOp, []) for part in parts]
        source = self._concatenated([source for source, _, _ in sources])
        after: _Pairs = []
        return self._run(
            opts, [output], self._comm.reduce_scatter, source, sources[0][2],
            out=_flat(output, after), after=after,
        )  # fmt: skip

    def _reduce_scatter_uneven(self, output: Any, parts: Any, opts: Any) -> Work:
        """Reduce each part to its rank."""
        works = []
        for rank, part in enumerate(parts):
            source, _, op = _reduced(part, opts.reduceOp, [])
            after: _Pairs = []
            target = _flat(output, after) if rank == self._comm.rank else None
            works.append(
                self._run(opts, None, self._comm.reduce, source, op, rank, out=target, after=after)
            )
        return self._all([output], works)

    @_call("reduce_scatter_tensor")
    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = _SUM) -> Work:
        _check_dtypes(output, tensor)
        source, _, op = _reduced(tensor, opts.reduceOp, [])
        after: _Pairs = []
        return self._run(
            opts, [output], self._comm.reduce_scatter, source, op,
            out=_flat(output, after), after=after,
        )  # fmt: skip

    _reduce_scatter_base = reduce_scatter_single

    @_call("")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all(outputs, [self.reduce_scatter_single(*pair, opts) for pair in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_call("all_to_all")
    def all_to_all_single(
        self, output: Any, tensor: Any, output_rows: Any, input_rows: Any, opts: Any = _SUM
    ) -> Work:
        _check_dtypes(output, tensor)
        after: _Pairs = []
        source, target = _host(tensor).reshape(-1), _flat(output, after)
        # Always with counts: other ranks may give sizes where this one has equal parts.
        return self._run(
            opts, [output], self._comm.all_to_all, source,
            self._elements("input", tensor, input_rows),
            out_counts=self._elements("output", output, output_rows), out=target, after=after,
        )  # fmt: skip

    alltoall_base = all_to_all_single

    @_call("all_to_all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Work:
        self._check_parts("inputs", inputs)
        self._check_parts("outputs", outputs)
        _check_dtypes(*outputs, *inputs)
        target, after = self._joined(outputs)
        return self._run(
            opts, outputs, self._comm.all_to_all, self._concatenated(inputs),
            [part.numel() for part in inputs], out_counts=[part.numel() for part in outputs],
            out=target, after=after,
        )  # fmt: skip

    @_call("barrier")
    def barrier(self, opts: Any = _SUM) -> Work:
        return self._run(opts, [], self._comm.barrier)

    @_call("")
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error of rank 0 names the first missing rank, or all of them."""
        rank = self._comm.rank
        timeout = getattr(timeout, "timeout", timeout)  # PyTorch's C++ code gives BarrierOptions
        seconds = self._comm.timeout if timeout is None else timeout.total_seconds()
        if seconds <= 0:
            raise dist.DistBackendError(
                f"Rank {rank} timed out in monitoredBarrier: no time is left"
            )
        try:
            self._comm.barrier(timeout=seconds)
        except CollectiveError as error:  # the words are those of gloo's errors
            missing = error.ranks if wait_all_ranks else error.ranks[:1]
            about = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} failed to pass"
            if rank:
                about = f"Rank {rank} successfully reached"
            about += " monitoredBarrier"
            if rank:
                about += ", but received errors while waiting for send/recv from rank 0"
            raise dist.DistBackendError(f"{about} in {seconds:g} s: {error}") from error

    # Messages -----------------------------------------------------------------------------------

    @_call("send")
    def send(self, tensors: Any, dest: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        work = self._messages.send(_host(tensor).reshape(-1), dest, tag)
        return self._begun(tensors, work, in_order=False)

    @_call("recv")
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        after: _Pairs = []
        work = self._messages.recv(_flat(tensor, after), source, tag)
        return self._begun(tensors, _copying(work, after), source=lambda: source, in_order=False)

    @_call("recvAnySource")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        (tensor,) = tensors
        after: _Pairs = []
        work = self._messages.recv_any(_flat(tensor, after), tag, self._comm.timeout)
        return self._begun(tensors, _copying(work, after), source=work.wait, in_order=False)

    # Lists of tensors ---------------------------------------------------------------------------

    def _check_parts(
        self,
        what: str,
        parts: Sequence[Any],
        tensor: Any = None,
        rows_may_differ: bool = False,
    ) -> None:
        """Raise an error unless a list has a tensor for each rank, in the form of this rank's tensor."""
        size, rank = self._comm.size, self._comm.rank
        if len(parts) != size:
            raise ValueError(
                f"the list of {what} has {len(parts)} tensors, not one for each of {size} ranks"
            )
        if tensor is None:
            return
        _check_dtypes(*parts, tensor)
        for r, part in enumerate(parts):
            first = 1 if rows_may_differ and r != rank else 0
            if part.dim() != tensor.dim() or part.shape[first:] != tensor.shape[first:]:
                but = " but for the first axis" if first else ""
                raise ValueError(
                    f"number {r} in the list of {what} has the shape {list(part.shape)}, and this "
                    f"rank's tensor has the shape {list(tensor.shape)}: they must be equal{but}"
                )

    def _joined(self, parts: Sequence[Any]) -> tuple[Array, _Pairs]:
        """Return an array for all parts, and its parts with the tensors to which they are copied."""
        targets = [_host(part) for part in parts]
        whole = self._comm.empty(sum(part.size for part in targets), targets[0].dtype)
        ends = np.cumsum([part.size for part in targets])[:-1]
        return whole, list(zip(targets, np.split(whole, ends), strict=True))

    def _concatenated(self, parts: Sequence[Any]) -> Array:
        """Return an array with a copy of all parts."""
        arrays = [_host(part) if isinstance(part, torch.Tensor) else part for part in parts]
        whole = self._comm.empty(sum(part.size for part in arrays), arrays[0].dtype)
        np.concatenate([part.reshape(-1) for part in arrays], out=whole)
        return whole

    def _elements(self, what: str, tensor: Any, rows: Sequence[int]) -> list[int]:
        """Return the number of elements for each rank, from rows; equal parts without rows."""
        total, size = tensor.shape[0], self._comm.size
        if not rows and total % size:
            raise ValueError(f"{total} rows of the {what} cannot be cut into {size} equal parts")
        if rows and (len(rows) != size or sum(rows) != total):
            raise ValueError(f"the {what} has {total} rows, and its split sizes are {list(rows)}")
        items = tensor.numel() // total if total else 0
        return [n * items for n in rows or [total // size] * size]


def _tensors(args: Any) -> list[Any]:
    """Return the tensors of a call that the profiler shows, which are the inputs."""
    given = args[1] if len(args) > 1 and isinstance(args[1], (list, torch.Tensor)) else args[:1]
    while given and isinstance(given[0], list):
        (given, *_) = given
    return [given] if isinstance(given, torch.Tensor) else [t for t in given if torch.is_tensor(t)]


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _check_dtypes(*tensors: Any) -> None:
    if len(kinds := {tensor.dtype for tensor in tensors}) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise TypeError(f"the call has tensors of several dtypes, {names}: cast them to one")


def _flat(tensor: Any, after: _Pairs) -> Array:
    """Return a flat array with the tensor's elements, for a result.

    Without a copy if the tensor is contiguous. Otherwise ``after`` gets the tensor's array and the copy,
    because the result must be written back after the call.
    """
    array = _host(tensor)
    flat = array.reshape(-1)
    if not array.flags.c_contiguous:
        after.append((array, flat))
    return flat


def _copy(pairs: _Pairs | None) -> None:
    for target, source in pairs or ():
        target[...] = source.reshape(target.shape)


def _copying(work: comm.Work[Any], after: _Pairs) -> comm.Work[Any]:
    """Return a work that also copies between the arrays of ``after``."""
    return work.then(functools.partial(_copy, after)) if after else work


def _like(array: Array, tensor: Any) -> Any:
    """Return an array as a tensor with the dtype of ``tensor``."""
    if tensor.dtype in _SAME_SIZE:
        array = array.view(np.uint8 if array.itemsize == 1 else f"i{array.itemsize}")
        return torch.from_numpy(array).view(tensor.dtype)
    return torch.from_numpy(array)


def create(options: Any, _backend_options: object = None) -> ProcessGroup:
    """Make the process group for ``torch.distributed``."""
    return ProcessGroup(options.store, options.group_rank, options.group_size, options.timeout)
