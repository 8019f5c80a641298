"""Gradients that are summed while the tape still computes others."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path

import numpy as np
import pytest
import workers
from strategies import mirrored

import pycollective as pc
from pycollective import distribute as d
from pycollective import keras
from pycollective.distribute.experimental import CommunicationOptions
from pycollective.distribute.reducer import GradientReducer
from pycollective.tensor import GradientTape, Tensor, Variable, constant, custom_gradient, ops


@pytest.fixture(autouse=True)
def _sums_during_backward(monkeypatch):
    monkeypatch.setattr(d.StrategyExtended, "sums_during_backward", True)


def replica_id():
    return d.get_replica_context().local_replica_id


# The tape -------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_are_ready_in_turn(persistent):
    a, b, c = (Variable(float(i + 2)) for i in range(3))
    events = []

    @custom_gradient
    def marked(x):
        return x * 1.0, lambda g: events.append("first layer") or g

    with GradientTape(persistent=persistent) as tape:
        first = marked(a * 3.0)
        y = c * (first * b) + a  # a's gradient is complete only after the first layer
    together = tape.connected(y, [a, b, c, Variable(1.0)])
    assert together == [True, True, True, False]
    grads = tape.gradient(
        y, {"a": a, "b": b, "c": c}, ready=lambda i, g: events.append((i, float(g)))
    )
    assert events == [(2, 18.0), (1, 24.0), "first layer", (0, 37.0)]
    assert {k: float(g) for k, g in grads.items()} == {"a": 37.0, "b": 24.0, "c": 18.0}


def test_ready_is_called_for_each_source_with_a_gradient():
    x = constant(2.0)
    v, w, unused = Variable(3.0), Variable(4.0), Variable(5.0)
    seen = {}
    with GradientTape() as tape:
        tape.watch(x)
        y = x * v
        z = y * w
        _ = unused * 2.0
    sources = [z, y, x, unused, w]
    assert tape.connected(z, sources) == [True, True, True, False, True]
    grads = tape.gradient(z, sources, ready=lambda i, g: seen.setdefault(i, g))
    assert [None if g is None else float(g) for g in grads] == [1.0, 4.0, 12.0, None, 6.0]
    assert {i: float(g) for i, g in seen.items()} == {0: 1.0, 1: 4.0, 2: 12.0, 4: 6.0}
    assert all(grads[i] is g for i, g in seen.items())


def test_gradient_of_a_variable_assigned_between_reads_is_ready_once():
    v = Variable(2.0)
    seen = []
    with GradientTape() as tape:
        y = v * 3.0
        v.assign(5.0)
        z = y + v * 7.0
    assert float(tape.gradient(z, v, ready=lambda i, g: seen.append(float(g)))) == 10.0
    assert seen == [10.0]


# Under a strategy -----------------------------------------------------------------------------


def train(strategy, how, options=None, steps=4):
    """Return the weights after some steps."""
    if options is not None:
        strategy.extended.gradient_options = options
    rng = np.random.default_rng(0)
    x, y = rng.random((24, 7)).astype("float32"), rng.integers(0, 3, 24)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.layers.Dense(n, "tanh", kernel_regularizer="l2") for n in (33, 17, 5)]
            + [keras.layers.Dense(3)]
        )
        optimizer = keras.optimizers.Adam(0.01)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=keras.losses.Reduction.NONE
        )

    def step(images, labels):
        with GradientTape() as tape:
            loss = pc.nn.compute_average_loss(cross_entropy(labels, model(images)))
            loss += pc.nn.scale_regularization_loss(sum(model.losses))
        weights = model.trainable_variables
        if how == "minimize":
            optimizer.minimize(loss, weights, tape=tape)
        else:
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    batches = pc.data.Dataset.from_tensor_slices((x, y)).batch(12)
    for _ in range(steps // 2):
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=batch)
    return [[c.numpy() for c in getattr(v, "values", [v])] for v in model.trainable_variables]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("bytes_per_pack", [0, 1, 300, 1 << 20])
def test_minimize_gives_the_bits_of_apply_gradients(replicas, bytes_per_pack):
    for implementation in ("AUTO", "RING"):
        options = CommunicationOptions(bytes_per_pack, None, implementation)
        one, other = (train(mirrored(replicas), how, options) for how in ("minimize", "apply"))
        for minimized, applied in zip(one, other, strict=True):
            assert len({c.tobytes() for c in [*minimized, *applied]}) == 1


@pytest.mark.parametrize(
    "ops",
    [
        d.ReductionToOneDevice(),
        d.HierarchicalCopyAllReduce(2),
        d.RingAllReduce(0),
        d.NcclAllReduce(),
    ],
    ids=lambda o: type(o).__name__,
)
def test_every_operation_gives_the_same_bits(ops):
    one, other = (train(mirrored(3, ops), how) for how in ("minimize", "apply"))
    for minimized, applied in zip(one, other, strict=True):
        assert len({c.tobytes() for c in [*minimized, *applied]}) == 1


@pytest.fixture
def begun(monkeypatch):
    """Return the reductions that have begun early, by replica."""
    found = {}
    begin = GradientReducer.begin

    def watched(reducer, likes, *args):
        found[replica_id()] = reduction = begin(reducer, likes, *args)
        return reduction

    monkeypatch.setattr(GradientReducer, "begin", watched)
    return found


def two_layers(strategy, backward):
    """Return a step whose tape calls ``backward(g)`` between two layers of variables."""
    with strategy.scope():
        first, last = Variable([1.0, 2.0]), Variable([3.0, 4.0])
        optimizer = keras.optimizers.SGD(1.0)

    @custom_gradient
    def between(x):
        return x * 1.0, backward

    def step():
        with GradientTape() as tape:
            y = ops.reduce_sum(between(first * 2.0) * last)
        optimizer.minimize(y, [first, last], tape=tape)

    return step, first, last


def test_reduction_and_tape_are_under_way_at_the_same_time(begun):
    strategy = mirrored(2)
    strategy.extended.gradient_options = CommunicationOptions(bytes_per_pack=1)
    done = []

    def backward(g):
        # The last layer's gradient is summed before this one's is computed.
        ((_, (under_way,)),) = begun[replica_id()]._begun
        under_way.wait(20)
        done.append(under_way.done())
        return g

    step, first, last = two_layers(strategy, backward)
    strategy.run(step)
    assert done == [True, True]
    for variable, want in ((first, [1 - 12.0, 2 - 16.0]), (last, [3 - 4.0, 4 - 8.0])):
        for component in variable.values:
            assert component.numpy().tolist() == want


@pytest.mark.parametrize(("cores", "early"), [(2, False), (3, True)])
def test_replicas_without_a_core_to_spare_sum_at_the_end(monkeypatch, begun, cores, early):
    monkeypatch.setattr(d.StrategyExtended, "sums_during_backward", None)
    monkeypatch.setattr("pycollective._core.usable_cores", lambda: cores)
    strategy = mirrored(2)
    strategy.extended.gradient_options = CommunicationOptions(bytes_per_pack=1)
    were_begun = []
    step, first, _ = two_layers(strategy, lambda g: were_begun.append(replica_id() in begun) or g)
    strategy.run(step)
    assert were_begun == [early, early]
    assert first.values[0].numpy().tolist() == [1 - 12.0, 2 - 16.0]


WORKERS = """
from pycollective.distribute import reducer
from pycollective.distribute.experimental import CommunicationOptions
from test_overlap import train, two_layers
tf.distribute.StrategyExtended.sums_during_backward = True
strategy = strategy_of()
weights = {}
for bytes_per_pack in (1, 300):
    for how in ("minimize", "apply"):
        found = train(strategy, how, CommunicationOptions(bytes_per_pack), steps=2)
        weights[how + str(bytes_per_pack)] = [c.tobytes().hex() for v in found for c in v]
strategy.extended.gradient_options = CommunicationOptions(bytes_per_pack=1)
begun = []
reductions = {}
begin = reducer.GradientReducer.begin
def watched(self, *args):
    reductions[self._first.rank] = begin(self, *args)
    return reductions[self._first.rank]
reducer.GradientReducer.begin = watched
def backward(g):
    if tf.distribute.get_replica_context().local_replica_id == 0:
        reductions[0]._send_on()  # as the next bucket does it
        made = strategy.extended._threads.reducers  # empty once another replica has failed
        begun.extend(reducer.has_reached_workers for reducer in made[:1])
        reductions.clear()
    return g
step, first, last = two_layers(strategy, backward)
strategy.run(step)
values = [c.numpy() for v in (first, last) for c in v.values]
def places():
    return [c.current().array.ctypes.data for v in (first, last) for c in v.values]
before = places()
strategy.run(step)
in_place = places() == before  # no reference prevents updates in place
def fails(g):
    if tf.distribute.get_replica_context().replica_id_in_sync_group == 3:
        import time
        until = time.monotonic() + 20
        made = strategy.extended._threads.reducers  # by replica 0 of this worker
        while not (made and made[0].has_reached_workers) and time.monotonic() < until:
            time.sleep(0.01)
        raise ZeroDivisionError("in the tape")
    return backward(g)
step, *_ = two_layers(strategy, fails)
try:
    strategy.run(step)
except Exception as failed:
    error = f"{type(failed).__name__}: {failed}"
say(weights=weights, begun=begun, values=values, in_place=in_place, error=error)
"""


@pytest.mark.slow
def test_workers_reduce_while_tapes_compute_and_fail_together(tmp_path):
    """Buckets are reduced among the workers while the tapes compute; a failure of one fails all."""
    first, second = workers.run(tmp_path, 2, WORKERS, replicas=2).said
    for said in (first, second):
        for size in (1, 300):
            assert said["weights"][f"minimize{size}"] == said["weights"][f"apply{size}"]
        assert said["weights"] == first["weights"]
        assert said["begun"][0] and said["in_place"]
        assert said["values"] == [[1 - 24.0, 2 - 32.0]] * 2 + [[3 - 8.0, 4 - 16.0]] * 2
    assert second["error"] == "ZeroDivisionError: in the tape"
    assert first["error"].startswith("AbortedError: "), first
    assert "worker 1: replica 1 could not compute its gradients: in the tape" in first["error"]


@pytest.mark.parametrize("last", [0, 1])
def test_a_tape_that_fails_stops_the_others(two, last):
    """Replica 0 waits for buckets before or after replica 1, which failed, has returned."""
    two.extended.gradient_options = CommunicationOptions(bytes_per_pack=1)

    def backward(g):
        if replica_id() == 1:
            raise ZeroDivisionError("in the tape")
        if last == 0:
            time.sleep(0.05)
        return g

    step, *_ = two_layers(two, backward)
    with pytest.raises(ZeroDivisionError, match="in the tape"):
        two.run(step)

    def caught():
        try:
            step()
        except ZeroDivisionError:
            if last == 1:
                time.sleep(0.05)

    begin = time.monotonic()
    with pytest.raises(
        pc.AbortedError, match="replica 1 could not compute its gradients: in the t"
    ):
        two.run(caught)
    assert time.monotonic() - begin < 60
    again = two.run(lambda: d.get_replica_context().all_reduce("SUM", constant(1.0)))
    assert float(again.values[0]) == 2.0


@pytest.mark.parametrize("bytes_per_pack", [0, 1])
def test_a_replica_that_does_not_minimize_is_named(two, bytes_per_pack):
    two.extended.gradient_options = CommunicationOptions(bytes_per_pack)
    step, *_ = two_layers(two, lambda g: g)
    with pytest.raises(
        RuntimeError, match=r"replica 0 is in collective number 1.*replica 1 has fin"
    ):
        two.run(lambda: step() if replica_id() == 0 else None)


@pytest.mark.parametrize("bytes_per_pack", [0, 1])
def test_variables_without_a_gradient_are_warned_about_and_unchanged(two, bytes_per_pack):
    two.extended.gradient_options = CommunicationOptions(bytes_per_pack)
    with two.scope():
        used, lost, unused = (Variable(i + 1.0, name=f"v{i}") for i in range(3))
        optimizer = keras.optimizers.SGD(1.0)

    @custom_gradient
    def loses_one(x, y):
        return x * y, lambda g: (g * 5.0, None)

    def step():
        with GradientTape() as tape:
            loss = loses_one(used, lost)
        optimizer.minimize(loss, [used, lost, unused], tape=tape)

    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['v1', 'v2'\]"):
        two.run(step)
    assert [float(v) for v in (used, lost, unused)] == [-9.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        two.run(lambda: optimizer.minimize(lambda: used * 1.0, [unused]))


@pytest.mark.parametrize("bytes_per_pack", [0, 1])
def test_minimize_keeps_no_value_so_updates_are_in_place(two, bytes_per_pack):
    two.extended.gradient_options = CommunicationOptions(bytes_per_pack)
    # Otherwise the update would copy every variable in each step.
    step, first, _ = two_layers(two, lambda g: g)
    two.run(step)
    before = [c.current().array.ctypes.data for c in first.values]
    two.run(step)
    assert [c.current().array.ctypes.data for c in first.values] == before


def test_half_precision_is_rounded_once():
    strategy = mirrored(3)
    strategy.extended.gradient_options = CommunicationOptions(bytes_per_pack=1)
    with strategy.scope():
        v, w = Variable(np.zeros(1, "float16")), Variable(np.zeros(1, "float16"))
        optimizer = keras.optimizers.SGD(1.0)
    parts = [np.float16(1.0), np.float16(2**-11), np.float16(2**-11)]

    def step():
        with GradientTape() as tape:
            loss = (v + w) * Tensor(parts[replica_id()].reshape(1))
        optimizer.minimize(loss, [v, w], tape=tape)

    strategy.run(step)
    assert v.values[2].numpy()[0] == -(np.float16(1.0) + np.float16(2**-10))


def test_no_thread_is_left():
    def progress_threads():
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                names.append((task / "comm").read_text().strip())
        return names.count("pc-progress")

    def become(count):
        until = time.monotonic() + 20
        while progress_threads() != count and time.monotonic() < until:
            time.sleep(0.01)
        return progress_threads() == count

    gc.collect()  # strategies of earlier tests
    assert become(0)
    strategy = mirrored(2)
    strategy.extended.gradient_options = CommunicationOptions(bytes_per_pack=1)
    step, *rest = two_layers(strategy, lambda g: g)
    strategy.run(step)
    assert become(2)  # a thread names itself once it runs
    del strategy, step, rest
    gc.collect()
    assert become(0)
