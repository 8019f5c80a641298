"""`StringLookup`: indices of strings, strings of indices, vocabularies, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf

WORDS = ["avenger", "hulk", "batman"]


@pytest.mark.parametrize(
    ("options", "indices", "vocabulary"),
    [
        ({}, [1, 3, 0], ["[UNK]", *WORDS]),
        ({"mask_token": ""}, [2, 4, 1], ["", "[UNK]", *WORDS]),
        ({"oov_token": "?"}, [1, 3, 0], ["?", *WORDS]),
        ({"vocabulary": ["[UNK]", *WORDS]}, [1, 3, 0], ["[UNK]", *WORDS]),
        ({"vocabulary": np.array(WORDS)}, [1, 3, 0], ["[UNK]", *WORDS]),
    ],
)
def test_indices_are_those_of_the_vocabulary(options, indices, vocabulary):
    lookup = tf.keras.layers.StringLookup(**{"vocabulary": WORDS, **options})
    for inputs in (["avenger", "batman", "joker"], np.array([b"avenger", b"batman", b"joker"])):
        found = lookup(inputs)
        assert found.dtype == np.int64 and found.numpy().tolist() == indices
    assert lookup.get_vocabulary() == vocabulary and lookup.vocabulary_size() == len(vocabulary)
    assert lookup.get_vocabulary(include_special_tokens=False) == WORDS
    inverse = tf.keras.layers.StringLookup(**{"vocabulary": WORDS, **options}, invert=True)
    unknown = options.get("oov_token", "[UNK]").encode()
    assert inverse(found).numpy().tolist() == [b"avenger", b"batman", unknown]


def test_models_of_strings_prepare_a_dataset():
    """Prepare rows of strings as TensorFlow's tutorial on parameter servers does."""
    strings = tf.keras.Input(shape=(2,), dtype=tf.string, name="words")
    model = tf.keras.Model(strings, tf.keras.layers.StringLookup(vocabulary=WORDS)(strings))
    rows = [["hulk", "joker"], ["batman", "avenger"], ["hulk", "hulk"]]
    dataset = tf.data.Dataset.from_tensor_slices({"words": rows}).batch(2)
    expected = [[2, 0], [3, 1], [2, 2]]
    for found in (model, tf.keras.Model.from_config(model.get_config())):
        batches = [found(batch["words"]).numpy() for batch in dataset]
        assert np.concatenate(batches).tolist() == expected
    again = tf.keras.Input(shape=(2,), dtype=tf.string)
    assert model(again).dtype == np.int64 and model(again).shape == (None, 2)
    table = tf.keras.Sequential([strings, model, tf.keras.layers.Embedding(4, 5)])
    assert table(next(iter(dataset))["words"]).shape == (2, 2, 5)
    with pytest.raises(TypeError, match="takes strings, got a tensor of dtype float64"):
        model(np.zeros((2, 2)))
    numbers = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    with pytest.raises(
        TypeError, match="takes numbers of dtype float32, got a tensor of dtype obj"
    ):
        numbers(next(iter(dataset))["words"])


def test_model_with_strings_is_restored_from_a_file(tmp_path):
    strings = tf.keras.Input(shape=(2,), dtype="string")
    model = tf.keras.Model(strings, tf.keras.layers.StringLookup(vocabulary=WORDS)(strings))
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    words = next(iter(tf.data.Dataset.from_tensors([["hulk", "joker"]])))
    assert again(words).numpy().tolist() == model(words).numpy().tolist() == [[2, 0]]


def test_adapt_orders_strings_by_their_frequency():
    words = ["b", "a", "c", "a", "[UNK]", "c"]
    for data in (words, np.array(words), tf.data.Dataset.from_tensor_slices(words).batch(4)):
        lookup = tf.keras.layers.StringLookup()
        lookup.adapt(data)
        assert lookup.get_vocabulary() == ["[UNK]", "c", "a", "b"]
    lookup = tf.keras.layers.StringLookup(max_tokens=3)
    lookup.adapt(words)
    assert lookup.get_vocabulary() == ["[UNK]", "c", "a"]


@pytest.mark.parametrize(
    ("options", "inputs", "error", "text"),
    [
        ({"num_oov_indices": 0}, ["joker"], ValueError, "strings outside of the vocab"),
        ({}, [1, 2], TypeError, "inputs must be strings"),
        ({"vocabulary": None}, ["hulk"], ValueError, "has no vocabulary; pass one, or call adapt"),
        ({"vocabulary": ["a", "a"]}, None, ValueError, r"has strings twice: \['a'\]"),
        ({"vocabulary": "words.txt"}, None, ValueError, "vocabulary must be a list of strings"),
        ({"num_oov_indices": 2}, None, ValueError, "must be 0 or 1, got 2"),
        ({"output_mode": "multi_hot"}, None, ValueError, "must be 'int', got 'multi_hot'"),
    ],
)
def test_bad_input_raises(options, inputs, error, text):
    with pytest.raises(error, match=text):
        tf.keras.layers.StringLookup(**{"vocabulary": WORDS, **options})(inputs)
