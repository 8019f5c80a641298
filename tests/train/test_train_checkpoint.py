"""Checkpoint: saved values are restored, now or later, for any number of replicas."""

import json

import numpy as np
import pytest

from pycollective import distribute, keras, train
from pycollective.errors import CheckpointError
from pycollective.tensor import (
    GradientTape,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    ops,
)
from pycollective.train.generator import Generator

INPUTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def make_model():
    return keras.Sequential(
        [keras.layers.Dense(5, activation="relu"), keras.layers.Dense(2, kernel_regularizer="l2")]
    )


def train_step(model, optimizer):
    with GradientTape() as tape:
        loss = ops.reduce_sum(ops.square(model(INPUTS)))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return float(loss)


@pytest.fixture
def trained():
    model, optimizer = make_model(), keras.optimizers.Adam(0.05)
    for _ in range(3):
        train_step(model, optimizer)
    return model, optimizer


def test_save_numbers_checkpoints_and_restore_brings_values_back(tmp_path):
    weight = Variable(np.arange(3.0), name="w")
    checkpoint = train.Checkpoint(weight=weight)
    first = checkpoint.save(tmp_path / "ckpt")
    weight.assign([7.0, 8.0, 9.0])
    second = checkpoint.save(str(tmp_path / "ckpt"))
    assert (first, second) == (str(tmp_path / "ckpt-1"), str(tmp_path / "ckpt-2"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint",
        "ckpt-1.index.json",
        "ckpt-1.safetensors",
        "ckpt-2.index.json",
        "ckpt-2.safetensors",
    ]
    checkpoint.restore(first).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), [0, 1, 2])
    # The counter was restored too, so that the numbers continue.
    assert int(checkpoint.save_counter) == 1
    assert train.latest_checkpoint(tmp_path) == second


def test_index_names_shapes_dtypes_and_digest(tmp_path):
    import hashlib

    path = train.Checkpoint(model={"w": Variable(np.zeros((2, 3)))}).save(tmp_path / "c")
    index = json.loads((tmp_path / "c-1.index.json").read_text())
    assert index["tensors"]["model/w"] == {"shape": [2, 3], "dtype": "float64"}
    data = (tmp_path / "c-1.safetensors").read_bytes()
    assert index["data"]["sha256"] == hashlib.sha256(data).hexdigest()
    assert index["data"]["bytes"] == len(data)
    assert path.endswith("c-1")


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3.5),
        np.arange(6).reshape(2, 3),
        np.zeros((0, 4)),
        np.array([True, False]),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=np.uint8),
        np.float16([1.5]),
    ],
    ids=lambda v: f"{np.asarray(v).dtype}{np.shape(v)}",
)
def test_each_kind_of_value_survives(tmp_path, value):
    start = Variable(value, trainable=False)
    path = train.Checkpoint(v=start).write(tmp_path / "x")
    other = Variable(np.zeros_like(value), trainable=False)
    train.Checkpoint(v=other).read(path).assert_consumed()
    np.testing.assert_array_equal(other.numpy(), value)
    assert other.dtype == np.asarray(value).dtype and other.shape == np.shape(value)


def test_restore_before_the_model_is_built_as_in_the_tutorial(tmp_path, trained):
    model, optimizer = trained
    path = train.Checkpoint(optimizer=optimizer, model=model).save(tmp_path / "ckpt")
    expected = model(INPUTS).numpy()

    new_model, new_optimizer = make_model(), keras.optimizers.Adam(0.9)
    status = train.Checkpoint(optimizer=new_optimizer, model=new_model).restore(path)
    status.assert_existing_objects_matched()
    with pytest.raises(CheckpointError, match="model/layers/0/kernel"):
        status.assert_consumed()
    with pytest.raises(AssertionError):
        status.assert_consumed()
    np.testing.assert_array_equal(new_model(INPUTS).numpy(), expected)
    assert float(new_optimizer.learning_rate) == np.float32(0.05)
    # The first step makes the slots with the saved values, so that both continue alike.
    assert [train_step(new_model, new_optimizer) for _ in range(2)] == [
        train_step(model, optimizer) for _ in range(2)
    ]
    status.assert_consumed()
    assert int(new_optimizer.iterations) == 5


def test_restore_into_built_objects_sets_all_values(tmp_path, trained):
    model, optimizer = trained
    path = train.Checkpoint(optimizer=optimizer, model=model).save(tmp_path / "ckpt")
    expected = [w.numpy() for w in model.weights]
    train_step(model, optimizer)
    assert not np.array_equal(model.weights[0].numpy(), expected[0])
    train.Checkpoint(optimizer=optimizer, model=model).restore(path).assert_consumed()
    for weight, value in zip(model.weights, expected, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    assert int(optimizer.iterations) == 3


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(2)]
        self.scale = Variable(1.0)

    def build(self, input_shape):
        self.late = Variable(np.zeros(2, np.float32))

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.late


def test_attributes_set_and_lists_filled_after_the_restore_get_the_values(tmp_path):
    net = Net()
    net.blocks.append(keras.layers.Dense(2))
    net(INPUTS)
    net.scale.assign(3.0)
    net.late.assign([1.0, 2.0])
    path = train.Checkpoint(net=net).save(tmp_path / "c")

    other = Net()
    status = train.Checkpoint(net=other).restore(path)
    assert float(other.scale) == 3.0
    other.blocks.append(keras.layers.Dense(2))
    np.testing.assert_array_equal(other(INPUTS).numpy(), net(INPUTS).numpy())
    status.assert_consumed()


def test_list_filled_after_the_restore_gets_the_values(tmp_path):
    class Chain(keras.Model):
        def __init__(self, layers=()):
            super().__init__()
            self.chain = list(layers)

        def call(self, x):
            for layer in self.chain:
                x = layer(x)
            return x

    saved = Chain([keras.layers.Dense(2), keras.layers.Dense(3)])
    expected = saved(INPUTS).numpy()
    path = train.Checkpoint(model=saved).save(tmp_path / "c")
    model = Chain()
    status = train.Checkpoint(model=model).restore(path)
    model.chain.extend([keras.layers.Dense(2), keras.layers.Dense(3)])
    np.testing.assert_array_equal(model(INPUTS).numpy(), expected)
    status.assert_consumed()


def test_value_assigned_after_the_restore_is_not_set_again(tmp_path):
    path = train.Checkpoint(a=Variable(1.0), b=Variable(2.0)).save(tmp_path / "c")
    checkpoint = train.Checkpoint(a=Variable(0.0))
    checkpoint.restore(path)
    checkpoint.a.assign(5.0)
    checkpoint.b = Variable(0.0)
    assert (float(checkpoint.a), float(checkpoint.b)) == (5, 2)


def test_objects_can_be_added_to_the_checkpoint_later(tmp_path):
    path = train.Checkpoint(a=Variable(1.0), b=Variable(2.0)).save(tmp_path / "c")
    a, b = Variable(0.0), Variable(0.0)
    checkpoint = train.Checkpoint(a=a)
    status = checkpoint.restore(path)
    assert (float(a), float(b)) == (1, 0)
    checkpoint.b = b
    assert float(b) == 2
    status.assert_consumed()


def test_shared_objects_are_saved_once_and_restored_under_either_name(tmp_path):
    shared = Variable([1.0, 2.0])
    path = train.Checkpoint(one=shared, two=[shared]).save(tmp_path / "c")
    index = json.loads((tmp_path / "c-1.index.json").read_text())
    assert set(index["tensors"]) == {"one", "save_counter"}
    target = Variable([0.0, 0.0])
    train.Checkpoint(two=[target]).restore(path)
    np.testing.assert_array_equal(target.numpy(), [1, 2])


def test_root_is_saved_as_the_checkpoints_own_parts(tmp_path, trained):
    model, _ = trained
    path = train.Checkpoint(model).save(tmp_path / "c")
    other = make_model()
    train.Checkpoint(other).restore(path)
    np.testing.assert_array_equal(other(INPUTS).numpy(), model(INPUTS).numpy())


def test_restore_none_does_nothing():
    weight = Variable(1.0)
    status = train.Checkpoint(w=weight).restore(None)
    assert float(weight) == 1 and status.expect_partial() is status
    with pytest.raises(AssertionError, match="nothing is being restored"):
        status.assert_consumed()


def test_another_shape_or_dtype_is_an_error_that_lists_all_and_changes_nothing(tmp_path):
    values = {"a": Variable(np.ones(3)), "b": Variable(np.ones(2)), "c": Variable(1.0)}
    path = train.Checkpoint(**values).save(tmp_path / "c")
    a, b, c = Variable(np.zeros(4)), Variable(np.zeros(2, np.float32)), Variable(0.0)
    with pytest.raises(CheckpointError) as error:
        train.Checkpoint(a=a, b=b, c=c).restore(path)
    for part in ("a: saved with shape (3,)", "(4,)", "b: saved", "float64", "float32", "restore"):
        assert part in str(error.value)
    assert float(c) == 0


def test_layer_built_later_with_another_shape_raises(tmp_path, trained):
    path = train.Checkpoint(model=trained[0]).save(tmp_path / "c")
    other = make_model()
    train.Checkpoint(model=other).restore(path)
    with pytest.raises(CheckpointError, match=r"model/layers/0/kernel: saved with shape \(3, 5\)"):
        other(np.zeros((2, 7), np.float32))


def test_restore_into_other_objects_leaves_the_decision_to_the_status(tmp_path, caplog):
    path = train.Checkpoint(generator=Variable(1.0)).save(tmp_path / "c")
    checkpoint = train.Checkpoint(classifier=Variable(0.0))
    for restore in (checkpoint.restore, checkpoint.read):
        status = restore(path)
        assert "no values for classifier" in caplog.text
        with pytest.raises(CheckpointError, match=r"generator.*classifier"):
            status.assert_nontrivial_match()
        with pytest.raises(AssertionError, match="generator"):
            status.assert_consumed()
    checkpoint.generator = Variable(0.0)
    assert float(checkpoint.generator) == 1
    assert status.assert_nontrivial_match() is status
    # All saved values are in use now; only the object that was never saved has no value.
    with pytest.raises(AssertionError, match="no values for: classifier"):
        status.assert_consumed()
    del checkpoint.classifier
    assert status.assert_consumed() is status


def test_a_variable_replaced_after_a_complete_restore_keeps_its_own_value(tmp_path):
    layer = keras.layers.Dense(2)
    layer(INPUTS)
    path = train.Checkpoint(a=Variable(1.0), layer=layer).save(tmp_path / "c")
    other = keras.layers.Dense(2)
    other(INPUTS)
    checkpoint = train.Checkpoint(a=Variable(0.0), layer=other)
    checkpoint.restore(path).assert_consumed()
    checkpoint.a = Variable(5.0)
    checkpoint.layer = keras.layers.Dense(2, kernel_initializer="ones")
    checkpoint.layer(INPUTS)
    assert float(checkpoint.a) == 5
    np.testing.assert_array_equal(checkpoint.layer.kernel.numpy(), np.ones((3, 2)))


def test_parts_replaced_while_others_are_missing_keep_their_own_values(tmp_path, trained):
    model, optimizer = trained
    path = train.Checkpoint(model=model, optimizer=optimizer, a=Variable(1.0)).save(tmp_path / "c")
    net = make_model()
    checkpoint = train.Checkpoint(model=net, a=Variable(0.0))
    checkpoint.restore(path)  # the optimizer is missing
    checkpoint.a = Variable(5.0)
    checkpoint.model = keras.Sequential([keras.layers.Dense(7, kernel_initializer="ones")])
    checkpoint.model(INPUTS)
    checkpoint.optimizer = keras.optimizers.Adam(0.9)
    assert float(checkpoint.a) == 5
    np.testing.assert_array_equal(checkpoint.model.layers[0].kernel.numpy(), np.ones((3, 7)))
    # Missing parts are restored as before.
    assert float(checkpoint.optimizer.learning_rate) == np.float32(0.05)
    np.testing.assert_array_equal(net(INPUTS).numpy(), model(INPUTS).numpy())


def test_partly_other_objects_are_named_on_request(tmp_path, caplog):
    path = train.Checkpoint(step=Variable(1.0), generator=Variable(1.0)).save(tmp_path / "c")
    status = train.Checkpoint(step=Variable(0.0), classifier=Variable(0.0)).restore(path)
    assert "no values for classifier" in caplog.text
    with pytest.raises(CheckpointError, match="generator"):
        status.assert_consumed()
    with pytest.raises(CheckpointError, match="classifier"):
        status.assert_existing_objects_matched()


def test_checkpoint_of_a_plain_number_raises():
    with pytest.raises(ValueError, match=r"step=3 cannot be saved"):
        train.Checkpoint(step=3)


def test_save_needs_a_file_name(tmp_path):
    with pytest.raises(ValueError, match="beginning of a file name"):
        train.Checkpoint(v=Variable(1.0)).save(f"{tmp_path}/")


def test_safetensors_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[train\]'"):
        train.Checkpoint(v=Variable(1.0)).save(tmp_path / "c")


# Strategies ---------------------------------------------------------------------------------------


def mirrored(count):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(count)])


@pytest.mark.parametrize(("saved", "restored"), [(3, 2), (2, None), (None, 2)])
def test_checkpoints_are_the_same_with_every_strategy(tmp_path, saved, restored):
    def make(replicas):
        def objects():
            total = Variable(
                0.0,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            return Variable(np.zeros(2, np.float32)), total

        if replicas is None:
            return None, objects()
        strategy = mirrored(replicas)
        with strategy.scope():
            return strategy, objects()

    _, (weight, total) = make(saved)
    weight.assign([1.0, 2.0])
    total.assign(12.0)
    path = train.Checkpoint(weight=weight, total=total).save(tmp_path / "c")

    strategy, (other, other_total) = make(restored)
    train.Checkpoint(weight=other, total=other_total).restore(path).assert_consumed()
    np.testing.assert_array_equal(other.numpy(), [1, 2])
    assert float(other_total) == 12
    if strategy is not None:
        for component in other.values:
            np.testing.assert_array_equal(component.numpy(), [1, 2])
        assert [float(c) for c in other_total.values] == [12 / restored] * restored


def test_delayed_restore_reaches_every_replica(tmp_path, trained):
    model, optimizer = trained
    path = train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    expected = [w.numpy() for w in model.weights]
    strategy = mirrored(2)
    with strategy.scope():
        other, other_optimizer = make_model(), keras.optimizers.Adam()
    train.Checkpoint(model=other, optimizer=other_optimizer).restore(path)
    outputs = strategy.run(lambda: other(INPUTS))
    for part in outputs.values:
        np.testing.assert_array_equal(part.numpy(), model(INPUTS).numpy())
    for weight, value in zip(other.weights, expected, strict=True):
        for component in weight.values:
            np.testing.assert_array_equal(component.numpy(), value)
    strategy.run(lambda: train_step(other, other_optimizer) and None)
    for slot in other_optimizer.variables:
        parts = [c.numpy() for c in slot.values]
        np.testing.assert_array_equal(parts[0], parts[1])


def test_delayed_restore_of_a_variable_that_is_no_weight_reaches_every_replica(tmp_path):
    net = Net()
    net(INPUTS)
    net.late.assign([4.0, 5.0])
    path = train.Checkpoint(net=net).save(tmp_path / "c")
    strategy = mirrored(3)
    with strategy.scope():
        other = Net()
    train.Checkpoint(net=other).restore(path)
    strategy.run(lambda: other(INPUTS))
    assert [c.numpy().tolist() for c in other.late.values] == [[4, 5]] * 3


def functional(units=5):
    first, second = keras.Input((4,)), keras.Input((3,))
    shared = keras.layers.Dense(units)
    x = shared(keras.layers.Dense(2)(first)) * shared(keras.layers.Dense(2)(second))
    model = keras.Model([first, second], keras.layers.BatchNormalization()(x))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(("saved", "restored"), [(1, 2), (2, 1), (2, 3)])
def test_compiled_functional_model_is_restored_with_other_replicas(tmp_path, saved, restored):
    inputs = [np.arange(24.0).reshape(6, 4) / 24, np.arange(18.0).reshape(6, 3) / 18]
    target = np.linspace(0, 1, 30).reshape(6, 5)

    def scope(replicas):
        return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope()

    with scope(saved):
        model = functional()
    model.fit(inputs, target, verbose=0)
    path = train.Checkpoint(model=model).save(tmp_path / "c")
    with scope(restored):
        other = functional()
    status = train.Checkpoint(model=other).restore(path)
    other.optimizer.build(other.trainable_variables)
    status.assert_consumed()
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        # Moving means are the replicas' mean, which may be rounded.
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for a, b in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    wider = functional(6)
    with pytest.raises(
        CheckpointError, match=r"(?s)kernel: saved with shape \(2, 5\).*gamma.*beta"
    ):
        train.Checkpoint(model=wider).restore(path)


def test_save_in_a_replica_is_refused(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        checkpoint = train.Checkpoint(v=Variable(1.0))
    with pytest.raises(RuntimeError, match=r"outside of strategy\.run"):
        strategy.run(lambda: checkpoint.save(tmp_path / "c"))
    assert list(tmp_path.iterdir()) == []


def test_metrics_can_be_saved(tmp_path):
    mean = keras.metrics.Mean()
    mean.update_state([1.0, 2.0, 6.0])
    path = train.Checkpoint(mean=mean).save(tmp_path / "c")
    other = keras.metrics.Mean()
    train.Checkpoint(mean=other).restore(path).assert_consumed()
    assert float(other.result()) == 3


class Scaled(keras.layers.Layer):
    """A layer whose part has the name of a variable."""

    def __init__(self):
        super().__init__()
        self.scale = keras.layers.Dense(1)
        self.number = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, x):
        return self.scale(x) * self.number


def test_part_with_the_name_of_a_variable_is_trained_and_saved(tmp_path):
    layer, other = Scaled(), Scaled()
    for each in (layer, other):
        each(np.ones((1, 2), np.float32))
    assert [v.shape for v in layer.trainable_variables] == [(), (2, 1), (1,)]
    path = train.Checkpoint(layer=layer).save(tmp_path / "c")
    train.Checkpoint(layer=other).restore(path).assert_consumed()
    for a, b in zip(layer.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_variable_that_replaces_one_of_a_layer_is_trained():
    layer = keras.layers.Dense(1, use_bias=False)
    layer(np.ones((1, 2), np.float32))
    layer.kernel = Variable(np.zeros((2, 1), np.float32))
    assert [id(v) for v in layer.trainable_variables] == [id(layer.kernel)]


def test_keys_with_the_same_text_are_saved_both(tmp_path):
    a, b = Variable(1.0), Variable(2.0)
    checkpoint = train.Checkpoint(d={1: a, "1": b})
    path = checkpoint.save(tmp_path / "c")
    a.assign(8.0)
    b.assign(9.0)
    checkpoint.restore(path)
    assert (float(a), float(b)) == (1.0, 2.0)


def test_bfloat16_variable_is_restored(tmp_path):
    values = np.array([1.0, -0.5]).astype(pytest.importorskip("ml_dtypes").bfloat16)
    v = Variable(values)
    checkpoint = train.Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "c")
    v.assign(np.zeros_like(values))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(v.numpy(), values)


def test_checkpoint_with_a_name_that_exists_already_raises():
    root = train.Checkpoint(layer=Variable(1.0))
    with pytest.raises(ValueError, match="if root.layer already exists"):
        train.Checkpoint(root=root, layer=Variable(2.0))
    train.Checkpoint(root=root, layer=root.layer)
    for name in ("save", "save_counter", "restore"):
        with pytest.raises(ValueError, match="is a name of its own"):
            train.Checkpoint(**{name: Variable(1.0)})


def test_manager_takes_large_numbers_and_keeps_its_counter_after_an_error(tmp_path, monkeypatch):
    manager = train.CheckpointManager(train.Checkpoint(v=Variable(1.0)), str(tmp_path), 2)
    assert manager.save(3_000_000_000).endswith("ckpt-3000000000")
    with pytest.raises(ValueError, match="checkpoint_number"):
        manager.save(-3)

    def fail(*args):
        raise OSError("full")

    monkeypatch.setattr(manager._checkpoint, "_save", fail)
    with pytest.raises(OSError, match="full"):
        manager.save(5_000_000_000)
    monkeypatch.undo()
    assert manager.save().endswith("ckpt-3000000001")


def test_counter_of_three_words_raises():
    with pytest.raises(ValueError, match="a counter is an integer"):
        Generator.from_key_counter(7, [1, 2, 3], "philox")
