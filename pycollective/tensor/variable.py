"""`Variable`: a named tensor that can be assigned, and the hooks through which it is made."""

from __future__ import annotations

import enum
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from ..array_backend import Array, asarray, beside, copy, to_numpy
from ..errors import InvalidArgumentError
from .indexed_slices import IndexedSlices
from .ops.arrays import cast, identity
from .scattering import SCATTER
from .shape import TensorShape
from .tape import new_key, thread_state
from .tensor import Operators, Tensor, as_tensor

__all__ = [
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "creator_scope",
    "creators",
]


class VariableSynchronization(enum.Enum):
    """When the replicas' copies of a variable are brought together."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the replicas' values of a variable, or of an assignment to it, become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class _Creators(threading.local):
    """The creators of this thread, innermost last."""

    stack: tuple[Callable[..., Any], ...] = ()


creators = _Creators()


@contextmanager
def creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Let ``creator(next_creator, **kwargs)`` make the variables of this thread inside the block.

    ``kwargs`` are the arguments of `Variable` by name. ``next_creator(**kwargs)`` calls the creator
    of the block outside of this one, and in the end makes a plain `Variable`. Subclasses of
    `Variable` are made directly. As ``tf.variable_creator_scope``.

    Raises
    ------
    RuntimeError
        At the end of the block, if scopes were not left in the opposite order of their entry.
    """
    before = creators.stack
    inside = creators.stack = (*before, creator)
    try:
        yield
    finally:
        found = creators.stack
        # Whatever is left inside this scope ends with it.
        creators.stack = found if len(found) < len(inside) else before
        if found is not inside:
            raise RuntimeError("Exiting variable_creator_scope without proper nesting.")


_T = TypeVar("_T")


class _VariableMeta(type):
    """Sends ``Variable(...)`` through the creators."""

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
        made: _T = make(**named)
        return made


def _chain(creator: Callable[..., Any], next_creator: Callable[..., Any]) -> Callable[..., Any]:
    def make(**kwargs: Any) -> Any:
        return creator(next_creator, **kwargs)

    return make


class Variable(Operators, metaclass=_VariableMeta):
    """A tensor that can be assigned, watched by `GradientTape` when it is read.

    Parameters
    ----------
    initial_value
        A value `as_tensor` takes, or a function without arguments that returns one. It is copied.
    trainable
        Whether tapes watch the variable and optimizers update it; by default True, except
        for ``ON_READ`` variables.
    name
        The name, by default ``"Variable"``.
    dtype, shape
        What the initial value must have; by default what it has. Arrays and scalars are converted
        to ``dtype``.
    synchronization, aggregation
        How a strategy keeps the replicas' copies; without one they only are attributes.

    Raises
    ------
    ValueError
        If the initial value is missing or its shape is not ``shape``, or the variable is trainable
        and ``ON_READ``.

    Notes
    -----
    A value that was read never changes: an update in place copies first if a tensor or a NumPy view
    of the present value is held anywhere (which reference counts tell), and writes directly
    otherwise.
    """

    #: The strategy in whose scope the variable was created, if any.
    _distribute_strategy: Any = None
    #: Of a component: a weak reference to the variable that it is a component of.
    _distributed_container: Any = None
    #: What optimizers make of the value after each step: a function of a tensor, or None.
    constraint: Callable[[Any], Any] | None = None

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        shape: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self._set_attributes(trainable, name, synchronization, aggregation)
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
        self._set_array(copy(value.array))

    def _set_attributes(
        self,
        trainable: bool | None,
        name: str | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        """Check and store what is no value."""
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
                f"variable {self._name!r} is ON_READ and trainable: copies that are brought "
                "together only when they are read cannot be trained; use trainable=False or "
                "another synchronization"
            )
        self._trainable = not on_read if trainable is None else bool(trainable)
        self._synchronization = synchronization
        self._aggregation = aggregation
        self._lock = threading.RLock()

    def _set_array(self, array: Array) -> None:
        """Make ``array``, which belongs to the variable from now on, its value."""
        self._tensor: Tensor | None = _value(array)

    # Reading ---------------------------------------------------------------------------------

    def _local(self) -> Variable:
        """Return the variable that this stands for in the current replica."""
        return self

    def _current(self) -> Tensor:
        """Return the value without letting tapes know."""
        tensor = self._tensor
        if tensor is None:
            # An update in place is going on; it holds the lock.
            with self._lock:
                tensor = self._tensor
                if tensor is None:
                    raise RuntimeError(
                        f"variable {self._name!r} was read by the function that updates it in "
                        "place; use the array that the function is given"
                    )
        return tensor

    def _read(self) -> Tensor:
        """Return the value as operations see it."""
        tensor = self._tensor
        if tensor is None:
            tensor = self._current()
        for tape in thread_state.tapes:
            if tensor._key:
                tape._watch_read(self, tensor)
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
        """Return a copy of the value as a NumPy array."""
        return to_numpy(self._local()._current().array).copy()[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._local()._current().__array__(dtype, copy)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to, or None."""
        return self._distribute_strategy

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return self._local()._current().dtype

    @property
    def shape(self) -> TensorShape:
        """The lengths of the axes."""
        return self._local()._current().shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._local()._current().ndim

    @property
    def name(self) -> str:
        """The name that was given, or ``"Variable"``."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether tapes watch the variable and optimizers update it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the replicas' copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values become one."""
        return self._aggregation

    # Writing ---------------------------------------------------------------------------------

    def assign(self, value: Any, read_value: bool = True) -> Variable:
        """Set the value, and return the variable.

        Arrays, scalars and lists are converted to the variable's dtype. Not recorded by tapes.

        Raises
        ------
        ValueError
            If the shape differs, or a tensor's dtype.
        """
        array = self._checked(value, "assign")
        with self._lock:
            own, free = self._release()
            try:
                with beside(own):
                    if free:
                        own[...] = array
                    else:
                        own = copy(array)
            finally:
                self._set_array(own)
        return self

    def assign_add(self, value: Any, read_value: bool = True) -> Variable:
        """Add ``value`` in place, and return the variable; checks as `assign`."""
        array = self._checked(value, "assign_add")
        self.update_inplace(lambda own: np.add(own, array, out=own))
        return self

    def assign_sub(self, value: Any, read_value: bool = True) -> Variable:
        """Subtract ``value`` in place, and return the variable; checks as `assign`."""
        array = self._checked(value, "assign_sub")
        self.update_inplace(lambda own: np.subtract(own, array, out=own))
        return self

    # Rows -------------------------------------------------------------------------------------

    def scatter_add(self, sparse_delta: IndexedSlices) -> Variable:
        """Add rows to the rows at some indices, in place; equal indices add up.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            The rows, of the variable's dtype and row shape, and where they belong.

        Returns
        -------
        Variable
            The variable.

        Raises
        ------
        TypeError
            If ``sparse_delta`` is no `IndexedSlices`.
        ValueError
            If the rows have another shape or dtype, or an index is outside the variable.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Variable:
        """Subtract rows from the rows at some indices; as `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Variable:
        """Multiply the rows at some indices by rows; as `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Variable:
        """Divide the rows at some indices by rows; as `scatter_add`.

        Quotients of integers are rounded towards zero, as in TensorFlow; a zero among the rows is then
        an InvalidArgumentError.
        """
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Variable:
        """Make the rows at some indices the minimum of themselves and rows; as `scatter_add`."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Variable:
        """Make the rows at some indices the maximum of themselves and rows; as `scatter_add`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Variable:
        """Set the rows at some indices; as `scatter_add`, the last one of equal indices counts."""
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, method: str, slices: Any) -> Variable:
        index, rows = self._checked_rows(slices, method)
        self.update_inplace(lambda own: SCATTER[method](own, index, rows))
        return self

    def _checked_rows(self, slices: Any, method: str) -> tuple[Array, Array]:
        """Return indices and rows that fit the variable."""
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"{method}: sparse_delta is not IndexedSlices: {slices!r}")
        own = self._current()
        index, rows = slices.indices.array, slices.values.array
        if not own.ndim or rows.shape[1:] != own.shape[1:] or rows.dtype != own.dtype:
            raise ValueError(
                f"{method}: variable {self._name!r} has shape {own.shape} and dtype {own.dtype}, "
                f"the rows have shape {rows.shape} and dtype {rows.dtype}"
            )
        if index.size and (int(index.min()) < 0 or int(index.max()) >= own.shape[0]):
            raise ValueError(
                f"{method}: indices from {int(index.min())} to {int(index.max())} are not all in 0 "
                f"to {own.shape[0] - 1}, the rows of variable {self._name!r}"
            )
        if method == "scatter_div" and own.dtype.kind == "b":
            raise TypeError(
                f"scatter_div: variable {self._name!r} has dtype {own.dtype}; only numbers can be "
                "divided"
            )
        if method == "scatter_div" and own.dtype.kind in "iu" and not rows.all():
            raise InvalidArgumentError(
                f"Integer division by zero: the rows by which scatter_div divides variable "
                f"{self._name!r} of dtype {own.dtype} have a 0"
            )
        return asarray(index, like=own.array), asarray(rows, like=own.array)

    def _checked(self, value: Any, method: str) -> Array:
        """Return ``value`` as an array of the variable's shape and dtype."""
        own = self._current()
        tensor = as_tensor(value, like=own)
        array = tensor.array
        if not isinstance(value, (Tensor, Variable)) and array.dtype != own.dtype:
            array = as_tensor(array, own.dtype).array
        if array.shape != own.shape or array.dtype != own.dtype:
            raise ValueError(
                f"{method}: variable {self._name!r} has shape {own.shape} and dtype {own.dtype}, "
                f"the value has shape {array.shape} and dtype {array.dtype}"
            )
        return asarray(array, like=own.array)

    def _release(self) -> tuple[Array, bool]:
        """Take the value out of the variable (call with the lock held; `_set_array` ends this).

        Returns the array, and whether nobody else holds it. Other threads cannot get hold of it
        meanwhile: they wait for the lock.
        """
        tensors: list[Tensor] = []
        (array,), (free,) = _take_values([self], tensors)
        return array, free

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        """Call ``update(array)`` with the variable's array to write to; its result is ignored.

        The array is copied first if somebody else holds it, so that values that were read stay
        what they were. Other threads that read wait until the update is finished.
        """
        with self._lock:
            array, free = self._release()
            try:
                with beside(array):
                    if not free:
                        array = copy(array)
                    update(array)
            finally:
                self._set_array(array)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        # As it is, without the creators of this thread.
        own: Variable = type.__call__(
            type(self),
            self._current(),
            self._trainable,
            self._name,
            synchronization=self._synchronization,
            aggregation=self._aggregation,
        )
        own._distribute_strategy = self._distribute_strategy
        own.constraint = self.constraint
        memo[id(self)] = own
        return own

    def __len__(self) -> int:
        return len(self._local()._current())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())

    def __float__(self) -> float:
        return float(self._local()._current())

    def __int__(self) -> int:
        return int(self._local()._current())

    def __bool__(self) -> bool:
        return bool(self._local()._current())

    def __index__(self) -> int:
        return self._local()._current().__index__()

    def __format__(self, spec: str) -> str:
        return format(self._local()._current(), spec)

    def __repr__(self) -> str:
        value = self._local()._current()
        return (
            f"<tf.Variable '{self._name}' shape={value.shape} dtype={value.dtype}, "
            f"numpy={value.numpy()!r}>"
        )


def update_together(variables: Sequence[Variable], update: Callable[[list[Array]], Any]) -> None:
    """Call ``update(arrays)`` with the arrays of several plain variables to write to, all at once.

    As `Variable.update_inplace` does for one. The locks are taken in one order, whatever the order of
    the variables, so that two threads that update some of the same ones do not wait for each other.
    """
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
            # To tapes it is another value, although nobody else has seen that it is the same object.
            if tensor._key:
                tensor._key = new_key()
            variable._tensor = tensor
        for variable in order[held - 1 :: -1] if held else ():
            variable._lock.release()


def _value(array: Array) -> Tensor:
    """Return an array that belongs to a variable from now on as the value that tapes know."""
    tensor = Tensor(array)
    if array.dtype.kind in "fV":
        tensor._key = new_key()
    return tensor


def _take_values(
    variables: Sequence[Variable], tensors: list[Tensor]
) -> tuple[list[Array], list[bool]]:
    """Take the values out of variables, whose locks are held, into an empty list.

    Returns their arrays, and which of them nobody else holds. Other threads cannot get hold of them
    meanwhile: they wait for the locks.
    """
    tensor = None
    for variable in variables:
        tensor = variable._tensor
        if tensor is None:
            tensor = variable._current()
        variable._tensor = None
        tensors.append(tensor)
    del tensor
    arrays = [tensor.array for tensor in tensors]
    if not _has_gil():
        return arrays, [False] * len(arrays)
    # Who holds a view of a view holds the array below both, not this one.
    return arrays, [
        references <= _FREE and array.base is None
        for references, array in zip(_references(tensors, arrays), arrays, strict=True)
    ]


def _references(tensors: list[Tensor], arrays: list[Array]) -> Iterator[int]:
    """Return how many references there are to each tensor and its array."""
    return map(operator.add, map(sys.getrefcount, tensors), map(sys.getrefcount, arrays))


_SIGNATURE = inspect.signature(Variable.__init__)
#: Without a global lock, counts of references can change between a look at them and a write.
_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
# How many there are when nobody else holds the value: the interpreter's own temporary references
# differ between its versions, so the same code is asked.
_alone = [Tensor(np.zeros(()))]
_FREE = next(_references(_alone, [tensor.array for tensor in _alone]))
