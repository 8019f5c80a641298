"""`ParameterServerStrategy` on clusters of processes: lost tasks, interrupts and restarts."""

from __future__ import annotations

import json
import signal
import time

import hangs
import pytest
from ports import free_ports
from server_clusters import (
    BEGIN,
    MODEL,
    ending,
    let_continue,
    recovering,
    results,
    run,
    start,
    started,
)


@pytest.mark.slow
def test_lost_worker_function_runs_on_another_and_the_program_ends_well(tmp_path):
    marker = tmp_path / "killed"
    found, errors = results(
        tmp_path,
        MODEL
        + f"""
@tf.function
def dies_once():
    try:
        os.close(os.open({str(marker)!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return tf.distribute.coordinator.experimental_get_current_worker_index()
    os.kill(os.getpid(), signal.SIGKILL)

values = [coordinator.schedule(dies_once) for _ in range(4)]
iterator = iter(per_worker)
for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
report(values=[int(v.fetch()) for v in values], count=int(count))
""",
    )
    assert len(set(found["values"])) == 1
    assert found["count"] == 20
    assert "the other workers continue" in errors


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_worker_ends_well_if_the_chief_ends_while_a_function_runs(tmp_path, size):
    path, begun = tmp_path / "script.py", tmp_path / "begun"
    path.write_text(
        BEGIN
        + f"""
@tf.function
def slow():
    open({str(begun)!r}, "w").close()
    time.sleep(0.5)  # the chief ends meanwhile
    return np.ones({size})

coordinator.schedule(slow)
while not os.path.exists({str(begun)!r}):
    time.sleep(0.01)
"""
    )
    with started(path) as tasks:
        for task in tasks:
            _, errors = task.communicate(timeout=hangs.SECONDS)
            assert task.returncode == 0, errors


@pytest.mark.slow
def test_lost_server_raises_unavailable_error_from_every_call(tmp_path):
    pids = tmp_path / "pids"
    script = f"""
config = json.loads(os.environ["TF_CONFIG"])
if config["task"]["type"] == "ps":
    open({str(pids)!r} + str(config["task"]["index"]), "w").write(str(os.getpid()))
"""
    begin = "import json, os\n" + script + BEGIN + MODEL
    status, out, errors = run(
        tmp_path,
        begin
        + f"""
iterator = iter(per_worker)
coordinator.schedule(step, args=(iterator,)).fetch()
os.kill(int(open({str(pids)!r} + "1").read()), signal.SIGKILL)
def schedule():
    return coordinator.schedule(step, args=(iterator,))

text = raised(lambda: [(schedule(), coordinator.join()) for _ in range(50)])
print("FOUND", text)
for call in (coordinator.join, coordinator.done, schedule):
    print("THEN", raised(call))
""",
    )
    assert status == 128 + signal.SIGKILL, errors
    assert "FOUND UnavailableError: /job:ps/task:" in out, (out, errors)
    assert out.count("THEN UnavailableError: /job:ps/task:") == 3, (out, errors)


@pytest.mark.slow
def test_worker_without_a_port_begins_later_and_again_at_another_port(tmp_path):
    """Worker 1 chooses its port and tells it to server 0, which the chief asks."""
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + """
with strategy.scope():
    total = tf.Variable(0)

@tf.function
def add():
    total.assign_add(1)
    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return worker, os.getpid(), total

while True:
    for found in [coordinator.schedule(add) for _ in range(4)]:
        print(*found.fetch(), flush=True)
    time.sleep(0.01)
"""
    )
    cluster = {
        "ps": [f"127.0.0.1:{port}" for port in free_ports(1)],
        "worker": [f"127.0.0.1:{port}" for port in free_ports(1)] + ["127.0.0.1:0"],
    }
    with ending() as tasks:
        for job in ("worker", "ps", "chief"):
            tasks.append(start(path, job, cluster))
        chief = tasks[-1]
        lines = (line.split() for line in iter(chief.stdout.readline, ""))
        assert [next(lines)[0] for _ in range(10)] == ["0"] * 10
        for _ in range(2):
            later = start(path, "worker", cluster, index=1)
            tasks.append(later)
            pids = (int(pid) for worker, pid, _ in lines if worker == "1")
            assert next(pid for pid in pids if pid == later.pid)
            later.kill()
            later.communicate()
        assert all(int(next(lines)[2]) > 10 for _ in range(10))  # the variable's value is kept


@pytest.mark.slow
def test_functions_do_not_wait_for_a_later_worker_that_still_runs_the_program(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import json\n"
        + BEGIN
        + """
@tf.function
def number():
    return tf.distribute.coordinator.experimental_get_current_worker_index()

def numbers():
    found = [coordinator.schedule(number) for _ in range(4)]
    coordinator.join(20)
    return {int(value.fetch()) for value in found}

if json.loads(os.environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}:
    print("runs the program", flush=True)
    input()
coordinator.schedule(number).fetch()
print("ready", flush=True)
input()
for _ in range(50):
    assert numbers() == {0}
    time.sleep(0.05)
print("continues", flush=True)
while 1 not in numbers():
    pass
"""
    )
    ports = free_ports(2)
    cluster = {
        "ps": [f"127.0.0.1:{ports[0]}"],
        "worker": [f"127.0.0.1:{ports[1]}", "127.0.0.1:0"],
    }
    with ending() as tasks:
        tasks += [start(path, job, cluster) for job in ("worker", "ps", "chief")]
        chief = tasks[-1]
        assert chief.stdout.readline() == "ready\n", chief.communicate()
        later = start(path, "worker", cluster, index=1)
        tasks.append(later)
        assert later.stdout.readline() == "runs the program\n", later.communicate()
        let_continue(chief)
        assert chief.stdout.readline() == "continues\n", chief.communicate()
        let_continue(later)
        _, errors = chief.communicate(timeout=hangs.SECONDS)
        assert chief.returncode == later.wait(timeout=hangs.SECONDS) == 0, errors


@pytest.mark.slow
def test_worker_that_is_started_again_goes_on_and_a_lost_chief_ends_all(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + MODEL
        + """
@tf.function
def pid():
    count.assign_add(1)
    return os.getpid()

while True:
    print(coordinator.schedule(pid).fetch(), int(count), flush=True)
    time.sleep(0.01)
"""
    )
    with started(path) as tasks:
        worker, server, chief = tasks
        assert chief.stdout.readline().split() == [str(worker.pid), "1"]
        worker.kill()
        worker.communicate()
        again = start(path, "worker", worker.cluster)
        tasks.append(again)
        lines = iter(chief.stdout.readline, "")
        number, count = next(line.split() for line in lines if str(again.pid) in line)
        assert int(number) == again.pid and int(count) > 1
        chief.kill()
        assert "the chief is lost" in server.communicate(timeout=hangs.SECONDS)[1]
        assert "the chief is lost" in again.communicate(timeout=hangs.SECONDS)[1]
        assert (server.returncode, again.returncode) == (1, 1)


@pytest.mark.slow
def test_interrupted_fetch_cancels_the_function_and_later_results_are_their_own(
    tmp_path, transport
):
    found, errors = results(
        tmp_path,
        """
import sys
import threading

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores the signal

@tf.function
def waits(number):
    open(f"begun{number}", "w").close()
    while not os.path.exists(f"go{number}"):
        time.sleep(0.01)
    return "old"

@tf.function
def echo(value):
    return value

def interrupt(number):
    while not (os.path.exists(f"begun{number}") and waits_for_result() and waits_for_result()):
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def waits_for_result():
    time.sleep(0.05)
    frame = sys._current_frames()[threading.main_thread().ident]
    if frame.f_code.co_name == "get":
        return True
    while frame is not None and frame.f_code.co_name != "receive":
        frame = frame.f_back
    return frame is not None

got, caught = [], 0
for number in range(3):
    value = coordinator.schedule(waits, args=(number,))
    threading.Thread(target=interrupt, args=(number,)).start()
    try:
        value.fetch()
    except KeyboardInterrupt:
        caught += 1
    open(f"go{number}", "w").close()
    coordinator.join()
    got.append(coordinator.fetch([coordinator.schedule(echo, args=(n,)) for n in range(4)]))
report(got=got, caught=caught)
""",
        workers=1,
    )
    assert found == {"got": [[0, 1, 2, 3]] * 3, "caught": 3}
    assert "runs again" not in errors


def test_second_chief_is_refused_and_the_cluster_continues(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + """
@tf.function
def one():
    return 1

total = 0
while not os.path.exists("stop"):
    total += coordinator.schedule(one).fetch()
    print(total, flush=True)
"""
    )
    with started(path) as tasks:
        chief = tasks[-1]
        assert chief.stdout.readline() == "1\n"
        tasks.append(start(path, "chief", chief.cluster))
        _, errors = tasks[-1].communicate(timeout=hangs.SECONDS)
        assert "FailedPreconditionError: the server already serves another chief" in errors
        assert chief.poll() is None
        (tmp_path / "stop").touch()
        ended = [task.communicate(timeout=hangs.SECONDS) for task in tasks[:3]]
        assert [task.returncode for task in tasks[:3]] == [0, 0, 0], ended


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_evaluator_of_a_cluster_evaluates_checkpoints_and_delays_no_task(tmp_path, named):
    """The cluster may name the evaluator's address, at which nobody needs to listen."""
    path = tmp_path / "script.py"
    path.write_text(
        "import json\n"
        + BEGIN
        + """
with strategy.scope():
    weight = tf.Variable(0.0)
checkpoint = tf.train.Checkpoint(weight=weight)

@tf.function
def step():
    weight.assign_add(1.0)
    return weight

if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
    while not (saved := tf.train.latest_checkpoint("saved")):
        time.sleep(0.02)
    checkpoint.restore(saved)
    print(float(strategy.run(lambda: weight * 2)), coordinator.schedule(step).fetch())
else:
    for _ in range(4):
        coordinator.schedule(step)
    coordinator.join()
    checkpoint.save("saved/ckpt")
    print(float(weight))
"""
    )
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {"ps": addresses[:1], "worker": addresses[1:2]}
    if named:
        cluster["evaluator"] = addresses[2:]
    with ending() as tasks:
        tasks += [start(path, job, cluster) for job in ("evaluator", "chief", "worker", "ps")]
        ended = [task.communicate(timeout=hangs.SECONDS) for task in tasks]
        assert [task.returncode for task in tasks] == [0] * 4, ended
    assert [out for out, _ in ended[:2]] == ["8.0 5.0\n", "4.0\n"]
    assert "this is the cluster's evaluator" in ended[0][1]


@pytest.mark.slow
def test_stopped_worker_is_lost_and_its_function_runs_on_another(tmp_path, transport, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_HEARTBEAT", "0.5")
    found, errors = results(
        tmp_path,
        """
from pycollective.distribute import task_links
task_links.HANDSHAKE_SECONDS = 2.0

@tf.function
def stops_once():
    index = tf.distribute.coordinator.experimental_get_current_worker_index()
    if index == 0:
        open("pid", "w").write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)
    return index

values = [coordinator.schedule(stops_once)]  # a worker does not return from its first call
while not os.path.exists("pid"):
    values.append(coordinator.schedule(stops_once))
coordinator.join()
report(indices=sorted({int(v.fetch()) for v in values}))
os.kill(int(open("pid").read()), signal.SIGKILL)
""",
    )
    assert found["indices"] == [1] and "it is stopped or cut off" in errors


@pytest.mark.slow
def test_lost_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path, transport):
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path)
        + MODEL
        + """
@tf.function
def add():
    count.assign_add(1)
    table.scatter_add(tf.IndexedSlices(np.ones((1, 4), np.float32), np.array([7])))
    return count

while True:
    begun = time.monotonic()
    print(begun, int(coordinator.schedule(add).fetch()), int(table.numpy()[7, 0]), flush=True)
    coordinator.join()
    time.sleep(0.002)
"""
    )
    with started(path) as tasks:
        _, server, chief = tasks

        def reach(least, since=0.0):
            """Return the first count of at least ``least`` from a step that began after ``since``."""
            for line in iter(chief.stdout.readline, ""):
                begun, count, _ = map(float, line.split())
                if count >= least and begun >= since:
                    return count
            raise AssertionError(chief.communicate()[1])

        index = tmp_path / "saved" / "ps-0" / "index.json"

        def written():
            return index.stat().st_mtime_ns if index.exists() else 0

        before = reach(100)
        for _ in range(2):  # the second snapshot from here on has this count
            last, until = written(), time.monotonic() + 60
            while written() == last and time.monotonic() < until:
                time.sleep(0.01)
        server.kill()
        server.communicate()
        killed = time.monotonic()
        tasks.append(start(path, "ps", server.cluster))
        assert reach(0, since=killed) > before, "the counter is that of the snapshot"
        assert reach(before + 200) >= before + 200


@pytest.mark.slow
def test_coordinator_that_is_started_again_goes_on_from_its_checkpoint(tmp_path, transport):
    script = (
        MODEL
        + """
checkpoint = tf.train.Checkpoint(table=table, count=count, optimizer=optimizer)
manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=1)
if tf.train.latest_checkpoint("saved"):
    checkpoint.restore(tf.train.latest_checkpoint("saved"))
begin, norm = int(count), float(np.abs(table.numpy()).sum())
iterator = iter(per_worker)
for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
manager.save()
saved = float(np.abs(table.numpy()).sum())
report(begin=begin, norm=norm, saved=saved, steps=int(optimizer.iterations))
"""
    )
    first, _ = results(tmp_path, script, servers=2)
    again, _ = results(tmp_path, script, servers=1)
    assert (first["begin"], first["steps"]) == (0, 20)
    assert (again["begin"], again["steps"]) == (20, 40)
    assert again["norm"] == pytest.approx(first["saved"]) and first["norm"] == 0


# Errors that are no losses, and losses that a call survives --------------------------------------------


@pytest.mark.slow
def test_results_without_any_worker_raise_and_the_next_worker_is_used(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + """
from pycollective.distribute import function_queue as module
module._NO_WORKER = 0.5

@tf.function
def one():
    return 1

print(coordinator.schedule(one).fetch(), flush=True)
input()
print(raised(lambda: coordinator.schedule(one).fetch()), flush=True)
input()
while coordinator._queue._workers[0].disconnected:
    time.sleep(0.05)
print(coordinator.schedule(one).fetch(), flush=True)
coordinator.join()
"""
    )
    with started(path) as tasks:
        worker, _, chief = tasks
        assert chief.stdout.readline() == "1\n"
        worker.kill()
        worker.communicate()
        let_continue(chief)
        assert chief.stdout.readline().startswith("UnavailableError: no worker has been connected")
        time.sleep(3)  # the chief notices several times that there is no worker
        tasks.append(start(path, "worker", worker.cluster))
        let_continue(chief)
        assert chief.stdout.readline() == "1\n", chief.communicate(timeout=hangs.SECONDS)
        _, errors = chief.communicate(timeout=hangs.SECONDS)
    assert chief.returncode == 0, errors


@pytest.mark.parametrize("recovers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unavailable_error_of_a_function_is_raised_once(tmp_path, recovers):
    begin = recovering(tmp_path) if recovers else BEGIN
    script = """
with strategy.scope():
    calls = tf.Variable(0)

@tf.function
def fails():
    calls.assign_add(1)
    raise tf.errors.UnavailableError("my service")

@tf.function
def one():
    return 1

value = coordinator.schedule(fails)
found = [raised(value.fetch), raised(coordinator.join), coordinator.schedule(one).fetch()]
coordinator.join()
report(found=found, calls=int(calls))
"""
    found, _ = results(tmp_path, script, begin=begin, servers=1, workers=1)
    error, again, one = found["found"]
    assert error == again and error.startswith("UnavailableError: my service (on /job:worker")
    assert (one, found["calls"]) == (1, 1)


def test_function_that_calls_sys_exit_is_an_error_and_ends_no_worker(tmp_path):
    script = """
import sys

@tf.function
def leaves():
    sys.exit(3)

@tf.function
def pid():
    return os.getpid()

before = coordinator.schedule(pid).fetch()
found = raised(coordinator.schedule(leaves).fetch)
raised(coordinator.join)
report(found=found, same=coordinator.schedule(pid).fetch() == before)
"""
    found, _ = results(tmp_path, script, servers=1, workers=1)
    assert "leaves called sys.exit(3) on a worker" in found["found"]
    assert found["same"]


def test_iterators_that_the_program_keeps_go_on_and_others_are_dropped(tmp_path):
    script = """
per_worker = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(100))

@tf.function
def element(iterator):
    return next(iterator)

iterators = [iter(per_worker) for _ in range(12)]
rounds = [[int(coordinator.schedule(element, (i,)).fetch()) for i in iterators] for _ in range(2)]
del iterators[1:]
rounds.append([int(coordinator.schedule(element, (i,)).fetch()) for i in iterators])
report(rounds=rounds)
"""
    found, _ = results(tmp_path, script, servers=1, workers=1)
    assert found["rounds"] == [[0] * 12, [1] * 12, [2]]


@pytest.mark.slow
def test_join_with_a_timeout_does_not_wait_for_a_lost_server(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path)
        + """
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def add():
    total.assign_add(1.0)

for _ in range(50):  # until the server has written a snapshot with the variable
    coordinator.schedule(add).fetch()
    time.sleep(0.01)
print("ready", flush=True)
input()
coordinator.schedule(add)
print(raised(lambda: coordinator.join(timeout=0.5)), coordinator.done(), flush=True)
coordinator.join()
print(coordinator.done(), flush=True)
"""
    )
    with started(path) as tasks:
        _, server, chief = tasks
        assert chief.stdout.readline() == "ready\n"
        server.kill()
        server.communicate()
        let_continue(chief)
        line = chief.stdout.readline()
        assert line.startswith("DeadlineExceededError: join: ") and line.endswith(" False\n"), line
        tasks.append(start(path, "ps", server.cluster))
        out, errors = chief.communicate(timeout=hangs.SECONDS)
    assert out == "True\n", errors


@pytest.mark.slow
def test_chief_uses_a_server_that_is_started_again(tmp_path, transport):
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path)
        + """
with strategy.scope():
    total = tf.Variable(0.0)
    table = tf.Variable(np.zeros((5000, 4), np.float32))

@tf.function
def add():
    total.assign_add(1.0)

for _ in range(50):  # until the server has written a snapshot with the variables
    coordinator.schedule(add).fetch()
    time.sleep(0.01)
for what in ("assign", "lookup", "describe", "create"):
    print("ready", flush=True)
    input()
    if what == "assign":
        total.assign(5.0)
    elif what == "lookup":
        print(tf.nn.embedding_lookup(table, [7]).shape, end=" ")
    elif what == "describe":
        print("variables" in strategy.describe(), end=" ")
    else:
        with strategy.scope():
            print(float(tf.Variable(2.0)), end=" ")
    coordinator.schedule(add).fetch()
    print(what, float(total) - (6 if what == "assign" else 0) == 0, flush=True)
    time.sleep(0.5)  # a snapshot
"""
    )
    said = []
    with started(path) as tasks:
        _, server, chief = tasks
        for _ in range(4):
            assert chief.stdout.readline() == "ready\n", chief.communicate()[1]
            server.kill()
            server.communicate()
            server = start(path, "ps", server.cluster)
            tasks.append(server)
            let_continue(chief)
            said.append(chief.stdout.readline())
        _, errors = chief.communicate(timeout=hangs.SECONDS)
    assert chief.returncode == 0, errors
    assert said == [
        "assign True\n",
        "(1, 4) lookup False\n",
        "True describe False\n",
        "2.0 create False\n",
    ]


TWO_TOTALS = """
with strategy.scope():
    totals = [tf.Variable(0.0), tf.Variable(0.0)]

@tf.function
def add():
    for total in totals:
        total.assign_add(1.0)

for _ in range(50):  # until the servers have written snapshots with the variables
    coordinator.schedule(add).fetch()
    time.sleep(0.01)
print("ready", flush=True)
input()
def schedule():
    return coordinator.schedule(add)
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_port", [True, False])
def test_server_0_that_is_lost_while_the_only_worker_is_absent_goes_on(tmp_path, has_port):
    """Only server 0 knows the address of a worker that has begun again.

    If the worker has a port, the chief may wait for it while the server is lost.
    """
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path)
        + f"has_port = {has_port}"
        + """
from pycollective.distribute.server import Chief
find = Chief.find
if has_port:
    Chief.find = lambda chief, number, seconds: find(chief, number, 30.0)

with strategy.scope():
    total = tf.Variable(0)

@tf.function
def add():
    total.assign_add(1)

coordinator.schedule(add).fetch()
print("ready", flush=True)
input()
for _ in range(20):
    coordinator.schedule(add)
coordinator.join()
print(int(total) > 19)
"""
    )
    ports = free_ports(2)
    cluster = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": ["127.0.0.1:0"]}
    if has_port:
        cluster["worker"] = [f"127.0.0.1:{ports[1]}"]
    with ending() as tasks:
        tasks += [start(path, job, cluster) for job in ("worker", "ps", "chief")]
        worker, server, chief = tasks
        assert chief.stdout.readline() == "ready\n", chief.communicate()
        worker.kill()
        worker.communicate()
        let_continue(chief)
        assert any("runs again on another worker" in line for line in chief.stderr)
        time.sleep(0.5)  # the chief asks server 0, and waits for the worker if that has a port
        server.kill()
        server.communicate()
        tasks += [start(path, job, cluster) for job in ("worker", "ps")]
        out, errors = chief.communicate(timeout=hangs.SECONDS)
    assert out == "True\n", errors


@pytest.mark.slow
def test_server_0_that_is_lost_before_the_chief_asks_for_a_later_worker_goes_on(tmp_path):
    """The worker tells its address to the server that is started again, too."""
    path = tmp_path / "script.py"
    path.write_text(
        """
from pycollective.distribute.server import Server
work = Server.work
def waits_for_the_chief(*args):
    print("waits", flush=True)
    work(*args)
Server.work = waits_for_the_chief
"""
        + recovering(tmp_path)
        + """
with strategy.scope():
    total = tf.Variable(0)

@tf.function
def number():
    total.assign_add(1)
    return tf.distribute.coordinator.experimental_get_current_worker_index()

print("first", coordinator.schedule(number).fetch(), flush=True)
while 1 not in coordinator.fetch([coordinator.schedule(number) for _ in range(4)]):
    time.sleep(0.02)
"""
    )
    ports = free_ports(2)
    cluster = {
        "ps": [f"127.0.0.1:{ports[0]}"],
        "worker": [f"127.0.0.1:{ports[1]}", "127.0.0.1:0"],
    }
    with ending() as tasks:
        tasks += [start(path, job, cluster) for job in ("worker", "ps", "chief")]
        _, server, chief = tasks
        assert chief.stdout.readline() == "first 0\n", chief.communicate()
        chief.send_signal(signal.SIGSTOP)
        later = start(path, "worker", cluster, index=1)
        tasks.append(later)
        assert later.stdout.readline() == "waits\n", later.communicate()
        server.kill()
        server.communicate()
        tasks.append(start(path, "ps", cluster))
        chief.send_signal(signal.SIGCONT)
        _, errors = chief.communicate(timeout=hangs.SECONDS)
    assert chief.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests", [pytest.param(2, id="the chief finds it"), pytest.param(8, id="a worker finds it")]
)
def test_server_that_is_lost_again_while_a_task_finds_its_variables_goes_on(
    tmp_path, transport, requests
):
    """The server ends at a request for a variable; the chief and the worker send 6 each."""
    path = tmp_path / "script.py"
    path.write_text(
        """
import os
from pycollective.distribute.server_store import Store
create, left = Store._create, [int(os.environ.get("REQUESTS", 1000))]
def ends(self, *rest):
    left[0] -= 1
    if not left[0]:
        os._exit(1)
    return create(self, *rest)
Store._create = ends
"""
        + recovering(tmp_path)
        + """
with strategy.scope():
    every = [tf.Variable(0) for _ in range(6)]

@tf.function
def add():
    for variable in every:
        variable.assign_add(1)

coordinator.schedule(add).fetch()
time.sleep(1)  # for a snapshot
print("ready", flush=True)
input()
for _ in range(5):
    coordinator.schedule(add)
coordinator.join()
print(*map(int, every))
"""
    )
    with started(path) as tasks:
        _, server, chief = tasks
        assert chief.stdout.readline() == "ready\n", chief.communicate()
        server.kill()
        server.communicate()
        let_continue(chief)
        ends = start(path, "ps", chief.cluster, REQUESTS=str(requests))
        tasks.append(ends)
        assert ends.wait(timeout=hangs.SECONDS) == 1, ends.communicate()
        tasks.append(start(path, "ps", chief.cluster))
        out, errors = chief.communicate(timeout=hangs.SECONDS)
    assert out == "6 6 6 6 6 6\n", errors


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True])
def test_two_servers_lost_at_once_go_on_from_their_snapshots(tmp_path, transport, reads):
    """The loss is noticed by a scheduled function, or by a read of the chief."""
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path)
        + TWO_TOTALS
        + f"""
before = [float(total) for total in totals] if {reads} else [50, 50]
for _ in range(50):
    schedule()
coordinator.join()
print(all(b + 30 < float(t) < b + 51 for b, t in zip(before, totals)), len(before))
"""
    )
    with started(path, servers=2) as tasks:
        chief = tasks[-1]
        assert chief.stdout.readline() == "ready\n", chief.communicate()
        for server in tasks[1:3]:
            server.kill()
        for server in tasks[1:3]:
            server.communicate()
        let_continue(chief)
        for index in (1, 0):  # not in the order in which the chief looks for them
            tasks.append(start(path, "ps", chief.cluster, index))
        out, errors = chief.communicate(timeout=hangs.SECONDS)
    assert out == "True 2\n", errors
    assert errors.count("is back") == 2, errors


@pytest.mark.slow
def test_two_servers_lost_at_once_raise_unavailable_error_from_every_call(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + TWO_TOTALS
        + """
for call in (schedule, coordinator.join, coordinator.done, schedule):
    print(raised(call))
"""
    )
    with started(path, servers=2) as tasks:
        chief = tasks[-1]
        assert chief.stdout.readline() == "ready\n", chief.communicate()
        for server in tasks[1:3]:
            server.kill()
        for server in tasks[1:3]:
            server.communicate()
        let_continue(chief)
        out, errors = chief.communicate(timeout=hangs.SECONDS)
    assert out.count("UnavailableError: /job:ps/task:0 is lost") == 4, (out, errors)


@pytest.mark.slow
@pytest.mark.parametrize("all_of_them", [False, True])
def test_server_with_a_damaged_snapshot_uses_the_one_before_or_raises(tmp_path, all_of_them):
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path)
        + TWO_TOTALS
        + """
for call in (schedule, coordinator.join, coordinator.done):
    print(raised(call))
print(float(totals[0]) > 0 if coordinator._queue._fatal is None else raised(schedule))
"""
    )
    with started(path) as tasks:
        _, server, chief = tasks
        assert chief.stdout.readline() == "ready\n", chief.communicate()
        folder = tmp_path / "saved" / "ps-0"

        def files(index):
            variables = json.loads((folder / index).read_text())["variables"]
            return {f"{v['number']}.{v['version']}" for v in variables}

        while files("index.json") != {"0.51", "1.51"}:  # with all 50 updates
            time.sleep(0.01)
        server.kill()
        server.communicate()
        last, before = files("index.json"), files("previous.json")
        for file in folder.glob("?.*"):
            if all_of_them or file.name in last - before:
                file.write_bytes(file.read_bytes()[:-1])
        again = start(path, "ps", server.cluster)
        tasks.append(again)
        let_continue(chief)
        out, errors = chief.communicate(timeout=hangs.SECONDS)
        text = "no variables were restored" if all_of_them else "the last snapshot is damaged"
        assert text in again.communicate(timeout=hangs.SECONDS)[1]
    if all_of_them:
        assert (
            out.count("UnavailableError: /job:ps/task:0 is lost: the snapshot is damaged") == 3
        ), out
        assert "and restore a checkpoint" in out
    else:
        assert out == "None\nNone\nNone\nTrue\n", errors
