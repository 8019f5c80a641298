"""`load_weights` with the result of `tf.train.latest_checkpoint`."""

import os

import numpy as np
import pytest
from fitting import mirrored

from pycollective import keras, train
from pycollective.errors import CheckpointError
from pycollective.keras import layers

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)


def make(units=4, built=True):
    first = [keras.Input((3,))] if built else []
    model = keras.Sequential([*first, layers.Dense(units, "relu"), layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model, **options):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)
    return model


WRITERS = {
    "ModelCheckpoint": lambda model, folder: fit(
        model,
        callbacks=[
            keras.callbacks.ModelCheckpoint(folder / "ckpt_{epoch}", save_weights_only=True)
        ],
    ),
    "save_weights": lambda model, folder: fit(model).save_weights(folder / "weights"),
    "Checkpoint(model=)": lambda model, folder: train.Checkpoint(model=fit(model)).save(
        folder / "ckpt"
    ),
    "Checkpoint(net=, optimizer=)": lambda model, folder: train.Checkpoint(
        optimizer=fit(model).optimizer, net=model
    ).save(folder / "ckpt"),
    "Checkpoint(model)": lambda model, folder: train.Checkpoint(fit(model)).save(folder / "ckpt"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("built", [True, False])
def test_load_weights_of_the_latest_checkpoint_continues_training(tmp_path, writer, built):
    model = make()
    WRITERS[writer](model, tmp_path)
    other = make(built=built)
    other.load_weights(train.latest_checkpoint(tmp_path))
    np.testing.assert_array_equal(other(X).numpy(), model(X).numpy())
    for each in (model, other):
        fit(each)
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations) == 4
    np.testing.assert_array_equal(other(X).numpy(), model(X).numpy())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_load_weights_into_another_number_of_replicas_sets_all_weights(tmp_path, before, after):
    with mirrored(before).scope():
        model = make()
    fit(model).save_weights(tmp_path / "w")
    with mirrored(after).scope():
        other = make()
    other.load_weights(tmp_path / "w")
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_save_weights_checkpoint_exists_without_overwrite_raises(tmp_path):
    model = make()
    model.save_weights(tmp_path / "w")
    with pytest.raises(FileExistsError, match="overwrite=False"):
        model.save_weights(tmp_path / "w", overwrite=False)


def test_load_weights_of_another_model_changes_nothing_or_what_fits(tmp_path):
    saved = fit(make(5))
    saved.save_weights(tmp_path / "w")
    model = make(4)
    before = model.get_weights()
    with pytest.raises(
        CheckpointError, match=r"(?s)saved with shape \(3, 5\).*Nothing was changed"
    ):
        model.load_weights(tmp_path / "w")
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.warns(UserWarning, match="These were skipped"):
        model.load_weights(tmp_path / "w", skip_mismatch=True)
    np.testing.assert_array_equal(model.get_weights()[3], saved.get_weights()[3])
    assert model.get_weights()[3].any()
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_load_weights_of_a_checkpoint_with_fewer_layers_names_the_variable(tmp_path):
    short = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu")])
    short.save_weights(tmp_path / "w")
    with pytest.raises(CheckpointError, match="no value for dense"):
        make(4).load_weights(tmp_path / "w")


def test_load_weights_of_a_checkpoint_with_two_such_models_names_both(tmp_path):
    one, other = make(4), make(4)
    path = train.Checkpoint(generator=one, copy=other).write(tmp_path / "w")
    with pytest.raises(CheckpointError, match=r"several parts.*generator, copy.*generator=model"):
        make(4).load_weights(path)
    train.Checkpoint(generator=one, again=one).write(tmp_path / "w")
    make(4).load_weights(path)


def test_load_weights_of_a_checkpoint_without_a_model_is_an_error(tmp_path):
    path = train.Checkpoint(mean=keras.metrics.Mean()).write(tmp_path / "m")
    for model in (make(), make(built=False)):
        with pytest.raises(CheckpointError, match="does not fit model"):
            model.load_weights(path)


def test_load_weights_without_a_checkpoint_raises(tmp_path):
    with pytest.raises(ValueError, match="latest_checkpoint"):
        make().load_weights(train.latest_checkpoint(tmp_path))
    with pytest.raises(ValueError, match="no checkpoint has this name"):
        make().load_weights(tmp_path / "none")


def test_load_weights_of_a_damaged_checkpoint_raises_checkpoint_error(tmp_path):
    make().save_weights(tmp_path / "w")
    os.truncate(tmp_path / "w.safetensors", 10)
    with pytest.raises(CheckpointError, match="its index says"):
        make().load_weights(tmp_path / "w")
