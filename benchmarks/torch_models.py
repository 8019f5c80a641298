"""Train two models of PyTorch with the backend "pycollective" and with gloo, beside each other.

    python benchmarks/torch_models.py [--models resnet18 transformer] [--wraps ddp fsdp2] [--ranks 2]
                                      [--steps 200] [--batch 8] [--json FILE]

Both backends train in the same processes, a step each in turns, from equal parameters and with equal
data. The report has the median time of a step, without the first steps. It also has the largest
difference between the parameters of the two backends after the last step. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from compare_torch import BACKENDS, processor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import pycollective.torch

WARMUP = 3


class Block(nn.Module):
    """Two convolutions, and the input added to their result."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet18():
    """Return ResNet-18 for images of 32 x 32 pixels: 11 M parameters."""
    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Block(before, width, 1 if width == 64 else 2), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """A language model of four layers: 4 M parameters."""

    def __init__(self, words=1000, width=256, length=64):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.words(x) + self.positions, mask, is_causal=True))


MODELS = {"resnet18": resnet18, "transformer": Transformer}


def examples(name, batch, source):
    if name == "resnet18":
        return torch.randn(batch, 3, 32, 32, generator=source), torch.randint(
            10, (batch,), generator=source
        )
    words = torch.randint(1000, (batch, 65), generator=source)
    return words[:, :-1], words[:, 1:].reshape(-1)


def wrapped(network, how, group):
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(network, process_group=group)
    if how == "ddp_shared":
        parallel = nn.parallel.DistributedDataParallel(
            network, process_group=group, gradient_as_bucket_view=True
        )
        if dist.get_backend(group) == "pycollective":
            parallel.register_comm_hook(group, pycollective.torch.shared_buckets)
        return parallel
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in network.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    sharded = fully_shard(network, mesh=mesh)
    if dist.get_backend(group) == "pycollective":
        sharded.set_allocate_memory_from_process_group_for_comm(True)
    return sharded


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def rank_main(rank, path, arguments, results):
    torch.set_num_threads(1)
    store = f"file://{path}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    found = {}
    for name in arguments.models:
        for how in arguments.wraps:
            networks, optimizers = {}, {}
            for backend, group in groups.items():
                torch.manual_seed(0)
                networks[backend] = wrapped(MODELS[name](), how, group)
                optimizers[backend] = torch.optim.SGD(networks[backend].parameters(), 0.01)
            source = torch.Generator().manual_seed(rank)
            times = {backend: [] for backend in BACKENDS}
            for _ in range(arguments.steps):
                x, y = examples(name, arguments.batch, source)
                for backend, network in networks.items():
                    dist.barrier(groups["pycollective"])
                    begin = time.perf_counter()
                    optimizers[backend].zero_grad()
                    result = network(x)
                    loss = nn.functional.cross_entropy(result.reshape(len(y), -1), y)
                    loss.backward()
                    optimizers[backend].step()
                    times[backend].append(time.perf_counter() - begin)
            pairs = zip(*(network.parameters() for network in networks.values()), strict=True)
            with torch.no_grad():
                difference = max(float((whole(a) - whole(b)).abs().max()) for a, b in pairs)
            found[f"{name} {how}"] = {
                backend: 1e3 * statistics.median(times[backend][WARMUP:]) for backend in BACKENDS
            } | {"largest difference": difference, "loss": float(loss)}
            if rank == 0:
                print(name, how, found[f"{name} {how}"], flush=True)
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    wraps = ["ddp", "ddp_shared", "fsdp2"]
    parser.add_argument("--wraps", nargs="+", choices=wraps, default=wraps)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="examples of a rank in a step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        torch.multiprocessing.spawn(
            rank_main, (f"{folder}/store", arguments, results), arguments.ranks
        )
        report = {
            "date": datetime.date.today().isoformat(),
            "processor": processor(),
            "torch": torch.__version__,
            "ranks": arguments.ranks,
            "steps": arguments.steps,
            "batch": arguments.batch,
            "milliseconds of a step": json.loads(Path(results).read_text()),
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
