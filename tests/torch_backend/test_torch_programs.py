"""Programs of PyTorch whose ranks torchrun starts, with the backend "pycollective"."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")
import hangs
import namespaces
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

PROGRAM = Path(__file__).with_name("torch_program.py")

pytestmark = pytest.mark.slow


def python(tmp_path, *command, **environment):
    """Run Python; return the output."""
    variables = {"FILE": str(tmp_path / "file"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        cwd=tmp_path,
        env={**os.environ, **variables, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * hangs.SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def torchrun(tmp_path, names, ranks, *options, **environment):
    """Run functions of the program, one after the other; return the output."""
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *options]
    return python(tmp_path, *how, PROGRAM, *names.split(), **environment)


@pytest.mark.parametrize(
    "names",
    [
        "api refused_by_old_versions profiler",
        "ddp ddp_hooks ddp_shared_buckets",
        "fsdp1 fsdp2 fsdp2_shared_memory tensor_parallel",
        "dtensor pipeline functional_collectives",
        "groups_end",
        "two_backends",
    ],
)
def test_program_has_the_expected_results(tmp_path, names):
    torchrun(tmp_path, names, 2)


@pytest.mark.parametrize(
    "names", ["is_a_backend ddp ddp_shared_buckets fsdp2_shared_memory dtensor", "groups_end"]
)
def test_program_with_a_backend_of_pytorchs_has_the_expected_results(tmp_path, names):
    """PyTorch 2.14 and 2.15 let Python subclass `Backend`, and lose the rank of a message."""

    class Subclass(Backend):
        pass

    try:
        Subclass(0, 1)
    except TypeError:
        pytest.skip("PyTorch before 2.14 makes no Backend of Python")
    torchrun(tmp_path, names, 2, WITHOUT_SOURCE_RANKS="1")


def test_spawned_ranks_rendezvous_at_a_file_and_at_a_port(tmp_path):
    python(tmp_path, PROGRAM, "spawned")


@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_program_of_another_package_trains(tmp_path, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    torchrun(tmp_path, f"with_{package}", 2)


def test_accelerate_launch_starts_the_ranks_by_mpirun_with_this_backend(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    if shutil.which("mpirun") is None:
        pytest.skip("accelerate starts ranks on CPUs by mpirun, which is not installed")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    how = ["-m", "accelerate.commands.launch", "--cpu", "--mpirun_hostfile", tmp_path / "hosts"]
    how += ["--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no"]
    how += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", 1]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    text = python(tmp_path, *how, PROGRAM, "with_accelerate", **as_root)
    assert "rank 0 trained by Accelerate" in text and "rank 1 trained by Accelerate" in text, text


@pytest.mark.parametrize("names", ["with_lightning", "with_lightning_forks"])
def test_lightning_starts_the_ranks_with_this_backend(tmp_path, names):
    pytest.importorskip("lightning", reason="lightning is not installed")
    text = python(tmp_path, PROGRAM, names)
    assert "rank 0 trained by DDPStrategy" in text and "rank 1 trained by DDPStrategy" in text, text


def test_program_with_four_ranks_and_debug_detail_has_the_expected_results(tmp_path):
    torchrun(tmp_path, "api dtensor pipeline", 4, TORCH_DISTRIBUTED_DEBUG="DETAIL")


def test_program_over_tcp_has_the_expected_results(tmp_path):
    torchrun(tmp_path, "api", 2, PYCOLLECTIVE_TRANSPORT="tcp")


def test_program_between_two_hosts_has_the_expected_results(tmp_path):
    """The hosts are network namespaces; the rendezvous is at the address of the first host."""
    variables = {
        "MASTER_ADDR": "10.213.7.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "eth0", "FILE": str(tmp_path / "file"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with namespaces.hosts(2) as names, contextlib.ExitStack() as cleanup:
        processes = []
        for rank, name in enumerate(names):
            process = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    "-W",
                    "ignore",
                    PROGRAM,
                    "api",
                    "ddp",
                ],
                env={**os.environ, **variables, "RANK": str(rank)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            cleanup.callback(process.kill)
            processes.append(process)
        for process in processes:
            text, _ = process.communicate(timeout=2 * hangs.SECONDS)
            assert process.returncode == 0, text


def test_entry_point_registers_the_backend_without_an_import(tmp_path):
    found = importlib.metadata.entry_points(group="torch.distributed.backends")
    if "pycollective" not in found.names:
        pytest.skip("pycollective is not installed, and has no entry points")
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("PyTorch before 2.14 reads no entry points")
    init = "dist.init_process_group('pycollective', init_method='file://' + FILE, rank=0, world_size=1)"
    text = "; ".join(
        [
            "import os, torch.distributed as dist",
            "FILE = os.environ['FILE']",
            init,
            "dist.barrier()",
        ]
    )
    python(tmp_path, "-c", text)


def test_killed_rank_ends_the_others_and_torchrun_starts_all_again(tmp_path):
    text = torchrun(tmp_path, "lost_rank", 2, "--max-restarts", "1")
    assert "rank 0 after attempt 1" in text and "rank 1 after attempt 1" in text, text
    assert "DistNetworkError" in text, text


def test_lost_rank_in_training_is_named_on_the_others_which_leave_nothing(tmp_path):
    """Under DDP, DDP with the hook `shared_buckets`, and FSDP2."""
    python(tmp_path, PROGRAM, "lost_rank_in_training")


def test_pytorchs_own_tests_pass(tmp_path):
    """Some of them; docs/reference/pytorch_tests.md has the results of all."""
    pytest.importorskip("expecttest", reason="PyTorch's tests need expecttest")
    some = ["all_gather", "all_reduce_sum", "broadcast", "isend", "gather_object", "test_barrier"]
    some += ["DistributedDataParallelCPU", "monitored_barrier", "sparse_all_reduce", "test_gather"]
    some += ["test_reduce_sum", "test_scatter", "recv_any_source", "accumulate_gradients"]
    chosen = [word for pattern in some for word in ("-k", pattern)]
    runner, file = PROGRAM.with_name("run_pytorch_tests.py"), tmp_path / "results.json"
    python(tmp_path, runner, "run", "pycollective", 3, *chosen, "--json", file)
    tests = json.loads(file.read_text())["tests"]
    assert {name: found for name, found in tests.items() if found[0] == "failed"} == {}
    assert sum(found[0] == "passed" for found in tests.values()) >= 20
