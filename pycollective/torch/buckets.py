"""A communication hook of DDP whose buckets are in shared memory."""

# No `from __future__ import annotations`: PyTorch compares the hook's annotations with its classes.
from typing import Any

import torch
import torch.distributed as dist


def shared_buckets(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average DDP's gradients in memory that all ranks of a host map: a communication hook of DDP.

    The hook moves the buckets to shared memory at the first step. DDP's option
    ``gradient_as_bucket_view=True`` keeps the gradients in the buckets, which saves two more copies.

    Parameters
    ----------
    group : ProcessGroup or None
        The state of ``register_comm_hook``: the model's process group, or None for the default group.
    bucket : torch.distributed.GradBucket
        The bucket.

    Returns
    -------
    torch.futures.Future
        The future of the averaged gradients, a flat tensor.

    Examples
    --------
    ::

        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        model.register_comm_hook(None, pycollective.torch.shared_buckets)
    """
    group = dist.group.WORLD if group is None else group
    backend = group._get_backend(torch.device("cpu"))
    whole = bucket.buffer()
    backend.share(whole)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    done = backend.allreduce([whole], options).get_future()
    return done.then(lambda ended: ended.value()[0])
