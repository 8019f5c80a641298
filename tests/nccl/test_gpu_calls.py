"""Every call of a communicator on GPU arrays: results, layouts, errors, streams."""

from __future__ import annotations

import threading
import time

import device_arrays
import fake_gpus
import numpy as np
import pytest
from foreign_bfloat16 import check_reductions, refuse_bfloat16

from pycollective import _core, algorithms, array_backend, dtypes, local_group
from pycollective.comm import on_device
from pycollective.comm.call import Call
from pycollective.errors import AbortedError, CollectiveError, MismatchError
from pycollective.nccl import device


def check(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_every_collective_on_gpus_is_right(gpus, on_gpus):
    size = 3

    def work(c):
        r, put, get = c.rank, gpus.asarray, gpus.asnumpy
        x = np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * r
        everyone = [x - 10 * r + 10 * q for q in range(size)]
        total, whole = sum(everyone), np.concatenate(everyone)
        same = np.testing.assert_array_equal
        y = put(x)
        result = c.all_reduce(y)
        assert isinstance(result, gpus.ndarray) and result.device.id == r
        same(get(result), total)
        same(get(y), x)
        same(get(c.all_reduce(y, "mean")), total / size)
        same(get(c.all_reduce(y, "max")), everyone[-1])
        in_place = put(x)
        assert c.all_reduce(in_place, "min", out=in_place) is in_place
        same(get(in_place), everyone[0])
        for root in range(size):
            reduced = c.reduce(y, root=root)
            assert (reduced is None) == (r != root)
            if r == root:
                same(get(reduced), total)
            same(get(c.broadcast(y, root)), everyone[root])
            gathered = c.gather(y, root)
            assert (gathered is None) == (r != root)
            if r == root:
                same(get(gathered), whole)
            same(get(c.scatter(y, root)), everyone[root][r : r + 1])
        same(get(c.reduce_scatter(y)), total[r : r + 1])
        same(get(c.scan(y, "mean")), sum(everyone[: r + 1]) / (r + 1))
        prefix = c.exscan(in_place, out=in_place, async_op=True)
        assert prefix.wait() is in_place
        same(get(in_place), everyone[0] * r)
        same(get(c.all_gather(y)), whole)
        same(get(c.all_to_all(y)), np.stack([e[r] for e in everyone]))
        # Ragged arrays: rank r has r + 1 rows.
        ragged_rows = put(np.full((r + 1, 2), r, np.int16))
        rows = np.concatenate([np.full((q + 1, 2), q) for q in range(size)])
        same(get(c.all_gather(ragged_rows, ragged=True)), rows)
        later = c.gather(ragged_rows, 1, ragged=True, async_op=True).wait()
        if r == 1:
            same(get(later), rows)
        given = put(rows.astype(np.int16)) if r == 0 else ragged_rows
        part = c.scatter(given, ragged=True, counts=[1, 2, 3] if r == 0 else None)
        same(get(part), np.full((r + 1, 2), r))
        sent = put(np.full((3, 1), r, np.int64))
        counts = [0, 1, 2]
        got = c.all_to_all(sent, counts)
        same(get(got)[:, 0], np.repeat(np.arange(size), r))
        # Messages go round a ring.
        out = put(np.zeros((3, 2), np.float32))
        w = c.send(y, (r + 1) % size, async_op=True)
        assert c.recv(out, (r - 1) % size) is out
        with pytest.raises(ValueError, match="tag 0"):
            c.send(y, (r + 1) % size, tag=1)
        w.wait()
        same(get(out), everyone[(r - 1) % size])
        ring = (r + 1) % size, (r - 1) % size
        same(get(c.sendrecv(y, ring[0], None, ring[1])), everyone[ring[1]])
        same(get(c.sendrecv(y, ring[1], out, ring[0], async_op=True).wait()), everyone[ring[0]])
        assert c.sendrecv(out, ring[0], out, ring[1]) is out
        same(get(out), everyone[r])
        packed = c.all_reduce_many([y, put(np.ones(5, np.float64)), put(x[0])])
        for found, want in zip(packed, (total, np.full(5, 3.0), total[0]), strict=True):
            same(get(found), want)
        c.barrier()
        return True

    assert check(on_gpus(local_group(size, timeout=20), work)) == [True] * size


def test_gpu_arrays_of_any_type_and_layout_are_reduced(gpus, on_gpus):
    names = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
             "complex64", "complex128"]  # fmt: skip

    def work(c):
        put, get = gpus.asarray, gpus.asnumpy
        small = []
        if dtypes.bfloat16 is not None:
            import ml_dtypes as ml

            small = [np.dtype(t) for t in (ml.bfloat16, ml.float8_e4m3fn, ml.float8_e5m2)]
        for dtype in [*names, *small]:
            x = np.arange(6).astype(dtype).reshape(2, 3)
            for y in (x, x.T, x[:, ::2], x[:0], x[0, 0]):
                got = get(c.all_reduce(put(np.asarray(y))))
                assert got.dtype == y.dtype and got.shape == y.shape
                np.testing.assert_array_equal(got, y + y)
            np.testing.assert_array_equal(get(c.all_gather(put(x))), np.concatenate([x, x]))
            if np.dtype(dtype).kind != "c":
                both = put((x if c.rank else x[::-1]).copy())
                np.testing.assert_array_equal(
                    get(c.all_reduce(both, "max")), np.maximum(x, x[::-1])
                )
                np.testing.assert_array_equal(get(c.all_reduce(put(x), "mean")), x)
                np.testing.assert_array_equal(
                    get(c.all_reduce(put(x[:, 1:]), "prod")), (x * x)[:, 1:]
                )
        logical = put(np.array([True, False, c.rank == 0]))
        assert get(c.all_reduce(logical, "and")).tolist() == [True, False, False]
        assert get(c.all_reduce(logical, "or")).tolist() == [True, False, True]
        # Into a part of a larger array, and out of place into one that overlaps.
        whole = put(np.zeros((4, 2), np.float32))
        part = whole[2 * c.rank : 2 * c.rank + 2]
        part[...] = put(np.full((2, 2), c.rank + 1.0, np.float32))
        c.all_gather(part, out=whole)
        assert get(whole)[:, 0].tolist() == [1, 1, 2, 2]
        c.broadcast(whole[:2], 0, out=whole[1:3])
        assert get(whole)[:, 0].tolist() == [1, 1, 1, 2]
        columns = put(np.zeros((2, 3), np.float32)).T
        assert c.all_reduce(put(np.ones((3, 2), np.float32)), out=columns) is columns
        assert get(columns).tolist() == [[2, 2]] * 3
        return True

    assert check(on_gpus(local_group(2, timeout=20), work)) == [True, True]


class Foreign:
    """A GPU array of another library."""

    def __init__(self, array, device=2):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **_):
        raise AssertionError("CuPy is asked, not the array")


class Interface:
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = {"version": 3}


def test_gpu_arrays_of_other_libraries_are_reduced(gpus, on_gpus):
    asarray = gpus.asarray
    gpus.from_dlpack = lambda x: x.array
    gpus.asarray = lambda x, dtype=None: x.array if isinstance(x, Interface) else asarray(x, dtype)

    def work(c):
        x = asarray(np.ones(3))
        for y in (Foreign(x), Foreign(x, 13), Interface(x)):
            got = c.all_reduce(y)
            assert isinstance(got, gpus.ndarray) and gpus.asnumpy(got).tolist() == [2, 2, 2]
        out = Interface(asarray(np.zeros(3)))
        assert c.all_reduce(x, out=out) is out
        assert gpus.asnumpy(out.array).tolist() == [2, 2, 2]
        return True

    assert check(on_gpus(local_group(2, timeout=20), work)) == [True, True]
    with pytest.raises(TypeError, match="CuPy cannot take this Foreign: no bfloat16"):

        def refuse(_):
            raise BufferError("no bfloat16")

        gpus.from_dlpack = refuse
        local_group(1)[0].all_reduce(Foreign(None))


@pytest.mark.skipif(dtypes.bfloat16 is None, reason="needs ml_dtypes")
@pytest.mark.parametrize("shared", [False, True])
def test_bfloat16_of_other_libraries_is_reduced(gpus, on_gpus, monkeypatch, shared):
    """NCCL moves the data, or the host if ranks share a GPU."""
    refuse_bfloat16(monkeypatch, gpus)

    def work(c):
        with gpus.cuda.Device(0 if shared else c.rank) as here:
            return check_reductions(gpus, c, here.synchronize)

    name = "Staged" if shared else "Nccl"
    assert check(on_gpus(local_group(2, timeout=20), work)) == [name] * 2


def test_bfloat16_without_ml_dtypes_raises_type_error(gpus, monkeypatch):
    monkeypatch.setattr(array_backend, "bfloat16", None)
    (alone,) = local_group(1)
    tensor = Foreign(np.ones(3), 2)
    tensor.dtype = "torch.bfloat16"
    with pytest.raises(
        TypeError, match="Foreign of bfloat16 needs the package ml_dtypes: pip inst"
    ):
        alone.all_reduce(tensor)


def test_unsupported_gpu_arrays_raise_clear_errors(gpus):
    (alone,) = local_group(1)
    x, host = gpus.asarray(np.ones(4, np.float32)), np.ones(4, np.float32)
    for given, out, places in (
        (x, host, "GPU 0, as the input is, not on the host"),
        (host, x, "the host, as the input is, not on GPU 0"),
    ):
        with pytest.raises(ValueError, match=f"out must be on {places}"):
            alone.all_reduce(given, out=out)
        with pytest.raises(ValueError, match=f"out must be on {places}"):
            alone.all_gather(given, out=out)
    with pytest.raises(ValueError, match="are on GPU 0 and on the host: put all on one GPU"):
        alone.all_reduce_many([x, host])
    with pytest.raises(TypeError, match="no reduction for dtype int16"):
        alone.all_reduce(gpus.asarray(np.ones(2, np.int16)))
    with pytest.raises(ValueError, match="a rank cannot send a GPU array to itself"):
        alone.send(x, 0)
    with pytest.raises(ValueError, match="root 5 is not among the 1 ranks"):
        alone.broadcast(x, 5)
    with gpus.cuda.Device(1), pytest.raises(ValueError, match="is on GPU 1, but rank 0 uses GPU 0"):
        alone.all_reduce(gpus.asarray(np.ones(2)))
    alone.close()
    with pytest.raises(CollectiveError, match="closed"):
        alone.all_reduce(x)


def test_calls_run_on_the_stream_of_the_program(gpus, on_gpus):
    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        c.all_reduce(x)
        with gpus.cuda.Stream(non_blocking=True) as stream:
            got = c.all_reduce(x)
        after = gpus.cuda.event_after(stream)
        assert stream.waits  # for the call before, which was on another stream
        later = c.all_reduce(x, async_op=True)
        return stream.ptr, after, gpus.asnumpy(got).tolist(), gpus.asnumpy(later.wait()).tolist()

    found = check(on_gpus(local_group(2, timeout=20), work))
    calls = [line.split("stream=")[1] for line in gpus.log() if "AllReduce" in line]
    for rank, (ptr, after, *results) in enumerate(found):
        assert after.done and results == [[2.0] * 4] * 2
        streams = [
            c
            for c, line in zip(calls, [x for x in gpus.log() if "AllReduce" in x], strict=True)
            if line.startswith(f"rank {rank}:")
        ]
        assert streams[0] == str(0x100 + rank) and streams[1] == str(ptr)
        assert streams[2] not in streams[:2]  # the asynchronous call used another stream


def test_call_returns_before_the_device_has_finished(gpus, on_gpus):
    begun = threading.Barrier(2)

    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        c.all_reduce(x)
        begun.wait()
        gpus.cuda.library.fake_stall(1)
        begun.wait()
        now = c.all_reduce(x)
        own = c._gpu.nccl._nccl._own_stream
        later = c.all_reduce(x, "max", async_op=True)
        assert own.waits == 2  # for this thread's stream, and for the previous call
        assert not later.done()
        with pytest.raises(TimeoutError, match="not done after 0.01 s"):
            later.wait(0.01)
        with pytest.raises(RuntimeError, match="still runs"):
            later.result()
        stream = gpus.cuda.get_current_stream()
        before = stream.waits
        result = later.wait()  # the stream waits, and not the host
        assert later.done() and stream.waits == before + 1
        begun.wait()
        gpus.cuda.library.fake_stall(0)
        return gpus.asnumpy(now).tolist(), gpus.asnumpy(result).tolist()

    assert check(on_gpus(local_group(2, timeout=20), work)) == [([2.0] * 4, [1.0] * 4)] * 2


def test_calls_on_the_per_thread_stream_are_ordered(gpus):
    """NCCL launches kernels from its own threads, where the handle means another stream."""
    (alone,) = local_group(1, timeout=20)
    x = gpus.asarray(np.ones(4, np.float32))
    given, streams = gpus.cuda.library.fake_given, []

    def call():
        stream = fake_gpus.Stream(gpus.cuda, device.PER_THREAD)
        with stream:
            alone.all_reduce(x, out=x)
        streams.append(stream)

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(20)
    own = alone._gpu.nccl._nccl._own_stream
    assert (given(device.PER_THREAD), given(own.ptr)) == (0, 2)
    assert own.waits == 2  # for earlier work of each thread
    for number, stream in enumerate(streams, 1):
        assert [(event._stream, event._count) for event in stream.awaited] == [(own.ptr, number)]
    alone.close()


@pytest.mark.parametrize("same", [True, False])
def test_differing_calls_with_long_texts_raise_mismatch_error(gpus, on_gpus, same):
    """The ranks compare the whole texts of calls, not only the parts in messages."""
    size = 150

    def work(c):
        shapes = [[1000 + i] for i in range(size)]
        shapes[-1][0] += 0 if same else c.rank
        x = gpus.asarray(np.ones(4, np.float32))
        c._submit(Call("all_reduce", x, x, 20.0, op="sum", count=x.size, shape=shapes))
        return gpus.asnumpy(x).tolist()

    for found in on_gpus(local_group(2, timeout=20), work):
        if same:
            assert found == [2.0] * 4
        else:
            assert isinstance(found, MismatchError) and "rank 1 is in all_reduce(" in str(found)
            assert str(found).count("... (BLAKE2 of the whole: ") == 2


@pytest.mark.parametrize("first", [1, 2])
def test_array_of_another_gpu_than_the_current_one_is_reduced(gpus, on_ranks, first):
    """A call's temporary copies are on its arrays' GPU, with NCCL and through the host."""

    def work(c):
        number = 2 if c.rank else first
        on = gpus.cuda.Device(number)
        with on:
            x = gpus.asarray(np.arange(6.0).reshape(2, 3))
            turned, out = x.T, gpus.asarray(np.zeros((2, 3))).T
            flat = gpus.asarray(np.arange(6.0))
            part, overlapping = flat[:4], flat[2:]
        got = c.all_reduce(turned)
        assert got.device.id == number
        assert c.all_reduce(turned, out=out) is out
        assert c.all_reduce(x, async_op=True).wait().device.id == number
        c.all_reduce(part, out=overlapping)
        with on:
            flat = c.all_gather(flat[:2])
        many = c.all_reduce_many([x, turned])
        c.barrier()
        found = [got, out, overlapping, flat, *many]
        c.close()
        return [gpus.asnumpy(array).tolist() for array in found]

    x = np.arange(6.0).reshape(2, 3)
    turned = (2 * x.T).tolist()
    want = [turned, turned, [0.0, 2.0, 4.0, 6.0], [0.0, 1.0] * 2, (2 * x).tolist(), turned]
    assert check(on_ranks(local_group(2, timeout=20), work)) == [want] * 2


def test_scatter_does_not_send_a_part_that_is_in_place(gpus, on_gpus):
    def work(c):
        x = gpus.asarray(np.arange(4, dtype=np.float32))
        out = x[:2] if c.rank == 0 else gpus.asarray(np.zeros(2, np.float32))
        return gpus.asnumpy(c.scatter(x if c.rank == 0 else None, out=out)).tolist()

    assert check(on_gpus(local_group(2, timeout=20), work)) == [[0, 1], [2, 3]]
    sent = [line.split(" stream")[0] for line in gpus.log() if "Send" in line or "Recv" in line]
    assert sorted(sent) == [
        "rank 0: Send count=8 type=1 op=0 root=1",
        "rank 1: Recv count=8 type=1 op=0 root=0",
    ]


def test_messages_of_an_exchange_are_one_operation(gpus, on_gpus, monkeypatch):
    """NCCL buffers little: if all ranks sent first, none would receive."""
    monkeypatch.setenv("FAKE_NCCL_BUFFER", "0")
    size = 3

    def work(c):
        after, before = (c.rank + 1) % size, (c.rank - 1) % size
        x = gpus.asarray(np.full(4, c.rank, np.float32))
        out, other = (gpus.asarray(np.zeros(4, np.float32)) for _ in range(2))
        c.all_reduce(x)
        sent = c.send(x, after, async_op=True)
        assert c.recv(out, before) is out
        assert sent.wait() is None and sent.done()
        both = [c.recv(other, after, async_op=True), c.send(x, before, async_op=True)]
        received, _ = (w.wait() for w in both)
        assert received is other
        found = [gpus.asnumpy(a).tolist() for a in (out, other)]
        assert found == [[before] * 4, [after] * 4]
        # Deferred messages are sent before other calls, and at the end.
        if c.rank == 0:
            c.send(x, 1, async_op=True)
        total = c.all_reduce(x) if c.rank != 1 else (c.recv(out, 0), c.all_reduce(x))[1]
        assert gpus.asnumpy(total).tolist() == [3.0] * 4
        c.send(x, after, async_op=True)
        c.recv(out, before, async_op=True)
        c.close()
        return gpus.asnumpy(out).tolist() == [before] * 4, c._gpu

    assert check(on_gpus(local_group(size, timeout=20), work)) == [(True, None)] * size
    log = gpus.log()
    groups = "\n".join(log).split("group of:\n")
    pairs = [g for g in groups if g.count("Send") == g.count("Recv") == 1]
    assert len(pairs) == 3 * size


def test_message_of_an_array_on_another_gpu_raises(gpus, on_gpus):
    def work(c):
        c.all_reduce(gpus.asarray(np.ones(1, np.float32)))
        with gpus.cuda.Device(1 - c.rank):
            x = gpus.asarray(np.ones(1, np.float32))
        for call in (c.send, c.recv):
            with pytest.raises(ValueError, match=f"is on GPU {1 - c.rank}, but rank {c.rank} uses"):
                call(x, 1 - c.rank)

    check(on_gpus(local_group(2, timeout=20), work))


@pytest.mark.parametrize("error", [RuntimeError("CUDA fails"), KeyboardInterrupt()])
def test_deferred_messages_have_the_error_of_their_beginning(gpus, on_gpus, error):
    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        c.all_reduce(x)
        late = [c.send(x, 1 - c.rank, async_op=True) for _ in range(2)]
        engine = c._gpu.nccl

        def fails(*_, **options):
            raise error

        engine._nccl.enqueue = fails
        if isinstance(error, Exception):
            assert all(work.done() for work in late)
        else:
            with pytest.raises(KeyboardInterrupt):
                late[0].done()
        del engine._nccl.enqueue
        for work in late:
            found = work.exception()
            assert ("CUDA fails" if isinstance(error, Exception) else "interrupted") in str(found)
        c.barrier()

    check(on_gpus(local_group(2, timeout=20), work))


def test_messages_do_not_count_as_collective_calls(gpus, on_gpus):
    """A rank that has sent fewer messages is not reported as late."""

    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        c.all_reduce(x)
        for _ in range(3):
            if c.rank < 2:
                (c.send if c.rank == 0 else c.recv)(x, 1 - c.rank)
        c.barrier()
        return c._gpu.nccl._nccl.calls

    assert on_gpus(local_group(3, timeout=20), work) == [1] * 3


def test_deferred_message_of_a_failed_group_raises(gpus, on_gpus):
    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        c.all_reduce(x)
        late = c.send(x, 1 - c.rank, async_op=True)
        c.barrier()
        if c.rank == 0:
            c.abort("it is over")
        until = time.monotonic() + 20
        while c._gpu.nccl._nccl.error is None and time.monotonic() < until:
            time.sleep(0.01)
        assert late.done()
        return late.exception()

    for error in on_gpus(local_group(2, timeout=20), work):
        assert isinstance(error, AbortedError) and "it is over" in str(error), error


def test_split_has_its_own_nccl_communicator(gpus, on_gpus):
    def work(c):
        part = c.split(c.rank % 2, timeout=20)
        x = gpus.asarray(np.full(2, c.rank, np.float32))
        both = gpus.asnumpy(c.all_reduce(x)).tolist(), gpus.asnumpy(part.all_reduce(x)).tolist()
        part.close()
        return both

    found = check(on_gpus(local_group(4, timeout=20), work))
    assert found == [([6.0] * 2, [2.0 + 2 * (r % 2)] * 2) for r in range(4)]


def test_ranks_on_one_gpu_copy_through_host_memory(gpus, on_ranks, caplog):
    def work(c):
        x = gpus.asarray(np.arange(4, dtype=np.float32))
        got = gpus.asnumpy(c.all_reduce(x))
        later = c.all_gather(x, async_op=True).wait()
        out = gpus.asarray(np.zeros(4, np.float32))
        if c.rank == 0:
            c.send(x, 1, tag=3)
        else:
            c.recv(out, 0, tag=3)
        only = c.reduce(x, root=1)
        c.close()
        return got.tolist(), gpus.asnumpy(later).tolist(), gpus.asnumpy(out).tolist(), only is None

    x = [0.0, 1.0, 2.0, 3.0]
    found = check(on_ranks(local_group(2, timeout=20), work))
    assert [f[:2] for f in found] == [([0.0, 2.0, 4.0, 6.0], x + x)] * 2
    assert [f[2:] for f in found] == [([0.0] * 4, True), (x, False)]
    assert "ranks 0 and 1 share a GPU (0000:00:00.0 00" in caplog.text
    assert not gpus.log()


@pytest.mark.parametrize(("version", "setting"), [(22803, "1"), (23000, "0")])
def test_ranks_on_one_gpu_without_the_variable_do_not_use_nccl(
    gpus, on_ranks, monkeypatch, version, setting
):
    monkeypatch.setenv("FAKE_NCCL_VERSION", str(version))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
    monkeypatch.setattr("os.getpid", threading.get_ident)
    check(on_ranks(local_group(2, timeout=20), lambda c: (one_sum(gpus, c), c.close())))
    assert not gpus.log()


def one_sum(gpus, c):
    assert gpus.asnumpy(c.all_reduce(gpus.asarray(np.full(2, 1.0 + c.rank)))).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_on_one_gpu_with_the_variable_use_nccl(
    gpus, on_ranks, monkeypatch, caplog, processes
):
    """The variable lets processes share a GPU. Threads may not: they would share a stream, too."""
    monkeypatch.setenv("FAKE_NCCL_VERSION", "23000")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    if processes == 2:
        monkeypatch.setattr("pycollective.comm.gpu.os.getpid", threading.get_ident)
    check(on_ranks(local_group(2, timeout=20), lambda c: (one_sum(gpus, c), c.close())))
    assert any("AllReduce" in line for line in gpus.log()) == (processes == 2)
    assert ("ranks 0 and 1 share a GPU" in caplog.text) == (processes == 1)


def test_without_nccl_arrays_are_copied_through_host_memory(
    gpus, on_gpus, caplog, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYCOLLECTIVE_NCCL_LIBRARY", str(tmp_path / "none"))

    def work(c):
        return gpus.asnumpy(c.all_reduce(gpus.asarray(np.ones(2)))).tolist()

    assert check(on_gpus(local_group(2, timeout=20), work)) == [[2.0, 2.0]] * 2
    assert "NCCL cannot be used: rank 0: NCCL cannot be used (PYCOLLECTIVE_NCCL_LIB" in caplog.text


def test_different_versions_of_nccl_raise(gpus, on_gpus, monkeypatch):
    from pycollective.comm import gpu

    true = gpu.exchange

    def differ(member, text, what):
        return [t.replace("22803", str(22800 + r)) for r, t in enumerate(true(member, text, what))]

    monkeypatch.setattr(gpu, "exchange", differ)
    found = on_gpus(local_group(2, timeout=20), lambda c: c.all_reduce(gpus.asarray(np.ones(2))))
    for error in found:
        assert "different versions of NCCL" in str(error) and "rank 1 has 22801" in str(error)


@pytest.mark.parametrize("first", [True, False])
def test_host_and_gpu_arrays_in_one_call_raise_mismatch_error(gpus, on_gpus, first):
    def work(c):
        x = np.ones(4, np.float32)
        y = gpus.asarray(x)
        if not first:
            c.all_reduce(y)
        return c.all_reduce(y if c.rank else x, "max")

    host, device = on_gpus(local_group(2, timeout=20), work)
    assert isinstance(host, MismatchError) and isinstance(device, MismatchError)
    assert "Put the arrays of a call on GPUs on all ranks" in str(device)
    assert "a GPU array" in str(host) and "all_reduce" in str(host)


def test_differing_calls_on_gpus_raise_mismatch_error(gpus, on_gpus):
    def work(c):
        return c.all_reduce(gpus.asarray(np.ones(3 + c.rank, np.float32)))

    for error in on_gpus(local_group(2, timeout=20), work):
        assert isinstance(error, MismatchError)
        assert "rank 0 is in all_reduce(float32[3], sum)" in str(error)
        assert "rank 1 is in all_reduce(float32[4], sum)" in str(error)


def test_all_to_all_with_an_older_nccl_is_right(monkeypatch, older_path, no_library, on_ranks):
    """An NCCL without functions for gather, scatter and all_to_all."""
    gpus = fake_gpus.make_gpus(monkeypatch, older_path)

    def work(c):
        with gpus.cuda.Device(c.rank):
            got = gpus.asnumpy(c.all_to_all(gpus.asarray(np.arange(2) + 2 * c.rank))).tolist()
            c.close()
            return got

    assert check(on_ranks(local_group(2, timeout=20), work)) == [[0, 2], [1, 3]]


def test_algorithm_by_name_uses_the_device_executor(gpus, on_gpus, monkeypatch):
    """NCCL has its own algorithms; named ones and reproducible calls need the device executor."""
    emulated = _core.device.EmulatedRuntime([0, 0, 0, 0])
    monkeypatch.setattr(on_device, "runtime", lambda: emulated)
    finish = device_arrays.before_access

    def finish_all(array):
        finish(array)
        emulated.run()

    monkeypatch.setattr(device_arrays, "before_access", finish_all)

    def work(c):
        x = gpus.asarray(np.arange(4, dtype=np.float32) + c.rank)
        by_nccl = gpus.asnumpy(c.all_reduce(x)).tolist()
        before = len(gpus.log())
        results = [
            gpus.asnumpy(c.all_reduce(x, **kind)).tolist()
            for kind in ({"algorithm": "ring"}, {"algorithm": pair}, {"reproducible": True})
        ]
        later = c.all_reduce(x, algorithm="double_tree", async_op=True).wait()
        results += [by_nccl, gpus.asnumpy(later).tolist()]
        c.barrier()
        return results, len(gpus.log()) - before

    @algorithms.algorithm(num_chunks=1)
    def pair(rank, size):
        source, total = algorithms.input[0], algorithms.output[0]
        if rank == 0:
            yield algorithms.send(1, source)
            yield algorithms.recv(1, total)
        else:
            yield algorithms.recv_reduce(0, source, total)
            yield algorithms.send(0, total)

    found = check(on_gpus(local_group(2, timeout=20), work))
    assert found[0][0] == found[1][0] == [[1.0, 3.0, 5.0, 7.0]] * 5
    assert emulated.counts["combinations"] > 0


def test_algorithm_by_name_without_the_executor_uses_host_memory(gpus, on_gpus, caplog):
    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        return [gpus.asnumpy(c.all_reduce(x, algorithm=how)).tolist() for how in ("ring", "auto")]

    assert check(on_gpus(local_group(2, timeout=20), work)) == [[[2.0] * 4] * 2] * 2
    assert "algorithm 'ring' of GPU arrays copies them through host memory" in caplog.text
    assert "the device executor is not available" in caplog.text
