"""Workers that are processes with their own GPUs: NCCL among them, and its failures."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from ports import free_ports
from workers import ended, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]

BODY = """
import time
import fake_gpus, pytest
from pycollective import array_backend
from pycollective.comm import watch
from pycollective.tensor import Tensor
d = tf.distribute
T = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
watch.Watch.SECONDS = 0.05
gpus = fake_gpus.make_gpus(pytest.MonkeyPatch(), os.environ["FAKE"], devices=2 * R)
array_backend.gpu_count = lambda: (2 * R, "")
DEVICES = [f"gpu:{T * R + i}" for i in range(R)]
def strategy_of(how="NCCL", devices=DEVICES, **options):
    options = d.experimental.CommunicationOptions(implementation=how, **options)
    return d.MultiWorkerMirroredStrategy(
        communication_options=options, devices=devices, rendezvous_timeout=30
    )
def put(values, dtype):
    return Tensor(gpus.asarray(np.asarray(values, dtype)))
def here():
    return d.get_replica_context().local_replica_id
def components(*values):
    return [c for value in values for c in getattr(value, "values", [value])]
def calls():
    return sum("AllReduce" in line for line in gpus.log())
"""


def begin(tmp_path, fake_path, body, replicas=1, **more):
    folder = tmp_path / "nccl"
    folder.mkdir()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    more = {"FAKE": str(fake_path), "FAKE_NCCL_FOLDER": str(folder), **more}
    tasks = [("worker", 0), ("worker", 1)]
    hosts = replicas == 1  # as on two hosts, so that other calls use TCP
    return start(tmp_path, tasks, BODY + body, replicas, cluster, hosts, **more), cluster["worker"]


ALIKE = """
merge = d.ReplicaContext.merge
def merge_and_be_late(context, *args, **kwargs):
    result = merge(context, *args, **kwargs)
    time.sleep(0.02 * here())  # replica 0 begins its next step before this replica ends its step
    return result
d.ReplicaContext.merge = merge_and_be_late
x = np.random.default_rng(1).normal(size=(11, 3)).astype(np.float32)
numbers = np.random.default_rng(2).integers(-9, 9, (4, 50))
for how in ("RING", "NCCL", "AUTO"):
    strategy = strategy_of(how)
    def among_workers():
        core = strategy.extended.workers.communicator._gpu
        return 0 if core is None else core.nccl._nccl.calls
    before = calls()
    def sums():
        context = d.get_replica_context()
        r = strategy.extended.first_replica + here()
        kinds = ((1, "int64"), (3, "int32"), (0.1, "float32"))
        values = [put(numbers[r] * k, kind) for k, kind in kinds]
        return context.all_reduce("SUM", values), context.all_reduce("MEAN", values[2])
    result, mean = strategy.run(sums)
    all_reduces = calls() - before
    every = components(*result, mean)
    assert [c.array.device.id for c in every[:R]] == [T * R + i for i in range(R)]
    with strategy.scope():
        w = tf.Variable(np.arange(6, dtype=np.float32).reshape(3, 2) / 10)
        b = tf.Variable(np.zeros(2, np.float32))
        optimizer = tf.keras.optimizers.SGD(0.1)
    strategy.extended.gradient_options = d.experimental.CommunicationOptions(bytes_per_pack=1)
    @tf.custom_gradient
    def noted(x):
        def gradient(dy):  # the first bucket, of b, is on its way
            if here() == 0:
                early.append(among_workers() - sent)
            return dy
        return x, gradient
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((noted(tf.matmul(x, w)) + b) ** 2)
        optimizer.minimize(loss, [w, b], tape=tape)
        rows.append(x.shape[0])
    rows, early, sent = [], [], among_workers()
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=(batch,))
    weights = [c.read_value() for c in components(w, b)]
    plain = [[gpus.asnumpy(c.array).tolist() for c in part] for part in (every, weights)]
    found = dict(sums=plain[0], weights=plain[1], rows=rows, all_reduces=all_reduces, early=early)
    say(**{how: found})
    strategy.close()
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_workers_use_nccl(tmp_path, fake_path, replicas):
    """NCCL and AUTO give the results of a ring, with equal bits for ints; the last batch is uneven."""
    processes, _ = begin(tmp_path, fake_path, ALIKE, replicas)
    first, second = ended(processes).said
    ring = first["RING"]
    ints, floats = slice(0, 2 * replicas), slice(2 * replicas, None)
    for said in (first, second):
        for how, found in said.items():
            assert found["sums"][ints] == ring["sums"][ints], how
            for name, part in (("sums", floats), ("weights", slice(None))):
                for got, want in zip(found[name][part], ring[name][part], strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
        for name in ("sums", "weights"):  # one implementation gives the same bits on all workers
            assert said["NCCL"][name] == first["NCCL"][name] == said["AUTO"][name]
        # An all-reduce for each type and the mean: among the workers, and among a worker's replicas,
        # each of which makes it.
        count = 4 if replicas == 1 else 4 + 4 * replicas
        counts = [said[how]["all_reduces"] for how in ("RING", "NCCL", "AUTO")]
        assert counts == [0, count, count]
        # In each step, the first of two buckets moves among the workers before the tape is done.
        assert [said[how]["early"] for how in ("RING", "NCCL")] == [[0, 0, 0], [1, 3, 5]]
    rows = [row for said in (first, second) for row in said["NCCL"]["rows"]]
    assert sorted(rows) == ([1, 2, 2, 2, 2, 2] if replicas == 1 else [0] + 11 * [1])
    every = np.random.default_rng(2).integers(-9, 9, (4, 50))[: 2 * replicas].sum(0)
    assert ring["sums"][0] == every.tolist() and ring["sums"][replicas] == (3 * every).tolist()


STEPS = """
strategy = strategy_of(timeout_seconds=TIMEOUT)
def step():
    return d.get_replica_context().all_reduce("SUM", put(np.ones(100), "float32"))
if R > 1:  # buckets that are begun early, on both levels
    with strategy.scope():
        v, w = (tf.Variable(np.ones(100, np.float32)) for _ in range(2))
        optimizer = tf.keras.optimizers.SGD(1e-9)
    strategy.extended.gradient_options = d.experimental.CommunicationOptions(bytes_per_pack=1)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * w)
        optimizer.minimize(loss, [v, w], tape=tape)
        return v * 1.0
try:
    for number in range(100_000):
        if number == 5:
            print("STARTED", flush=True)
        if T == 1 and number == 10:
            FAULT
        result = strategy.run(step)
        for c in components(result):
            gpus.asnumpy(c.array)  # waits for the device
        time.sleep(0.002)
except Exception as error:
    print(type(error).__name__, error)
    print([line for line in gpus.log() if "CommAbort" in line], flush=True)
    if not AGAIN:
        raise SystemExit(3)
strategy.close()
strategy = strategy_of()
sums = [gpus.asnumpy(c.array)[0] for c in components(strategy.run(step))]
say(sums=sums, lines=calls())
"""


def faulty(tmp_path, fake_path, fault, replicas=1, timeout=100, again=False, **more):
    body = STEPS.replace("FAULT", fault).replace("TIMEOUT", str(timeout))
    body = body.replace("AGAIN", str(again))
    processes, addresses = begin(tmp_path, fake_path, body, replicas, **more)
    for process in processes:
        assert process.stdout.readline() == "STARTED\n", process.communicate()
    return processes, f"rank 1 (worker 1 at {addresses[1]})"


@pytest.mark.parametrize(("replicas", "remote_errors"), [(1, True), (2, False)])
def test_killed_worker_raises_on_the_others(tmp_path, fake_path, replicas, remote_errors):
    """The lost worker is named, also if NCCL itself reports the lost peer."""
    more = {"FAKE_NCCL_REMOTE_ERRORS": "1"} if remote_errors else {}
    fault = "os.kill(os.getpid(), 9)"
    processes, lost = faulty(tmp_path, fake_path, fault, replicas, **more)
    done = ended(processes, 30)
    assert done.codes == [3, -9], done
    assert f"PeerLostError {lost}" in done.outputs[0], done
    assert "rank 0: CommAbort" in done.outputs[0], done.outputs[0]


@pytest.mark.parametrize("noticed_by", ["heartbeat", "deadline"])
def test_stopped_worker_raises_on_the_others(tmp_path, fake_path, noticed_by):
    seconds = {"heartbeat": "1", "deadline": "inf"}[noticed_by]
    timeout = {"heartbeat": 100, "deadline": 1}[noticed_by]
    fault = "signal.raise_signal(signal.SIGSTOP)"
    more = {"PYCOLLECTIVE_HEARTBEAT": seconds}
    processes, lost = faulty(
        tmp_path, fake_path, f"import signal; {fault}", timeout=timeout, **more
    )
    try:
        done = ended(processes[:1], 30)
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert done.codes == [3] and "['rank 0: CommAbort']" in done.outputs[0], done
    assert "PeerLostError" in done.outputs[0] and lost in done.outputs[0], done


def test_asynchronous_nccl_error_raises_on_all_workers(tmp_path, fake_path):
    """The failed rank raises NCCL's error, the other an error with its text; a new group works."""
    fault = "gpus.cuda.library.fake_async_error(1, 3); time.sleep(0.5)"
    processes, _ = faulty(tmp_path, fake_path, fault, again=True)
    done = ended(processes, 30)
    said = "NCCL reports internal error"
    assert done.outputs[1].startswith("NcclError") and said in done.outputs[1], done
    assert done.outputs[0].startswith("AbortedError") and said in done.outputs[0], done
    for rank, output in enumerate(done.outputs):
        assert f"['rank {rank}: CommAbort']" in output, done
    assert [found["sums"] for found in done.said] == [[2.0], [2.0]]


SHARED = """
import logging
logging.getLogger("pycollective").addHandler(logging.StreamHandler(sys.stdout))
found = []
for setting in ("0", "1"):
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = setting
    before = calls()
    strategy = strategy_of(devices=["gpu:0"])
    total = strategy.run(lambda: d.get_replica_context().all_reduce("SUM", put([T + 1], "int64")))
    found.append([int(gpus.asnumpy(total.array)[0]), calls() - before])
    strategy.close()
say(found=found)
"""


def test_workers_on_one_gpu_are_right(tmp_path, fake_path):
    """Unless a variable allows NCCL, arrays are copied through host memory, with a warning."""
    processes, _ = begin(tmp_path, fake_path, SHARED, FAKE_NCCL_VERSION="23000")
    done = ended(processes, 30)
    assert [said["found"] for said in done.said] == [[[3, 0], [3, 1]]] * 2
    assert done.outputs[0].count("ranks 0 and 1 share a GPU (0000:00:00.0") == 1, done
