"""The variables that a parameter server stores, and its answers to the other tasks."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import threading
from typing import Any

from pycollective.distribute.shared_values import (
    Block,
    SharedFile,
    apply_change,
    ascends,
    dropped,
)
from pycollective.distribute.snapshots import Snapshots
from pycollective.distribute.task_links import JOIN_SECONDS, shape_and_dtype
from pycollective.errors import FailedPreconditionError, UnavailableError
from pycollective.launch.handshake import HandshakeError
from pycollective.tensor.scattering import SCATTER

_log = logging.getLogger("pycollective")

#: The optimizers whose steps a server makes. Their steps need no variables but the slots.
OPTIMIZERS = ("SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "RMSprop")


class Store:
    """The variables of one server, by number; every connection's thread calls `answer`."""

    def __init__(self, snapshots: Snapshots | None = None, seconds: float = 60.0) -> None:
        self._lock = threading.Lock()
        self._snapshots, self._seconds = snapshots, seconds
        #: The run of the chief's program, once the chief has sent its name. With snapshots, variables
        #: are created after that.
        self._run: str | None = None
        self._begun, self._changed = threading.Event(), threading.Event()
        self._numbers: dict[str, int] = {}
        self._blocks: dict[int, Block] = {}
        self._next = 0
        #: The variables of the chief's program, and those that it has dropped, by their keys.
        self._kept: set[str] = set()
        self._dropped: set[str] = set()
        #: The workers that run the program up to the first scheduled function. Until then they can read
        #: each variable, so dropped variables wait for their removal.
        self._preparing: set[Any] = set()
        self._waiting: set[str] = set()
        #: For a variable, the keys of its slots.
        self._slots: dict[str, set[str]] = {}
        #: The number of updates of dropped variables.
        self._updates = 0
        self._file = SharedFile.made()
        self._answers = {
            "begin": self._begin,
            "create": self._create,
            "pull": self._pull,
            "push": self._push,
            "update": self._update,
            "rows": self._rows,
            "note": lambda message, arrays: ({}, []),  # `answer` has carried it out already
            "load": self._load,
            "find": self._find,
        }
        self._optimizers: dict[str, Any] = {}
        #: The addresses at which workers listen, by their names.
        self._addresses: dict[str, str] = {}
        #: The numbers of bytes sent to and received from other tasks over connections.
        self._sent = self._received = 0

    @property
    def begun(self) -> bool:
        """True once the store serves a chief."""
        return self._run is not None

    def answer(
        self, message: dict[str, Any], arrays: list[Any], task: Any = None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Carry out a request of another task, and return the reply with its arrays.

        Each request can have ``"dropped"``: the keys of variables that the chief's program has dropped.
        ``"prepares"`` is True for a worker that still runs the program, and False for one that has run
        it.
        """
        request = self._answers.get(str(message.get("request")))
        if request is None:
            raise HandshakeError("no request")
        self._note(task, message.get("prepares"), message.get("dropped", []))
        try:
            reply, found = request(message, arrays)
        except (KeyError, IndexError) as error:
            raise HandshakeError(f"malformed request: {error!r}") from None
        self._received += sum(array.nbytes for array in arrays)
        self._sent += sum(array.nbytes for array in found)
        return reply, found

    def listens(self, task: str, address: str) -> None:
        """Note the address at which a worker listens."""
        self._addresses[task] = address

    def _find(self, message: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the address at which a worker listens, or None if it has not begun."""
        return {"address": self._addresses.get(str(message["task"]))}, []

    def _create(
        self, message: dict[str, Any], arrays: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the number and the memory of a variable; ask for its value if no task has sent it.

        A worker's program may create a variable after the chief's program has dropped it. The reply
        then has ``"dropped"``.
        """
        key = str(message["key"])
        if self._snapshots is not None and not self._begun.is_set():
            if message.get("prepares") is not True:
                # The chief may wait for this worker's function before it connects to this server.
                return {"begun": False}, []
            if not self._begun.wait(JOIN_SECONDS):
                raise UnavailableError(f"the chief did not connect within {JOIN_SECONDS:g} s")
        shape, dtype = shape_and_dtype(message["spec"])
        slot_of = message.get("slot_of")
        with self._lock:
            if message.get("keeps") is True:
                self._kept.add(key)
            if {key, slot_of} & self._dropped and key not in self._kept:
                self._remove([key])
                return {"dropped": True}, []
            number = self._numbers.get(key)
            if number is None:
                if not arrays:
                    return {"wanted": True}, []
                if arrays[0].shape != shape or arrays[0].dtype != dtype:
                    raise HandshakeError("the value has another shape or dtype than the variable")
                number = self._add(key, self._next, arrays[0])
                self._changed.set()
            if isinstance(slot_of, str):
                self._slots.setdefault(slot_of, set()).add(key)
            block = self._blocks[number]
        if block.value.shape != shape or block.value.dtype != dtype:
            raise ValueError(
                f"variable {key!r} has shape {shape} and dtype {dtype}, and another task "
                f"has created it with {block.value.shape} and {block.value.dtype}: a worker has "
                "another program version. All tasks must run the same program, which creates the same "
                "variables in the same order"
            )
        reply: dict[str, Any] = {"number": number}
        if block.offset is not None and block.file is not None:
            reply |= {"file": block.file.name, "offset": block.offset}
        return reply, []

    def _add(self, key: str, number: int, value: Any) -> int:
        self._numbers[key] = number
        self._blocks[number] = Block.made(value, number, self._file)
        self._next = number + 1
        return number

    def leave(self, task: Any) -> None:
        """Note that the connection to a task has ended."""
        self._note(task, False, [])

    def _note(self, task: Any, prepares: Any, keys: Any) -> None:
        """Remove variables that the chief's program has dropped, and slots that it does not have."""
        if prepares is None and not keys:
            return
        with self._lock:
            if prepares is not None:
                (self._preparing.add if prepares is True else self._preparing.discard)(task)
            self._kept.difference_update(keys)
            self._waiting.update(keys)
            if self._waiting and not self._preparing:
                for key in self._waiting:
                    self._remove([key, *(self._slots.pop(key, set()) - self._kept)])
                self._waiting.clear()
                self._changed.set()

    def _remove(self, keys: list[str]) -> None:
        """Remove variables, and their memory; call with the lock held."""
        self._dropped.update(keys)
        for key in keys:
            number = self._numbers.pop(key, None)
            if number is not None:
                block = self._blocks.pop(number)
                self._updates += block.version - 1
                block.drop()

    def _block(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is not None:
            return block
        if 0 <= number < self._next:
            raise dropped()
        raise HandshakeError(f"no variable {number}")

    def _begin(
        self, message: dict[str, Any], arrays: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Record the run of the chief's program, and restore its variables if there is a snapshot."""
        run = str(message["run"])
        with self._lock:
            if self._run not in (None, run):
                raise FailedPreconditionError(
                    "the server already serves another chief, and a cluster has one: end that program, "
                    "or start other tasks at other addresses. In one program, make the strategy once"
                )
            if self._run is not None or self._snapshots is None:
                self._run = run
                return {}, []
            for number, key, value, version in self._snapshots.read(run):
                self._add(key, number, value)
                self._blocks[number].restore(version)
            self._run = run
        threading.Thread(target=self._write, name="pycollective-snapshots", daemon=True).start()
        self._begun.set()
        return {}, []

    def _write(self) -> None:
        """Write a snapshot at an interval, and after variables were created or dropped."""
        assert self._snapshots is not None and self._run is not None
        while True:
            self._changed.wait(self._seconds)
            self._changed.clear()
            with self._lock:
                variables = {key: self._blocks[number] for key, number in self._numbers.items()}
            try:
                self._snapshots.write(self._run, variables)
            except (OSError, UnavailableError) as error:
                _log.error("the snapshot was not written: %s", error)

    def _pull(self, message: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the values, or the rows, that have changed since the versions that a task has."""
        found, values = [], []
        for number, have in message["have"]:
            try:
                block = self._block(number)
                with block.locked(False) as value:
                    version = block.version
                    if have == version:
                        found.append([version, "same"])
                        continue
                    rows = block.rows_since(have)
                    found.append([version, "whole" if rows is None else "rows"])
                    values += [value.copy()] if rows is None else [rows, value[rows]]
            except FailedPreconditionError:  # dropped, so no running function uses it
                found.append([0, "dropped"])
        return {"found": found}, values

    def _push(self, message: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Apply changes in their order; return the version before each of them.

        The message has the number of the variable and the name of each change, as for `apply_change`.
        """
        rest, versions = iter(arrays), []
        for number, name in message["items"]:
            block, name = self._block(number), str(name)
            operands = [next(rest, None) for _ in range(2 if name in SCATTER else 1)]
            if any(operand is None for operand in operands):
                raise HandshakeError(f"the change {name[:40]!r} lacks an array")
            _check_change(name, operands, block)
            with block.locked(True) as value:
                versions.append(block.version)
                block.changed(operands[0] if name in SCATTER else None)
                apply_change(value, name, operands)
        return {"versions": versions}, []

    def _update(
        self, message: dict[str, Any], arrays: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Make a step of an optimizer with the gradients of some variables, or of some of their rows.

        The message has the optimizer, the learning rate, the number of the step, and the factor of
        weight decay. For each gradient it has the numbers of the variable and of its slots, and two
        flags. The first one is True if the gradient is that of some rows, the second one if weight
        decay applies.
        """
        optimizer = self._optimizer(*message["rule"])
        names, rest = optimizer.slot_names(), iter(arrays)
        groups = []
        for numbers, by_rows, decays in message["items"]:
            blocks = [self._block(number) for number in numbers]
            rows = None
            if by_rows:
                rows = _ascending(_checked_rows(next(rest), blocks[0]))
            gradient, value = next(rest), blocks[0].value
            shape = value.shape if rows is None else (len(rows), *value.shape[1:])
            if gradient.shape != shape or gradient.dtype != value.dtype:
                raise HandshakeError("a gradient of another shape or dtype")
            alike = [b.value.shape == value.shape and b.value.dtype == value.dtype for b in blocks]
            if len(blocks) != 1 + len(names) or not all(alike):
                raise HandshakeError("slots that do not fit the variable")
            groups.append((blocks, rows, gradient, decays is True))
        every = {block.number: block for blocks, *_ in groups for block in blocks}
        with contextlib.ExitStack() as held:
            for number in sorted(every):
                held.enter_context(every[number].locked(True))
            parts = [
                [block.value if rows is None else block.value[rows] for block in blocks]
                for blocks, rows, *_ in groups
            ]
            for part, (*_, decays) in zip(parts, groups, strict=True):
                if decays:
                    part[0] *= float(message["decay"])
            kept = {name: [part[k] for part in parts] for k, name in enumerate(names, 1)}
            optimizer.update_all(
                [part[0] for part in parts],
                [gradient for _, _, gradient, _ in groups],
                kept,
                float(message["rate"]),
                int(message["step"]),
            )
            for (blocks, rows, *_), part in zip(groups, parts, strict=True):
                for block, changed in zip(blocks, part, strict=True):
                    block.changed(rows)
                    if rows is not None:
                        block.value[rows] = changed
        return {}, []

    def _optimizer(self, name: str, settings: dict[str, Any]) -> Any:
        """Return the optimizer of a class with some settings; its own learning rate is not used."""
        if name not in OPTIMIZERS:
            raise HandshakeError(f"no optimizer {name[:40]!r}")
        key = json.dumps([name, settings], sort_keys=True)
        if key not in self._optimizers:
            if len(self._optimizers) >= 64:
                self._optimizers.clear()
            # The package of the trainer is loaded when it is first used.
            optimizers = importlib.import_module("pycollective.keras.optimizers")
            self._optimizers[key] = getattr(optimizers, name)(name="server", **settings)
        return self._optimizers[key]

    def _rows(self, message: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return some rows of variables."""
        values = []
        for number, index in zip(message["items"], arrays, strict=True):
            block = self._block(number)
            rows = _checked_rows(index, block)
            with block.locked(False) as value:
                values.append(value[rows])
        return {}, values

    def _load(self, message: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the numbers of variables, their bytes, updates, bytes sent and bytes received."""
        with self._lock:
            blocks = list(self._blocks.values())
            updates = self._updates + sum(block.version - 1 for block in blocks)
        size = sum(block.value.nbytes for block in blocks)
        return {"load": [len(blocks), size, updates, self._sent, self._received]}, []


def _check_change(name: str, operands: list[Any], block: Block) -> None:
    """Raise an error for a change that is unknown, or that does not fit the variable."""
    shape, dtype, new = block.value.shape, block.value.dtype, operands[-1]
    if name in SCATTER:
        shape = (len(_checked_rows(operands[0], block)), *shape[1:])
    elif name not in ("set", "add"):
        raise HandshakeError(f"no change {name[:40]!r}; the tasks have different versions")
    if new.shape != shape or new.dtype != dtype:
        raise HandshakeError(
            f"{name}: the operand has shape {new.shape} and dtype {new.dtype}, but the variable needs "
            f"{shape} and {dtype}"
        )
    if name == "scatter_div" and dtype.kind in "iu" and not new.all():
        raise HandshakeError("scatter_div: a row of integers has a zero, by which it cannot divide")


def _ascending(index: Any) -> Any:
    if not ascends(index):
        raise HandshakeError("the indices do not ascend")
    return index


def _checked_rows(index: Any, block: Block) -> Any:
    if index.dtype.kind not in "iu" or index.ndim != 1 or not block.value.ndim:
        raise HandshakeError("the indices are not a list of integers")
    if len(index) and not 0 <= index.min() <= index.max() < len(block.value):
        raise HandshakeError("an index is outside the variable")
    return index
