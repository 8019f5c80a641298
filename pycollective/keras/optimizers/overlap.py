"""All-reduces of gradients that overlap with the computation of other gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective.distribute.interfaces import AnyContext
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.tensor import GradientTape, Tensor, Variable


def summed_gradients(
    context: AnyContext,
    tape: GradientTape,
    target: Any,
    variables: Sequence[Variable],
    scale: float | Tensor | None = None,
) -> tuple[list[Tensor | None], bool]:
    """Return the gradients of ``target``, and True if they are summed over the replicas.

    The all-reduce of a bucket begins when the tape has computed the gradients in the bucket. The
    buckets are those of `ReplicaContext.all_reduce`, so that the sums have the same bits. If the
    strategy cannot begin an all-reduce before all gradients exist, the gradients are not summed.
    """
    extended = context.strategy.extended
    options = extended.gradient_options
    likes = {i: variable.local().like().array for i, variable in enumerate(variables)}
    reduction = None
    # Gradients of rows have no buckets.
    if not any([getattr(variable, "_by_rows", False) for variable in variables]):
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
        # Other replicas wait for this replica's buckets, even if the caller catches the error.
        context.abort(
            f"replica {context.local_replica_id} could not compute its gradients: {error}"
        )
        raise
    missing = [place for place in likes if local[place] is None]
    for place in missing:
        reduction.add(number[place], np.zeros_like(likes[place]))
    with context.collective():
        totals = reduction.finish()
    if missing:
        # An operation on the tape gave no gradient. `all_reduce` puts only the existing gradients into
        # buckets, so its buckets differ from those of `reduction`, and so do the bits of the sums.
        # To get its bits, the caller must call `all_reduce` with the local gradients.
        return local, False
    summed: list[Tensor | None] = [None] * len(variables)
    for place, total in zip(likes, totals, strict=True):
        summed[place] = Tensor(total)
    return summed, True
