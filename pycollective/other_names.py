"""Names of mpi4py, Horovod and torch.distributed, for the suggestion after a misspelt name.

The tables in ``docs/reference/migration.md`` have these names with their arguments. A test compares
the two.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_METHODS = {
    "rank": "Get_rank get_rank",
    "size": "Get_size get_world_size",
    "all_reduce": "Allreduce allreduce",
    "all_reduce_many": "grouped_allreduce",
    "reduce": "Reduce",
    "broadcast": "Bcast",
    "broadcast_object": "bcast broadcast_object_list",
    "gather": "Gather Gatherv",
    "scatter": "Scatter Scatterv",
    "all_gather": "Allgather Allgatherv allgather all_gather_into_tensor",
    "all_gather_object": "allgather_object",
    "reduce_scatter": "Reduce_scatter_block reducescatter reduce_scatter_tensor",
    "all_to_all": "Alltoall Alltoallv alltoall all_to_all_single",
    "scan": "Scan",
    "exscan": "Exscan",
    "minloc": "MINLOC",
    "maxloc": "MAXLOC",
    "send": "Send",
    "recv": "Recv",
    "sendrecv": "Sendrecv Sendrecv_replace",
    "barrier": "Barrier monitored_barrier",
    "cart": "Create_cart Compute_dims",
    "split": "Split ProcessSet new_group",
    "close": "Free destroy_process_group",
    "abort": "Abort",
}
_OTHERS = {
    "init": "COMM_WORLD init_process_group",
    "Persistent": "Allreduce_init Send_init",
}

OURS = {name: f"Communicator.{ours}" for ours, names in _METHODS.items() for name in names.split()}
OURS |= {name: ours for ours, names in _OTHERS.items() for name in names.split()}
"""The package's name for each of the others' names."""

ABSENT = frozenset(
    "audio autodiff autograph bitwise debugging graph_util image io linalg lite lookup mlir profiler "
    "quantization queue ragged raw_ops saved_model sets signal sparse strings summary sysconfig test "
    "tpu version xla".split()
)
"""Packages of TensorFlow without a counterpart."""


def ours(name: str) -> str | None:
    """Return the package's name for a function of mpi4py, Horovod or torch.distributed, or None.

    A name with an additional ``I`` or ``_async`` is the asynchronous form of a call, and ``_init`` makes
    a persistent call.
    """
    if name.endswith("_init") and name.removesuffix("_init") in OURS:
        return "Persistent"
    forms = [name, name.removesuffix("_async")]
    if name[:1] in ("I", "i"):
        forms.append(name[1:].capitalize())
    return next((OURS[form] for form in forms if form in OURS), None)


def meant(name: str, public: Mapping[str, str]) -> str | None:
    """Return the most likely meaning of a missing name, a value of ``public``, or None.

    ``public`` has what stands for each name of the package.
    """
    plain = {_plain(one): stands for one, stands in public.items()}
    like = difflib.get_close_matches(_plain(name), plain, 1)
    return ours(name) or (plain[like[0]] if like else None)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
