"""`ParameterServerStrategy` on clusters of processes: variables, functions, errors, and lost tasks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import hangs
import numpy as np
import pytest
from ports import free_ports

import pycollective as tf
from pycollective.distribute.server_variables import Store
from pycollective.distribute.task_links import decode, encode
from pycollective.launch.handshake import HandshakeError

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


def test_workers_train_variables_on_servers(tmp_path):
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
    first=float(losses[0].fetch()), last=float(again.fetch()), count=int(count),
    steps=int(optimizer.iterations), exact=float(rate) == float(np.float32(0.1)),
    untouched=float(np.abs(table.numpy()[100:]).max()), text=strategy.describe(),
)
""",
    )
    assert found["first"] == 1.0 and found["last"] < 0.1
    assert found["count"] == found["steps"] == 61
    assert found["exact"] and found["untouched"] == 0.0
    assert "workers: 2 other processes" in found["text"]


def test_functions_results_and_errors_travel(tmp_path):
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
assert coordinator.done() and int(count) == 0
result = raised(coordinator.schedule(wrong_result).fetch)
raised(coordinator.join)

@tf.function
def late():
    return 1

unknown = raised(coordinator.schedule(late).fetch)
raised(coordinator.join)
late_dataset = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(3)))
no_dataset = raised(coordinator.schedule(step, args=(late_dataset,)).fetch)
raised(coordinator.join)
report(
    error=error, result=result, unknown=unknown, no_dataset=no_dataset,
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
    assert "create all datasets before" in found["no_dataset"]
    assert found["argument"].startswith("TypeError: a object cannot be sent")
    assert "the object of the method" in found["method"]
    assert found["fit"].startswith("NotAvailableError: fit, evaluate and predict")
    assert found["index"] == 0


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
    assert "the other workers go on" in errors


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


def test_hogwild_in_a_cluster_raises(monkeypatch):
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief"}}))
    with pytest.raises(NotImplementedError, match="leave it out in a cluster"):
        tf.distribute.ParameterServerStrategy(consistency="hogwild")


# Tokens -------------------------------------------------------------------------------------------


def test_tokens_that_mean_nothing_raise():
    def no_name(token):
        raise ValueError("no such value")

    for tokens in (None, [], [["list", 2]], [["list", 1 << 60]], [["tensor"]], [["dict"]], [[]], [7],
                   [["pickle"]], [["list", 1]] * 100):  # fmt: skip
        with pytest.raises(HandshakeError):
            decode(tokens, [], no_name)


def test_encode_objects_raises():
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode([object()], lambda value: None)
    with pytest.raises(ValueError, match="join them to fewer arrays"):
        encode(list(range(10_000)), lambda value: None)


# The store ----------------------------------------------------------------------------------------


def created(store, key, array):
    reply, (value,) = store.answer({"request": "create", "key": key}, [array])
    return reply["number"], value


def test_store_keeps_the_first_value_and_refuses_another_shape():
    store = Store()
    number, _ = created(store, "a#0", np.ones(3))
    again, value = created(store, "a#0", np.zeros(3))
    assert again == number and value.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="another program version"):
        created(store, "a#0", np.zeros(4))


def test_store_sends_only_the_rows_that_have_changed():
    store = Store()
    number, _ = created(store, "table#0", np.zeros((4096, 2)))
    push = {"request": "push", "items": [[number, "rows"]]}
    store.answer(push, [np.array([3, 70]), np.ones((2, 2))])
    reply, arrays = store.answer({"request": "pull", "have": [[number, 1]]}, [])
    assert reply["found"] == [[2, "rows"]]
    assert arrays[0].tolist() == [3, 70] and arrays[1].tolist() == [[1, 1], [1, 1]]
    reply, arrays = store.answer({"request": "pull", "have": [[number, 2]]}, [])
    assert reply["found"] == [[2, "same"]] and not arrays


@pytest.mark.parametrize("indices", [[3, 3], [70, 3], [-1, 3], [3, 4096]])
def test_store_refuses_wrong_rows(indices):
    store = Store()
    number, _ = created(store, "table#0", np.zeros((4096, 2)))
    with pytest.raises(HandshakeError, match="indices"):
        store.answer(
            {"request": "push", "items": [[number, "rows"]]}, [np.array(indices), np.ones((2, 2))]
        )


def test_store_refuses_an_update_of_another_shape():
    store = Store()
    number, _ = created(store, "a#0", np.ones(3))
    with pytest.raises(HandshakeError, match="another shape"):
        store.answer({"request": "push", "items": [[number, "add"]]}, [np.ones(4)])
