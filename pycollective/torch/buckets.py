"""A communication hook of DDP whose buckets are in shared memory."""

# No `from __future__ import annotations`: PyTorch compares the hook's annotations with its classes.
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["shared_buckets"]


def shared_buckets(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average DDP's gradients in memory that all ranks of a host map: a communication hook of DDP.

    ``DistributedDataParallel(..., gradient_as_bucket_view=True)`` keeps the gradients in its buckets,
    and this hook moves the buckets to shared memory at the first step. Without that option the buckets
    stay in their own memory.

    Parameters
    ----------
    group : ProcessGroup or None
        The state of ``register_comm_hook``: the model's process group, or None for the default group.
    bucket : torch.distributed.GradBucket
        The bucket.

    Examples
    --------
    ::

        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        model.register_comm_hook(None, pycollective.torch.shared_buckets)
    """
    group = dist.group.WORLD if group is None else group
    backend = group._get_backend(torch.device("cpu"))
    whole = bucket.buffer()
    pairs = [
        (part, parameter.grad)
        for part, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True)
    ]
    if whole.data_ptr() in backend._buckets:
        for part, grad in pairs:
            if grad is None:
                part.zero_()
            elif grad.data_ptr() != part.data_ptr():  # the program has replaced the gradient
                part.copy_(grad)
    elif all(grad is not None and grad.data_ptr() == part.data_ptr() for part, grad in pairs):
        shared = backend.allocate_tensor(whole.numel(), dtype=whole.dtype, device=whole.device)
        shared.copy_(whole)
        backend._buckets.add(shared.data_ptr())
        for part, grad in pairs:
            place = part.storage_offset(), grad.size(), grad.stride()
            grad.set_(shared.untyped_storage(), *place)
        whole.set_(shared)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    done = backend.allreduce([whole], options).get_future()
    return done.then(lambda ended: ended.value()[0])
