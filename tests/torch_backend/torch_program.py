"""A program of several ranks, which test_torch_programs.py starts by torchrun."""

import contextlib
import functools
import gc
import itertools
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

if "WITHOUT_SOURCE_RANKS" in os.environ:
    # The package then makes a `Backend`, which loses the rank that sent a message.
    dist.Work._source_rank = lambda work: -1

import pycollective.torch
from pycollective import _core


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(steps, rank):
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(4, 8, generator=random), torch.randn(4, 4, generator=random)


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

    def wrap(network, group, in_buckets):
        wrapped = nn.parallel.DistributedDataParallel(
            network, process_group=group, gradient_as_bucket_view=in_buckets
        )
        is_ours = dist.get_backend(group) == "pycollective"
        if is_ours:
            wrapped.register_comm_hook(group, pycollective.torch.shared_buckets)
        first = next(network.parameters())
        for step, (x, y) in enumerate(batches(6, dist.get_rank())):
            network.zero_grad(set_to_none=bool(y[0, 0] > 0))
            nn.functional.mse_loss(wrapped(x), y).backward()
            if is_ours and step == 3:  # PyTorch has made its final buckets
                assert _core.is_shared(first.grad.numpy()) == in_buckets
            first.grad = first.grad.clone()
        if is_ours:
            assert group._get_backend(torch.device("cpu"))._shared
        return wrapped

    for in_buckets in (False, True):
        same_training(functools.partial(wrap, in_buckets=in_buckets))


def fsdp2_shared_memory():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def wrap(network, group):
        wrapped = fully_shard(network, mesh=DeviceMesh.from_group(group, "cpu"))
        if dist.get_backend(group) == "pycollective":
            wrapped.set_allocate_memory_from_process_group_for_comm(True)
        return wrapped

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
            wrapped = nn.parallel.DistributedDataParallel(network, process_group=group)
            wrapped.register_comm_hook(state(group), hook)
            return wrapped

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


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(network, group):
        return FullyShardedDataParallel(
            network, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
        )

    same_training(wrap)


def mesh_of(backend, *shape):
    """Return a mesh of all ranks whose groups have this backend."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks, groups = torch.arange(dist.get_world_size()).reshape(shape), []
    for dim, length in enumerate(shape):
        rows = ranks.movedim(dim, -1).reshape(-1, length).tolist()
        row_groups = [dist.new_group(row, backend=backend) for row in rows]
        groups += [g for row, g in zip(rows, row_groups, strict=True) if dist.get_rank() in row]
    if len(shape) == 1:
        return DeviceMesh.from_group(groups[0], "cpu")
    names = tuple(f"dim{dim}" for dim in range(len(shape)))
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)


def contribution(whole, op, place, length):
    """Return the tensor of the rank at ``place`` of ``length`` ranks.

    The reduction of all ranks' tensors by ``op`` is ``whole``.
    """
    match op:
        case "sum":
            return whole - 3 * (length - 1) if place == 0 else torch.full_like(whole, 3)
        case "product":
            return whole / 2 ** (length - 1) if place == 0 else torch.full_like(whole, 2)
        case "avg":
            return whole + 2 * place - (length - 1)
        case "max":
            return whole - place
    return whole + place


def dtensor():
    """Redistribute by all pairs of placements; compare with slices of the tensor, and with gloo."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    targets = [Shard(0), Shard(1), Replicate()]
    partial = [Partial(op) for op in ("sum", "avg", "max", "min", "product")]

    def moved(mesh, whole, before, after):
        """Return the result on this rank, and the gradient of this rank's part."""
        is_partial = [placement.is_partial() for placement in before]
        there = [Replicate() if p.is_partial() else p for p in before]
        part = distribute_tensor(whole, mesh, there, src_data_rank=None).to_local()
        for dim, placement in enumerate(before):
            if is_partial[dim]:
                place = mesh.get_local_rank(dim), mesh.size(dim)
                part = contribution(part, placement.reduce_op, *place)
        part = part.clone().requires_grad_()
        given = DTensor.from_local(
            part, mesh, before, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        result = given.redistribute(placements=after)
        assert result.placements == tuple(after)
        if any(is_partial) and before != [Partial("sum")] * len(before):
            # PyTorch does not define gradients for all of these placements.
            return result.to_local().detach(), None
        local = result.to_local()
        (local * local).sum().backward()
        return local.detach(), part.grad

    for shape in [(size,), (2, size // 2)][: 1 + (size == 4)]:
        meshes = [mesh_of(backend, *shape) for backend in ("pycollective", "gloo")]
        sources = [*itertools.product(targets, repeat=len(shape))]
        sources += [(p, *rest) for p in partial for rest in ((), (p,), (targets[1],))
                    if 1 + len(rest) == len(shape)]  # fmt: skip
        for rows, before, after in itertools.product(
            (2 * size, 2 * size + 1), sources, itertools.product(targets, repeat=len(shape))
        ):
            whole = torch.arange(6.0 * rows).reshape(rows, 6) + 1
            results = [moved(mesh, whole, list(before), list(after)) for mesh in meshes]
            expected = distribute_tensor(whole, meshes[0], list(after), src_data_rank=None)
            about = f"{shape} {rows} rows, {before} to {after}"
            for result, _ in results:
                torch.testing.assert_close(result, expected.to_local(), msg=about)
            torch.testing.assert_close(results[0][1], results[1][1], msg=about)
        a, b = torch.arange(1.0, 25).reshape(4, 6), torch.arange(30.0).reshape(6, 5)
        for left, right in itertools.product([*targets, partial[0]], repeat=2):
            pair = []
            for whole, placement in ((a, left), (b, right)):
                there = [Replicate()] * (len(shape) - 1) + [placement]
                if placement.is_partial():
                    place = meshes[0].get_local_rank(len(shape) - 1), shape[-1]
                    part = contribution(whole, "sum", *place)
                    pair.append(DTensor.from_local(part, meshes[0], there, run_check=False))
                else:
                    pair.append(distribute_tensor(whole, meshes[0], there))
            torch.testing.assert_close((pair[0] @ pair[1]).full_tensor(), a @ b)


def pipeline():
    """Train a step by each schedule of PyTorch's pipelines; compare with the whole model."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    size, rank, pieces = dist.get_world_size(), dist.get_rank(), 4 * dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * size)]
    x, y = torch.randn(2 * pieces, 8), torch.randn(2 * pieces, 8)
    expected = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
    expected.backward()
    grads = [[p.grad.clone() for p in layer.parameters()] for layer in layers]
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        for layer in layers:
            layer.zero_grad()
        if name in ("GPipe", "1F1B"):
            networks, count = {rank: nn.Sequential(*layers[2 * rank : 2 * rank + 2])}, size
        else:
            networks, count = {stage: layers[stage] for stage in (rank, rank + size)}, 2 * size
        device, group = torch.device("cpu"), dist.group.WORLD
        stages = [PipelineStage(net, stage, count, device, group=group)
                  for stage, net in networks.items()]  # fmt: skip
        schedule = get_schedule_class(name)(
            stages[0] if count == size else stages, pieces, loss_fn=nn.functional.mse_loss
        )
        losses = []
        given = (x,) if rank == 0 else ()
        last = {"target": y, "losses": losses} if rank == size - 1 else {}
        schedule.step(*given, **last)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), expected)
        for number, layer in enumerate(layers):
            if number in ([2 * rank, 2 * rank + 1] if count == size else networks):
                for p, grad in zip(layer.parameters(), grads[number], strict=True):
                    torch.testing.assert_close(p.grad, grad, msg=f"{name}, layer {number}")


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
    """Compiled functional collectives; by inductor too, if there is a compiler of C++."""
    from torch._inductor import cpp_builder, exc

    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD

    def work(x):
        total = functional.all_reduce(x, "sum", group)
        parts = functional.reduce_scatter_tensor(total.repeat(size), "sum", 0, group)
        whole = functional.all_gather_tensor(parts, 0, group) + 1
        swapped = functional.all_to_all_single(whole * (rank + 1), None, None, group)
        sent = functional.broadcast(swapped, 1, group)
        most, _ = functional.all_reduce_coalesced([sent, x], "max", group)
        return whole, most * 2

    x = torch.arange(4.0) + rank
    total = sum(torch.arange(4.0) + r for r in range(size))
    whole = (size * total).repeat(size) + 1
    from_each = [whole.chunk(size)[1] * (r + 1) for r in range(size)]
    expected = whole, 2 * torch.cat(from_each)
    backends = ["eager", "aot_eager", "inductor"]
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        print("inductor was not tested: it needs a compiler of C++")
        backends.pop()
    torch.testing.assert_close(work(x), expected)
    for backend in backends:
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(work, backend=backend, fullgraph=True)(x), expected
        )


def api():
    size, rank = dist.get_world_size(), dist.get_rank()
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    right, left = (rank + 1) % size, (rank - 1) % size
    found = [None] * size if rank == 0 else None
    dist.gather_object((rank, "x"), found)
    assert rank or found == [(r, "x") for r in range(size)]
    given, got = [f"to {r}" for r in range(size)], [None]
    dist.scatter_object_list(got, given if rank == 0 else None, src=0)
    assert got == [f"to {rank}"]
    got = given if rank == 0 else [None] * size
    dist.broadcast_object_list(got, src=0)
    assert got == given
    if rank < 2:
        got = [{"rank": rank}] if rank == 0 else [None]
        move = dist.recv_object_list if rank else dist.send_object_list
        move(got, 1 - rank)
        assert got == [{"rank": 0}]
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
    ones = torch.ones(2)
    dist.all_reduce(ones, group=mesh.get_group("ranks"))
    assert ones.tolist() == [size, size]
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
    if hasattr(dist, "gather_single") and isinstance(
        dist.group.WORLD, pycollective.torch.ProcessGroup
    ):  # PyTorch 2.14 does not call it for backends of Python
        whole = torch.empty(3 * size) if rank == 1 else None
        dist.gather_single(torch.full((3,), float(rank)), whole, dst=1)
        assert whole is None or whole.tolist() == [r for r in range(size) for _ in range(3)]
    other = torch.ones(1, device="meta")
    try:
        dist.all_reduce(other)
    except TypeError as error:
        assert "cpu:pycollective,cuda:nccl" in str(error)
    else:  # PyTorch from 2.14 on chooses the backend itself
        assert not isinstance(dist.group.WORLD, pycollective.torch.ProcessGroup)
    dist.barrier()


def is_a_backend():
    """The group is PyTorch's own, which calls this package's `Backend`; see WITHOUT_SOURCE_RANKS."""
    assert type(dist.group.WORLD) is dist.ProcessGroup
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, torch._C._distributed_c10d.Backend)
    half = dist.group.WORLD.split_group([dist.get_rank()])
    x = torch.ones(2)
    dist.all_reduce(x)
    half.allreduce([x]).wait()
    assert half.size() == 1 and x.tolist() == [dist.get_world_size()] * 2
    try:
        backend.allreduce([torch.ones(2, device="meta")])
    except TypeError as error:
        assert "cpu:pycollective,cuda:nccl" in str(error), error
    else:
        raise AssertionError("a call with a tensor of another device succeeded")


def two_backends():
    """Each device has its own backend: PyTorch's backend "fake" stands for NCCL."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.destroy_process_group()
    store = dist.FileStore(os.environ["FILE"], -1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:pycollective,meta:fake", store=store, rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 2
    dist.all_reduce(torch.ones(2, device="meta"))


def with_accelerate():
    """Accelerate uses the process group that exists; it would make one of gloo itself."""
    import accelerate

    try:
        accelerate.Accelerator(
            cpu=True, kwargs_handlers=[accelerate.InitProcessGroupKwargs(backend="pycollective")]
        )
    except ValueError as error:
        assert "please use gloo" in str(error), error  # the page on PyTorch says so
        print("refused:", error)
    else:
        raise AssertionError("Accelerate takes the backend: change docs/how-to/pytorch.md")
    accelerate.state.PartialState._reset_state()
    if not dist.is_initialized():  # started by `accelerate launch`
        about = accelerate.utils.get_cpu_distributed_information()
        dist.init_process_group("pycollective", rank=about.rank, world_size=about.world_size)
    accelerator = accelerate.Accelerator(cpu=True)
    assert dist.get_backend() == "pycollective"
    assert accelerator.num_processes == dist.get_world_size()
    network, rank = model(), accelerator.process_index
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    data = torch.utils.data.TensorDataset(
        *(torch.cat(xs) for xs in zip(*batches(6, 0), strict=True))
    )
    network, optimizer, loader = accelerator.prepare(
        network, optimizer, torch.utils.data.DataLoader(data, 4)
    )
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(network(x), y))
        optimizer.step()
    accelerator.wait_for_everyone()
    rows = accelerator.gather(next(network.parameters()).detach()[None])
    assert torch.equal(rows[0], rows[1])
    assert accelerator.reduce(torch.tensor([rank + 1.0]), "mean").item() == 1.5
    assert accelerate.utils.gather_object([rank]) == [0, 1]
    assert accelerate.utils.broadcast_object_list([rank]) == [0]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1))
    assert padded.shape == (2,)
    with accelerator.split_between_processes([5, 6]) as part:
        assert part == [5 + rank]
    print(f"rank {rank} trained by Accelerate")


def with_lightning(how="popen"):
    """Train and validate by Lightning's Trainer, which starts the other ranks unless torchrun does."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = model()

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.mse_loss(self.network(x), y)

        def validation_step(self, batch, index):
            self.log("rank", float(self.global_rank), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

        def on_train_end(self):
            assert dist.get_backend() == "pycollective" and dist.get_world_size() == 2
            weights = nn.utils.parameters_to_vector(self.network.parameters()).detach()
            rows = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, weights)
            assert torch.equal(*rows)
            assert self.trainer.callback_metrics["rank"] == 0.5
            print(f"rank {self.global_rank} trained by {type(self.trainer.strategy).__name__}")

    if dist.is_initialized():
        dist.destroy_process_group()
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 4))
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="pycollective", start_method=how),
        max_epochs=1,
        default_root_dir=Path(os.environ["FILE"]).parent,
        **quiet,
    )
    module, loader = Module(), torch.utils.data.DataLoader(data, 4)
    trainer.fit(module, loader, loader)
    if how == "popen":  # in inference mode, which Lightning does not use with gloo
        assert trainer.validate(module, loader) == [{"rank": 0.5}]


def with_lightning_forks():
    with_lightning("fork")


def profiler():
    """Each call is an event from its start to the end of its work, which is in another thread."""
    size, rank, x = dist.get_world_size(), dist.get_rank(), torch.ones(2)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        sent = dist.isend(x, (rank + 1) % size)
        dist.recv(torch.empty(2))
        sent.wait()
    found = [e for e in profile.kineto_results.events() if e.name().startswith("pycollective:")]
    names = [e.name().removeprefix("pycollective:") for e in found]
    assert names == ["all_reduce", "all_reduce", "send", "recvAnySource"], names
    for event in found:
        assert event.end_thread_id() not in (0, event.start_thread_id()), event.name()
        assert event.shapes() == [[2]], event.shapes()


def open_things():
    """Return the names of this process's threads and the number of its open files."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append(path.read_text().strip())
    return Counter(names), len(os.listdir("/proc/self/fd"))


def assert_nothing_left(before):
    """Compare the threads and open files with those of ``before``, after time for threads to end."""
    gc.collect()
    threads, files = open_things()
    for _ in range(100):  # the system lists a thread a moment longer than Python
        if not threads - before[0]:
            break
        time.sleep(0.05)
        threads, files = open_things()
    assert not threads - before[0] and files <= before[1], (before, threads, files)


def groups_end():
    """A destroyed group leaves no thread and no open file; a forked child cannot use its groups."""
    before, kept = None, []
    for _ in range(3):
        group = dist.new_group(backend="pycollective")
        kept.append(group)  # as PyTorch keeps the groups of a DeviceMesh
        x = torch.ones(4)
        dist.all_reduce(x, group=group, async_op=True).get_future().wait()
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(x, group=group)
            except Exception as error:
                print("child:", error, flush=True)
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.all_reduce(x, group=group)
        assert x.tolist() == [dist.get_world_size() ** 2] * 4
        dist.destroy_process_group(group)
        dist.barrier()
        before = before or open_things()
        assert_nothing_left(before)


def lost_rank():
    """The first time, rank 1 ends in the loop; torchrun starts all ranks again."""
    mark = Path(os.environ["FILE"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may send SIGTERM before the error
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os._exit(3)
    x = torch.ones(1)
    for _ in range(10):
        dist.all_reduce(x)
    print(f"rank {dist.get_rank()} after attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")


def in_ddp(network):
    return nn.parallel.DistributedDataParallel(network)


def in_ddp_with_shared_buckets(network):
    wrapped = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, pycollective.torch.shared_buckets)
    return wrapped


def in_fsdp2(network):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(network, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def train_until_rank_1_is_lost(rank, size, wrap, where, address):
    """Rank 1 is killed in step 3. The others get an error that names it, and leave nothing behind."""
    nn.functional.mse_loss(model()(torch.ones(1, 8)), torch.ones(1, 4)).backward()
    before = open_things()
    dist.init_process_group("pycollective", init_method=address, rank=rank, world_size=size)
    network = wrap(model())
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    try:
        for step, (x, y) in enumerate(batches(100, rank)):
            if (rank, step, where) == (1, 3, "before forward"):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.mse_loss(network(x), y)
            if (rank, step, where) == (1, 3, "before backward"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    except RuntimeError as error:
        text = str(error)
        # PyTorch's C++ code makes a RuntimeError of a future's error.
        assert wrap is not in_fsdp2 or isinstance(error, dist.DistNetworkError), repr(error)
    assert step == 3 and "DistNetworkError: " * (wrap is not in_fsdp2) + "rank 1 is lost" in text
    try:
        dist.barrier()
    except dist.DistNetworkError as error:
        assert str(error).startswith("rank 1 is lost"), error
    else:
        raise AssertionError("a call after the error succeeded")
    dist.destroy_process_group()
    del network, optimizer, loss
    assert_nothing_left(before)


def lost_rank_in_training():
    from torch.distributed import fsdp  # noqa: F401  the ranks need no import of their own

    torch.optim.SGD(model().parameters())  # imports a part of PyTorch, too
    gc.freeze()
    fork = torch.multiprocessing.get_context("fork")
    mark = Path(os.environ["FILE"])
    for number, (wrap, where) in enumerate(
        [
            (in_ddp, "before backward"),
            (in_ddp_with_shared_buckets, "before backward"),
            (in_fsdp2, "before forward"),
            (in_fsdp2, "before backward"),
        ]
    ):
        address = f"file://{mark}{number}"
        ranks = [
            fork.Process(target=train_until_rank_1_is_lost, args=(rank, 3, wrap, where, address))
            for rank in range(3)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
            process.kill()
            process.join()
        codes = [process.exitcode for process in ranks]
        assert codes == [0, -signal.SIGKILL, 0], (wrap.__name__, where, codes)


def rank_main(rank, size, address):
    dist.init_process_group("pycollective", init_method=address, rank=rank, world_size=size)
    if address.startswith("file"):  # it has the group's secret
        assert os.stat(os.environ["FILE"]).st_mode & 0o777 == 0o600
    api()
    dist.destroy_process_group()


def spawned():
    """Start ranks by `torch.multiprocessing.spawn`; the rendezvous is at a file, then at a port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"file://{os.environ['FILE']}", f"tcp://127.0.0.1:{port}"):
        torch.multiprocessing.spawn(rank_main, (3, address), 3)


if __name__ == "__main__":
    tempfile.tempdir = os.environ.get("TMPDIR")
    if "RANK" in os.environ:  # from torchrun; without it, another package starts the ranks
        dist.init_process_group("pycollective")
    for name in sys.argv[1:]:
        globals()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()
