"""`ParameterServerStrategy` on clusters of processes: variables, functions, results and errors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import hangs
import numpy as np
import pytest
from ports import free_ports
from server_clusters import BEGIN, MODEL, results, run, started

import pycollective as tf
from pycollective.cli import main


def test_workers_train_variables_on_servers(tmp_path, transport, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # else `pycollective run` sets a share, too
    found, _ = results(
        tmp_path,
        MODEL
        + """
@tf.function
def has_its_share_of_threads():
    from pycollective import _core, _nn
    return _nn.threads() <= max(1, _core.usable_cores() // 2)

iterator = iter(per_worker)
losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
coordinator.join()
rate.assign(0.1)
again = coordinator.schedule(step, args=(iter(per_worker),))
report(
    share=coordinator.schedule(has_its_share_of_threads).fetch(),
    first=max(float(loss.fetch()) for loss in losses), last=float(again.fetch()), count=int(count),
    steps=int(optimizer.iterations), exact=float(rate) == float(np.float32(0.1)),
    untouched=float(np.abs(table.numpy()[100:]).max()), text=strategy.describe(),
)
""",
    )
    assert found["first"] == 1.0 and found["last"] < 0.1
    assert found["count"] == found["steps"] == 61
    assert found["share"]  # the two workers divide the host's cores
    assert found["exact"] and found["untouched"] == 0.0
    assert "workers: 2 other processes" in found["text"]


@pytest.mark.slow
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
    merged = tmp_path / "merged.json"
    assert main(["timeline", "merge", str(tmp_path / "timeline.json"), "-o", str(merged)]) == 0
    assert json.loads(merged.read_text())["traceEvents"] == events


def test_functions_results_and_errors_are_sent_between_processes(tmp_path, transport):
    found, _ = results(
        tmp_path,
        MODEL
        + """
@tf.function
def echo(value, plus=0):
    return {"value": value, "plus": (plus, None, b"\\xff", "text " * 20, float("inf"), True)}

import collections
Pair = collections.namedtuple("Pair", "first second")

class Diverged(Exception):
    def __init__(self, step):
        super().__init__(f"diverged in step {step}")
        self.step = step

@tf.function
def diverge(step):
    raise Diverged(step)

@tf.function
def no_key(name):
    return {}[name]

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
got = coordinator.schedule(echo, args=(Pair(1, [Pair(tf.constant(2.0), None)]),)).fetch()["value"]
assert got == Pair(1, [Pair(2, None)]) and isinstance(got.second[0], Pair), got
try:
    coordinator.schedule(diverge, args=(7,)).fetch()
except Diverged as error:
    own = [str(error), error.step]
raised(coordinator.join)
key = raised(coordinator.schedule(no_key, args=("a",)).fetch)
raised(coordinator.join)
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
    error=error, result=result, unknown=unknown, own=own, key=key,
    argument=raised(lambda: coordinator.schedule(echo, args=(object(),))),
    method=raised(lambda: coordinator.schedule(Thing().method)),
    fit=raised(fit),
    index=coordinator.schedule(index).fetch(),
)
""",
        workers=1,
    )
    assert found["error"].startswith("ValueError: broken")
    assert found["own"] == ["diverged in step 7 (on /job:worker/task:0)", 7]
    assert found["key"].startswith("KeyError: ")
    assert found["result"].startswith("TypeError: a scheduled function returned a object")
    assert "before that, and keep them" in found["unknown"]
    assert found["argument"].startswith("TypeError: a object cannot be sent")
    assert "the object of the method" in found["method"]
    assert "make all models before the first call" in found["fit"]
    assert found["index"] == 0


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_balanced_places_the_variables_of_all_tasks_by_their_bytes(tmp_path, transport):
    begin = BEGIN.replace("()", "(variable_partitioner='balanced')", 1)
    found, _ = results(
        tmp_path,
        """
with strategy.scope():
    large = tf.Variable(np.zeros((100, 10), np.float32))
    own = tf.Variable(np.zeros((100, 5), np.float32), per_worker_variable=True)
    table = tf.Variable(np.zeros((20_000, 8), np.float32))

@tf.function
def add():
    for variable in (large, own, *table.variables):
        variable.assign_add(tf.ones_like(variable))

for _ in range(4):
    coordinator.schedule(add)
coordinator.join()
report(
    load=[load["bytes"] for load in strategy.extended.load().values()],
    values=[sum(float(v.numpy()[0, 0]) for v in own.read_all()), float(large[0, 0])],
    table=np.unique(table.numpy()).tolist(),
)
""",
        begin=begin,
    )
    assert found["load"] == [4 * (1000 + 80_000)] * 2
    assert found["values"] == [4, 4] and found["table"] == [4]


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


@pytest.mark.slow
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
model.fit(other, **options)  # the chief reads this dataset
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_changes_that_workers_do_not_see_raise_in_fit(tmp_path):
    found, _ = results(
        tmp_path,
        FIT
        + """
model.fit(X, Y, verbose=0)
errors = []
def attempt(call, *arguments):
    try:
        call(*arguments, verbose=0)
    except tf.errors.FailedPreconditionError as error:
        errors.append(str(error))
model.layers[0].trainable = False
attempt(model.fit, X, Y)
attempt(model.predict, X)
model.layers[0].trainable = True
attempt(model.fit, X, Y)
with strategy.scope():
    model.compile("sgd", "mae")
attempt(model.evaluate, X, Y)
report(errors=errors)
""",
        workers=1,
    )
    assert len(found["errors"]) == 2
    for error in found["errors"]:
        assert "has called compile() of the model" in error and "changed `trainable`" in error


@pytest.mark.slow
@pytest.mark.parametrize("where", ["function", "helper", "global"])
def test_worker_of_another_program_version_raises(tmp_path, where):
    found, _ = results(
        tmp_path,
        f"""
is_worker = isinstance(strategy.extended.tasks, tf.distribute.Server)
NUMBER = 1 if is_worker and {where!r} == "global" else 2

if is_worker and {where!r} == "helper":
    def helper():
        return 1
else:
    def helper():
        return 2

if is_worker and {where!r} == "function":
    @tf.function
    def function():
        return 1
else:
    @tf.function
    def function():
        return 2, helper(), NUMBER

report(error=raised(coordinator.schedule(function).fetch))
raised(coordinator.join)
""",
        workers=1,
        servers=1,
    )
    assert found["error"].startswith(
        "FailedPreconditionError: function '__main__.function' differs"
    )
    assert ("__main__.NUMBER" in found["error"]) == (where != "function")


def test_global_that_the_chief_changes_after_the_first_schedule_is_no_other_program(tmp_path):
    found, _ = results(
        tmp_path,
        """
number = 0

@tf.function
def first():
    return number

@tf.function
def second():
    return number + 10

got = [coordinator.schedule(first).fetch()]
number = 1
report(got=[*got, coordinator.schedule(first).fetch(), coordinator.schedule(second).fetch()])
""",
        workers=1,
        servers=1,
    )
    assert found["got"] == [0, 0, 10]


@pytest.mark.slow
def test_per_worker_variable_cached_reads_and_steps_per_call(tmp_path, transport):
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


@pytest.mark.slow
def test_variables_that_the_chief_drops_leave_their_servers(tmp_path, transport):
    found, _ = results(
        tmp_path,
        """
import gc
is_worker = isinstance(strategy.extended.tasks, tf.distribute.Server)

def loads():
    gc.collect()
    coordinator.join()
    return [sum(load[k] for load in strategy.extended.load().values()) for k in ("variables", "bytes")]

with strategy.scope():
    early = tf.Variable(np.ones(1000, np.float32), name="early")
    first = float(early[0])
    del early
    while is_worker and not os.path.exists("dropped"):
        time.sleep(0.01)
    again = tf.Variable(np.full(1000, 2, np.float32), name="early")
    if not is_worker:  # this creation has told the server that the first variable is dropped
        open("dropped", "w").close()
    kept = tf.Variable(np.zeros((100, 10), np.float32), name="kept")
    layer = tf.Variable(np.zeros((300, 20), np.float32), name="layer")
    optimizer = tf.keras.optimizers.Adam(0.1)

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(layer - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, layer), layer)])
    kept.assign_add(tf.ones_like(kept))
    return float(again[0])

@tf.function
def add():
    kept.assign_add(tf.ones_like(kept))
    return float(kept[0, 0])

names = {"layer": layer}
uses = tf.function(lambda: float(names["layer"][0, 0]))
values = [coordinator.schedule(step).fetch() for _ in range(3)]
until = time.monotonic() + 20
while (full := loads())[0] > 7 and time.monotonic() < until:
    time.sleep(0.01)  # a worker may not have run the program yet, and the first variable stays
del step, optimizer, layer, names["layer"]
until = time.monotonic() + 20
while loads()[0] > 2 and time.monotonic() < until:
    time.sleep(0.01)  # the thread of a worker may still have the function
less = loads()
added = [coordinator.schedule(add).fetch() for _ in range(3)]
error = raised(coordinator.schedule(uses).fetch)
raised(coordinator.join)
with strategy.scope():
    later = tf.Variable(np.ones(7, np.float32), name="later")
more = loads()
report(
    values=values, full=full, less=less, more=more, added=added, error=error, kept=float(kept[0, 0])
)
""",
        servers=1,
    )
    assert found["values"] == [2.0, 2.0, 2.0]
    size = 4 * (1000 + 100 * 10)
    slots = 2 * 4 * 300 * 20
    rest = found["full"][1] - (size + slots // 2 + slots)
    assert 0 < rest < 100  # the rate and the number of the step
    assert found["less"] == [2, size] and found["more"] == [3, size + 4 * 7]
    assert found["added"] == [4.0, 5.0, 6.0] and found["kept"] == 6.0
    assert (
        "FailedPreconditionError: the chief's program has dropped this variable" in found["error"]
    )


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


@pytest.mark.slow
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
    # Each step sends a gradient to each server, and slots if the server cannot run the optimizer.
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("job", "number", "text"),
    [
        ("chief", 0, "job_name is .chief."),
        ("ps", 2, "exceeds the maximum id of ps"),
        ("ps", 1, "has the address .127.0.0.1:0.: give it a port"),
    ],
)
def test_server_of_a_wrong_task_raises(job, number, text):
    cluster = {"ps": ["127.0.0.1:1", "127.0.0.1:0"], "worker": ["127.0.0.1:2"]}
    with pytest.raises(ValueError, match=text):
        tf.distribute.Server(cluster, job, number)


@pytest.mark.slow
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


@pytest.mark.slow
def test_values_that_cannot_be_sent_are_errors_and_end_no_worker(tmp_path, transport):
    found, errors = results(
        tmp_path,
        """
@tf.function
def give(kind):
    return {"object": [np.array([object()], object)], "date": np.array(["2020-01-01"], "M8[D]"),
            "many": list(range(10_000)), "empty": np.zeros(2, "U1").view("U1")[:0]}[kind]

@tf.function
def fail():
    raise ValueError("not a text of UTF-8: \\udcff")

@tf.function
def join():
    coordinator.join()

texts = []
calls = [*((give, (kind,)) for kind in ("object", "date", "many")), (fail, ()), (join, ())]
for function, args in calls:
    value = coordinator.schedule(function, args=args)
    texts.append(raised(value.fetch))
    raised(coordinator.join)
report(texts=texts, empty=coordinator.schedule(give, args=("empty",)).fetch().shape)
""",
        workers=1,
    )
    assert "TypeError: an array of dtype object cannot be sent" in found["texts"][0]
    assert "TypeError: an array of dtype datetime64[D] cannot be sent" in found["texts"][1]
    assert "more than 8192 values" in found["texts"][2]
    assert found["texts"][3].startswith("ValueError: not a text of UTF-8: \\udcff")
    assert "join() was called in a scheduled function" in found["texts"][4]
    assert found["empty"] == [0] and "runs again" not in errors


def test_cached_reads_see_no_update_of_another_task_and_plain_reads_do(tmp_path):
    found, _ = results(
        tmp_path,
        """
import contextlib
with strategy.scope():
    shared = tf.Variable(0.0)

@tf.function
def twice(cached):
    block = tf.distribute.experimental.cache_variable_reads() if cached else contextlib.nullcontext()
    with block:
        before = float(shared)
        open(f"read{cached}", "w").close()
        while not os.path.exists(f"written{cached}"):
            time.sleep(0.01)
        return before, float(shared)

def reads(cached):
    shared.assign(1.0)
    value = coordinator.schedule(twice, args=(cached,))
    while not os.path.exists(f"read{cached}"):
        time.sleep(0.01)
    shared.assign(2.0)
    open(f"written{cached}", "w").close()
    return value.fetch()

report(cached=reads(True), plain=reads(False))
""",
        workers=1,
    )
    assert found == {"cached": [1, 1], "plain": [1, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_of_a_launcher_are_the_tasks_of_a_cluster(tmp_path, transport):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN.replace("ParameterServerStrategy()", "ParameterServerStrategy(num_ps=1)")
        + MODEL
        + """
@tf.function
def add():
    count.assign_add(1)
    time.sleep(0.01)
    return tf.distribute.coordinator.experimental_get_current_worker_index()

values = [coordinator.schedule(add) for _ in range(20)]
coordinator.join()
print("FOUND", sorted({int(v.fetch()) for v in values}), int(count), strategy.describe())
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for ranks in (4, 2):
        command = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks)]
        ended = subprocess.run(
            [*command, "--transport", transport, str(path)],
            capture_output=True, text=True, timeout=hangs.SECONDS, env=environment, cwd=tmp_path,
        )  # fmt: skip
        if ranks == 4:
            assert "FOUND [0, 1] 20 workers: 2 other processes" in ended.stdout, ended
            assert ended.returncode == 0, ended
        else:
            assert (
                "has started 2 processes, and a cluster needs a chief, 1 parameter" in ended.stderr
            )


def test_server_has_its_address_as_target_and_listens_there_from_start_on():
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}
    server = tf.distribute.Server(cluster, "worker", 0, start=False)
    assert server.target == f"grpc://{addresses[1]}"
    host, port = addresses[1].split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 1)
    for _ in range(2):
        server.start()
    socket.create_connection((host, int(port)), 1).close()


def test_worker_to_which_no_chief_connects_ends_with_a_reason(monkeypatch):
    monkeypatch.setattr("pycollective.distribute.server.JOIN_SECONDS", 0.0)
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    server = tf.distribute.Server(cluster, "worker", 0, start=False)
    with pytest.raises(SystemExit, match="Perhaps another process is this task, too"):
        server.work(None)
