"""`Checkpoint`: saves and restores the variables of named objects."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pycollective.array_backend import Array
from pycollective.atomic_files import locked
from pycollective.distribute.context import Mode, current_mode, entered
from pycollective.distribute.workers import Workers
from pycollective.errors import CheckpointError
from pycollective.tensor import Variable, VariableAggregation, VariableSynchronization
from pycollective.train.files import Contents, Node, read_files, write_files
from pycollective.train.state import add_to_state, get_checkpoint_state
from pycollective.train.trackable import Trackable, children_of, is_trackable

__all__ = [
    "Checkpoint",
    "CheckpointMismatchError",
    "CheckpointStatus",
    "Restoration",
    "contents_of",
    "require_same",
    "variables_of",
    "workers_of",
]

_log = logging.getLogger(__name__)


class CheckpointMismatchError(CheckpointError, AssertionError):
    """A checkpoint and the objects that it was restored to do not have the same parts."""


class Checkpoint(Trackable):
    """A group of objects whose variables are saved to, and restored from, files.

    Parameters
    ----------
    root
        An object whose parts are saved as if they were the checkpoint's own.
    **objects
        What is saved, by name: models, layers, optimizers, metrics, variables, other trackable
        objects, or lists, tuples and dicts of these. They become attributes.

    Raises
    ------
    ValueError
        If an object cannot be saved.

    Notes
    -----
    As ``tf.train.Checkpoint``. Values are matched by names of attributes, not by order of creation.
    Variables that do not exist yet when a checkpoint is restored start with the saved value when
    they are made. A checkpoint knows nothing of strategies: what was saved with any number of
    replicas is restored with any other, or without a strategy.
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        if root is not None:
            objects["root"] = root
        for name, value in objects.items():
            empty = isinstance(value, (list, tuple, dict)) and not value
            if not empty and not is_trackable(value):
                raise ValueError(
                    f"Checkpoint: {name}={value!r} is nothing that can be saved; give variables, "
                    "layers, models, optimizers, metrics, or lists and dicts of these"
                )
        for name, value in objects.items():
            setattr(self, name, value)

    def _trackable_children(self) -> dict[str, Any]:
        children = super()._trackable_children()
        root = children.pop("root", None)
        return children if root is None else {**children_of(root), **children}

    @property
    def save_counter(self) -> Variable:
        """How often `save` was called, restored ones included."""
        if "save_counter" not in self._variables:
            self._new_variable(
                "save_counter",
                lambda: np.zeros((), np.int64),
                label="save_counter",
                shape=(),
                dtype=np.dtype(np.int64),
                trainable=False,
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self._variables["save_counter"]

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write a checkpoint ``<file_prefix>-<number>``, and note it as the directory's latest.

        Returns
        -------
        str
            The path, to be given to `restore`.
        """
        _require_outside_replicas("save")
        prefix = os.fspath(file_prefix)
        if not os.path.basename(prefix):
            raise ValueError(
                f"save({prefix!r}) needs the beginning of a file name after the directory, such as "
                f"{os.path.join(prefix, 'ckpt')!r}"
            )
        return self._save(prefix)

    def _save(self, prefix: str, after: Callable[[], None] | None = None) -> str:
        """Save; the worker that writes calls ``after`` while it holds the lock of the folder."""
        self._begin_together("save", prefix)
        counter = self.save_counter
        counter.assign_add(1)
        path = f"{prefix}-{int(counter)}"
        try:
            self._write(path, note=True, after=after, begins_anew=True)
        except BaseException:
            counter.assign_sub(1)
            raise
        return path

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write a checkpoint with exactly this path; no number, no note. Returns the path."""
        _require_outside_replicas("write")
        return self._write_noted(file_prefix, False)

    def _write_noted(self, file_prefix: str | os.PathLike[str], note: bool) -> str:
        """Write as `write` does; with ``note`` it is the directory's latest then."""
        path = os.fspath(file_prefix)
        self._begin_together("write", path)
        self._write(path, note)
        return path

    def _begin_together(self, call: str, path: str | None) -> None:
        """Return when every worker saves, or restores; raise on every one if they do not.

        All are needed: for values that are aggregated when they are read, to agree on who writes, and
        to compare what is restored.
        """
        workers = workers_of(self)
        if workers.count == 1:
            return
        same = "restore"
        if call in ("save", "write"):
            same = " ".join(
                [
                    "save",
                    *(
                        f"{variable.dtype}{variable.shape}"
                        for _, variable in variables_of(self)
                        if variable.synchronization is VariableSynchronization.ON_READ
                    ),
                ]
            )
        workers.begin_together(f"Checkpoint.{call}({path!r})", same)

    def _write(
        self,
        path: str,
        note: bool = False,
        after: Callable[[], None] | None = None,
        begins_anew: bool = False,
    ) -> None:
        """Write the files; of several workers with one path, the first one does.

        It returns when all files are written, or raises on every worker.
        """
        workers = workers_of(self)
        contents = contents_of(self)

        def write() -> None:
            with locked(os.path.dirname(path) or "."):
                write_files(path, contents)
                if note:
                    add_to_state(path)
                if after is not None:
                    after()

        workers.write_once(path, write, begins_anew)

    def restore(self, save_path: str | os.PathLike[str] | None) -> CheckpointStatus:
        """Restore a checkpoint of `save`: now what exists, the rest when it is made.

        Parameters
        ----------
        save_path
            What `save` or `latest_checkpoint` returned; with None nothing is restored.

        Raises
        ------
        CheckpointError
            If the files are missing, truncated or damaged, or a variable has another shape or dtype
            than its saved value (then nothing is changed). On every worker if they restore different
            values, or not all restore something: each of them makes this call.

        Notes
        -----
        Parts may be missing on either side; the log has a warning for variables without a value. To
        demand that all is restored, call a method of the status that is returned, such as
        `CheckpointStatus.assert_consumed`, when all objects are made.
        """
        return self._read("restore", save_path)

    def read(self, save_path: str | os.PathLike[str] | None) -> CheckpointStatus:
        """Restore a checkpoint of `write`; as `restore`."""
        return self._read("read", save_path)

    def _read(self, call: str, save_path: str | os.PathLike[str] | None) -> CheckpointStatus:
        _require_outside_replicas(call)
        path = None if save_path is None else os.fspath(save_path)
        self._begin_together(call, path)
        if call == "restore" and path is not None:
            self.save_counter  # noqa: B018  (made, so that the saved number is restored)
        contents: Contents | None = None
        found = "nothing"
        try:
            if path is not None:
                found = f"{path!r}, which it cannot read"
                contents = read_files(path)
                found = f"{path!r}, SHA-256 {contents.digest}"
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {_remedy(str(path))}") from None
        finally:
            others = workers_of(self).every(contents.digest if contents else found, found)
        require_same(others)
        if path is None or contents is None:
            return CheckpointStatus(None, self)
        restoration = Restoration(path, contents)
        restoration.start(self)
        return CheckpointStatus(restoration, self)


class CheckpointStatus:
    """The state of a restored checkpoint; its methods raise if something is missing now."""

    def __init__(self, restoration: Restoration | None, root: Checkpoint) -> None:
        self._restoration = restoration
        self._root = root

    def assert_consumed(self) -> CheckpointStatus:
        """Raise unless all saved values are in use by now, and each variable here has got one.

        Raises
        ------
        CheckpointMismatchError
            A `CheckpointError` and ``AssertionError`` that names what is left.
        """
        restoration = self._require()
        unused = restoration.unused()
        if unused:
            raise CheckpointMismatchError(
                f"checkpoint {restoration.path!r} has values that nothing here took: "
                f"{_listed(unused)}; the objects that they belong to were not made (yet), or have "
                "other names"
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Raise unless each variable that exists here has been restored.

        Raises
        ------
        CheckpointMismatchError
            A `CheckpointError` and ``AssertionError`` that names the variables.
        """
        restoration = self._require()
        missing = restoration.without_value(self._root)
        if missing:
            raise CheckpointMismatchError(
                f"checkpoint {restoration.path!r} has no values for: {_listed(missing)}"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointStatus:
        """Raise unless at least one variable here has been restored, besides the save counter.

        Raises
        ------
        CheckpointMismatchError
            A `CheckpointError` and ``AssertionError`` with the names on both sides.
        """
        restoration = self._require()
        if not restoration.matched(self._root):
            saved, present = restoration.names_on_both_sides(self._root)
            raise CheckpointMismatchError(
                f"checkpoint {restoration.path!r} does not belong to these objects: it has "
                f"{_listed(saved)}, here are {_listed(present)}. Restore it into the objects that "
                "it was saved from, under the same names"
            )
        return self

    def expect_partial(self) -> CheckpointStatus:
        """Say that parts may be missing; for compatibility, as nothing complains about them."""
        return self

    def _require(self) -> Restoration:
        if self._restoration is None:
            raise CheckpointMismatchError(
                "No checkpoint specified (save_path=None); nothing is being restored."
            )
        return self._restoration


class Plan(NamedTuple):
    """What a restoration will do to an object and its parts.

    Attributes
    ----------
    pairs
        Variables, and the nodes that have their values.
    holders
        Objects that lack parts, and the nodes that have them.
    problems
        Variables whose saved values have another shape or dtype, for messages.
    complete
        Whether every saved value has its variable.
    """

    pairs: list[tuple[Variable, int]]
    holders: list[tuple[Trackable, int]]
    problems: list[str]
    complete: bool


class Restoration:
    """A checkpoint on its way into objects, some of which may not exist yet.

    Parameters
    ----------
    path
        The name of the checkpoint, for messages.
    contents
        The saved objects and values.
    """

    def __init__(self, path: str, contents: Contents) -> None:
        self.path = path
        self._nodes = contents.nodes
        self._tensors = contents.tensors
        #: The variables that have their saved values, by node.
        self._restored: dict[int, list[Variable]] = {}
        self._names = dict(_walk_nodes(self._nodes))

    # From Checkpoint -------------------------------------------------------------------------

    def start(self, root: Checkpoint) -> None:
        """Restore what exists; what is missing is noted in the objects that lack it."""
        self._apply(root, 0)
        missing = self.without_value(root)
        if missing:
            _log.warning("checkpoint %r has no values for %s", self.path, _listed(missing))

    def names_on_both_sides(self, root: Checkpoint) -> tuple[list[str], list[str]]:
        """Return the names of the checkpoint's parts, and those of the parts of ``root``."""
        saved, present = (
            [name for name in children if name != "save_counter"]
            for children in (self._nodes[0].children, children_of(root))
        )
        return saved, present

    def matched(self, root: Checkpoint) -> bool:
        """Return True if a variable other than the save counter has been restored."""
        counter = root._variables.get("save_counter")
        return any(v is not counter for variables in self._restored.values() for v in variables)

    def unused(self) -> list[str]:
        """Return the saved values that no variable has taken."""
        return [
            node.tensor
            for number, node in enumerate(self._nodes)
            if node.tensor is not None and number not in self._restored
        ]

    def without_value(self, root: Checkpoint) -> list[str]:
        """Return the variables under ``root`` that the checkpoint gave no value."""
        known = {id(v) for variables in self._restored.values() for v in variables}
        return [
            name
            for name, variable in variables_of(root)
            if id(variable) not in known and variable is not root._variables.get("save_counter")
        ]

    # From Trackable --------------------------------------------------------------------------

    def resume(self, owner: Trackable, node: int) -> bool:
        """Restore what has been added to ``owner`` since; return whether nothing is missing now."""
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
        """Note that ``variable`` was made with the value that `initial_value` returned."""
        self._restored.setdefault(self._nodes[node].children[name], []).append(variable)

    # Work ------------------------------------------------------------------------------------

    def _apply(self, owner: Any, node: int) -> bool:
        """Restore ``owner`` and its parts from a node; return whether everything was there."""
        found = self.plan(owner, node)
        if found.problems:
            raise self._mismatch(found.problems)
        self.carry_out(found)
        return found.complete

    def plan(self, owner: Any, node: int) -> Plan:
        """Return what restoring ``owner`` from a node will do."""
        pairs: list[tuple[Variable, int]] = []
        holders: list[tuple[Trackable, int]] = []
        complete = self._match(owner, node, pairs, holders, set())
        problems = {id(v): self._problem(n, v.shape, v.dtype) for v, n in pairs}
        return Plan(
            [(v, n) for v, n in pairs if not problems[id(v)]],
            holders,
            [problem for problem in problems.values() if problem],
            complete,
        )

    def carry_out(self, plan: Plan) -> None:
        """Assign the values of a plan, and leave the rest of the checkpoint with its objects."""
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
        seen: set[tuple[int, int]],
    ) -> bool:
        """Collect variables to be assigned, and objects that lack parts (``holders``)."""
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
        complete = True
        for name, child_number in node.children.items():
            child = children.get(name)
            if child is None or not self._match(child, child_number, pairs, holders, seen):
                complete = False
        if isinstance(owner, Trackable) and not complete:
            holders.append((owner, number))
        return complete

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


def _assign_everywhere(variable: Variable, value: Array) -> None:
    """Assign to all components of a variable, also when a replica's code made it just now."""
    mode = current_mode()
    if mode is None or mode.replica_context is None:
        variable.assign(value)
        return
    with entered(Mode(mode.strategy, None)):
        variable.assign(value)


def contents_of(root: Trackable) -> Contents:
    """Return the objects under ``root`` and the values of their variables."""
    objects: list[Any] = [root]
    names = [""]
    numbers = {id(root): 0}
    nodes: list[Node] = []
    tensors: dict[str, Array] = {}
    # Breadth first, so that what is shared gets its shortest name; grows while it is walked.
    for number, value in enumerate(objects):
        if isinstance(value, Variable):
            name = _unused_name(names[number], tensors)
            tensors[name] = np.array(value.numpy(), order="C")
            nodes.append(Node({}, name))
            continue
        children: dict[str, int] = {}
        for child_name, child in children_of(value).items():
            if id(child) not in numbers:
                numbers[id(child)] = len(objects)
                objects.append(child)
                names.append(f"{names[number]}/{child_name}".lstrip("/"))
            children[child_name] = numbers[id(child)]
        nodes.append(Node(children, None))
    return Contents(nodes, tensors)


def _unused_name(name: str, taken: dict[str, Array]) -> str:
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


def _walk_nodes(nodes: list[Node]) -> Iterator[tuple[int, str]]:
    """Yield each node with a name of the way to it."""
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
    # The objects themselves are kept too: an id says nothing once its object is gone.
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


def _remedy(path: str) -> str:
    """Say which checkpoint of the same directory can be restored instead of a damaged one."""
    directory = os.path.dirname(path) or "."
    try:
        state = get_checkpoint_state(directory)
    except CheckpointError:
        state = None
    for other in [] if state is None else state.all_model_checkpoint_paths[::-1]:
        if os.path.normpath(other) != os.path.normpath(path):
            try:
                read_files(other)
            except CheckpointError:
                continue
            return f"The newest intact other checkpoint is {other!r}; restore that one"
    return f"No other intact checkpoint is noted in {directory!r}"


def _listed(names: list[str], most: int = 12) -> str:
    text = ", ".join(names[:most]) or "none"
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _require_outside_replicas(method: str) -> None:
    mode = current_mode()
    if mode is not None and mode.replica_context is not None and _several(mode.strategy):
        raise RuntimeError(
            f"Checkpoint.{method}() was called in a replica function, where each replica would "
            "do it; call it outside of strategy.run()"
        )


def workers_of(root: Checkpoint) -> Workers:
    """Return the processes that the variables under ``root`` belong to."""
    for _, variable in variables_of(root):
        strategy = variable._distribute_strategy
        if strategy is not None:
            found: Workers = strategy.extended.workers
            if found.count > 1 or found.somebody_waits:
                return found
    return Workers()


def require_same(others: str) -> None:
    """Raise if `Workers.every` has found that not all restore the same."""
    if others:
        raise CheckpointError(
            f"the workers restore different checkpoints: {others}. All need the same one, on a disk "
            "that all can read or as equal copies; nothing was changed"
        )


def _several(strategy: Any) -> bool:
    return bool(strategy.num_replicas_in_sync > 1)
