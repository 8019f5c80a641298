"""`pycollective.init`, strategies and doctor join the group of the launcher that started the process."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys

import pytest
from ports import free_port, free_ports

import pycollective as pc
from pycollective import launch
from pycollective.cli import main
from pycollective.cluster.sources import SOURCES
from pycollective.distribute import multi_worker
from pycollective.errors import RendezvousError

SECRET = secrets.token_hex()
OF_LAUNCHERS = (
    "TF_", "PYCOLLECTIVE_", "OMPI_", "PMI", "MPI_", "SLURM", "SM_", "PET_", "JOB_COMPLETION_INDEX",
    "RANK", "WORLD_SIZE", "MASTER_", "FLUX_", "HOROVOD_", "JSM_", "MV2_",
)  # fmt: skip

# The name of a pod that does not exist resolves to a loopback address.
_SUM = """
import json, os, socket, sys
import numpy as np
names, real = json.loads(os.environ.get("NAMES", "{}")), socket.getaddrinfo
socket.getaddrinfo = lambda host, *a, **k: real(names.get(host, host), *a, **k)
socket.getfqdn = lambda name="": name
import pycollective as pc
comm = pc.init(timeout=20, join_timeout=30)
assert comm.all_reduce(np.full(3, comm.rank + 1.0)).tolist() == [comm.size * (comm.size + 1) / 2] * 3
print(comm.rank, "of", comm.size)
"""


def surroundings(**more):
    """Return the environment of a process that no launcher has started."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(OF_LAUNCHERS)}
    return {**plain, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", **more}


def on_each(tmp_path, environments, body=_SUM):
    """Run a script in each environment at the same time; return the output of each."""
    script = tmp_path / "script.py"
    script.write_text(body)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=surroundings(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments
    ]
    said = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            said.append(out.strip())
    finally:
        for process in processes[len(said) :]:
            process.kill()
            process.communicate()
    return said


def tf_config(addresses, index):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def by_tf_config():
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    return [{"TF_CONFIG": tf_config(addresses, rank)} for rank in range(2)]


def by_hand():
    address = f"127.0.0.1:{free_port()}"
    return [
        {
            "PYCOLLECTIVE_RANK": str(r),
            "PYCOLLECTIVE_SIZE": "2",
            "PYCOLLECTIVE_ADDRESS": address,
        }
        for r in range(2)
    ]


def by_torchrun():
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(r), "WORLD_SIZE": "2", **where} for r in range(2)]


def by_kubeflow():
    where = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    return [{"PET_NODE_RANK": str(r), "PET_NNODES": "2", **where} for r in range(2)]


def by_open_mpi():
    job = {"PMIX_NAMESPACE": f"test-{secrets.token_hex(8)}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    return [{"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2", **job} for r in range(2)]


def by_pmi():
    job = {"MPI_LOCALNRANKS": "2", "PMI_JOBID": secrets.token_hex(8)}
    return [{"PMI_RANK": str(r), "PMI_SIZE": "2", **job} for r in range(2)]


def loopback():
    """Return a prefix of loopback addresses on which no other test listens."""
    return f"127.{secrets.randbelow(200) + 10}.{secrets.randbelow(256)}"


def by_slurm():
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": f"{loopback()}.[1-2]",
        "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    return [{"SLURM_PROCID": str(r), **step} for r in range(2)]


def by_indexed_job():
    """Run both processes in one pod: processes of two pods would share one port on this host."""
    pod = {
        "JOB_COMPLETION_INDEX": "0", "HOSTNAME": "train-0", "PYCOLLECTIVE_SIZE": "2",
        "PYCOLLECTIVE_LOCAL_SIZE": "2", "NAMES": json.dumps({"train-0": f"{loopback()}.1"}),
    }  # fmt: skip
    return [{"PYCOLLECTIVE_LOCAL_RANK": str(r), **pod} for r in range(2)]


def by_sagemaker():
    start = loopback()
    hosts = [f"{start}.{last}" for last in (1, 2)]
    return [{"SM_CURRENT_HOST": host, "SM_HOSTS": json.dumps(hosts)} for host in hosts]


LAUNCHERS = [by_tf_config, by_hand, by_sagemaker, by_torchrun, by_kubeflow, by_open_mpi, by_slurm,
             by_pmi, by_indexed_job]  # fmt: skip


FAST = (by_tf_config, by_open_mpi, by_slurm)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(one, marks=[] if one in FAST else pytest.mark.slow) for one in LAUNCHERS],
)
def test_init_under_each_launcher_sums_over_two_processes(tmp_path, launcher):
    said = on_each(tmp_path, [{"PYCOLLECTIVE_SECRET": SECRET, **env} for env in launcher()])
    assert said == ["0 of 2", "1 of 2"]


def test_init_in_a_ray_actor_sums_over_two_processes(tmp_path):
    """The test calls the function as `pycollective.ray.run` does in each actor, without Ray."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    body = "from pycollective.ray import _Worker\n"
    body += f"def work():\n    exec({_SUM!r}, {{}})\n"
    body += "_Worker().call(json.loads(os.environ.pop('GIVEN')), work, (), {})\n"
    given = [
        {"TF_CONFIG": tf_config(addresses, rank), "PYCOLLECTIVE_SECRET": SECRET}
        for rank in range(2)
    ]
    said = on_each(
        tmp_path, [{"GIVEN": json.dumps(env)} for env in given], "import json, os\n" + body
    )
    assert said == ["0 of 2", "1 of 2"]


@pytest.mark.parametrize("program", ["mpirun", "mpiexec"])
@pytest.mark.slow
def test_init_under_mpirun_sums_over_two_processes(tmp_path, program):
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program}")
    script = tmp_path / "script.py"
    script.write_text(_SUM)
    done = subprocess.run(
        [found, "-n", "2", sys.executable, str(script)],
        cwd=tmp_path,
        env=surroundings(
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_rmaps_base_oversubscribe="1",
            PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"]


def test_pmi_jobs_on_one_host_use_different_ports(tmp_path):
    """MPICH names no job: two jobs differ in the process that started the ranks."""
    # One write for each line: both ranks write to the same pipe, perhaps unbuffered.
    proxy = tmp_path / "hydra_pmi_proxy"
    show = (
        "from pycollective.cluster import PMIClusterResolver as R\n"
        "print(R().address() + chr(10), end=str())"
    )
    rank = f"{sys.executable} -c '{show}'"
    proxy.write_text(f'#!/bin/sh\n{rank} & sh -c "{rank}; true" & wait\n')
    proxy.chmod(0o700)
    env = surroundings(PMI_RANK="0", PMI_SIZE="2", MPI_LOCALNRANKS="2")
    jobs = [
        subprocess.Popen([str(proxy)], cwd="/", env=env, stdout=subprocess.PIPE, text=True)
        for _ in "ab"
    ]
    (first, first_again), (second, second_again) = (
        job.communicate(timeout=60)[0].split() for job in jobs
    )
    assert (first, second) == (first_again, second_again)
    assert first != second


# init, strategy and doctor ------------------------------------------------------------------------


@pytest.fixture
def environ(monkeypatch):
    """Remove the variables of launchers; return a function that sets variables."""
    for name in list(os.environ):
        if name.startswith(OF_LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "0")
    monkeypatch.setattr(socket, "getfqdn", lambda name: name)

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


class Joined(Exception):
    """The end of a rendezvous that a test replaces, with arguments of its call."""


def places(monkeypatch, capsys):
    """Return the rank and the size that `init`, a strategy and doctor find."""

    def rendezvous(rank, size, addresses, source, **how):
        raise Joined(rank, size, tuple(addresses), source)

    monkeypatch.setattr(launch, "rendezvous", rendezvous)
    with pytest.raises(Joined) as by_init:
        pc.init()
    with pytest.raises(Joined) as by_strategy:
        pc.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    monkeypatch.setattr("pycollective.cli.doctor._test_links", lambda member, seconds, report: 0)
    main(["doctor"])
    said = capsys.readouterr().out
    doctor = re.search(r"cluster: (.*): (\d+) workers, this is worker (\d+)\n", said)
    assert doctor is not None, said
    return by_init.value.args, by_strategy.value.args, (int(doctor[3]), int(doctor[2]), doctor[1])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_init_strategy_and_doctor_find_the_same_rank_and_size(
    environ, monkeypatch, capsys, launcher
):
    variables = launcher()[1]
    variables.pop("NAMES", None)
    environ({"PYCOLLECTIVE_SECRET": SECRET, **variables})
    init, strategy, doctor = places(monkeypatch, capsys)
    assert init == strategy
    assert doctor == (init[0], init[1], init[3]) == (1, 2, init[3])
    assert init[3] in [source.name for source in SOURCES]


ALONE = "to run this process alone, set PYCOLLECTIVE_RANK=0 and PYCOLLECTIVE_SIZE=1"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 means several processes, but RANK, MASTER_ADDR and "
         f"MASTER_PORT are not set: start the program with torchrun; {ALONE}"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 .* OMPI_COMM_WORLD_RANK is not set: "
         "start the program with mpirun"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 means .* PMI_RANK is not set: start .* with mpiexec"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM_NTASKS=4 means several processes, but "
         "SLURM_STEP_NUM_TASKS is not set: start the program with srun"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES=2 means several processes, but "),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 means .* PET_NODE_RANK is not set: set the missing"),
        ({"SM_HOSTS": '["a", "b"]'}, "SM_HOSTS=.* means .* SM_CURRENT_HOST is not set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set, as in an indexed job of several "
         "pods, but PYCOLLECTIVE_SIZE is not: set it to the number of all workers"),
        ({"PYCOLLECTIVE_JOBS": "a:1x2"}, "PYCOLLECTIVE_JOBS=a:1x2 means .* JOB_COMPLETION_INDEX and "),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE=2 means .*Flux gives no address of rank 0: set PYC"),
        ({"PYCOLLECTIVE_RANK": "1"}, "PYCOLLECTIVE_RANK is set and PYCOLLECTIVE_SIZE is not: set PYC"),
        ({"PYCOLLECTIVE_ADDRESS": "a:1"}, "PYCOLLECTIVE_ADDRESS is set and PYCOLLECTIVE_RANK and "
         "PYCOLLECTIVE_SIZE are not: set"),
        ({"PYCOLLECTIVE_ADDRESS": "a:1", "PYCOLLECTIVE_SIZE": "2"}, "PYCOLLECTIVE_SIZE and PYCOLLECTIVE"
         "_ADDRESS are set and PYCOLLECTIVE_RANK is not: set"),
        ({"PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "2"}, "PYCOLLECTIVE_RANK and PYCOLLECTIVE_SIZE "
         "are set and PYCOLLECTIVE_ADDRESS is not: set it to host:port of rank 0"),
        ({"TF_CONFIG": tf_config(["127.0.0.1:1"], 0), "OMPI_COMM_WORLD_RANK": "1",
          "OMPI_COMM_WORLD_SIZE": "2"},
         r"OMPI_COMM_WORLD_SIZE=2 means .*, but TF_CONFIG, which has precedence, "
         "describes one: remove one of the two descriptions; to run this"),
        ({"PYCOLLECTIVE_ADRESS": "a:1"}, "PYCOLLECTIVE_ADRESS is set, but pycollective reads no such "
         r"variable: did you mean PYCOLLECTIVE_ADDRESS\?"),
    ],
)  # fmt: skip
def test_ignored_variable_is_an_error_in_init_strategy_and_doctor(environ, capsys, variables, said):
    environ(variables)
    with pytest.raises(RendezvousError, match=said):
        pc.init()
    with pytest.raises(ValueError, match=said):
        pc.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    assert main(["doctor"]) in (1, 2)
    printed = capsys.readouterr()
    assert re.search(said, printed.out + printed.err), printed


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # A launcher has started one process: the job's number of processes is ignored.
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"},
        {"PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "1"},
        {"PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1",
         "OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "4"},
        {"PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "1", "PYCOLLECTIVE_TRANSPORT": "thread"},
        {"TF_CONFIG": tf_config(["127.0.0.1:1"], 0)},
        {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'},
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]},
                                  "task": {"type": "evaluator", "index": 0}}), "WORLD_SIZE": "2"},
    ],
)  # fmt: skip
def test_process_that_is_meant_to_be_alone_is_alone(environ, variables):
    environ(variables)
    comm = pc.init()
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce([2.0])[0] == 2
    comm.close()
    if "PYCOLLECTIVE_TRANSPORT" not in variables:
        assert main(["doctor"]) == 0
        assert (
            pc.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"]).num_replicas_in_sync == 1
        )


def test_given_environment_is_read_instead_of_the_process(environ, monkeypatch):
    """`init(environment=…)` uses no resolver that reads ``os.environ``."""

    def rendezvous(rank, size, addresses, source, **how):
        raise Joined(source)

    monkeypatch.setattr(launch, "rendezvous", rendezvous)
    environ({"WORLD_SIZE": "4"})
    with pytest.raises(RendezvousError, match="WORLD_SIZE=4"):
        pc.init()
    for launcher in LAUNCHERS:
        with pytest.raises(Joined) as caught:
            pc.init(environment={"PYCOLLECTIVE_CHECK_ADDRESSES": "0", **launcher()[1]})
        assert caught.value.args[0] in [source.name for source in SOURCES]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_worker_of_ray_that_is_alone_says_so():
    """Ray itself may run in a step of Slurm of several tasks."""
    from pycollective.ray import _environment

    several = _environment({"worker": ["a:1", "b:1"]}, "worker", 1, "s" * 64)
    assert json.loads(several["TF_CONFIG"])["task"]["index"] == 1
    assert set(several) == {"TF_CONFIG", "PYCOLLECTIVE_SECRET"}
    one = _environment({"worker": ["a:1"]}, "worker", 0, "s" * 64)
    assert (one["PYCOLLECTIVE_RANK"], one["PYCOLLECTIVE_SIZE"]) == ("0", "1")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_worker_started_again_after_the_job_has_ended_ends_with_an_error(environ, rank):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    environ({"TF_CONFIG": tf_config(addresses, rank)})
    with pytest.raises(
        RendezvousError,
        match=r"timeout is 0.5 seconds: rank . (did not reach rank 0|waited 0.5 s for rank 1).*\. Start "
        "the missing workers, or all workers if the job has ended",
    ):
        multi_worker.MultiWorkerMirroredStrategy(devices=["cpu:0"], rendezvous_timeout=0.5)


def test_strategy_with_a_given_resolver_ignores_variables(environ):
    environ({"WORLD_SIZE": "4"})
    resolver = pc.cluster.SimpleClusterResolver(pc.cluster.ClusterSpec({}))
    strategy = multi_worker.MultiWorkerMirroredStrategy(resolver, devices=["cpu:0"])
    assert strategy.num_replicas_in_sync == 1
