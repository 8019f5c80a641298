"""Parts of a cluster with parameter servers: stores, copies, shared memory, and snapshots."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading

import hangs
import numpy as np
import pytest

import pycollective as tf
from pycollective.distribute import server_variables, task_links
from pycollective.distribute import snapshots as snapshot_files
from pycollective.distribute.server_connections import Servers
from pycollective.distribute.server_store import Store
from pycollective.distribute.shared_values import Block, SharedFile
from pycollective.distribute.snapshots import Snapshots
from pycollective.errors import (
    CheckpointError,
    FailedPreconditionError,
    UnavailableError,
)
from pycollective.launch.handshake import Channel, HandshakeError
from pycollective.tensor import IndexedSlices, Variable
from pycollective.tensor.scattering import SCATTER

# The store ----------------------------------------------------------------------------------------


def create(store, key, array, given=True, **options):
    spec = [array.dtype.str, *array.shape]
    message = {"request": "create", "key": key, "spec": spec, **options}
    reply, _ = store.answer(message, [array] if given else [])
    return reply


def pulled(store, number, have=0):
    reply, arrays = store.answer({"request": "pull", "have": [[number, have]]}, [])
    return reply["found"][0], arrays


def test_store_keeps_the_first_value_and_refuses_another_shape():
    store = Store()
    assert create(store, "a#0", np.ones(3), given=False) == {"wanted": True}
    number = create(store, "a#0", np.ones(3))["number"]
    assert create(store, "a#0", np.zeros(3))["number"] == number
    assert pulled(store, number)[1][0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="another program version"):
        create(store, "a#0", np.zeros(4))


def test_store_sends_only_the_rows_that_have_changed():
    store = Store()
    number = create(store, "table#0", np.zeros((4096, 2)))["number"]
    (version, _), _ = pulled(store, number)
    push = {"request": "push", "items": [[number, "scatter_add"]]}
    store.answer(push, [np.array([3, 70]), np.ones((2, 2))])
    found, arrays = pulled(store, number, version)
    assert found == [version + 1, "rows"]
    assert arrays[0].tolist() == [3, 70] and arrays[1].tolist() == [[1, 1], [1, 1]]
    assert pulled(store, number, version + 1) == ([version + 1, "same"], [])
    _rows, (values,) = store.answer({"request": "rows", "items": [number]}, [np.array([70, 0])])
    assert values.tolist() == [[1, 1], [0, 0]]


def test_store_counts_updates_and_bytes():
    store = Store()
    number = create(store, "a#0", np.ones(4))["number"]
    store.answer({"request": "push", "items": [[number, "add"]]}, [np.ones(4)])
    pulled(store, number)
    assert store.answer({"request": "load"}, [])[0]["load"] == [1, 32, 1, 32, 64]


@pytest.mark.parametrize("name", sorted(SCATTER))
def test_store_scatter_equals_that_of_a_plain_variable(name):
    store, value = Store(), np.arange(-4, 8, dtype=np.float32).reshape(6, 2)
    index, rows = np.array([5, 1, 1, 0]), np.array([[2, 3], [4, -5], [-6, 7], [8, 9]], np.float32)
    if name == "scatter_update":
        index, rows = index[[0, 1, 3]], rows[[0, 1, 3]]
    plain = Variable(value)
    number = create(store, "a#0", value)["number"]
    for _ in range(2):
        store.answer({"request": "push", "items": [[number, name]]}, [index, rows])
        getattr(plain, name)(IndexedSlices(rows, index))
    assert np.array_equal(pulled(store, number)[1][0], plain.numpy())


@pytest.mark.parametrize("index", [[1, 3], [3, 1], [1, 1]])
def test_store_scatter_add_of_unsigned_indices_adds_all_rows(index):
    store = Store()
    number = create(store, "a#0", np.zeros(4))["number"]
    push = {"request": "push", "items": [[number, "scatter_add"]]}
    store.answer(push, [np.array(index, np.uint32), np.ones(2)])
    assert pulled(store, number)[1][0].sum() == 2


@pytest.mark.parametrize(
    ("name", "arrays", "text"),
    [
        ("scatter_max", [[-1, 3], np.ones((2, 2))], "an index is outside the variable"),
        ("scatter_max", [[3, 4], np.ones((2, 2))], "an index is outside the variable"),
        ("scatter_max", [[1.0], np.ones((1, 2))], "not a list of integers"),
        ("scatter_max", [[[1]], np.ones((1, 2))], "not a list of integers"),
        ("scatter_max", [[1], np.ones((2, 2))], r"scatter_max: the operand has shape \(2, 2\)"),
        (
            "scatter_max",
            [[1], np.ones((1, 2), np.float32)],
            "dtype float32, but the variable needs",
        ),
        ("scatter_max", [[1]], "the change 'scatter_max' lacks an array"),
        ("set", [np.ones(2)], "but the variable needs"),
        ("add", [], "the change 'add' lacks an array"),
        ("rows", [[1], np.ones((1, 2))], "no change 'rows'"),
        ("__class__", [np.ones((4, 2))], "no change '__class__'"),
        (["add"], [np.ones((4, 2))], "no change"),
    ],
)
def test_store_refuses_a_wrong_change(name, arrays, text):
    store = Store()
    number = create(store, "a#0", np.zeros((4, 2)))["number"]
    with pytest.raises(HandshakeError, match=text):
        push = {"request": "push", "items": [[number, name]]}
        store.answer(push, [np.asarray(array) for array in arrays])
    assert not pulled(store, number)[1][0].any()


def test_store_refuses_a_division_of_integers_by_zero():
    store = Store()
    number = create(store, "a#0", np.ones(2, np.int32))["number"]
    push = {"request": "push", "items": [[number, "scatter_div"]]}
    with pytest.raises(HandshakeError, match="by which it cannot divide"):
        store.answer(push, [np.array([0]), np.zeros(1, np.int32)])


def step_of(store, numbers, gradient, rule=("Adagrad", {"epsilon": 1e-7}), **options):
    message = {"request": "update", "rule": [*rule], "rate": 0.5, "step": 1, "decay": 1.0}
    message |= {"items": [[numbers, False, False]], **options}
    arrays = gradient if isinstance(gradient, list) else [gradient]
    return store.answer(message, arrays)


def test_store_makes_the_step_of_an_optimizer_with_slots_and_rows():
    store = Store()
    numbers = [create(store, f"{name}#0", np.ones((4096, 2)))["number"] for name in ("v", "slot")]
    step_of(store, numbers, np.full((4096, 2), 3.0))
    weights = 1 - 0.5 * 3 / np.sqrt(10)
    assert pulled(store, numbers[0])[1][0] == pytest.approx(np.full((4096, 2), weights))
    assert pulled(store, numbers[1])[1][0] == pytest.approx(np.full((4096, 2), 10.0))
    items = [[numbers, True, False]]
    step_of(store, numbers, [np.array([3, 70]), np.ones((2, 2))], items=items)
    for number, value in zip(numbers, (weights - 0.5 / np.sqrt(11), 11.0), strict=True):
        found, arrays = pulled(store, number, 2)
        assert found == [3, "rows"] and arrays[0].tolist() == [3, 70]
        assert arrays[1] == pytest.approx(np.full((2, 2), value))


@pytest.mark.parametrize(
    ("slots", "gradient", "rule", "text"),
    [
        (["slot"], np.ones(3), ("Adagrad", {}), "a gradient of another shape"),
        (["slot"], np.ones(4, np.float32), ("Adagrad", {}), "another shape or dtype"),
        ([], np.ones(4), ("Adagrad", {}), "slots that do not fit"),
        (["slot", "short"], np.ones(4), ("Adam", {}), "slots that do not fit"),
        (["slot"], np.ones(4), ("LossScaleOptimizer", {}), "no optimizer"),
        (["slot"], np.ones(4), ("__class__", {}), "no optimizer"),
    ],
)
def test_store_refuses_a_wrong_step_of_an_optimizer(slots, gradient, rule, text):
    store = Store()
    shapes = {"v": 4, "slot": 4, "short": 3}
    numbers = [create(store, name, np.ones(shapes[name]))["number"] for name in ("v", *slots)]
    with pytest.raises(HandshakeError, match=text):
        step_of(store, numbers, gradient, rule)


def test_store_refuses_an_update_of_another_shape():
    store = Store()
    number = create(store, "a#0", np.ones(3))["number"]
    with pytest.raises(HandshakeError, match="but the variable needs"):
        store.answer({"request": "push", "items": [[number, "add"]]}, [np.ones(4)])


def note(store, *dropped, **options):
    store.answer({"request": "note", "dropped": list(dropped)}, [], **options)


def test_store_removes_variables_that_the_chief_has_dropped_and_slots_that_it_does_not_have():
    store = Store()
    kept = {"keeps": True}
    numbers = [create(store, "a#0", np.ones(2), **kept)["number"]]
    for key, options in (("m#0", {}), ("v#0", kept), ("b#0", kept)):
        options = {"slot_of": "a#0", **options} if key != "b#0" else options
        numbers.append(create(store, key, np.ones(2), **options)["number"])
    push = {"request": "push", "items": [[numbers[0], "add"]]}
    store.answer(push, [np.ones(2)])
    note(store, "a#0", "unknown#0")
    assert store.answer({"request": "load"}, [])[0]["load"][:3] == [2, 32, 1]
    for number, state in zip(numbers, ["dropped", "dropped", "whole", "whole"], strict=True):
        assert pulled(store, number)[0][1] == state
    with pytest.raises(FailedPreconditionError, match="has dropped this variable"):
        store.answer(push, [np.ones(2)])
    for key in ("a#0", "m#0"):
        assert create(store, key, np.ones(2)) == {"dropped": True}
    assert create(store, "new slot#0", np.ones(2), slot_of="a#0") == {"dropped": True}
    assert create(store, "a#1", np.ones(2), **kept)["number"] == 4
    with pytest.raises(HandshakeError, match="no variable 7"):
        pulled(store, 7)


@pytest.mark.parametrize("end", ["started", "lost"])
def test_store_keeps_dropped_variables_until_all_workers_have_run_the_program(end):
    store = Store()
    number = create(store, "a#0", np.ones(2), keeps=True)["number"]
    for task in ("one", "two"):
        message = {"request": "create", "key": "a#0", "spec": ["<f8", 2], "prepares": True}
        assert store.answer(message, [], task)[0]["number"] == number
    note(store, "a#0", task="the chief")
    for task in ("one", "two"):
        assert pulled(store, number)[0][1] == "whole"
        if end == "started":
            store.answer({"request": "note", "prepares": False}, [], task)
        else:
            store.leave(task)
    assert pulled(store, number)[0][1] == "dropped"


def test_store_serves_one_chief():
    store = Store()
    for _ in range(2):
        assert store.answer({"request": "begin", "run": "a"}, []) == ({}, [])
    with pytest.raises(FailedPreconditionError, match="already serves another chief"):
        store.answer({"request": "begin", "run": "b"}, [])


def test_store_updates_a_variable_while_another_one_is_locked():
    store = Store()
    first, second = (create(store, f"{name}#0", np.zeros(3))["number"] for name in "ab")
    locked, release = threading.Event(), threading.Event()

    def hold():
        with store._blocks[first].locked(True):
            locked.set()
            release.wait(hangs.SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(hangs.SECONDS)
    push = threading.Thread(
        target=store.answer,
        args=({"request": "push", "items": [[second, "add"]]}, [np.ones(3)]),
    )
    push.start()
    push.join(hangs.SECONDS)
    assert not push.is_alive() and pulled(store, second)[1][0].tolist() == [1, 1, 1]
    release.set()
    thread.join()


# Copies of a server's variables ---------------------------------------------------------------------


class Connected:
    """A link to a store of this process, which records the names of the changes that are pushed."""

    task, descriptor = "the server", -1

    def __init__(self, store, uncached=False):
        self._store, self.lock, self.pushed = store, threading.Lock(), []
        self.servers = Servers(lambda server, seconds: self, 1, uncached)
        self.servers.private = False

    def ended(self):
        return False

    def close(self):
        pass

    def send(self, message, arrays):
        self.pushed += (
            [name for _, name in message["items"]] if message["request"] == "push" else []
        )
        self._reply = self._store.answer(message, [array.copy() for array in arrays])

    def reply(self):
        return self._reply


def variables_of_two_tasks(value, uncached=False):
    """Return two tasks' views of a variable whose server is not on their host."""
    store = Store()
    store._file = None
    links = [Connected(store, uncached) for _ in range(2)]
    views = []
    for link in links:
        view = link.servers.create(Variable(value, name="v"), 0)
        view._by_rows = view.ndim > 1
        views.append(view)
    return links, views


def test_server_drops_a_variable_with_the_next_message_after_the_chief_has_dropped_it():
    (chief, worker), (view, other) = variables_of_two_tasks(SMALL, uncached=True)
    worker.servers.uncached = False
    read = other.numpy()
    del view
    gc.collect()
    assert list(chief._store._blocks) == [0]  # nothing is sent in a finalizer
    chief.servers.tell_dropped()
    assert not chief._store._blocks and chief.servers.loads()[0][:2] == [0, 0]
    worker.servers.end()
    worker.servers.begin("step")  # pulls all small variables
    with pytest.raises(FailedPreconditionError, match="has dropped this variable"):
        other.numpy()
    worker.servers.begin("step")
    assert not worker.servers._read["step"] and read.tolist() == SMALL.tolist()
    late = worker.servers.create(Variable(SMALL, name="v"), 0)
    assert late.numpy().tolist() == SMALL.tolist()  # "v#1", which the chief does not have


def test_variable_that_the_chief_has_dropped_stays_in_a_worker_that_creates_it_later():
    (chief, worker), (view, other) = variables_of_two_tasks(SMALL, uncached=True)
    worker.servers.uncached = False
    del view, other
    gc.collect()
    chief.servers.create(Variable(SMALL, name="v"), 0)
    gc.collect()
    chief.servers.tell_dropped()
    late = worker.servers.create(Variable(SMALL, name="v"), 0)
    late.assign_add(SMALL)
    worker.servers.end()
    assert type(late) is Variable and late.numpy().tolist() == (2 * SMALL).tolist()
    assert not chief._store._blocks


def test_server_that_is_restored_from_an_older_snapshot_drops_variables_again(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    (chief, _), views = variables_of_two_tasks(SMALL, uncached=True)
    kept = chief.servers.create(Variable(2 * SMALL, name="w"), 0)
    store = chief._store
    snapshots.write("run", {key: store._blocks[n] for key, n in store._numbers.items()})
    views.clear()
    gc.collect()
    chief.servers.tell_dropped()
    assert list(store._numbers) == ["w#0"]
    chief._store = Store(Snapshots(str(tmp_path)), 3600)
    chief._store.answer({"request": "begin", "run": "run"}, [])
    chief._store._file = None
    assert list(chief._store._numbers) == ["v#0", "w#0"]
    chief.servers.reattach(0, chief)
    assert list(chief._store._numbers) == ["w#0"]
    assert kept.numpy().tolist() == (2 * SMALL).tolist()


def value_on_server(links):
    return links[0]._store._blocks[0].value


SMALL, LARGE = np.ones(6, np.float32), np.full((2048, 4), 8, np.float32)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", sorted(SCATTER))
def test_scatters_of_two_tasks_equal_those_one_after_the_other(name, value, read):
    links, views = variables_of_two_tasks(value)
    plain = Variable(value)
    slices = IndexedSlices(np.full_like(value[:2], 5), np.array([5, 0]))
    for view in views:
        if read:
            view.numpy()
        getattr(view, name)(slices)
        getattr(plain, name)(slices)
    for link in links:
        link.servers.end()
    assert np.array_equal(value_on_server(links), plain.numpy())


@pytest.mark.parametrize("uncached", [False, True])
def test_values_without_an_exact_difference_are_updated(uncached):
    links, (view, _) = variables_of_two_tasks(
        np.array([np.inf, np.nan, 1e8, 0], np.float32), uncached
    )
    view.assign_add([0.0, 0.0, 0.0, 1.0])
    view.scatter_update(IndexedSlices(np.float32([2, 0.1]), np.array([1, 2])))
    view.scatter_add(IndexedSlices(np.float32([3]), np.array([1])))
    expected = np.float32([np.inf, 5, 0.1, 1])
    assert np.array_equal(view.numpy(), expected)
    links[0].servers.end()
    assert np.array_equal(value_on_server(links), expected)


@pytest.mark.parametrize("update", ["whole", "rows"])
def test_update_by_a_function_keeps_rows_of_other_tasks_and_sets_rows_without_difference(update):
    value = LARGE.copy()
    value[:3] = [[np.inf], [np.nan], [np.inf]]
    links, (view, other) = variables_of_two_tasks(value)

    def change(rows):
        rows[0], rows[3] = 7, rows[3] + 1

    if update == "whole":
        view.update_inplace(change)
    else:
        view.update_rows([], np.arange(4), lambda rows: change(rows[0]))
    other.scatter_update(IndexedSlices(np.full_like(value[:3], 2), np.array([1, 2, 3])))
    links[1].servers.end()
    links[0].servers.end()
    assert value_on_server(links)[:4, 0].tolist() == [7, 2, 2, 3]


def test_function_reads_its_own_changes_of_rows_and_of_the_whole():
    links, (view, _) = variables_of_two_tasks(LARGE)
    plain = Variable(LARGE)
    assert view.rows(np.array([7]))[0, 0] == 8
    for variable in (view, plain):
        variable.scatter_max(IndexedSlices(np.full_like(LARGE[:2], 9), np.array([7, 9])))
        variable.assign_sub(np.full_like(LARGE, 2))
        variable.scatter_mul(IndexedSlices(np.full_like(LARGE[:3], 3), np.array([9, 11, 9])))
    index = np.array([11, 7, 9, 3, 7])
    assert np.array_equal(view.rows(index), plain.rows(index))
    assert not links[0].pushed
    assert np.array_equal(view.numpy(), plain.numpy())
    value_before = view.current()
    for variable in (view, plain):
        variable.update_inplace(lambda array: np.multiply(array, 2, out=array))
        variable.scatter_min(IndexedSlices(np.full_like(LARGE[:1], -1), np.array([0])))
    assert value_before[0, 0] == 6
    links[0].servers.end()
    names = ["scatter_max", "add", "scatter_mul", "add", "scatter_min"]
    assert links[0].pushed == names
    for found in (view.numpy(), value_on_server(links)):
        assert np.array_equal(found, plain.numpy())


def test_operands_that_change_after_the_call_have_no_effect():
    links, (view, _) = variables_of_two_tasks(SMALL)
    index, rows, whole = np.array([1]), np.ones(1, np.float32), np.ones(6, np.float32)
    for call, given in ((view.scatter_add, IndexedSlices(rows, index)), (view.assign_sub, whole)):
        call(given)
    view.assign_add(whole)
    index[:], rows[:], whole[:] = 2, 50, 50
    links[0].servers.end()
    assert value_on_server(links).tolist() == [1, 2, 1, 1, 1, 1]


def test_changes_that_repeat_are_joined_and_sent_before_the_function_ends(monkeypatch):
    links, (view, _) = variables_of_two_tasks(LARGE)
    slices = IndexedSlices(LARGE[:2], np.array([4, 4]))
    for _ in range(20):
        view.scatter_sub(slices)
    monkeypatch.setattr(server_variables, "_MOST_CHANGES", 20)
    assert not links[0].pushed
    view.scatter_sub(slices)
    assert links[0].pushed == ["scatter_sub"] and not view._changes
    assert view.rows(np.array([4]))[0, 0] == 8 - 21 * 16 == value_on_server(links)[4, 0]


def test_value_that_no_other_task_has_changed_is_not_pulled_again():
    links, (view, other) = variables_of_two_tasks(SMALL)
    view.numpy()
    for _ in range(2):
        view.assign_add(SMALL)
    links[0].servers.end()
    assert links[0].pushed == ["add", "add"]
    have = [[view._number, view._version]]
    reply, _ = links[0]._store.answer({"request": "pull", "have": have}, [])
    assert reply["found"] == [[view._version, "same"]] and view.numpy().tolist() == [3] * 6
    other.assign([2.0] * 6)
    view.assign_add(SMALL)
    links[1].servers.end()
    links[0].servers.end()
    assert view.numpy().tolist() == other.numpy().tolist() == [3] * 6


@pytest.mark.parametrize("uncached", [False, True])
def test_boolean_variable_scatter_update_works_and_subtraction_raises(uncached):
    links, views = variables_of_two_tasks(np.array([False, True, False]), uncached)
    for place, view in enumerate(views):
        view.numpy()
        view.scatter_update(IndexedSlices(np.array([True]), np.array([2 * place])))
        with pytest.raises(TypeError):
            view.scatter_sub(IndexedSlices(np.array([True]), np.array([1])))
        with pytest.raises(TypeError):
            view.assign_sub([True, True, True])
    for link in links:
        link.servers.end()
    assert value_on_server(links).tolist() == [True, True, True]


def test_variable_that_a_function_updates_in_place_cannot_be_changed_inside():
    _, (view, _) = variables_of_two_tasks(SMALL)
    with pytest.raises(RuntimeError, match="by the function that updates it in place"):
        view.update_inplace(lambda array: view.assign_add(SMALL))


# Shared memory ------------------------------------------------------------------------------------


def test_block_of_another_file_is_not_mapped():
    file = SharedFile.made()
    if file is None:
        pytest.skip("this system has no files in memory with locks")
    owner, fd, token = file.name
    assert SharedFile.of([owner, fd, token]) is not None
    pipe = os.pipe()
    names = [[owner, fd, token[2:] + "00"], [owner, 10**6, token], [owner, fd, "x"], None, []]
    for name in [*names, [owner, pipe[0], token], [owner, pipe[1], token]]:
        assert SharedFile.of(name) is None
    for end in pipe:
        os.close(end)


def test_block_in_a_file_is_seen_and_locked_by_another_mapping():
    file = SharedFile.made()
    if file is None:
        pytest.skip("this system has no files in memory with locks")
    block = Block.made(np.zeros((4096, 2)), 5, file)
    other = Block((4096, 2), np.dtype(float), 5, SharedFile.of(file.name), block.offset)
    begun, ended = threading.Event(), threading.Event()

    def change():
        begun.set()
        with other.locked(True) as value:
            other.changed([7])
            value[7] += 1
        ended.set()

    with block.locked(False):
        threading.Thread(target=change).start()
        assert begun.wait(hangs.SECONDS) and not ended.wait(0.05)
        assert block.value[7].tolist() == [0, 0]
    assert ended.wait(hangs.SECONDS)
    assert block.value[7].tolist() == [1, 1]
    assert block.rows_since(block.version - 1).tolist() == [7]
    assert block.rows_since(0) is None


@pytest.mark.parametrize("file", [None, SharedFile.made()], ids=["alone", "in a file"])
def test_thread_that_has_locked_a_block_cannot_lock_it_again(file):
    """The inner unlock would release the lock of the process."""
    block = Block.made(np.zeros(3), 5, file)
    with block.locked(True):
        for exclusive in (False, True):
            with pytest.raises(RuntimeError, match="updates it in place"):
                block.lock(exclusive)
    with block.locked(False):
        pass


@pytest.mark.skipif(SharedFile.made() is None, reason="there are no files in memory")
def test_dropped_block_returns_its_memory_and_is_an_error_for_other_mappings():
    file = SharedFile.made()
    before = os.fstat(file._fd).st_blocks
    block = Block.made(np.ones((1000, 1000)), 7, file)
    other = Block((1000, 1000), np.float64, 7, SharedFile.of(file.name), block.offset)
    assert os.fstat(file._fd).st_blocks > before + 1000
    block.drop()
    assert os.fstat(file._fd).st_blocks <= before + 16
    for mapping in (block, other, block):
        with pytest.raises(FailedPreconditionError, match="has dropped this variable"):
            mapping.lock(True)
    assert Block.made(np.ones(3), 8, file).offset > block.offset


def test_worker_keeps_the_chiefs_connection_if_a_late_one_has_ended():
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    server = tf.distribute.Server(cluster, "worker", 0, start=False)
    hello = {"purpose": task_links.PURPOSE, "task": "chief", "run": "a"}
    first, late, other = (socket.socketpair() for _ in range(3))
    with contextlib.ExitStack() as held:
        for pair in (first, late, other):
            for sock in pair:
                held.enter_context(sock)
        server._enter(Channel(first[0]), hello)
        assert task_links.Link(Channel(first[1]), "worker").receive()[0]["gpus"] == 0
        late[1].close()
        server._enter(Channel(late[0]), hello)
        first[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            first[1].recv(1)
        with pytest.raises(HandshakeError, match="still serves another chief"):
            server._enter(Channel(other[0]), {**hello, "run": "b"})
        server._enter(Channel(other[0]), hello)
        assert first[1].recv(1) == b""


# Snapshots ----------------------------------------------------------------------------------------


def test_snapshot_without_a_dropped_variable_keeps_the_numbers_of_others(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    blocks = {f"{name}#0": Block.made(np.full(3, n), n, None) for n, name in enumerate("uvw")}
    snapshots.write("a", blocks)
    blocks["u#0"].drop()
    snapshots.write("a", blocks)  # as a writer does that began before the drop
    names = ["1.1", "2.1", "index.json", "previous.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.1", *names]
    del blocks["u#0"], blocks["v#0"]
    snapshots.write("a", blocks)
    # The previous snapshot still needs 1.1.
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    store = Store(Snapshots(str(tmp_path)), 3600)
    store.answer({"request": "begin", "run": "a"}, [])
    assert create(store, "w#0", np.zeros(3, int), given=False)["number"] == 2
    assert create(store, "new#0", np.zeros(3))["number"] == 3


def test_snapshot_holds_only_the_run_that_wrote_it(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    blocks = {"v#0": Block.made(np.arange(3.0), 0, None), "w#0": Block.made(np.zeros(()), 1, None)}
    snapshots.write("a", blocks)
    blocks["v#0"].value += 1
    blocks["v#0"].changed()
    snapshots.write("a", blocks)
    names = ["0.1", "0.2", "1.1", "index.json", "previous.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    blocks["v#0"].changed()
    snapshots.write("a", blocks)
    names = ["0.2", "0.3", "1.1", "index.json", "previous.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    again, other = [Store(Snapshots(str(tmp_path)), 3600) for _ in range(2)]
    again.answer({"request": "begin", "run": "a"}, [])
    number = create(again, "v#0", np.zeros(3), given=False)["number"]
    (version, _), (value,) = pulled(again, number)
    assert version == 3 and value.tolist() == [1, 2, 3]
    other.answer({"request": "begin", "run": "b"}, [])
    assert create(other, "v#0", np.zeros(3), given=False) == {"wanted": True}


@pytest.mark.parametrize("how", ["cut", "changed", "missing", "index"])
def test_damaged_snapshot_is_replaced_by_the_one_before(tmp_path, caplog, how):
    snapshots, block = Snapshots(str(tmp_path)), Block.made(np.zeros(3), 0, None)
    for number in range(3):
        block.value[...] = number
        block.changed()
        snapshots.write("a", {"v#0": block, "w#0": Block.made(np.ones(2), 1, None)})
    file = tmp_path / ("index.json" if how == "index" else "0.4")
    data = file.read_bytes()
    file.unlink()
    if how in ("cut", "index"):
        file.write_bytes(data[:-1])
    elif how == "changed":
        file.write_bytes(data[:-1] + b"x")
    again = Snapshots(str(tmp_path))
    (_, _, value, version), _ = again.read("a")
    assert value.tolist() == [1] * 3 and version == 3
    assert "the last snapshot is damaged" in caplog.text
    if how != "index":
        assert Snapshots(str(tmp_path)).read("b") == []
    block.value[...] = 5
    again.write("a", {"v#0": block, "w#0": Block.made(np.ones(2), 1, None)})
    assert Snapshots(str(tmp_path)).read("a")[0][2].tolist() == [5] * 3
    (tmp_path / "0.4").unlink()
    assert Snapshots(str(tmp_path)).read("a")[0][2].tolist() == [1] * 3


def test_snapshot_that_is_damaged_raises(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    snapshots.write("a", {"v#0": Block.made(np.arange(3.0), 0, None)})
    (tmp_path / "0.1").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="is damaged"):
        snapshots.read("a")
    for text in (b"[]", b"{", b'{"run": "a", "variables": [{"number": 0}]}'):
        (tmp_path / "index.json").write_bytes(text)
        with pytest.raises(CheckpointError, match="is damaged"):
            snapshots.read("a")


def test_snapshot_that_cannot_be_written_leaves_the_last_one_and_is_tried_again(
    tmp_path, monkeypatch
):
    snapshots = Snapshots(str(tmp_path))
    block = Block.made(np.zeros(3), 0, None)
    snapshots.write("a", {"v#0": block})
    write = snapshot_files.write_atomically

    def full(path, data):
        if path.endswith("index.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    block.value += 1
    block.changed()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_files, "write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            snapshots.write("a", {"v#0": block})
    ((_, _, value, version),) = Snapshots(str(tmp_path)).read("a")
    assert value.tolist() == [0, 0, 0] and version == 1
    snapshots.write("a", {"v#0": block})
    ((_, _, value, version),) = Snapshots(str(tmp_path)).read("a")
    assert value.tolist() == [1, 1, 1] and version == 2


def test_store_continues_to_write_snapshots_after_an_error(tmp_path, monkeypatch, caplog):
    snapshots, written, calls = Snapshots(str(tmp_path)), threading.Event(), []

    def write(run, variables):
        calls.append(run)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(calls) == 2:
            raise UnavailableError("a variable is locked")
        written.set()

    monkeypatch.setattr(snapshots, "write", write)
    Store(snapshots, 0.01).answer({"request": "begin", "run": "a"}, [])
    assert written.wait(hangs.SECONDS)
    assert "the snapshot was not written: [Errno 28]" in caplog.text


def test_snapshot_directory_that_cannot_be_made_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Snapshots(str(tmp_path / "file" / "ps-0"))
