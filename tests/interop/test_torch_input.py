"""`fit` with PyTorch's tensors and loaders: the numbers of NumPy arrays with the same values."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pycollective import distribute, keras  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANDOM = np.random.default_rng(6)
X = RANDOM.standard_normal((21, 3)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 21)
WEIGHTS = RANDOM.random(21).astype(np.float32)


def tensors(*arrays):
    return [torch.from_numpy(array.copy()) for array in arrays]


def trained(strategy, *given, **options):
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(5, "relu", input_shape=(3,)), keras.layers.Dense(4, "softmax")]
        )
        random = np.random.default_rng(1)
        model.set_weights([random.standard_normal(w.shape) for w in model.get_weights()])
        model.compile("sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    history = model.fit(*given, epochs=2, shuffle=False, verbose=0, **options).history
    return model, history


@pytest.mark.parametrize("replicas", [1, 2])
def test_tensors_and_loaders(replicas):
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    x, labels, weights = tensors(X, LABELS, WEIGHTS)
    held_out = {"validation_data": (X[:5], LABELS[:5])}
    reference, expected = trained(
        strategy, X, LABELS, batch_size=8, sample_weight=WEIGHTS, **held_out
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, labels, weights), batch_size=8
    )
    for given, options in (
        (
            (x, labels),
            {
                "batch_size": 8,
                "sample_weight": weights,
                "validation_data": (x[:5], labels[:5]),
            },
        ),
        ((loader,), {"validation_data": (x[:5], labels[:5])}),
    ):
        model, found = trained(strategy, *given, **options)
        assert found == expected
        for own, other in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_array_equal(own, other)
        np.testing.assert_array_equal(model.predict(x, verbose=0), reference.predict(X, verbose=0))
        np.testing.assert_array_equal(
            model(x[::2]).numpy(), reference(X[::2]).numpy()
        )  # not contiguous
        assert model.evaluate(x, labels, verbose=0) == reference.evaluate(X, LABELS, verbose=0)
    by_part = {"batch_size": 8, "validation_split": 0.25}
    _, expected = trained(strategy, X, LABELS, **by_part)
    assert trained(strategy, x, labels, **by_part)[1] == expected
    dataset = keras.utils.to_categorical(labels, 4)
    np.testing.assert_array_equal(dataset, keras.utils.to_categorical(LABELS, 4))


def test_a_tensor_that_wants_a_gradient_is_refused():
    x, labels = tensors(X, LABELS)
    with pytest.raises((RuntimeError, TypeError), match="requires grad|detach"):
        trained(distribute.get_strategy(), x.requires_grad_(), labels)
