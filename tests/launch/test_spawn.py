"""``pycollective.spawn``: results, errors of ranks, start methods, and processes left running."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from test_launcher import ENVIRONMENT, gone, pids

import pycollective as pc
from pycollective.launch import launcher

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

WAYS = [{"threads": True}, {"context": "fork"}]


class OwnError(Exception):
    def __init__(self, text, code):
        super().__init__(text, code)
        self.code = code


def total(comm, factor=1.0):
    return comm.all_reduce(np.full(3, comm.rank * factor))


def nested(comm, data):
    return {"rank": comm.rank, "given": data, "arrays": [np.arange(comm.rank), (None, "text")]}


def large(comm):
    return np.full(1 << 18, comm.rank)


def raises(comm):
    if comm.rank == 1:
        raise OwnError("the reason", 7)
    comm.barrier()


def interrupts(comm):
    if comm.rank == 1:
        signal.raise_signal(signal.SIGINT)
    comm.barrier()


def is_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def exits(comm):
    if comm.rank == 1:
        sys.exit(3)
    comm.barrier()


def ends_at_once(comm):
    if comm.rank == 1:
        os._exit(0)
    comm.barrier()


@pytest.mark.parametrize("how", WAYS)
def test_spawn_returns_results_in_rank_order(how):
    results = pc.spawn(nested, 3, {"x": [1, 2.5]}, **how)
    assert [one["rank"] for one in results] == [0, 1, 2]
    assert [one["given"] for one in results] == [{"x": [1, 2.5]}] * 3
    assert [len(one["arrays"][0]) for one in results] == [0, 1, 2]
    assert results[2]["arrays"][1] == (None, "text")


def test_spawn_result_beyond_a_pipe_arrives_whole():
    results = pc.spawn(large, 2, context="fork")
    assert [(len(x), int(x.sum())) for x in results] == [(1 << 18, 0), (1 << 18, 1 << 18)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "context",
    ["fork", *(pytest.param(c, marks=pytest.mark.slow) for c in ("spawn", "forkserver"))],
)
def test_spawn_start_methods_and_transports_give_one_group(context, transport):
    for y in pc.spawn(total, 2, 2.0, context=context, transport=transport):
        np.testing.assert_array_equal(y, [2.0, 2.0, 2.0])


def transport_of(comm):
    return comm._group.transport


def test_spawn_takes_the_transport_of_the_environment(monkeypatch):
    assert pc.spawn(transport_of, 2, context="fork") == ["shared memory"] * 2
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    assert pc.spawn(transport_of, 2, context="fork") == ["TCP"] * 2
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "thread")
    with pytest.raises(ValueError, match="PYCOLLECTIVE_TRANSPORT=thread, but processes use"):
        pc.spawn(transport_of, 2)


@pytest.mark.parametrize("how", WAYS)
def test_spawn_rank_raises_its_error_with_rank_and_traceback(how):
    with pytest.raises(OwnError, match="the reason") as caught:
        pc.spawn(raises, 3, **how)
    assert caught.value.code == 7
    cause = caught.value.__cause__
    assert isinstance(cause, pc.RankError)
    assert (cause.rank, cause.exitcode) == (1, None)
    assert 'raise OwnError("the reason", 7)' in str(cause)


@pytest.mark.parametrize("how", [*WAYS, {"context": "fork", "transport": "tcp"}])
def test_spawn_rank_raises_ranks_that_wait_in_a_split_group_are_aborted(how, tmp_path):
    def work(comm):
        half = comm.split(comm.rank // 2)
        both = half.split(0)  # of these groups only the last one is kept
        del half
        if comm.rank == 0:
            raise OwnError("the reason", 7)
        try:
            both.barrier()
            both.barrier()
        except pc.CollectiveError as error:
            (tmp_path / str(comm.rank)).write_text(f"{type(error).__name__} {error}")
            raise
        comm.barrier()

    with pytest.raises(OwnError, match="the reason"):
        pc.spawn(work, 4, timeout=600, **how)
    said = (tmp_path / "1").read_text()
    assert said.startswith("AbortedError rank 0 raised ")
    assert said.endswith("OwnError: ('the reason', 7)")


def test_spawn_error_of_a_main_module_that_is_imported_again_keeps_its_class(tmp_path):
    (tmp_path / "script.py").write_text("""
import pycollective as pc
class OwnError(Exception): pass
def work(comm):
    raise OwnError("of a script")
if __name__ == "__main__":
    try:
        pc.spawn(work, 1, context="spawn")
    except OwnError as error:
        print(error, error.__cause__.rank)
""")
    command = [sys.executable, "script.py"]
    out = subprocess.check_output(command, cwd=tmp_path, env=ENVIRONMENT, text=True, timeout=60)
    assert out == "of a script 0\n"


def test_spawn_error_that_cannot_be_pickled_is_a_rank_error():
    def work(comm):
        class LocalError(Exception):
            pass

        raise LocalError("of a function")

    with pytest.raises(pc.RankError, match="rank 0 raised .*LocalError: of a function") as caught:
        pc.spawn(work, 1, context="fork")
    assert caught.value.rank == 0
    assert 'raise LocalError("of a function")' in caught.value.traceback


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("work", "text", "code"),
    [
        (is_killed, "rank 1 was killed by SIGKILL", -9),
        (exits, "rank 1 called sys.exit(3)", 3),
        (ends_at_once, "rank 1 exited with status 0 before its function returned", 0),
    ],
)
def test_spawn_rank_that_ends_early_is_named(work, text, code, transport):
    with pytest.raises(pc.RankError) as caught:
        pc.spawn(work, 2, context="fork", transport=transport)
    assert str(caught.value).splitlines()[0] == text
    assert (caught.value.rank, caught.value.ranks, caught.value.exitcode) == (1, (1,), code)


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "reap"])
def test_spawn_whose_program_takes_the_exit_codes_returns_the_results(tmp_path, where, handler):
    (tmp_path / "script.py").write_text(f"""
import contextlib, os, signal, threading, time
import pycollective as pc
def reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
def spawn():
    print(pc.spawn(lambda comm: comm.rank, 2, context="fork"), flush=True)
signal.signal(signal.SIGCHLD, {handler})
if "{where}" == "main":
    spawn()
else:
    thread = threading.Thread(target=spawn)
    thread.start()
    while thread.is_alive():
        thread.join(0.01)
assert signal.getsignal(signal.SIGCHLD) == {handler}
""")
    command = [sys.executable, "script.py"]
    out = subprocess.check_output(command, cwd=tmp_path, env=ENVIRONMENT, text=True, timeout=30)
    assert out == "[0, 1]\n"


def test_spawn_thread_that_calls_sys_exit_is_a_rank_error():
    with pytest.raises(pc.RankError, match=r"rank 1 called sys.exit\(3\)"):
        pc.spawn(exits, 2, threads=True)


def test_spawn_rank_that_ignores_the_failure_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "GRACE", 0.2)

    def work(comm):
        if comm.rank == 1:
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            raise OwnError("now", 1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "0").write_text(str(os.getpid()))
        time.sleep(100)

    with pytest.raises(OwnError):
        pc.spawn(work, 2, context="fork")
    assert gone(int((tmp_path / "0").read_text()))


@pytest.mark.parametrize("status", [None, 0, 5])
def test_spawn_forked_child_that_leaves_the_function_sends_no_result(status):
    def work(comm):
        child = os.fork()
        if child == 0 and status is None:
            return "the child's"
        if child == 0:
            sys.exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        comm.barrier()
        return comm.rank, ended

    assert pc.spawn(work, 2, context="fork") == [(0, status or 0), (1, status or 0)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_spawn_leaves_no_descriptor(transport):
    before = os.listdir("/proc/self/fd")
    results = pc.spawn(total, 2, transport=transport, context="fork")
    with pytest.raises(OwnError):
        pc.spawn(raises, 2, transport=transport, context="fork")
    assert len(results) == 2
    assert os.listdir("/proc/self/fd") == before


def test_spawn_interrupt_of_one_rank_is_that_ranks_error():
    with pytest.raises(KeyboardInterrupt) as caught:
        pc.spawn(interrupts, 2, context="fork")
    assert caught.value.__cause__.rank == 1


def interrupted_in_a_call(comm):
    if comm.rank == 0:
        comm.barrier()  # raises AbortedError
    else:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            comm.recv(np.ones(1), 0)
        finally:
            time.sleep(0.5)  # the other rank ends first


def test_spawn_interrupt_in_a_call_is_the_error_also_if_another_rank_ends_first():
    with pytest.raises(KeyboardInterrupt) as caught:
        pc.spawn(interrupted_in_a_call, 2, context="fork")
    assert caught.value.__cause__.rank == 1


def test_spawn_function_that_cannot_be_pickled_says_what_to_do():
    with pytest.raises(
        TypeError, match=r"started by 'spawn' .*lambda.*top of a module, or give con"
    ):
        pc.spawn(lambda comm: comm.rank, 2, context="spawn")
    assert pc.spawn(lambda comm: comm.rank, 2, context="fork") == [0, 1]


def test_spawn_result_that_cannot_be_pickled_says_what_to_do():
    with pytest.raises(
        TypeError, match="the result, a function, cannot be pickled .* threads=True"
    ):
        pc.spawn(lambda comm: lambda: 1, 2, context="fork")


class CannotBeRead:
    def __reduce__(self):
        return int, ("x",)


def test_spawn_result_that_cannot_be_unpickled_names_the_rank():
    text = r"result of rank 1 cannot be unpickled \(ValueError: .*'x'\): return arrays"
    with pytest.raises(TypeError, match=text) as caught:
        pc.spawn(lambda comm: CannotBeRead() if comm.rank else None, 2, context="fork")
    assert isinstance(caught.value.__cause__, pc.RankError) and caught.value.__cause__.rank == 1


def test_spawn_in_a_daemon_says_what_to_do():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        with pytest.raises(RuntimeError, match="a daemon .* threads=True"):
            pool.apply(pc.spawn, (total, 2))
        assert len(pool.apply(pc.spawn, (total, 2), {"threads": True})) == 2


def test_spawn_wrong_arguments_are_refused():
    for wrong, error, text in (
        ({"threads": True, "transport": "shm"}, TypeError, "are for processes"),
        ({"context": "thread"}, ValueError, "context must be 'fork', 'spawn'"),
        ({"transport": "mpi"}, ValueError, "transport='mpi', but processes use"),
        ({"timeout": 0}, ValueError, "timeout must be a positive"),
    ):
        with pytest.raises(error, match=text):
            pc.spawn(total, 2, **wrong)
    with pytest.raises(ValueError, match="n must be a number from 1"):
        pc.spawn(total, 0)
    with pytest.raises(TypeError, match="fn must be a function of a communicator, not 3"):
        pc.spawn(3, 2)


def times_out(comm):
    if comm.rank == 0:
        comm.barrier()
    else:
        comm.recv(source=0, shape=1, dtype="u1")


def test_spawn_timeout_is_that_of_the_communicators():
    with pytest.raises(pc.CollectiveTimeoutError):
        pc.spawn(times_out, 2, context="fork", timeout=0.2)


def inner(comm):
    return [float(y[0]) for y in pc.spawn(total, 2, context="fork")]


def test_spawn_within_a_rank_makes_another_group():
    assert pc.spawn(inner, 2, context="fork") == [[1.0, 1.0]] * 2


INTERACTIVE = """
import multiprocessing, pycollective as pc
multiprocessing.set_start_method("spawn")
def work(comm): return comm.rank

print(pc.spawn(work, 2))
try: pc.spawn(work, 2, context="spawn")
except TypeError as error: print(error)

"""


def test_spawn_in_an_interactive_session_forks_or_says_what_to_do(tmp_path):
    done = subprocess.run(
        [sys.executable, "-i"],
        cwd=tmp_path, input=INTERACTIVE, env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first == "[0, 1]"
    assert "Functions and classes of a notebook or an interactive session" in second
    assert "context='fork'" in second


def test_rank_error_is_pickled_whole():
    copy = pickle.loads(pickle.dumps(pc.RankError("t", rank=2, exitcode=-9, traceback="x")))
    assert (str(copy), copy.rank, copy.exitcode) == ('t\n"""\nx\n"""', 2, -9)


WAITING = """
import os, signal, subprocess, sys, time
import pycollective as pc
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without
def work(comm):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
    if comm.rank == 0:
        comm.barrier()
    time.sleep(100)
if __name__ == "__main__":
    pc.spawn(work, 2, context=sys.argv[1])
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_spawn_interrupted_or_killed_leaves_no_process(tmp_path, context, number):
    (tmp_path / "script.py").write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "script.py", context],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = pids([process.stdout.readline(), process.stdout.readline()])
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert len(found) == 4
    assert all(gone(pid) for pid in found)


def raises_a_surrogate(comm):
    raise ValueError("cannot read data\udce9.txt")


@pytest.mark.parametrize("threads", [True, False])
def test_error_text_without_an_encoding_aborts_the_group(threads):
    with pytest.raises(ValueError, match="data"):
        pc.spawn(raises_a_surrogate, 2, threads=threads)


def raises_of_an_unknown_module(comm):
    module = types.ModuleType("hidden_module_of_a_rank")
    exec("class Error(Exception): pass", module.__dict__)
    sys.modules[module.__name__] = module
    raise module.Error("the real error")


def test_error_of_a_class_that_the_parent_lacks_is_a_rank_error():
    with pytest.raises(pc.RankError, match="the real error"):
        pc.spawn(raises_of_an_unknown_module, 2)


def test_workers_are_no_threads():
    """Each thread would otherwise train alone."""

    def work(comm):
        pc.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])

    with pytest.raises(
        RuntimeError, match="this thread is one of 2 ranks of spawn, but workers are proc"
    ):
        pc.spawn(work, 2, threads=True)
    pc.spawn(work, 1, threads=True)
