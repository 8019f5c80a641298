"""Training by several workers between hosts, with TLS, and again after a worker was killed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
from test_multi_worker import _MODEL
from workers import ended, start

import pycollective as tf
from pycollective import keras

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]
TASKS = [("worker", 0), ("worker", 1)]


@pytest.fixture(scope="module")
def alone():
    """Return a function that trains a model in this process, in a given way."""
    before = keras.backend.floatx()
    here = {"np": np, "tf": tf}
    exec(_MODEL, here)
    try:
        yield lambda train: train(here["model_of"](), here)
    finally:
        keras.backend.set_floatx(before)


def tls(folder):
    """Return environment variables for TLS; write the keys and certificates to a folder."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for words in (
        f"req -x509 {new} -keyout ca.key -out ca.pem -subj /CN=cluster -days 2",
        f"req {new} -keyout node.key -out node.csr -subj /CN=node",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem -days 2",
    ):
        subprocess.run(
            ["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=30
        )
    files = {"CERT": "node.pem", "KEY": "node.key", "CA": "ca.pem"}
    return {f"PYCOLLECTIVE_TLS_{what}": str(folder / file) for what, file in files.items()}


_WAYS = """
options = tf.distribute.experimental.CommunicationOptions(implementation=os.environ["HOW"])
strategy = strategy_of(communication_options=options)
with strategy.scope():
    model = model_of()
x, y = data(37)
def gradients():
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant(x[int(rank)::4])) ** 2)
    found = tape.gradient(loss, model.trainable_variables)
    return tf.distribute.get_replica_context().all_reduce("SUM", found)
summed = [strategy.experimental_local_results(g) for g in strategy.run(gradients)]
bits = [b"".join(g[r].numpy().tobytes() for g in summed).hex() for r in range(R)]
say(hosts=strategy.extended.workers.communicator.hosts)
print("SAID " + json.dumps({"bits": bits}))
say(**trained(model))
"""


@pytest.mark.parametrize(
    ("how", "secure", "replicas"),
    [("AUTO", False, 2), ("RING", True, 1)],
)
def test_training_between_hosts_in_rings_and_tls_equals_that_of_one_worker(
    tmp_path, alone, how, secure, replicas
):
    """All workers get equal bits, and the numbers of one worker up to rounding."""
    more = tls(tmp_path) if secure else {}
    said = ended(start(tmp_path, TASKS, _MODEL + _WAYS, replicas, hosts=True, HOW=how, **more)).said
    assert said[0] == said[1]
    assert said[0]["hosts"] == [0, 1]
    assert len(set(said[0]["bits"])) == 1
    assert len(said[0]["bits"]) == replicas
    for name, value in alone(lambda model, here: here["trained"](model)).items():
        np.testing.assert_allclose(said[0][name], value, rtol=1e-9, atol=1e-9, err_msg=name)


_FIT = """
def fit(model, *callbacks):
    x, y = data(32)
    return model.fit(
        x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
def weights(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])
"""
_KILLED = """
strategy = strategy_of()
with strategy.scope():
    model = model_of()
class Dies(tf.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        seen.append(batch)
        if len(seen) == 11 and os.environ.get("DIES") and strategy.extended.input_pipeline[1]:
            os.kill(os.getpid(), 9)
seen = []
history = fit(model, tf.keras.callbacks.BackupAndRestore("backup"), Dies())
say(epochs=history.epoch, weights=weights(model))
"""


def test_fit_resumes_from_its_backup_after_a_worker_was_killed(tmp_path, alone):
    first = ended(start(tmp_path, TASKS, _MODEL + _FIT + _KILLED, DIES="1"))
    assert first.codes == [1, -9], first
    assert "PeerLostError: rank 1 (worker 1 at 127.0.0.1:" in first.errors[0]
    said = ended(start(tmp_path, TASKS, _MODEL + _FIT + _KILLED)).said
    assert said[0] == said[1]
    assert said[0]["epochs"] == [2, 3]

    def train(model, here):
        exec(_FIT, here)
        here["fit"](model)
        return here["weights"](model)

    np.testing.assert_allclose(said[0]["weights"], alone(train), rtol=1e-9, atol=1e-9)


def test_equivalence_of_several_workers_is_verified(tmp_path):
    body = """
strategy = strategy_of()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
x = np.random.default_rng(0).normal(size=(8, 4)).astype("f4")
report = tf.distribute.verify_equivalence(model, x)
say(replicas=report.replicas, ok=report.ok)
"""
    tasks = [("worker", index) for index in range(2)]
    for said in ended(start(tmp_path, tasks, body, replicas=2)).said:
        assert said == {"replicas": 4, "ok": True}
