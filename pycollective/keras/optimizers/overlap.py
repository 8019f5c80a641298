"""Gradients that are reduced while the tape still computes others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective.distribute.interfaces import AnyContext
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.tensor import GradientTape, Tensor, Variable

__all__ = ["summed_gradients"]


def summed_gradients(
    context: AnyContext,
    tape: GradientTape,
    target: Any,
    variables: Sequence[Variable],
    scale: float | Tensor | None = None,
) -> tuple[list[Tensor | None], bool]:
    """Return the gradients by variables, and whether they are summed over the replicas already.

    Buckets of gradients are sent on their way as soon as the tape has computed them, the same buckets
    as `ReplicaContext.all_reduce` makes of all of them, so that the sums are the same to the last bit.
    They are not summed where the strategy cannot begin before all are there.

    Parameters
    ----------
    context
        That of the replica that calls this; every replica must, with the same variables.
    tape
        What recorded the target.
    target
        The loss.
    variables
        Those that the target does not depend on have no gradient, in no replica.
    scale
        By what the gradients are multiplied, from their beginning.
    """
    extended = context.strategy.extended
    options = extended.gradient_options
    likes = {i: variable.local().current().array for i, variable in enumerate(variables)}
    reduction = extended.begin_reduction(context, list(likes.values()), ReduceOp.SUM, options)
    if reduction is not None:
        connected = tape.connected(target, variables)
        if not all(connected):
            likes = {i: like for i, like in likes.items() if connected[i]}
            reduction = extended.begin_reduction(
                context, list(likes.values()), ReduceOp.SUM, options
            )
    if reduction is None:
        return tape.gradient(target, list(variables), scale), False
    number = {place: k for k, place in enumerate(likes)}
    try:
        local = tape.gradient(
            target,
            list(variables),
            scale,
            ready=lambda place, gradient: reduction.add(number[place], gradient.array),
        )
    except BaseException as error:
        # The others wait for buckets that will not come, also where the user catches this.
        extended.abort_collectives(
            f"replica {context.local_replica_id} could not compute its gradients: {error}"
        )
        raise
    missing = [place for place in likes if local[place] is None]
    for place in missing:
        reduction.add(number[place], np.zeros_like(likes[place]))
    with context.collective():
        totals = reduction.finish()
    if missing:
        # An operation gave no gradient although it was recorded. Without it the buckets are others:
        # summed again, the result does not depend on whether there was anything to foresee.
        return local, False
    summed: list[Tensor | None] = [None] * len(variables)
    for place, total in zip(likes, totals, strict=True):
        summed[place] = Tensor(total)
    return summed, True
