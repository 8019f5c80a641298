"""What befalls workers: the others hear of it, by name, and nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from workers import ended, free_ports, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]

_STEPS = """
import time
strategy = strategy_of()
def step():
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(np.ones(1000)))
try:
    for number in range(100_000):
        if number == 20:
            print("STARTED", flush=True)
        FAULT
        strategy.run(step)
        time.sleep(0.002)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    strategy.close()
    raise SystemExit(3)
"""


def begun(processes):
    """Wait until every worker has made some steps."""
    for process in processes:
        assert process.stdout.readline() == "STARTED\n", process.communicate()


def cluster_of(count):
    """Return a cluster, and how errors call its worker 1."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return {"worker": addresses}, f"rank 1 (worker 1 at {addresses[1]})"


def assert_lost(output, worker, call=r"all_reduce #\d+ \(float64\[1000\], sum"):
    """It is named by rank, name and address, and by the last that it is known to have called."""
    assert "PeerLostError " + worker in output, output
    did = " (is in|has finished|was last heard of in) "
    assert re.search(re.escape(worker) + did + call, output), output


@pytest.mark.parametrize(
    ("fault", "code", "replicas", "hosts"),
    [
        ("os.kill(os.getpid(), 9)", -9, 1, False),
        ("os.kill(os.getpid(), 9)", -9, 1, True),
        ("os.kill(os.getpid(), 9)", -9, 2, False),
        ("raise SystemExit(0)", 0, 1, False),
        ("raise KeyError('mine')", 3, 1, False),
    ],
)
def test_a_worker_that_ends(tmp_path, fault, code, replicas, hosts):
    """It is killed, leaves early, or fails by an error of its own."""
    body = _STEPS.replace(
        "FAULT", f"if number == 50 and strategy.extended.first_replica == R: {fault}"
    )
    tasks = [("worker", index) for index in range(3)]
    cluster, lost = cluster_of(3)
    done = ended(start(tmp_path, tasks, body, replicas, cluster, hosts), 40)
    assert done.codes == [3, code, 3]
    # Another host is known by what came from it, to this one.
    call = (r"\w+ #\d+ \(",) if hosts else ()
    for output in (done.outputs[0], done.outputs[2]):
        assert_lost(output, lost, *call)


@pytest.mark.parametrize(
    ("fault", "seconds", "heard"),
    [
        ("os.kill(os.getpid(), 9)", 200, "the new one is made of has failed: {}"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 1, "{}"),
    ],
)
def test_a_worker_that_does_not_come_to_the_second_meeting(tmp_path, fault, seconds, heard):
    """It is lost after the first one: the others hear of it, or wait no longer than asked for."""
    body = f"""
import signal
from pycollective.distribute import workers
def fault():
    {fault}
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    workers._seconds_of_silence = fault
try:
    tf.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"], rendezvous_timeout={seconds})
except tf.errors.UnavailableError:
    raise
except Exception as error:
    print(type(error).__name__, error)
"""
    cluster, lost = cluster_of(3)
    processes = start(tmp_path, [("worker", index) for index in range(3)], body, cluster=cluster)
    try:
        done = [p.communicate(timeout=40)[0] for p in (processes[0], processes[2])]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for output in done:
        assert output.startswith("RendezvousError"), output
        assert heard.format(lost) in output, output


def test_a_worker_that_is_stopped(tmp_path):
    """Without a variable that says so, after eight seconds."""
    body = _STEPS.replace("FAULT", "")
    tasks = [("worker", index) for index in range(3)]
    cluster, lost = cluster_of(3)
    processes = start(tmp_path, tasks, body, cluster=cluster)
    begun(processes)
    processes[1].send_signal(signal.SIGSTOP)
    try:
        done = [p.communicate(timeout=30)[0] for p in (processes[0], processes[2])]
    finally:
        processes[1].kill()
        processes[1].communicate()
    for output in done:
        assert_lost(output, lost)
        assert "not heard of for 8 s, so it is stopped or cut off" in output, output


def test_errors_end_all_and_a_new_strategy_works(tmp_path):
    """Another number of replicas, input that fails, and one who saves by itself, as on one machine."""
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


def test_who_does_not_come_is_named(tmp_path):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(3)]}
    body = """
import logging
from pycollective.rendezvous import meeting
logging.basicConfig()
meeting.LOG_EVERY = 0.2
try:
    tf.distribute.MultiWorkerMirroredStrategy(rendezvous_timeout=1)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = ended(start(tmp_path, [("worker", 0), ("worker", 1)], body, cluster=cluster))
    for output in done.outputs:
        assert "RendezvousError" in output, done
    assert "Timeout waiting for the cluster, timeout is 1 seconds" in done.outputs[0], done
    assert "rank 2 of 3" in done.outputs[0], done
    assert "rank 0 waits for" in done.errors[0], done


def test_workers_listen_at_their_own_addresses(tmp_path):
    """Both listen at the port of their address, and nowhere else; a second strategy does so again."""
    ports = free_ports(2)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    body = """
import socket
heard = []
listen = socket.socket.listen
def noted(sock, *args):
    if sock.family == socket.AF_INET:
        heard.append(sock.getsockname()[1])
    return listen(sock, *args)
socket.socket.listen = noted
strategy_of().close()
again = strategy_of()
say(heard=sorted(set(heard)), n=again.num_replicas_in_sync)
"""
    tasks = [("worker", 0), ("worker", 1)]
    processes = start(tmp_path, tasks, body, cluster=cluster)
    for own, port in zip(ended(processes).said, ports, strict=True):
        assert own == {"heard": [port], "n": 2}


def test_an_address_that_is_taken(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = {"worker": [address, f"127.0.0.1:{free_ports(1)[0]}"]}
        body = "try:\n    strategy_of()\nexcept Exception as error:\n    print(error)\n"
        done = ended(start(tmp_path, [("worker", 0)], body, cluster=cluster))
    said = f"cluster['worker'][0] (worker 0), this process, is {address}, which cannot be listened at: "
    assert said + "Address already in use" in done.outputs[0], done


# Told to end --------------------------------------------------------------------------------------

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


def test_all_save_the_same_step_when_one_is_told_to_end(tmp_path):
    tasks = [("worker", 0), ("worker", 1)]
    first = start(tmp_path, tasks, _PREEMPTED, STEPS="100000")
    for process in first:
        assert process.stdout.readline().startswith("SAID")
    begun(first)
    os.kill(first[1].pid, signal.SIGTERM)
    assert ended(first).codes == [42, 42]
    again = ended(start(tmp_path, tasks, _PREEMPTED, STEPS="300")).said
    assert again[0] == again[1]
    assert 20 <= again[0]["begun"] < 300
    assert again[0]["v"] == again[0]["begun"]
    assert again[0]["done"] == 300
