"""NumPy arrays in memory that the ranks of a host share."""

from __future__ import annotations

from pycollective import _core
from pycollective.arguments import switch


class shared_arrays:
    """Allocate NumPy's arrays of 16 KiB or more in memory that the ranks of this host share.

    Calls use these arrays in place, as those of `Communicator.empty`, but they come from ``np.zeros``,
    from ufuncs, and from all other code that makes arrays. The setting concerns the calling thread. At
    the end of a ``with`` block the previous setting returns::

        pc.shared_arrays()            # from now on
        with pc.shared_arrays():      # within the block
            x = np.random.rand(1_000_000)
        pc.shared_arrays(False)       # off

    The setting matters in groups of processes on one host, for arrays made after `pycollective.init`.
    Before it, and over TCP, arrays are ordinary. All processes of the group can read and write these
    arrays. Freed memory stays in the arena (up to 512 MiB), so that new arrays cost little. The first
    use of fresh memory costs about as much as for ordinary arrays, and each array about 100 ns more.

    Parameters
    ----------
    on : bool
        False: make ordinary arrays.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _core.share_arrays() if switch("on", on) else _core.set_handler(None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _core.set_handler(self._before)
