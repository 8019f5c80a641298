"""`verify_equivalence`: a comparison of the gradients of N replicas with those of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import to_numpy
from pycollective.distribute.context import current_mode
from pycollective.distribute.interfaces import AnyStrategy
from pycollective.distribute.loss_scaling import compute_average_loss
from pycollective.distribute.values import PerReplica
from pycollective.tensor import GradientTape, Tensor, Variable, as_tensor
from pycollective.tensor import ops as tensor_ops

Loss = Callable[[Any, Any], Any]


@dataclass(eq=False)
class EquivalenceReport:
    """The differences between the gradients of N replicas and those of one.

    Attributes
    ----------
    replicas : int
        The number of replicas, N.
    differences : dict of str to float
        For each variable, by name: the largest difference divided by the largest absolute value of the
        gradient of one replica. Infinite if only one side has a gradient, or if one is not finite.
    tolerances : dict of str to float
        The largest allowed difference for each variable.
    """

    replicas: int
    differences: dict[str, float]
    tolerances: dict[str, float]

    @property
    def ok(self) -> bool:
        """True if every difference is within its tolerance."""
        return all(d <= self.tolerances[name] for name, d in self.differences.items())

    @property
    def largest(self) -> float:
        """The largest difference; 0 without variables."""
        return max(self.differences.values(), default=0.0)

    def __str__(self) -> str:
        """Return a line for each variable, the largest difference first."""
        width = max(map(len, self.differences), default=0)
        lines = [f"gradients of {self.replicas} replicas against one, largest relative difference:"]
        for name, difference in sorted(self.differences.items(), key=lambda item: -item[1]):
            allowed = self.tolerances[name]
            mark = "" if difference <= allowed else f"  more than {allowed:.2g}"
            lines.append(f"  {name:{width}}  {difference:.2e}{mark}")
        return "\n".join(lines)


class EquivalenceError(AssertionError):
    """The gradients differ by more than the tolerance.

    Attributes
    ----------
    report : EquivalenceReport
        All differences.
    """

    def __init__(self, report: EquivalenceReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return (
            f"{self.report}\nIn each replica, a layer that uses several examples (batch normalization) "
            "sees other examples, and a layer that draws random numbers draws others. A loss must "
            "return a value for each example, not their mean."
        )


def verify_equivalence(
    model: Any,
    batch: Any,
    loss: Loss | None = None,
    *,
    strategy: AnyStrategy | None = None,
    training: bool = False,
    tolerance: float | None = None,
) -> EquivalenceReport:
    """Compare the gradients that all replicas compute together with those of one replica.

    The batch is divided as by `Strategy.experimental_distribute_dataset`. Each replica's loss is divided
    by the global batch size, and gradients are summed over the replicas. One replica gets the whole
    batch. No variable changes.

    Parameters
    ----------
    model : callable
        A model, or another callable with ``trainable_variables``, made in the strategy's scope.
    batch
        ``(inputs, targets)``, or only inputs without ``loss``; the first axis is the examples. An
        element of a distributed dataset is accepted, too.
    loss : callable, optional
        ``loss(targets, outputs)`` returns a value for each example: a function, or a loss object with
        ``Reduction.NONE``. By default the sum of the squares of an example's outputs.
    strategy : Strategy, optional
        The strategy; by default that of the model's variables, else the current one.
    training : bool
        An argument of the model.
    tolerance : float, optional
        The largest relative difference; by default 1000 times the precision of the variable's dtype.

    Returns
    -------
    EquivalenceReport
        The difference for each variable.

    Raises
    ------
    EquivalenceError
        A difference exceeds the tolerance. The class is an AssertionError.
    ValueError
        The batch cannot be divided, or the loss has no value for each example.

    Examples
    --------
    >>> print(tf.distribute.verify_equivalence(model, (images, labels), loss_object))
    gradients of 4 replicas against one, largest relative difference:
      ...
    """
    strategy = _owner(model, strategy)
    arrays = nest.map_structure(_array, batch)
    if strategy is not None and any(isinstance(v, PerReplica) for v in nest.flatten(batch)):
        # Each worker has its part of a distributed batch.
        workers = strategy.extended.workers
        arrays = nest.map_structure(lambda array: workers.gather(array, 0)[0], arrays)
    rows = _rows(arrays)
    whole = nest.map_structure(Tensor, arrays)

    def gradients(part: Any, replicas: int) -> list[Any]:
        with GradientTape() as tape:
            inputs, targets = part if loss is not None else (_inputs(part), None)
            outputs = model(inputs, training=training)
            per_example = _squares(outputs) if loss is None else loss(targets, outputs)
            total = compute_average_loss(per_example, global_batch_size=rows)
            for regularization in getattr(model, "losses", ()):
                total = total + regularization / float(replicas)
        return list(tape.gradient(total, list(model.trainable_variables)))

    if not getattr(model, "built", True):
        model(_inputs(whole), training=False)
    with _restored(getattr(model, "non_trainable_variables", ())):
        one = gradients(whole, 1)
        variables = list(model.trainable_variables)
        strategy = _owner(model, strategy)
        replicas = 1 if strategy is None else strategy.extended.num_replicas_in_sync

        def reduced(part: Any) -> list[Any]:
            mode = current_mode()
            assert mode is not None and mode.replica_context is not None
            # A missing gradient is not reduced.
            found = gradients(part, replicas)
            values = [as_tensor(g) for g in found if g is not None]
            sums = iter(mode.replica_context.all_reduce("SUM", values))
            return [None if g is None else next(sums) for g in found]

        if strategy is None:
            results: list[Any] = [(gradient,) for gradient in gradients(whole, 1)]
        else:
            reductions = strategy.run(reduced, args=(_split(arrays, rows, strategy),))
            results = [strategy.experimental_local_results(value) for value in reductions]
    differences, tolerances = {}, {}
    for i, variable in enumerate(variables):
        name = variable.name if variable.name not in differences else f"{variable.name} ({i})"
        differences[name] = max(_difference(one[i], gradient) for gradient in results[i])
        tolerances[name] = 1000 * _rounding(variable.dtype) if tolerance is None else tolerance
    report = EquivalenceReport(replicas, differences, tolerances)
    if not report.ok:
        raise EquivalenceError(report)
    return report


@contextmanager
def _restored(variables: Iterable[Variable]) -> Iterator[None]:
    """Restore the values of the variables at the end, such as moving means."""
    parts = [part for variable in variables for part in getattr(variable, "values", (variable,))]
    kept = [part.numpy() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, kept, strict=True):
            part.assign(value)


def _array(value: Any) -> Any:
    """Return a part of the batch as an array, with the replicas' parts concatenated."""
    if isinstance(value, PerReplica):
        value = tensor_ops.concat(list(value.values), 0)
    return as_tensor(value).array


def _rows(arrays: Any) -> int:
    shapes = [array.shape for array in nest.flatten(arrays)]
    if not shapes or any(shape == () or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            f"every part of the batch must have the examples as its first axis, got shapes {shapes}"
        )
    return int(shapes[0][0])


def _owner(model: Any, strategy: AnyStrategy | None) -> Any:
    """Return the given strategy, or that of the model's variables, or the current one."""
    if strategy is not None:
        return strategy
    mode = current_mode()
    owners = [getattr(v, "_distribute_strategy", None) for v in model.trainable_variables]
    owners.append(None if mode is None else mode.strategy)
    return next((owner for owner in owners if owner is not None), None)


def _split(arrays: Any, rows: int, strategy: AnyStrategy) -> Any:
    """Divide the rows among all replicas, and return the parts of this process's replicas."""
    extended = strategy.extended
    part, first = -(-rows // extended.num_replicas_in_sync), extended.first_replica
    here = range(first, first + extended.num_local_replicas)

    def cut(array: Any) -> PerReplica:
        return PerReplica([Tensor(array[r * part : (r + 1) * part]) for r in here])

    return nest.map_structure(cut, arrays)


def _rounding(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7  # bfloat16


def _inputs(part: Any) -> Any:
    return part[0] if isinstance(part, tuple) and len(part) == 2 else part


def _squares(outputs: Any) -> Any:
    """Return the sum of squares of each example's outputs."""
    total: Any = 0.0
    for output in nest.flatten(outputs):
        axes = list(range(1, len(output.shape)))
        total = total + tensor_ops.reduce_sum(tensor_ops.square(output), axis=axes)
    return total


def _difference(one: Any, many: Any) -> float:
    if one is None or many is None:
        return 0.0 if one is many else float("inf")
    reference = to_numpy(as_tensor(one).array).astype(np.float64)
    error = float(np.max(np.abs(to_numpy(as_tensor(many).array) - reference), initial=0.0))
    if error == 0.0:
        return 0.0
    scale = float(np.max(np.abs(reference), initial=0.0))
    return error / scale if np.isfinite(error) and scale else float("inf")
