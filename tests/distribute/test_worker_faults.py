"""Faults of workers: the errors of the other workers name the faulty one, and none hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from ports import free_ports
from workers import ended, run, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]


def wait_for_steps(processes):
    """Wait until every worker has made some steps."""
    for process in processes:
        assert process.stdout.readline() == "STARTED\n", process.communicate()


def cluster_of(count):
    """Return a cluster, and the name of its worker 1 in errors."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return {"worker": addresses}, f"rank 1 (worker 1 at {addresses[1]})"


def test_worker_stopped_before_its_first_call_is_named(tmp_path):
    """The worker is stopped after the rendezvous, while the others wait for its first call."""
    body = """
import signal
from pycollective.distribute import multi_worker
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    multi_worker._workers_of = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)
try:
    strategy_of()
except Exception as error:
    print(type(error).__name__, error)
"""
    cluster, lost = cluster_of(3)
    tasks = [("worker", index) for index in range(3)]
    processes = start(tmp_path, tasks, body, cluster=cluster, PYCOLLECTIVE_HEARTBEAT="1")
    try:
        done = [p.communicate(timeout=40)[0] for p in (processes[0], processes[2])]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for output in done:
        assert output.startswith(f"PeerLostError {lost} is lost to rank "), output
        assert "no heartbeat for 1 s, so it is stopped or cut off" in output, output


def test_launched_worker_that_is_stopped_is_named(tmp_path):
    """Workers of `pycollective run` have no connections; the shared memory has their heartbeats."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal, time
import numpy as np
import pycollective as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
workers = strategy.extended.workers
pids, _ = workers.gather(np.array([os.getpid()]), 0)
time.sleep(1.5)  # no worker is lost while all are running
workers.barrier()
if workers.index == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    workers.barrier()
except tf.errors.UnavailableError as error:
    print(type(error).__name__, error, flush=True)
if workers.index == 0:
    os.kill(int(pids[1]), signal.SIGCONT)
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", "run", "-n", "3", str(script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYCOLLECTIVE_HEARTBEAT": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = re.findall(
        r"PeerLostError rank 1 \(worker 1 at [^)]*\) is lost to rank [02]", done.stdout
    )
    assert len(said) == 3, done
    assert re.search(
        r"rank 1 \(.*?\) has finished barrier #\d+ and made no collective call since", done.stdout
    )


def test_errors_end_all_and_a_new_strategy_works(tmp_path):
    """Three errors: different numbers of replicas, input that fails, and a save by one worker alone."""
    body = """
me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
R += me
try:
    strategy_of()
except ValueError as error:
    print(error)
R = 1
strategy = strategy_of()
def rows():
    for i in range(40):
        if i == 10 and me:
            raise OSError("the disk is gone")
        yield np.zeros(2)
data = tf.data.Dataset.from_generator(
    rows, output_signature=tf.TensorSpec((2,), np.float64)).batch(2)
try:
    for x in strategy.experimental_distribute_dataset(data):
        strategy.run(lambda x: tf.reduce_sum(x), args=(x,))
except Exception as error:
    print(type(error).__name__, error)
strategy.close()
strategy = strategy_of()
with strategy.scope():
    v = tf.Variable(np.zeros(3))
try:
    if strategy.extended.should_checkpoint:
        tf.train.Checkpoint(v=v).write("saved")
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant([1.0])))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = ended(start(tmp_path, [("worker", 0), ("worker", 1)], body))
    (a, b), inputs, calls = zip(*(output.splitlines() for output in done.outputs), strict=True)
    for line in (a, b):
        assert "the same number of replicas: worker 0 has 1, worker 1 has 2" in line
    assert "worker 1: its input failed: OSError: the disk is gone" in inputs[0]
    assert inputs[1] == "OSError the disk is gone"
    for line in calls:
        assert line.startswith("MismatchError")
        assert "all_gather" in line
        assert "all_reduce" in line


def test_rendezvous_timeout_names_the_missing_worker(tmp_path):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(3)]}
    body = """
import logging, time
from pathlib import Path
from pycollective.launch import leader
logging.basicConfig()
leader.LOG_EVERY = 0.2
Path(f"started {os.getpid()}").touch()
while len(list(Path.cwd().glob("started *"))) < 2:  # a process may start seconds after the other
    time.sleep(0.01)
try:
    tf.distribute.MultiWorkerMirroredStrategy(rendezvous_timeout=2)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = ended(start(tmp_path, [("worker", 0), ("worker", 1)], body, cluster=cluster))
    for output in done.outputs:
        assert "RendezvousError" in output, done
    # The first worker whose timeout is over ends the wait of both.
    own_timeout = "Timeout waiting for the cluster, timeout is 2 seconds" in done.outputs[0]
    assert own_timeout or "because rank 1 gives up then" in done.outputs[0], done
    assert "rank 2 of 3" in done.outputs[0], done
    for errors in done.errors:  # rank 0 tells the other worker
        assert "rank 0 waits for rank 2 of 3 to join at" in errors, done


def test_workers_listen_at_their_own_addresses(tmp_path):
    """Each worker listens on the port of its address alone, for a second strategy too."""
    ports = free_ports(2)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    body = """
import socket
ports = []
listen = socket.socket.listen
def recorded_listen(sock, *args):
    if sock.family == socket.AF_INET:
        ports.append(sock.getsockname()[1])
    return listen(sock, *args)
socket.socket.listen = recorded_listen
strategy_of().close()
again = strategy_of()
say(ports=sorted(set(ports)), n=again.num_replicas_in_sync)
"""
    tasks = [("worker", 0), ("worker", 1)]
    processes = start(tmp_path, tasks, body, cluster=cluster)
    for said, port in zip(ended(processes).said, ports, strict=True):
        assert said == {"ports": [port], "n": 2}


def test_address_in_use_is_named_in_the_error(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = {"worker": [address, f"127.0.0.1:{free_ports(1)[0]}"]}
        body = "try:\n    strategy_of()\nexcept Exception as error:\n    print(error)\n"
        done = ended(start(tmp_path, [("worker", 0)], body, cluster=cluster))
    said = (
        f"cluster['worker'][0] (worker 0), this process, is {address}, where no socket can listen: "
    )
    assert said + "Address already in use" in done.outputs[0], done


# Preemption ---------------------------------------------------------------------------------------

_PREEMPTED = """
import time
strategy = strategy_of()
with strategy.scope():
    v = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
handler = tf.distribute.experimental.PreemptionCheckpointHandler(
    strategy.cluster_resolver, tf.train.Checkpoint(v=v), "saved")
say(begun=handler.total_run_calls, v=float(v))
def step():
    strategy.run(lambda: v.assign_add(1.0))
    time.sleep(0.005)
while handler.total_run_calls < int(os.environ["STEPS"]):
    handler.run(step)
    if handler.total_run_calls == 20:
        print("STARTED", flush=True)
say(done=float(v))
"""


def test_all_workers_save_the_same_step_when_one_gets_sigterm(tmp_path):
    tasks = [("worker", 0), ("worker", 1)]
    first = start(tmp_path, tasks, _PREEMPTED, STEPS="100000")
    for process in first:
        assert process.stdout.readline().startswith("SAID")
    wait_for_steps(first)
    os.kill(first[1].pid, signal.SIGTERM)
    assert ended(first).codes == [42, 42]
    again = ended(start(tmp_path, tasks, _PREEMPTED, STEPS="300")).said
    assert again[0] == again[1]
    assert 20 <= again[0]["begun"] < 300
    assert again[0]["v"] == again[0]["begun"]
    assert again[0]["done"] == 300


@pytest.mark.parametrize("replicas", [1, 2])
def test_worker_that_goes_on_after_its_own_error_stops_all(tmp_path, replicas):
    """Its next steps would otherwise be added to earlier steps of the other workers."""
    body = """
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = strategy_of()

def step(number, who):
    if number == 2 and me in who:
        raise ValueError("bad batch")
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(10.0**number))

def steps(who):
    found = []
    for number in range(5):
        try:
            value = strategy.run(step, args=(number, who))
            found.append(float(strategy.experimental_local_results(value)[0]) / R)
        except ValueError:
            found.append("skipped")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            break
    return found

print(json.dumps([steps([0, 1]), steps([1])]))
"""
    done = run(tmp_path, 2, body, replicas)
    assert done.codes == [0, 0], done
    both, first = zip(*map(json.loads, done.outputs), strict=True)
    assert both == ([2, 20, "skipped", 2000, 20000],) * 2
    assert first[0][:2] == [2, 20]
    assert first[1][:3] == [2, 20, "skipped"]
    for found in first:
        assert re.match(r"MismatchError: .*called barrier #\d+", found[-1]), first
    assert (
        "worker 1 went on after an error that other workers did not have (ValueError: bad"
        in (first[1][-1])
    )


def test_worker_that_begins_fit_again_after_an_error_stops_all(tmp_path):
    body = """
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = strategy_of()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Fails(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and me == 1:
            raise OSError("the disk is full")

X = np.ones((40, 1), "float32")
for callbacks in ([Fails()], []):
    try:
        model.fit(X, X, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        print("trained")
    except Exception as error:
        print(type(error).__name__, error)
        if not isinstance(error, OSError):
            break
"""
    done = run(tmp_path, 2, body)
    assert "trained" not in "".join(done.outputs), done
    assert done.outputs[0].startswith("MismatchError "), done
    assert re.match(r"OSError the disk is full\nMismatchError worker 1 went on", done.outputs[1]), (
        done
    )
