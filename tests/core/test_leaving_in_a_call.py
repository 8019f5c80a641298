"""Tests of a rank that leaves its group while another thread of that rank is in a call."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc


def error_of(call) -> Exception | None:
    try:
        call()
    except pc.CollectiveError as error:
        return error
    return None


@pytest.mark.parametrize("kind", ["tcp", "mixed"])
@pytest.mark.parametrize("size", [2, 3])
def test_leave_within_a_call_raises_peer_lost_error_on_peers(kind, size):
    comms = make_group(kind, size, timeout=30)
    leaver, peers = comms[0], comms[1:]
    errors: list[Exception | None] = []
    call = threading.Thread(
        target=lambda: errors.append(error_of(lambda: leaver.all_reduce(np.ones(1000))))
    )
    call.start()
    while " is in all_reduce" not in leaver.describe():
        time.sleep(0.001)
    leaver._group.leave(0)
    call.join(20)  # the leaver's call ends before the peers' calls begin
    assert isinstance(errors[0], pc.AbortedError), errors
    for peer in peers:
        error = error_of(lambda peer=peer: peer.all_reduce(np.ones(1000)))
        assert isinstance(error, pc.PeerLostError), (peer.rank, error)
        assert str(error).startswith("rank 0 has left the group in all_reduce #1 ("), error
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("kind", ["tcp", "mixed"])
def test_call_of_a_rank_that_has_left_the_group_raises_aborted_error(kind):
    comms = make_group(kind, 2)
    comms[0]._group.leave(0)
    with pytest.raises(pc.AbortedError, match="^rank 0 has left the group$") as caught:
        comms[0].barrier()
    assert caught.value.ranks == (0,)
