"""Weights of a model in checkpoints of `tf.train.Checkpoint`."""

from __future__ import annotations

import warnings

from pycollective.errors import CheckpointError
from pycollective.keras.training.learner import Learner
from pycollective.train.checkpoint import Checkpoint
from pycollective.train.files import Contents, read_files
from pycollective.train.restoration import Plan, Restoration
from pycollective.train.trackable import children_of


def write_checkpoint(model: Learner, path: str) -> None:
    """Write a checkpoint of a model and its optimizer, and mark it as the latest in its folder."""
    chief = model.distribute_strategy.extended.should_checkpoint
    Checkpoint(model=model).write_recorded(path, chief)


def read_checkpoint(model: Learner, path: str, skip_mismatch: bool) -> None:
    """Restore a model and its optimizer from the best-fitting part of a checkpoint.

    The part is the checkpoint's root or a direct child of the root, regardless of its name. Values
    of variables that do not exist yet are restored when the variables are made.
    """
    contents = read_files(path)
    restoration = Restoration(path, contents)
    plans = {node: restoration.plan(model, node) for node in _candidates(contents)}
    weights = {id(weight): weight.name for weight in model.weights}
    present = children_of(model).keys()

    def fit(node: int) -> tuple[int, int]:
        assigned = sum(id(variable) in weights for variable, _ in plans[node].pairs)
        return assigned, len(present & contents.nodes[node].children.keys())

    best = max(plans, key=fit)
    parts = {node: name for name, node in contents.nodes[0].children.items()}
    alike = [name for node, name in parts.items() if fit(node) == fit(best)]
    if best in parts and len(alike) > 1 and fit(best) != (0, 0):
        raise CheckpointError(
            f"checkpoint {path!r} has several parts that fit model {model.name!r}: "
            f"{', '.join(alike)}. Restore the right one by its name, for example with "
            f"tf.train.Checkpoint({alike[0]}=model).restore(path)"
        )
    plan = plans[best]
    problems = plan.problems + _missing(plan, weights)
    if fit(best) == (0, 0) or problems:
        listed = "\n  ".join(problems[:10]) or "the checkpoint has other objects"
        text = f"checkpoint {path!r} does not fit model {model.name!r}:\n  {listed}"
        if not skip_mismatch or fit(best) == (0, 0):
            raise CheckpointError(f"{text}\nNothing was changed")
        warnings.warn(f"{text}\nThese were skipped", stacklevel=4)
    restoration.carry_out(plan)


def _candidates(contents: Contents) -> list[int]:
    """Return the nodes that may be the model: the root and its direct children."""
    return list(dict.fromkeys([0, *contents.nodes[0].children.values()]))


def _missing(plan: Plan, weights: dict[int, str]) -> list[str]:
    assigned = {id(variable) for variable, _ in plan.pairs}
    missing = [name for key, name in weights.items() if key not in assigned]
    if not missing or plan.problems:
        return []
    return [f"no value for {name}" for name in missing]
