"""Reverse-mode differentiation: the record of operations, and the backward pass.

Each thread has its own stack of tapes, so that concurrent replicas do not affect each other. A tape
identifies a tensor by a number, which the tensor gets when it is first tracked and which is never
reused. A tape therefore keeps no tensor alive. Between the forward and the backward pass, only the
``vjp`` closures of operations keep data; the backward pass frees them one by one.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np

from .. import nest
from ..array_backend import Array, array_module, asarray, filled
from .compiled import binary, contiguous
from .indexed_slices import IndexedSlices
from .multiple import Multiple, Rows, add_to
from .tensor import Tensor, as_tensor

#: ``vjp(g, need)`` returns, for each input, the gradient of ``sum(g * output)`` for that input, or
#: None if ``need`` is False for it.
Vjp: TypeAlias = Callable[[Array, tuple[bool, ...]], Sequence[Any]]


class Watchable(Protocol):
    """The interface of a variable for tapes."""

    _trainable: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""

    def current(self) -> Tensor:
        """Return the present value; each assignment makes another tensor."""


class _ThreadState(threading.local):
    """The state of a thread that affects its operations."""

    #: The recording tapes, outermost first.
    tapes: tuple[GradientTape, ...] = ()
    #: The dtype to which reads convert trainable floating-point variables, or None.
    reads_as: np.dtype[Any] | None = None
    #: True to record and replay nothing, so that each layer runs from Python.
    eagerly: bool = False


thread_state = _ThreadState()
new_key = itertools.count(1).__next__
_key = operator.attrgetter("_key")
_key_lock = threading.Lock()


def recording() -> bool:
    """Return True if a tape records in this thread."""
    return bool(thread_state.tapes)


def is_tracked(tensor: Tensor) -> bool:
    """Return True if a gradient of one of this thread's tapes reaches the tensor."""
    return any(tensor._key in tape._tracked for tape in thread_state.tapes)


def needs_of(tensors: Sequence[Tensor]) -> tuple[bool, ...] | None:
    """Return for each tensor True if a gradient of this thread's tape reaches it.

    Without a tape, no gradient is needed. The result is None if there are several tapes, or if the tape
    is persistent.
    """
    tapes = thread_state.tapes
    if not tapes:
        return (False,) * len(tensors)
    if len(tapes) > 1 or tapes[0]._persistent:
        return None
    tracked = tapes[0]._tracked
    return tuple(map(tracked.__contains__, map(_key, tensors)))


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records and replays nothing: each of its layers runs from Python."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        before, thread_state.eagerly = thread_state.eagerly, True
        try:
            return function(*args)
        finally:
            thread_state.eagerly = before

    return call


@contextmanager
def paused() -> Iterator[None]:
    """Stop all tapes of this thread from recording inside the ``with`` block."""
    tapes, thread_state.tapes = thread_state.tapes, ()
    try:
        yield
    finally:
        thread_state.tapes = tapes


def key_of(tensor: Tensor) -> int:
    """Return the number by which tapes identify ``tensor``, and assign one if it has none."""
    if not tensor._key:
        with _key_lock:
            if not tensor._key:
                tensor._key = new_key()
    return tensor._key


def record(array: Array, inputs: tuple[Tensor, ...], vjp: Vjp) -> Tensor:
    """Return the result of an operation as a tensor, and record the operation on this thread's tapes.

    Parameters
    ----------
    array
        The result. The operation must not write to it afterwards.
    inputs
        The tensors from which the result was computed.
    vjp
        ``vjp(g, need)`` takes the gradient of the result (in its shape and dtype) and one bool for each
        input. It returns one array for each input, in that input's shape and dtype, or None if
        ``need`` is False. It must not write to ``g``, and may return it.

    Returns
    -------
    Tensor
        The result. Integers and bools are never tracked.
    """
    output = Tensor(array)
    for tape in thread_state.tapes:
        tracked = tape._tracked
        for tensor in inputs:
            if tensor._key in tracked:
                if array.dtype.kind in "fV":
                    if not output._key:
                        output._key = new_key()
                    tracked.add(output._key)
                    tape._nodes.append((output._key, tuple(map(_key, inputs)), vjp))
                break
    return output


def record_many(
    arrays: Sequence[Array],
    inputs: tuple[Tensor, ...],
    vjp: Callable[[tuple[Array, ...], tuple[bool, ...]], Sequence[Any]],
) -> tuple[Tensor, ...]:
    """Record an operation with several results, as `record`; ``vjp`` takes a tuple of gradients.

    A result on which the target does not depend gets a gradient of zeros.
    """
    outputs = tuple(Tensor(array) for array in arrays)
    keys = tuple(key_of(output) for output in outputs)
    node_vjp = _JointVjp([(array.shape, array.dtype, array_module(array)) for array in arrays], vjp)
    for tape in thread_state.tapes:
        if any(tensor._key in tape._tracked for tensor in inputs):
            tape._tracked.update(
                key for key, output in zip(keys, outputs, strict=True) if output.dtype.kind in "fV"
            )
            tape._nodes.append((keys, tuple(map(_key, inputs)), node_vjp))
    return outputs


class _JointVjp:
    """The ``vjp`` of an operation with several results; it replaces missing gradients by zeros."""

    __slots__ = ("_specs", "_vjp")

    def __init__(
        self, specs: list[tuple[Any, Any, Any]], vjp: Callable[..., Sequence[Any]]
    ) -> None:
        self._specs = specs
        self._vjp = vjp

    def __call__(self, gradients: Any, need: tuple[bool, ...]) -> Sequence[Any]:
        complete = tuple(
            module.zeros(shape, dtype) if gradient is None else gradient
            for gradient, (shape, dtype, module) in zip(gradients, self._specs, strict=True)
        )
        return self._vjp(complete, need)


#: The keys of the outputs (one, or a tuple), the keys of the inputs (0: never tracked), and the vjp.
_Node: TypeAlias = tuple[Any, tuple[int, ...], Any]


class GradientTape:
    """A record of operations inside a ``with`` block, from which gradients are computed.

    Parameters
    ----------
    persistent : bool
        Allow more than one call of `gradient`. A persistent tape keeps the whole record until it is
        deleted; any other tape frees the record while it computes the gradient.
    watch_accessed_variables : bool
        Watch trainable variables when they are read. If False, only the arguments of `watch` are
        watched.

    Notes
    -----
    The interface is that of ``tf.GradientTape``. Only first derivatives are implemented: a gradient
    computed while a tape records is a result like any other, but its own gradient raises
    ``NotImplementedError``.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent = persistent
        self._watch_accessed = watch_accessed_variables
        self._used = False
        self.reset()

    # Recording -------------------------------------------------------------------------------

    def __enter__(self) -> GradientTape:
        if self in thread_state.tapes:
            raise ValueError("this GradientTape already records; do not enter its block twice")
        if self._used:
            self.reset()
        thread_state.tapes = (*thread_state.tapes, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leave()

    def _leave(self) -> None:
        tapes = thread_state.tapes
        if tapes and tapes[-1] is self:
            thread_state.tapes = tapes[:-1]
        else:
            thread_state.tapes = tuple(tape for tape in tapes if tape is not self)

    def reset(self) -> None:
        """Delete the record, and the list of watched tensors and variables."""
        self._used = False
        self._tracked: set[int] = set()
        self._nodes: list[_Node] = []
        # For each variable's id, the variable and the keys of the values read from it.
        self._variables: dict[int, tuple[Watchable, dict[int, None]]] = {}

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Record nothing on this tape inside the ``with`` block."""
        if self not in thread_state.tapes:
            raise ValueError("stop_recording() needs a GradientTape that records in this thread")
        tapes = thread_state.tapes
        self._leave()
        try:
            yield
        finally:
            thread_state.tapes = tapes

    def watch(self, tensor: Any) -> None:
        """Track a tensor or variable, or each one in a nest.

        Raises
        ------
        TypeError
            A value is not a tensor or variable, or its dtype is not floating point.
        """
        for item in nest.flatten(tensor):
            source = _resolve(item, "watch")
            if source.dtype.kind not in "fV":
                raise TypeError(
                    f"watch() needs a floating-point tensor, got dtype {source.dtype}; cast() it"
                )
            if isinstance(source, Tensor):
                self._tracked.add(key_of(source))
            else:
                self._variables.setdefault(id(source), (source, {}))
                self.watch_read(source, source.current())

    def watch_read(self, variable: Watchable, value: Tensor) -> None:
        """Track ``value``, which was read from ``variable``; each read of a variable calls this."""
        entry = self._variables.get(id(variable))
        if entry is None:
            if not (self._watch_accessed and variable._trainable):
                return
            entry = self._variables[id(variable)] = (variable, {})
        key = value._key
        if key not in entry[1]:
            entry[1][key] = None
            self._tracked.add(key)

    def watch_reads(self, variables: Sequence[Watchable], values: Sequence[Tensor]) -> None:
        """Track values that were read from variables; as `watch_read`, for several variables."""
        known, tracked = self._variables, self._tracked
        for variable, value in zip(variables, values, strict=True):
            entry = known.get(id(variable))
            if entry is None:
                if not (self._watch_accessed and variable._trainable):
                    continue
                entry = known[id(variable)] = (variable, {})
            if value._key and value._key not in entry[1]:
                entry[1][value._key] = None
                tracked.add(value._key)

    def watched_variables(self) -> tuple[Any, ...]:  # of Variable, whose module imports this one
        """Return the variables that this tape watches, in the order of their first use."""
        return tuple(variable for variable, _ in self._variables.values())

    # Gradients -------------------------------------------------------------------------------

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: str = "none",
        *,
        ready: Callable[[int, Tensor], None] | None = None,
    ) -> Any:
        """Return the gradients of the sum of ``target`` with respect to ``sources``.

        Parameters
        ----------
        target
            A tensor, or a nest of tensors, whose gradients add up.
        sources
            A tensor or variable, or a nest of them, that the tape watched or computed.
        output_gradients
            Weights of the elements of ``target``, in its shapes; by default ones.
        unconnected_gradients : str
            The gradient for a source on which ``target`` does not depend: ``"none"`` or ``"zero"``.
        ready : callable, optional
            A function that is called as ``ready(place, gradient)`` as soon as a source's gradient is
            complete, while other gradients are still computed. ``place`` is the source's number in the
            nest. It is not called for sources on which ``target`` does not depend.

        Returns
        -------
        nest of Tensor
            The structure of ``sources``; each gradient has its source's shape and dtype. The arrays may
            share memory with each other: do not write to them. The gradient of a source whose rows were
            looked up, and that was not used otherwise, is an `IndexedSlices`.

        Raises
        ------
        RuntimeError
            A tape that is not persistent is used a second time.
        TypeError
            A source is neither a tensor nor a variable.
        ValueError
            ``unconnected_gradients`` has another value, or ``output_gradients`` have other shapes or
            dtypes than ``target``.
        """
        if self._used:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients "
                "(or jacobians); make it with persistent=True to call gradient() more than once"
            )
        unconnected = getattr(unconnected_gradients, "value", unconnected_gradients)
        if unconnected not in ("none", "zero"):
            raise ValueError(
                f"unconnected_gradients must be 'none' or 'zero', got {unconnected_gradients!r}"
            )
        places = nest.flatten(sources)
        source_keys = self._keys_of(places, "gradient")
        targets = tuple([as_tensor(item) for item in nest.flatten(target, by_key=True)])
        gradients = self._seed(targets, output_gradients)

        if self._persistent:
            nodes = self._nodes
        else:
            self._leave()
            self._used = True
            nodes, self._nodes = self._nodes, []
        wanted = set(itertools.chain.from_iterable(source_keys))
        results: list[Tensor | IndexedSlices | None] = [None] * len(places)

        def recorded(array: Array) -> Tensor:
            # Without a record, outer tapes would treat the gradient as a constant.
            inputs = [place for place in places if place.__class__ is Tensor]
            return record(array, (*targets, *inputs), _no_second_order)

        def complete(some: Sequence[int]) -> None:
            for place in some:
                array: Any = None
                for key in source_keys[place]:
                    part = gradients.get(key)
                    if part is not None:
                        array = part if array is None else _sum(array, part)
                if array is None:
                    continue
                if array.__class__ is Rows and ready is None:
                    values = recorded(array.values) if thread_state.tapes else array.values
                    results[place] = IndexedSlices(values, array.indices, array.shape)
                    continue
                if array.__class__ is not np.ndarray:
                    array = _array_of(array)
                if array.__class__ is not np.ndarray or not array.flags.carray:
                    # A broadcast view has fewer elements in memory than its shape says.
                    array = contiguous(array)
                result = recorded(array) if thread_state.tapes else Tensor(array)
                results[place] = result
                if ready is not None:
                    ready(place, result)

        last_uses = {} if ready is None else _last_uses(nodes, source_keys)
        _sweep(nodes, gradients, wanted, last_uses, complete, consume=not self._persistent)
        early = {place for places in last_uses.values() for place in places}
        complete([place for place in range(len(places)) if place not in early])
        if unconnected == "zero":
            for place, source in enumerate(places):
                if results[place] is None:
                    found = _resolve(source, "gradient")
                    array = (found if isinstance(found, Tensor) else found.current()).array
                    results[place] = Tensor(array_module(array).zeros(array.shape, array.dtype))
        if not self._persistent:
            self._tracked = set()
        return nest.pack_as(sources, results)

    def connected(self, target: Any, sources: Any) -> list[bool]:
        """Return for each source True if ``target`` depends on it, as far as recorded.

        Parameters
        ----------
        target, sources
            As in `gradient`, which may still be called afterwards.
        """
        active = {as_tensor(item)._key for item in nest.flatten(target)} & self._tracked
        for outputs, inputs, _ in reversed(self._nodes):
            keys = outputs if outputs.__class__ is tuple else (outputs,)
            if not active.isdisjoint(keys):
                active.update(inputs)
        found = self._keys_of(nest.flatten(sources), "connected")
        return [not active.isdisjoint(each) for each in found]

    def _keys_of(self, sources: Sequence[Any], caller: str) -> list[tuple[int, ...]]:
        """Return for each source the keys of the tensor, or of the values read from the variable."""
        keys: list[tuple[int, ...]] = []
        known = self._variables.get
        for source in sources:
            read = known(id(source))
            if read is None or read[0] is not source:
                local = getattr(source, "local", None)
                found = _resolve(source, caller) if local is None else local()
                if isinstance(found, Tensor):
                    keys.append((found._key,) if found._key in self._tracked else ())
                    continue
                read = known(id(found))
            keys.append(() if read is None else tuple(read[1]))
        return keys

    def _seed(self, targets: Sequence[Tensor], output_gradients: Any) -> dict[int, Array]:
        """Return the gradients of the targets, with which the backward pass begins."""
        if output_gradients is None:
            weights: list[Any] = [None] * len(targets)
        else:
            weights = nest.flatten(output_gradients, by_key=True)
            if len(weights) != len(targets):
                raise ValueError(
                    f"output_gradients has {len(weights)} values for {len(targets)} targets"
                )
        gradients: dict[int, Array] = {}
        for target, weight in zip(targets, weights, strict=True):
            if target._key not in self._tracked:
                continue
            array = target.array
            if weight is None:
                seed: Array = (
                    filled(array.shape, array.dtype, 1)
                    if array.__class__ is np.ndarray
                    else array_module(array).ones(array.shape, array.dtype)
                )
            else:
                seed = as_tensor(weight, like=target).array
                if seed.shape != array.shape or seed.dtype != array.dtype:
                    raise ValueError(
                        f"output_gradients has shape {seed.shape} and dtype {seed.dtype}, its "
                        f"target has {array.shape} and {array.dtype}; they must be the same"
                    )
            known = gradients.get(target._key)
            gradients[target._key] = seed if known is None else known + seed
        return gradients


def _last_uses(nodes: list[_Node], source_keys: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
    """Return the sources whose gradients become complete after each node of the backward pass."""
    first: dict[int, int] = {}
    wanted = {key for keys in source_keys for key in keys}
    for number, (_, inputs, _) in enumerate(nodes):
        if not wanted.isdisjoint(inputs):
            for key in inputs:
                first.setdefault(key, number)
    found: dict[int, list[int]] = {}
    for place, keys in enumerate(source_keys):
        used = [first[key] for key in keys if key in first]
        if used:
            found.setdefault(min(used), []).append(place)
    return found


def _sweep(
    nodes: list[_Node],
    gradients: dict[int, Array],
    wanted: set[int],
    last_uses: dict[int, list[int]],
    complete: Callable[[Sequence[int]], None],
    *,
    consume: bool,
) -> None:
    """Propagate ``gradients`` (by key) back through ``nodes``, and keep those of ``wanted`` keys.

    ``complete(places)`` is called for the sources in ``last_uses`` as soon as their gradients are final.
    With ``consume`` each node is removed from the list when it is used, so that its memory is freed
    as early as possible.
    """
    reached = _reached(nodes, wanted)
    # The keys of sums that were computed here and may be changed in place. The results of a vjp may
    # be shared.
    sums: set[int] = set()
    number = len(nodes)
    while number:
        if number in last_uses:
            complete(last_uses[number])
        number -= 1
        outputs, inputs, vjp = nodes.pop() if consume else nodes[number]
        if outputs.__class__ is tuple:
            gradient: Any = [_take(gradients, key, wanted) for key in outputs]
            if all(part is None for part in gradient):
                continue
        else:
            gradient = gradients.get(outputs)
            if gradient is None:
                continue
            if outputs not in wanted:
                del gradients[outputs]
            if gradient.__class__ is not np.ndarray:
                gradient = _array_of(gradient)
        need = tuple(map(reached.__contains__, inputs))
        if True not in need:
            continue
        for key, part in zip(inputs, vjp(gradient, need), strict=True):
            if part is None or key not in reached:
                continue
            known = gradients.get(key)
            if known is None:
                gradients[key] = part
            elif key in sums:
                add_to(known, part)
            else:
                total = _sum(known, part)
                gradients[key] = total
                if total.__class__ is not Rows and total.ndim:
                    sums.add(key)
        del vjp, gradient
    complete(last_uses.get(0, ()))


def _sum(a: Any, b: Any) -> Array:
    """Return the sum of two gradients as a new array."""
    if a.__class__ is Rows or (a.__class__ is Multiple and b.__class__ is not Rows):
        return a.plus(b)
    lazy = b.__class__ is Multiple or b.__class__ is Rows
    total: Array = b.plus(a) if lazy else binary("add", np.add, a, b)
    return total


def _reached(nodes: list[_Node], sources: set[int]) -> set[int]:
    """Return the keys that depend on the sources: only these need a gradient."""
    reached = set(sources)
    for outputs, inputs, _ in nodes:
        if not reached.isdisjoint(inputs):
            if outputs.__class__ is tuple:
                reached.update(outputs)
            else:
                reached.add(outputs)
    return reached


def _take(gradients: dict[int, Array], key: int, wanted: set[int]) -> Array | None:
    """Return the complete gradient of an operation's result, as an array."""
    gradient = gradients.get(key) if key in wanted else gradients.pop(key, None)
    if gradient is not None and gradient.__class__ is not np.ndarray:
        gradient = _array_of(gradient)
    return gradient


def _array_of(gradient: Any) -> Array:
    lazy = gradient.__class__ is Multiple or gradient.__class__ is Rows
    return gradient.computed() if lazy else asarray(gradient)


def _no_second_order(_gradient: Array, _need: tuple[bool, ...]) -> Sequence[Any]:
    raise NotImplementedError(
        "gradients of gradients are not implemented. A result of GradientTape.gradient() was used "
        "under another recording tape, whose gradient() needs its derivative. Call gradient() "
        "outside of that tape's block, or use stop_gradient() on its result"
    )


def _resolve(source: Any, caller: str) -> Tensor | Watchable:
    """Return the tensor, or this replica's variable, that ``source`` represents."""
    if isinstance(source, Tensor):
        return source
    local = getattr(source, "local", None)
    if local is not None:
        variable: Watchable = local()
        return variable
    if hasattr(source, "__tensor__"):
        return as_tensor(source)
    raise TypeError(
        f"{caller}() needs tensors and variables, got {type(source).__name__}; make a tensor with "
        "constant() and watch() it before it is used"
    )
