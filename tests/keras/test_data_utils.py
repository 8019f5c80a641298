"""CIFAR-10, folders of images, parts of data sets, drawings of models."""

import hashlib
import io
import itertools
import tarfile

import numpy as np
import pytest

import pycollective as tf
from pycollective import keras
from pycollective.data import Dataset
from pycollective.errors import DataError
from pycollective.keras.datasets import _files, cifar10
from pycollective.keras.utils.resizing import cropped, padded, resized

RANDOM = np.random.default_rng(2)


# CIFAR-10 -----------------------------------------------------------------------------------------


def records(n):
    images = RANDOM.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)
    labels = RANDOM.integers(0, 10, (n, 1)).astype(np.uint8)
    rows = np.concatenate([labels, images.transpose(0, 3, 1, 2).reshape(n, -1)], axis=1)
    return images, labels, rows.tobytes()


def packed(files, folder="cifar-10-batches-bin/"):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(folder + name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """Return the arrays and files of a small CIFAR-10, without a cache or a network."""
    monkeypatch.delenv("PYCOLLECTIVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(url):
        raise ConnectionRefusedError(f"no network for {url}")

    monkeypatch.setattr(_files, "_open_url", refuse)
    parts = [records(n) for n in (2, 1, 1, 1, 1, 3)]
    files = dict(zip(cifar10._NAMES, (part[2] for part in parts), strict=True))
    images, labels = ([part[k] for part in parts] for k in (0, 1))
    train = np.concatenate(images[:5]), np.concatenate(labels[:5])
    return (train, (images[5], labels[5])), files


def check(loaded, expected):
    for part, wanted in zip(loaded, expected, strict=True):
        for array, value in zip(part, wanted, strict=True):
            assert array.dtype == np.uint8
            np.testing.assert_array_equal(array, value)


def test_cifar10_in_files_folders_and_the_cache_is_found(small_cifar10, tmp_path, monkeypatch):
    expected, files = small_cifar10
    given = tmp_path / "given"
    given.mkdir()
    (given / cifar10.ARCHIVE).write_bytes(packed(files))
    check(cifar10.load_data(given), expected)
    check(cifar10.load_data(given / cifar10.ARCHIVE), expected)
    plain = tmp_path / "data" / "cifar10"
    plain.mkdir(parents=True)
    for name, data in files.items():
        (plain / name).write_bytes(data)
    check(cifar10.load_data(plain), expected)
    monkeypatch.setenv("PYCOLLECTIVE_DATA", str(tmp_path / "data"))
    check(cifar10.load_data(), expected)
    monkeypatch.delenv("PYCOLLECTIVE_DATA")
    with pytest.raises(DataError, match=r"(?s)not set.*no network.*Put cifar-10-binary"):
        cifar10.load_data()
    cache = tmp_path / "cache/pycollective/cifar10"
    (cache / cifar10.ARCHIVE).write_bytes(packed(files))
    check(keras.datasets.cifar10.load_data(), expected)


def test_cifar10_is_downloaded_once(small_cifar10, tmp_path, monkeypatch):
    expected, files = small_cifar10
    archive = tmp_path / "served.tar.gz"
    archive.write_bytes(packed(files))
    asked = []

    def open_url(url):
        asked.append(url)
        import urllib.request

        return urllib.request.urlopen(archive.as_uri())

    monkeypatch.setattr(_files, "_open_url", open_url)
    with pytest.raises(DataError, match="SHA-256"):
        cifar10.load_data()
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    check(cifar10.load_data(), expected)
    check(cifar10.load_data(), expected)
    assert asked == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: packed(files)[:-3000], "truncated"),
        (lambda files: b"no archive", "no archive of CIFAR-10"),
        (
            lambda files: packed({**files, "test_batch.bin": files["test_batch.bin"][:-1]}),
            "records of 3073 bytes",
        ),
        (lambda files: packed({**files, "test_batch.bin": b"\x0a" * 3073}), "label 10"),
        (lambda files: packed({"data_batch_1": b"\x80\x04."}), "lacks data_batch_1.bin.*pickles"),
    ],
)
def test_cifar10_wrong_archive_raises_data_error(small_cifar10, tmp_path, change, message):
    _, files = small_cifar10
    path = tmp_path / "x.tar.gz"
    path.write_bytes(change(files))
    with pytest.raises(DataError, match=message):
        cifar10.load_data(path)


def test_cifar10_wrong_path_raises_data_error(small_cifar10, tmp_path):
    with pytest.raises(DataError, match="no files of CIFAR-10 at"):
        cifar10.load_data(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match="lacks data_batch_1.bin"):
        cifar10.load_data(tmp_path)


# Images -------------------------------------------------------------------------------------------

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def pictures(tmp_path):
    """Return a folder of uniform images in three classes."""
    levels = {"cats": [10, 20, 30], "dogs": [110, 120], "eels": [210]}
    for name, values in levels.items():
        (tmp_path / name / "deep").mkdir(parents=True)
        for number, value in enumerate(values):
            path = tmp_path / name / ("deep" if number == 1 else "") / f"{number}.png"
            Image.new("RGB", (6, 4), (value, value, value)).save(path)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def load(folder, **options):
    options = {"image_size": (5, 7), "shuffle": False, "verbose": False, **options}
    return keras.utils.image_dataset_from_directory(folder, **options)


def test_image_dataset_inferred_labels_are_the_folders(pictures, capsys):
    dataset = load(pictures, batch_size=4, verbose=True)
    assert capsys.readouterr().out == "Found 6 files belonging to 3 classes.\n"
    assert dataset.class_names == ["cats", "dogs", "eels"] and len(dataset.file_paths) == 6
    batches = [(x.numpy(), y.numpy()) for x, y in dataset]
    assert [x.shape for x, _ in batches] == [(4, 5, 7, 3), (2, 5, 7, 3)]
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert x.dtype == np.float32 and y.dtype == np.int32
    assert y.tolist() == [0, 0, 0, 1, 1, 2]
    assert x[:, 2, 3, 1].tolist() == [10, 30, 20, 110, 120, 210]


def test_image_dataset_modes_determine_labels_and_shapes(pictures):
    def first(**options):
        return next(iter(load(pictures, **options)))

    assert first(label_mode="categorical")[1].numpy()[3].tolist() == [0, 1, 0]
    two = first(label_mode="binary", class_names=["eels", "cats"])
    assert two[1].numpy().tolist() == [[0], [1], [1], [1]]
    assert first(labels=None).shape == (6, 5, 7, 3)
    assert first(labels=[5, 4, 3, 2, 1, 0])[1].numpy().tolist() == [5, 4, 3, 2, 1, 0]
    assert first(color_mode="grayscale")[0].shape == (6, 5, 7, 1)
    assert first(color_mode="rgba")[0].shape == (6, 5, 7, 4)
    assert first(batch_size=None)[0].shape == (5, 7, 3)
    padded = first(pad_to_aspect_ratio=True, image_size=(12, 6))[0].numpy()
    assert padded[0, 0, 0, 0] == 0 and padded[0, 6, 3, 0] == 10
    assert first(crop_to_aspect_ratio=True, image_size=(8, 2))[0].shape == (6, 8, 2, 3)


def ramps(height, width):
    """Return an image of two linear ramps, vertical and horizontal."""
    down, across = np.mgrid[:height, :width].astype(np.float32)
    return np.stack([down, across], -1)


def test_resized_every_interpolation_gives_the_expected_pixels():
    """Interpolation preserves linear ramps, except at the border."""
    picture = ramps(12, 10)
    for name, border in (("bilinear", 1), ("bicubic", 2), ("lanczos3", 3), ("lanczos5", 5)):
        for height, width in ((24, 25), (9, 4), (12, 7)):
            found = resized(picture, (height, width), name)
            assert found.dtype == np.float32
            down = (np.arange(height) + 0.5) * 12 / height - 0.5
            across = (np.arange(width) + 0.5) * 10 / width - 0.5
            inside = np.ix_(
                (down >= border - 1) & (down <= 12 - border),
                (across >= border - 1) & (across <= 10 - border),
            )
            expected = np.stack(np.broadcast_arrays(down[:, None], across), -1)[inside]
            # Lanczos weights preserve ramps only approximately.
            slack = 0.15 if name.startswith("lanczos") else 1e-5
            np.testing.assert_allclose(found[inside], expected, atol=slack)
    blocks = resized(picture, (4, 5), "area")
    np.testing.assert_allclose(blocks, picture.reshape(4, 3, 5, 2, 2).mean((1, 3)), rtol=1e-6)
    part = resized(picture[:, :1], (5, 1), "area")[1, 0, 0]
    assert part == pytest.approx((0.6 * 2 + 3 + 0.8 * 4) / 2.4)
    chosen = resized(picture.astype(np.uint8), (4, 20), "nearest")
    np.testing.assert_array_equal(chosen, picture[1::3].repeat(2, 1))
    np.testing.assert_array_equal(resized(picture, (12, 10), "bilinear"), picture)


def test_cropped_and_padded_keep_the_aspect_ratio():
    picture = ramps(12, 10) + 1
    np.testing.assert_array_equal(cropped(picture, (4, 4)), picture[1:11])
    np.testing.assert_array_equal(cropped(picture, (6, 2)), picture[:, 3:7])
    assert cropped(picture, (1, 100)).shape == (1, 10, 2)
    inside = padded(picture, (10, 20), "bilinear")
    assert (inside[:, :5] == 0).all() and (inside[:, 13:] == 0).all()
    np.testing.assert_array_equal(inside[:, 5:13], resized(picture, (10, 8), "bilinear"))
    assert (padded(picture, (1, 30), "nearest") != 0).sum() == 2


def test_image_dataset_subsets_are_disjoint_and_repeatable(pictures):
    options = {"validation_split": 0.34, "seed": 3, "shuffle": True}
    train, held_out = load(pictures, subset="both", **options)
    assert sorted(train.file_paths + held_out.file_paths) == sorted(load(pictures).file_paths)
    assert len(held_out.file_paths) == 2
    assert load(pictures, subset="training", **options).file_paths == train.file_paths
    labels = {y for _, batch in held_out for y in batch.numpy().tolist()}
    assert labels == {"cde".index(path[len(str(pictures)) + 1]) for path in held_out.file_paths}


def test_image_dataset_trains_a_model(pictures):
    model = keras.Sequential(
        [keras.Input((5, 7, 3)), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    data = load(pictures, shuffle=True, seed=1).map(lambda x, y: (x / 255, y))
    assert np.isfinite(model.fit(data, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "guess"}, "`labels` argument should be"),
        ({"labels": [1, 2]}, "lengths of `labels`"),
        ({"label_mode": "words"}, "`label_mode` must be one of"),
        ({"label_mode": "binary"}, "exactly 2 class_names"),
        ({"color_mode": "cmyk"}, "`color_mode` must be one of"),
        ({"interpolation": "sinc"}, "`interpolation` must be one of"),
        ({"class_names": ["cats", "birds"]}, "did not match the names of the subdirectories"),
        ({"validation_split": 0.5}, "must be set together"),
        ({"validation_split": 2.0, "subset": "both"}, "between 0 and 1"),
        ({"validation_split": 0.5, "subset": "test"}, "`subset` must be either"),
        ({"validation_split": 0.5, "subset": "both", "shuffle": True}, "provide a `seed`"),
        ({"validation_split": 0.01, "subset": "both"}, "makes an empty subset"),
        ({"crop_to_aspect_ratio": True, "pad_to_aspect_ratio": True}, "Only one of"),
        ({"image_size": (0, 3)}, "image_size must be"),
        ({"data_format": "channels_first"}, "`data_format` must be one of"),
    ],
)
def test_image_dataset_wrong_arguments_raise_value_error(pictures, options, message):
    with pytest.raises(ValueError, match=message):
        load(pictures, **options)


def test_image_dataset_missing_or_damaged_files_raise_data_error(pictures, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match="No images found"):
        load(tmp_path / "cats" / "deep", class_names=[])
    (pictures / "dogs" / "0.png").write_bytes(b"\x89PNG no")
    with pytest.raises(DataError, match=r"dogs/0\.png' cannot be read"):
        list(load(pictures))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[files\]'"):
        load(pictures)


# Parts of data sets -------------------------------------------------------------------------------


def numbers(dataset):
    return [int(value) for value in dataset]


def test_split_dataset_returns_both_parts():
    for given in (np.arange(10), Dataset.range(10)):
        left, right = keras.utils.split_dataset(given, left_size=0.7)
        assert numbers(left) == list(range(7)) and numbers(right) == [7, 8, 9]
    left, right = keras.utils.split_dataset(np.arange(10), 3, 2)
    assert numbers(left) == [0, 1, 2] and numbers(right) == [8, 9]
    left, right = keras.utils.split_dataset(np.arange(10), right_size=4, shuffle=True, seed=1)
    assert sorted(numbers(left) + numbers(right)) == list(range(10))
    assert numbers(left) == numbers(left) != list(range(6))
    left, _ = keras.utils.split_dataset((np.arange(4), np.arange(4) * 2), left_size=1)
    assert [tuple(map(int, pair)) for pair in left] == [(0, 0)]


def test_split_dataset_whose_passes_differ_has_parts_without_common_elements():
    shuffled = Dataset.range(100).shuffle(100)
    for given in shuffled, shuffled.filter(lambda i: i >= 0), shuffled.batch(7):
        left, right = keras.utils.split_dataset(given, left_size=0.5)
        parts = [np.hstack(list(part.as_numpy_iterator())) for part in (left, right)]
        assert [part.size for part in parts] == [50, 50]
        assert set(parts[0]) | set(parts[1]) == set(range(100))
        assert np.array_equal(np.hstack(list(left.as_numpy_iterator())), parts[0])


def test_split_dataset_of_batches_splits_rows():
    left, right = keras.utils.split_dataset(Dataset.range(10).batch(3), left_size=0.5)
    assert [b.tolist() for b in left.as_numpy_iterator()] == [[0, 1, 2], [3, 4]]
    assert [b.tolist() for b in right.as_numpy_iterator()] == [[5, 6, 7], [8, 9]]


def test_split_dataset_of_elements_with_different_shapes():
    lists = Dataset.range(6).map(lambda i: {"row": tf.range(i)})
    left, right = keras.utils.split_dataset(lists, left_size=4)
    assert [len(e["row"]) for e in left] == [0, 1, 2, 3] and len(right) == 2
    with pytest.raises(ValueError, match="finite"):
        keras.utils.split_dataset(lists.repeat(), left_size=4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "At least one"),
        ({"left_size": 1.5}, "between 0 and 1"),
        ({"left_size": 10}, "do not fit into a dataset of 10"),
        ({"left_size": 6, "right_size": 5}, "do not fit into"),
    ],
)
def test_split_dataset_wrong_sizes_raise_value_error(sizes, message):
    with pytest.raises(ValueError, match=message):
        keras.utils.split_dataset(np.arange(10), **sizes)


# Drawings of models -------------------------------------------------------------------------------


def branched():
    layers = keras.layers
    x = keras.Input((4,), name="x")
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, "relu", name="deep")], name="inner"
    )
    y = inner(x)
    return keras.Model(x, layers.Add(name="sum")([y, layers.Dense(3, name="side")(y)]))


def test_plot_model_writes_dot_files_and_svg(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    model = branched()
    options = {"show_layer_names": True, "show_shapes": True, "show_trainable": True}
    keras.utils.plot_model(model, tmp_path / "m.dot", **options)
    text = (tmp_path / "m.dot").read_text()
    assert text == keras.utils.model_to_dot(model, show_shapes=True, show_trainable=True)
    assert 'label="side (Dense)\\nInput shape: (None, 3)\\nOutput shape: (None, 3)\\nTrain' in text
    assert text.count("->") == 4
    keras.utils.plot_model(model, tmp_path / "m.svg", expand_nested=True, show_dtype=True)
    import xml.etree.ElementTree

    drawn = xml.etree.ElementTree.parse(tmp_path / "m.svg").getroot()
    found = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert found.count("Dense") == 2 and "Dtype: float32" in found
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 5
    keras.utils.plot_model(model, tmp_path / "wide.svg", rankdir="LR", show_layer_activations=True)
    assert "Activation: linear" in (tmp_path / "wide.svg").read_text()
    with pytest.raises(ValueError, match="rankdir must be 'TB' or 'LR', got 'XX'"):
        keras.utils.plot_model(model, tmp_path / "m.svg", rankdir="XX")
    with pytest.raises(ImportError, match=r"needs Graphviz.*\.svg or \.dot"):
        keras.utils.plot_model(model, tmp_path / "m.png")
    with pytest.raises(ValueError, match="not yet been built"):
        keras.utils.plot_model(keras.Sequential([keras.layers.Dense(1)]), tmp_path / "m.dot")


def residual():
    layers = keras.layers
    x = start = keras.Input((4,), name="x")
    for _ in range(3):
        y = layers.Dense(4, "relu")(layers.Dense(4, "relu")(x))
        x = layers.Add()([x, y])
    return keras.Model(start, layers.Concatenate()([x, start]))


def shared():
    layers = keras.layers
    dense, first, second = layers.Dense(3), keras.Input((3,)), keras.Input((3,))
    x = dense(layers.ReLU()(dense(dense(first))))
    wide = layers.Dense(3, name="a_layer_with_a_long_name_for_a_wide_box")(second)
    return keras.Model([first, second], layers.Concatenate()([x, wide, second]))


@pytest.mark.parametrize("make", [residual, shared, branched])
@pytest.mark.parametrize("rankdir", ["TB", "LR"])
def test_plot_model_lines_do_not_cross_boxes(tmp_path, monkeypatch, make, rankdir):
    import xml.etree.ElementTree

    monkeypatch.setenv("PATH", "")
    options = {"rankdir": rankdir, "show_shapes": True, "show_layer_names": True}
    keras.utils.plot_model(make(), tmp_path / "m.svg", **options)
    drawn = xml.etree.ElementTree.parse(tmp_path / "m.svg").getroot()
    size = [float(drawn.get(side)) for side in ("width", "height")]
    boxes = [
        [float(box.get(name)) for name in ("x", "y", "width", "height")]
        for box in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if box.get("x")
    ]
    corners = [(np.array([x, y]), np.array([x + w, y + h])) for x, y, w, h in boxes]
    for number, (low, high) in enumerate(corners):
        assert (low >= 0).all() and (high <= size).all()
        for other_low, other_high in corners[:number]:
            assert (low >= other_high).any() or (other_low >= high).any(), "boxes overlap"
    lines = list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == len(keras.utils.model_to_dot(make()).split("->")) - 1
    for line in lines:
        points = np.array([p.split(",") for p in line.get("points").split()], float)
        assert (points >= 0).all() and (points <= size).all()
        for start, end in itertools.pairwise(points):
            along = start + np.linspace(0, 1, 200)[:, None] * (end - start)
            for low, high in corners:
                inside = (along > low + 0.2).all(1) & (along < high - 0.2).all(1)
                assert not inside.any(), "a line runs through a box"


def test_plot_model_draws_with_graphviz(tmp_path, monkeypatch):
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\n[ "$1" = -Tpng ] || { echo bad >&2; exit 3; }\ncat\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    keras.utils.plot_model(branched(), tmp_path / "m.png", dpi=50)
    assert "dpi=50" in (tmp_path / "m.png").read_text()
    with pytest.raises(ValueError, match="Graphviz cannot draw.*bad"):
        keras.utils.plot_model(branched(), tmp_path / "m.pdf")


def test_image_dataset_keeps_the_brightness_of_16_bit_images(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    pillow.fromarray(np.full((4, 4), 30000, np.uint16)).save(tmp_path / "a" / "1.png")
    images = keras.utils.image_dataset_from_directory(
        str(tmp_path), image_size=(4, 4), labels=None, shuffle=False, verbose=False
    )
    assert next(iter(images)).numpy().max() == 117.0


@pytest.mark.parametrize("labels", [[-1, 0], [0, 2]])
def test_image_dataset_categorical_labels_beyond_the_classes_raise(tmp_path, labels):
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    for name in ("1", "2"):
        pillow.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "a" / f"{name}.png")
    with pytest.raises(ValueError, match="needs labels from 0 to 1"):
        keras.utils.image_dataset_from_directory(
            str(tmp_path), labels=labels, label_mode="categorical", shuffle=False, verbose=False
        )
