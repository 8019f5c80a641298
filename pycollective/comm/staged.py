"""The engine for GPU arrays that copies them through host memory, if no other can be used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pycollective import array_backend
from pycollective.comm.call import About, Call, Engine, HostEngine
from pycollective.comm.work import DONE, Work


class Staged(Engine):
    """An engine that gives another engine copies of GPU arrays in host memory."""

    def __init__(self, host: HostEngine) -> None:
        self._host = host

    def about(self, call: Call) -> About:
        return self._host.about(call)

    def submit(self, call: Call) -> Work[None]:
        source, target = call.source, call.target
        given = None if source is None else array_backend.to_numpy(source)
        if target is None:
            return self._host.submit(replace(call, source=given))
        result = np.empty(target.shape, target.dtype)
        work = self._host.submit(replace(call, source=given, target=result))

        def deliver() -> None:
            array_backend.assign(target, result)

        if call.async_op:
            return work.then(deliver)
        deliver()
        return DONE
