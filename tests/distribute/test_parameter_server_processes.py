"""`ParameterServerStrategy` on clusters of processes: variables, functions, errors, and lost tasks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

import hangs
import numpy as np
import pytest
from ports import free_ports

import pycollective as tf
from pycollective.distribute import task_links
from pycollective.distribute.server_store import Store
from pycollective.distribute.shared_values import Block, SharedFile
from pycollective.distribute.snapshots import Snapshots
from pycollective.distribute.task_links import (
    Link,
    LinkLostError,
    decode,
    encode,
    link_to,
    listen,
)
from pycollective.errors import CheckpointError
from pycollective.launch import handshake
from pycollective.launch.handshake import Channel, HandshakeError

BEGIN = """
import os, signal, time
import numpy as np
import pycollective as tf
strategy = tf.distribute.ParameterServerStrategy()
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
MODEL = """
with strategy.scope():
    table = tf.Variable(np.zeros((5000, 4), np.float32), name="table")
    rate = tf.Variable(2.0, name="rate")
    count = tf.Variable(0, name="count")
    optimizer = tf.keras.optimizers.Adam(0.1)

def dataset_fn(context):
    return tf.data.Dataset.range(100).shuffle(100).repeat().batch(10)

@tf.function
def step(iterator):
    rows = next(iterator)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, rows) - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    count.assign_add(1)
    return loss

per_worker = coordinator.create_per_worker_dataset(
    lambda: strategy.distribute_datasets_from_function(dataset_fn)
)
"""


@pytest.fixture(params=["memory", "tcp"])
def transport(request, monkeypatch):
    """Run a test with mapped variables, and with copies of variables."""
    if request.param == "tcp":
        monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    return request.param


def run(tmp_path, script, servers=2, workers=2, timeout=hangs.SECONDS):
    """Run a script as a cluster; return its exit status, its output and its errors."""
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "pycollective", "run", "--ps", str(servers)]
    command += ["--workers", str(workers), "--chief", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=tmp_path
    )
    return ended.returncode, ended.stdout, ended.stderr


def results(tmp_path, script, **options):
    """Return the arguments of `report`, a function for the chief's script, and the errors' text."""
    path = tmp_path / "results.json"
    code = f"{BEGIN}\ndef report(**found):\n    import json\n"
    code += f"    open({str(path)!r}, 'w').write(json.dumps(found))\n"
    status, out, errors = run(tmp_path, code + script, **options)
    assert path.exists() and status == 0, (status, out, errors)
    return json.loads(path.read_text()), errors


def start(path, job, cluster):
    """Start a script as a task of a cluster."""
    config = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CONFIG": config}
    pipe = subprocess.PIPE
    command = [sys.executable, str(path)]
    task = subprocess.Popen(
        command, env=environment, text=True, stdout=pipe, stderr=pipe, cwd=path.parent
    )
    task.cluster = cluster
    return task


@contextlib.contextmanager
def started(path):
    """Start a script as a worker, a parameter server and a chief; yield and at last end them."""
    ports = free_ports(2)
    cluster = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    tasks = [start(path, job, cluster) for job in ("worker", "ps", "chief")]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


def test_workers_train_variables_on_servers(tmp_path, transport):
    found, _ = results(
        tmp_path,
        MODEL
        + """
iterator = iter(per_worker)
losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
coordinator.join()
rate.assign(0.1)
again = coordinator.schedule(step, args=(iter(per_worker),))
report(
    first=max(float(loss.fetch()) for loss in losses), last=float(again.fetch()), count=int(count),
    steps=int(optimizer.iterations), exact=float(rate) == float(np.float32(0.1)),
    untouched=float(np.abs(table.numpy()[100:]).max()), text=strategy.describe(),
)
""",
    )
    assert found["first"] == 1.0 and found["last"] < 0.1
    assert found["count"] == found["steps"] == 61
    assert found["exact"] and found["untouched"] == 0.0
    assert "workers: 2 other processes" in found["text"]


def test_timeline_of_the_environment_has_the_updates_of_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TIMELINE", str(tmp_path / "timeline.json"))
    results(
        tmp_path,
        MODEL
        + """
iterator = iter(per_worker)
for _ in range(10):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
report()
""",
    )
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    last = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert len(last) == 2 and sum(load["variables"] for load in last.values()) >= 4
    assert sum(load["updates"] for load in last.values()) >= 30


def test_functions_results_and_errors_travel(tmp_path, transport):
    found, _ = results(
        tmp_path,
        MODEL
        + """
@tf.function
def echo(value, plus=0):
    return {"value": value, "plus": (plus, None, b"\\xff", "text " * 20, float("inf"), True)}

@tf.function
def fail(text):
    count.assign_add(100)
    raise ValueError(text)

@tf.function
def wrong_result():
    return object()

@tf.function
def index():
    return tf.distribute.coordinator.experimental_get_current_worker_index()

known = tf.keras.Sequential()

def fit():
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.zeros((4, 1)), np.zeros((4, 1)), verbose=0)

class Thing:
    @tf.function
    def method(self):
        return 1

value = [1, (tf.constant([1.5]), np.arange(2))]
got = coordinator.schedule(echo, args=(value,), kwargs={"plus": 3}).fetch()
assert got["value"][0] == 1 and got["value"][1][0].tolist() == [1.5], got
assert got["value"][1][1].tolist() == [0, 1], got
assert got["plus"] == (3, None, b"\\xff", "text " * 20, float("inf"), True), got
value = coordinator.schedule(fail, args=("broken",))
error = raised(coordinator.join)
assert coordinator.done() and int(count) == 100  # updates before the error stay
result = raised(coordinator.schedule(wrong_result).fetch)
raised(coordinator.join)

@tf.function
def late():
    return 1

unknown = raised(coordinator.schedule(late).fetch)
raised(coordinator.join)
report(
    error=error, result=result, unknown=unknown,
    argument=raised(lambda: coordinator.schedule(echo, args=(object(),))),
    method=raised(lambda: coordinator.schedule(Thing().method)),
    fit=raised(fit),
    index=coordinator.schedule(index).fetch(),
)
""",
        workers=1,
    )
    assert found["error"].startswith("ValueError: broken")
    assert found["result"].startswith("TypeError: a scheduled function returned a object")
    assert "before that, and keep them" in found["unknown"]
    assert found["argument"].startswith("TypeError: a object cannot be sent")
    assert "the object of the method" in found["method"]
    assert "make all models before the first call" in found["fit"]
    assert found["index"] == 0


def test_datasets_after_the_first_schedule_are_read_by_the_chief(tmp_path, transport):
    found, _ = results(
        tmp_path,
        """
@tf.function
def next_of(iterator):
    pair = next(iterator)
    return {"worker": tf.distribute.coordinator.experimental_get_current_worker_index(), **pair}

@tf.function
def add(iterator):
    return sum(int(next(iterator)) for _ in range(3))

def pairs(context):
    calls.append(context.num_input_pipelines)
    return tf.data.Dataset.from_tensor_slices({"x": np.arange(4), "y": np.ones((4, 2), "f4")})

def fails():
    raise ValueError("no file")

calls = []
first = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(10)))
early = coordinator.schedule(add, args=(first,)).fetch()
later = coordinator.create_per_worker_dataset(
    lambda: strategy.distribute_datasets_from_function(pairs)
)
iterator = iter(later)
elements = [coordinator.schedule(next_of, args=(iterator,)).fetch() for _ in range(4)]
end = raised(coordinator.schedule(next_of, args=(iterator,)).fetch)
raised(coordinator.join)
wrong = iter(coordinator.create_per_worker_dataset(fails))
error = raised(coordinator.schedule(next_of, args=(wrong,)).fetch)
raised(coordinator.join)
again = [coordinator.schedule(next_of, args=(iter(later),)).fetch()["x"] for _ in range(2)]
report(
    early=early, xs=[int(e["x"]) for e in elements], y=elements[0]["y"].tolist(), end=end,
    error=error, calls=calls, again=[int(x) for x in again],
    sums=coordinator.schedule(
        add, args=(iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(9))),),
        steps_per_call=2,
    ).fetch(),
)
""",
        workers=1,
    )
    assert found["early"] == 3 and found["xs"] == [0, 1, 2, 3] and found["y"] == [1, 1]
    assert found["end"].startswith("OutOfRangeError: End of sequence")
    assert found["error"].startswith("ClosureInputError: Input has an error")
    assert "ValueError('no file" in found["error"]
    assert found["calls"] == [1, 1, 1] and found["again"] == [0, 0]
    assert found["sums"] == 3 + 4 + 5


def test_per_worker_values_are_replaced_by_the_values_of_worker_processes(tmp_path):
    found, _ = results(
        tmp_path,
        """
@tf.function
def both(v):
    time.sleep(0.02)
    return tf.distribute.coordinator.experimental_get_current_worker_index(), v["a"][0]

values = tf.distribute.experimental.coordinator.PerWorkerValues([10, np.array([11])])
got = [coordinator.schedule(both, args=({"a": [values]},)) for _ in range(12)]
report(got=[[int(i), int(np.squeeze(v))] for i, v in coordinator.fetch(got)])
""",
    )
    assert sorted(map(tuple, set(map(tuple, found["got"])))) == [(0, 10), (1, 11)]


FIT = """
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = X @ np.array([[1], [-2], [3], [0.5]], np.float32) + 0.25
tf.keras.utils.set_random_seed(3)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.02), "mse", metrics=["mae"])

class Begun(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        open("begun", "a").write("once ")

def pairs(context):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(60).repeat().batch(16)

def batches():
    for begin in range(0, 60, 16):
        yield X[begin : begin + 16], Y[begin : begin + 16]

creator = tf.keras.utils.experimental.DatasetCreator(pairs)
"""


def test_fit_with_a_dataset_creator_trains_on_worker_processes(tmp_path, transport):
    found, _ = results(
        tmp_path,
        FIT
        + """
options = {"steps_per_epoch": 20, "verbose": 0}
logs = model.fit(
    creator, epochs=5, callbacks=[Begun()], validation_data=(X, Y), **options
).history
model.fit(creator, **options)
other = tf.keras.utils.experimental.DatasetCreator(lambda context: pairs(context).take(9).repeat())
model.fit(other, **options)  # the chief reads it
steps = int(model.optimizer.iterations)
report(
    steps=steps, loss=logs["loss"], validation=logs["val_mae"], begun=open("begun").read(),
    evaluated=model.evaluate(X, Y, verbose=0)[0],
    error=float(np.mean((model.predict(X, batch_size=7, verbose=0) - Y) ** 2)),
)
""",
    )
    assert found["steps"] == 140 and found["begun"] == "once "
    assert found["loss"][-1] < 0.2 * found["loss"][0]
    assert len(found["validation"]) == 5
    assert abs(found["evaluated"] - found["error"]) < 1e-4


@pytest.mark.parametrize("source", ["X, Y", "iter(list(batches()))"])
def test_fit_with_one_worker_process_equals_fit_without_a_strategy(tmp_path, source, transport):
    found, _ = results(
        tmp_path,
        FIT
        + f"""
history = model.fit({source}, shuffle=False, verbose=0, class_weight=None).history
batch = model.train_on_batch(X, Y)
report(loss=history["loss"], batch=batch, weights=[w.numpy().tolist() for w in model.weights])
""".replace("X, Y, shuffle", "X, Y, batch_size=16, shuffle"),
        workers=1,
    )
    names = {"np": np, "tf": tf, "strategy": tf.distribute.get_strategy()}
    exec(FIT, names)
    model, x, y = names["model"], names["X"], names["Y"]
    history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history
    np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["batch"], model.train_on_batch(x, y), rtol=1e-5)
    for one, other in zip(found["weights"], model.weights, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-6)


def test_worker_of_another_program_version_raises(tmp_path):
    found, _ = results(
        tmp_path,
        """
import json
other = isinstance(strategy.extended.tasks, tf.distribute.Server)
if other:
    @tf.function
    def function():
        return 1
else:
    @tf.function
    def function():
        return 2
report(error=raised(coordinator.schedule(function).fetch))
raised(coordinator.join)
""",
        workers=1,
        servers=1,
    )
    assert found["error"].startswith(
        "FailedPreconditionError: function '__main__.function' differs"
    )


def test_per_worker_values_cached_reads_and_steps_per_call(tmp_path, transport):
    found, _ = results(
        tmp_path,
        """
with strategy.scope():
    own = tf.Variable(0, per_worker_variable=True, name="own")
    shared = tf.Variable(0.0, name="shared")

@tf.function
def count():
    own.assign_add(1)
    return own + 100

@tf.function
def cached():
    with tf.distribute.experimental.cache_variable_reads():
        before = float(shared)
        shared.assign_add(2.0)
        return before, float(shared), float(shared)

values = [coordinator.schedule(count, steps_per_call=3) for _ in range(4)]
coordinator.join()
report(
    values=[int(v.fetch()) for v in values], own=[int(v) for v in own.read_all()],
    cached=coordinator.schedule(cached).fetch(),
)
""",
    )
    assert sum(found["own"]) == 12 and all(v > 102 for v in found["values"])
    assert found["cached"] == [0, 2, 2]


DENSE = """
X = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
with strategy.scope():
    weights = [tf.Variable(np.full((128, 128), 0.01 * k, np.float32)) for k in (1, 2)]
    optimizer = OPTIMIZER

@tf.function
def step():
    with tf.GradientTape() as tape:
        hidden = tf.tanh(tf.matmul(X, weights[0]))
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, weights[1]) - 1.0))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
"""


@pytest.mark.parametrize(
    "optimizer",
    [
        *("SGD(0.1, momentum=0.9)", "Adadelta(1.0)", "Adagrad(0.1)", "Adam(0.01)", "Adamax(0.01)"),
        *("AdamW(0.01, weight_decay=0.1)", "Ftrl(0.1)", "RMSprop(0.01)", "Nadam(0.01)"),
    ],
)
def test_servers_update_variables_over_tcp_by_the_rule_of_the_optimizer(
    tmp_path, monkeypatch, optimizer
):
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    script = DENSE.replace("OPTIMIZER", f"tf.keras.optimizers.{optimizer}")
    found, _ = results(
        tmp_path,
        script
        + """
first = float(coordinator.schedule(step).fetch())
begun = strategy.extended.load()
losses = [first, *(float(coordinator.schedule(step).fetch()) for _ in range(9))]
loads = [a["bytes received"] - b["bytes received"] for a, b in zip(
    strategy.extended.load().values(), begun.values())]
report(losses=losses, received=loads, slots=len(optimizer.slot_names()))
""",
        workers=1,
    )
    names = {"np": np, "tf": tf, "strategy": tf.distribute.get_strategy()}
    exec(script, names)
    expected = [float(names["step"]()) for _ in range(10)]
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-4)
    # A gradient for each variable and step; without the server's kernel, its slots too.
    gradients = 9 * 128 * 128 * 4
    extra = found["slots"] if "Nadam" in optimizer else 0
    for received in found["received"]:
        assert gradients * (1 + extra) <= received <= gradients * (1 + extra) + 10_000


ROWS = """
with strategy.scope():
    table = tf.Variable(np.zeros((20_000, 64), np.float32), name="table")
    optimizer = OPTIMIZER

@tf.function
def step(rows):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, rows) - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return loss

rows = np.array([[3, 70], [70, 19_999]])
losses = [coordinator.schedule(step, args=(rows,)).fetch() for _ in range(4)]
value = table.numpy()
report(
    losses=[float(loss) for loss in losses], load=strategy.extended.servers.loads()[0],
    changed=np.flatnonzero(value.any(axis=1)).tolist(), values=value[[3, 70, 19_999], 0].tolist(),
)
"""


@pytest.mark.parametrize("optimizer", ["SGD(9.0)", "Adagrad(0.5)"])
def test_lookups_and_their_gradients_move_only_rows(tmp_path, transport, optimizer):
    optimizer = f"tf.keras.optimizers.{optimizer}"
    found, _ = results(tmp_path, ROWS.replace("OPTIMIZER", optimizer), workers=1, servers=1)
    assert found["changed"] == [3, 70, 19_999]
    reading = 20_000 * 64 * 4  # by table.numpy() on the chief
    created = 2 * (2 if "Adagrad" in optimizer else 1) * reading  # by the chief and the worker
    sent, received = found["load"][-2:]
    assert sent <= reading + 20_000 and received <= created + 20_000
    table = tf.Variable(np.zeros((20_000, 64), np.float32))
    local = eval(optimizer)
    losses = []
    for _ in range(4):
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table, np.array([[3, 70], [70, 19_999]]))
            loss = tf.reduce_mean(tf.square(looked_up - 1.0))
        local.apply_gradients([(tape.gradient(loss, table), table)])
        losses.append(float(loss))
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(found["values"], table.numpy()[[3, 70, 19_999], 0], rtol=1e-5)


@pytest.mark.slow
def test_lost_worker_function_runs_on_another_and_the_program_ends_well(tmp_path):
    marker = tmp_path / "killed"
    found, errors = results(
        tmp_path,
        MODEL
        + f"""
@tf.function
def dies_once():
    try:
        os.close(os.open({str(marker)!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return tf.distribute.coordinator.experimental_get_current_worker_index()
    os.kill(os.getpid(), signal.SIGKILL)

values = [coordinator.schedule(dies_once) for _ in range(4)]
iterator = iter(per_worker)
for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
report(values=[int(v.fetch()) for v in values], count=int(count))
""",
    )
    assert len(set(found["values"])) == 1
    assert found["count"] == 20
    assert "the other workers continue" in errors


@pytest.mark.slow
def test_lost_server_raises_unavailable_error_from_every_call(tmp_path):
    pids = tmp_path / "pids"
    script = f"""
config = json.loads(os.environ["TF_CONFIG"])
if config["task"]["type"] == "ps":
    open({str(pids)!r} + str(config["task"]["index"]), "w").write(str(os.getpid()))
"""
    begin = "import json, os\n" + script + BEGIN + MODEL
    status, out, errors = run(
        tmp_path,
        begin
        + f"""
iterator = iter(per_worker)
coordinator.schedule(step, args=(iterator,)).fetch()
os.kill(int(open({str(pids)!r} + "1").read()), signal.SIGKILL)
def schedule():
    return coordinator.schedule(step, args=(iterator,))

text = raised(lambda: [(schedule(), coordinator.join()) for _ in range(50)])
print("FOUND", text)
for call in (coordinator.join, coordinator.done, schedule):
    print("THEN", raised(call))
""",
    )
    assert status == 128 + signal.SIGKILL, errors
    assert "FOUND UnavailableError: /job:ps/task:" in out, (out, errors)
    assert out.count("THEN UnavailableError: /job:ps/task:") == 3, (out, errors)


@pytest.mark.slow
def test_server_join_as_in_tensorflow_runs_the_script_as_the_chief(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        """
import pycollective as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    )
    server.join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def add(x):
    total.assign_add(x)
    return total

coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
coordinator.join()  # the worker goes on to the first schedule()
for n in range(10):
    coordinator.schedule(add, args=(float(n),))
coordinator.join()
print("TOTAL", total.numpy())
"""
    )
    with started(path) as tasks:
        ended = [task.communicate(timeout=hangs.SECONDS) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], ended
    assert "TOTAL 45.0" in ended[2][0]


@pytest.mark.slow
def test_worker_that_is_started_again_goes_on_and_a_lost_chief_ends_all(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + MODEL
        + """
@tf.function
def pid():
    count.assign_add(1)
    return os.getpid()

while True:
    print(coordinator.schedule(pid).fetch(), int(count), flush=True)
    time.sleep(0.01)
"""
    )
    with started(path) as tasks:
        worker, server, chief = tasks
        assert chief.stdout.readline().split() == [str(worker.pid), "1"]
        worker.kill()
        worker.communicate()
        again = start(path, "worker", worker.cluster)
        tasks.append(again)
        lines = iter(chief.stdout.readline, "")
        number, count = next(line.split() for line in lines if str(again.pid) in line)
        assert int(number) == again.pid and int(count) > 1
        chief.kill()
        assert "the chief is lost" in server.communicate(timeout=hangs.SECONDS)[1]
        assert "the chief is lost" in again.communicate(timeout=hangs.SECONDS)[1]
        assert (server.returncode, again.returncode) == (1, 1)


@pytest.mark.parametrize(
    ("job", "text"), [("chief", "job_name is 'chief'"), ("ps", "exceeds the maximum id of ps")]
)
def test_server_of_a_wrong_task_raises(job, text):
    with pytest.raises(ValueError, match=text):
        tf.distribute.Server({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, job, 1)


def test_hogwild_without_shared_memory_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    script = """
import pycollective as tf
strategy = tf.distribute.ParameterServerStrategy(consistency="hogwild")
with strategy.scope():
    tf.Variable([1.0, 2.0])
"""
    status, _, errors = run(tmp_path, script, servers=1, workers=1)
    assert status == 1 and "NotAvailableError: consistency='hogwild' needs the memory" in errors


# Tokens -------------------------------------------------------------------------------------------


def test_tokens_that_mean_nothing_raise():
    def no_name(token):
        raise ValueError("no such value")

    for tokens in (None, [], [["list", 2]], [["list", 1 << 60]], [["tensor"]], [["dict"]], [[]], [7],
                   [["pickle"]], [["list", 1]] * 100, [["list", -1]], [["list", 1.0], ["plain", 1]],
                   [["float", "0x1p99999"]], [["plain", {"a": 1}]], [["plain", 1.5]],
                   [["plain", 1], ["plain", 2]]):  # fmt: skip
        with pytest.raises(HandshakeError):
            decode(tokens, [], no_name)


def test_decode_an_array_of_numbers_as_a_scalar_raises():
    with pytest.raises(HandshakeError):
        decode([["scalar"]], [np.ones(2)], lambda token: None)


@pytest.mark.parametrize(
    "specs",
    [
        "bad", [7], [["<f4", -1]], [["<f4", 1 << 60]], [["<f4", 0, 1 << 34, 1 << 34]],
        [["<U0", 1 << 34]], [["<f4", *[1 << 33] * 40]], [["<f8", 1 << 30]] * 3,
    ],
)  # fmt: skip
def test_a_wrong_header_of_arrays_ends_the_link_and_not_the_thread(specs):
    """The peer gets the end of the connection, and the server's thread a `LinkLostError`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with theirs:
        link, peer = Link(Channel(ours), "the chief"), Channel(theirs)
        theirs.sendall(peer.encoded({"request": "x", "arrays": specs}))
        with pytest.raises(LinkLostError, match="the connection to the chief has ended"):
            link.receive()
        theirs.settimeout(10)
        assert theirs.recv(1) == b""


def reached(address):
    """Return the family of the socket by which a task reaches another one that echoes."""

    def enter(channel, hello):
        link = Link(channel, hello["task"])
        link.send(*link.receive())
        link.close()

    sockets, _ = listen(address, enter)
    try:
        link = link_to("/job:ps/task:0", address, "chief", 10.0)
        sent = [np.arange(5.0), np.ones((200, 300), np.float32)]
        message, arrays = link.call({"request": "echo"}, sent)
        assert message["request"] == "echo"
        for one, other in zip(sent, arrays, strict=True):
            np.testing.assert_array_equal(one, other)
        family = link._channel.socket.family
        link.close()
        return family
    finally:
        sockets.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are those of Linux")
def test_tasks_of_one_host_talk_through_a_unix_socket_or_tcp(monkeypatch):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    assert reached(address) == socket.AF_UNIX
    with socket.socket(socket.AF_UNIX) as other:  # it has the name, and is no task
        other.bind(task_links._UNIX_NAME + address)
        other.listen()
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        assert reached(address) == socket.AF_INET
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    assert reached(address) == socket.AF_INET


def test_messages_through_a_unix_socket_of_one_user_have_no_hmac(monkeypatch):
    for owner, codes in ((os.getuid(), 0), (os.getuid() + 1, 32)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda owner=owner: owner)
            one, other = socket.socketpair()
            with one, other:
                sender, receiver = Channel(one), Channel(other)
                sender.seal(b"k" * 32, connected=True)
                receiver.seal(b"k" * 32, connected=False)
                data = sender.encoded({})
                assert len(data) == 4 + len("{}") + codes
                assert receiver.decoded(data[4:]) == {}


def test_equal_messages_of_other_types_are_encoded_apart():
    with socket.socket() as sock:
        channel = Channel(sock)
        values = [1, True, 1.0, None, "1", [1], [True], {"a": 1}, {"a": True}]
        for _ in range(2):
            texts = [channel.encoded({"value": value}, repeated=True)[4:] for value in values]
            assert texts == [
                json.dumps({"value": v}, separators=(",", ":")).encode() for v in values
            ]
        shared = [1]
        message = {"value": shared}
        channel.encoded(message, repeated=True)
        shared.append(2)
        assert channel.encoded(message, repeated=True)[4:] == b'{"value":[1,2]}'


def test_equal_messages_are_parsed_once_and_each_hmac_is_checked():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        sender, receiver = Channel(one), Channel(other)
        sender.seal(b"k" * 32, connected=True)
        receiver.seal(b"k" * 32, connected=False)
        request = {"request": "call", "arrays": [], "steps": secrets.randbits(60)}
        first, second, third = [sender.encoded(request)[4:] for _ in range(3)]
        found = receiver.decoded(first, repeated=True)
        found["steps"] = 0  # a change of the message does not reach the next one
        parses = handshake._parsed_before.cache_info().misses
        assert receiver.decoded(second, repeated=True) == request
        assert handshake._parsed_before.cache_info().misses == parses
        for wrong in (second, third[:-1] + bytes([third[-1] ^ 1])):  # replayed, and changed
            with pytest.raises(HandshakeError, match="changed on its way"):
                receiver.decoded(wrong, repeated=True)
        assert receiver.decoded(third, repeated=True) == request


def test_encode_objects_raises():
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode([object()], lambda value: None)
    with pytest.raises(ValueError, match="join them to fewer arrays"):
        encode(list(range(10_000)), lambda value: None)


# The store ----------------------------------------------------------------------------------------


def create(store, key, array, given=True):
    spec = [array.dtype.str, *array.shape]
    reply, _ = store.answer(
        {"request": "create", "key": key, "spec": spec}, [array] if given else []
    )
    return reply


def pulled(store, number, have=0):
    reply, arrays = store.answer({"request": "pull", "have": [[number, have]]}, [])
    return reply["found"][0], arrays


def test_store_keeps_the_first_value_and_refuses_another_shape():
    store = Store()
    assert create(store, "a#0", np.ones(3), given=False) == {"wanted": True}
    number = create(store, "a#0", np.ones(3))["number"]
    assert create(store, "a#0", np.zeros(3))["number"] == number
    assert pulled(store, number)[1][0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="another program version"):
        create(store, "a#0", np.zeros(4))


def test_store_sends_only_the_rows_that_have_changed():
    store = Store()
    number = create(store, "table#0", np.zeros((4096, 2)))["number"]
    (version, _), _ = pulled(store, number)
    push = {"request": "push", "items": [[number, "rows"]]}
    store.answer(push, [np.array([3, 70]), np.ones((2, 2))])
    found, arrays = pulled(store, number, version)
    assert found == [version + 1, "rows"]
    assert arrays[0].tolist() == [3, 70] and arrays[1].tolist() == [[1, 1], [1, 1]]
    assert pulled(store, number, version + 1) == ([version + 1, "same"], [])
    _rows, (values,) = store.answer({"request": "rows", "items": [number]}, [np.array([70, 0])])
    assert values.tolist() == [[1, 1], [0, 0]]


def test_store_counts_updates_and_bytes():
    store = Store()
    number = create(store, "a#0", np.ones(4))["number"]
    store.answer({"request": "push", "items": [[number, "add"]]}, [np.ones(4)])
    pulled(store, number)
    assert store.answer({"request": "load"}, [])[0]["load"] == [1, 32, 1, 32, 64]


@pytest.mark.parametrize("indices", [[3, 3], [70, 3], [-1, 3], [3, 4096]])
def test_store_refuses_wrong_rows(indices):
    store = Store()
    number = create(store, "table#0", np.zeros((4096, 2)))["number"]
    with pytest.raises(HandshakeError, match="indices|an index"):
        store.answer(
            {"request": "push", "items": [[number, "rows"]]}, [np.array(indices), np.ones((2, 2))]
        )


def step_of(store, numbers, gradient, rule=("Adagrad", {"epsilon": 1e-7}), **options):
    message = {"request": "update", "rule": [*rule], "rate": 0.5, "step": 1, "decay": 1.0}
    message |= {"items": [[numbers, False, False]], **options}
    arrays = gradient if isinstance(gradient, list) else [gradient]
    return store.answer(message, arrays)


def test_store_makes_the_step_of_an_optimizer_with_slots_and_rows():
    store = Store()
    numbers = [create(store, f"{name}#0", np.ones((4096, 2)))["number"] for name in ("v", "slot")]
    step_of(store, numbers, np.full((4096, 2), 3.0))
    weights = 1 - 0.5 * 3 / np.sqrt(10)
    assert pulled(store, numbers[0])[1][0] == pytest.approx(np.full((4096, 2), weights))
    assert pulled(store, numbers[1])[1][0] == pytest.approx(np.full((4096, 2), 10.0))
    items = [[numbers, True, False]]
    step_of(store, numbers, [np.array([3, 70]), np.ones((2, 2))], items=items)
    for number, value in zip(numbers, (weights - 0.5 / np.sqrt(11), 11.0), strict=True):
        found, arrays = pulled(store, number, 2)
        assert found == [3, "rows"] and arrays[0].tolist() == [3, 70]
        assert arrays[1] == pytest.approx(np.full((2, 2), value))


@pytest.mark.parametrize(
    ("slots", "gradient", "rule", "text"),
    [
        (["slot"], np.ones(3), ("Adagrad", {}), "a gradient of another shape"),
        (["slot"], np.ones(4, np.float32), ("Adagrad", {}), "another shape or dtype"),
        ([], np.ones(4), ("Adagrad", {}), "slots that do not fit"),
        (["slot", "short"], np.ones(4), ("Adam", {}), "slots that do not fit"),
        (["slot"], np.ones(4), ("LossScaleOptimizer", {}), "no optimizer"),
        (["slot"], np.ones(4), ("__class__", {}), "no optimizer"),
    ],
)
def test_store_refuses_a_wrong_step_of_an_optimizer(slots, gradient, rule, text):
    store = Store()
    shapes = {"v": 4, "slot": 4, "short": 3}
    numbers = [create(store, name, np.ones(shapes[name]))["number"] for name in ("v", *slots)]
    with pytest.raises(HandshakeError, match=text):
        step_of(store, numbers, gradient, rule)


def test_store_refuses_an_update_of_another_shape():
    store = Store()
    number = create(store, "a#0", np.ones(3))["number"]
    with pytest.raises(HandshakeError, match="another shape"):
        store.answer({"request": "push", "items": [[number, "add"]]}, [np.ones(4)])


# Shared memory ------------------------------------------------------------------------------------


def test_block_of_another_file_is_not_mapped():
    file = SharedFile.made()
    if file is None:
        pytest.skip("this system has no files in memory with locks")
    owner, fd, token = file.name
    assert SharedFile.of([owner, fd, token]) is not None
    for name in ([owner, fd, token[2:] + "00"], [owner, 10**6, token], [owner, fd, "x"], None, []):
        assert SharedFile.of(name) is None


def test_block_in_a_file_is_seen_and_locked_by_another_mapping():
    file = SharedFile.made()
    if file is None:
        pytest.skip("this system has no files in memory with locks")
    block = Block.made(np.zeros((4096, 2)), 5, file)
    other = Block((4096, 2), np.dtype(float), 5, SharedFile.of(file.name), block.offset)
    begun, ended = threading.Event(), threading.Event()

    def change():
        begun.set()
        with other.locked(True) as value:
            other.changed([7])
            value[7] += 1
        ended.set()

    with block.locked(False):
        threading.Thread(target=change).start()
        assert begun.wait(hangs.SECONDS) and not ended.wait(0.05)
        assert block.value[7].tolist() == [0, 0]
    assert ended.wait(hangs.SECONDS)
    assert block.value[7].tolist() == [1, 1]
    assert block.rows_since(block.version - 1).tolist() == [7]
    assert block.rows_since(0) is None


# Snapshots ----------------------------------------------------------------------------------------


def test_snapshot_holds_only_the_run_that_wrote_it(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    blocks = {"v#0": Block.made(np.arange(3.0), 0, None), "w#0": Block.made(np.zeros(()), 1, None)}
    snapshots.write("a", blocks)
    blocks["v#0"].value += 1
    blocks["v#0"].changed()
    snapshots.write("a", blocks)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.2", "1.1", "index.json"]
    again, other = [Store(Snapshots(str(tmp_path)), 3600) for _ in range(2)]
    again.answer({"request": "begin", "run": "a"}, [])
    number = create(again, "v#0", np.zeros(3), given=False)["number"]
    (version, _), (value,) = pulled(again, number)
    assert version == 2 and value.tolist() == [1, 2, 3]
    other.answer({"request": "begin", "run": "b"}, [])
    assert create(other, "v#0", np.zeros(3), given=False) == {"wanted": True}


def test_snapshot_that_is_damaged_raises(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    snapshots.write("a", {"v#0": Block.made(np.arange(3.0), 0, None)})
    (tmp_path / "0.1").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="is damaged"):
        snapshots.read("a")
    for text in (b"[]", b"{", b'{"run": "a", "variables": [{"number": 0}]}'):
        (tmp_path / "index.json").write_bytes(text)
        with pytest.raises(CheckpointError, match="is damaged"):
            snapshots.read("a")


@pytest.mark.slow
def test_lost_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path, transport):
    path = tmp_path / "script.py"
    begin = BEGIN.replace(
        "ParameterServerStrategy()",
        f"ParameterServerStrategy(snapshot_dir={str(tmp_path / 'saved')!r}, snapshot_seconds=0.05, "
        "recover=True)",
    )
    path.write_text(
        begin
        + MODEL
        + """
@tf.function
def add():
    count.assign_add(1)
    table.scatter_add(tf.IndexedSlices(np.ones((1, 4), np.float32), np.array([7])))
    return count

while True:
    print(int(coordinator.schedule(add).fetch()), int(table.numpy()[7, 0]), flush=True)
    coordinator.join()
    time.sleep(0.002)
"""
    )
    with started(path) as tasks:
        _, server, chief = tasks

        def reach(least):
            for line in iter(chief.stdout.readline, ""):
                if int(line.split()[0]) >= least:
                    return int(line.split()[0])
            raise AssertionError(chief.communicate()[1])

        before = reach(100)
        time.sleep(0.2)
        server.kill()
        server.communicate()
        again = start(path, "ps", server.cluster)
        tasks.append(again)
        after = reach(0)
        while after > 100 and after == before + 1:  # lines from before the end of the server
            before, after = after, reach(0)
        assert after > 50, "the counter is that of the snapshot"
        assert reach(after + 200) >= after + 200


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coordinator_that_is_started_again_goes_on_from_its_checkpoint(tmp_path, transport):
    script = (
        MODEL
        + """
checkpoint = tf.train.Checkpoint(table=table, count=count, optimizer=optimizer)
manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=1)
if tf.train.latest_checkpoint("saved"):
    checkpoint.restore(tf.train.latest_checkpoint("saved"))
begin, norm = int(count), float(np.abs(table.numpy()).sum())
iterator = iter(per_worker)
for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
manager.save()
saved = float(np.abs(table.numpy()).sum())
report(begin=begin, norm=norm, saved=saved, steps=int(optimizer.iterations))
"""
    )
    first, _ = results(tmp_path, script, servers=2)
    again, _ = results(tmp_path, script, servers=1)
    assert (first["begin"], first["steps"]) == (0, 20)
    assert (again["begin"], again["steps"]) == (20, 40)
    assert again["norm"] == pytest.approx(first["saved"]) and first["norm"] == 0
