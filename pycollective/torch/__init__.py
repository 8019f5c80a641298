"""A backend for ``torch.distributed`` on CPUs: ``init_process_group("pycollective")``.

Needs PyTorch 2.13 or newer (``pip install 'pycollective[torch]'``). ``import pycollective.torch``
registers the backend. PyTorch 2.14 and newer find the entry point
``torch.distributed.backends``, and need no import.
"""

from __future__ import annotations

try:
    import torch.distributed as dist
except ImportError:
    raise ImportError(
        "pycollective.torch needs PyTorch: pip install 'pycollective[torch]'", name="torch"
    ) from None

from pycollective.torch.backend import ProcessGroup, create
from pycollective.torch.buckets import shared_buckets
from pycollective.torch.join import join
from pycollective.torch.work import Work

__all__ = ["ProcessGroup", "Work", "join", "register", "shared_buckets"]


def register() -> None:
    """Register the backend "pycollective" with ``torch.distributed``, for tensors on CPUs."""
    if "pycollective" not in dist.Backend.backend_list:
        dist.Backend.register_backend("pycollective", create, extended_api=True, devices=["cpu"])


register()
