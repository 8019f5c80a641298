"""`Trackable`: objects whose variables checkpoints find by the names of attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pycollective.array_backend import Array
from pycollective.distribute.variables import AggregateInitialValue
from pycollective.tensor import Variable

if TYPE_CHECKING:
    from typing_extensions import Self


class Restore(Protocol):
    """The interface of a restored checkpoint for objects that get parts later."""

    def resume(self, owner: Trackable, node: int) -> bool:
        """Restore parts that ``owner`` got later; return True if nothing is missing any more."""

    def initial_value(
        self, node: int, name: str, shape: tuple[int, ...], dtype: Any
    ) -> Array | None:
        """Return the saved value of the variable ``name`` of a node, or None."""

    def created(self, node: int, name: str, variable: Variable) -> None:
        """Record that ``variable`` was made with the value from `initial_value`."""


_stamp = object()


def structure_stamp() -> object:
    """Return an object that is replaced whenever the parts of a `Trackable` may have changed.

    Changes within lists and dicts that are attributes do not count.
    """
    return _stamp


def structure_changed() -> None:
    """Replace the object that `structure_stamp` returns."""
    global _stamp
    _stamp = object()


class Trackable:
    """Base class of objects that `Checkpoint` can save.

    The parts of an object are found when they are needed. First come the variables that the object made,
    then its attributes in the order in which they were set. An attribute is a part if it is a variable,
    another trackable object, or a list, tuple or dict that contains these. A restored checkpoint stays
    with the object until all of its values are used, so that variables made later start with the saved
    values.
    """

    _variables: dict[str, Variable]
    #: A restored checkpoint with values that this object has not used, and the object's node; or None.
    _restore: tuple[Restore, int] | None

    #: Names of attributes that may hold parts, in the order in which they were first set.
    _tracked: dict[str, None]
    #: Names of attributes that never hold parts.
    _untracked: frozenset[str] = frozenset()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the object ready for tracking, before any ``__init__`` runs."""
        self = super().__new__(cls)
        object.__setattr__(self, "_variables", {})
        object.__setattr__(self, "_restore", None)
        object.__setattr__(self, "_tracked", {})
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.__dict__.get(name)
        if old is not value and isinstance(old, Variable):  # as in Keras, it is no part any more
            for key in [key for key, variable in self._variables.items() if variable is old]:
                del self._variables[key]
        object.__setattr__(self, name, value)
        if value.__class__ in _PLAIN and name not in self._tracked:
            return
        structure_changed()
        if value.__class__ in _PLAIN or name in self._untracked or not _may_hold(value):
            return
        self._tracked[name] = None
        if self._restore is not None:
            self._resume_restore()

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        structure_changed()

    def _trackable_children(self) -> dict[str, Any]:
        """Return the parts of this object in checkpoints, by name."""
        children: dict[str, Any] = dict(self._variables)
        if self._tracked:
            known = {id(variable) for variable in children.values()}
            attributes = vars(self)
            for name in self._tracked:
                value = attributes.get(name)
                if id(value) not in known and is_trackable(value):
                    children[_unused(name, children)] = value
        return children

    def _resume_restore(self) -> None:
        """Restore the saved values of parts that this object got after a restore."""
        if self._restore is not None:
            restore, node = self._restore
            if restore.resume(self, node) and self._restore == (restore, node):
                object.__setattr__(self, "_restore", None)

    def _new_variable(
        self, name: str, initial_value: Any, *, label: str, **options: Any
    ) -> Variable:
        """Make a variable that belongs to this object.

        Its name in checkpoints is ``name``, and its own name is ``label``. Both get a number if the
        object already has a variable ``name``. The function ``initial_value`` is not called if a
        restored checkpoint has the value. Options are the value's ``shape`` and ``dtype``, and
        further arguments of `Variable`.
        """
        unique = _unused(name, self._variables)
        saved = None
        if self._restore is not None:
            restore, node = self._restore
            saved = restore.initial_value(node, unique, options["shape"], options["dtype"])
        variable: Variable = Variable(
            initial_value if saved is None else AggregateInitialValue(saved),
            name=label + unique.removeprefix(name),
            **options,
        )
        self._variables[unique] = variable
        structure_changed()
        if saved is not None:
            restore.created(node, unique, variable)
        return variable


def children_of(value: Any) -> dict[str, Any]:
    """Return the parts of a trackable value by name."""
    if isinstance(value, Trackable):
        return value._trackable_children()
    if isinstance(value, Variable):
        return {}
    mapping = value.__class__ is not list and isinstance(value, Mapping)
    items = value.items() if mapping else enumerate(value)
    children: dict[str, Any] = {}
    for key, item in items:
        if is_trackable(item):  # the keys 1 and "1" have the same text
            children[_unused(str(key), children)] = item
    return children


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name, with a number if another part has it."""
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the variables and trackable objects among a value's parts, also within lists and dicts."""
    for child in children_of(value).values():
        if isinstance(child, (Trackable, Variable)):
            yield child
        else:
            yield from parts_of(child)


def attributes_of(owner: Trackable) -> dict[str, Any]:
    """Return the attributes of an object that hold parts, or once did, by name."""
    return {name: getattr(owner, name, None) for name in owner._tracked}


def containers_of(owner: Trackable) -> list[Any]:
    """Return the lists and dicts in an object's attributes that hold parts or may get them."""
    found: list[Any] = []
    rest = [vars(owner).get(name) for name in owner._tracked]
    while rest:
        value = rest.pop()
        if isinstance(value, (list, tuple, Mapping, set)):
            if not isinstance(value, tuple):
                found.append(value)
            rest.extend(value.values() if isinstance(value, Mapping) else value)
    return found


#: The types of most attributes, which cannot hold parts.
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _may_hold(value: Any) -> bool:
    """Return True if ``value`` holds a trackable value, or may get one."""
    if isinstance(value, tuple):
        return any(_may_hold(item) for item in value)
    return isinstance(value, (Trackable, Variable, list, dict, Mapping, set, frozenset))


def is_trackable(value: Any) -> bool:
    """Return True if ``value`` is trackable, or a container with a trackable value in it."""
    if isinstance(value, (Trackable, Variable)):
        return True
    # Testing for Mapping takes a microsecond, so test for the most frequent type first.
    if value.__class__ is not list and isinstance(value, Mapping):
        return any(is_trackable(item) for item in value.values())
    if isinstance(value, (set, frozenset)) and any(is_trackable(item) for item in value):
        raise TypeError(
            f"layers, variables and other trackable objects are in a {type(value).__name__}, which "
            f"has no order that all workers share: {value!r}. Use a list or a dict"
        )
    return isinstance(value, (list, tuple)) and any(is_trackable(item) for item in value)
