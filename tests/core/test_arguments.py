"""Wrong arguments of public functions raise clear errors, and no rank waits."""

from __future__ import annotations

import inspect
import pydoc
import re

import numpy as np
import pytest

import pycollective as pc
from pycollective import _core, algorithms
from pycollective.algorithms import copy, input, output
from pycollective.distribute import ReduceOp

STRANGE = [
    None, 1.5, "x", -1, 10**30, [1, 2], object(), np.add, b"y", {}, np.ones(3), (1,), np.float32,
    float("nan"), 2**31, [[0, 1]],
]  # fmt: skip
# Texts of Python, pybind11 and NumPy that do not name the argument.
RAW = re.compile(
    "incompatible (function|constructor) arguments|Invoked with|object cannot be interpreted|"
    "not supported between instances|has no attribute|too large to convert|has no len|"
    "is not iterable|expected str, bytes|not subscriptable|is not callable"
)


def error_of(call, *args, **given):
    try:
        call(*args, **given)
    except pc.CollectiveError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


CALLS = {
    "all_reduce": {"x": np.ones(4)},
    "reduce": {"x": np.ones(4)},
    "minloc": {"x": np.ones(4)},
    "maxloc": {"x": np.ones(4)},
    "reduce_scatter": {"x": np.ones(4)},
    "scan": {"x": np.ones(4)},
    "exscan": {"x": np.ones(4)},
    "all_reduce_many": {"arrays": [np.ones(2)]},
    "broadcast": {"x": np.ones(4)},
    "all_gather": {"x": np.ones(4)},
    "gather": {"x": np.ones(4)},
    "scatter": {"x": np.ones(4)},
    "all_to_all": {"x": np.ones(4)},
    "barrier": {},
    "broadcast_object": {"obj": 1},
    "gather_object": {"obj": 1},
    "all_gather_object": {"obj": 1},
    "send_object": {"obj": 1, "dest": 0},
    "recv_object": {"source": 0, "timeout": 0.01},
    "cart": {"dims": [1]},
    "split": {"color": 0},
    "empty": {"shape": 3},
    "send": {"x": np.ones(1), "dest": 0},
    "sendrecv": {"x": np.ones(1), "dest": 0, "out": None, "source": 0},
    "recv": {"source": 0, "shape": 1, "dtype": float, "timeout": 0.01},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_invalid_arguments_raise_clear_errors(name):
    raw = []
    for argument in inspect.signature(getattr(pc.Communicator, name)).parameters:
        if argument == "self" or (name.startswith("recv") and argument == "timeout"):
            continue
        for strange in STRANGE:
            (comm,) = pc.local_group(1, timeout=0.2)
            error = error_of(getattr(comm, name), **(CALLS[name] | {argument: strange}))
            raw += [(argument, strange, error)] if RAW.search(error) else []
            assert comm._group.failure or comm.all_reduce(np.ones(1))[0] == 1
    assert not raw


def _manager(*arguments):
    return pc.train.CheckpointManager(*arguments)


SURFACE = {
    "init environment": lambda x: pc.init(environment=x),
    "Work.wait": lambda x: pc.local_group(1)[0].barrier(async_op=True).wait(x),
    "manager's checkpoint": lambda x: _manager(x, "folder", 3),
    "manager's folder": lambda x: _manager(pc.train.Checkpoint(), x, 3),
    "manager's number": lambda x: _manager(pc.train.Checkpoint(), "folder", x),
    "restore": lambda x: pc.train.Checkpoint().restore(x),
    "run": lambda x: pc.distribute.get_strategy().run(x),
    "resolver": lambda x: x is None or pc.distribute.ParameterServerStrategy(x),
    "workers": lambda x: isinstance(x, int) or pc.distribute.ParameterServerStrategy(num_workers=x),
    "bytes_per_pack": lambda x: pc.distribute.experimental.CommunicationOptions(x),
    "timeout_seconds": lambda x: pc.distribute.experimental.CommunicationOptions(0, x),
    "axis": lambda x: pc.reduce_sum(pc.constant([1.0]), x),
    "concat": lambda x: pc.concat(x, 0),
    "concat's axis": lambda x: pc.concat([pc.constant([1.0])], x),
    "reshape": lambda x: pc.reshape(pc.constant([1.0]), x),
    "range": lambda x: x == 2**31 or pc.data.Dataset.range(x),
    "reduce": lambda x: pc.data.Dataset.range(3).reduce(0, x),
    "list_files": lambda x: pc.data.Dataset.list_files(x),
    "shuffle": lambda x: pc.data.Dataset.range(3).shuffle(3, x),
    "Sequential": lambda x: pc.keras.Sequential(x),
    "Dense": lambda x: isinstance(x, int) or pc.keras.layers.Dense(x),
    "Dropout": lambda x: pc.keras.layers.Dropout(x),
    "SGD": lambda x: pc.keras.optimizers.SGD(x),
    "Adam": lambda x: pc.keras.optimizers.Adam(beta_1=x),
}
RAW_OF_NUMBERS = re.compile(f"{RAW.pattern}|could not convert|invalid literal|argument must be a")


@pytest.mark.parametrize("name", SURFACE)
def test_public_functions_strange_arguments_raise_clear_errors(name):
    errors = [(strange, error_of(SURFACE[name], strange)) for strange in STRANGE]
    assert not [found for found in errors if RAW_OF_NUMBERS.search(found[1])]
    assert any(error for _, error in errors)


OVERLAPPING = {
    "stride 0": lambda n: np.lib.stride_tricks.as_strided(np.zeros(1), (n,), (0,)),
    "one axis of stride 0": lambda n: np.lib.stride_tricks.as_strided(
        np.zeros(n), (n // 2, 2), (8, 0)
    ),
    "windows": lambda n: np.lib.stride_tricks.as_strided(np.zeros(n), (n // 2, 2), (8, 8)),
    "half an item": lambda n: np.lib.stride_tricks.as_strided(np.zeros(n), (n,), (4,)),
}


@pytest.mark.parametrize("case", OVERLAPPING)
@pytest.mark.parametrize(
    "call", ["all_reduce", "reduce", "broadcast", "all_gather", "scan", "all_reduce_many"]
)
def test_out_whose_elements_share_memory_raises_value_error(case, call):
    (comm,) = pc.local_group(1)
    out = OVERLAPPING[case](4)
    x = np.ones(out.shape)
    with pytest.raises(ValueError, match="out has elements that share memory"):
        if call == "all_reduce_many":
            comm.all_reduce_many([x], out=[out])
        else:
            getattr(comm, call)(x, out=out)
    with pytest.raises(ValueError, match="out has elements that share memory"):
        comm.recv(out, 0, timeout=0.01)


def test_out_of_any_strides_without_overlap_is_written():
    (comm,) = pc.local_group(1)
    memory = np.zeros(60)
    views = [
        memory[::-1][:6], memory[:12].reshape(3, 4).T, memory[::7], memory[:0],
        memory[:24].reshape(2, 3, 4)[:, ::2, ::-1], memory[:1].reshape(1, 1)[:, ::1],
        np.lib.stride_tricks.as_strided(memory, (5, 3), (24, 40)),  # interleaved
    ]  # fmt: skip
    for view in views:
        memory[:] = 0
        assert comm.all_reduce(np.full(view.shape, 2.0), out=view) is view
        assert (view == 2).all() and memory.sum() == 2 * view.size


def test_all_reduce_many_takes_any_iterables():
    (comm,) = pc.local_group(1)
    outs = [np.zeros(2), np.zeros(3)]
    found = comm.all_reduce_many((np.ones(n) for n in (2, 3)), out=(o for o in outs))
    assert found[0] is outs[0] and found[1] is outs[1]
    assert [o.tolist() for o in outs] == [[1, 1], [1, 1, 1]]


def test_algorithms_invalid_arguments_raise_clear_errors():
    def yields(strange):
        def steps(rank, size):
            yield strange

        return steps

    def good(rank, size):
        yield copy(input[0], output[0])

    raw = []
    for strange in STRANGE:
        own = algorithms.algorithm(1)(good)
        for call, *args in [
            (algorithms.names, strange), (algorithms.schedule, strange, 2),
            (algorithms.schedule, "ring", 2, strange), (algorithms.hierarchical, strange),
            (algorithms.hierarchical, [strange]), (algorithms.verify, strange, 2),
            (algorithms.show, strange, 2), (algorithms.rounds, strange, 2),
            (algorithms.simulate, strange, 2), (algorithms.send, strange, input[0]),
            (algorithms.send, 0, strange), (algorithms.recv, strange, output[0]),
            (algorithms.recv, 0, strange), (algorithms.recv_reduce, 0, strange, output[0]),
            (copy, strange, output[0]), (algorithms.reduce, input[0], strange),
            (input.__getitem__, strange), (input.__getitem__, slice(strange, 2)),
            (algorithms.algorithm(1)(yields(strange)).verify, 2),
            (algorithms.algorithm(1)(lambda rank, size, s=strange: s).verify, 2),
            (algorithms.algorithm(strange)(good).verify, 1),
            (algorithms.algorithm(1, strange)(good).verify, 1),
            (algorithms.algorithm(1, collective=strange), good), (own.verify, strange),
            (own.show, strange), (pc.local_group, strange),
        ]:  # fmt: skip
            error = error_of(call, *args)
            raw += [(call, args, error)] if RAW.search(error) else []
        if not isinstance(strange, int):
            for call, *args in [
                (algorithms.schedule, "ring", strange), (algorithms.verify, "ring", strange),
                (algorithms.simulate, "ring", strange), (own.simulate, strange),
            ]:  # fmt: skip
                error = error_of(call, *args)
                raw += [(call, args, error)] if RAW.search(error) else []
    assert not raw


@pytest.mark.parametrize(
    ("op", "name"),
    [(np.add, "sum"), (np.multiply, "prod"), (np.minimum, "min"), (np.maximum, "max"),
     (np.sum, "sum"), (np.prod, "prod"), (np.mean, "mean"), (np.min, "min"), (np.max, "max"),
     (sum, "sum"), (min, "min"), (max, "max"), (ReduceOp.SUM, "sum"), (ReduceOp.MEAN, "mean"),
     (np.str_("max"), "max")],
)  # fmt: skip
def test_op_function_or_member_of_reduce_op_is_accepted(on_ranks, op, name):
    def work(comm):
        x = np.array([1.5, -2.0]) * (comm.rank + 1)
        assert comm.all_reduce(x, op).tolist() == comm.all_reduce(x, name).tolist()
        assert comm.reduce_scatter(x, op).tolist() == comm.reduce_scatter(x, name).tolist()
        (one,), (two,) = comm.all_reduce_many([x], op), comm.all_reduce_many([x], name)
        assert one.tolist() == two.tolist()
        got, want = comm.reduce(x, op), comm.reduce(x, name)
        assert got is want or got.tolist() == want.tolist()

    assert on_ranks(pc.local_group(2, timeout=20), work) == [None, None]


@pytest.mark.parametrize("op", [np.bitwise_and, np.bitwise_or, np.bitwise_xor])
def test_op_bitwise_and_logical_functions_are_accepted(op):
    (comm,) = pc.local_group(1)
    assert comm.all_reduce(np.array([6, 3]), op).tolist() == [6, 3]
    logical = {np.bitwise_and: np.logical_and}.get(op, np.logical_or)
    assert comm.all_reduce(np.array([True]), logical).tolist() == [True]
    with pytest.raises(TypeError, match="logical_.* makes bool of int64: convert x first"):
        comm.all_reduce(np.array([6, 3]), logical)


@pytest.mark.parametrize("op", [None, print, 3, len])
def test_op_unknown_error_lists_all_ops(op):
    (comm,) = pc.local_group(1)
    for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter):
        with pytest.raises(
            TypeError, match="op must be one of 'sum', 'prod', 'min', 'max', 'mean'"
        ):
            call(np.ones(3), op)
    assert comm.all_reduce(np.ones(3)).tolist() == [1, 1, 1]


def test_broadcast_without_x_and_out_raises_type_error(on_ranks):
    def work(comm):
        if comm.rank == 0:
            return comm.broadcast(np.arange(3.0))
        with pytest.raises(TypeError, match="needs x on the root. Other ranks give out="):
            comm.broadcast(None)
        return comm.broadcast(None, out=np.empty(3))

    for result in on_ranks(pc.local_group(2, timeout=20), work):
        assert result.tolist() == [0, 1, 2]
    (comm,) = pc.local_group(1)
    with pytest.raises(TypeError, match="broadcast needs x on the root"):
        comm.broadcast(None, out=np.empty(3))


@pytest.mark.parametrize("strange", [None, "x", [1], 0, -1.0, float("nan"), np.ones(2)])
def test_timeout_invalid_raises_where_it_is_set(on_ranks, strange):
    def work(comm):
        if comm.rank == 0:
            with pytest.raises((TypeError, ValueError), match="timeout must be a positive number"):
                comm.timeout = strange
        assert comm.timeout == 20
        comm.timeout = np.float32(30)
        return comm.all_reduce(np.ones(4)).tolist(), comm.timeout

    assert on_ranks(pc.local_group(2, timeout=20), work) == [([2.0] * 4, 30)] * 2


def public_functions():
    yield from ((f"pycollective.{n}", getattr(pc, n)) for n in ("init", "local_group", "timeline"))
    for owner in (pc.Communicator, pc.Work):
        for name, value in inspect.getmembers(owner, callable):
            if not name.startswith("_"):
                yield f"{owner.__name__}.{name}", value
    for name in algorithms.__all__:
        if inspect.isfunction(getattr(algorithms, name)):
            yield f"algorithms.{name}", getattr(algorithms, name)


@pytest.mark.parametrize(("name", "function"), list(public_functions()), ids=lambda x: str(x)[:40])
def test_help_shows_signature_and_documentation(name, function):
    text = pydoc.plain(pydoc.render_doc(function))
    documentation = inspect.getdoc(function)
    assert documentation
    assert documentation.splitlines()[-1].strip() in text
    assert f"{name.rpartition('.')[2]}(" in text
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    assert all(parameter in text for parameter in parameters)


def test_out_whose_array_is_a_copy_is_refused():
    class Copied:
        def __init__(self):
            self.values = np.zeros(3)

        def __array__(self, dtype=None, copy=None):
            return np.array(self.values)

    class Own(Copied):
        def __array__(self, dtype=None, copy=None):
            return self.values

    (comm,) = pc.local_group(1)
    with pytest.raises(TypeError, match="out must be an array, not Copied"):
        comm.all_reduce(np.ones(3), out=Copied())
    own = Own()
    comm.all_reduce(np.ones(3), out=own)
    assert own.values.tolist() == [1, 1, 1]


def test_recv_with_out_and_a_shape_or_dtype_raises():
    (comm,) = pc.local_group(1)
    for given in ({"shape": (99,)}, {"dtype": "i4"}):
        comm.send(np.ones(3), 0)
        with pytest.raises(TypeError, match="recv needs out, or shape and dtype"):
            comm.recv(np.zeros(3), 0, **given)
        comm.recv(np.zeros(3), 0)


def test_minloc_of_nothing_and_neighbours_of_bytes():
    (comm,) = pc.local_group(1)
    assert comm.minloc([], []).indices.shape == (0,)
    assert comm.cart([1], True).neighbor_all_to_all(b"ab").tolist() == [98, 97]


@pytest.mark.parametrize("name", ["leave", "close", "calls", "address", "title"])
@pytest.mark.parametrize("rank", [-5, 10**6])
def test_group_of_the_core_refuses_a_rank_that_it_does_not_have(name, rank):
    with pytest.raises(ValueError, match="is not among the 2 ranks"):
        getattr(_core.ThreadGroup(2), name)(rank)
    with pytest.raises(TypeError):
        _core.Communicator(None, 0)


def test_names_are_checked_also_without_arrays():
    (comm,) = pc.local_group(1)
    assert comm.all_reduce_many([]) == []
    with pytest.raises(ValueError, match="op='foo' is unknown; choose one of: sum, prod"):
        comm.all_reduce_many([], "foo")
    with pytest.raises(ValueError, match="algorithm='rong' is unknown; choose one of: auto, ring"):
        comm.all_reduce_many([], algorithm="rong")
