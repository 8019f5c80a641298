"""`fit` with PyTorch's tensors and loaders: the numbers of NumPy arrays with the same values.

PyTorch takes long to install. So a stand-in with its protocols always runs, and PyTorch itself runs if
it is installed.
"""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import distribute, keras

RANDOM = np.random.default_rng(6)
X = RANDOM.standard_normal((21, 3)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 21)
WEIGHTS = RANDOM.random(21).astype(np.float32)


class StandIn:
    """The part of ``torch.Tensor`` that other libraries use: protocols, dtypes and refusals."""

    def __init__(self, array, requires_grad=False):
        self._array = array
        self.requires_grad = requires_grad

    shape = property(lambda self: tuple(self._array.shape))
    ndim = property(lambda self: self._array.ndim)
    dtype = property(lambda self: f"torch.{self._array.dtype}")
    device = property(lambda self: "cpu")

    def __len__(self):
        return len(self._array)

    def __getitem__(self, key):
        return StandIn(self._array[key], self.requires_grad)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def numpy(self):
        if self.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self._array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def __dlpack__(self, **options):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def detach(self):
        return StandIn(self._array)

    def cpu(self):
        return self

    def requires_grad_(self):
        return StandIn(self._array, True)


class StandInLoader:
    """A stand-in for ``DataLoader``: each iteration yields lists of tensors."""

    def __init__(self, tensors, batch_size):
        self._tensors, self._size = tensors, batch_size

    def __len__(self):
        return len(range(0, len(self._tensors[0]), self._size))

    def __iter__(self):
        for begin in range(0, len(self._tensors[0]), self._size):
            yield [tensor[begin : begin + self._size] for tensor in self._tensors]


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param("torch", marks=[pytest.mark.slow, pytest.mark.filterwarnings("default")]),
    ]
)
def library(request):
    """Return a function that makes tensors, and a class that loads them."""
    if request.param == "stand-in":
        return StandIn, StandInLoader
    torch = pytest.importorskip("torch")
    of = torch.utils.data
    return torch.from_numpy, lambda tensors, n: of.DataLoader(of.TensorDataset(*tensors), n)


def tensors(library, *arrays):
    return [library[0](array.copy()) for array in arrays]


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
def test_fit_of_tensors_and_loaders_equals_fit_of_arrays(library, replicas):
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    x, labels, weights = tensors(library, X, LABELS, WEIGHTS)
    held_out = {"validation_data": (X[:5], LABELS[:5])}
    reference, expected = trained(
        strategy, X, LABELS, batch_size=8, sample_weight=WEIGHTS, **held_out
    )
    loader = library[1]([x, labels, weights], 8)
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
    one_hot = keras.utils.to_categorical(labels, 4)
    np.testing.assert_array_equal(one_hot, keras.utils.to_categorical(LABELS, 4))


def test_a_tensor_that_wants_a_gradient_is_refused(library):
    x, labels = tensors(library, X, LABELS)
    with pytest.raises((RuntimeError, TypeError), match="requires grad|detach"):
        trained(distribute.get_strategy(), x.requires_grad_(), labels)
    trained(distribute.get_strategy(), x.requires_grad_().detach().cpu().numpy(), labels)
