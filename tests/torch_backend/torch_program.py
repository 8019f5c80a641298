"""A program of several ranks, which test_torch_programs.py starts by torchrun."""

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import pycollective.torch


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(steps, rank):
    made = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(4, 8, generator=made), torch.randn(4, 4, generator=made)


def trained(network, group_rank, steps=200):
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    for x, y in batches(steps, group_rank):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()
    return network


def same_training(wrap):
    """Train with this backend and with gloo; compare the parameters."""
    found = []
    for name in ("pycollective", "gloo"):
        group = dist.new_group(backend=name)
        network = trained(wrap(model(), group), dist.get_rank())
        found.append([full(p) for p in network.parameters()])
    for ours, gloos in zip(*found, strict=True):
        torch.testing.assert_close(ours, gloos)


def full(parameter):
    whole = getattr(parameter, "full_tensor", None)
    return (whole() if whole else parameter).detach()


def ddp():
    wrap = nn.parallel.DistributedDataParallel
    same_training(lambda network, group: wrap(network, process_group=group))


def ddp_shared_buckets():
    """The hook moves the buckets; gradients that the program replaced are reduced, too."""

    def wrap(network, group):
        made = nn.parallel.DistributedDataParallel(
            network, process_group=group, gradient_as_bucket_view=True
        )
        if dist.get_backend(group) == "pycollective":
            made.register_comm_hook(group, pycollective.torch.shared_buckets)
        first = next(network.parameters())
        for x, y in batches(6, dist.get_rank()):
            network.zero_grad(set_to_none=bool(y[0, 0] > 0))
            nn.functional.mse_loss(made(x), y).backward()
            first.grad = first.grad.clone()
        if dist.get_backend(group) == "pycollective":
            assert group._get_backend(torch.device("cpu"))._buckets
        return made

    same_training(wrap)


def fsdp2_shared_memory():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def wrap(network, group):
        made = fully_shard(network, mesh=DeviceMesh.from_group(group, "cpu"))
        if dist.get_backend(group) == "pycollective":
            made.set_allocate_memory_from_process_group_for_comm(True)
        return made

    same_training(wrap)


def refused_by_old_versions():
    """Calls that PyTorch 2.13 refuses for all backends but its own."""
    timeout = timedelta(seconds=20)
    try:
        dist.monitored_barrier(timeout=timeout)
    except ValueError as error:
        print("refused:", error)
        dist.group.WORLD.monitored_barrier(timeout, wait_all_ranks=True)
    try:
        half = dist.split_group(split_ranks=[[0], [1]])
    except (RuntimeError, ValueError) as error:
        print("refused:", error)
        half = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = torch.ones(2)
    dist.all_reduce(x, group=half)
    assert x.tolist() == [1, 1] and dist.get_world_size(half) == 1
    whole = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(x, group=whole)
    assert x.tolist() == [2, 2]


def ddp_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def wrap(hook, state):
        def with_hook(network, group):
            made = nn.parallel.DistributedDataParallel(network, process_group=group)
            made.register_comm_hook(state(group), hook)
            return made

        return with_hook

    same_training(wrap(default_hooks.allreduce_hook, lambda group: group))
    same_training(wrap(default_hooks.fp16_compress_hook, lambda group: group))
    same_training(
        wrap(
            powerSGD_hook.powerSGD_hook,
            lambda group: powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=5),
        )
    )


def fsdp2():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def wrap(network, group):
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in network:
            fully_shard(layer, mesh=mesh)
        return fully_shard(network, mesh=mesh)

    same_training(wrap)


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(24.0).reshape(6, 4)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), x)
    assert torch.equal((rows.redistribute(placements=[Shard(1)]) + 1).full_tensor(), x + 1)
    product = rows.t() @ rows
    assert torch.equal(product.redistribute(placements=[Replicate()]).to_local(), x.t() @ x)


def tensor_parallel():
    """A step of the transformer with which PyTorch tests DTensor, with this backend and with gloo."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    words = torch.arange(16).reshape(2, 8) % 8
    found = []
    for name in ("pycollective", "gloo"):
        mesh = DeviceMesh.from_group(dist.new_group(backend=name), "cpu")
        torch.manual_seed(0)
        network = Transformer(ModelArgs(dropout_p=0.0))
        network = Transformer.parallelize(network, mesh, True, local_output_for_attn=True)
        result = network(words)
        result.sum().backward()
        found.append([full(result), *(full(p.grad) for p in network.parameters())])
    for ours, gloos in zip(*found, strict=True):
        torch.testing.assert_close(ours, gloos)


def functional_collectives():
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD

    def work(x):
        total = functional.all_reduce(x, "sum", group)
        parts = functional.reduce_scatter_tensor(total.repeat(size), "sum", 0, group)
        return functional.all_gather_tensor(parts, 0, group) + 1

    x = torch.arange(4.0) + rank
    expected = work(x)
    total = 4 * size * (size - 1) / 2
    assert expected.sum() == size * (size * (6 * size + total)) + 4 * size, expected
    assert torch.equal(torch.compile(work, backend="aot_eager", fullgraph=True)(x), expected)


def api():
    size, rank = dist.get_world_size(), dist.get_rank()
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, got = torch.full((3,), float(rank)), torch.empty(3)
    calls = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert got.tolist() == [left] * 3
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(sent, group=pair)
        assert sent.tolist() == [1] * 3
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as calls:
        ones = [torch.ones(2), torch.ones(3)]
        for tensor in ones:
            dist.all_reduce(tensor)
    calls.wait()
    assert [t.tolist() for t in ones] == [[size] * 2, [size] * 3]
    other = torch.ones(1, device="meta")
    try:
        dist.all_reduce(other)
    except TypeError as error:
        assert "cpu:pycollective,cuda:nccl" in str(error)
    else:  # PyTorch from 2.14 on chooses the backend itself
        assert not isinstance(dist.group.WORLD, pycollective.torch.ProcessGroup)
    dist.barrier()


def two_backends():
    """A device of its own backend: PyTorch's backend "fake" stands for NCCL."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.destroy_process_group()
    store = dist.FileStore(
        os.environ["FILE"], dist.get_world_size() if dist.is_initialized() else -1
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:pycollective,meta:fake", store=store, rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 2
    dist.all_reduce(torch.ones(2, device="meta"))


def with_accelerate():
    """Accelerate uses the process group that exists; it would make one of gloo itself."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    network, optimizer = accelerator.prepare(network, optimizer)
    for x, y in batches(5, dist.get_rank()):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(network(x), y))
        optimizer.step()
    assert accelerator.num_processes == dist.get_world_size()
    rows = accelerator.gather(next(network.parameters()).detach()[None])
    assert torch.equal(rows[0], rows[1])


def with_lightning():
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = model()

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.mse_loss(self.network(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

        def on_train_end(self):
            assert dist.get_backend() == "pycollective"
            mine = nn.utils.parameters_to_vector(self.network.parameters()).detach()
            rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, mine)
            assert torch.equal(*rows)
            print("trained by", type(self.trainer.strategy).__name__)

    dist.destroy_process_group()
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 4))
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="pycollective"),
        max_epochs=1,
        **quiet,
    ).fit(Module(), torch.utils.data.DataLoader(data, 4))


def lost_rank():
    """The first time, rank 1 ends in the loop; torchrun starts all ranks again."""
    mark = Path(os.environ["FILE"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come before the error
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os._exit(3)
    x = torch.ones(1)
    for _ in range(10):
        dist.all_reduce(x)
    print(f"rank {dist.get_rank()} after attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")


if __name__ == "__main__":
    tempfile.tempdir = os.environ.get("TMPDIR")
    dist.init_process_group("pycollective")
    for name in sys.argv[1:]:
        globals()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()
