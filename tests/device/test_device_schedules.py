"""Every algorithm on emulated devices, in many orders of execution."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import World, layouts

from pycollective import algorithms, dtypes, local_group
from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send

SIZES = range(1, 9)


def data(size, count, dtype=np.int32, seed=1):
    """Return one array for each rank, whose sums are exact."""
    drawn = np.random.default_rng(seed).integers(0, 9, (size, count))
    return [row.astype(dtype) for row in drawn]


def cases(size):
    for number, (name, (devices, cliques)) in enumerate(layouts(size).items()):
        shared = (number + size) % 3 == 0  # a stream for all ranks of a device
        yield name, World(devices, cliques, 7 * size + number, shared)


def expect(found, wanted, what):
    for rank, (result, want) in enumerate(zip(found, wanted, strict=True)):
        if want is not None:
            np.testing.assert_array_equal(result, want, err_msg=f"{what}, rank {rank}")


@pytest.mark.parametrize("how", ["auto", *algorithms.names("all_reduce")])
def test_all_reduce_in_any_order_of_execution_is_right(how):
    for size in SIZES:
        for name, world in cases(size):
            for count, in_place in ((150, False), (100, True)):
                x = data(size, count)
                found = world.run("all_reduce", x, x, how, in_place=in_place, count=count, op="sum")
                expect(found, [sum(x)] * size, f"{how} of {size}, {name}, {in_place=}")


@pytest.mark.parametrize("how", ["ring", "hierarchical_copy"])
def test_bits_on_devices_are_those_of_the_host(how):
    size, count = 3, 4_000_001  # more than a block
    drawn = np.random.default_rng(5).standard_normal((size, count))
    x = [row.astype(np.float32) for row in drawn]
    world = World(list(range(size)), [0] * size)
    found = world.run("all_reduce", x, x, how, count=count, op="sum")
    host = [row.copy() for row in x]
    comms = local_group(size)
    works = [
        comm.all_reduce(row, out=row, algorithm=how, async_op=True)
        for comm, row in zip(comms, host, strict=True)
    ]
    for work in works:
        work.wait()
    expect(found, host, how)


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
def test_rooted_collectives_on_devices_are_right(collective):
    for how in ["auto", *algorithms.names(collective)]:
        for size in SIZES:
            for name, world in cases(size):
                root = size // 2
                x = data(size, 150)
                op = "sum" if collective == "reduce" else None
                want = [sum(x) if op else x[root]] * size
                outputs = [y if collective == "broadcast" or r == root else None
                           for r, y in enumerate(x)]  # fmt: skip
                found = world.run(collective, x, outputs, how, count=150, op=op, root=root)
                want = [w if o is not None else None for w, o in zip(want, outputs, strict=True)]
                expect(found, want, f"{collective} {how} of {size}, {name}")


@pytest.mark.parametrize(
    "collective", ["reduce_scatter", "all_gather", "scatter", "gather", "all_to_all"]
)
def test_collectives_of_parts_are_right(collective):
    count = 5
    for how in ["auto", *algorithms.names(collective)]:
        for size in SIZES:
            root = size // 2 if collective in ("scatter", "gather") else 0
            for name, world in cases(size):
                whole = [x.reshape(size, count) for x in data(size, size * count)]
                part = [x[0] for x in whole]
                joined = np.stack(part)
                inputs, outputs, want, op = {
                    "reduce_scatter": (whole, part, list(sum(whole)), "sum"),
                    "all_gather": (part, whole, [joined] * size, None),
                    "scatter": (
                        [w if r == root else None for r, w in enumerate(whole)],
                        part,
                        list(whole[root]),
                        None,
                    ),
                    "gather": (
                        part,
                        [w if r == root else None for r, w in enumerate(whole)],
                        [joined if r == root else None for r in range(size)],
                        None,
                    ),
                    "all_to_all": (
                        whole,
                        whole,
                        [np.stack([w[r] for w in whole]) for r in range(size)],
                        None,
                    ),
                }[collective]
                found = world.run(collective, inputs, outputs, how, count=count, op=op, root=root)
                expect(found, want, f"{collective} {how} of {size}, {name}")


@pytest.mark.parametrize("how", algorithms.names("all_gather"))
def test_collectives_of_ragged_parts_are_right(how):
    for size in (1, 3, 4, 6):
        counts = [(3 * r) % 5 for r in range(size)]
        parts = [np.full(n, r + 1, np.int16) for r, n in enumerate(counts)]
        whole = np.concatenate(parts)
        kind = {"count": max(*counts, 1), "sent": [counts] * size, "received": [counts] * size}
        for name, world in cases(size):
            found = world.run("all_gather", parts, [whole] * size, how, **kind)
            expect(found, [whole] * size, f"{how} of {size}, {name}")
            root = size - 1
            given = [whole if r == root else None for r in range(size)]
            found = world.run("scatter", given, parts, "direct", root=root, **kind)
            expect(found, parts, f"scatter of {size}, {name}")


def test_ragged_all_to_all_on_devices_is_right():
    size = 4
    table = np.arange(size * size).reshape(size, size) % 5
    rows = [np.repeat(np.arange(size) + 10 * r, table[r]).astype(np.int64) for r in range(size)]
    want = [np.repeat(np.arange(size) * 10 + r, table[:, r]).astype(np.int64) for r in range(size)]
    for name, world in cases(size):
        found = world.run(
            "all_to_all", rows, want, "direct", count=4, sent=table.tolist(),
            received=table.T.tolist(),
        )  # fmt: skip
        expect(found, want, name)


NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
           "float32", "float64"]  # fmt: skip
UFUNCS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "mean": np.add,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("how", ["auto", "ring", "reduce_to_one"])
def test_types_and_operations_on_devices_are_right(how):
    size = 4
    kinds = [(t, o) for t in NUMBERS for o in ("sum", "prod", "min", "max", "mean")]
    kinds += [(t, o) for t in NUMBERS[:8] for o in ("and", "or", "xor")]
    kinds += [("bool", o) for o in ("min", "max", "and", "or", "xor")]
    kinds += [(t, o) for t in ("complex64", "complex128") for o in ("sum", "prod", "mean")]
    if dtypes.bfloat16 is not None:
        kinds += [(dtypes.bfloat16, o) for o in ("sum", "max", "mean")]
    worlds = {name: World(*where, 3) for name, where in layouts(size).items()}
    for dtype, op in kinds:
        x = [y // 3 * 4 for y in data(size, 9)] if op == "mean" else [y // 4 for y in data(size, 9)]
        x = [y.astype(dtype) for y in x]
        want = x[0]
        for y in x[1:]:
            want = UFUNCS[op](want, y).astype(dtype)
        if op == "mean":
            want = (want / size).astype(dtype)
        for name, world in worlds.items():
            found = world.run("all_reduce", x, x, how, count=9, op=op)
            expect(found, [want] * size, f"{op} of {dtype}, {how}, {name}")


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("how", ["auto", "ring", "halving_doubling", "hierarchical_copy"])
def test_bits_on_devices_are_those_of_threads(how, size, on_ranks):
    """Sums of float32 in the same order, and halves rounded in the same places."""
    rng = np.random.default_rng(5)
    for dtype in (np.float32, np.float16):
        x = [rng.normal(size=1000).astype(dtype) for _ in range(size)]
        world = World(*layouts(size)["pairs in cliques"])
        for op in ("sum", "mean"):
            wanted = on_ranks(
                world.communicators,
                lambda c, x=x, op=op: c.all_reduce(x[c.rank], op, algorithm=how),
            )
            everywhere = "all reach" if how == "auto" else "none reach"
            there = World(*layouts(size)[everywhere], 1)
            found = there.run("all_reduce", x, x, how, count=1000, op=op)
            expect(found, wanted, f"{how} {op} of {np.dtype(dtype)}")


def test_reproducible_on_devices_combines_in_rank_order(on_ranks):
    x = [y.astype(np.float16) for y in np.random.default_rng(2).normal(size=(5, 100))]
    for name, where in layouts(5).items():
        world = World(*where)
        wanted = on_ranks(
            world.communicators, lambda c: c.all_reduce(x[c.rank], "mean", reproducible=True)
        )
        found = world.run("all_reduce", x, x, "direct", count=100, op="mean", reproducible=True)
        expect(found, wanted, name)


@pytest.mark.parametrize("count", [1, 40_000])
def test_one_shot_and_two_shot_kernels_are_right(count):
    """Small arrays and large ones, in place as well, between devices that reach each other."""
    for devices, cliques in (([0, 1, 2], [0] * 3), ([0, 0, 1, 1], [0] * 2), ([0] * 3, [0])):
        size = len(devices)
        for seed in range(6):
            for in_place in (False, True):
                world = World(devices, cliques, seed)
                x = data(size, count, np.float64)
                found = world.run(
                    "all_reduce", x, x, "auto", in_place=in_place, count=count, op="sum"
                )
                expect(found, [sum(x)] * size, f"{devices}, {in_place=}")
                launches = world.runtime.counts["combinations"]
                assert launches == (1 if count == 1 and max(devices) == 0 else max(devices) + 1)


def test_ranks_on_one_device_need_one_launch_and_no_copies():
    world = World([0] * 8, [0], shared_streams=True)
    x = data(8, 100)
    for r in range(8):
        world.call(r, "all_reduce", world.own(r, x[r]), np.empty_like(x[r]), "auto", count=100,
                   op="sum")  # fmt: skip
    counts = world.runtime.counts
    assert counts["combinations"] == 1 and counts["copies"] == counts["allocations"] == 0
    assert counts["waits"] == 0 and counts["records"] == 8  # the ends of the ranks' calls
    world.runtime.run()


@pytest.mark.parametrize("size", [16, 17, 33])
def test_more_ranks_than_one_launch_combines_are_right(size):
    for devices in ([0] * size, [r % 2 for r in range(size)]):
        world = World(devices, [0, 0])
        x = data(size, 50)
        for in_place in (False, True):
            found = world.run("all_reduce", x, x, "auto", in_place=in_place, count=50, op="mean")
            expect(found, [sum(x) // size] * size, f"{devices}, {in_place=}")
        assert world.runtime.counts["allocations"] == world.runtime.counts["frees"]


def test_own_algorithm_on_devices_is_right():
    @algorithm(num_chunks=2)
    def line(rank, size):
        for c in range(2):
            total = input[c] if rank == 0 else output[c]
            if rank > 0:
                yield recv_reduce(rank - 1, input[c], output[c])
            if rank + 1 < size:
                yield send(rank + 1, total)
        for c in range(2):
            if rank + 1 < size:
                yield recv(rank + 1, output[c])
            elif rank == 0:
                yield copy(input[c], output[c])
            if rank > 0:
                yield send(rank - 1, output[c])

    for size in (1, 2, 5):
        for name, world in cases(size):
            x = data(size, 11)
            found = world.run("all_reduce", x, x, line.for_ranks(size), count=11, op="sum")
            expect(found, [sum(x)] * size, name)


def test_scratch_on_devices_is_freed():
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for how in algorithms.names(collective):
            world = World(*layouts(6)["none reach"])
            x = data(6, 60)
            part = [y[:10] for y in x]
            inputs, outputs = (part, x) if collective == "all_gather" else (x, x)
            outputs = part if collective == "reduce_scatter" else outputs
            count = 60 if collective == "all_reduce" else 10
            world.run(collective, inputs, outputs, how, count=count,
                      op=None if collective == "all_gather" else "sum")  # fmt: skip
            counts = world.runtime.counts
            assert counts["allocations"] == counts["frees"], how
            assert collective == "all_gather" or counts["allocations"]


def is_right(how, lost, seed, where):
    world = World(*where, seed)
    x = data(4, 64)
    world.runtime.lose_wait_after(lost)
    return all((y == sum(x)).all() for y in world.run("all_reduce", x, x, how, count=64, op="sum"))


@pytest.mark.parametrize("how", ["auto", "ring", "halving_doubling"])
def test_schedules_without_a_stream_wait_are_wrong(how):
    """Each wait is needed: without it, some order of execution gives a wrong result."""
    where = layouts(4)["all reach"]
    world = World(*where)
    x = data(4, 64)
    world.run("all_reduce", x, x, how, count=64, op="sum")
    waits = world.runtime.counts["waits"]
    assert waits >= 8
    hidden = [
        lost for lost in range(waits) if all(is_right(how, lost, s, where) for s in range(20))
    ]
    assert not hidden
