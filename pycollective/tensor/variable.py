"""`Variable`: a named tensor that can be assigned, and the creators that may replace it."""

from __future__ import annotations

import enum
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..array_backend import Array, asarray, beside, copy, to_numpy
from ..errors import InvalidArgumentError, InvalidIndexError
from .compiled import add_to
from .indexed_slices import IndexedSlices
from .ops.arrays import cast, identity
from .scattering import SCATTER
from .shape import TensorShape
from .tape import new_key, thread_state
from .tensor import Operators, Tensor, as_tensor


class VariableSynchronization(enum.Enum):
    """The time at which the replicas' copies of a variable are synchronized."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """The way in which the replicas' values of a variable, or of an assignment, are combined."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class _Creators(threading.local):
    """The variable creators of this thread, innermost last."""

    stack: tuple[Callable[..., Any], ...] = ()


creators = _Creators()


@contextmanager
def creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Let ``creator(next_creator, **kwargs)`` make the variables of this thread inside the block.

    ``kwargs`` are the arguments of `Variable` by name. ``next_creator(**kwargs)`` calls the creator
    of the enclosing block, or makes a plain `Variable`. Subclasses of `Variable` are made directly.
    The interface is that of ``tf.variable_creator_scope``.

    Raises
    ------
    RuntimeError
        At the end of the block: scopes were not left in the reverse order of their entry.
    """
    before = creators.stack
    inside = creators.stack = (*before, creator)
    try:
        yield
    finally:
        found = creators.stack
        # Scopes that were entered inside this one, and were not left, end too.
        creators.stack = found if len(found) < len(inside) else before
        if found is not inside:
            raise RuntimeError("Exiting variable_creator_scope without proper nesting.")


_T = TypeVar("_T")


class _VariableMeta(type):
    """A metaclass that makes ``Variable(...)`` call the creators."""

    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        if cls is not Variable or not creators.stack:
            plain: _T = type.__call__(cls, *args, **kwargs)
            return plain
        named = _SIGNATURE.bind(None, *args, **kwargs).arguments
        del named["self"]

        def make(**final: Any) -> Any:
            return type.__call__(cls, **final)

        for creator in creators.stack:
            make = _chain(creator, make)
        variable: _T = make(**named)
        return variable


def _chain(creator: Callable[..., Any], next_creator: Callable[..., Any]) -> Callable[..., Any]:
    def make(**kwargs: Any) -> Any:
        return creator(next_creator, **kwargs)

    return make


class Variable(Operators, metaclass=_VariableMeta):
    """A tensor that can be assigned; `GradientTape` watches it when it is read.

    Parameters
    ----------
    initial_value
        A value that `as_tensor` accepts, or a function without arguments that returns one. It is
        copied.
    trainable : bool, optional
        True: tapes watch the variable, and optimizers update it. The default is True, except for
        ``ON_READ`` variables.
    name : str, optional
        The name, by default ``"Variable"``.
    dtype, shape
        Required dtype and shape of the initial value. Arrays and scalars are converted to ``dtype``.
    synchronization, aggregation
        The way in which a strategy keeps the replicas' copies; without a strategy plain attributes.
    per_worker_variable : bool
        True: under a ``ParameterServerStrategy`` each worker has its own value. Ignored elsewhere.

    Raises
    ------
    TypeError
        The initial value cannot be converted to ``dtype``.
    ValueError
        The initial value is missing, its shape is not ``shape``, ``shape`` has an unknown length,
        or the variable is trainable and ``ON_READ``.

    Notes
    -----
    A value that was read never changes. Reference counts show if a tensor or a NumPy view of the
    present value exists. If so, an update in place copies the value first.
    """

    #: The strategy in whose scope the variable was created, if any.
    _distribute_strategy: Any = None
    #: For a component: a weak reference to the variable that contains it.
    _distributed_container: Any = None
    #: A function of a tensor that optimizers apply to the value after each step, or None.
    constraint: Callable[[Any], Any] | None = None
    #: The name of the parameter server that has the value, or None.
    device: str | None = None
    #: True if updates write to the array in place, also while other threads read or update it.
    _lock_free = False
    #: True if `gather` reads rows alone, and its gradient is an `IndexedSlices`.
    _by_rows = False
    #: Updates variables and their slots on parameter servers, as `Servers.update`; None: not possible.
    update_on_servers: Callable[..., bool] | None = None
    #: A tensor that `like` returns instead of the value, because updates copy a value that other code
    #: refers to; or None.
    _like: Tensor | None = None

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        shape: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        per_worker_variable: bool = False,
    ) -> None:
        self.set_attributes(trainable, name, synchronization, aggregation)
        if initial_value is None:
            raise ValueError(f"variable {self._name!r} needs an initial_value")
        if callable(initial_value):
            initial_value = initial_value()
        value = as_tensor(initial_value, dtype)
        if shape is not None:
            shape = TensorShape(shape)
            if not shape.is_fully_defined():
                raise ValueError(
                    f"variable {self._name!r}: shape is {shape}, but a variable keeps its shape, so "
                    "every length must be known; leave shape out to take that of initial_value"
                )
            if shape != value.shape:
                raise ValueError(
                    f"variable {self._name!r}: initial_value has shape {value.shape}, but shape is "
                    f"{tuple(shape)}"
                )
        self.set_array(copy(value.array))

    def set_attributes(
        self,
        trainable: bool | None,
        name: str | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        """Check and store all attributes other than the value."""
        self._name = "Variable" if name is None else name
        if not isinstance(synchronization, VariableSynchronization):
            raise ValueError(
                f"variable {self._name!r}: synchronization must be a VariableSynchronization, got "
                f"{synchronization!r}"
            )
        if not isinstance(aggregation, VariableAggregation):
            raise ValueError(
                f"variable {self._name!r}: aggregation must be a VariableAggregation, got "
                f"{aggregation!r}"
            )
        on_read = synchronization is VariableSynchronization.ON_READ
        if on_read and trainable:
            raise ValueError(
                f"variable {self._name!r} is ON_READ and trainable: copies that are synchronized "
                "only when they are read cannot be trained; use trainable=False or another "
                "synchronization"
            )
        self._trainable = not on_read if trainable is None else bool(trainable)
        self._synchronization = synchronization
        self._aggregation = aggregation
        self._lock = threading.RLock()

    def set_array(self, array: Array) -> None:
        """Store ``array``, which the variable owns from now on, as the value."""
        self._tensor: Tensor | None = _value(array)

    # Reading ---------------------------------------------------------------------------------

    def local(self) -> Variable:
        """Return the current replica's variable."""
        return self

    def current(self) -> Tensor:
        """Return the value without recording the read on tapes."""
        tensor = self._tensor
        if tensor is None:
            # Another thread updates the value in place, and holds the lock.
            with self._lock:
                tensor = self._tensor
                if tensor is None:
                    raise RuntimeError(
                        f"variable {self._name!r} was read by the function that updates it in "
                        "place; use the array that this function gets"
                    )
        return tensor

    def like(self) -> Tensor:
        """Return a tensor with the value's shape, dtype and device; its elements may be others."""
        return self.current() if self._like is None else self._like

    def for_replica(self, tensor: Tensor) -> Tensor:
        """Return a value of this variable on the device of the replica that reads it."""
        return tensor

    def rows(self, index: Array) -> Array:
        """Return a copy of the rows at some indices, which are in range."""
        with self._lock:
            found: Array = np.take(self.current().array, index, axis=0)
        return found

    def _read(self) -> Tensor:
        """Return the value for operations, and record the read on tapes."""
        tensor = self._tensor
        if tensor is None:
            tensor = self.current()
        for tape in thread_state.tapes:
            known = tape._variables.get(id(self))
            if tensor._key and (known is None or tensor._key not in known[1]):
                tape.watch_read(self, tensor)
        reads_as = thread_state.reads_as
        if reads_as is not None and self._trainable and tensor.array.dtype.kind in "fV":
            return cast(tensor, reads_as)
        return tensor

    def value(self) -> Tensor:
        """Return the present value; later assignments do not change it."""
        return identity(self)

    def read_value(self) -> Tensor:
        """Return the present value; later assignments do not change it."""
        return self.value()

    def numpy(self) -> Any:
        """Return a copy of the value as a NumPy array, or as a NumPy scalar if it has no axes."""
        return to_numpy(self.current().array).copy()[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.current().__array__(dtype, copy)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope the variable was made, or None."""
        return self._distribute_strategy

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.local().like().dtype

    @property
    def shape(self) -> TensorShape:
        """The lengths of the axes."""
        return self.local().like().shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.local().like().ndim

    @property
    def name(self) -> str:
        """The name that was given, or ``"Variable"``."""
        return self._name

    @property
    def trainable(self) -> bool:
        """True if tapes watch the variable and optimizers update it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """The time at which the replicas' copies are synchronized."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The way in which the replicas' values are combined."""
        return self._aggregation

    # Writing ---------------------------------------------------------------------------------

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Set the value, and return the variable.

        Arrays, scalars and lists are converted to the variable's dtype. Tapes do not record the
        assignment. ``read_value`` has no effect.

        Raises
        ------
        TypeError
            ``value`` cannot be converted to the variable's dtype, such as a float to an integer.
        ValueError
            ``value`` has another shape, or is a tensor of another dtype.
        """
        return self._write("assign", value)

    def assign_add(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Add ``value`` in place, and return the variable; checks as `assign`."""
        return self._write("assign_add", value)

    def assign_sub(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Subtract ``value`` in place, and return the variable; checks as `assign`."""
        return self._write("assign_sub", value)

    def _write(self, method: str, value: Any) -> Variable:
        """Make an assignment, named by its method; subclasses with other places override it."""
        array = self.checked(value, method)
        if method != "assign":
            factor = 1.0 if method == "assign_add" else -1.0
            self.update_inplace(lambda target: add_to(target, array, factor))
            return self
        if self._in_place:
            self.update_inplace(lambda target: np.copyto(target, array))
            return self
        with self._lock:
            target, free = self._release()
            try:
                with beside(target):
                    if free:
                        target[...] = array
                    else:
                        target = copy(array)
            finally:
                self.set_array(target)
        return self

    # Rows -------------------------------------------------------------------------------------

    def scatter_add(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Add rows to the rows at some indices, in place; rows with equal indices add up.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            The rows, in the variable's dtype and row shape, and their indices.

        Returns
        -------
        Variable
            The variable.

        Raises
        ------
        TypeError
            ``sparse_delta`` is not an `IndexedSlices`.
        ValueError
            The rows have another shape or dtype, or an index is outside the variable.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Subtract rows from the rows at some indices; see `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Multiply the rows at some indices by rows; see `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Divide the rows at some indices by rows; see `scatter_add`.

        Quotients of integers are rounded towards zero, as in TensorFlow. A zero among integer rows
        raises InvalidArgumentError.
        """
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Replace the rows at some indices by the minimum with rows; see `scatter_add`."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Replace the rows at some indices by the maximum with rows; see `scatter_add`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, name: str | None = None) -> Variable:
        """Set the rows at some indices; equal indices set one of their rows. See `scatter_add`."""
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, method: str, slices: Any) -> Variable:
        index, rows = self.checked_rows(slices, method)
        self.update_inplace(lambda target: SCATTER[method](target, index, rows))
        return self

    def checked_rows(self, slices: Any, method: str) -> tuple[Array, Array]:
        """Return indices and rows; raise an error if they do not match the variable."""
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"{method}: sparse_delta is not IndexedSlices: {slices!r}")
        like = self.like()
        index, rows = slices.indices.array, slices.values.array
        if not like.ndim or rows.shape[1:] != like.shape[1:] or rows.dtype != like.dtype:
            raise InvalidArgumentError(
                f"{method}: variable {self._name!r} has shape {like.shape} and dtype {like.dtype}, "
                f"the rows have shape {rows.shape} and dtype {rows.dtype}"
            )
        if index.size and (int(index.min()) < 0 or int(index.max()) >= like.shape[0]):
            raise InvalidIndexError(
                f"{method}: indices from {int(index.min())} to {int(index.max())} are not all in 0 "
                f"to {like.shape[0] - 1}, the rows of variable {self._name!r}"
            )
        if method == "scatter_div" and like.dtype.kind == "b":
            raise TypeError(
                f"scatter_div: variable {self._name!r} has dtype {like.dtype}; only numbers can be "
                "divided"
            )
        if method == "scatter_div" and like.dtype.kind in "iu" and not rows.all():
            raise InvalidArgumentError(
                f"Integer division by zero: the rows by which scatter_div divides variable "
                f"{self._name!r} of dtype {like.dtype} have a 0"
            )
        return asarray(index, like=like.array), asarray(rows, like=like.array)

    def checked(self, value: Any, method: str) -> Array:
        """Return ``value`` as an array; raise an error for another shape or dtype."""
        like = self.like()
        tensor = as_tensor(value, like=like)
        array = tensor.array
        if not isinstance(value, (Tensor, Variable)) and array.dtype != like.dtype:
            array = as_tensor(array, like.dtype).array
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ValueError(
                f"{method}: variable {self._name!r} has shape {like.shape} and dtype {like.dtype}, "
                f"the value has shape {array.shape} and dtype {array.dtype}"
            )
        return asarray(array, like=like.array)

    #: True if updates write to the array that `in_place` yields, whose memory variables may share.
    _in_place: Any = property(operator.attrgetter("_lock_free"))

    #: The place of this variable in the order in which variables are locked for updates in place.
    _place = (0, 0)

    @contextmanager
    def in_place(self) -> Iterator[Array]:
        """Yield the value's array for an update in the block; lock its memory if it has a lock."""
        yield self.current().array

    def update_rows(
        self, others: Sequence[Variable], index: Array, update: Callable[[list[Array]], Any]
    ) -> None:
        """Call ``update(arrays)``, which changes copies of some rows, and write the rows back.

        ``arrays`` are the rows of this variable and of ``others``. ``index`` has each index once.
        """

        def change(arrays: list[Array]) -> None:
            rows = [array[index] for array in arrays]
            update(rows)
            for array, changed in zip(arrays, rows, strict=True):
                array[index] = changed

        update_together([self, *others], change)

    def _release(self) -> tuple[Array, bool]:
        """Take the value out of the variable (call with the lock held; `set_array` ends this).

        Return the array, and True if there is no other reference to it. Other threads cannot get a
        reference meanwhile, because they wait for the lock.
        """
        tensors: list[Tensor] = []
        (array,), (free,) = _take_values([self], tensors)
        return array, free

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        """Call ``update(array)``, which changes the variable's array in place.

        The array is copied first if there are other references to it, so that values that were read
        do not change. Other threads that read the variable wait until the update is finished.
        A lock-free variable is neither copied nor locked.
        """
        if self._in_place:
            update_together([self], lambda arrays: update(arrays[0]))
            return
        with self._lock:
            array, free = self._release()
            try:
                with beside(array):
                    if not free:
                        array = copy(array)
                    update(array)
            finally:
                self.set_array(array)

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self._name, self._trainable, self._synchronization, self._aggregation)
        return _restored, (to_numpy(self.current().array), *options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        # `type.__call__` ignores the creators of this thread.
        copied: Variable = type.__call__(
            type(self),
            self.current(),
            self._trainable,
            self._name,
            synchronization=self._synchronization,
            aggregation=self._aggregation,
        )
        copied._distribute_strategy = self._distribute_strategy
        copied.device, copied._lock_free = self.device, self._lock_free
        copied.constraint = self.constraint
        memo[id(self)] = copied
        return copied

    def ref(self) -> Reference:
        """Return a key for dictionaries and sets, which is equal for this variable only."""
        return Reference(self)

    def __len__(self) -> int:
        return len(self.local().like())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())

    def __float__(self) -> float:
        return float(self.current())

    def __int__(self) -> int:
        return int(self.current())

    def __bool__(self) -> bool:
        return bool(self.current())

    def __index__(self) -> int:
        return self.current().__index__()

    def __format__(self, spec: str) -> str:
        return format(self.current(), spec)

    def __repr__(self) -> str:
        value = self.local().current()
        return (
            f"<tf.Variable '{self._name}' shape={value.shape} dtype={value.dtype}, "
            f"numpy={value.numpy()!r}>"
        )


def _refused(operator: str, instead: str) -> Callable[[Variable, Any], Variable]:
    def in_place(self: Variable, value: Any) -> Variable:
        raise RuntimeError(
            f"`variable {operator}= value` would replace the variable {self._name!r} by a tensor: use "
            f"`variable.{instead}` to change it, or `out = variable {operator} value` for a tensor"
        )

    return in_place


for _name, _operator, _instead in (
    ("add", "+", "assign_add(value)"),
    ("sub", "-", "assign_sub(value)"),
    ("mul", "*", "assign(variable * value)"),
    ("truediv", "/", "assign(variable / value)"),
    ("pow", "**", "assign(variable ** value)"),
):
    setattr(Variable, f"__i{_name}__", _refused(_operator, _instead))


class Reference:
    """The result of `Variable.ref`, as TensorFlow has it."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def deref(self) -> Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._variable is self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference wrapping {self._variable!r}>"


def _restored(
    value: Any,
    name: str,
    trainable: bool,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> Variable:
    """Return a variable that was pickled; `type.__call__` ignores the creators of this thread."""
    variable: Variable = type.__call__(
        Variable, value, trainable, name, synchronization=synchronization, aggregation=aggregation
    )
    return variable


def reads(variables: Sequence[Variable]) -> list[Tensor]:
    """Return the values of variables for operations, and record the reads on tapes.

    The variables are plain or mirrored. The loop is that of `Variable._read`, in one call.
    """
    components = [variable.local() for variable in variables]
    tensors: list[Tensor] = []
    for variable in components:
        tensor = variable._tensor
        tensors.append(variable.current() if tensor is None else tensor)
    for tape in thread_state.tapes:
        tape.watch_reads(components, tensors)
    reads_as = thread_state.reads_as
    if reads_as is not None:
        for place, tensor in enumerate(tensors):
            if components[place]._trainable and tensor.array.dtype.kind in "fV":
                tensors[place] = cast(tensor, reads_as)
    return tensors


_writes_in_place = operator.attrgetter("_in_place")


def update_together(variables: Sequence[Variable], update: Callable[[list[Array]], Any]) -> None:
    """Call ``update(arrays)``, which changes the arrays of several plain variables in place.

    The function is `Variable.update_inplace` for several variables. The locks are always taken in the
    same order, so that two threads that update overlapping sets of variables do not deadlock.
    """
    if True in map(_writes_in_place, variables):
        _update_in_place(variables, update)
        return
    order = sorted(variables, key=id)
    tensors: list[Tensor] = []
    held = 0
    try:
        for variable in order:
            variable._lock.acquire()
            held += 1
        arrays, free = _take_values(variables, tensors)
        if False in free:
            for place, alone in enumerate(free):
                if not alone:
                    arrays[place] = copy(arrays[place])
                    tensors[place] = _value(arrays[place])
        update(arrays)
    finally:
        for variable, tensor in zip(variables, tensors, strict=False):
            # A new key makes it another value for tapes, although the tensor object is the same.
            if tensor._key:
                tensor._key = new_key()
            variable._tensor = tensor
        for variable in order[held - 1 :: -1] if held else ():
            variable._lock.release()


def _update_in_place(variables: Sequence[Variable], update: Callable[[list[Array]], Any]) -> None:
    """Do the work of `update_together` for variables of which some are updated in place."""
    inside = sorted((v for v in variables if v._in_place), key=lambda v: v._place)
    others = [v for v in variables if not v._in_place]
    with ExitStack() as held:
        arrays = {id(v): held.enter_context(v.in_place()) for v in inside}
        if not others:
            update([arrays[id(v)] for v in variables])
            return

        def with_all(locked: list[Array]) -> None:
            rest = iter(locked)
            update([arrays[id(v)] if id(v) in arrays else next(rest) for v in variables])

        update_together(others, with_all)


def _value(array: Array) -> Tensor:
    """Return an array, which a variable owns from now on, as a tensor with a key for tapes."""
    tensor = Tensor(array)
    if array.dtype.kind in "fV":
        tensor._key = new_key()
    return tensor


def _take_values(
    variables: Sequence[Variable], tensors: list[Tensor]
) -> tuple[list[Array], list[bool]]:
    """Move the values of variables, whose locks are held, into the list ``tensors``.

    Return their arrays, and for each array True if there is no other reference to it. Other threads
    cannot get a reference meanwhile, because they wait for the locks.
    """
    tensor = None
    for variable in variables:
        tensor = variable._tensor
        if tensor is None:
            tensor = variable.current()
        variable._tensor = None
        tensors.append(tensor)
    del tensor
    arrays = list(map(operator.attrgetter("array"), tensors))
    if not _has_gil():
        return arrays, [False] * len(arrays)
    # A view of a view refers to the lowest array, so an array with a base may have hidden references.
    return arrays, [
        references <= _FREE and array.base is None
        for references, array in zip(_references(tensors, arrays), arrays, strict=True)
    ]


def may_write(tensors: list[Tensor]) -> bool:
    """Return True if the list has the only reference to the value in it."""
    arrays = [tensor.array for tensor in tensors]
    if not _has_gil():
        return False
    alone = next(_references(tensors, arrays)) <= _FREE
    return alone and arrays[0].base is None


def _references(tensors: list[Tensor], arrays: list[Array]) -> Iterator[int]:
    """Return the number of references to each tensor and its array together."""
    return map(operator.add, map(sys.getrefcount, tensors), map(sys.getrefcount, arrays))


_SIGNATURE = inspect.signature(Variable.__init__)
#: Without the GIL, a reference count can change between its reading and a write.
_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", partial(bool, True))
# The count without other references. Temporary references differ between Python versions, so the same
# function measures it.
_alone = [Tensor(np.zeros(()))]
_FREE = next(_references(_alone, [tensor.array for tensor in _alone]))
