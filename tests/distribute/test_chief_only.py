"""Saving or restoring on some workers only: all workers get an error at once, or nothing changes."""

from __future__ import annotations

import sys

import pytest
from workers import ended, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux"),
]

# Each case has a strategy of its own, because an error ends the strategy of its case.
_CASES = """
import shutil, time
from pycollective import keras
callbacks = keras.callbacks
x, y = np.ones((16, 4)), np.ones((16, 1))
def objects(strategy):
    with strategy.scope():
        v = tf.Variable(np.arange(3.0), aggregation=tf.VariableAggregation.MEAN)
        seen = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse")
    return v, seen, model
def fit(model, epochs, *callbacks):
    return model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))
CHIEF_CALLS = {
    "save": lambda v, seen, model: tf.train.Checkpoint(v=v).save("d/ckpt"),
    "save aggregated": lambda v, seen, model: tf.train.Checkpoint(seen=seen).save("d/ckpt"),
    "write": lambda v, seen, model: tf.train.Checkpoint(v=v).write("d/ckpt"),
    "manager": lambda v, seen, model: tf.train.CheckpointManager(
        tf.train.Checkpoint(v=v), "d", 2).save(),
    "restore": lambda v, seen, model: tf.train.Checkpoint(v=v).restore("there/ckpt"),
    "Model.save": lambda v, seen, model: model.save("d/m.keras"),
    "Model.save_weights": lambda v, seen, model: model.save_weights("d/m.weights.h5"),
    "Model.load_weights": lambda v, seen, model: model.load_weights("there/m.weights.h5"),
}
OTHER_CALLS = {
    "reduce": lambda s, v, seen, model: s.reduce("SUM", tf.constant(1.0), axis=None),
    "gather": lambda s, v, seen, model: s.gather(tf.constant([1]), axis=0),
    "read": lambda s, v, seen, model: float(seen),
    "step": lambda s, v, seen, model: s.run(lambda: v.assign_add(np.ones(3))),
    "fit": lambda s, v, seen, model: fit(model, 1),
    "restore other": lambda s, v, seen, model: tf.train.Checkpoint(v=v).restore(None),
    "save other": lambda s, v, seen, model: tf.train.Checkpoint(v=v, seen=seen).save("d/other"),
}
CALLBACKS = {
    "checkpoint": lambda: callbacks.ModelCheckpoint("d/c", save_weights_only=True),
    "weights": lambda: callbacks.ModelCheckpoint("d/c.weights.h5", save_weights_only=True),
    "model": lambda: callbacks.ModelCheckpoint("d/c{epoch}.keras"),
    "backup": lambda: callbacks.BackupAndRestore("d/backup"),
}
def case(name, act):
    strategy = strategy_of()
    made = objects(strategy)
    if strategy.extended.should_checkpoint:
        shutil.rmtree("d", ignore_errors=True)
    strategy.extended.workers.barrier()
    begin, error = time.monotonic(), None
    try:
        act(strategy, strategy.extended.should_checkpoint, made)
    except Exception as raised:
        error = raised
    files = sorted(os.listdir("d")) if os.path.isdir("d") else []
    kind = type(error).__name__
    print("SAID " + json.dumps({name: [kind, str(error), time.monotonic() - begin, files]}))
    strategy.close()
"""
_ALL = """
strategy = strategy_of()
v, seen, model = objects(strategy)
tf.train.Checkpoint(v=v).write("there/ckpt")
model.save_weights("there/m.weights.h5")
strategy.close()
for call, do in CHIEF_CALLS.items():
    for other_call, do_other in OTHER_CALLS.items():
        # All pairs with a save; else one reduction, and the call with the most similar collectives.
        other = "save other" if call == "restore" else "restore other"
        if not call.startswith("save") and other_call not in ("reduce", other):
            continue
        if (call, other_call) == ("save aggregated", "save other"):
            continue  # allowed: both save, each to a path of its own
        case(f"{call}, {other_call}", lambda strategy, chief, made:
             do(*made) if chief else do_other(strategy, *made))
for name, make in CALLBACKS.items():
    case(f"fit, {name}", lambda strategy, chief, made:
         fit(made[2], 2, *([make()] if chief else [])))
"""


def errors(tmp_path, workers, body, **more):
    """Return the result of each case on all workers, the chief first."""
    tasks = [("worker", index) for index in range(workers)]
    said = ended(start(tmp_path, tasks, _CASES + body, **more)).said
    assert all(cases.keys() == said[0].keys() for cases in said)
    return {name: [cases[name] for cases in said] for name in said[0]}


def test_save_or_restore_by_the_chief_alone_raises_on_all_workers(tmp_path):
    pytest.importorskip("h5py")
    found = errors(tmp_path, 2, _ALL)
    assert len(found) == 2 * 7 - 1 + 6 * 2 + 4
    for name, cases in found.items():
        for kind, text, seconds, _ in cases:
            assert kind == "MismatchError", (name, cases)
            assert "save/restore" in text or "make different calls: worker 0: " in text, name
            assert seconds < 30, (name, seconds)  # not a timeout
        _, _, other_call = name.partition(", ")
        assert (other_call.endswith("other") and "make different calls" in cases[0][1]) or (
            "needs every worker" in cases[0][1]
        ), (name, cases)
        # No file is written by a save that some worker did not join.
        assert not [file for *_, files in cases for file in files], (name, cases)
    text = found["save, step"][0][1]
    assert text.startswith(
        "Checkpoint.save('d/ckpt') needs every worker: ranks made calls that "
    ), text
    text = found["save, restore other"][1][1]
    assert "worker 0: Checkpoint.save('d/ckpt'); worker 1: Checkpoint.restore(None)" in text


_THREE = """
big = {"a": np.zeros(400_000), "b": np.zeros((300, 300), np.float32)}
def step(strategy):
    def replica():
        return tf.distribute.get_replica_context().all_reduce("SUM", big)
    return strategy.run(replica)
def act(strategy, chief, made):
    checkpoint = tf.train.Checkpoint(v=made[0])
    for number in range(3):
        step(strategy)
        if number < 2 or chief:
            checkpoint.save("d/ckpt")
    step(strategy)
case("large", act)
def leaves(strategy, chief, made):
    step(strategy)
    if chief:
        tf.train.Checkpoint(seen=made[1]).save("d/ckpt")
case("leaves", leaves)
def own_paths(strategy, chief, made):  # TensorFlow's tutorial does the same
    me = strategy.extended.input_pipeline[1]
    folder = "d" if chief else f"d/workertemp_{me}"
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=made[0], seen=made[1]), folder, 1)
    for _ in range(3):
        step(strategy)
        manager.save()
    if not chief:
        shutil.rmtree(folder)
    strategy.extended.workers.barrier()
    tf.train.Checkpoint(v=made[0], seen=made[1]).restore(tf.train.latest_checkpoint("d"))
case("own paths", own_paths)
def local(strategy, chief, made):  # no variable of a strategy, so the chief may save alone
    if chief:
        tf.train.Checkpoint(n=tf.Variable(3)).save("d/local")
    step(strategy)
    strategy.extended.workers.barrier()
case("local", local)
"""


def test_save_of_three_workers_between_hosts_raises_unless_paths_are_their_own(tmp_path):
    found = errors(tmp_path, 3, _THREE, hosts=True)
    for kind, text, seconds, files in found["large"]:
        assert kind == "MismatchError", found["large"]
        assert "save/restore" in text
        assert seconds < 30
        assert "ckpt-2.index.json" in files and "ckpt-3.index.json" not in files
    kinds = [kind for kind, *_ in found["leaves"]]
    assert kinds == ["PeerLostError", "NoneType", "NoneType"], found["leaves"]
    text = found["leaves"][0][1]
    assert text.startswith("Checkpoint.save('d/ckpt') needs every worker: "), text
    for name, first in (("own paths", "ckpt-3"), ("local", "local-1")):
        for kind, text, _, files in found[name]:
            assert kind == "NoneType", (name, text)
            assert files == ["checkpoint", f"{first}.index.json", f"{first}.safetensors"]


_DIFFER = """
me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
def save(strategy, chief, made):
    made[2].save_weights(f"d/{me}.weights.h5")
    made[2].save(f"d/{me}.keras")
case("saved", save)
os.rename("d", "kept") if not me else None
def weights(strategy, chief, made):
    strategy.extended.workers.barrier()
    made[2].load_weights("kept/0.weights.h5")
    made[2].load_weights(f"kept/{me}.weights.h5")  # the same in another file
    with strategy.scope():
        keras.models.load_model("kept/0.keras")
case("same", weights)
def missing(strategy, chief, made):
    made[2].load_weights("kept/0.weights.h5" if chief else "none.weights.h5")
case("one has none", missing)
def other(strategy, chief, made):
    with strategy.scope():
        keras.models.load_model(f"kept/{me}.keras")
case("equal models", other)
def nobody(strategy, chief, made):
    made[2].load_weights("none.weights.h5")
case("nobody has any", nobody)
"""


def test_load_of_weights_that_one_worker_lacks_raises_on_all_workers(tmp_path):
    pytest.importorskip("h5py")
    found = errors(tmp_path, 2, _DIFFER)
    for name, kind in {
        "saved": "NoneType",
        "same": "NoneType",
        "equal models": "NoneType",
        "one has none": "CheckpointError",
        "nobody has any": "FileNotFoundError",
    }.items():
        assert [result[0] for result in found[name]] == [kind] * 2, (name, found[name])
    for _, text, *_ in found["one has none"]:
        assert "worker 1: 'none.weights.h5', which it cannot read" in text
