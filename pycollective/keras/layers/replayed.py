"""Replay of consecutive layers: their kernels are recorded once, and then run in one call.

Only layers whose outputs are a function of their inputs and variables alone are replayed. The values
that layers assign to variables, such as moving averages, are outputs of the record, and each replay
assigns them. The compiled module records the kernels, and refuses a record that misses an operation. A
record is used only after one replay of it gave the same bits as the layers, for the outputs and for all
gradients.
"""

from __future__ import annotations

import inspect
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from pycollective import _nn as kernels
from pycollective.array_backend import Array, in_c_order
from pycollective.config import functions_run_eagerly
from pycollective.distribute.variables import MirroredVariable, SyncOnReadVariable
from pycollective.keras import activations
from pycollective.keras.layers import (
    ELU,
    Activation,
    AveragePooling2D,
    BatchNormalization,
    Conv2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    Flatten,
    Layer,
    LeakyReLU,
    MaxPooling2D,
    ReLU,
    Reshape,
    Softmax,
)
from pycollective.keras.layers.layer import assignments_in_calls, training_of_call
from pycollective.tensor import Tensor, Variable
from pycollective.tensor.captured import Gradients, placed, taped
from pycollective.tensor.function import record_listers
from pycollective.tensor.tape import needs_of, record, thread_state
from pycollective.tensor.variable import reads
from pycollective.workspace import SMALLEST_RESULT, workspace

#: The layers that kernels compute. Their subclasses may compute something else.
LAYERS = frozenset(
    (
        *(Activation, AveragePooling2D, BatchNormalization, Conv2D, Dense, DepthwiseConv2D, ELU),
        *(Flatten, LeakyReLU, MaxPooling2D, ReLU, Reshape, Softmax),
    )
)
#: For some of these layers: a function and its condition in words. The function returns True if
#: kernels that can be recorded compute the whole layer.
_FITS: dict[type[Layer], tuple[Callable[[Any], bool], str]] = {
    BatchNormalization: (
        lambda layer: not layer.synchronized and layer.axis in (-1, 3),
        "is recorded over the last axis and without synchronized=True only",
    ),
    Conv2D: (lambda layer: layer.groups == 1, "is recorded with groups=1 only"),
    DepthwiseConv2D: (
        lambda layer: layer.depth_multiplier == 1 and not layer.use_bias,
        "is recorded with depth_multiplier=1 and use_bias=False only",
    ),
}
_ACTIVATIONS = [getattr(activations, name) for name in activations.__all__]
_VARIABLES = (Variable, MirroredVariable, SyncOnReadVariable)
#: Numbers of calls with inputs of one shape, of all replicas together. The first `_BEFORE` calls are
#: not recorded. After `_UNTIL` calls without a trusted record, recording stops: a program that never
#: computes the gradients of its calls would otherwise record every call.
_BEFORE, _UNTIL = 2, 64
#: The largest number of input shapes whose records are kept.
_SHAPES = 8
#: Limits in bytes. Large layers spend little of their time in Python, so a replay gains little. A
#: replay also completes all gradients at its end only, which leaves no time to overlap their
#: all-reduce.
_MOST_OF_VARIABLES = 8 << 20
_MOST_OF_MEMORY = 32 << 20


#: Reasons why steps are called from Python.
_OTHER_GRADIENTS = "the program needs other gradients than the recorded ones"
_OTHER_BITS = "a replay gave other bits"
ITS_ARGUMENT = "softmax or sigmoid ends it, and losses need their argument"
_NOT_ON_HOST = "an array is not in the memory of the host"

#: The folder of this package; the frames of its functions are not the program's.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")

#: All objects of `Replayed` that the program has.
_all: weakref.WeakSet[Replayed] = weakref.WeakSet()
_all_lock = threading.Lock()

_changes_of = operator.attrgetter("_changes")
_array_of = operator.attrgetter("array")


def has_known_activation(layer: Layer) -> bool:
    """Return True if a layer's activation, if it has one, is one of this package's functions."""
    activation = getattr(layer, "activation", activations.linear)
    return any(activation is known for known in _ACTIVATIONS)


def obstacle_of(layer: Layer) -> str:
    """Return the reason why a layer's kernels are not recorded; "" if they can be recorded."""
    kind = type(layer)
    if kind not in LAYERS:
        return f"the kernels of {kind.__name__} are not recorded"
    if layer.activity_regularizer is not None:
        return "it has an activity_regularizer"
    if not has_known_activation(layer):
        return "its activation is not one of this package's functions"
    fits, condition = _FITS.get(kind, (None, ""))
    return "" if fits is None or fits(layer) else f"{kind.__name__} {condition}"


def can_replay(layer: Layer) -> bool:
    """Return True if a layer's output is a function of its input and variables that kernels compute."""
    return not obstacle_of(layer)


def gives_probabilities(layer: Layer) -> bool:
    """Return True if a layer ends with softmax or sigmoid, whose argument losses need.

    A replay returns no internal arrays. So such a layer does not end a record.
    """
    last = getattr(layer, "activation", None)
    return type(layer) is Softmax or last in (activations.softmax, activations.sigmoid)


def is_dropout(layer: Any) -> bool:
    """Return True for `Dropout`, which returns its input in inference."""
    return type(layer) is Dropout and layer.activity_regularizer is None


class _Results(NamedTuple):
    """The results of the steps, called from Python."""

    output: Array
    gradients: Gradients
    #: The variables that the layers assigned, with the values.
    assigned: list[tuple[Variable, Tensor]]

    def arrays(self) -> list[Array]:
        """Return the output and the assigned values."""
        return [self.output, *(value.array for _, value in self.assigned)]


class _Recorded:
    """A record, and the shapes and dtypes of the arrays that its replays need."""

    def __init__(
        self, kernel_calls: kernels.Record, results: _Results, needs: tuple[bool, ...]
    ) -> None:
        self.calls = kernel_calls
        #: The size of a replay's working memory, in bytes.
        self.memory = 0
        self.output = results.output.shape, results.output.dtype
        #: The variables that the layers assign, and the shapes and dtypes of their new values.
        self.assigned = [variable for variable, _ in results.assigned]
        self.values = [(value.array.shape, value.array.dtype) for _, value in results.assigned]
        #: For the input and each variable: True if the record has its gradient.
        self.needs = needs
        #: The shape and dtype of each gradient, and True if it is too small for the workspace.
        self.gradients: list[tuple[tuple[int, ...], np.dtype[Any], bool]] = []


class _Known:
    """The state of the calls with inputs of one shape: their number, and their record."""

    def __init__(self) -> None:
        self.calls = 0
        #: The reason why the steps are called from Python from now on; "" if they are not.
        self.refused = ""
        self.recorded: _Recorded | None = None
        #: The place in the program whose call was recorded, and the code of all functions around it.
        self.place = ""
        self.callers: frozenset[CodeType] = frozenset()
        #: The record, after one replay of it gave the same bits as the layers.
        self.trusted: _Recorded | None = None


class Replayed:
    """Consecutive steps of a model as one step, which replays their kernels.

    Parameters
    ----------
    steps
        The steps: functions of a tensor.
    layers
        The layers of the steps.
    in_training
        False if the steps are only called in inference. `Dropout` may then be among the layers.
    """

    def __init__(
        self, steps: Sequence[Any], layers: Sequence[Layer], in_training: bool = True
    ) -> None:
        self._in_training = in_training
        self._steps = list(steps)
        self._layers = list(layers)
        self._changes = -1
        #: The reason why the present layers are called from Python, or "".
        self._obstacle = ""
        self._variables: list[Variable] = []
        self._on_read: list[SyncOnReadVariable] = []
        self._known: dict[Any, _Known] = {}
        self._was_skipped = False
        with _all_lock:
            _all.add(self)

    def ordinary(self, inputs: Any) -> Any:
        """Return the output of the steps, called one after the other."""
        for step in self._steps:
            inputs = step(inputs)
        return inputs

    def __call__(self, inputs: Any) -> Any:
        """Return the output; gradients on one tape are replayed too."""
        if (
            inputs.__class__ is not Tensor
            or inputs.array.__class__ is not np.ndarray
            or thread_state.eagerly
            or functions_run_eagerly()
            or thread_state.reads_as is not None
        ):
            self._was_skipped = True
            return self.ordinary(inputs)
        changes = sum(map(_changes_of, self._layers))
        if changes != self._changes:
            self._find_variables(changes)
        array = inputs.array
        # `bool` instead of `recording`, which would cost a call.
        key = array.shape, array.dtype, bool(thread_state.tapes), training_of_call()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _SHAPES:
                self._known.clear()
            known = self._known[key] = _Known()
        if known.refused or known.calls < _BEFORE or not self._variables:
            known.calls += 1
            return self.ordinary(inputs)
        variables = self._variables
        if not all([variable.is_local() for variable in self._on_read]):
            return self.ordinary(inputs)
        tensors = (inputs, *reads(variables))
        needs = needs_of(tensors)
        if needs is None:
            return self.ordinary(inputs)
        recorded = known.trusted
        if recorded is None:
            return self._call_steps(known, (inputs, *variables), tensors, needs)
        replay = kernels.Replay(recorded.calls, workspace.empty((recorded.memory,), np.uint8))
        output = workspace.empty(*recorded.output)
        values = [np.empty(*about) for about in recorded.values]
        if recorded.needs != needs or not replay.run(
            list(map(_array_of, tensors)), [output, *values]
        ):
            return self.ordinary(inputs)
        for variable, value in zip(recorded.assigned, values, strict=True):
            variable.assign(Tensor(value))

        def vjp(g: Array, need: tuple[bool, ...]) -> list[Any]:
            # The record holds the gradients of `needs` only. Later calls run from Python.
            if need != needs:
                known.refused = known.refused or _OTHER_GRADIENTS
            return placed(_gradients_of(replay, recorded, g, workspace.empty), needs)

        return record(output, tensors, vjp)

    def _find_variables(self, changes: int) -> None:
        """Forget all records, and find the variables, after a change of a layer's attributes."""
        self._changes = changes
        self._known = {}
        variables = [v for layer in self._layers for v in layer._own_variables()]
        self._obstacle = self._find_obstacle(variables)
        self._variables = [] if self._obstacle else variables
        self._on_read = [v for v in self._variables if isinstance(v, SyncOnReadVariable)]

    def _find_obstacle(self, variables: list[Any]) -> str:
        if len(set(map(id, self._layers))) < len(self._layers):
            return "a layer occurs twice"
        for layer in self._layers:
            obstacle = obstacle_of(layer) if layer.built else "it is not built"
            if obstacle and (self._in_training or not (layer.built and is_dropout(layer))):
                return f"{layer.name}: {obstacle}"
        if gives_probabilities(self._layers[-1]):
            return f"{self._layers[-1].name}: {ITS_ARGUMENT}"
        if not variables:
            return "the layers have no variables"
        for variable in variables:
            if type(variable) not in _VARIABLES:
                return f"the variable {variable.name} is a {type(variable).__name__}"
        count = sum([v.local().like().array.nbytes for v in variables])
        if count > _MOST_OF_VARIABLES:
            return f"the variables have {count:,} bytes, more than {_MOST_OF_VARIABLES:,}"
        return ""

    def lines(self, by: CodeType | None = None) -> Iterator[str]:
        """Yield a line of text for each shape of inputs.

        With ``by``, yield only lines about records that were made in calls of the function with
        this code.
        """
        if self._obstacle and by is None:
            yield f"runs from Python: {self._obstacle}"
            return
        if self._was_skipped and not self._known and by is None:
            yield (
                "runs from Python: under mixed precision, if functions run eagerly, and if the input is "
                "not a NumPy array"
            )
        for (shape, dtype, with_tape, training), known in list(self._known.items()):
            if by is not None and by not in known.callers:
                continue
            recorded = known.trusted
            if known.refused:
                state = f"runs from Python: {known.refused}"
            elif recorded is None:
                state = f"not replayed yet; calls so far: {known.calls}"
            else:
                state = f"replayed, with {recorded.memory:,} bytes of memory"
            if known.place:
                state += f"; recorded at {known.place}"
            mode = f"{'training' if training else 'inference'}{', with a tape' * with_tape}"
            yield f"input {dtype}{list(shape)}, {mode}: {state}"

    @property
    def names(self) -> str:
        """The names of the layers."""
        return ", ".join(layer.name for layer in self._layers)

    def _call_steps(
        self,
        known: _Known,
        sources: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        needs: tuple[bool, ...],
    ) -> Tensor:
        """Call the steps, and record their kernels, or compare the bits with those of a replay.

        The sources are the input and the variables; the tensors are their values.
        """
        known.calls += 1
        arrays = [tensor.array for tensor in tensors]
        on_host = all(a.__class__ is np.ndarray for a in arrays)
        if known.calls > _UNTIL or not on_host:
            known.refused = (
                f"the gradients of {_UNTIL} calls were not computed" if on_host else _NOT_ON_HOST
            )
            output: Tensor = self.ordinary(tensors[0])
            return output
        compare = known.recorded is not None
        call = self._compare if compare else self._record
        array, gradients = call(known, sources, tensors, arrays, needs)
        return record(array, tensors, gradients)

    def _record(
        self,
        known: _Known,
        sources: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        arrays: list[Array],
        needs: tuple[bool, ...],
    ) -> tuple[Array, Gradients]:
        """Return the output and its gradients, and record their kernels."""
        calls = kernels.Record()
        known.place, known.callers = _place()
        begun = calls.begin(arrays)
        try:
            with workspace.fresh():
                results = self._results(sources, tensors, needs)
        finally:
            calls.stop()
        arrays = results.arrays()
        if not (begun and all(a.__class__ is np.ndarray for a in arrays) and calls.end(arrays)):
            known.refused = calls.refusal or _NOT_ON_HOST
        recorded = _Recorded(calls, results, needs)
        if not any(needs):
            _finish(known, recorded)

        def gradients(g: Array, need: tuple[bool, ...]) -> list[Any]:
            if known.refused or need != needs:
                known.refused = known.refused or _OTHER_GRADIENTS
                return results.gradients(g, need)
            begun = calls.begin([in_c_order(g)])
            try:
                with workspace.fresh():
                    found = results.gradients(g, need)
            finally:
                calls.stop()
            parts = [part for part, needed in zip(found, needs, strict=True) if needed]
            if begun and all(part.__class__ is np.ndarray for part in parts) and calls.end(parts):
                recorded.gradients = [
                    (part.shape, part.dtype, part.nbytes < SMALLEST_RESULT) for part in parts
                ]
                _finish(known, recorded)
            else:
                known.refused = calls.refusal or _NOT_ON_HOST
            return found

        return results.output, gradients

    def _compare(
        self,
        known: _Known,
        sources: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        arrays: list[Array],
        needs: tuple[bool, ...],
    ) -> tuple[Array, Gradients]:
        """Return the output and its gradients, and compare their bits with those of a replay."""
        recorded = known.recorded
        assert recorded is not None
        results = self._results(sources, tensors, needs)
        replay = kernels.Replay(
            recorded.calls, _filled_with_nan((recorded.memory,), np.dtype(np.uint8))
        )
        found = [_filled_with_nan(*about) for about in (recorded.output, *recorded.values)]
        assigned = [variable for variable, _ in results.assigned]
        same = recorded.needs == needs and list(map(id, recorded.assigned)) == list(
            map(id, assigned)
        )
        same = same and replay.run(arrays, found) and _same_bits(found, results.arrays())
        if not same:
            known.refused = _OTHER_BITS
        elif not any(needs):
            _trust(known, recorded)

        def gradients(g: Array, need: tuple[bool, ...]) -> list[Any]:
            expected = results.gradients(g, need)
            if known.refused or need != needs:
                known.refused = known.refused or _OTHER_GRADIENTS
                return expected
            found = _gradients_of(replay, recorded, g, _filled_with_nan)
            parts = [part for part, needed in zip(expected, needs, strict=True) if needed]
            if _same_bits(found, parts):
                _trust(known, recorded)
            else:
                known.refused = _OTHER_BITS
            return expected

        return results.output, gradients

    def _results(
        self, sources: tuple[Any, ...], tensors: tuple[Tensor, ...], needs: tuple[bool, ...]
    ) -> _Results:
        """Call the steps; return all that they compute."""
        with assignments_in_calls() as assigned:
            output, gradients = taped(self.ordinary, sources, tensors, needs)
        return _Results(output.array, gradients, assigned)


def _place() -> tuple[str, frozenset[CodeType]]:
    """Return the line of the program that runs, and the code of the program's functions around it."""
    frame = inspect.currentframe()
    place, callers = "", set()
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            place = place or f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
            callers.add(code)
        frame = frame.f_back
    return place, frozenset(callers)


def records_by(code: CodeType) -> str:
    """Return a text with all records that were made in calls of a function with this code."""
    with _all_lock:
        found = list(_all)
    lines: list[str] = []
    for replayed in found:
        of_one = [f"  {line}" for line in replayed.lines(code)]
        lines += [replayed.names, *of_one] if of_one else []
    return "\n".join(lines)


record_listers.append(records_by)


def _finish(known: _Known, recorded: _Recorded) -> None:
    """Keep a complete record, unless a replay is impossible or needs too much memory."""
    if not known.refused:
        recorded.memory = recorded.calls.plan()
        if recorded.memory > _MOST_OF_MEMORY:
            known.refused = (
                f"a replay needs {recorded.memory:,} bytes of memory, more than {_MOST_OF_MEMORY:,}"
            )
        known.recorded = recorded


def _trust(known: _Known, recorded: _Recorded) -> None:
    """Use a record from now on, and free the blocks of other sizes that the steps needed."""
    workspace.drop_idle()
    known.trusted = recorded


def _gradients_of(
    replay: kernels.Replay,
    recorded: _Recorded,
    g: Array,
    memory: Callable[[tuple[int, ...], Any], Array],
) -> list[Array]:
    """Replay the gradients into new arrays, which ``memory`` makes from a shape and a dtype."""
    # The workspace keeps no results as small as these.
    small_memory = np.empty if memory == workspace.empty else memory
    found = [
        (small_memory if small else memory)(shape, dtype)
        for shape, dtype, small in recorded.gradients
    ]
    if not replay.run([in_c_order(g)], found):
        raise RuntimeError(
            f"a gradient of shape {g.shape} and dtype {g.dtype} does not fit the recorded output "
            f"{recorded.output}; this is a bug in pycollective"
        )
    return found


def _filled_with_nan(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of NaN (bytes of 255): an element that no kernel writes then differs."""
    array: Array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 255
    return array


def _same_bits(found: Sequence[Array], expected: Sequence[Array]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(found, expected, strict=True)
    )
