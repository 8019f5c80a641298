"""`split_dataset`: a dataset split into two."""

from __future__ import annotations

from typing import Any

from pycollective.data import Dataset


def split_dataset(
    dataset: Any,
    left_size: float | None = None,
    right_size: float | None = None,
    shuffle: bool = False,
    seed: int | None = None,
) -> tuple[Dataset, Dataset]:
    """Return the beginning and the end of a dataset, for example for training and testing.

    Parameters
    ----------
    dataset
        A `Dataset` of known length, an array, or a list or tuple of arrays of the same length.
    left_size, right_size : float, optional
        The sizes of the parts: a fraction (float) or a number of elements (int). The default is the
        remainder.
    shuffle, seed
        True to shuffle the elements before the split, and the seed of their order.

    Raises
    ------
    ValueError
        No size is given, a fraction is not between 0 and 1, or the sizes are too large. Or a part
        would be empty, or the length is unknown.
    """
    if not isinstance(dataset, Dataset):
        arrays = tuple(dataset) if isinstance(dataset, (list, tuple)) else dataset
        dataset = Dataset.from_tensor_slices(arrays)
    total = int(dataset.cardinality())
    if total < 0:
        raise ValueError("split_dataset needs a dataset of known length")
    if left_size is None and right_size is None:
        raise ValueError("At least one of the `left_size` or `right_size` must be specified.")
    left, right = (_elements(size, total) for size in (left_size, right_size))
    left = total - right if left is None and right is not None else left
    right = total - left if right is None and left is not None else right
    assert left is not None and right is not None
    if left < 1 or right < 1 or left + right > total:
        raise ValueError(
            f"split_dataset: parts of {left} and {right} elements (left_size={left_size}, "
            f"right_size={right_size}) do not fit into a dataset of {total}"
        )
    if shuffle:
        dataset = dataset.shuffle(total, seed, reshuffle_each_iteration=False)
    return dataset.take(left), dataset.skip(left).take(right)


def _elements(size: int | float | None, total: int) -> int | None:
    if size is None:
        return None
    if isinstance(size, float):
        if not 0 < size < 1:
            raise ValueError(f"split_dataset: a fraction must be between 0 and 1, got {size}")
        return round(size * total)
    return int(size)
