"""The data sets MNIST, Fashion-MNIST and digits: finding, reading and downloading them."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import struct
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pycollective.errors import DataError
from pycollective.keras.datasets import _files, digits, fashion_mnist, mnist

NAMES = _files._IDX_NAMES


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def parts(train: int = 7, test: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    arrays = {}
    for name, n in (("train", train), ("t10k", test)):
        arrays[f"{name}-images-idx3-ubyte"] = random.integers(0, 256, (n, 28, 28)).astype(np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = random.integers(0, 10, n).astype(np.uint8)
    return arrays


def write_idx(folder: Path, packed: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = parts()
    for name, array in arrays.items():
        data = idx(array)
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return arrays


def write_npz(path: Path, **changed: np.ndarray) -> dict[str, np.ndarray]:
    arrays = dict(zip(_files._NPZ_NAMES, parts().values(), strict=True))
    np.savez(path, **{**arrays, **changed})
    return arrays


def check(loaded: object, expected: dict[str, np.ndarray]) -> None:
    (x_train, y_train), (x_test, y_test) = loaded  # type: ignore[misc]
    for got, want in zip((x_train, y_train, x_test, y_test), expected.values(), strict=True):
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, want)


@pytest.fixture(autouse=True)
def without_data_and_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all data on this machine, and the network."""
    monkeypatch.delenv("PYCOLLECTIVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(url: str) -> None:
        raise ConnectionRefusedError(f"no network for {url}")

    monkeypatch.setattr(_files, "_open_url", refuse)


# Finding


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "mnist"])
def test_idx_in_the_named_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, below: str
) -> None:
    arrays = write_idx(tmp_path / "d" / below, packed)
    monkeypatch.setenv("PYCOLLECTIVE_DATA", str(tmp_path / "d"))
    check(mnist.load_data(), arrays)


def test_npz_in_the_named_folder_or_as_argument_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = write_npz(tmp_path / "mnist.npz")
    check(mnist.load_data(tmp_path / "mnist.npz"), arrays)
    check(mnist.load_data(str(tmp_path)), arrays)
    monkeypatch.setenv("PYCOLLECTIVE_DATA", str(tmp_path))
    check(mnist.load_data(), arrays)


@pytest.mark.parametrize("module", [mnist, fashion_mnist])
def test_idx_in_the_cache_is_found(tmp_path: Path, module: object) -> None:
    name = module.__name__.rsplit(".", 1)[1]  # type: ignore[attr-defined]
    arrays = write_idx(tmp_path / "cache/pycollective" / name)
    check(module.load_data(), arrays)  # type: ignore[attr-defined]


def test_named_folder_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npz(tmp_path / "mnist.npz", y_test=np.array([9, 9, 9], np.uint8))
    write_idx(tmp_path / "cache/pycollective/mnist")
    monkeypatch.setenv("PYCOLLECTIVE_DATA", str(tmp_path))
    assert mnist.load_data()[1][1].tolist() == [9, 9, 9]


@pytest.mark.parametrize("module", [mnist, fashion_mnist])
def test_missing_files_error_names_files_and_folders(tmp_path: Path, module: object) -> None:
    with pytest.raises(DataError) as raised:
        module.load_data()  # type: ignore[attr-defined]
    text = str(raised.value)
    name = module.__name__.rsplit(".", 1)[1]  # type: ignore[attr-defined]
    for word in (*NAMES, f"{name}.npz", "PYCOLLECTIVE_DATA", str(tmp_path / "cache"), "no network"):
        assert word in text


def test_absent_paths_are_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="absent"):
        mnist.load_data(tmp_path / "absent")
    monkeypatch.setenv("PYCOLLECTIVE_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"PYCOLLECTIVE_DATA is .*absent"):
        mnist.load_data()


def test_incomplete_folder_error_names_the_missing_file(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / f"{NAMES[1]}.gz").unlink()
    with pytest.raises(DataError, match=f"lacks {NAMES[1]} "):
        mnist.load_data(tmp_path)


def test_a_folder_of_mnist_is_not_fashion_mnist(
    mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLLECTIVE_DATA", str(mnist_dir))
    assert len(mnist.load_data()[0][0]) == 60000
    with pytest.raises(DataError, match="download failed"):
        fashion_mnist.load_data()
    with pytest.raises(DataError, match="not Fashion-MNIST"):
        fashion_mnist.load_data(mnist_dir)


def test_real_mnist_has_the_known_digests(mnist_dir: Path) -> None:
    (x_train, y_train), (x_test, y_test) = mnist.load_data(mnist_dir)
    assert x_train.shape == (60000, 28, 28)
    assert x_test.shape == (10000, 28, 28)
    sums = {
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db": x_train,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5": y_train,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7": x_test,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2": y_test,
    }
    for expected, array in sums.items():
        assert hashlib.sha256(idx(array)).hexdigest() == expected


# Damaged files


def damaged(tmp_path: Path, name: str, data: bytes) -> str:
    """Replace one file of a good folder, and return the error's text."""
    write_idx(tmp_path)
    (tmp_path / f"{name}.gz").unlink()
    path = tmp_path / (f"{name}.gz" if data[:2] == b"\x1f\x8b" else name)
    path.write_bytes(data)
    with pytest.raises(DataError) as raised:
        mnist.load_data(tmp_path)
    assert name in str(raised.value)
    assert "again" in str(raised.value)
    return str(raised.value)


IMAGES = parts()[NAMES[0]]
LABELS = parts()[NAMES[1]]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        (NAMES[0], gzip.compress(idx(IMAGES))[:-2000], "truncated"),
        (NAMES[0], gzip.compress(idx(IMAGES))[:-1], "truncated"),
        (NAMES[0], gzip.compress(idx(IMAGES)[:-1]), "truncated"),
        (NAMES[0], idx(IMAGES)[:9], "truncated"),
        (NAMES[0], idx(IMAGES) + b"x", "too many"),
        (NAMES[0], b"", "begins with ''"),
        (NAMES[0], idx(LABELS), "00000801"),
        (NAMES[1], idx(IMAGES), "00000803"),
        (NAMES[0], struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "truncated"),
        (NAMES[0], idx(IMAGES[:, :14]), "(7, 14, 28)"),
        (NAMES[0], idx(IMAGES[:0]), "(0, 28, 28)"),
        (NAMES[0], idx(IMAGES[:5]), "5 images and 7 labels"),
        (NAMES[1], idx(LABELS[:5]), "7 images and 5 labels"),
        (NAMES[1], idx(np.array([1, 2, 3, 10, 4, 11, 5], np.uint8)), "label 10 of image 3"),
    ],
)
def test_damaged_idx_is_a_data_error(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    assert says in damaged(tmp_path, name, data)


def test_corrupt_gzip_is_a_data_error(tmp_path: Path) -> None:
    good = bytearray(gzip.compress(idx(IMAGES)))
    good[len(good) // 2] ^= 0xFF
    assert "corrupt" in damaged(tmp_path, NAMES[0], bytes(good))
    (tmp_path / f"{NAMES[0]}.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="no gzip file"):
        mnist.load_data(tmp_path)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"y_train": np.array([0, 1, 2, -1, 4, 5, 6])}, "label -1 of image 3"),
        ({"y_train": np.zeros(7)}, "float64"),
        ({"y_test": np.zeros((3, 1), np.uint8)}, r"\(3, 1\)"),
        ({"x_test": np.zeros((3, 28, 28), np.float32)}, "float32"),
        ({"x_test": np.zeros((2, 28, 28), np.uint8)}, "2 images and 3 labels"),
        ({"x_test": np.array([{}], object)}, "corrupt"),
    ],
)
def test_wrong_npz_is_a_data_error(
    tmp_path: Path, changed: dict[str, np.ndarray], says: str
) -> None:
    write_npz(tmp_path / "mnist.npz", **changed)
    with pytest.raises(DataError, match=says) as raised:
        mnist.load_data(tmp_path)
    assert "mnist.npz" in str(raised.value)


def test_labels_of_another_integer_type_are_converted(tmp_path: Path) -> None:
    write_npz(tmp_path / "mnist.npz", y_test=np.array([7, 8, 9], np.int64))
    labels = mnist.load_data(tmp_path)[1][1]
    assert labels.dtype == np.uint8
    assert labels.tolist() == [7, 8, 9]


def test_incomplete_or_damaged_npz_raises_data_error(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=IMAGES)
    with pytest.raises(DataError, match="lacks the arrays y_train, x_test, y_test"):
        mnist.load_data(path)
    for data in (b"", b"not a zip file at all", b"PK\x03\x04 and then nothing"):
        path.write_bytes(data)
        with pytest.raises(DataError, match="no npz file"):
            mnist.load_data(path)
    with path.open("wb") as file:
        np.save(file, IMAGES)
    with pytest.raises(DataError, match="no npz file"):
        mnist.load_data(path)


def test_any_changed_or_lost_bytes_of_an_npz_are_found(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    arrays = write_npz(path)
    good = path.read_bytes()
    random = np.random.default_rng(0)
    for trial in range(100):
        data = bytearray(good)
        if trial % 2:
            del data[random.integers(len(data)) :]
        else:
            data[random.integers(len(data))] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(data))
        try:
            loaded = mnist.load_data(path)
        except DataError:
            continue
        check(loaded, arrays)  # the changed byte has no meaning, as in a date


# Downloading


class Handler(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    cut: int | None = None

    def do_GET(self) -> None:
        data = self.files.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: self.cut])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Handler], str]]:
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    monkeypatch.setattr(_files, "_open_url", lambda url: opener.open(url, timeout=10))

    class HandlerOfTest(Handler):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HandlerOfTest) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield HandlerOfTest, f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()
        thread.join(10)


def small_collection(handler: type[Handler], url: str, folder: Path) -> _files.Collection:
    """Put four small idx files on the server, and return their collection."""
    write_idx(folder)
    handler.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in handler.files.items()}
    return _files.Collection("small", "Small", url, sums, frozenset())


def test_downloaded_files_are_kept_in_the_cache(
    tmp_path: Path, server: tuple[type[Handler], str]
) -> None:
    handler, url = server
    collection = small_collection(handler, url, tmp_path / "served")
    check(_files.load(collection, None), parts())
    cache = tmp_path / "cache/pycollective/small"
    assert sorted(p.name for p in cache.iterdir()) == sorted(handler.files)
    handler.files = {}  # from now on the files come from the cache
    check(_files.load(collection, None), parts())
    assert (cache / f"{NAMES[0]}.gz").stat().st_mode & 0o777 == 0o644


def test_interrupted_download_continues_with_the_missing_files(
    tmp_path: Path, server: tuple[type[Handler], str]
) -> None:
    handler, url = server
    collection = small_collection(handler, url, tmp_path / "served")
    complete = dict(handler.files)
    last = list(collection.files)[-1]
    del handler.files[last]
    with pytest.raises(DataError, match="404"):
        _files.load(collection, None)
    handler.files = {last: complete[last]}
    check(_files.load(collection, None), parts())


def test_wrong_checksum_keeps_the_old_file(
    tmp_path: Path, server: tuple[type[Handler], str]
) -> None:
    handler, url = server
    handler.files = {"a": b"new"}
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with pytest.raises(DataError, match=hashlib.sha256(b"new").hexdigest()):
        _files.download(url + "a", target, hashlib.sha256(b"other").hexdigest())
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    _files.download(url + "a", target, hashlib.sha256(b"new").hexdigest())
    assert target.read_bytes() == b"new"


def test_interrupted_transfer_raises_and_leaves_no_file(
    tmp_path: Path, server: tuple[type[Handler], str]
) -> None:
    handler, url = server
    handler.files = {"a": b"x" * 200_000}
    handler.cut = 100_000
    with pytest.raises(DataError, match="interrupted after 100000 of 200000 bytes"):
        _files.download(url + "a", tmp_path / "a", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_download_of_more_bytes_than_the_limit_is_given_up(
    tmp_path: Path, server: tuple[type[Handler], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, url = server
    handler.files = {"a": b"x" * 200_000}
    monkeypatch.setattr(_files, "_LARGEST", 150_000)
    with pytest.raises(DataError, match="more than 150000 bytes"):
        _files.download(url + "a", tmp_path / "a", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_url: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_files, "_open_url", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _files.download("http://127.0.0.1/a", tmp_path / "a", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_checksums_have_the_form_of_sha256() -> None:
    for collection in (mnist.MNIST, fashion_mnist.FASHION_MNIST):
        assert collection.url.startswith("https://")
        for checksum in (*collection.files.values(), *collection.label_sums):
            assert len(bytes.fromhex(checksum)) == 32


# Digits


@pytest.mark.slow  # importing scikit-learn takes seconds
def test_digits_have_shapes_types_and_classes() -> None:
    pytest.importorskip("sklearn")
    (x_train, y_train), (x_test, y_test) = digits.load_data()
    assert x_train.shape == (1437, 28, 28)
    assert x_test.shape == (360, 28, 28)
    for x, y in ((x_train, y_train), (x_test, y_test)):
        assert x.dtype == y.dtype == np.uint8
        assert len(x) == len(y)
        assert x.max() == 255
        assert set(y.tolist()) == set(range(10))
    np.testing.assert_array_equal(x_train, digits.load_data()[0][0])
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    assert y_test[1] == labels[5]
    np.testing.assert_array_equal(
        x_test[1, 3:27:3, 3:27:3], (images[5].reshape(8, 8) * 255 // 16).astype(np.uint8)
    )


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[demo\]'"):
        digits.load_data()


def test_npz_with_a_damaged_member_raises_data_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", b"garbage")
    with pytest.raises(DataError, match="corrupt"):
        mnist.load_data(tmp_path / "m.npz")
