"""A stand-in for mpi4py whose ranks are threads. It has what `pycollective.comm.mpi` uses.

A collective runs when all ranks have called it. As in MPI, it reads and writes the ranks' buffers
at that time, and the input and output of a call must not overlap.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

ANY_SOURCE, ANY_TAG, UNDEFINED = -1, -1, -32766
THREAD_SERIALIZED, THREAD_MULTIPLE = 2, 3
BYTE = np.dtype(np.uint8)
SUM, PROD, MIN, MAX = np.add, np.multiply, np.minimum, np.maximum
LAND, LOR, LXOR = np.logical_and, np.logical_or, np.logical_xor
BAND, BOR, BXOR = np.bitwise_and, np.bitwise_or, np.bitwise_xor


def Is_finalized():
    return False


def Query_thread():
    return THREAD_MULTIPLE


class Status:
    source = tag = count = 0

    def Get_source(self):
        return self.source

    def Get_tag(self):
        return self.tag

    def Get_count(self, _):
        return self.count


class Request:
    def __init__(self):
        self.done = False

    @staticmethod
    def Testall(requests):
        return all(request.done for request in requests)


def _flat(buffer):
    """Return a buffer's items as a vector, and the ranks' counts, or None for equal parts."""
    if buffer is None:
        return None, None
    if isinstance(buffer, list):
        array, counts = buffer[0], buffer[1] if len(buffer) == 4 else None
    else:
        array, counts = buffer, None
    return array.reshape(-1), counts


class _Shared:
    """The state that the ranks of a communicator share."""

    def __init__(self, size):
        self.size = size
        self.lock = threading.RLock()
        self.calls = defaultdict(dict)  # the ranks' calls, by number
        self.numbers = [0] * size
        self.inboxes = [[] for _ in range(size)]
        self.new_groups = defaultdict(dict)  # of new communicators, by number and color


class Message:
    def __init__(self, data):
        self._data = data

    def Recv(self, buffer):
        _flat(buffer)[0][:] = self._data


class Intracomm:
    def __init__(self, shared, rank):
        self._shared, self._rank = shared, rank

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._shared.size

    # Collectives --------------------------------------------------------------------------------

    def _call(self, kind, given, received, **more):
        shared, request = self._shared, Request()
        given, received = _flat(given), _flat(received)
        if given[0] is not None and received[0] is not None:
            assert not np.shares_memory(given[0], received[0]), "MPI forbids overlapping buffers"
        with shared.lock:
            number = shared.numbers[self._rank]
            shared.numbers[self._rank] += 1
            calls = shared.calls[number]
            calls[self._rank] = kind, given, received, more, request
            if len(calls) == shared.size:
                del shared.calls[number]
                self._carry_out([calls[r] for r in range(shared.size)])
        return request

    @staticmethod
    def _carry_out(calls):
        kind, _, _, more, _ = calls[0]
        assert all(call[0] == kind and call[3] == more for call in calls), "MPI calls differ"
        size, root = len(calls), more.get("root", 0)
        given = [call[1][0] for call in calls]

        def part(r, which, q):
            """Return rank q's part of the input (``which`` is 1) or output (2) of rank r."""
            array, counts = calls[r][which]
            if counts is None:
                counts = [len(array) // size] * size
            begin = sum(counts[:q])
            return array[begin : begin + counts[q]]

        if kind == "reduce":
            total = given[0].copy()
            for other in given[1:]:
                total = more["op"](total, other).astype(total.dtype)
            for r, call in enumerate(calls):
                if call[2][0] is not None and r in more.get("to", range(size)):
                    call[2][0][:] = total
        elif kind in ("scan", "exscan"):
            totals = [given[0].copy()]
            for other in given[1:]:
                totals.append(more["op"](totals[-1], other).astype(other.dtype))
            first = kind == "exscan"
            for call, total in zip(calls[first:], totals, strict=False):
                call[2][0][:] = total
        elif kind == "reduce_scatter":
            total = given[0].copy()
            for other in given[1:]:
                total = more["op"](total, other).astype(total.dtype)
            for r, call in enumerate(calls):
                call[2][0][:] = total.reshape(size, -1)[r]
        elif kind == "bcast":
            for call in calls:
                call[2][0][:] = calls[root][2][0]
        else:
            for r in range(size):
                for q in range(size):
                    if kind == "all_gather" or (kind == "gather" and r == root):
                        part(r, 2, q)[:] = given[q]
                    elif kind == "scatter" and q == root:
                        calls[r][2][0][:] = part(q, 1, r)
                    elif kind == "all_to_all":
                        part(r, 2, q)[:] = part(q, 1, r)
        for call in calls:
            call[4].done = True

    def Iallreduce(self, given, received, op):
        return self._call("reduce", given, received, op=op)

    def Ireduce(self, given, received, op, root):
        return self._call("reduce", given, received, op=op, to=(root,))

    def Iscan(self, given, received, op):
        return self._call("scan", given, received, op=op)

    def Iexscan(self, given, received, op):
        return self._call("exscan", given, received, op=op)

    def Ireduce_scatter_block(self, given, received, op):
        return self._call("reduce_scatter", given, received, op=op)

    def Ibcast(self, buffer, root):
        return self._call("bcast", None, buffer, root=root)

    def Iallgather(self, given, received):
        return self._call("all_gather", given, received)

    def Igather(self, given, received, root):
        return self._call("gather", given, received, root=root)

    def Iscatter(self, given, received, root):
        return self._call("scatter", given, received, root=root)

    def Ialltoall(self, given, received):
        return self._call("all_to_all", given, received)

    Iallgatherv, Igatherv, Iscatterv, Ialltoallv = Iallgather, Igather, Iscatter, Ialltoall

    def _wait(self, request):
        event = threading.Event()
        while not request.done:
            event.wait(0.001)

    def Allgather(self, given, received):
        self._wait(self._call("all_gather", given, received))

    def Split(self, color, key):
        table = np.empty((self._shared.size, 2), np.int64)
        self.Allgather(np.array([color, key], np.int64), table)
        if color == UNDEFINED:
            self.Dup()
            return None
        ranks = [r for r in range(self._shared.size) if table[r, 0] == color]
        ranks.sort(key=lambda r: (table[r, 1], r))
        return self._new_communicator(color, len(ranks), ranks.index(self._rank))

    def Dup(self):
        return self._new_communicator(None, self._shared.size, self._rank)

    def _new_communicator(self, color, size, rank):
        with self._shared.lock:
            number = self._shared.numbers[self._rank]
            shared = self._shared.new_groups[number].setdefault(color, _Shared(size))
        self.Allgather(np.zeros(1), np.empty(self._shared.size))
        return Intracomm(shared, rank)

    # Messages -----------------------------------------------------------------------------------

    def Isend(self, buffer, dest, tag=0):
        request = Request()
        with self._shared.lock:
            data = _flat(buffer)[0].copy()
            self._shared.inboxes[dest].append((self._rank, tag, data))
        request.done = True
        return request

    def _find(self, source, status, removes):
        inbox = self._shared.inboxes[self._rank]
        with self._shared.lock:
            for index, (sender, tag, data) in enumerate(inbox):
                if source in (ANY_SOURCE, sender):
                    if status is not None:
                        status.source, status.tag, status.count = sender, tag, data.nbytes
                    return inbox.pop(index)[2] if removes else data
        return None

    def Iprobe(self, source, tag, status):
        return self._find(source, status, False) is not None

    def Improbe(self, source, tag, status):
        data = self._find(source, status, True)
        return None if data is None else Message(data)

    def Probe(self, source, tag, status):
        while not self.Iprobe(source, tag, status):
            threading.Event().wait(0.001)

    def Recv(self, buffer, source, tag=ANY_TAG):
        _flat(buffer)[0][:] = self._find(source, None, True)


def world(size):
    """Return the COMM_WORLD of each rank."""
    shared = _Shared(size)
    return [Intracomm(shared, rank) for rank in range(size)]
