"""Names that a host resolves to a loopback address: Debian gives a host's own name 127.0.1.1."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys

import pytest
from namespaces import hosts
from processes import SECRET, free_port, surroundings, write

from pycollective.errors import RendezvousError
from pycollective.launch.description import Description
from pycollective.launch.sockets import Sockets

BODY = """
print(comm.rank, *comm.all_reduce([1, comm.rank]))
within = comm.split(comm.rank // 2)  # ranks of both hosts
print(*within.all_reduce([1, comm.rank]), *within.split(0).all_reduce([1, comm.rank]))
other = comm.split(comm.rank % 2)  # ranks of one host
print(*other.all_reduce([1, comm.rank]))
comm.barrier()
"""


@pytest.fixture
def debian(monkeypatch):
    """Let the name node1 be 127.0.1.1."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        return real("127.0.1.1" if host == "node1" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def listening(address, secret, own):
    env = {"PYCOLLECTIVE_SECRET": SECRET} if secret else {}
    addresses = [address, f"127.0.0.1:{free_port()}"] if own else [address]
    sockets = Sockets(Description.of_environment(env, 0, 2, addresses))
    with contextlib.closing(sockets.listen_at_own_address()) as sock:
        return sock.getsockname()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.1.1 is loopback on Linux")
@pytest.mark.parametrize("own", [False, True])
def test_rank_0_listens_for_other_hosts_if_its_name_is_loopback_only_here(debian, own):
    assert listening(f"node1:{free_port()}", True, own) == "0.0.0.0"
    # Without a secret, and with an address that is loopback everywhere, there are no other hosts.
    assert listening(f"node1:{free_port()}", False, own) == "127.0.1.1"
    assert listening(f"localhost:{free_port()}", True, own) == "127.0.0.1"
    assert listening(f"127.0.0.1:{free_port()}", True, own) == "127.0.0.1"


def test_rank_0_listens_everywhere_if_its_address_is_that_of_a_proxy():
    """The check of addresses refuses this before, except in containers."""
    assert listening(f"192.0.2.1:{free_port()}", True, False) == "0.0.0.0"


def test_address_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"cannot listen at {address}, its own address"):
            listening(address, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["", "tcp"])
@pytest.mark.parametrize("source", ["address", "TF_CONFIG"])
def test_hosts_whose_own_names_are_loopback_addresses_join(tmp_path, source, transport):
    """Two ranks on each of two hosts, split among the hosts and within them."""
    script = write(tmp_path, BODY)
    with contextlib.ExitStack() as cleanup:
        names = cleanup.enter_context(hosts(2))
        for host in (1, 2):
            lines = [f"127.0.1.1 node{host}", f"10.213.7.{3 - host} node{3 - host}"]
            (tmp_path / f"hosts{host}").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        processes = []
        for rank in range(4):
            host = rank % 2
            task = {"type": "worker", "index": rank}
            addresses = ["node1:29511", "node2:29511", "node1:29512", "node2:29512"]
            found = {
                "address": {
                    "PYCOLLECTIVE_RANK": str(rank),
                    "PYCOLLECTIVE_SIZE": "4",
                    "PYCOLLECTIVE_ADDRESS": "node1:29511",
                },
                "TF_CONFIG": {
                    "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})
                },
            }[source]
            bound = 'mount --bind "$0" /etc/hosts && exec "$@"'  # for this process alone
            command = ["ip", "netns", "exec", names[host], "sh", "-c", bound]
            process = subprocess.Popen(
                [*command, str(tmp_path / f"hosts{host + 1}"), sys.executable, str(script)],
                env=surroundings(
                    PYCOLLECTIVE_SECRET=SECRET, PYCOLLECTIVE_TRANSPORT=transport, **found
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            processes.append(process)
        for rank, process in enumerate(processes):
            said = process.communicate(timeout=60)[0]
            among, within = (1 if rank < 2 else 5), (2 if rank % 2 == 0 else 4)
            expected = f"{rank} 4 6\n2 {among} 2 {among}\n2 {within}\n"
            assert (process.returncode, said) == (0, expected)
