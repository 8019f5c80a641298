"""`Checkpoint`: save and restore the variables of named objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.arguments import path_of
from pycollective.array_backend import Array
from pycollective.atomic_files import locked
from pycollective.distribute.context import current_mode
from pycollective.distribute.workers import Workers
from pycollective.errors import CheckpointError
from pycollective.tensor import Variable, VariableAggregation, VariableSynchronization
from pycollective.train.files import Contents, Node, read_files, write_files
from pycollective.train.restoration import Restoration, listed, variables_of
from pycollective.train.state import add_to_state, get_checkpoint_state
from pycollective.train.trackable import Trackable, children_of, is_trackable


class CheckpointMismatchError(CheckpointError, AssertionError):
    """A checkpoint and the objects that it was restored to do not have the same parts."""


class Checkpoint(Trackable):
    """A group of objects whose variables are saved to, and restored from, files.

    Parameters
    ----------
    root
        An object whose parts are saved as if they were the checkpoint's own.
    **objects
        The objects by name: models, layers, optimizers, metrics, variables, other trackable objects, or
        lists, tuples and dicts of these. They become attributes.

    Raises
    ------
    ValueError
        An object cannot be saved.

    Notes
    -----
    The interface is that of ``tf.train.Checkpoint``. Values are matched by names of attributes, not by
    order of creation. Variables made after a checkpoint was restored start with the saved values. A
    checkpoint is independent of strategies: it can be restored with any number of replicas, or without
    a strategy.
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        if root is not None:
            objects["root"] = root
        for name, value in objects.items():
            empty = isinstance(value, (list, tuple, dict)) and not value
            if not empty and not is_trackable(value):
                raise ValueError(
                    f"Checkpoint: {name}={value!r} cannot be saved; give variables, "
                    "layers, models, optimizers, metrics, or lists and dicts of these"
                )
        parts = {} if root is None else children_of(root)
        for name, value in objects.items():
            if hasattr(Checkpoint, name):
                raise ValueError(f"Checkpoint: {name!r} is a name of its own; choose another one")
            if name in parts and parts[name] is not value:
                raise ValueError(
                    f"Cannot create a Checkpoint with keyword argument {name} if root.{name} already "
                    "exists."
                )
            setattr(self, name, value)

    def _trackable_children(self) -> dict[str, Any]:
        children = super()._trackable_children()
        root = children.pop("root", None)
        return children if root is None else {**children_of(root), **children}

    @property
    def save_counter(self) -> Variable:
        """The number of calls of `save`, which is saved and restored too."""
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
        """Write a checkpoint ``<file_prefix>-<number>``, and record it as the directory's latest.

        Returns
        -------
        str
            The path, for `restore`.

        Raises
        ------
        RuntimeError
            The call is inside a replica function.
        ValueError
            ``file_prefix`` has no beginning of a file name after the directory.
        """
        _require_outside_replicas("save")
        prefix = path_of("file_prefix", file_prefix)
        if not os.path.basename(prefix):
            raise ValueError(
                f"save({prefix!r}) needs the beginning of a file name after the directory, such as "
                f"{os.path.join(prefix, 'ckpt')!r}"
            )
        return self._save(prefix)

    def _save(self, prefix: str, after: Callable[[], None] | None = None) -> str:
        """Save; the worker that writes calls ``after`` while it holds the folder's lock."""
        self._begin_together("save", prefix)
        counter = self.save_counter
        counter.assign_add(1)
        path = f"{prefix}-{int(counter)}"
        try:
            self._write(path, record=True, after=after, may_restart=True)
        except BaseException:
            counter.assign_sub(1)
            raise
        return path

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write a checkpoint with exactly this path, without a number or a record; return the path."""
        _require_outside_replicas("write")
        return self.write_recorded(file_prefix, False)

    def write_recorded(self, file_prefix: str | os.PathLike[str], record: bool) -> str:
        """Write a checkpoint as `write` does; with ``record``, record it as the directory's latest."""
        path = path_of("file_prefix", file_prefix)
        self._begin_together("write", path)
        self._write(path, record)
        return path

    def _begin_together(self, call: str, path: str | None) -> None:
        """Wait until every worker saves or restores; raise on every worker if one does not.

        All workers are needed to aggregate variables that are aggregated on read, to agree on the
        writer, and to compare the restored values.
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
        record: bool = False,
        after: Callable[[], None] | None = None,
        may_restart: bool = False,
    ) -> None:
        """Write the files; of several workers with the same path, only the first one writes.

        Return when all files are written, or raise on every worker.
        """
        workers = workers_of(self)
        contents = contents_of(self)

        def write() -> None:
            with locked(os.path.dirname(path) or "."):
                write_files(path, contents)
                if record:
                    add_to_state(path)
                if after is not None:
                    after()

        workers.write_once(path, write, may_restart)

    def restore(self, save_path: str | os.PathLike[str] | None) -> CheckpointStatus:
        """Restore a checkpoint of `save`: existing variables now, others when they are made.

        Every worker makes this call.

        Parameters
        ----------
        save_path : path or None
            The result of `save` or `latest_checkpoint`; None restores nothing.

        Raises
        ------
        CheckpointError
            The files are missing, truncated or damaged, or a variable has another shape or dtype than
            its saved value. Every worker raises it if the workers restore different values, or if only
            some of them restore a checkpoint. No variable is changed.

        Notes
        -----
        Parts may be missing in the checkpoint or in the objects; the log has a warning for variables
        without a value. To require a complete match, call a method of the returned status, such as
        `CheckpointStatus.assert_consumed`, when all objects are made.
        """
        return self._read("restore", save_path)

    def read(self, save_path: str | os.PathLike[str] | None) -> CheckpointStatus:
        """Restore a checkpoint of `write`; see `restore`."""
        return self._read("read", save_path)

    def _read(self, call: str, save_path: str | os.PathLike[str] | None) -> CheckpointStatus:
        _require_outside_replicas(call)
        path = None if save_path is None else path_of("save_path", save_path)
        self._begin_together(call, path)
        if call == "restore" and path is not None:
            self.save_counter  # noqa: B018  (made here, so that its saved value is restored)
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
    """The status of a restored checkpoint; its methods raise if something is missing."""

    def __init__(self, restoration: Restoration | None, root: Checkpoint) -> None:
        self._restoration = restoration
        self._root = root

    def assert_consumed(self) -> CheckpointStatus:
        """Raise unless all saved values are used, and each existing variable has a saved value.

        Raises
        ------
        CheckpointMismatchError
            A `CheckpointError` and ``AssertionError`` that names the unused values or the variables.
        """
        restoration = self._require()
        unused = restoration.unused()
        if unused:
            raise CheckpointMismatchError(
                f"checkpoint {restoration.path!r} has values that no variable took: "
                f"{listed(unused)}; the objects that they belong to were not made (yet), or have "
                "other names"
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Raise unless each existing variable has a saved value.

        Raises
        ------
        CheckpointMismatchError
            A `CheckpointError` and ``AssertionError`` that names the variables.
        """
        restoration = self._require()
        missing = restoration.without_value(self._root)
        if missing:
            raise CheckpointMismatchError(
                f"checkpoint {restoration.path!r} has no values for: {listed(missing)}"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointStatus:
        """Raise unless at least one variable other than the save counter has a saved value.

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
                f"{listed(saved)}, here are {listed(present)}. Restore it into the objects that "
                "it was saved from, under the same names"
            )
        return self

    def expect_partial(self) -> CheckpointStatus:
        """Return the status; for compatibility, because missing parts are allowed anyway."""
        return self

    def _require(self) -> Restoration:
        if self._restoration is None:
            raise CheckpointMismatchError(
                "No checkpoint specified (save_path=None); nothing is being restored."
            )
        return self._restoration


def contents_of(root: Trackable) -> Contents:
    """Return the objects under ``root`` and the values of their variables."""
    objects: list[Any] = [root]
    names = [""]
    numbers = {id(root): 0}
    nodes: list[Node] = []
    tensors: dict[str, Array] = {}
    # Breadth first, so that shared objects get their shortest name; the list grows in the loop.
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
    while unique in taken or unique == "__metadata__":  # a name of the safetensors format
        number += 1
        unique = f"{name}_{number}"
    return unique


def _remedy(path: str) -> str:
    """Return a text about the newest intact checkpoint of the same directory."""
    directory = os.path.dirname(path) or "."
    try:
        state = get_checkpoint_state(directory)
    except CheckpointError:
        state = None
    name = os.path.basename(path).rpartition("-")[0]
    for other in [] if state is None else state.all_model_checkpoint_paths[::-1]:
        if os.path.basename(other).rpartition("-")[0] != name:
            continue
        if os.path.normpath(other) != os.path.normpath(path):
            try:
                read_files(other)
            except CheckpointError:
                continue
            return f"The newest intact other checkpoint is {other!r}; restore that one"
    return f"No other intact checkpoint of this name is recorded in {directory!r}"


def _require_outside_replicas(method: str) -> None:
    mode = current_mode()
    if mode is not None and mode.replica_context is not None and _several(mode.strategy):
        raise RuntimeError(
            f"Checkpoint.{method}() was called in a replica function, where each replica would "
            "do it; call it outside of strategy.run()"
        )


def workers_of(root: Checkpoint) -> Workers:
    """Return the processes to which the variables under ``root`` belong."""
    for _, variable in variables_of(root):
        strategy = variable.distribute_strategy
        if strategy is not None:
            found: Workers = strategy.extended.workers
            if found.count > 1 or found.worker_waits:
                return found
    return Workers()


def require_same(others: str) -> None:
    """Raise CheckpointError if `Workers.every` found that the workers restore different values."""
    if others:
        raise CheckpointError(
            f"the workers restore different checkpoints: {others}. All need the same one, on a disk "
            "that all can read or as equal copies; nothing was changed"
        )


def _several(strategy: Any) -> bool:
    return bool(strategy.num_replicas_in_sync > 1)
