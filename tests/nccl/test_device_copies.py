"""Copies to and from a device; only the thread that uses a copy waits for it."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import array_backend
from pycollective.nccl.device import Fetch, Upload, description, library_version


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("device", [0, 2])
def test_upload_waits_until_its_memory_is_free(gpus, device, dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    with gpus.cuda.Device(device):
        before = len(gpus.cuda.streams[device])
        upload = Upload()
        copy_stream = gpus.cuda.streams[device][-1]
        assert len(gpus.cuda.streams[device]) == before + 1
        for turn in range(1, 4):
            copied = upload(array.T)  # in another memory order
            # The computing stream may still use the previous contents of the memory.
            assert copy_stream.waits == turn
            assert copied.device.id == device and copied.dtype == array.dtype
            np.testing.assert_array_equal(gpus.asnumpy(copied), array.T)
            array[0, 0] = 1  # the next copy has this value
        assert len(gpus.cuda.streams[device]) == before + 1
    assert gpus.sent == 3


def test_upload_without_pinned_memory_works(gpus, monkeypatch):
    def refuse(size):
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    upload = Upload()
    monkeypatch.setattr(gpus.cuda, "alloc_pinned_memory", refuse)
    array = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(gpus.asnumpy(upload(array.T)), array.T)


def test_fetch_keeps_the_value_at_its_start(gpus):
    there = gpus.asarray(np.array([[1.5, 2.5]]))
    fetch = Fetch(there)
    there[0, 0] = 9
    assert gpus.fetched == 0
    for _ in range(2):
        np.testing.assert_array_equal(fetch.value(), [[1.5, 2.5]])
    assert Fetch(gpus.asarray(np.array(True))).value()
    assert gpus.fetched == 0


def test_description_of_an_unknown_gpu_has_placeholders(gpus):
    assert description(1) == "a GPU, 0 GiB, sm_??"
    assert library_version() == "?"
    gpus.__version__ = "14.2.0"
    assert library_version() == "14.2.0"


@pytest.mark.parametrize("turned", [False, True])
def test_copy_to_another_gpu_is_ordered_on_both_streams(gpus, turned):
    cuda = gpus.cuda
    with cuda.Device(1):
        array = gpus.asarray(np.arange(6.0).reshape(2, 3))
        array = array.T if turned else array
        here = cuda.Stream(non_blocking=True)
    with cuda.Device(2):
        there = cuda.Stream(non_blocking=True)
    with here, there:
        moved = array_backend.placed(array, "GPU", 2)
    # The copy waits for the source's stream, and later work of that stream waits for the copy.
    assert [event._stream for event in there.awaited] == [here.ptr]
    assert [event._stream for event in here.awaited] == [there.ptr]
    assert here.awaited[0]._first == there.awaited
    assert moved.device.id == 2 and moved.flags.c_contiguous
    np.testing.assert_array_equal(gpus.asnumpy(moved), gpus.asnumpy(array))


def test_placed_array_on_its_gpu_is_not_copied(gpus):
    with gpus.cuda.Device(1):
        array = gpus.asarray(np.ones(2))
        stream = gpus.cuda.get_current_stream()
    assert array_backend.placed(array, "GPU", 1) is array
    assert not stream.waits
