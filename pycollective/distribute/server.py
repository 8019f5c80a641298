"""`Server`: a parameter server or a worker in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import runpy
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from json import dumps, loads
from typing import Any, NoReturn

from pycollective import arguments, config
from pycollective.cluster import ports, rules
from pycollective.distribute.blas_threads import limit_to_share
from pycollective.distribute.server_connections import Servers
from pycollective.distribute.server_store import Store
from pycollective.distribute.snapshots import Snapshots
from pycollective.distribute.task_links import (
    JOIN_SECONDS,
    PURPOSE,
    Link,
    LinkLostError,
    ServerLostError,
    link_to,
    listen,
)
from pycollective.distribute.task_values import error_message, error_of
from pycollective.errors import CheckpointError, UnavailableError
from pycollective.launch.handshake import Channel, HandshakeError

_log = logging.getLogger("pycollective")

Answer = Callable[[dict[str, Any], list[Any]], tuple[dict[str, Any], list[Any]]]

_RETURN_SECONDS = 5.0
"""Seconds that a lost chief has to connect again: the network of a task may have been cut."""

_this_worker: list[Server] = []

_made_here: set[tuple[str, str]] = set()
"""The jobs of the servers that this process has made, and their addresses in the cluster."""


def worker_of_this_process() -> Server | None:
    """Return the worker's server that runs this program, or None."""
    return _this_worker[0] if _this_worker else None


def all_made_here(cluster: Any) -> bool:
    """Return True if this process has made the servers of all parameter servers and workers."""
    return all(
        (job, address) in _made_here
        for job in ("ps", "worker")
        for address in addresses_of(cluster, job)
    )


def addresses_of(cluster: Any, job: str) -> list[str]:
    """Return the addresses of a job's tasks."""
    return [cluster.task_address(job, number) for number in cluster.task_indices(job)]


def check_ports(cluster: Any) -> None:
    """Raise ValueError if a parameter server's address has port 0."""
    for address in addresses_of(cluster, "ps"):
        if not ports.has_port(address):
            raise ValueError(
                f"a parameter server has the address {address!r}: give it a port, at which the other "
                "tasks find it. Only a worker can choose its port"
            )


class Server:
    """A task of a cluster for `ParameterServerStrategy`: a parameter server, or a worker.

    The tasks of a cluster run one program. A parameter server stores variables. A worker runs the
    program as the chief does, up to the first `ClusterCoordinator.schedule`. It then has the chief's
    variables, functions and datasets, and runs the functions that the chief schedules.

    A program that makes all servers of its cluster itself needs none of their connections.
    `ParameterServerStrategy` then runs servers and workers as threads of the process.

    Parameters
    ----------
    server_or_cluster_def : ClusterSpec or dict
        The cluster: the addresses of the jobs ``"ps"`` and ``"worker"``, and perhaps ``"chief"``.
    job_name : {"ps", "worker"}
        This task's job.
    task_index : int
        This task's number in its job.
    protocol : str, optional
        Ignored.
    config : optional
        Ignored.
    start : bool
        True: call `start`.
    snapshot_dir, snapshot_seconds
        As for `ParameterServerStrategy`.

    Raises
    ------
    ValueError
        The cluster has no such task, or the task is neither a parameter server nor a worker. A
        parameter server's address has port 0.
    RendezvousError
        The address is taken, or is not a loopback address and there is no secret.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        snapshot_dir: str | None = None,
        snapshot_seconds: float = 60.0,
    ) -> None:
        if job_name not in ("ps", "worker"):
            raise ValueError(
                f"job_name is {job_name!r}: a Server is a task 'ps' or 'worker'. The chief makes a "
                "ParameterServerStrategy"
            )
        self._cluster = rules.validate(server_or_cluster_def, job_name, task_index)
        assert task_index is not None
        if job_name == "ps":
            check_ports(self._cluster)
        self.job_name, self.task_index = job_name, task_index
        self._address = self._cluster.task_address(job_name, task_index)
        _made_here.add((job_name, self._address))
        if job_name == "worker" and not ports.has_port(self._address):
            self._address = ports.reserved_address(ports.host_of(self._address))
        self._title = f"/job:{job_name}/task:{task_index}"
        snapshot_seconds = arguments.seconds("snapshot_seconds", snapshot_seconds)
        snapshots = None
        if snapshot_dir is not None and job_name == "ps":
            snapshots = Snapshots(
                os.path.join(arguments.path_of("snapshot_dir", snapshot_dir), f"ps-{task_index}")
            )
        self._store = Store(snapshots, snapshot_seconds)
        #: The connection to the chief that a worker serves, once there is one.
        self.chief: Link | None = None
        #: The last connection of the chief.
        self._newest: Link | None = None
        #: The run of the chief's program that a worker serves.
        self._chiefs_run: str | None = None
        #: A worker's connections to the parameter servers.
        self._servers: Servers | None = None
        self._end: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._connected = threading.Condition(self._lock)
        self._sockets: Any = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """The address of this task, with TensorFlow's prefix ``grpc://``."""
        return f"grpc://{self._address}"

    def start(self) -> None:
        """Listen at the task's address; a second call has no effect."""
        with self._lock:
            if self._sockets is None:
                self._sockets, _ = listen(self._address, self._enter)
                weakref.finalize(self, self._sockets.close)
                _log.info("%s listens at %s", self._title, self._address)

    def join(self) -> NoReturn:
        """Serve until the chief ends, and end this process.

        A worker runs this process's script from its beginning as the task ``"chief"``, so that it makes
        the chief's variables and functions. It serves from the first `schedule` on.

        Raises
        ------
        SystemExit
            At the end: with status 0 if the chief has ended normally, else with a text.
        RuntimeError
            The script of a worker does not schedule a function.
        """
        self.start()
        if self.job_name == "worker":
            self._run_script()
        raise SystemExit(self._end.get() or 0)

    def _run_script(self) -> NoReturn:
        _this_worker[:] = [self]
        config = loads(os.environ.get("TF_CONFIG") or "{}")
        os.environ["TF_CONFIG"] = dumps({**config, "task": {"type": "chief", "index": 0}})
        runpy.run_path(sys.argv[0], run_name="__main__")
        raise RuntimeError(
            f"{self._title}: the script has ended, and has scheduled no function. A worker runs the "
            "same program as the chief, up to its first ClusterCoordinator.schedule()"
        )

    def connected(self) -> Servers:
        """Connect a worker to the parameter servers, and return the connections."""
        self._servers = Servers(self._server, self._cluster.num_tasks("ps"), uncached=False)
        return self._servers

    def _server(self, number: int, seconds: float | None) -> Link:
        address = self._cluster.task_address("ps", number)
        task = f"/job:ps/task:{number}"
        return link_to(task, address, self._title, seconds, own_address=self._address)

    def work(self, run: Answer) -> NoReturn:
        """Answer the chief's calls with ``run`` until the chief ends; then end this process.

        The workers of a host, by their addresses, divide its cores.
        """
        host = ports.host_of(self._address)
        addresses = addresses_of(self._cluster, "worker")
        limit_to_share(sum(ports.host_of(address) == host for address in addresses))
        link = self.chief = self._first_chief()
        if link is None:
            raise SystemExit(
                f"{self._title}: the chief did not connect within {JOIN_SECONDS:g} s. Perhaps another "
                "process is this task, too: end one of them"
            )
        answer, succeeded = partial(self._run, run), True
        while True:
            try:
                message, arrays = link.request(spins=True)
                if message.get("request") == "end":
                    raise SystemExit(0)
                if message.get("request") == "ready":
                    link.send({})
                    continue
                if not succeeded:
                    self._find_servers_again()
                succeeded = _answer(link, answer, message, arrays)
            except LinkLostError as error:
                if link.has_told_to_end():  # while the function ran
                    raise SystemExit(0) from None
                link = self.chief = self._next_chief(link, _RETURN_SECONDS)
                succeeded = False
                if link is None:
                    raise SystemExit(f"{self._title}: the chief is lost: {error}") from None

    def _first_chief(self) -> Link | None:
        """Wait for the chief's first connection; return None after ``JOIN_SECONDS``."""
        until, link = time.monotonic() + JOIN_SECONDS, None
        while link is None and time.monotonic() < until:
            link = self._next_chief(None, 1.0)
            if link is None:  # the chief asks server 0 for this worker's address
                self._find_servers_again()
        return link

    def _next_chief(self, link: Link | None, seconds: float) -> Link | None:
        """Wait for a connection of the chief other than ``link``; return None after ``seconds``."""
        with self._connected:
            self._connected.wait_for(lambda: self._newest is not link, seconds)
            return None if self._newest is link else self._newest

    def _set_chief(self, link: Link) -> None:
        """Use a new connection of the chief, and end the one before it."""
        with self._connected:
            before, self._newest = self._newest, link
            self._connected.notify_all()
        if before is not None:
            before.shut_down()

    def _find_servers_again(self) -> bool:
        """Connect again to the servers that this worker has lost; return False if one is not found."""
        assert self._servers is not None
        try:
            for number in self._servers.lost():
                self._servers.reattach(number, self._server(number, _RETURN_SECONDS))
        except UnavailableError:
            return False
        return True

    def _run(
        self, run: Answer, message: dict[str, Any], arrays: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Run a function; raise LinkLostError if only the network to a server was cut."""
        assert self._servers is not None
        try:
            return run(message, arrays)
        except ServerLostError as error:
            cut = any(self._servers.links[number].silent for number in self._servers.lost())
            if not (cut and self._find_servers_again()):
                raise
            # The chief then schedules the function again, and connects again.
            raise LinkLostError(f"{error}; the server is back") from None

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Accept a connection of another task."""
        if hello.get("purpose") != PURPOSE:
            raise HandshakeError("the other side is not a task of a cluster with parameter servers")
        if hello.get("probe"):  # a task that has waited for long; the handshake was the answer
            channel.close()
            return
        link = Link(channel, str(hello.get("task")))
        if self.job_name == "worker":
            if link.ended():  # the chief waited too long, and may have made another connection
                link.close()
                return
            run = str(hello.get("run"))
            if self._chiefs_run not in (None, run):
                raise HandshakeError("the worker still serves another chief")
            self._chiefs_run = run
            try:
                link.send({"gpus": config.logical_count("GPU")})
            except LinkLostError:
                return
            self._set_chief(link)
            return
        if hello.get("address"):
            self._store.listens(link.task, str(hello["address"]))
        answer = partial(self._store.answer, task=link)
        is_chief = False
        try:
            while True:
                message, arrays = link.request()
                if is_chief and message.get("request") == "end":
                    self._end.put("")
                    return
                succeeded = _answer(link, answer, message, arrays)
                if message.get("request") == "begin":
                    if succeeded:
                        is_chief = True
                        self._set_chief(link)
                    elif not self._store.begun:  # else another chief is served
                        self._end.put(f"{self._title}: no variables were restored, see the chief")
                        return
        except LinkLostError as error:
            if is_chief and link.has_told_to_end():
                self._end.put("")
            elif is_chief and self._next_chief(link, _RETURN_SECONDS) is None:
                self._end.put(f"{self._title}: the chief is lost: {error}")
        finally:
            self._store.leave(link)
            link.close()


def _answer(link: Link, answer: Answer, message: dict[str, Any], arrays: list[Any]) -> bool:
    """Send the reply to a request, or the error; return True if there was no error."""
    try:
        link.send(*answer(message, arrays))
        return True
    except LinkLostError:
        raise
    except ServerLostError as error:
        link.send({"error": "UnavailableError", "text": str(error), "server": True})
    except Exception as error:
        link.send(error_message(error))
    return False


class Chief:
    """The chief's connections to all tasks of a cluster."""

    def __init__(self, cluster: Any, recover: bool = False) -> None:
        self._cluster = cluster
        #: True: wait for a lost parameter server that is started again, and continue from its snapshot.
        self.recover = recover
        self._run = secrets.token_hex(8)
        self._recovering = threading.Lock()
        self.servers = Servers(self._server, cluster.num_tasks("ps"), uncached=True)
        if recover:
            self.servers.recover = lambda: self.find_servers_again(JOIN_SECONDS)
        #: The number of GPUs that each worker must have, or None if no worker is connected yet.
        self.gpus_of_worker: int | None = None
        #: The connections to the workers. A worker without a port in the cluster may begin later.
        self._workers: dict[int, Link] = {}
        counts = {}
        for number in cluster.task_indices("worker"):
            if ports.has_port(cluster.task_address("worker", number)):
                with contextlib.suppress(LinkLostError):  # it may serve another chief
                    link, counts[number] = self._link_to_worker(number)
                    self._workers[number] = link
        if len(set(counts.values())) > 1:
            self.end()
            listed = ", ".join(f"worker {n} has {count}" for n, count in counts.items())
            raise ValueError(
                f"Mismatched number of GPUs per worker: {listed}. Let all workers see the same number, "
                "such as by CUDA_VISIBLE_DEVICES"
            )
        self.gpus_of_worker = next(iter(counts.values()), None)

    def worker(self, number: int) -> Link | None:
        """Return the connection to a worker, or None before its first one."""
        return self._workers.get(number)

    def has_worker(self) -> bool:
        """Return True if a worker is connected, perhaps one that still runs the program."""
        return not all(link.ended() for link in list(self._workers.values()))

    def find(self, number: int, seconds: float) -> Link:
        """Return a new connection to a worker that was lost, or that has not been connected.

        Wait until the worker has run the program. Raise UnavailableError if it cannot be reached, or
        LinkLostError if it is lost meanwhile or if server 0 is lost.
        """
        task = f"/job:worker/task:{number}"
        reply, _ = self.servers.links[0].call({"request": "find", "task": task})
        address = reply.get("address") or self._cluster.task_address("worker", number)
        if not ports.has_port(address):
            raise UnavailableError(f"{task} has not begun")
        link, gpus = self._link_to_worker(number, seconds, address)
        if self.gpus_of_worker not in (None, gpus):
            link.close()
            raise UnavailableError(
                f"Mismatched number of GPUs per worker: {task} has {gpus}, and this cluster's workers "
                f"must have {self.gpus_of_worker}"
            )
        self._workers[number] = link
        link.send({"request": "ready"})
        while not link.has_reply(1.0):
            link.check()
            if self.recover and self.servers.lost():  # the worker may wait for such a server
                self.find_servers_again(JOIN_SECONDS)
        link.reply()
        return link

    def find_servers_again(self, seconds: float) -> None:
        """Connect to the parameter servers that are lost.

        Raise UnavailableError after ``seconds``, or if a server cannot restore its snapshot.
        """
        deadline = time.monotonic() + seconds
        with self._recovering:
            while lost := self.servers.lost():
                for number in lost:
                    _log.warning("/job:ps/task:%d is lost; start it again", number)
                    try:
                        link = self._server(number, max(0.0, deadline - time.monotonic()))
                        self.servers.reattach(number, link)
                    except CheckpointError as error:
                        raise UnavailableError(f"/job:ps/task:{number} is lost: {error}") from None
                    except (LinkLostError, ServerLostError):  # it is lost again
                        continue
                    self.servers.restarts[number] += 1
                    _log.warning("/job:ps/task:%d is back", number)

    def _server(self, number: int, seconds: float | None) -> Link:
        link = self._link("ps", number, seconds)
        reply, _ = link.call({"request": "begin", "run": self._run})
        if "error" in reply:
            raise error_of(reply, link.task)
        return link

    def _link_to_worker(
        self, number: int, seconds: float | None = None, address: str | None = None
    ) -> tuple[Link, int]:
        """Return a connection to a worker, and the number of its GPUs."""
        link = self._link("worker", number, seconds, address)
        message, _ = link.receive()
        gpus = message.get("gpus")
        if not isinstance(gpus, int):
            link.close()
            raise LinkLostError(f"{link.task} did not send the number of its GPUs")
        return link, gpus

    def _link(
        self, job: str, number: int, seconds: float | None = None, address: str | None = None
    ) -> Link:
        address = address or self._cluster.task_address(job, number)
        return link_to(f"/job:{job}/task:{number}", address, "chief", seconds, run=self._run)

    def end(self) -> None:
        """Tell all tasks that the chief ends."""
        for link in [*self._workers.values(), *self.servers.links]:
            try:
                link.send({"request": "end"})
            except (LinkLostError, ValueError):
                continue
            link.close()
