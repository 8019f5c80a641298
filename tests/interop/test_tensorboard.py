"""Event files as TensorBoard itself reads them."""

import numpy as np
import pytest

from pycollective import keras

pytest.importorskip("tensorboard")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

X = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)


def test_everything_is_read(tmp_path):
    from tensorboard.backend.event_processing import plugin_event_accumulator as accumulator
    from tensorboard.backend.event_processing import plugin_event_multiplexer as multiplexer
    from tensorboard.util import tensor_util

    inputs = keras.Input((3,), name="rows")
    first = keras.layers.Dense(4, "relu", name="first")(inputs)
    both = keras.layers.Concatenate(name="both")([inputs, first])
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(both))
    model.compile("adam", "mse", metrics=["mae"])
    board = keras.callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, update_freq="batch"
    )
    history = model.fit(
        X,
        X[:, :1],
        5,
        epochs=3,
        verbose=0,
        validation_data=(X, X[:, :1]),
        callbacks=[board],
    ).history
    runs = multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert set(runs.Runs()) == {"train", "validation"}
    keep = {accumulator.TENSORS: 0}
    read = {
        run: accumulator.EventAccumulator(str(tmp_path / run), size_guidance=keep).Reload()
        for run in runs.Runs()
    }

    def numbers(run, tag):
        # TensorBoard turns the older messages into tensors as it reads them.
        events = read[run].Tensors(tag)
        return [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in events]

    for run, prefix in (("train", ""), ("validation", "val_")):
        for name in ("loss", "mae"):
            found = numbers(run, f"epoch_{name}")
            assert [step for step, _ in found] == [0, 1, 2]
            values = [value for _, value in found]
            np.testing.assert_allclose(values, history[prefix + name], rtol=1e-6)
    assert [step for step, _ in numbers("train", "batch_loss")] == list(range(1, 13))
    tags = read["train"].Tags()
    for weight in model.weights:
        (*_, last) = read["train"].Tensors(f"{weight.name}/histogram")
        buckets = tensor_util.make_ndarray(last.tensor_proto)
        # Rows of left edge, right edge, count.
        assert buckets[:, 2].sum() == np.prod(weight.shape)
        assert buckets[-1, 1] == pytest.approx(weight.numpy().max())
        (*_, last) = read["train"].Tensors(f"{weight.name}/image")
        width, height, png = tensor_util.make_ndarray(last.tensor_proto)
        assert int(width) * int(height) == np.prod(weight.shape) and png[1:4] == b"PNG"
    (event,) = read["train"].Tensors("model")
    assert b"first (Dense)" in tensor_util.make_ndarray(event.tensor_proto).item()
    assert tags["graph"]
    nodes = {node.name: (node.op, list(node.input)) for node in read["train"].Graph().node}
    assert nodes["rows"][1] == [] and nodes["first"] == ("Dense", ["rows"])
    assert nodes["both"] == ("Concatenate", ["rows", "first"])
    assert nodes["last"] == ("Dense", ["both"])
    plugins = read["train"].summary_metadata
    assert plugins["epoch_loss"].plugin_data.plugin_name == "scalars"
    assert plugins["model"].plugin_data.plugin_name == "text"
