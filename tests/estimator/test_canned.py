"""Linear and dense estimators: the guide's numbers, losses and metrics by formula, errors."""

import numpy as np
import pytest

import pycollective as tf

RNG = np.random.default_rng(3)
A = RNG.normal(size=(96, 2)).astype(np.float32)
B = RNG.normal(size=96).astype(np.float32)
LINE = (A @ [[2.0], [-1.0]] + 0.5 * B[:, None] + 1).astype(np.float32)
COLUMNS = [tf.feature_column.numeric_column("b"), tf.feature_column.numeric_column("a", (2,))]


def dataset(labels, **more):
    return tf.data.Dataset.from_tensor_slices(({"a": A, "b": B, **more}, labels)).batch(32)


def rate(value):
    return lambda: tf.keras.optimizers.Adam(value)


def trained(estimator, labels, steps=150, **more):
    estimator.train(lambda: dataset(labels, **more).repeat(), steps=steps)
    found = estimator.evaluate(lambda: dataset(labels, **more))
    return found, list(estimator.predict(lambda: dataset(labels, **more)))


def test_linear_regressor_of_the_guide_has_the_guides_numbers(tmp_path):
    regressor = tf.estimator.LinearRegressor(
        [tf.feature_column.numeric_column("feats")], str(tmp_path), optimizer="SGD"
    )

    def input_fn():
        return tf.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0])).repeat(1000).batch(10)

    regressor.train(input_fn=input_fn, steps=10)
    found = regressor.evaluate(input_fn=input_fn, steps=10)
    # The guide prints these.
    assert found == {
        "average_loss": np.float32(1.4210855e-14),
        "label/mean": np.float32(1.0),
        "loss": np.float32(1.4210855e-14),
        "prediction/mean": np.float32(0.99999994),
        "global_step": 10,
    }


@pytest.mark.parametrize("optimizer", ["Ftrl", "SGD", tf.keras.optimizers.Adam(0.1), rate(0.1)])
def test_linear_regressor_learns_the_line_and_names_variables_as_tensorflow(tmp_path, optimizer):
    estimator = tf.estimator.LinearRegressor(COLUMNS, str(tmp_path), optimizer=optimizer)
    found, rows = trained(estimator, LINE)
    guess = np.array([row["predictions"] for row in rows])
    assert found["loss"] < 0.01
    assert found["loss"] == pytest.approx(np.square(guess - LINE).mean(), rel=1e-4)
    assert found["average_loss"] == pytest.approx(found["loss"], rel=1e-4)
    assert found["label/mean"] == pytest.approx(LINE.mean(), rel=1e-4)
    assert found["prediction/mean"] == pytest.approx(guess.mean(), rel=1e-4)
    model = "linear/linear_model"
    np.testing.assert_allclose(
        estimator.get_variable_value(f"{model}/a/weights"), [[2], [-1]], atol=0.2
    )
    assert estimator.get_variable_value(f"{model}/b/weights").shape == (1, 1)
    assert estimator.get_variable_value(f"{model}/bias_weights") == pytest.approx([1], abs=0.2)


def test_dnn_regressor_learns_two_targets_with_dropout_and_batch_norm(tmp_path):
    labels = np.concatenate([LINE, np.abs(LINE)], axis=1)
    options = {"label_dimension": 2, "optimizer": rate(0.02)}
    plain = tf.estimator.DNNRegressor([16, 8], COLUMNS, str(tmp_path / "a"), **options)
    found, rows = trained(plain, labels)
    assert found["loss"] < 0.3 and rows[0]["predictions"].shape == (2,)
    names = plain.get_variable_names()
    kernels = [name for name in names if name.startswith("dnn/") and name.endswith("kernel")]
    assert kernels == [f"dnn/{n}/kernel" for n in ("hiddenlayer_0", "hiddenlayer_1", "logits")]
    more = tf.estimator.DNNRegressor(
        [16], COLUMNS, str(tmp_path / "b"), dropout=0.1, batch_norm=True, **options
    )
    found, _ = trained(more, labels, steps=5)
    assert "dnn/hiddenlayer_0/batchnorm_0/moving_mean" in more.get_variable_names()
    assert np.isfinite(found["loss"])


@pytest.mark.parametrize("kind", ["linear", "dnn"])
def test_binary_classifier_has_tensorflows_predictions_and_metrics(tmp_path, kind):
    labels = (LINE > 1.2).astype(np.int64)
    options = {"model_dir": str(tmp_path), "optimizer": rate(0.05)}
    estimator = (
        tf.estimator.LinearClassifier(COLUMNS, **options)
        if kind == "linear"
        else tf.estimator.DNNClassifier([8], COLUMNS, **options)
    )
    found, rows = trained(estimator, labels)
    logits = np.array([row["logits"] for row in rows], np.float64)
    p = 1 / (1 + np.exp(-logits))
    guess = np.array([row["class_ids"] for row in rows])
    losses = np.log1p(np.exp(np.where(labels == 1, -logits, logits)))
    hits = guess == labels
    true = (guess & labels).sum()
    assert found.keys() == {
        *("accuracy", "accuracy_baseline", "auc", "auc_precision_recall", "average_loss"),
        *("global_step", "label/mean", "loss", "precision", "prediction/mean", "recall"),
    }
    share = labels.mean()
    expected = {
        "accuracy": hits.mean(),
        "accuracy_baseline": max(share, 1 - share),
        "average_loss": losses.mean(),
        "loss": losses.mean(),
        "label/mean": share,
        "prediction/mean": p.mean(),
        "precision": true / guess.sum(),
        "recall": true / labels.sum(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert found["accuracy"] > 0.9 and found["auc"] > 0.95 and found["auc_precision_recall"] > 0.95
    row = rows[0]
    assert row["probabilities"] == pytest.approx([1 - p[0, 0], p[0, 0]], abs=1e-6)
    assert row["classes"] == [str(row["class_ids"][0]).encode()]
    assert row["logistic"] == pytest.approx(p[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["linear", "dnn"])
def test_classifier_of_several_classes_learns_them(tmp_path, kind):
    labels = A.argmax(axis=1) + (B > 1)
    options = {"model_dir": str(tmp_path), "optimizer": rate(0.05), "n_classes": 3}
    estimator = (
        tf.estimator.LinearClassifier(COLUMNS, **options)
        if kind == "linear"
        else tf.estimator.DNNClassifier([16], COLUMNS, **options)
    )
    found, rows = trained(estimator, labels)
    probabilities = np.array([row["probabilities"] for row in rows])
    guess = np.array([row["class_ids"][0] for row in rows])
    assert found["accuracy"] == pytest.approx((guess == labels).mean()) and found["accuracy"] > 0.75
    expected = -np.log(probabilities[np.arange(96), labels]).mean()
    assert found["loss"] == pytest.approx(expected, rel=1e-3)
    assert (probabilities.argmax(1) == guess).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_labels_of_a_vocabulary_train_as_class_numbers_do(tmp_path, classes):
    numbers = A.argmax(axis=1) + (B > 1) * (classes - 2)
    names = ["no", "yes", "perhaps"][:classes]
    options = {"optimizer": rate(0.05), "n_classes": classes}
    found = {}
    for kind, labels in {"numbers": numbers, "texts": np.array(names)[numbers]}.items():
        estimator = tf.estimator.LinearClassifier(
            COLUMNS,
            model_dir=str(tmp_path / kind),
            label_vocabulary=names if kind == "texts" else None,
            **options,
        )
        found[kind] = trained(estimator, labels)
    assert found["texts"][0] == found["numbers"][0]
    rows = found["texts"][1]
    assert [row["classes"][0].decode() for row in rows] == [
        names[row["class_ids"][0]] for row in rows
    ]


def test_labels_outside_of_the_vocabulary_raise(tmp_path):
    estimator = tf.estimator.LinearClassifier(
        COLUMNS, model_dir=str(tmp_path), label_vocabulary=["no", "yes"]
    )
    with pytest.raises(ValueError, match="the label 'maybe' is not in label_vocabulary"):
        trained(estimator, np.full(96, "maybe"))
    with pytest.raises(ValueError, match="should be an array of texts, got dtype int64"):
        trained(estimator, np.zeros(96, np.int64))


def test_weight_column_weighs_examples_and_sum_adds_them(tmp_path):
    weights = RNG.uniform(size=96).astype(np.float32)
    options = {"optimizer": "SGD", "weight_column": "w"}
    estimator = tf.estimator.LinearRegressor(COLUMNS, str(tmp_path), **options)
    more = {"w": weights}
    found = estimator.evaluate(lambda: dataset(LINE, **more))
    each = np.square(LINE[:, 0]) * weights
    assert found["average_loss"] == pytest.approx(each.sum() / weights.sum(), rel=1e-4)
    assert found["loss"] == pytest.approx(each.mean(), rel=1e-4)
    assert found["label/mean"] == pytest.approx(
        (LINE[:, 0] * weights).sum() / weights.sum(), rel=1e-4
    )
    total = tf.estimator.LinearRegressor(COLUMNS, str(tmp_path), loss_reduction="sum", **options)
    assert total.evaluate(lambda: dataset(LINE, **more))["loss"] == pytest.approx(
        each.sum() / 3, rel=1e-4
    )
    with pytest.raises(ValueError, match="Feature w is not in features dictionary"):
        estimator.train(lambda: dataset(LINE), steps=1)


def test_numeric_column_casts_normalizes_and_flattens():
    column = tf.feature_column.numeric_column("a", 2, normalizer_fn=lambda x: (x - 1.0) / 2.0)
    values = column.values_of({"a": np.array([[1, 3], [5, 7]])})
    assert values.numpy().tolist() == [[0, 1], [2, 3]] and values.dtype == np.float32
    assert column.name == "a" and column.shape == (2,)
    image = tf.feature_column.numeric_column("i", (2, 2)).values_of({"i": np.zeros((3, 2, 2))})
    assert image.shape == (3, 4)


numeric = tf.feature_column.numeric_column


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: numeric(1), ValueError, "key in feature_column must be a string"),
        (lambda: numeric("a", (1.5,)), TypeError, "shape dimensions must be integer"),
        (lambda: numeric("a", 0), ValueError, "shape dimensions must be greater than 0"),
        (lambda: numeric("a", dtype=tf.bool), ValueError, "dtype must be convertible to float"),
        (lambda: numeric("a", normalizer_fn=1), TypeError, "normalizer_fn must be a callable"),
        (lambda: numeric("a", default_value=1.0), ValueError, "default_value must be None"),
        (lambda: numeric("a").values_of({"b": [1.0]}), ValueError, "Feature a is not in features"),
        (lambda: numeric("a").values_of([1.0]), ValueError, "features should be a dictionary"),
        (lambda: numeric("a").values_of({"a": A}), ValueError, "'a' has shape .96, 2.; the column"),
        (lambda: tf.estimator.LinearRegressor([]), ValueError, "must not be empty"),
        (
            lambda: tf.estimator.LinearRegressor(["a"]),
            ValueError,
            "Items of feature_columns must be a FeatureColumn. Given .type .*str",
        ),
        (
            lambda: tf.estimator.LinearRegressor([numeric("a"), numeric("a")]),
            ValueError,
            "Duplicate feature column name found",
        ),
        (
            lambda: tf.estimator.LinearRegressor(COLUMNS, label_dimension=0),
            ValueError,
            "Invalid label_dimension 0",
        ),
        (lambda: tf.estimator.LinearClassifier(COLUMNS, n_classes=1), ValueError, "given: 1"),
        (
            lambda: tf.estimator.LinearClassifier(COLUMNS, label_vocabulary=["a", "b", "c"]),
            ValueError,
            "a text for each of the 2 classes",
        ),
        (
            lambda: tf.estimator.LinearRegressor(COLUMNS, optimizer=1),
            ValueError,
            "is not a tf.keras.optimizers.Optimizer instance",
        ),
        (
            lambda: tf.estimator.LinearRegressor(COLUMNS, loss_reduction="none"),
            ValueError,
            "Invalid loss_reduction",
        ),
        (
            lambda: tf.estimator.DNNRegressor([2], COLUMNS, dropout=1),
            ValueError,
            "dropout must be at least 0",
        ),
    ],
)
def test_wrong_columns_and_settings_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("classes", "labels", "text"),
    [
        (2, np.full(96, 2), "Labels must be <= 1, got 2"),
        (2, np.full(96, -1), "Labels must be >= 0, got -1"),
        (3, np.full(96, 3), "Labels must be <= 2, got 3"),
        (3, np.full(96, 1.0), "Labels dtype should be integer. Instead got float64"),
        (3, np.zeros((96, 3), np.int64), "Mismatched label shape. Expected labels dimension=1"),
        (2, None, "You must provide a labels Tensor. Given: None"),
    ],
)
def test_wrong_labels_raise_tensorflows_errors(tmp_path, classes, labels, text):
    estimator = tf.estimator.LinearClassifier(COLUMNS, str(tmp_path), classes)

    def input_fn():
        if labels is None:
            return tf.data.Dataset.from_tensor_slices({"a": A, "b": B}).batch(32)
        return dataset(labels)

    with pytest.raises(ValueError, match=text):
        estimator.train(input_fn)


def test_weight_column_applies_its_normalizer(tmp_path):
    weight = tf.feature_column.numeric_column("w", normalizer_fn=lambda w: w * 0.0)
    columns = [tf.feature_column.numeric_column("x")]
    estimator = tf.estimator.LinearRegressor(columns, str(tmp_path), weight_column=weight)

    def rows():
        features = {"x": np.arange(4.0), "w": np.ones(4)}
        return tf.data.Dataset.from_tensor_slices((features, np.arange(4.0))).batch(4)

    estimator.train(rows)
    assert estimator.evaluate(rows)["loss"] == 0.0
