"""``function``: TensorFlow's decorator, with its rules for signatures and variables.

Nothing is traced or compiled: the Python function runs at every call.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from .. import nest
from ..config import functions_run_eagerly
from ..errors import OutOfRangeError
from .spec import TensorSpec
from .tensor import Operators, Tensor, as_tensor
from .variable import creators

_log = logging.getLogger("pycollective")

#: The functions that `function` has returned, by name and number, and the last number of each name.
_made: weakref.WeakValueDictionary[tuple[str, int], Function] = weakref.WeakValueDictionary()
_counts: dict[str, int] = {}

#: ``record_listers[0](code)`` returns a text with the records of a function; `keras` adds it.
record_listers: list[Callable[[types.CodeType], str]] = []

#: Values of these types are part of a signature by value, as in TensorFlow.
_LITERALS = frozenset((type(None), bool, int, str, bytes, complex))
#: In a signature, the parts of keyword arguments follow this object.
_KEYWORDS = object()
#: The largest number of signatures that a function keeps. Each further call with another signature
#: counts as a new signature.
_MOST_SIGNATURES = 10_000
#: A warning is logged if `_MANY` of the last `_RECENT` calls had new signatures, at most
#: `_MOST_WARNINGS` times. These are TensorFlow's numbers.
_MANY, _RECENT, _MOST_WARNINGS = 5, 10, 2

#: The parts of a signature: ``(shape, dtype)`` of each tensor, Python values, and types of containers.
_Key = tuple[Any, ...]


class _Same:
    """An object that is part of a signature by its identity."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: Any) -> None:
        self._object = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        value = self._object()
        return self is other or (value is not None and value is other._object())


def _key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key:
    """Return the signature of arguments, as they are given."""
    parts: list[Any] = []
    numbers: dict[int, int] = {}
    for value in args:
        # The usual cases are here, because each call of a function passes this place.
        kind = value.__class__
        if kind is Tensor:
            array = value.array
            parts.append((array.shape, array.dtype))
        elif kind in _LITERALS:
            parts.append(value)
        else:
            _add_parts(parts, value, numbers)
    if kwargs:
        parts.append(_KEYWORDS)
        _add_parts(parts, kwargs, numbers)
    return tuple(parts)


def _add_parts(parts: list[Any], value: Any, numbers: dict[int, int]) -> None:
    """Add the parts of one value; ``numbers`` has the number of each variable, by its identity."""
    kind = value.__class__
    if kind is Tensor:
        parts.append((value.array.shape, value.array.dtype))
    elif kind in _LITERALS:
        parts.append(value)
    elif kind is float:
        parts.append("nan" if value != value else value)
    elif nest.is_nested(value):
        by_name = hasattr(value, "keys")
        names = sorted(value, key=repr) if by_name else range(len(value))
        parts += (dict, frozenset(names)) if by_name else (kind, len(value))
        for name in names:
            _add_parts(parts, value[name], numbers)
    elif isinstance(value, Operators):
        # Two variables are alike, unless one call gets the same variable twice.
        operand: Any = value
        number = numbers.setdefault(id(operand), len(numbers)) if hasattr(value, "assign") else 0
        parts += kind, number, (tuple(operand.shape), np.dtype(operand.dtype))
    elif isinstance(getattr(value, "values", None), tuple):  # of the replicas
        parts += kind, len(value.values)
        for component in value.values:
            _add_parts(parts, component, numbers)
    elif hasattr(kind, "element_spec"):
        # A dataset or iterator. The spec itself may need a call of the program's functions.
        parts.append(kind)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = value.shape
        unknown = shape is None or getattr(shape, "rank", 0) is None
        parts.append((None if unknown else tuple(shape), value.dtype))
    else:
        _add_object(parts, value)


def _add_object(parts: list[Any], value: Any) -> None:
    """Add an object that is no tensor: by identity, or by value if nothing can refer to it weakly."""
    try:
        parts.append(_Same(value))
    except TypeError:
        is_hashable = value.__class__.__hash__ is not None
        parts += value.__class__, value if is_hashable else None


def _is_tensor(part: Any) -> bool:
    return type(part) is tuple


def _common(key: _Key, other: _Key) -> _Key | None:
    """Return the signature with the lengths common to two; None if more than shapes differ."""
    if len(key) != len(other):
        return None
    parts = []
    for part, second in zip(key, other, strict=True):
        if part == second:
            parts.append(part)
        elif not (_is_tensor(part) and _is_tensor(second) and part[1] == second[1]):
            return None
        elif part[0] is None or second[0] is None or len(part[0]) != len(second[0]):
            parts.append((None, part[1]))
        else:
            lengths = zip(part[0], second[0], strict=True)
            parts.append((tuple(n if n == m else None for n, m in lengths), part[1]))
    return tuple(parts)


class _Calls:
    """The number of calls, and the calls with new signatures, of all functions with one code."""

    def __init__(self) -> None:
        self.count = 0
        self._new: list[int] = []
        self._warnings = 0

    def add_new(self, name: str) -> None:
        """Note that the present call has a new signature; warn if there are many."""
        self._new = [call for call in self._new if self.count - call < _RECENT] + [self.count]
        if len(self._new) >= _MANY and self._warnings < _MOST_WARNINGS:
            self._warnings += 1
            _log.warning(
                "%d of the last %d calls of the tf.function %s had new signatures. TensorFlow traces a "
                "function again for each signature. Here layers record their kernels again for each "
                "shape of their inputs. Create the tf.function once, outside of loops. Pass tensors of "
                "few shapes, and tensors instead of Python numbers.",
                len(self._new),
                min(self.count, _RECENT),
                name,
            )


#: The calls of the functions that `function` decorates, by their code.
_calls: weakref.WeakKeyDictionary[types.CodeType, _Calls] = weakref.WeakKeyDictionary()


class _Signatures:
    """The signatures of a function's calls, and the state of its first call."""

    def __init__(self, reduce: bool, calls: _Calls) -> None:
        #: True after one call of the function has returned.
        self.called = False
        self.calls = calls
        #: The signatures of calls as the arguments were given.
        self.given: set[_Key] = set()
        #: The signatures with all arguments in their order, and their concrete functions.
        self.known: dict[_Key, ConcreteFunction | None] = {}
        #: The signatures that may include others, by their parts without shapes.
        self._general: dict[_Key, list[_Key]] = {}
        self._reduce = reduce
        self._more = 0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """The number of signatures."""
        return len(self.known) + self._more

    def add(self, key: _Key) -> tuple[_Key, bool]:
        """Return the known signature that includes this one, and True if it is new."""
        with self._lock:
            if key in self.known:
                return key, False
            without_shapes = tuple(part[1:] if _is_tensor(part) else part for part in key)
            alike = self._general.get(without_shapes, [])
            for known in alike:
                if _common(known, key) == known:
                    return known, False
            if self._reduce:
                for known in alike:
                    key = _common(key, known) or key
            if len(self.known) >= _MOST_SIGNATURES:
                self._more += 1
                return key, True
            self.known[key] = None
            shapes = [part[0] for part in key if _is_tensor(part)]
            if self._reduce or any(shape is None or None in shape for shape in shapes):
                self._general.setdefault(without_shapes, []).append(key)
            return key, True


def _refuse_variable(next_creator: Callable[..., Any], **kwargs: Any) -> NoReturn:
    """Raise ValueError; this is the variable creator in all calls of a function but the first."""
    name = kwargs.get("name") or "Variable"
    raise ValueError(
        f"a tf.function tried to create the variable {name!r} in a call that is not its first. Create "
        "variables, layers, optimizers and metrics outside of the function, or in the first call, and "
        "keep them. optimizer.build(variables) makes the variables of an optimizer for layers that are "
        "trained later"
    )


_ANY_ARGUMENTS = inspect.signature(lambda *args, **kwargs: None)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some functions of compiled modules have none
        return _ANY_ARGUMENTS


class Function:
    """A function with TensorFlow's rules for signatures and variables; `function` makes it.

    Attributes
    ----------
    python_function : callable
        The decorated function; for a method, bound to the object.
    name : str
        The name of the decorated function, or ``"function"`` if it has none.
    input_signature : tuple or None
        The specs of the arguments.
    """

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Any = None,
        reduce_retracing: bool = False,
        checked: bool = True,
    ) -> None:
        is_plain = isinstance(python_function, types.FunctionType)
        # The attributes of other objects, such as a model's, are not those of this object.
        functools.update_wrapper(self, python_function, updated=("__dict__",) if is_plain else ())
        self.python_function = python_function
        self.name = getattr(python_function, "__name__", "function")
        self.input_signature = None if input_signature is None else _checked(input_signature)
        self._constraints: dict[str, Any] | None = None
        if self.input_signature is not None:
            self._constraints = _constraints(python_function, self.input_signature)
        self._reduce = reduce_retracing
        #: False: no signatures are kept, and each call may create variables.
        self._is_checked = checked
        #: The code of the decorated function, if it has one.
        self._code = code = getattr(inspect.unwrap(python_function), "__code__", None)
        calls = _Calls() if code is None else _calls.setdefault(code, _Calls())
        self._signatures = _Signatures(reduce_retracing, calls)
        #: For methods: the signatures of each object, and the functions that are in use.
        self._of_objects: dict[int, tuple[weakref.ref[Any], _Signatures]] = {}
        self._methods: weakref.WeakValueDictionary[int, Function] = weakref.WeakValueDictionary()
        kind = getattr(python_function, "__qualname__", type(python_function).__qualname__)
        name = f"{getattr(python_function, '__module__', '')}.{kind}"
        number = _counts[name] = _counts.get(name, -1) + 1
        #: The name and number by which tasks of a cluster find the function.
        self.made = name, number
        _made[self.made] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the decorated function."""
        try:
            if not self._is_checked or functions_run_eagerly():
                return self.python_function(*args, **kwargs)
            signatures = self._signatures
            given = new = None
            if self._constraints is not None:
                bound = self._bound(args, kwargs)
                args, kwargs = bound.args, bound.kwargs
                if not signatures.count:
                    new = _key_of(args, kwargs)
            else:
                given = _key_of(args, kwargs)
                if given not in signatures.given:
                    bound = self._bound(args, kwargs)
                    new = _key_of(bound.args, bound.kwargs)
            signatures.calls.count += 1
            if signatures.called:
                before = creators.stack
                inside = creators.stack = (*before, _refuse_variable)
                try:
                    result = self.python_function(*args, **kwargs)
                finally:
                    if creators.stack is inside:
                        creators.stack = before
            else:
                result = self.python_function(*args, **kwargs)
                signatures.called = True
            if new is not None:
                self._add(given, new)
            return result
        except StopIteration as end:
            if isinstance(end, OutOfRangeError):
                raise
            # As in TensorFlow, which raises StopIteration only outside of functions.
            raise OutOfRangeError("End of sequence") from None

    def experimental_get_tracing_count(self) -> int:
        """Return the number of signatures of calls and of concrete functions.

        TensorFlow traces the function for each of them. If the first call creates variables,
        TensorFlow traces the function twice; here that counts once.
        """
        return self._signatures.count

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Return the function for one signature, without a call.

        Arguments are those of a call, or `TensorSpec` in place of tensors. Without arguments, a
        function with an ``input_signature`` has that signature.
        """
        if self._constraints is not None and not args and not kwargs:
            bound = self._python_signature().bind_partial()
            bound.arguments = {
                name: self._constraints[name] for name in self._python_signature().parameters
            }
        else:
            bound = self._bound(args, kwargs)
        key, _ = self._signatures.add(self._key_of(bound))
        found = self._signatures.known.get(key)
        if found is None:
            found = ConcreteFunction(self, _with_specs(bound, key))
            if key in self._signatures.known:
                self._signatures.known[key] = found
        return found

    def describe_records(self) -> str:
        """Return a text with the layers whose kernels were recorded in calls of this function.

        The text names the layers. For each record it has the shape of the input, the state, and the
        line of the program that called the layers. Records that were made outside of the function,
        or in the threads of other replicas, are not listed: see `Model.describe_records`.
        """
        found = "".join(lister(self._code) for lister in record_listers if self._code is not None)
        return found or f"no layers were recorded in calls of {self.name}"

    def _key_of(self, bound: inspect.BoundArguments) -> _Key:
        if self._constraints is None:
            return _key_of(bound.args, bound.kwargs)
        # All calls have the one signature.
        return _key_of(tuple(self._constraints.values()), {})

    def _add(self, given: _Key | None, new: _Key) -> None:
        """Keep the signature of a call that has returned."""
        signatures = self._signatures
        if self._constraints is not None:
            signatures.add(_key_of(tuple(self._constraints.values()), {}))
            return
        assert given is not None
        if signatures.add(new)[1]:
            signatures.calls.add_new(self.name)
        if len(signatures.given) < _MOST_SIGNATURES:
            signatures.given.add(given)

    def _python_signature(self) -> inspect.Signature:
        found = self.__dict__.get("_inspected")
        if found is None:
            found = self._inspected = _signature_of(self.python_function)
        return found

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Return the arguments by name; raise TypeError if the function does not accept them."""
        try:
            return self._python_signature().bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Return all arguments, with default values, and as tensors if there is a signature."""
        bound = self.bind(args, kwargs)
        bound.apply_defaults()
        if self._constraints is not None:
            for name, value in bound.arguments.items():
                if name in self._constraints:
                    bound.arguments[name] = _fitted(
                        f"{self.name}(): {name}", self._constraints[name], value
                    )
        return bound

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the function as a method of an object; each object has its own first call."""
        if instance is None:
            return self
        number = id(instance)
        method = self._methods.get(number)
        if method is not None:
            return method
        if number not in self._of_objects:
            of_objects = self._of_objects
            try:
                reference = weakref.ref(instance, lambda _: of_objects.pop(number, None))
            except TypeError:  # the object is an ordinary argument
                return types.MethodType(self, instance)
            of_objects[number] = reference, _Signatures(self._reduce, _Calls())
        method = object.__new__(Function)
        method.__dict__.update(self.__dict__)
        method.python_function = types.MethodType(self.python_function, instance)
        method.__dict__["__self__"] = instance
        method.__dict__["__wrapped__"] = method.python_function
        method.__dict__.pop("_inspected", None)
        method._signatures = self._of_objects[number][1]
        self._methods[number] = method
        return method

    def __reduce__(self) -> Any:
        """Copy and pickle the function by its name, as Python does with its functions."""
        instance = self.__dict__.get("__self__")
        name = getattr(self, "__qualname__", self.name)
        return name if instance is None else (getattr, (instance, self.name))

    def __repr__(self) -> str:
        return f"<tf.function {getattr(self, '__qualname__', self.name)}>"


class ConcreteFunction:
    """A `Function` with one signature; `Function.get_concrete_function` makes it.

    Call it with tensors of this signature. Python values of the signature may be left out.

    Attributes
    ----------
    function : Function
        The function. Its Python function runs at every call.
    """

    def __init__(self, function: Function, bound: inspect.BoundArguments) -> None:
        self.function = function
        self._bound = bound

    @property
    def name(self) -> str:
        """Return the name of the decorated function."""
        return self.function.name

    @property
    def structured_input_signature(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments; tensors are `TensorSpec`."""
        return self._bound.args, self._bound.kwargs

    @property
    def python_function(self) -> Callable[..., Any]:
        """Return the decorated function."""
        return self.function.python_function

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments of a call.

        Raises
        ------
        TypeError
            A tensor is missing, or an argument does not fit the signature.
        """
        try:
            given = self._bound.signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self!r}: {error}") from None
        for name, spec in self._bound.arguments.items():
            if name in given.arguments:
                given.arguments[name] = _fitted(f"{self!r}: {name}", spec, given.arguments[name])
            elif any(isinstance(leaf, TensorSpec) for leaf in nest.flatten(spec)):
                raise TypeError(f"{self!r}: the argument {name} is missing")
            else:
                given.arguments[name] = spec
        # The arguments of `BoundArguments` are in the order of the parameters.
        given.arguments = {name: given.arguments[name] for name in self._bound.arguments}
        return given.args, given.kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function for these arguments."""
        args, kwargs = self.arguments(args, kwargs)
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self._bound.arguments.items()]
        return f"<ConcreteFunction {self.name}({', '.join(parts)})>"


def _checked(input_signature: Any) -> tuple[Any, ...]:
    """Return an ``input_signature`` as a tuple."""
    if not isinstance(input_signature, (list, tuple)):
        raise TypeError(f"input_signature must be a list or a tuple, got {input_signature!r}")
    for leaf in nest.flatten(list(input_signature)):
        if not isinstance(leaf, TensorSpec) and _specs_in(leaf) is None:
            raise TypeError(f"input_signature must consist of TensorSpec objects, got {leaf!r}")
    return tuple(input_signature)


def _specs_in(spec: Any) -> tuple[TensorSpec, ...] | None:
    """Return the specs of the components of a distributed value, or None for another spec."""
    return getattr(spec, "value_specs", None)


def _constraints(function: Callable[..., Any], specs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the spec of each parameter by name; its value, if the signature has no spec for it."""
    rest = list(specs)
    found: dict[str, Any] = {}
    for number, (name, parameter) in enumerate(_signature_of(function).parameters.items()):
        if number == 0 and name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[name], rest = tuple(rest), []
        elif parameter.kind is parameter.VAR_KEYWORD:
            found[name] = {}
        elif parameter.kind is not parameter.KEYWORD_ONLY and rest:
            found[name] = rest.pop(0)
        elif parameter.default is not parameter.empty:
            found[name] = parameter.default
        else:
            raise TypeError(f"input_signature has no spec for the argument {name!r}")
    if rest:
        raise TypeError(
            f"input_signature has {len(rest)} more specs than the function has arguments"
        )
    return found


def _fitted(name: str, spec: Any, value: Any) -> Any:
    """Return a value as tensors that fit specs; a spec that is a Python value must be equal.

    Raises
    ------
    TypeError
        The value does not fit.
    """
    if nest.is_nested(spec):
        by_name = hasattr(spec, "keys")
        same = nest.is_nested(value) and isinstance(value, dict if by_name else type(spec))
        if not same or (set(spec) != set(value) if by_name else len(spec) != len(value)):
            raise TypeError(f"{name} must have the structure {spec!r}, got {value!r}")
        places = spec if by_name else range(len(spec))
        items = {
            place: _fitted(f"{name}[{place!r}]", spec[place], value[place]) for place in places
        }
        return nest.rebuild(value, [items[place] for place in (value if by_name else places)])
    specs = _specs_in(spec)
    if specs is not None:
        parts = getattr(value, "values", None)
        if not isinstance(parts, tuple) or len(parts) != len(specs):
            raise TypeError(f"{name} must fit {spec!r}, got {value!r}")
        fitted = [
            _fitted(f"{name}.values[{i}]", s, part)
            for i, (s, part) in enumerate(zip(specs, parts, strict=True))
        ]
        return value.__class__(fitted)
    if not isinstance(spec, TensorSpec):
        if _key_of((spec,), {}) != _key_of((value,), {}):
            raise TypeError(f"{name} must be {spec!r}, got {value!r}")
        return value
    if isinstance(value, TensorSpec):
        found: Any = value
    else:
        try:
            is_plain = not isinstance(value, Operators) and spec.dtype is not None
            found = as_tensor(value, spec.dtype if is_plain else None)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must fit {spec!r}: {error}") from None
    given = TensorSpec(found.shape, found.dtype)
    wanted = TensorSpec(spec.shape, found.dtype if spec.dtype is None else spec.dtype)
    key, other = _key_of((wanted,), {}), _key_of((given,), {})
    if _common(key, other) != key:
        raise TypeError(f"{name} must fit {spec!r}, got {given!r}")
    return found


def _with_specs(bound: inspect.BoundArguments, key: _Key) -> inspect.BoundArguments:
    """Return arguments with `TensorSpec` in place of tensors, and with the shapes of a signature."""
    shapes = filter(_is_tensor, key)

    def spec_of(leaf: Any, shapes: Iterator[Any]) -> Any:
        parts = list(filter(_is_tensor, _key_of((leaf,), {})))
        found = [next(shapes) for _ in parts]
        if len(found) != 1 or hasattr(leaf, "assign"):
            return leaf
        shape, dtype = found[0]
        return TensorSpec(shape, dtype, getattr(leaf, "name", None))

    result = bound.signature.bind_partial()
    names = [n for n, p in bound.signature.parameters.items() if n in bound.arguments]
    for name in names:
        value = bound.arguments[name]
        leaves = [spec_of(leaf, shapes) for leaf in nest.flatten(value, by_key=True)]
        result.arguments[name] = nest.pack_as(value, leaves, by_key=True)
    return result


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: Any = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Any:
    """Return a `Function` that calls ``func``; nothing is traced or compiled.

    Use it as ``@function`` or as ``@function(jit_compile=True)``. The arguments are those of
    ``tf.function``.

    The Python code of ``func`` runs at every call. TensorFlow runs this code only for the first call
    of each signature. So ``print``, counters and other effects happen at every call here. Arguments and
    results are those of ``func``: without an ``input_signature``, arrays and numbers stay what they
    are.

    Parameters
    ----------
    func : callable
        A function or method. Each object has its own function for a method.
    input_signature : sequence of nests of TensorSpec, optional
        Specs of the arguments. Each call converts arrays, numbers and lists to tensors. A tensor with
        another dtype, or with a shape that does not fit, raises TypeError. Arguments without a spec
        have their default values.
    reduce_retracing : bool
        Replace signatures that differ only in shapes by one with unknown lengths. This only changes the
        count and the warnings. ``experimental_relax_shapes`` is its old name.
    autograph, jit_compile, and all other arguments
        Accepted, without effect.

    Raises
    ------
    TypeError
        ``func`` is not callable, or does not fit ``input_signature``.

    Notes
    -----
    * A signature has the structure of the arguments, and the shape and dtype of each tensor. It has the
      values of Python's numbers and texts, and the identity of other objects. The first call of a
      signature stands for TensorFlow's trace; `experimental_get_tracing_count` counts these calls.
    * If 5 of the last 10 calls had new signatures, a warning is logged, at most twice.
    * The first call may create variables. Later calls that create one raise ValueError. TensorFlow
      raises that error in the first call already if the function does not keep its variables.
    * ``tf.config.run_functions_eagerly(True)`` switches the checks off.
    """

    def decorate(inner: Callable[..., Any]) -> Function:
        if not callable(inner):
            raise TypeError(f"function() decorates a callable, got {inner!r}")
        return Function(inner, input_signature, reduce_retracing or bool(experimental_relax_shapes))

    return decorate if func is None else decorate(func)


def function_made(name: str, number: int) -> Function | None:
    """Return the function that `function` made as number ``number`` (from 0) of a name, or None."""
    return _made.get((name, number))


def functions_made() -> list[Function]:
    """Return the functions that `function` has made, and that the program still has."""
    return list(_made.values())
