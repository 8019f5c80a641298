"""`Tensor`: an immutable value over an array, and the conversion of other values to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array_backend import Array, asarray, is_array, to_numpy
from ..dtypes import as_dtype, is_supported
from .row_block import RowBlock
from .shape import TensorShape, shape_of_array


class Operators:
    """The operators of tensors, for each class that behaves like a tensor.

    The operators are the functions of `pycollective.tensor.ops`, which stores them here when it is
    imported. Methods that call these functions would double the cost of a small operation.
    """

    __slots__ = ()
    # Makes NumPy arrays leave mixed operations to the tensor.
    __array_priority__ = 1000
    __hash__ = object.__hash__

    if TYPE_CHECKING:
        #: `pycollective.tensor.ops.stack`
        stack: Callable[..., Tensor]

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __floordiv__(self, other: Any) -> Tensor: ...
        def __rfloordiv__(self, other: Any) -> Tensor: ...
        def __mod__(self, other: Any) -> Tensor: ...
        def __rmod__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __rand__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __ror__(self, other: Any) -> Tensor: ...
        def __xor__(self, other: Any) -> Tensor: ...
        def __rxor__(self, other: Any) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __pos__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __eq__(self, other: Any) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: Any) -> Tensor: ...  # type: ignore[override]
        def __getitem__(self, index: Any) -> Tensor: ...


class Tensor(Operators):
    """An immutable array of numbers that `GradientTape` can follow.

    Parameters
    ----------
    array
        A NumPy or CuPy array, which the tensor shares: the caller must not write to it afterwards.
        `constant` makes tensors of other values, and copies.

    Attributes
    ----------
    array
        The array; do not write to it.

    Notes
    -----
    Two tensors must have the same dtype, else ``TypeError`` is raised. Scalars (Python's and NumPy's),
    lists of scalars, and NumPy arrays take the dtype of the other operand, but floats never become
    integers. Without another operand, ``float`` becomes float32 and ``int`` int32. ``==`` compares
    elements; tensors hash by identity.
    """

    __slots__ = ("__weakref__", "_key", "_logits", "array")

    array: Array
    #: The number by which tapes identify this tensor; 0 until a tape tracks it.
    _key: int
    #: For the result of an activation: its name, its argument, and the axis. Other tensors have none.
    _logits: tuple[str, Tensor, int]

    def __init__(self, array: Array) -> None:
        if array.__class__ is not np.ndarray:
            array = _proper_array(array)
        self.array = array
        self._key = 0

    @property
    def shape(self) -> TensorShape:
        """The lengths of the axes: a tuple with TensorFlow's methods."""
        return shape_of_array(self.array.shape)

    def get_shape(self) -> TensorShape:
        """Return `shape`; the older name in TensorFlow."""
        return self.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.array.ndim

    def numpy(self) -> Any:
        """Return the value as a read-only NumPy array, or as a NumPy scalar if it has no axes."""
        host = to_numpy(self.array)
        if host.ndim == 0:
            return host[()]
        view = host.view()
        view.flags.writeable = False
        return view

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host = to_numpy(self.array)
        view: Array
        if copy or (dtype is not None and host.dtype != dtype):
            if copy is False:
                raise ValueError(
                    f"a tensor of dtype {host.dtype} cannot become {dtype} without copy"
                )
            return np.array(host, dtype=dtype, copy=True)
        view = host.view()
        view.flags.writeable = False
        return view

    def __len__(self) -> int:
        if not self.array.shape:
            raise TypeError("a tensor without axes has no length; its shape is ()")
        return len(self.array)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def _no_scalar(self, target: str) -> ValueError:
        return ValueError(
            f"only a tensor with one element can become {target}, this one has shape "
            f"{self.array.shape}; reduce it or index into it first"
        )

    def __float__(self) -> float:
        if self.array.size != 1:
            raise self._no_scalar("a float")
        return float(self.array.item())

    def __int__(self) -> int:
        if self.array.size != 1:
            raise self._no_scalar("an int")
        return int(self.array.item())

    def __bool__(self) -> bool:
        if self.array.size != 1:
            raise self._no_scalar("a bool")
        return bool(self.array.item())

    def __index__(self) -> int:
        if self.array.dtype.kind not in "iu" or self.array.ndim:
            raise TypeError(
                "only an integer tensor without axes can be an index, this one has dtype "
                f"{self.array.dtype} and shape {self.array.shape}"
            )
        return int(self.array)

    def __format__(self, spec: str) -> str:
        return format(self.numpy(), spec)

    def __repr__(self) -> str:
        return f"<tf.Tensor: shape={self.shape}, dtype={self.dtype}, numpy={self.numpy()!r}>"

    def __str__(self) -> str:
        return f"tf.Tensor({self.numpy()!s}, shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is another tensor for every tape.
        return Tensor, (self.array,)


def _proper_array(value: Any) -> Array:
    """Return the result of an operation on arrays, perhaps a NumPy scalar, as a plain array."""
    if isinstance(value, (np.generic, np.ndarray)):
        return np.asarray(value)
    if is_array(value) or isinstance(value, RowBlock):
        array: Array = value
        return array
    raise TypeError(
        f"Tensor() takes a NumPy or CuPy array, got {type(value).__name__}; use constant()"
    )


def as_tensor(value: Any, dtype: Any = None, like: Tensor | None = None) -> Tensor:
    """Return ``value`` as a tensor, if possible without a copy.

    Parameters
    ----------
    value
        A tensor, a variable, an array, a scalar, or a list or tuple of these; or an object whose method
        ``__tensor__()`` returns a tensor. Arrays are shared, not copied. Lists with tensors are
        stacked, and gradients flow.
    dtype
        The dtype of the result. Arrays, scalars and lists are converted, but floats never to
        integers. Tensors and variables are not converted.
    like : Tensor, optional
        A tensor whose dtype and device scalars and lists take if ``dtype`` is not given. NumPy arrays
        take its dtype, unless they have floats or bools and the tensor does not.

    Raises
    ------
    TypeError
        ``value`` has another dtype than ``dtype`` and cannot be converted, or cannot become a tensor.
    ValueError
        A list is ragged, or an integer does not fit the dtype.
    """
    if value.__class__ is Tensor:
        tensor: Tensor = value
    elif (
        value.__class__ is np.ndarray
        and dtype is None
        and value.dtype in _USUAL
        and (like is None or like.array.dtype == value.dtype)
    ):
        return Tensor(value)
    elif hasattr(value, "_read"):
        tensor = value._read()
    elif hasattr(value, "__tensor__"):
        tensor = value.__tensor__()
    elif isinstance(value, Tensor):
        tensor = value
    else:
        return Tensor(_convert(value, dtype, like)) if is_plain(value) else _pack(value, dtype)
    if dtype is not None and tensor.dtype != as_dtype(dtype):
        raise TypeError(
            f"a tensor of dtype {tensor.dtype} was given where {as_dtype(dtype)} is needed; use "
            "cast()"
        )
    return tensor


_PYTHON_SCALARS = frozenset((bool, int, float))
#: The dtypes of arrays that `_convert` would return as they are.
_USUAL = frozenset(map(np.dtype, "?bhiqBHIQefd"))


def is_plain(value: Any) -> bool:
    """Return True if ``value`` is neither a tensor nor a list with tensors in it."""
    if value.__class__ in _PYTHON_SCALARS:
        return True
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return not (
        isinstance(value, Tensor) or hasattr(value, "_read") or hasattr(value, "__tensor__")
    )


def _pack(values: Any, dtype: Any) -> Tensor:
    """Stack a list with tensors; its scalars take the dtype of the first tensor."""
    tensors = [item for item in values if not is_plain(item)]
    first = as_tensor(tensors[0], dtype)
    return Operators.stack([as_tensor(item, dtype, like=first) for item in values])


def _convert(value: Any, dtype: Any, like: Tensor | None) -> Array:
    """Return a value without tensors as an array."""
    wanted = None if dtype is None else as_dtype(dtype)
    if is_array(value):
        array: Array = value
        weak = False
    else:
        if value is None:
            raise TypeError("None cannot become a tensor")
        array = np.asarray(value)
        weak = _is_weak(value)
    found = array.dtype
    if not is_supported(found):
        raise TypeError(
            f"a {type(value).__name__} with dtype {found} cannot become a tensor; tensors hold "
            "bools, integers and floating-point numbers"
            + ". Datasets and StringLookup take texts as arrays and lists"
            * (found.kind in "US")
        )
    if not found.isnative:
        array = array.astype(found.newbyteorder("="))
        found = array.dtype
    if wanted is None and weak:
        wanted = _weak_dtype(array, value, like)
    elif wanted is None and like is not None and array.__class__ is np.ndarray:
        taken = _weak_dtype(array, value, like)
        wanted = taken if taken is not None and _rank(found) <= _rank(taken) else None
    if wanted is None or wanted == found:
        return asarray(array) if like is None or not weak else asarray(array, like=like.array)
    if _rank(found) > _rank(wanted) and not (weak and not array.size):
        raise TypeError(
            f"{_short(value)} of dtype {found} cannot become a tensor of dtype {wanted} without "
            "loss; use cast()"
        )
    if found.kind in "iu" and wanted.kind in "iu" and array.size:
        info = np.iinfo(wanted)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise ValueError(
                f"{_short(value)} does not fit dtype {wanted}, which holds {info.min} to {info.max}"
            )
    return asarray(array, wanted, like=like.array if like is not None and weak else None)


def _is_weak(value: Any) -> bool:
    """Return True for scalars, lists of scalars and ranges: their dtype adapts to the other operand."""
    if isinstance(value, (list, tuple)):
        return all(_is_weak(item) for item in value) if len(value) else True
    return isinstance(value, (bool, int, float, np.generic, range))


def _weak_dtype(array: Array, value: Any, like: Tensor | None) -> np.dtype[Any] | None:
    """Return the dtype of a scalar or a list of scalars, or None to keep its own."""
    found = array.dtype
    if like is not None:
        # A bool stays a bool beside numbers, so that the operation raises an error about both dtypes.
        return None if (found.kind == "b") != (like.dtype.kind == "b") else like.dtype
    if isinstance(value, np.generic) or found.kind not in "fiu":
        return None
    if found.kind == "f":
        of_doubles = array.size and all(isinstance(leaf, np.float64) for leaf in _leaves(value))
        return found if of_doubles or found == np.float16 else np.dtype(np.float32)
    small = not array.size or (array.min() >= -(2**31) and array.max() < 2**31)
    return np.dtype(np.int32) if small else None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the scalars of a scalar or a nested list."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _rank(dtype: np.dtype[Any]) -> int:
    """Return 0 for bools, 1 for integers and 2 for floats; conversions never lower this rank."""
    return {"b": 0, "i": 1, "u": 1}.get(dtype.kind, 2)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
