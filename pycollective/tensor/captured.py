"""Replay of a function's work on a GPU: one launch for its outputs, and one for their gradients.

From Python, the launch of each kernel takes tens of microseconds, often longer than its run.
CUDA graphs (CUDA C++ Programming Guide, "CUDA Graphs") repeat kernels at the same addresses in one
launch. A record is used after a replay has given the outputs and gradients of the function itself.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from pycollective.nccl import device

from .. import cublas
from ..array_backend import Array, array_module, beside, device_of, empty
from ..config import functions_run_eagerly
from .tape import GradientTape, eagerly, key_of, needs_of, paused, record, thread_state
from .tensor import Tensor
from .variable import Variable, reads, update_together

_log = logging.getLogger("pycollective")

#: The number of calls of a kind before a call is recorded: they compile kernels, choose plans and fill
#: caches. The call after the recorded one is compared with a replay.
_BEFORE = 3
#: The number of kinds of calls that are remembered, and the most records of one kind.
_KINDS, _RECORDS = 8, 4

#: ``gradients(g, need)`` returns the gradients of the input and the trained variables.
Gradients = Callable[[Array, tuple[bool, ...]], list[Any]]


def taped(
    function: Callable[[Tensor], Tensor],
    sources: Sequence[Any],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Tensor, Gradients]:
    """Call a function on a separate tape; return the output and a function for the gradients.

    The sources are the input and the variables; the tensors are their values. The tape watches the
    variables, not ``tensors``, because another thread may assign before the function reads.
    """
    tape = GradientTape(watch_accessed_variables=False)
    with paused(), tape:
        tape.watch([source for source, needed in zip(sources, needs, strict=True) if needed])
        output: Tensor = function(tensors[0])
        now = (tensors[0], *reads(sources[1:]))
    same = [key_of(after) == key_of(before) for after, before in zip(now, tensors, strict=True)]
    if all(same[place] for place, needed in enumerate(needs) if needed):
        sources = tensors

    def gradients(g: Array, need: tuple[bool, ...]) -> list[Any]:
        wanted = [source for source, needed in zip(sources, need, strict=True) if needed]
        with paused():
            found = tape.gradient(output, wanted, Tensor(g))
        return placed([None if part is None else part.array for part in found], need)

    return output, gradients


def placed(found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Return the elements of ``found`` in the places where ``needs`` is True, and None elsewhere."""
    rest = iter(found)
    return [next(rest) if needed else None for needed in needs]


def _references(arrays: list[Any]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


(_ALONE,) = _references([object()])
"""The references of an object that only a list holds, as `_references` counts them."""


class _Recorded:
    """The graphs of calls of one kind, with the arrays that they read and write."""

    def __init__(self, array: Array, addresses: list[int], others: list[Array]) -> None:
        #: The addresses of the values of the trained variables.
        self.addresses = addresses
        #: The memory of the other variables' values, and weak references to the arrays that use it.
        self.others: list[Any] = [(value.data, weakref.ref(value)) for value in others]
        self.recorder = device.Recorder()
        self.input: Array = array.copy()
        self.output_gradient: Any = None
        #: The output, and then the gradients.
        self.results: list[Any] = []
        self.forward: Any = None
        self.backward: Any = None
        #: The variables that the function assigns, and the addresses of their arrays.
        self.changed: list[Variable] = []
        self.places: list[int] = []
        #: True after a replay has given the results of the function.
        self.is_trusted = False
        #: A weak reference to the last replay's function for gradients, which tapes keep until they
        #: have computed the gradients.
        self.pending: Any = None

    def is_free(self) -> bool:
        """Return True if nobody needs the results of the last replay."""
        return (self.pending is None or self.pending() is None) and all(
            [count == _ALONE for count in _references(self.results)]
        )

    def adopt(self, variables: Sequence[Variable]) -> bool:
        """Move the values of the other variables to the graphs' memory; return False if it is in use."""
        for place, variable in enumerate(variables):
            value: Any = variable.current().array
            memory, used = self.others[place]
            if value.data.ptr == memory.ptr:
                continue
            if used() is not None:
                return False
            moved = array_module(value).ndarray(value.shape, value.dtype, memory)
            moved[...] = value
            variable.set_array(moved)
            self.others[place] = memory, weakref.ref(moved)
        return True

    def launch_forward(self, array: Array, stream: Any) -> bool:
        """Repeat the call for an input; return False if a variable's earlier value must not change."""
        is_done = False

        def launch(arrays: list[Array]) -> None:
            nonlocal is_done
            if [a.data.ptr for a in arrays] == self.places:  # type: ignore[attr-defined]
                device.copy_into(self.input, array, stream)
                self.forward.launch(stream)
                is_done = True

        update_together(self.changed, launch)
        return is_done

    def launch_backward(self, g: Array) -> list[Array]:
        """Return the gradients of the last replay."""
        with beside(g):
            stream = device.present_stream()
            device.copy_into(self.output_gradient, array_module(g).ascontiguousarray(g), stream)
            self.backward.launch(stream)
        return self.results[1:]


class _Kind:
    """Calls that one record can repeat: equal in shape, dtype, needed gradients, state and device."""

    def __init__(self) -> None:
        self.calls = 0
        self.records = 0
        self.recorded: _Recorded | None = None


class Captured:
    """A function of one tensor on a GPU. Its work is recorded one time, and then repeated.

    A subclass has the function, which must depend on its input, its variables and ``state`` alone. The
    function may assign variables.
    """

    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}
        self._is_refused = False

    def function(self, tensor: Tensor, state: Any) -> Any:
        """Return the output."""
        raise NotImplementedError

    def variables(self) -> tuple[Sequence[Variable], Sequence[Variable]] | None:
        """Return the trained variables and the other ones; None if the work cannot be recorded now."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that has recorded nothing."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(
            copy.deepcopy({k: v for k, v in vars(self).items() if k != "_kinds"}, memo), _kinds={}
        )
        return copied

    def output(self, tensor: Tensor, state: Hashable = None) -> Any:
        """Return the function's output."""
        array = tensor.array
        if (
            self._is_refused
            or thread_state.eagerly
            or functions_run_eagerly()
            or not array.flags.c_contiguous
        ):
            return self.function(tensor, state)
        found = self.variables()
        if found is None:
            return self.function(tensor, state)
        # The record uses the variables' own values: the layers inside it convert what they read.
        reads_as, thread_state.reads_as = thread_state.reads_as, None
        try:
            output = self._recorded_output(tensor, state, found[0], [v.local() for v in found[1]])
        finally:
            thread_state.reads_as = reads_as
        return self.function(tensor, state) if output is None else output

    def _recorded_output(
        self,
        tensor: Tensor,
        state: Hashable,
        trained: Sequence[Variable],
        others: list[Variable],
    ) -> Tensor | None:
        """Return the output of a call that is repeated, or that is recorded; None for other calls."""
        array = tensor.array
        tensors = (tensor, *reads(trained))
        needs = needs_of(tensors)
        values = [t.array for t in (*tensors[1:], *(variable.current() for variable in others))]
        place = device_of(array)
        if needs is None or any([device_of(value) != place for value in values]):
            return None
        with beside(array):
            stream = device.present_stream()
            owner = id(trained[0].local()) if trained else 0
            key = array.shape, array.dtype, needs, state, place, stream.ptr, owner
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= _KINDS:
                    self._kinds.clear()
                kind = self._kinds[key] = _Kind()
            addresses = [t.array.data.ptr for t in tensors[1:]]  # type: ignore[attr-defined]
            del values  # so that a replay may change them
            recorded = kind.recorded
            if recorded is not None and recorded.addresses != addresses:
                recorded = kind.recorded = None
            kind.calls += 1
            function = eagerly(lambda x: self.function(x, state))
            sources = (tensor, *trained)
            if recorded is None:
                if kind.calls > _BEFORE and kind.records < _RECORDS:
                    kind.records += 1
                    kind.recorded = self._record(function, sources, tensors, others, needs)
                return None
            if not (recorded.is_free() and recorded.adopt(others)):
                return None
            if recorded.is_trusted:
                return _replayed(recorded, tensors, needs, stream)
            return self._compared(recorded, function, sources, tensors, others, needs, stream)

    def _record(
        self,
        function: Callable[[Tensor], Tensor],
        sources: Sequence[Any],
        tensors: tuple[Tensor, ...],
        others: list[Variable],
        needs: tuple[bool, ...],
    ) -> _Recorded | None:
        """Record the graphs of a call without doing its work; return None if that is impossible."""
        for variable in others:  # copied, because replays write to these arrays
            variable.set_array(variable.current().array.copy())
        before = [variable.current().array for variable in others]
        addresses = [t.array.data.ptr for t in tensors[1:]]  # type: ignore[attr-defined]
        recorded = _Recorded(tensors[0].array, addresses, before)

        def forward() -> tuple[Array, Gradients]:
            x = Tensor(recorded.input)
            key_of(x)
            output, exact = taped(function, (x, *sources[1:]), (x, *tensors[1:]), needs)
            for variable, array in zip(others, before, strict=True):
                if variable.current().array is not array:
                    array[...] = variable.current().array
                    recorded.changed.append(variable)
                    recorded.places.append(array.data.ptr)  # type: ignore[attr-defined]
            array = output.array
            return array.copy() if array is recorded.input else array, exact

        with recorded.recorder.used():
            cublas.prepare(recorded.input)
        try:
            (output, exact), recorded.forward = recorded.recorder.record(forward)
            recorded.results = [output]
            if any(needs):
                recorded.output_gradient = empty(output.shape, output.dtype, output)
                found, recorded.backward = recorded.recorder.record(
                    lambda: _separate(exact(recorded.output_gradient, needs), needs)
                )
                recorded.results += found
        except device.NotCapturedError as error:
            self._refuse(error)
            return None
        finally:
            for variable, array in zip(others, before, strict=True):
                if variable.current().array is not array:
                    variable.set_array(array)
        device.release_unused()
        return recorded

    def _compared(
        self,
        recorded: _Recorded,
        function: Callable[[Tensor], Tensor],
        sources: Sequence[Any],
        tensors: tuple[Tensor, ...],
        others: list[Variable],
        needs: tuple[bool, ...],
        stream: Any,
    ) -> Tensor:
        """Return the function's output, and trust its record if a replay gives the same."""
        before: Any = [variable.current().array for variable in others]
        output, exact = taped(function, sources, tensors, needs)
        after = [variable.current().array for variable in others]
        for variable, array in zip(others, before, strict=True):
            if variable.current().array is not array:
                variable.set_array(array)
        array = before = None  # so that the replay may change them
        same = recorded.launch_forward(tensors[0].array, stream) and _are_close(
            [recorded.results[0], *(variable.current().array for variable in others)],
            [output.array, *after],
        )
        if not same:
            self._refuse(ValueError("a replay gave another output"))
            for variable, array in zip(others, after, strict=True):
                variable.set_array(array)
        recorded.is_trusted = same and not any(needs)

        def gradients(g: Array, need: tuple[bool, ...]) -> list[Any]:
            expected = exact(g, need)
            if same and need == needs:
                wanted = [part for part, needed in zip(expected, need, strict=True) if needed]
                recorded.is_trusted = _are_close(recorded.launch_backward(g), wanted)
                if not recorded.is_trusted:
                    self._refuse(ValueError("a replay gave other gradients"))
            return expected

        recorded.pending = weakref.ref(gradients)
        return record(output.array, tensors, gradients)

    def _refuse(self, error: Exception) -> None:
        """Record and replay nothing from now on."""
        self._is_refused = True
        _log.info("a model's work on a GPU is not repeated as a CUDA graph: %s", error)


def _replayed(
    recorded: _Recorded, tensors: tuple[Tensor, ...], needs: tuple[bool, ...], stream: Any
) -> Tensor | None:
    """Repeat the work of a call; return None if that is impossible now."""
    if not recorded.launch_forward(tensors[0].array, stream):
        return None
    output = recorded.results[0]
    if not any(needs):
        return Tensor(output.copy())

    def gradients(g: Array, _need: tuple[bool, ...]) -> list[Any]:
        return placed(recorded.launch_backward(g), needs)

    recorded.pending = weakref.ref(gradients)
    return record(output, tensors, gradients)


def _are_close(found: Sequence[Array], expected: Sequence[Array]) -> bool:
    """Return True if arrays are equal except for rounding errors; wait for the device.

    CUDA's libraries may add numbers in a different order in each run.
    """
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.size:
            continue
        same = (a == b) | ((a != a) & (b != b))
        distance = float(np.where(same, 0, abs(a - b)).max())
        size = float(np.where(b - b == 0, abs(b), 0).max())
        if not distance <= _ROUNDING[a.dtype.itemsize] * size:
            return False
    return True


#: The largest difference that counts as a rounding error, relative to the largest element. The keys
#: are the sizes of an element in bytes.
_ROUNDING = {2: 2e-2, 4: 1e-3, 8: 1e-8}


def _separate(found: list[Any], needs: Sequence[bool]) -> list[Array]:
    """Return the needed gradients as separate arrays in C order."""
    seen: set[int] = set()
    arrays: list[Array] = []
    for part, needed in zip(found, needs, strict=True):
        if not needed:
            continue
        if part is None or not hasattr(part, "data"):
            raise device.NotCapturedError("a gradient is not an array")
        array = array_module(part).ascontiguousarray(part)
        if array.data.ptr in seen:
            array = array.copy()
        seen.add(array.data.ptr)
        arrays.append(array)
    return arrays
