"""`Restoration`: the assignment of a checkpoint's values to objects."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pycollective.array_backend import Array
from pycollective.distribute.context import Mode, current_mode, entered
from pycollective.errors import CheckpointError
from pycollective.tensor import Variable
from pycollective.train.files import Contents, Node
from pycollective.train.trackable import Trackable, children_of

_log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """The actions that restore an object and its parts.

    Attributes
    ----------
    pairs : list of tuple
        Variables, with the nodes of their saved values.
    holders : list of tuple
        Objects that lack parts, with the nodes that have these parts.
    problems : list of str
        Texts about variables whose saved values have another shape or dtype.
    complete : bool
        True if every saved value has its variable.
    places : list of tuple
        Each object, its node, the name of a part, and that part.
    """

    pairs: list[tuple[Variable, int]]
    holders: list[tuple[Trackable, int]]
    problems: list[str]
    complete: bool
    places: list[tuple[Trackable, int, str, Any]]


class Restoration:
    """A checkpoint that is restored into objects, some of which may not exist yet."""

    def __init__(self, path: str, contents: Contents) -> None:
        self.path = path
        self._nodes = contents.nodes
        self._tensors = contents.tensors
        #: The restored variables by node.
        self._restored: dict[int, list[Variable]] = {}
        self._names = dict(_walk_nodes(self._nodes))
        #: The restored parts by the ids of objects and their nodes. The references are weak, because
        #: the objects refer to this restoration.
        self._matched: dict[tuple[int, int], tuple[weakref.ref[Trackable], dict[str, Any]]] = {}

    # From Checkpoint -------------------------------------------------------------------------

    def start(self, root: Trackable) -> None:
        """Restore existing parts; objects that lack parts keep a reference to this restoration."""
        self._apply(root, 0)
        missing = self.without_value(root)
        if missing:
            _log.warning("checkpoint %r has no values for %s", self.path, listed(missing))

    def names_on_both_sides(self, root: Trackable) -> tuple[list[str], list[str]]:
        """Return the names of the checkpoint's parts, and of the parts of ``root``."""
        saved, present = (
            [name for name in children if name != "save_counter"]
            for children in (self._nodes[0].children, children_of(root))
        )
        return saved, present

    def matched(self, root: Trackable) -> bool:
        """Return True if a variable other than the save counter has been restored."""
        counter = root._variables.get("save_counter")
        return any(v is not counter for variables in self._restored.values() for v in variables)

    def unused(self) -> list[str]:
        """Return the saved values that no variable took."""
        return [
            node.tensor
            for number, node in enumerate(self._nodes)
            if node.tensor is not None and number not in self._restored
        ]

    def without_value(self, root: Trackable) -> list[str]:
        """Return the variables under ``root`` that got no value from the checkpoint."""
        known = {id(v) for variables in self._restored.values() for v in variables}
        return [
            name
            for name, variable in variables_of(root)
            if id(variable) not in known and variable is not root._variables.get("save_counter")
        ]

    # From Trackable --------------------------------------------------------------------------

    def resume(self, owner: Trackable, node: int) -> bool:
        """Restore parts that ``owner`` got later; return True if nothing is missing any more."""
        return self._apply(owner, node)

    def initial_value(
        self, node: int, name: str, shape: tuple[int, ...], dtype: Any
    ) -> Array | None:
        """Return the saved value of the variable ``name`` of a node, or None."""
        child = self._nodes[node].children.get(name)
        if child is None or self._nodes[child].tensor is None:
            return None
        problem = self._problem(child, tuple(shape), np.dtype(dtype))
        if problem:
            raise self._mismatch([problem])
        return self._value(child)

    def created(self, node: int, name: str, variable: Variable) -> None:
        """Record that ``variable`` was made with the value from `initial_value`."""
        self._restored.setdefault(self._nodes[node].children[name], []).append(variable)

    # Work ------------------------------------------------------------------------------------

    def _apply(self, owner: Any, node: int) -> bool:
        """Restore ``owner`` and its parts from a node; return True if nothing is missing."""
        found = self.plan(owner, node)
        if found.problems:
            raise self._mismatch(found.problems)
        self.carry_out(found)
        return found.complete

    def plan(self, owner: Any, node: int) -> Plan:
        """Return the plan for restoring ``owner`` from a node."""
        pairs: list[tuple[Variable, int]] = []
        holders: list[tuple[Trackable, int]] = []
        places: list[tuple[Trackable, int, str, Any]] = []
        complete = self._match(owner, node, pairs, holders, places, set())
        problems = {id(v): self._problem(n, v.shape, v.dtype) for v, n in pairs}
        return Plan(
            [(v, n) for v, n in pairs if not problems[id(v)]],
            holders,
            [problem for problem in problems.values() if problem],
            complete,
            places,
        )

    def carry_out(self, plan: Plan) -> None:
        """Assign the values of a plan, and keep the rest of the checkpoint with the objects."""
        for owner, number, name, part in plan.places:
            known = self._known_parts(owner, number)
            if known is None:
                known = {}
                self._matched[id(owner), number] = weakref.ref(owner), known
            known.setdefault(name, _reference(part))
        for holder, number in plan.holders:
            object.__setattr__(holder, "_restore", (self, number))
        for variable, number in plan.pairs:
            _assign_everywhere(variable, self._value(number))
            self._restored.setdefault(number, []).append(variable)

    def _match(
        self,
        owner: Any,
        number: int,
        pairs: list[tuple[Variable, int]],
        holders: list[tuple[Trackable, int]],
        places: list[tuple[Trackable, int, str, Any]],
        seen: set[tuple[int, int]],
    ) -> bool:
        """Collect variables to assign, objects that lack parts, and parts that were found."""
        if (id(owner), number) in seen:
            return True
        seen.add((id(owner), number))
        node = self._nodes[number]
        if isinstance(owner, Variable):
            if node.tensor is not None and all(
                owner is not variable for variable in self._restored.get(number, ())
            ):
                pairs.append((owner, number))
            return True
        children = children_of(owner)
        known = self._known_parts(owner, number) or {}
        complete = True
        for name, child_number in node.children.items():
            child = children.get(name)
            if child is not None and name in known and known[name] != _reference(child):
                continue  # this part replaced a restored one, and keeps its own values
            if isinstance(owner, Trackable) and child is not None:
                places.append((owner, number, name, child))
            if child is None or not self._match(child, child_number, pairs, holders, places, seen):
                complete = False
        if isinstance(owner, Trackable) and not complete:
            holders.append((owner, number))
        return complete

    def _known_parts(self, owner: Any, number: int) -> dict[str, Any] | None:
        """Return the parts of an object that were restored from a node, by name."""
        found = self._matched.get((id(owner), number))
        return found[1] if found is not None and found[0]() is owner else None

    def _value(self, number: int) -> Array:
        tensor = self._nodes[number].tensor
        assert tensor is not None
        return self._tensors[tensor]

    def _problem(self, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str | None:
        value = self._value(number)
        if value.shape == shape and value.dtype == dtype:
            return None
        return (
            f"{self._names[number]}: saved with shape {value.shape} and dtype {value.dtype}, the "
            f"variable has {shape} and {dtype}"
        )

    def _mismatch(self, problems: list[str]) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.path!r} was saved from another model: " + "; ".join(problems) + ". "
            "Nothing was changed; build the model as it was when it was saved, or restore another "
            "checkpoint"
        )


def _reference(part: Any) -> tuple[int, Any]:
    """Return an id and a weak reference, None for lists and dicts; equal for the same part."""
    try:
        return id(part), weakref.ref(part)
    except TypeError:  # lists and dicts
        return id(part), None


def _assign_everywhere(variable: Variable, value: Array) -> None:
    """Assign to all components of a variable, also within a replica function."""
    mode = current_mode()
    if mode is None or mode.replica_context is None:
        variable.assign(value)
        return
    with entered(Mode(mode.strategy, None)):
        variable.assign(value)


def _walk_nodes(nodes: list[Node]) -> Iterator[tuple[int, str]]:
    """Yield each node with the path of names that leads to it."""
    queue = deque([(0, "")])
    seen = {0}
    while queue:
        number, name = queue.popleft()
        yield number, name
        for child_name, child in nodes[number].children.items():
            if child not in seen:
                seen.add(child)
                queue.append((child, f"{name}/{child_name}".lstrip("/")))


def variables_of(root: Trackable) -> Iterator[tuple[str, Variable]]:
    """Yield the variables under ``root`` with their names."""
    # `seen` keeps the objects alive, because the id of a deleted object may be reused.
    queue: deque[tuple[str, Any]] = deque([("", root)])
    seen: dict[int, Any] = {id(root): root}
    while queue:
        name, value = queue.popleft()
        if isinstance(value, Variable):
            yield name, value
        for child_name, child in children_of(value).items():
            if id(child) not in seen:
                seen[id(child)] = child
                queue.append((f"{name}/{child_name}".lstrip("/"), child))


def listed(names: list[str], most: int = 12) -> str:
    """Return the first names as text, with the number of the others."""
    text = ", ".join(names[:most]) or "none"
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
