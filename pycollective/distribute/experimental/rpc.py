"""Names of ``tf.distribute.experimental.rpc``; the classes are not available, see `unavailable`."""

from __future__ import annotations

from pycollective.distribute.unavailable import Client
from pycollective.distribute.unavailable import RpcServer as Server

__all__ = ["Client", "Server"]
