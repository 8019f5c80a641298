"""`PreemptionCheckpointHandler` in one process: the notice, the checkpoints and the exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

import pycollective as tf
from pycollective.cluster import ClusterSpec, GCEClusterResolver, SimpleClusterResolver
from pycollective.train import preemption

experimental = tf.distribute.experimental
Config = experimental.TerminationConfig


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Program:
    """A program that runs steps until its handler exits, and counts the steps."""

    def __init__(self, folder, config=None, resolver=None):
        self.v = tf.Variable(np.int64(0))
        self.folder = folder
        checkpoint = tf.train.Checkpoint(v=self.v)
        self.handler = experimental.PreemptionCheckpointHandler(
            resolver, checkpoint, folder, config
        )

    def step(self):
        self.v.assign_add(1)
        time.sleep(0.002)

    def run(self, preempt=lambda: None, seconds=20):
        """Run steps; call ``preempt`` after the third. Return the exit code; None after ``seconds``."""
        end = time.monotonic() + seconds
        for number in range(1_000_000):
            if number == 3:
                preempt()
            try:
                self.handler.run(self.step)
            except SystemExit as error:
                return error.code
            if time.monotonic() > end:
                return None

    def saved(self):
        """Return the step of the last checkpoint."""
        again = Program(self.folder, Config(lambda: False))
        again.handler._preempted_at = 0.0  # ends its watching thread
        assert int(again.v) == again.handler.total_run_calls
        return int(again.v)


def test_sigterm_saves_and_exits_with_42(tmp_path):
    program = Program(tmp_path)
    assert program.run(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 42
    assert program.saved() == int(program.v) == 4


def test_own_functions_watch_save_and_exit(tmp_path):
    class Ended(Exception):
        pass

    def end():
        raise Ended

    preempted, calls = threading.Event(), []

    def watcher():
        calls.append(1)
        if len(calls) == 2:
            raise OSError("it cannot be reached")  # the handler calls again
        return preempted.is_set()

    saves = []
    program = Program(tmp_path, Config(watcher, end, save_fn=lambda: saves.append(1)))
    with pytest.raises(Ended):
        program.run(preempted.set)
    assert saves == [1]
    assert not os.listdir(tmp_path)


def test_grace_period_continues_and_saves_at_its_beginning_and_its_end(tmp_path):
    preempted = threading.Event()
    program = Program(tmp_path, Config(preempted.is_set, grace_period=0.6))
    saves = []
    program.handler._manager.save, save = (
        lambda: saves.append(int(program.v)) or save(),
        program.handler._manager.save,
    )
    begin = time.monotonic()
    assert program.run(preempted.set) == 42
    assert time.monotonic() - begin < 15
    first, last = saves
    assert first < last == int(program.v)
    assert program.saved() == last


def test_error_of_a_step_is_raised_without_a_save(tmp_path):
    program = Program(tmp_path, Config(lambda: False))

    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program.handler.run(fails)
    with pytest.raises(KeyError), program.handler.watch_preemption_scope():
        fails()
    assert program.handler.total_run_calls == 0
    program.handler.save_checkpoint_if_preempted()
    assert not os.listdir(tmp_path)
    program.handler._preempted_at = 0.0
    with pytest.raises(SystemExit):
        program.handler.save_checkpoint_if_preempted()
    assert os.listdir(tmp_path)


def test_manager_and_scope_save_when_preempted(tmp_path):
    v = tf.Variable(3.0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=v), tmp_path, max_to_keep=2)

    def ended():
        raise InterruptedError

    handler = experimental.PreemptionCheckpointHandler(
        None, manager, termination_config=Config(exit_fn=ended)
    )
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(InterruptedError), handler.watch_preemption_scope():
        handler.save_checkpoint_if_preempted()
    assert manager.latest_checkpoint is not None


def test_new_handler_takes_over_an_unanswered_signal(tmp_path):
    """`run_elastic` may begin training anew between a signal and the next step."""
    before = signal.getsignal(signal.SIGTERM)
    Program(tmp_path)
    signal.raise_signal(signal.SIGTERM)
    program = Program(tmp_path)
    with pytest.raises(SystemExit):
        program.handler.run(program.step)
    assert program.saved() == 1
    later = Program(tmp_path)  # the signal has had its effect
    later.handler.run(later.step)
    later.handler._end_watch()
    assert signal.getsignal(signal.SIGTERM) is before


def test_handler_wrong_arguments_raise(tmp_path):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(0.0))
    handler = experimental.PreemptionCheckpointHandler
    with pytest.raises(tf.errors.InvalidArgumentError, match="a checkpoint_dir must be passed"):
        handler(None, checkpoint)
    with pytest.raises(TypeError, match="a Checkpoint or a CheckpointManager, not 'saved'"):
        handler(None, "saved")
    ps = SimpleClusterResolver(ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]}))
    with pytest.raises(NotImplementedError, match="does not support usage with"):
        handler(ps, checkpoint, tmp_path)
    errors = []

    def elsewhere():
        try:
            handler(None, checkpoint, tmp_path)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert "main thread" in errors[0]
    for wrong in ({"grace_period": -1}, {"exit_fn": 3}):
        with pytest.raises((ValueError, TypeError), match="grace_period|exit_fn"):
            Config(**wrong)


class _Metadata(BaseHTTPRequestHandler):
    """A stand-in for the metadata server, which fails at its first request."""

    event, requests = "NONE", 0

    def do_GET(self):
        kind = type(self)
        kind.requests += 1
        if kind.requests == 1 or self.headers["Metadata-Flavor"] != "Google":
            self.send_error(503 if kind.requests == 1 else 403)
            return
        known = self.path == "/computeMetadata/v1/instance/maintenance-event"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(kind.event.encode())

    def log_message(self, *_):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
def test_maintenance_on_compute_engine_that_terminates_saves_and_exits(
    tmp_path, monkeypatch, caplog
):
    class Metadata(_Metadata):
        pass

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
            resolver = GCEClusterResolver("p", "z", "g", 1, service=_NoInstances())
            program = Program(tmp_path, Config(grace_period=0.0), resolver)
            assert program.run(seconds=0.3) is None
            Metadata.event = "MIGRATE_ON_HOST_MAINTENANCE"
            assert program.run(seconds=0.1) is None
            Metadata.event = "TERMINATE_ON_HOST_MAINTENANCE"
            assert program.run() == 143
        finally:
            server.shutdown()
            thread.join(20)
    assert Metadata.requests > 3
    assert "will be called again: HTTP Error 503" in caplog.text
    assert program.saved() == int(program.v)
    default = Program(tmp_path, None, resolver).handler
    assert default._config.grace_period == 3600.0
    default._preempted_at = 0.0


class _NoInstances:
    """A stand-in for Compute Engine's service; its groups are empty."""

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, **_):
        return None
