"""The description of convolutions for cuDNN, with a stand-in that computes the described operation.

The stand-in follows the front end's interface (release 1.32), and checks lengths, strides and types as
cuDNN would. The results must have the lengths that padding and strides give. Real engines are tested in
tests/gpu.
"""

from __future__ import annotations

import sys
import types

import nn_reference as reference
import numpy as np
import pytest
from device_arrays import DeviceArray
from test_nn_conv import CASES, arrays, assert_close

from pycollective.nn import cudnn
from pycollective.nn.conv import conv2d
from pycollective.tensor import GradientTape, Tensor

TYPES = {"HALF": "float16", "FLOAT": "float32", "DOUBLE": "float64"}


class NotSupported(Exception):
    pass


class Described:
    """A tensor of the graph."""

    def __init__(self, name=None, dim=None, stride=None, data_type=None):
        self.name, self.dim, self.stride, self.data_type = name, dim, stride, data_type
        self.is_output = False

    def set_output(self, value):
        self.is_output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def check(self, data):
        """Return the array, whose layout must be the described one."""
        assert type(data) is DeviceArray
        host = data._host
        assert list(host.shape) == self.dim and min(self.dim) > 0
        assert [s // host.itemsize for s in host.strides] == self.stride
        assert host.dtype == TYPES[self.data_type]
        return host


class Graph:
    """A graph of one convolution, or of one of its gradients."""

    def __init__(self, library, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert handle == "handle" and intermediate_data_type == compute_data_type
        self.library, self.steps, self.notes = library, [], []

    def tensor(self, *, name, dim, stride, data_type):
        return Described(name, dim, stride, data_type)

    def _operation(self, kind, roles, pre_padding, post_padding, stride, dilation):
        self.kind, self.roles = kind, roles
        self.geometry = pre_padding, post_padding, stride, dilation
        self.output = Described()
        return self.output

    def conv_fprop(self, *, image, weight, **geometry):
        return self._operation("fprop", (image, weight), **geometry)

    def conv_dgrad(self, *, loss, filter, **geometry):
        return self._operation("dgrad", (loss, filter), **geometry)

    def conv_wgrad(self, *, image, loss, **geometry):
        return self._operation("wgrad", (image, loss), **geometry)

    def validate(self):
        assert self.output.is_output
        self.steps.append("validate")

    def build_operation_graph(self):
        self.steps.append("operations")

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]
        self.steps.append("plans")

    def deselect_numeric_notes(self, notes):
        self.notes += notes

    def check_support(self):
        assert self.steps == ["validate", "operations", "plans"]
        if self.output.data_type in self.library.lacks:
            raise NotSupported("no engine")
        self.steps.append("checked")

    def build_plans(self):
        assert self.steps[-1] == "checked"
        self.library.built += 1

    def get_workspace_size(self):
        return 100

    def execute(self, pack, workspace, handle):
        assert handle == "handle" and self.library.stream == 7
        assert workspace.shape == (100,) and workspace.dtype == np.uint8
        assert (self.notes == ["TENSOR_CORE", "DOWN_CONVERT_INPUTS", "FFT"]) == (
            self.output.data_type == "FLOAT"
        )
        first, second = (role.check(pack[role]) for role in self.roles)
        out = self.output.check(pack[self.output])
        before, after, strides, dilations = self.geometry
        image, weight, loss = {
            "fprop": (first, second, out),
            "dgrad": (out, second, first),
            "wgrad": (first, out, second),
        }[self.kind]
        for axis in (0, 1):
            extent = (weight.shape[2 + axis] - 1) * dilations[axis] + 1
            free = image.shape[2 + axis] + before[axis] + after[axis] - extent
            assert loss.shape[2 + axis] == free // strides[axis] + 1
        assert loss.shape[:2] == (image.shape[0], weight.shape[0])
        assert image.shape[1] == weight.shape[1]
        around = ((0, 0), (0, 0), *zip(before, after, strict=True))
        padded = np.pad(image, around)
        if self.kind == "dgrad":
            padded[...] = 0
        elif self.kind == "wgrad":
            weight[...] = 0
        else:
            loss[...] = 0
        for i, j in np.ndindex(*weight.shape[2:]):
            top, left = i * dilations[0], j * dilations[1]
            tap = padded[
                :,
                :,
                top : top + (loss.shape[2] - 1) * strides[0] + 1 : strides[0],
                left : left + (loss.shape[3] - 1) * strides[1] + 1 : strides[1],
            ]
            if self.kind == "fprop":
                loss += np.einsum("nchw,fc->nfhw", tap, weight[:, :, i, j])
            elif self.kind == "wgrad":
                weight[:, :, i, j] = np.einsum("nchw,nfhw->fc", tap, loss)
            else:
                tap += np.einsum("nfhw,fc->nchw", loss, weight[:, :, i, j])
        if self.kind == "dgrad":
            rows, columns = (slice(b, b + n) for b, n in zip(before, image.shape[2:], strict=True))
            image[...] = padded[:, :, rows, columns]
        self.library.executed.append(self.kind)


@pytest.fixture
def library(monkeypatch, cupy):
    stand_in = types.ModuleType("cudnn")
    stand_in.built, stand_in.executed, stand_in.lacks, stand_in.stream = 0, [], set(), None
    stand_in.data_type = types.SimpleNamespace(**{name: name for name in TYPES})
    stand_in.heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    stand_in.numerical_note = types.SimpleNamespace(
        TENSOR_CORE="TENSOR_CORE", DOWN_CONVERT_INPUTS="DOWN_CONVERT_INPUTS", FFT="FFT"
    )
    stand_in.cudnnGraphNotSupportedError = NotSupported
    stand_in.backend_version = lambda: 92000
    stand_in.create_handle = lambda: "handle"
    stand_in.pygraph = lambda **options: Graph(stand_in, **options)

    def set_stream(handle, stream):
        stand_in.stream = stream

    stand_in.set_stream = set_stream
    monkeypatch.setattr(cudnn, "_plans", cudnn._Plans())
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    monkeypatch.setattr(stand_in, "__spec__", types.SimpleNamespace(name="cudnn"))
    cudnn._library.cache_clear()
    yield stand_in
    cudnn._library.cache_clear()


def results(make, values, case, activation):
    _, _, strides, padding, dilations = case
    x, w, b = (Tensor(make(v)) for v in values)
    with GradientTape() as tape:
        tape.watch([x, w, b])
        y = conv2d(x, w, strides, padding, dilations=dilations, bias=b, activation=activation)
    upstream = np.random.default_rng(5).normal(size=y.shape).astype(values[0].dtype)
    return [y, *tape.gradient(y, [x, w, b], Tensor(make(upstream)))]


@pytest.mark.parametrize(("dtype", "activation"), [("float32", "relu"), ("float64", None)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_by_cudnn_equals_that_of_the_host(library, cupy, case, dtype, activation):
    values = arrays(case, dtype)
    fetched = cupy.fetched
    found = results(cupy.asarray, values, case, activation)
    again = results(cupy.asarray, values, case, activation)
    assert cupy.fetched == fetched
    expected = results(np.asarray, values, case, activation)
    for ours, other, right in zip(found, again, expected, strict=True):
        assert type(ours.array) is DeviceArray and ours.array.flags.c_contiguous
        assert_close(ours.numpy(), right.numpy(), dtype)
        np.testing.assert_array_equal(ours.numpy(), other.numpy())
    # cuDNN is not called for empty batches.
    rows = case[0][0]
    assert library.executed == (["fprop", "dgrad", "wgrad"] * 2 if rows else [])
    assert library.built == (3 if rows else 0), "a plan is built once"


def test_convolution_of_float16_gives_float16(library, cupy):
    case = CASES[0]
    values = [v.astype(np.float16) for v in arrays(case, "float64")]
    found = results(cupy.asarray, values, case, None)
    assert {t.dtype.name for t in found} == {"float16"} and len(library.executed) == 3
    wide = reference.conv2d(*(v.astype(np.float64) for v in values), *case[2:])
    np.testing.assert_allclose(found[0].numpy(), wide, rtol=0.02, atol=0.05)


def test_convolution_without_an_engine_does_not_use_cudnn(library, cupy, caplog):
    case = CASES[5]
    values = arrays(case, "float32")
    expected = results(np.asarray, values, case, "relu")
    library.lacks.add("FLOAT")
    with caplog.at_level("INFO", "pycollective"):
        for _ in range(2):
            found = results(cupy.asarray, values, case, "relu")
    assert library.executed == [] and caplog.text.count("cuDNN has no") == 3
    assert "cuDNN has no conv_fprop of {'image': (2, 9, 11, 8)" in caplog.text
    for ours, right in zip(found, expected, strict=True):
        assert_close(ours.numpy(), right.numpy(), "float32")


def test_front_end_that_fails_is_logged_once(library, cupy, caplog):
    def fails():
        raise OSError("libcudnn.so.9: cannot open shared object file")

    library.backend_version = fails
    case = CASES[0]
    values = arrays(case, "float32")
    found = results(cupy.asarray, values, case, None)
    for ours, right in zip(found, results(np.asarray, values, case, None), strict=True):
        assert_close(ours.numpy(), right.numpy(), "float32")
    assert [r.message for r in caplog.records if "do not use cuDNN" in r.message] == [
        "convolutions do not use cuDNN, because its front end fails: libcudnn.so.9: cannot open shared "
        "object file"
    ]
