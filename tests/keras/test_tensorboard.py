"""The callback `TensorBoard`: its files as TensorBoard itself reads them."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from fitting import STRATEGIES, TARGETS, X, dense, linear

from pycollective import keras
from pycollective.keras import callbacks

ONES = np.ones((8, 1), np.float32)


def read(directory):
    """Return TensorBoard's reader of a run's files, and what its numbers are by tag and step."""
    from tensorboard.backend.event_processing import plugin_event_accumulator as accumulator

    run = accumulator.EventAccumulator(str(directory), size_guidance={accumulator.TENSORS: 0})
    run.Reload()
    numbers = {}
    for tag in run.Tags()[accumulator.TENSORS]:
        if run.summary_metadata[tag].plugin_data.plugin_name == "scalars":
            for event in run.Tensors(tag):
                numbers[tag, event.step] = value(event).item()
    return run, numbers


def value(event):
    from tensorboard.util import tensor_util

    return tensor_util.make_ndarray(event.tensor_proto)


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_numbers_weights_and_layers_are_read_by_tensorboard(name, tmp_path):
    pytest.importorskip("tensorboard")
    with STRATEGIES[name]().scope():
        model = dense(2)
        model.compile(keras.optimizers.SGD(0.03125), "mse", metrics=["mae"])
    board = callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, update_freq=2, write_steps_per_second=True
    )
    data = (X, TARGETS)
    logs = model.fit(*data, 4, epochs=2, verbose=0, callbacks=[board], validation_data=data).history
    (run, train), (_, held_out) = read(tmp_path / "train"), read(tmp_path / "validation")
    for epoch in range(2):
        for name in ("loss", "mae"):
            assert train[f"epoch_{name}", epoch] == np.float32(logs[name][epoch])
            expected = np.float32(logs[f"val_{name}"][epoch])
            assert held_out[f"epoch_{name}", epoch] == expected
            assert held_out[f"evaluation_{name}_vs_iterations", 6 * (epoch + 1)] == expected
        assert train["epoch_learning_rate", epoch] == 0.03125
        assert train["epoch_steps_per_second", epoch] > 0
    # Six batches in each epoch; after every second one.
    assert [s for tag, s in train if tag == "batch_loss"] == [2, 4, 6, 8, 10, 12]
    for weight in model.weights:
        (*_, last) = run.Tensors(f"{weight.name}/histogram")
        buckets = value(last)  # rows of left edge, right edge, count
        assert buckets[:, 2].sum() == np.prod(weight.shape)
        assert buckets[-1, 1] == pytest.approx(weight.numpy().max())
        (*_, last) = run.Tensors(f"{weight.name}/image")
        width, height, png = value(last)
        assert int(width) * int(height) == np.prod(weight.shape) and png[1:4] == b"PNG"
    (event,) = run.Tensors("model")
    assert b"(Dense)" in value(event).item()
    assert run.summary_metadata["model"].plugin_data.plugin_name == "text"


def test_graph_of_a_functional_model_is_read_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    inputs = keras.Input((3,), name="rows")
    first = keras.layers.Dense(4, "relu", name="first")(inputs)
    both = keras.layers.Concatenate(name="both")([inputs, first])
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(both))
    model.compile("adam", "mse")
    rows = np.ones((4, 3), np.float32)
    model.fit(rows, rows[:, :1], verbose=0, callbacks=[callbacks.TensorBoard(tmp_path)])
    run, _ = read(tmp_path / "train")
    nodes = {node.name: node for node in run.Graph().node}
    found = {name: (node.op, list(node.input)) for name, node in nodes.items()}
    assert found["rows"][1] == [] and found["first"] == ("Dense", ["rows"])
    assert found["both"] == ("Concatenate", ["rows", "first"])
    assert found["last"] == ("Dense", ["both"])
    assert b"7" in nodes["both"].attr["output_shape"].s


def test_weights_become_pictures_from_dark_to_bright_and_histograms_of_what_is_finite(tmp_path):
    pytest.importorskip("tensorboard")
    from PIL import Image

    from pycollective.keras.callbacks.event_files import EventFile

    file = EventFile(tmp_path)
    file.image("weights", np.array([[0.0, 0.5], [1.0, -1.0], [0.0, 1.0]]), 3)
    file.image("constant", np.ones((1, 2)), 3)
    file.histogram("values", np.array([1.0, np.nan, 3.0, np.inf]), 3)
    file.histogram("none", np.array([np.nan]), 3)
    file.close()
    run, _ = read(tmp_path)
    for tag, shape, expected in (
        ("weights", [2, 3], [0x80, 0xBF, 0xFF, 0, 0x80, 0xFF]),
        ("constant", [2, 1], [0, 0]),
    ):
        (event,) = run.Tensors(tag)
        width, height, png = value(event)
        assert [int(width), int(height)] == shape and event.step == 3
        assert np.asarray(Image.open(io.BytesIO(png))).ravel().tolist() == expected
    assert value(run.Tensors("values")[0])[:, 2].sum() == 2
    assert value(run.Tensors("none")[0])[:, 2].sum() == 0


def test_of_several_workers_the_chief_writes_event_files(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    model = linear()
    monkeypatch.setattr(model.distribute_strategy.extended, "should_save_summary", False)
    board = callbacks.TensorBoard(tmp_path / "logs", histogram_freq=1, update_freq="batch")
    model.fit(ONES, ONES, verbose=0, callbacks=[board], validation_data=(ONES, ONES))
    assert not list(tmp_path.iterdir())


def test_without_tensorboard_an_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "pycollective.keras.callbacks.event_files", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.attr_value_pb2", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[tensorboard\]'"):
        callbacks.TensorBoard()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"profile_batch": 2}, "PYCOLLECTIVE_TIMELINE"),
        ({"embeddings_freq": 1}, "embeddings_freq"),
        ({"update_freq": 0}, "update_freq must be"),
    ],
)
def test_settings_that_are_not_available_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        callbacks.TensorBoard(**settings)
