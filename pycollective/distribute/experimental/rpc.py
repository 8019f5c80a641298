"""Names of ``tf.distribute.experimental.rpc``; its machinery is not here, see `unavailable`."""

from __future__ import annotations

from pycollective.distribute.unavailable import Client
from pycollective.distribute.unavailable import RpcServer as Server

__all__ = ["Client", "Server"]
