"""Names of ``tf.keras.utils.experimental``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from pycollective.data import Dataset

__all__ = ["DatasetCreator"]


class DatasetCreator:
    """A function that makes a dataset on each worker.

    Parameters
    ----------
    dataset_fn : callable
        A function ``dataset_fn(InputContext)`` that returns a `Dataset`.
    input_options : InputOptions, optional
        The options for the distribution of the dataset.

    Raises
    ------
    TypeError
        If ``dataset_fn`` is not callable.
    """

    def __init__(self, dataset_fn: Callable[..., Any], input_options: Any = None) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                f"`dataset_fn` for `DatasetCreator` must be a `callable`. Received: {dataset_fn!r}"
            )
        self.dataset_fn = dataset_fn
        self.input_options = input_options
        #: The `PerWorkerDataset` of each `ClusterCoordinator`.
        self.per_worker_datasets: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Dataset:
        """Return the dataset.

        Raises
        ------
        TypeError
            If the function returns no `Dataset`.
        """
        dataset = self.dataset_fn(*args, **kwargs)
        if not isinstance(dataset, Dataset):
            raise TypeError(
                "The `callable` provided to `DatasetCreator` must return a `tf.data.Dataset`. "
                f"Received: {dataset!r}"
            )
        return dataset
