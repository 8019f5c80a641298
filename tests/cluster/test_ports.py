"""Ports that a task chooses before it listens."""

from __future__ import annotations

import socket
import sys

import pytest

from pycollective.cluster.ports import reserved_address


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
def test_reserved_address_only_a_server_of_that_port_gets_it():
    host, _, port = reserved_address("127.0.0.1").rpartition(":")
    address = host, int(port)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    with (
        socket.create_server(address) as server,
        socket.create_connection(address, timeout=20),
    ):
        server.accept()[0].close()
