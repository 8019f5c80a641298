"""`OneDeviceStrategy`: everything on one named device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.distribute.all_reduce_ops import ReductionToOneDevice
from pycollective.distribute.devices import parse_device
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.strategy import Strategy
from pycollective.tensor import Variable


class _OneDeviceExtended(StrategyExtended):
    groups_values = False

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a plain variable on the device."""
        variable = self.variable_on(self.devices[0], next_creator, **kwargs)
        variable._distribute_strategy = self.strategy
        return variable


class OneDeviceStrategy(Strategy):
    """All variables and operations on one device, for tests of code that uses strategies.

    Parameters
    ----------
    device : str
        The device's name, such as ``"cpu:0"`` or ``"/gpu:1"``.

    Raises
    ------
    ValueError
        This machine has no such device.
    """

    def __init__(self, device: str) -> None:
        super().__init__(_OneDeviceExtended([parse_device(device)], ReductionToOneDevice()))
