"""NumPy's own arrays in memory that the ranks of a host share."""

from __future__ import annotations

from pycollective import _core


class shared_arrays:
    """Make NumPy's arrays of 16 KiB or more in memory that the ranks of this host share.

    Calls read such arrays of another rank where they are, and an all-reduce also writes its results
    there: the arrays are what `Communicator.empty` returns, but come from ``np.zeros``, from ufuncs, and
    from whatever else makes arrays. The call switches this on for the calling thread. As a context
    manager, it restores at the end what was before::

        pc.shared_arrays()            # from now on
        with pc.shared_arrays():      # within the block
            x = np.random.rand(1_000_000)
        pc.shared_arrays(False)       # off

    It concerns groups of processes on one host, and only arrays that are made after `pycollective.init`:
    before it, and over TCP, arrays are ordinary ones. All processes of the user who are in the group can
    read and write these arrays. NumPy keeps freed memory of small arrays itself; freed memory of
    these stays with the arena (up to 512 MiB), so that making them again is fast. The first use of
    fresh memory costs about as much as without the switch, and one NumPy call per array about 100 ns
    more.

    Parameters
    ----------
    on : bool
        False: make ordinary arrays.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _core.share_arrays() if on else _core.set_handler(None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _core.set_handler(self._before)
