"""The process groups of `pycollective.torch`, whose ranks are threads here."""

import importlib.util
import json
import os
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")
import hangs  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pycollective.launch.description import LISTENER  # noqa: E402
from pycollective.torch import ProcessGroup, backend  # noqa: E402

pytestmark = pytest.mark.slow  # CI has PyTorch only for the slow tests

SIZE = 3


def in_ranks(work, size=SIZE, seconds=hangs.SECONDS):
    """Call ``work(group)`` in threads, one for each rank; return the results or the errors."""
    store, results = dist.HashStore(), [None] * size
    ready = threading.Barrier(size)

    def rank(number):
        try:
            group = ProcessGroup(store, number, size, timedelta(seconds=seconds))
            ready.wait(hangs.SECONDS)
            try:
                results[number] = work(group)
            finally:
                group.shutdown()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(hangs.SECONDS)
    return results


def checked(work, size=SIZE):
    """Call ``work(group)`` in threads; raise the first error."""
    results = in_ranks(work, size)
    errors = [result for result in results if isinstance(result, BaseException)]
    # An error that is no DistError is the cause: the other ranks then fail with a DistError.
    for error in sorted(errors, key=lambda error: isinstance(error, dist.DistError)):
        raise error
    return results


def options(kind, asynchronous, **values):
    result = getattr(dist, kind)()
    result.asyncOp = asynchronous
    for name, value in values.items():
        setattr(result, name, value)
    return result


DTYPES = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 uint16 uint32 uint64 bool complex64 "
    "complex128".split()
)
BYTES = ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_of_a_dtype_adds(dtype, asynchronous):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="sums of bfloat16 need ml_dtypes")
    kind = getattr(torch, dtype)

    def work(group):
        whole = torch.full((2, 6), group.rank() + 1.0).to(kind)
        for tensor in (whole[0], whole[:, ::2], whole[1, 1]):  # contiguous, not contiguous, 0-d
            group.allreduce([tensor], options("AllreduceOptions", asynchronous)).wait()
        return whole

    for whole in checked(work):
        one = torch.tensor(6.0).to(kind)
        assert whole[0, 1] == one
        assert whole[0, 0] == (torch.tensor(18.0).to(kind) if dtype != "bool" else one)
        assert whole[1, 2] == one


@pytest.mark.parametrize("dtype", [*DTYPES, *BYTES])
def test_moves_of_a_dtype_keep_the_bits(dtype):
    kind = getattr(torch, dtype)
    width = torch.empty(1, dtype=kind).element_size()
    bits = np.random.default_rng(0).integers(0, 2, (SIZE, SIZE, 2, width), np.uint8)

    def tensor(bits):
        return torch.from_numpy(bits.copy()).view(kind).reshape(bits.shape[:-1])

    def same(found, expected):
        return found.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()

    def work(group):
        rank, empty = group.rank(), lambda: torch.empty(2, dtype=kind)
        inputs = tensor(bits[rank])
        gathered = [empty() for _ in range(SIZE)]
        group.allgather([gathered], [inputs[0]]).wait()
        assert same(torch.stack(gathered), bits[:, 0])
        whole = torch.empty((2, SIZE), dtype=kind).t()  # not contiguous
        group.all_gather_single(whole, inputs[1]).wait()
        assert same(whole, bits[:, 1])
        sent = inputs[2].clone()
        group.broadcast([sent], options("BroadcastOptions", True, rootRank=2)).wait()
        assert same(sent, bits[2, 2])
        parts = [empty() for _ in range(SIZE)]
        group.alltoall(parts, list(inputs)).wait()
        assert same(torch.stack(parts), bits[:, rank])
        group.send([inputs[0].clone()], (rank + 1) % SIZE, 7)
        got = empty()
        group.recv([got], (rank - 1) % SIZE, 7).wait()
        assert same(got, bits[(rank - 1) % SIZE, 0])

    checked(work)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_collective_has_the_expected_result(asynchronous):
    def work(group):
        rank, ones = group.rank(), torch.ones(2)
        mean = torch.tensor([rank, rank + 3.0])
        group.allreduce(
            [mean], options("AllreduceOptions", asynchronous, reduceOp=dist.ReduceOp.AVG)
        ).wait()
        assert mean.tolist() == [1, 4]
        scaled = dist._make_nccl_premul_sum(2.0)
        total = ones * rank
        group.allreduce([total], options("AllreduceOptions", asynchronous, reduceOp=scaled)).wait()
        assert total.tolist() == [6, 6]
        several = [ones * rank, torch.arange(3.0), torch.tensor(rank)]
        group.allreduce_coalesced(
            several, options("AllreduceCoalescedOptions", asynchronous)
        ).wait()
        assert [t.tolist() for t in several] == [[3, 3], [0, 3, 6], 3]
        to_root = ones * rank
        group.reduce([to_root], options("ReduceOptions", asynchronous, rootRank=1)).wait()
        assert to_root.tolist() == ([3, 3] if rank == 1 else [rank, rank])
        parts = [torch.empty(2) for _ in range(SIZE)] if rank == 2 else []
        how = options("GatherOptions", asynchronous, rootRank=2)
        group.gather([parts] if rank == 2 else [], [ones * rank], how).wait()
        assert [p.tolist() for p in parts] == [[r, r] for r in range(SIZE)] * (rank == 2)
        how = options("GatherOptions", asynchronous, rootRank=1)
        whole = torch.empty(SIZE, 2) if rank == 1 else torch.empty(0)
        group.gather_single(whole, ones * rank, how).wait()
        assert whole.tolist() == [[r, r] for r in range(SIZE)] * (rank == 1)
        given = [[ones * r for r in range(SIZE)]] if rank == 0 else []
        part = torch.empty(2)
        group.scatter([part], given, options("ScatterOptions", asynchronous, rootRank=0)).wait()
        assert part.tolist() == [rank, rank]
        how = options("ReduceScatterOptions", asynchronous)
        group.reduce_scatter([part], [[ones * r for r in range(SIZE)]], how).wait()
        assert part.tolist() == [3 * rank] * 2
        uneven = torch.empty(rank + 1)
        group.reduce_scatter([uneven], [[torch.ones(r + 1) for r in range(SIZE)]], how).wait()
        assert uneven.tolist() == [3] * (rank + 1)
        group.reduce_scatter_single(part, torch.arange(6.0), how).wait()
        assert part.tolist() == [6 * rank, 6 * rank + 3]
        wide = [torch.empty(r + 1) for r in range(SIZE)]
        group.allgather([wide], [torch.full((rank + 1,), float(rank))]).wait()
        assert [t.tolist() for t in wide] == [[r] * (r + 1) for r in range(SIZE)]
        rows = torch.full((6, 2), float(rank))
        received = torch.empty(SIZE * (rank + 1), 2)
        group.all_to_all_single(received, rows, [rank + 1] * SIZE, [1, 2, 3]).wait()
        assert received[:, 0].tolist() == [r for r in range(SIZE) for _ in range(rank + 1)]
        group.barrier(options("BarrierOptions", asynchronous)).wait()

    checked(work)


def test_allreduce_of_sparse_tensors_adds_equal_indices():
    def work(group):
        indices, values = [[group.rank(), 4]], [1.0, 2.0]
        tensor = torch.sparse_coo_tensor(indices, values, (6,), check_invariants=True)
        group.allreduce([tensor]).wait()
        return tensor.to_dense().tolist()

    assert checked(work) == [[1, 1, 1, 0, 6, 0]] * SIZE


def test_allreduce_of_sparse_tensors_of_different_shapes_raises():
    def work(group):
        n = 10 + group.rank()
        tensor = torch.sparse_coo_tensor([[n - 1]], [2.0], (n,), check_invariants=True)
        with pytest.raises(ValueError, match="different shapes: .*10.*11"):
            group.allreduce([tensor])
        assert tensor.to_dense().sum() == 2

    checked(work)


def test_tensors_may_be_resized_after_calls():
    def work(group):
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        half = torch.ones(2, dtype=torch.bfloat16)
        group.broadcast([half], options("BroadcastOptions", True)).wait()
        assert tensor.resize_(5)[:2].tolist() == [SIZE] * 2
        assert half.resize_(5).untyped_storage().resizable()

    checked(work)


@pytest.mark.parametrize("call", ["allgather", "gather", "scatter", "reduce_scatter"])
def test_parts_of_other_shapes_raise_errors_with_both_shapes(call):
    def work(group):
        parts, tensor = [[torch.ones(3, 2)] * 2], [torch.ones(2, 3)]
        kind = {"gather": "GatherOptions", "scatter": "ScatterOptions"}.get(call)
        how = [options(kind, True, rootRank=group.rank())] if kind else []
        given = (parts, tensor) if call in ("allgather", "gather") else (tensor, parts)
        with pytest.raises(ValueError, match=r"number 0 .*\[3, 2\].*\[2, 3\]"):
            getattr(group, call)(*given, *how)

    checked(work, 2)


def test_recv_from_any_source_names_the_source_and_leaves_other_messages():
    def work(group):
        if group.rank():
            for value, tag in ((1, 5), (2, 6), (3, 5)):
                group.send([torch.tensor([10.0 * group.rank() + value])], 0, tag).wait()
            return None
        got, found = torch.empty(1), {1: [], 2: []}
        for _ in range(2):
            call = group.recv_anysource([got], 5)
            call.wait()
            found[call._source_rank()].append(got.item())
        for source in (1, 2):
            group.recv([got], source, 6).wait()
            found[source].append(got.item())
        for _ in range(2):
            call = group.recv_anysource([got], 5)
            call.wait()
            found[call._source_rank()].append(got.item())
        return {source: sorted(values) for source, values in found.items()}

    assert checked(work)[0] == {1: [11, 12, 13], 2: [21, 22, 23]}


def test_large_message_from_any_rank_arrives_during_a_collective():
    """The sender waits for the receive, and the receiver for the sender's collective."""

    def work(group):
        large = torch.full((1 << 22,), float(group.rank()))
        if group.rank():
            group.send([large], 0, 5).wait()
        else:
            call = group.recv_anysource([large], 5)
        group.barrier().wait()
        if group.rank() == 0:
            call.wait()
            assert call._source_rank() == 1
        return large[-1].item()

    assert checked(work, 2) == [1, 1]


def test_receives_from_any_rank_get_the_messages_in_the_order_of_the_calls():
    def work(group):
        tensors = [torch.empty(1) for _ in range(8)]
        if group.rank():
            group.barrier().wait()
            for number, tensor in enumerate(tensors):
                group.send([tensor.fill_(number)], 0).wait()
        else:
            calls = [group.recv_anysource([tensor]) for tensor in tensors[:4]]
            group.barrier().wait()
            calls += [group.recv_anysource([tensor]) for tensor in tensors[4:]]
            for call in reversed(calls):
                call.wait()
        return [int(tensor.item()) for tensor in tensors]

    assert checked(work, 2) == [list(range(8))] * 2


def test_receive_ends_before_the_message_of_a_later_receive_from_the_same_rank_is_sent():
    """A receive from any rank has read the notices of the first two messages."""

    def work(group):
        first, second, third = (torch.zeros(1) for _ in range(3))
        if group.rank():
            group.send([torch.ones(1)], 0, 1).wait()
            group.send([torch.ones(1)], 0, 9).wait()
            group.recv([third], 0, 3).wait()
            group.send([torch.ones(1)], 0, 2).wait()
            return [third.item()]
        calls = [group.recv([first], 1, 1), group.recv([second], 1, 2)]
        group.recv_anysource([third], 9).wait()
        assert not calls[1].is_completed()
        calls[0].wait()
        group.send([torch.ones(1)], 1, 3).wait()
        calls[1].wait()
        return [first.item(), second.item(), third.item()]

    assert checked(work, 2) == [[1, 1, 1], [1]]


def test_tags_are_those_of_the_program():
    def work(group):
        other, got = 1 - group.rank(), torch.zeros(1)
        with pytest.raises(ValueError, match="from 0 to 2147483646, not 2147483647"):
            group.send([got], other, 2**31 - 1)
        with pytest.raises(ValueError, match="tag must be a number from 0"):
            group.recv([got], other, -1)
        sent = group.send([torch.ones(1)], other, 2**31 - 2)
        group.recv([got], other, 2**31 - 2).wait()
        sent.wait()
        return got.item()

    assert checked(work, 2) == [1, 1]


@pytest.mark.parametrize("how", ["later call", "shutdown"])
def test_calls_that_nobody_waits_for_write_their_tensors(how):
    """Lists of tensors are written after the call itself."""
    kept = {}

    def work(group):
        rank, parts, received = group.rank(), *([torch.zeros(2) for _ in range(2)] for _ in "ab")
        kept[rank] = parts, received
        group.allgather([parts], [torch.ones(2)], options("AllreduceOptions", True))
        group.alltoall(received, [torch.ones(2)] * 2, options("AllToAllOptions", True))
        if how == "later call":
            group.allreduce([torch.ones(2)], options("AllreduceOptions", False)).wait()
            return [part[0].item() for part in (*parts, *received)]
        return None

    expected = [[1.0] * 4] * 2 if how == "later call" else [None] * 2
    assert checked(work, 2) == expected
    for parts, received in kept.values():
        assert all(part.tolist() == [1, 1] for part in (*parts, *received))


def test_all_to_all_of_parts_works_if_only_some_ranks_give_sizes():
    def work(group):
        rank = group.rank()
        rows, received = torch.full((2, 3), float(rank)), torch.empty(2, 3)
        sizes = [1, 1] if rank else []
        group.all_to_all_single(received, rows, sizes, sizes).wait()
        return received[:, 0].tolist()

    assert checked(work, 2) == [[0, 1]] * 2


def test_rank_without_messages_does_not_fail_the_group_after_a_receive_from_any_rank():
    def work(group):
        if group.rank() == 2:
            group.send([torch.ones(1)], 0).wait()
        group.barrier().wait()
        if group.rank() == 0:
            group.set_timeout(timedelta(seconds=1))
            group.recv_anysource([torch.empty(1)]).wait()
            time.sleep(1.5)  # longer than the timeout
            group.set_timeout(timedelta(seconds=hangs.SECONDS))
        total = torch.ones(1)
        group.allreduce([total]).wait()
        return total.item()

    assert checked(work) == [SIZE] * SIZE


def test_receive_from_any_rank_ends_when_all_other_ranks_have_left():
    def work(group):
        if group.rank() == 0:
            group.recv_anysource([torch.empty(1)]).wait()

    error = in_ranks(work)[0]
    assert isinstance(error, dist.DistNetworkError) and "all others have left" in str(error), error


def test_future_of_a_message_does_not_delay_the_future_of_a_later_collective():
    def work(group):
        other, got, total = 1 - group.rank(), torch.empty(1), torch.ones(1)
        receive = group.recv([got], other)
        message = receive.get_future()
        group.allreduce([total]).get_future().wait()
        group.send([total], other).wait()
        message.wait()
        assert receive.is_completed()
        return got.item()

    assert checked(work, 2) == [2, 2]


@pytest.mark.parametrize("missing", [0, 1])
def test_group_with_a_missing_rank_raises_dist_network_error_that_names_it(missing):
    with pytest.raises(dist.DistNetworkError, match=f"rank {missing}"):
        ProcessGroup(dist.HashStore(), 1 - missing, 2, timedelta(seconds=0.5))


def test_rank_with_another_secret_cannot_join():
    store, errors = dist.HashStore(), [None, None]

    class WithAnotherSecret:
        wait = store.wait

        def get(self, key):
            address, secret = json.loads(store.get(key))
            return json.dumps([address, secret[::-1]])

    def rank(number):
        try:
            store_of_rank = store if number == 0 else WithAnotherSecret()
            ProcessGroup(store_of_rank, number, 2, timedelta(seconds=3))
        except dist.DistNetworkError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(hangs.SECONDS)
    assert "secret" in errors[1], errors


def test_ranks_wait_for_each_other_as_long_as_the_timeout_of_the_group(monkeypatch):
    class CalledError(Exception):
        pass

    def rendezvous(*_, timeout, join_timeout, environment):
        os.close(int(environment[LISTENER]))
        assert (timeout, join_timeout) == (3600, 3600)
        raise CalledError

    monkeypatch.setattr(sys.modules["pycollective.torch.join"], "rendezvous", rendezvous)
    with pytest.raises(CalledError):
        ProcessGroup(dist.HashStore(), 0, 2, timedelta(hours=1))


def test_future_has_the_tensors_and_runs_callbacks():
    def work(group):
        tensor = torch.ones(3)
        call = group.allreduce([tensor])
        future = call.get_future().then(lambda done: done.value()[0] / SIZE)
        assert future.wait().tolist() == [1, 1, 1]
        assert call.is_completed() and call.wait() and call.exception() is None
        assert call.result()[0] is tensor
        second = group.allreduce([tensor], options("AllreduceOptions", False))
        assert second.get_future().wait()[0].tolist() == [9.0] * 3

    checked(work)


def test_callback_of_a_future_may_wait_for_another_call():
    def work(group):
        def again(done):
            return group.allreduce(done.value()).get_future().wait()[0]

        return group.allreduce([torch.ones(1)]).get_future().then(again).wait().item()

    assert checked(work) == [9.0] * SIZE


def test_completed_call_has_written_its_tensors():
    """The results of lists and of tensors that are not contiguous are copied to them at the end."""
    late = threading.Event()

    def work(group):
        rank = group.rank()
        source = torch.full((2,), rank + 1.0)
        parts = [torch.zeros(2) for _ in range(SIZE)]
        whole = torch.zeros((2, SIZE)).t()
        if rank == 1:
            assert late.wait(hangs.SECONDS)
        calls = [group.allgather([parts], [source]), group.all_gather_single(whole, source)]
        if rank == 0:
            assert not any(call.is_completed() for call in calls)
            late.set()
        for call in calls:
            while not call.is_completed():
                time.sleep(0.001)
        assert torch.stack(parts).tolist() == whole.tolist() == [[1, 1], [2, 2], [3, 3]]
        assert all(call.is_success() and call.wait() for call in calls)

    checked(work)


@pytest.mark.parametrize("with_future", [False, True])
def test_wait_with_a_timeout_raises_and_the_call_continues(with_future):
    late = threading.Event()

    def work(group):
        if group.rank():
            assert late.wait(hangs.SECONDS)
        tensor = torch.ones(2)
        call = group.allreduce([tensor])
        if not group.rank():
            if with_future:
                call.get_future()
            with pytest.raises(dist.DistBackendError, match="still runs"):
                call.wait(timedelta(milliseconds=20))
            late.set()
        call.wait()
        assert tensor.tolist() == [SIZE, SIZE]

    checked(work)


@pytest.mark.parametrize("how", ["of the call", "of the group"])
def test_collective_without_a_rank_raises_after_its_timeout(how):
    ended = threading.Event()

    def work(group):
        if group.rank():
            ended.wait(hangs.SECONDS)
            return
        try:
            timeout = {} if how == "of the group" else {"timeout": timedelta(seconds=0.2)}
            if not timeout:
                group.set_timeout(timedelta(seconds=0.2))
            group.allreduce([torch.ones(2)], options("AllreduceOptions", True, **timeout)).wait()
        finally:
            ended.set()

    error = in_ranks(work, 2)[0]
    assert isinstance(error, dist.DistBackendError) and "rank 1" in str(error)


def test_receive_from_any_rank_without_a_message_raises_after_the_timeout():
    ended = threading.Event()

    def work(group):
        if group.rank():
            assert ended.wait(hangs.SECONDS)
            return
        try:
            group.set_timeout(timedelta(seconds=0.2))
            with pytest.raises(dist.DistBackendError, match="no rank has sent a message"):
                group.recv_anysource([torch.ones(1)], 5).wait()
            call = group.recv_anysource([torch.ones(1)], 5)
            with pytest.raises(RuntimeError, match="no rank has sent a message"):
                call.get_future().wait()
            assert isinstance(call.exception(), dist.DistBackendError)
        finally:
            group.set_timeout(timedelta(seconds=hangs.SECONDS))
            ended.set()

    checked(work, 2)


def test_aborted_group_fails_on_all_ranks():
    def work(group):
        if group.rank():
            group.abort()
        group.allreduce([torch.ones(2)]).wait()

    for error in in_ranks(work, 2):
        assert isinstance(error, dist.DistBackendError) and "rank 1 called abort()" in str(error)


def test_every_op_has_the_expected_result():
    ops = {"SUM": 6, "PRODUCT": 6, "MIN": 1, "MAX": 3, "BAND": 0, "BOR": 3, "BXOR": 0}

    def work(group):
        for name, expected in ops.items():
            tensor = torch.full((2,), group.rank() + 1)
            op = getattr(dist.ReduceOp, name)
            group.allreduce([tensor], options("AllreduceOptions", True, reduceOp=op)).wait()
            assert tensor.tolist() == [expected] * 2, name
        for op, expected in [
            (dist.ReduceOp.AVG, 2),
            (dist._make_nccl_premul_sum(2.0), 12),
            (dist._make_nccl_premul_sum(torch.tensor(2.0)), 12),
        ]:
            values, part = torch.full((SIZE,), group.rank() + 1.0), torch.empty(1)
            how = options("ReduceScatterOptions", True, reduceOp=op)
            group.reduce_scatter_single(part, values, how).wait()
            assert part.item() == expected
            group.reduce([values], options("ReduceOptions", True, reduceOp=op, rootRank=0)).wait()
            assert group.rank() or values.tolist() == [expected] * SIZE

    checked(work)


def test_coalesced_gathers_and_scatters_have_the_expected_results():
    def work(group):
        rank = group.rank()
        inputs = [torch.full((2,), float(rank)), torch.tensor([rank])]
        outputs = [torch.empty(2 * SIZE), torch.empty(SIZE, dtype=torch.int64)]
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        assert [t.tolist() for t in outputs] == [[0, 0, 1, 1, 2, 2], [0, 1, 2]]
        parts = [torch.empty(2), torch.empty(1, dtype=torch.int64)]
        group.reduce_scatter_tensor_coalesced(parts, outputs).wait()
        assert [t.tolist() for t in parts] == [[3 * rank] * 2, [3 * rank]]

    checked(work)


def test_tensors_that_are_not_contiguous_can_be_moved_by_every_call():
    def strided(*values):
        return torch.tensor([values, values], dtype=torch.float32).t().contiguous()[:, 0]

    def work(group):
        rank, right, left = group.rank(), (group.rank() + 1) % SIZE, (group.rank() - 1) % SIZE
        source = strided(rank, rank + 10)
        assert not source.is_contiguous()
        sent = strided(rank, rank)
        group.broadcast([sent], options("BroadcastOptions", True, rootRank=1)).wait()
        assert sent.tolist() == [1, 1]
        call, got = group.send([source], right), strided(-1, -1)
        group.recv([got], left).wait()
        call.wait()
        assert got.tolist() == [left, left + 10]
        parts = [strided(-1, -1) for _ in range(SIZE)]
        how = options("GatherOptions", True, rootRank=0)
        group.gather([parts] if rank == 0 else [], [source], how).wait()
        assert rank or torch.stack(parts).tolist() == [[0, 10], [1, 11], [2, 12]]
        how = options("ScatterOptions", True, rootRank=0)
        group.scatter([got], [parts] if rank == 0 else [], how).wait()
        assert got.tolist() == [rank, rank + 10]
        group.reduce_scatter([got], [[source] * SIZE]).wait()
        assert got.tolist() == [3, 33]
        group.alltoall(parts, [source] * SIZE).wait()
        assert torch.stack(parts).tolist() == [[0, 10], [1, 11], [2, 12]]

    checked(work)


@pytest.mark.parametrize("last", ["wait", "completed", "barrier", "future"])
def test_wait_for_a_call_is_enough_for_all_calls_before_it(last):
    """The program does not wait for the others, whose results are copied to their tensors."""

    def work(group):
        rank = group.rank()

        def across(value):
            return torch.full((2, 4), float(value)).t()

        reduced, copied, totals = across(rank + 1), across(rank), across(rank)
        parts = [torch.zeros(2) for _ in range(SIZE)]
        group.allreduce([reduced])
        group.broadcast([copied], options("BroadcastOptions", True, rootRank=1))
        group.reduce([totals], options("ReduceOptions", True, rootRank=0))
        group.allgather([parts], [torch.full((2,), float(rank))])
        several = [across(1), across(2)]
        group.allreduce_coalesced(several)
        later = group.allreduce([torch.ones(2)])
        if last == "wait":
            later.wait()
        elif last == "future":
            later.get_future().wait()
        elif last == "barrier":
            group.barrier(options("BarrierOptions", False))
        while last == "completed" and not later.is_completed():
            time.sleep(0.001)
        assert torch.equal(reduced, across(6)) and torch.equal(copied, across(1))
        assert torch.equal(totals, across(0 if rank else 3) + (rank if rank else 0))
        assert torch.stack(parts).tolist() == [[0, 0], [1, 1], [2, 2]]
        assert torch.equal(several[0], across(3)) and torch.equal(several[1], across(6))

    checked(work)


def test_shutdown_writes_the_results_of_calls_for_which_nobody_waits():
    found = [torch.full((2, 4), 1.0).t() for _ in range(SIZE)]
    checked(lambda group: group.allreduce([found[group.rank()]]) and None)
    assert all(torch.equal(tensor, torch.full((4, 2), 3.0)) for tensor in found)


def test_tensors_of_equal_lengths_may_have_other_shapes_on_other_ranks():
    """As with gloo."""

    def work(group):
        rank = group.rank()
        shape = (2, 3) if rank == 0 else (6,)
        x = torch.ones(shape)
        group.allreduce([x]).wait()
        assert torch.equal(x, torch.full(shape, 3.0))
        group.allreduce_coalesced([x]).wait()
        group.reduce([x], options("ReduceOptions", True, rootRank=1)).wait()
        assert torch.equal(x, torch.full(shape, 27.0 if rank == 1 else 9.0))
        group.broadcast([x], options("BroadcastOptions", True, rootRank=1)).wait()
        assert torch.equal(x, torch.full(shape, 27.0))
        if rank == 0:
            group.send([torch.arange(6.0).reshape(2, 3)], 1).wait()
        elif rank == 1:
            group.recv([x], 0).wait()
            assert torch.equal(x, torch.arange(6.0))

    checked(work)


def test_coalesced_calls_end_with_one_work():
    def work(group):
        tensors = [torch.ones(2), torch.ones(3)]
        group._start_coalescing(torch.device("cpu"))
        for tensor in tensors:
            group.allreduce([tensor])
        group._end_coalescing(torch.device("cpu")).wait()
        return [t.tolist() for t in tensors]

    assert checked(work) == [[[3, 3], [3, 3, 3]]] * SIZE


@pytest.mark.parametrize("asynchronous", [False, True])
def test_different_calls_raise_dist_backend_error_with_both_calls(asynchronous):
    def work(group):
        tensor = torch.ones(2 + group.rank())
        group.allreduce([tensor], options("AllreduceOptions", asynchronous)).wait()

    for error in in_ranks(work, 2):
        assert isinstance(error, dist.DistBackendError), error
        assert "float32[2]" in str(error) and "float32[3]" in str(error)


def test_future_of_a_failed_call_raises():
    def work(group):
        group.allreduce([torch.ones(2 + group.rank())]).get_future().wait()

    for error in in_ranks(work, 2):
        assert isinstance(error, RuntimeError) and "float32[2]" in str(error), error


def test_monitored_barrier_without_a_rank_raises_after_the_timeout():
    ended = threading.Event()

    def work(group):
        if group.rank():
            ended.wait(hangs.SECONDS)
            return
        try:
            group.monitored_barrier(timedelta(seconds=0.2))
        finally:
            ended.set()

    error = in_ranks(work, 2)[0]
    assert isinstance(error, dist.DistBackendError) and "rank 1" in str(error)


def test_tensors_of_other_kinds_raise_errors_with_a_remedy():
    def work(group):
        with pytest.raises(TypeError, match="cast to torch.bfloat16"):
            group.allreduce([torch.ones(2).to(torch.float8_e5m2)])
        with pytest.raises(TypeError, match="resolve_neg"):
            group.allreduce([torch.tensor([1 + 2j]).conj().imag])
        with pytest.raises(TypeError, match="resolve_conj"):
            group.allreduce([torch.tensor([1 + 2j]).conj()])
        with pytest.raises(TypeError, match="to_dense"):
            group.broadcast([torch.ones(2).to_sparse()], options("BroadcastOptions", True))

    checked(work, 2)


def test_parts_of_several_dtypes_or_sizes_raise_errors_with_a_remedy():
    def work(group):
        ones, halves = torch.ones(2), torch.ones(2).half()
        calls = [
            lambda: group.allgather([[ones, halves]], [ones]),
            lambda: group.allgather([[ones, ones]], [halves]),
            lambda: group.all_gather_single(torch.ones(4), halves),
            lambda: group.gather(
                [[ones, halves]], [ones], options("GatherOptions", True, rootRank=group.rank())
            ),
            lambda: group.gather_single(
                ones, halves, options("GatherOptions", True, rootRank=group.rank())
            ),
            lambda: group.scatter(
                [halves], [[ones, ones]], options("ScatterOptions", True, rootRank=group.rank())
            ),
            lambda: group.reduce_scatter([halves], [[ones, ones]]),
            lambda: group.reduce_scatter_single(torch.ones(1).half(), ones),
            lambda: group.alltoall([ones, ones], [ones, halves]),
            lambda: group.alltoall([ones, ones], [halves, halves]),
            lambda: group.all_to_all_single(halves, ones, [], []),
        ]
        for call in calls:
            with pytest.raises(TypeError, match="dtypes.*cast them to one"):
                call()
        with pytest.raises(ValueError, match="has 1 tensors"):
            group.allgather([[ones]], [ones])
        with pytest.raises(ValueError, match="split sizes"):
            group.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], [1, 1])

    checked(work, 2)


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_tensor_of_another_device_raises_an_error_that_names_a_backend_for_it(device):
    """A fake tensor has the device "cuda" without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        other = torch.empty(2, device=device)

    def work(group):
        how = options("BroadcastOptions", True)
        calls = [
            lambda: group.allreduce([other]),
            lambda: group.broadcast([other], how),
            lambda: group.allgather([[torch.ones(2)] * 2], [other]),
            lambda: group.send([other], 1 - group.rank()),
            lambda: group.recv([other], 1 - group.rank()),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=f"not on {device}.*cpu:pycollective,cuda:nccl"):
                call()

    checked(work, 2)


class BackendStandIn:
    """A stand-in for PyTorch's `Backend`: Python can make no `Backend` before PyTorch 2.14."""

    Options = backend.Backend.Options

    def __init__(self, rank, size):
        self._place = rank, size

    def rank(self):
        return self._place[0]

    def size(self):
        return self._place[1]


class GroupStandIn:
    """A stand-in for PyTorch's `ProcessGroup`: it calls a `Backend` and returns the same `Work`."""

    BackendType = dist.ProcessGroup.BackendType

    def __init__(self, store, rank, size):
        self._backend = None

    def _register_backend(self, device, kind, registered):
        self._backend = registered

    def recv_anysource(self, tensors, tag):
        return self._backend.recv_anysource(tensors, tag)


def class_for_newer_versions(monkeypatch):
    """Return the class of process groups for a newer PyTorch, a subclass of `Backend`.

    PyTorch 2.14 and 2.15 use this class, and lose the rank that sent a message. The loss does not
    matter here, because the tests call the backend itself. The stand-ins are for 2.13.
    """

    class Subclass(backend.Backend):
        pass

    try:
        Subclass(0, 1)
    except TypeError:
        monkeypatch.setattr(torch._C._distributed_c10d, "Backend", BackendStandIn)
    monkeypatch.setattr(dist, "ProcessGroup", GroupStandIn)
    spec = importlib.util.spec_from_file_location("backend_of_newer_versions", backend.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ProcessGroup.__bases__ == (torch._C._distributed_c10d.Backend,)
    return module.ProcessGroup


@pytest.mark.parametrize(
    "test",
    [
        test_recv_from_any_source_names_the_source_and_leaves_other_messages,
        test_future_has_the_tensors_and_runs_callbacks,
        test_coalesced_gathers_and_scatters_have_the_expected_results,
        test_coalesced_calls_end_with_one_work,
        test_allreduce_of_sparse_tensors_adds_equal_indices,
        test_aborted_group_fails_on_all_ranks,
        test_monitored_barrier_without_a_rank_raises_after_the_timeout,
        lambda: test_every_collective_has_the_expected_result(asynchronous=True),
        lambda: test_different_calls_raise_dist_backend_error_with_both_calls(asynchronous=True),
    ],
)
def test_subclass_of_backend_passes_the_tests_of_process_groups(test, monkeypatch):
    subclass = class_for_newer_versions(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "ProcessGroup", subclass)
    test()


def test_subclass_of_backend_accepts_the_arguments_of_pytorchs_cpp_code(monkeypatch):
    """The C++ code passes other arguments than Python code does."""
    monkeypatch.setattr(
        sys.modules[__name__], "ProcessGroup", class_for_newer_versions(monkeypatch)
    )

    def work(group):
        assert group.supports_splitting and group.options.backend == "pycollective"
        assert group.supports_tensor_alloc(-1) and not group.supports_tensor_alloc("cuda")
        how = dist.BarrierOptions()
        how.timeout = timedelta(seconds=hangs.SECONDS)
        group.monitored_barrier(how, True)
        with pytest.raises(ValueError, match="not one of the new group's ranks"):
            group.split(dist.HashStore(), [1 - group.rank()], group.options)
        alone = group.split(dist.HashStore(), [group.rank()], group.options)
        assert (alone.rank(), alone.size()) == (0, 1)
        alone.shutdown()

    checked(work, 2)
