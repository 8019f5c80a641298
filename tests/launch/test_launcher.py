"""``pycollective run``: output, signals, exit codes, and processes left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from fast_cases import some_fast

from pycollective.launch import launcher
from pycollective.launch.ended import Ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # programs seldom have it


def start(tmp_path, ranks, body, *options, **how):
    (tmp_path / "script.py").write_text("import os, signal, sys, time\n" + body)
    return subprocess.Popen(
        [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), *options, "script.py"],
        cwd=tmp_path,
        **{
            "env": ENVIRONMENT,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **how,
        },
    )


def impatiently(tmp_path, ranks, body):
    """Run a script whose launcher waits less for processes that do not end."""
    (tmp_path / "script.py").write_text(f"import os, signal, sys, time\n{body}")
    command = (
        "import sys; from pycollective.launch import launcher; "
        "launcher.GRACE = launcher._ORPHAN_SECONDS = 0.3; "
        f"sys.exit(launcher.run([sys.executable, 'script.py'], {ranks}))"
    )
    return subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def gone(pid, seconds=30):
    """Return True if a process ends within the time limit (a zombie has ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def pids(lines):
    return [int(word) for line in lines for word in line.split() if word.isdigit()]


def read_all(descriptor):
    data = b""
    while True:
        try:
            more = os.read(descriptor, 4096)
        except OSError:  # the other end of the terminal is closed
            more = b""
        if not more:
            return data.decode().replace("\r\n", "\n")
        data += more


def on_a_terminal(tmp_path, ranks, body, *options):
    """Run with a terminal as output and error; return the status and the text on it."""
    ours, theirs = pty.openpty()
    process = start(tmp_path, ranks, body, *options, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = read_all(ours)
    os.close(ours)
    return process.wait(60), text


@pytest.mark.parametrize(
    ("options", "prefixed"), [((), True), (("--prefix", "never"), False)]
)  # fmt: skip
def test_on_a_terminal_lines_have_their_rank_unless_the_prefix_is_never(
    tmp_path, options, prefixed
):
    status, text = on_a_terminal(tmp_path, 2, "print('a'); print('b', file=sys.stderr)", *options)
    assert status == 0
    plain = ["a", "a", "b", "b"]
    marked = ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert sorted(text.splitlines()) == (marked if prefixed else plain)


@pytest.mark.slow
def test_on_a_terminal_unfinished_lines_are_shown(tmp_path):
    body = """
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
    time.sleep(1.0)  # the launcher shows an unfinished line after a moment
if os.environ["PYCOLLECTIVE_RANK"] == "0":
    print("name? ", end="", flush=True)
    open("asked", "w").close()
    wait_for("counted")
    print("Ada")
else:
    wait_for("asked")
    print("10 %", end="\\r", flush=True)
    print("20 %", end="\\r", flush=True)
    open("counted", "w").close()
"""
    status, text = on_a_terminal(tmp_path, 2, body)
    assert status == 0
    assert text == "[0] name? \n[1] 10 %\r[1] 20 %\r[0] Ada\n"


def test_in_a_pipe_lines_are_whole_and_plain(tmp_path):
    body = """
for i in range(50):
    for piece in ("begin", " " * 5000, "\\r", "end\\n"):
        os.write(1, piece.encode())
os.write(2, b"without an end")
"""
    out, err = start(tmp_path, 3, body, text=False).communicate(timeout=60)
    assert out == (b"begin" + b" " * 5000 + b"\rend\n") * 150
    assert err == b"without an end\n" * 3


def test_in_a_pipe_a_long_line_stays_whole(tmp_path):
    done = start(tmp_path, 1, "print('x' * 1_500_000); print('y' * 20_000_000, end='')")
    out, _ = done.communicate(timeout=60)
    assert [len(line) for line in out.splitlines()] == [1_500_000, 20_000_000]
    assert out.endswith("y\n")


def test_interrupted_launcher_does_not_wait_for_the_reader_of_its_output(tmp_path):
    """The output is more than a pipe holds, and nobody reads it."""
    (tmp_path / "script.py").write_text("for _ in range(1000): print('x' * 1000, flush=True)")
    command = (
        "import sys; from pycollective.launch import launcher; launcher.GRACE = 0.3; "
        "sys.exit(launcher.run([sys.executable, 'script.py'], 2))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == "x"
        process.send_signal(signal.SIGTERM)
        said = process.stderr.readline()
        assert re.fullmatch(r"pycollective run: rank [01] was killed by SIGTERM\n", said), said
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_sigchld_ignored_by_the_caller_the_status_is_still_that_of_the_ranks(tmp_path):
    (tmp_path / "script.py").write_text("import sys; sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", "run", "-n", "2", "script.py"],
        cwd=tmp_path, env=ENVIRONMENT, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 3


def test_chief_that_ends_at_once_ends_its_cluster(tmp_path):
    (tmp_path / "script.py").write_text("""
import json, os, time
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] != "chief":
    time.sleep(60)
""")
    command = (
        "import sys; from pycollective.launch import launcher; launcher.GRACE = 0.3; "
        "tasks = launcher.Tasks(1, 1); "
        "sys.exit(launcher.run([sys.executable, 'script.py'], tasks.size, group=tasks))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=40,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == "pycollective run: sending SIGTERM to running ranks: ranks 1, 2\n"


def test_output_reader_closes_ranks_are_ended(tmp_path):
    process = start(tmp_path, 2, "while True: print('x' * 1000)")
    process.stdout.read(5000)
    process.stdout.close()
    assert process.stderr.read().count("BrokenPipeError") >= 1
    assert process.wait(60) == 1
    process.stderr.close()


def test_output_reader_has_closed_before_a_line_the_status_is_that_of_the_ranks(tmp_path):
    process = start(tmp_path, 1, "sys.stdin.read(); print('x')", stdin=subprocess.PIPE)
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(tmp_path, 2, "print('x')", stdout=full)
        error = process.stderr.read()
    process.stderr.close()
    assert re.search("the output of the ranks was lost: .*No space left", error), error
    assert process.wait(60) == 1


def test_standard_input_goes_to_rank_0(tmp_path):
    body = "print(os.environ['PYCOLLECTIVE_RANK'], repr(sys.stdin.read()))"
    process = start(tmp_path, 2, body, stdin=subprocess.PIPE)
    out, _ = process.communicate("hello", timeout=60)
    assert sorted(out.splitlines()) == ["0 'hello'", "1 ''"]


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_with_closed_standard_streams_starts_the_ranks(tmp_path, closed):
    """A service may have no such streams. The group's memory must not get descriptors 0 to 2."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, pycollective as pc\n"
        "comm = pc.init()\n"
        "pathlib.Path(f'sum{comm.rank}').write_text(str(comm.all_reduce([1.0])))\n"
        "print('a line')\n"
    )
    command = f"exec {sys.executable} -m pycollective run -n 2 script.py {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0
    assert [(tmp_path / f"sum{rank}").read_text() for rank in (0, 1)] == ["[2.]"] * 2


def test_second_init_of_a_rank_says_that_the_process_has_joined(tmp_path):
    """A second call raises even after the first communicator was closed."""
    body = (
        "import pycollective as pc\n"
        "pc.init().close()\n"
        "try:\n    pc.init()\n"
        "except pc.CollectiveError as error:\n    print(error)\n"
    )
    out, _ = start(tmp_path, 1, body).communicate(timeout=60)
    assert "this process has already joined the group" in out


def test_secret_is_new_for_each_run_and_given_to_the_ranks(tmp_path):
    """Each run has another secret, in the ranks' environment and on no command line."""
    body = """
secret = os.environ["PYCOLLECTIVE_SECRET"]
lines = [open(f"/proc/{pid}/cmdline").read() for pid in (os.getpid(), os.getppid())]
assert not any(secret in line for line in lines)
print(secret)
"""
    process = start(tmp_path, 2, body, "--transport", "tcp")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    first, second = out.split()
    assert first == second
    assert len(first) == 64
    for group in launcher._Tcp(2), launcher._Tcp(2):
        other = group.environment_of(1)[0]["PYCOLLECTIVE_SECRET"]
        group.started()
        assert len(other) == 64
        assert other != first
        first = other


@pytest.mark.slow
def test_run_starts_a_module_or_a_program(tmp_path):
    (tmp_path / "thing.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [sys.executable, "-m", "pycollective", "run", "-n", "2"]
    for words, line in (
        (["-m", "thing", "-n", "--help"], "__main__ ['-n', '--help']"),
        (["--", "sh", "-c", 'echo "$PYCOLLECTIVE_SIZE"'], "2"),
        (["sh", "-c", "echo $#", "sh", "--", "x"], "2"),
    ):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [line] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_unhandled_signal_is_the_exit_status(tmp_path, number):
    process = start(tmp_path, 2, "print('ready', flush=True); time.sleep(60)")
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"was killed by {number.name}" in err


def test_launcher_stopped_stops_the_ranks(tmp_path):
    def state(pid):
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0]

    def becomes(pid, wanted):
        deadline = time.monotonic() + 30
        while (state(pid) in "T") != wanted and time.monotonic() < deadline:
            time.sleep(0.02)
        return (state(pid) in "T") == wanted

    process = start(tmp_path, 2, "print(os.getpid(), flush=True); time.sleep(60)")
    ranks = pids(process.stdout.readline() for _ in range(2))
    process.send_signal(signal.SIGTSTP)
    assert all(becomes(pid, True) for pid in (*ranks, process.pid))
    process.send_signal(signal.SIGCONT)
    assert all(becomes(pid, False) for pid in (*ranks, process.pid))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_third_interrupt_kills_the_ranks(tmp_path):
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    process = start(tmp_path, 2, body)
    assert [process.stdout.readline() for _ in range(2)] == ["on\n"] * 2
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    for _ in range(2):  # two signals become one if the launcher has not run between them
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "interrupted three times" in err


@pytest.mark.slow
def test_ranks_that_do_not_end_are_killed(tmp_path):
    body = """
print(os.getpid(), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["PYCOLLECTIVE_RANK"] == "1":
    while not (os.path.exists("ready0") and os.path.exists("ready2")):
        time.sleep(0.01)
    sys.exit(7)
open(f"ready{os.environ['PYCOLLECTIVE_RANK']}", "w").close()
time.sleep(60)
"""
    done = impatiently(tmp_path, 3, body)
    assert done.returncode == 7
    assert done.stderr.splitlines() == [
        "pycollective run: rank 1 exited with status 7",
        "pycollective run: sending SIGTERM to running ranks: ranks 0, 2",
        "pycollective run: sending SIGKILL to running ranks: ranks 0, 2",
        "pycollective run: then rank 0 was killed by SIGKILL, rank 2 was killed by SIGKILL",
    ]
    assert all(gone(pid) for pid in pids(done.stdout.splitlines()))


@pytest.mark.slow
def test_children_that_ranks_leave_behind_are_killed(tmp_path):
    body = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
"""
    done = impatiently(tmp_path, 2, body)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(gone(pid) for pid in pids(done.stdout.splitlines()))


def test_launcher_killed_ranks_end(tmp_path):
    body = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
    process = start(tmp_path, 2, body)
    running = pids(process.stdout.readline() for _ in range(2))
    assert len(running) == 4
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in running)
    process.stdout.close()
    process.stderr.close()


def test_the_watchdog_ends_with_the_launcher(tmp_path):
    process = start(tmp_path, 1, "print('on', flush=True); sys.stdin.read()", stdin=subprocess.PIPE)
    assert process.stdout.readline() == "on\n"
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        children = f.read().split()
    assert len(children) == 2
    process.communicate("", timeout=60)
    assert all(gone(int(pid)) for pid in children)


# Ranks that end before the rendezvous -------------------------------------------------------------

_JOINS = """
import pycollective as pc
rank = os.environ["PYCOLLECTIVE_RANK"]
open(f"started{rank}", "w").close()
while not all(os.path.exists(f"started{r}") for r in range(3)):  # a rank may start late
    time.sleep(0.01)
if rank == "WHO":
    END
try:
    comm = pc.init(join_timeout=100)
except pc.CollectiveError as error:
    print(rank, type(error).__name__, error, flush=True)
    sys.exit(9)
print(rank, comm.all_reduce([1.0])[0], flush=True)
"""


_ENDS = {
    "raise ValueError('mine')": ("exited with status 1", 1),
    "time.sleep(0.5); os.kill(os.getpid(), 9)": ("was killed by SIGKILL", 137),
    "sys.exit(0)": ("exited with status 0", 9),
}


# A rank that ends while another one is still in the call would be lost to that one.
_EXITS = """
open(f"done{rank}", "w").close()
while not all(os.path.exists(f"done{r}") for r in range(3)):
    time.sleep(0.01)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "who"),
    some_fast(
        [(end, who) for end in _ENDS for who in "02"],
        list(zip(_ENDS, "020", strict=True)),
    ),
)
def test_tcp_rank_that_ends_before_the_rendezvous_is_named_by_the_others(tmp_path, end, who):
    how, status = _ENDS[end]
    body = _JOINS.replace("WHO", who).replace("END", end)
    out, err = (process := start(tmp_path, 3, body, "--transport", "tcp")).communicate(timeout=90)
    assert process.returncode == status, err
    lines = sorted(out.splitlines())
    assert [line[0] for line in lines] == [r for r in "012" if r != who]
    for line in lines:
        assert "RendezvousError" in line
        # The other ranks also see the end of a rank that gives up.
        assert re.search(rf"rank \d \(process \d+\) {how}|exited with status 9", line), line
    assert any(re.search(rf"rank {who} \(process \d+\) {how} before all ranks", x) for x in lines)
    assert "SIGTERM" not in err


def test_tcp_rank_that_ends_after_the_rendezvous_is_no_error(tmp_path):
    body = _JOINS.replace("WHO", "none").replace("END", "pass") + _EXITS
    process = start(tmp_path, 3, body, "--transport", "tcp")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 3.0", "1 3.0", "2 3.0"]


def test_list_of_ended_ranks_has_the_first_that_failed_or_never_joined():
    writer = Ended.create(3, "127.0.0.1:1")
    reader = Ended(writer.descriptor, 3, "127.0.0.1:1")
    assert reader.rank_and_text is None
    reader.has_connected(1)
    writer.write(1, "rank 1 exited with status 0", failed=False)
    assert reader.rank_and_text is None
    writer.write(2, "rank 2 exited with status 0", failed=False)
    assert reader.rank_and_text == (
        2,
        "rank 2 exited with status 0 before all ranks were connected",
    )
    writer.write(1, "rank 1 exited with status 3", failed=True)
    assert reader.rank_and_text[0] == 2
    long = Ended.create(1, "127.0.0.1:1")
    long.write(0, "é" * 1000, failed=True)
    assert "é" * 100 in long.rank_and_text[1]
    for one in (writer, long):
        os.close(one.descriptor)


def test_list_of_ended_ranks_wrong_descriptor_is_none(tmp_path):
    """A program that a rank starts has the variable, but not the descriptor."""
    variable = "PYCOLLECTIVE_ENDED_FD"
    assert Ended.of_environment({}, 2, "a:1") is None
    for text in ("", "x", "-1", "99999", "9" * 30):
        assert Ended.of_environment({variable: text}, 2, "a:1") is None
    ended = Ended.create(2, "a:1")
    given = {variable: str(ended.descriptor)}
    assert Ended.of_environment(given, 2, "a:1") is not None
    # The survivors make another group.
    assert Ended.of_environment(given, 1, "a:1") is None
    assert Ended.of_environment(given, 2, "a:2") is None
    os.close(ended.descriptor)
    for content in (b"", b"hello", bytes(1000)):
        (tmp_path / "other").write_bytes(content)
        with open(tmp_path / "other", "r+b") as file:
            assert Ended.of_environment({variable: str(file.fileno())}, 2, "a:1") is None


def test_ranks_do_not_see_the_cluster_that_the_launcher_is_in(tmp_path):
    body = (
        "import pycollective as pc\nprint('TF_CONFIG' in os.environ, pc.init().all_reduce([1])[0])"
    )
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    process = start(tmp_path, 2, body, env={**ENVIRONMENT, "TF_CONFIG": cluster})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "False 2\nFalse 2\n")
    assert err == (
        "pycollective run: TF_CONFIG is removed from the ranks' environment: "
        "it describes another group\n"
    )


def test_launcher_in_a_process_of_mpirun_reports_that_its_group_is_another_one(tmp_path):
    """Each of the two processes of mpirun would compute alone with its ranks."""
    environment = {**ENVIRONMENT, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    process = start(tmp_path, 1, "print('runs')", env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "runs\n")
    assert err == (
        "pycollective run: Open MPI has started this process as one of several "
        "(OMPI_COMM_WORLD_SIZE=2), and the ranks started here are a group of their own. To make one "
        "group of all processes, start the program without pycollective run\n"
    )


def test_launcher_under_nohup_ignores_the_end_of_its_terminal(tmp_path):
    script = "import time; time.sleep(2); print('finished')"
    process = subprocess.Popen(
        [sys.executable, "-m", "pycollective", "run", "-n", "1", sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    time.sleep(1)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "finished\n")


def test_launcher_with_a_pipe_that_does_not_block_loses_no_line(tmp_path):
    script = "for i in range(30000): print('line', i)"
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen(
        [sys.executable, "-m", "pycollective", "run", "-n", "1", sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=write,
    )
    os.close(write)
    time.sleep(1)
    with os.fdopen(read) as output:
        assert len(output.readlines()) == 30000
    assert process.wait(30) == 0
