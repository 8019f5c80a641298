"""A split that fails because of one rank names it on the others, by its rank in the old group."""

from __future__ import annotations

import sys

import pytest
from processes import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

BODY = """
comm.barrier()  # a process may start seconds after another
with without_descriptors(2) if comm.rank == 1 else contextlib.nullcontext():
    try:
        comm.split(0 if comm.rank else 5, timeout=3)
        print("made")
    except pc.CollectiveError as error:
        print(error.ranks, in_words(error))
comm.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp"])
def test_split_of_a_rank_without_descriptors_names_that_rank_to_all(tmp_path, transport):
    done = run(tmp_path, transport, 3, BODY)
    alone, first, second = done.outputs
    assert alone == "made\n", done
    for output in (first, second):
        assert "could not be made: rank 1: rank 1 cannot join the group at" in output, done
        assert "Too many open files" in output, done
        assert output.startswith("(1,) "), done
        assert "rank 0" not in output, done
