"""Conversion of the input of `fit`, `evaluate` and `predict` to distributed batches."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import Array, asarray, to_numpy
from pycollective.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, Options
from pycollective.data.options import AutoShardPolicy
from pycollective.data.sources import Generated
from pycollective.distribute.coordinator import ClusterCoordinator
from pycollective.distribute.input import DistributedDataset, DistributedIterator
from pycollective.distribute.input_options import InputContext
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.values import DistributedValues, PerReplica
from pycollective.keras.backend import floatx
from pycollective.keras.losses.loss import broadcast_weights
from pycollective.keras.utils.batches import pack_x_y_sample_weight, unpack_x_y_sample_weight
from pycollective.keras.utils.experimental import DatasetCreator
from pycollective.keras.utils.py_dataset import PyDataset
from pycollective.tensor import Tensor, as_tensor, ops

#: The default batch size of arrays, as in Keras.
_BATCH_SIZE = 32


# Batches ------------------------------------------------------------------------------------------


class _Batches(Generated):
    """A dataset of ``count`` batches; each epoch calls ``passes()``, which yields them."""

    def __init__(self, passes: Callable[[], Iterable[Any]], count: int) -> None:
        super().__init__(lambda: map(_element_of, passes()), None, ())
        self._count = count

    def _known_length(self) -> int:
        return self._count


def _element_of(batch: Any) -> Any:
    """Return a batch as an element of a dataset.

    Some data loaders yield lists [x, y], which a dataset would convert to one array. Generators may
    yield None in the place of targets and weights.
    """
    if not isinstance(batch, (list, tuple)):
        return batch
    given = list(batch)
    while len(given) > 1 and given[-1] is None:
        given.pop()
    return tuple(given)


def _length_of(batches: Any) -> int:
    """Return the number of batches, or `UNKNOWN_CARDINALITY`."""
    try:
        return len(batches)
    except TypeError:  # a loader of an endless stream has __len__, which raises
        return UNKNOWN_CARDINALITY


def _are_arrays(x: Any) -> bool:
    """Return True if a value is an array, a number, or a list or dict that may hold arrays."""
    if hasattr(x, "shape") or hasattr(x, "__array__"):
        return True
    if isinstance(x, Mapping):
        return all(map(_are_arrays, x.values()))
    return isinstance(x, (list, tuple, int, float, np.generic))


def _makes_batches(x: Any) -> bool:
    """Return True if a value is a source of batches, with targets and weights included."""
    if hasattr(x, "shape"):
        return False
    if isinstance(x, (Dataset, DistributedDataset, DatasetCreator, PyDataset, Iterator)):
        return True
    arrays = isinstance(x, (list, tuple, Mapping, str)) or hasattr(x, "__array__")
    return isinstance(x, Iterable) and not arrays


def batches_of(
    strategy: Strategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    at_most: int | None = None,
) -> Any:
    """Return a dataset of global batches, distributed among the replicas of a strategy.

    ``x`` is an array, a nest of arrays for several inputs, or a source of batches with targets and
    weights. A source is a `Dataset` of global batches, a distributed dataset, a `PyDataset`, a
    `DatasetCreator`, an iterator, or another iterable such as ``torch.utils.data.DataLoader``. ``y``,
    ``sample_weight`` and ``batch_size`` are for arrays only. ``at_most`` limits the batches that are
    read from an iterator: its next reader would not get batches that were prefetched but not used.
    Raise ``ValueError`` for inconsistent input.
    """
    if x is None:
        raise ValueError("there is no input: x is None")
    if isinstance(x, DistributedIterator):
        raise ValueError("give the distributed dataset itself, not an iterator over it")
    if _makes_batches(x):
        _check_alone(x, y, sample_weight, batch_size)
    if isinstance(x, DistributedDataset):
        if isinstance(strategy, ParameterServerStrategy):
            raise NotImplementedError(
                "Only `tf.keras.utils.experimental.DatasetCreator`, `tf.Tensor`, numpy arrays, "
                "`tf.data.Dataset` and other sources of batches are supported types at this time, not "
                "a distributed dataset. Under ParameterServerStrategy give the dataset itself"
            )
        if x.extended is not strategy.extended:
            raise ValueError(
                f"the dataset was distributed by another strategy than the model's, {strategy}"
            )
        return x
    if isinstance(x, DatasetCreator):
        if isinstance(strategy, ParameterServerStrategy):
            return x(InputContext())
        return strategy.distribute_datasets_from_function(x, x.input_options)
    if isinstance(x, PyDataset):
        batches, count = x, x.num_batches
        x = _Batches(
            lambda: batches.passes(shuffle), INFINITE_CARDINALITY if count is None else count
        )
    elif _makes_batches(x) and not isinstance(x, Dataset):
        source = itertools.islice(x, at_most) if isinstance(x, Iterator) else x
        x = _Batches(lambda: source, _length_of(x))
    if isinstance(x, Dataset):
        return _distributed(strategy, x)
    if not _are_arrays(x):
        raise ValueError(
            f"Unrecognized data type: {_name(x)}. Give arrays, a Dataset, a PyDataset, or another "
            "source of batches: an iterator, a torch.utils.data.DataLoader"
        )
    arrays, rows = _arrays(x, y, sample_weight)
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    dataset = Dataset.from_tensor_slices(arrays)
    if isinstance(shuffle, str) and shuffle != "batch":
        raise ValueError(f"shuffle must be True, False or 'batch', got {shuffle!r}")
    # With "batch", each batch keeps its rows, and their order does not matter.
    if shuffle and shuffle != "batch" and rows > 1:
        dataset = dataset.shuffle(rows, seed=_agreed_seed(strategy))
    return _distributed(strategy, dataset.batch(batch_size or _BATCH_SIZE))


def single_batch(
    strategy: Strategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
) -> Any:
    """Return the batch of `batches_of` without making a dataset, or None if that is not possible.

    The default strategy allows this for arrays that make exactly one batch.
    """
    if not strategy.extended.is_default:
        return None
    if hasattr(x, "shape") and y is None and sample_weight is None:
        arrays = as_tensor(x).array
        rows = _length(arrays)
    elif x is None or _makes_batches(x) or not _are_arrays(x):
        return None
    else:
        arrays, rows = _arrays(x, y, sample_weight)
    if batch_size is None:
        batch_size = _BATCH_SIZE
    # A size that is not a positive integer is an error, which `batches_of` raises.
    if batch_size.__class__ is not int or not 1 <= rows <= batch_size:
        return None
    return nest.map_structure(Tensor, arrays)


def _distributed(strategy: Strategy, dataset: Dataset) -> Any:
    if isinstance(strategy, ParameterServerStrategy):
        return dataset  # the coordinator reads it, and gives each batch to a worker
    return strategy.experimental_distribute_dataset(dataset)


def divided_among_replicas(strategy: ParameterServerStrategy, element: Any) -> Any:
    """Return a batch that the coordinator has read, with a part for each replica of this worker.

    The batch of a distributed dataset has its parts already.
    """
    devices = strategy.extended.devices
    leaves = nest.flatten(element, by_key=True)
    on_one_cpu = len(devices) == 1 and devices[0].kind == "CPU"
    if on_one_cpu or any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return element
    arrays, parts = [as_tensor(leaf).array for leaf in leaves], []
    for replica, device in enumerate(devices):
        cut = [_part(array, replica, len(devices)) for array in arrays]
        parts.append([Tensor(device.place(array)) for array in cut])
    columns = zip(*parts, strict=True)
    found = [column[0] if len(column) == 1 else PerReplica(column) for column in columns]
    return nest.pack_as(element, found, by_key=True)


def _part(array: Array, number: int, parts: int) -> Array:
    """Return one of several parts of the rows of an array; the last ones may have fewer rows."""
    if not array.ndim:
        return array
    rows = -(-len(array) // parts)
    return array[number * rows : (number + 1) * rows]


class _BatchesOfWorkers:
    """The batches of a `DatasetCreator`, which makes a dataset on each worker.

    Every element is the same `PerWorkerIterator`. A worker that makes a step reads the next batch of
    its own dataset from it.
    """

    cardinality = INFINITE_CARDINALITY

    def __init__(self, strategy: ParameterServerStrategy, creator: DatasetCreator) -> None:
        coordinator = ClusterCoordinator(strategy)
        datasets = creator.per_worker_datasets
        if coordinator not in datasets:  # another call of `fit` uses the dataset that workers know
            datasets[coordinator] = coordinator.create_per_worker_dataset(
                lambda: strategy.distribute_datasets_from_function(creator, creator.input_options)
            )
        self._dataset = datasets[coordinator]

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(iter(self._dataset))

    def first(self) -> Any:
        """Return the first batch of worker 0, or None if there is none."""
        return self._dataset.first()


def training_batches_of(
    strategy: Strategy,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    shuffle: bool | str,
    at_most: int | None,
) -> Any:
    """Return the result of `batches_of`, except for a `DatasetCreator` with parameter servers.

    In that case, each worker makes its own dataset. Raise ``ValueError`` if ``at_most`` is None, since
    these datasets have no common end.
    """
    if not (isinstance(strategy, ParameterServerStrategy) and isinstance(x, DatasetCreator)):
        return batches_of(strategy, x, y, sample_weight, batch_size, shuffle, at_most)
    if at_most is None:
        raise ValueError(
            "When using a `tf.keras.utils.experimental.DatasetCreator`, `steps_per_epoch` must be "
            "provided in `Model.fit`, because each worker has a dataset of its own."
        )
    _check_alone(x, y, sample_weight, batch_size)
    return _BatchesOfWorkers(strategy, x)


def _check_alone(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> None:
    """Raise ValueError if a source of batches is given with arguments for arrays."""
    for name, value in {"y": y, "sample_weight": sample_weight}.items():
        if value is not None:
            raise ValueError(
                f"`{name}` argument is not supported when using {_name(x)} as input: its elements are "
                "(x, y) or (x, y, sample_weight)"
            )
    if batch_size is not None:
        raise ValueError(
            "The `batch_size` argument must not be specified for the given input type. Received "
            f"input: {_name(x)}, whose elements are batches, and batch_size: {batch_size}"
        )


def sharded_by_rows(strategy: Strategy, x: Any) -> Any:
    """Return input with the sharding policy DATA, if there are several workers.

    With this policy, each worker reads all batches and keeps its mini-batches of each batch.
    `values_of` can then restore the order of all rows.
    """
    if not isinstance(x, Dataset) or strategy.extended.workers.count == 1:
        return x
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    return x.with_options(options)


def _agreed_seed(strategy: Strategy) -> int | None:
    """Return a seed that all workers share, so that they use one order; None for one worker."""
    workers = strategy.extended.workers
    if workers.count == 1:
        return None
    return int(workers.from_first(np.asarray(secrets.randbits(31))))


def _name(value: Any) -> str:
    return f"a {type(value).__name__}"


def _arrays(x: Any, y: Any, sample_weight: Any) -> tuple[Any, int]:
    """Return arrays in the structure of a batch, and their number of examples."""
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    found = {name: _as_arrays(value) for name, value in parts.items() if value is not None}
    different = {_length(leaf) for leaf in nest.flatten(found)}
    if len(different) != 1:
        lengths = {name: list(map(_length, nest.flatten(value))) for name, value in found.items()}
        sizes = "\n".join(f"'{k}' sizes: {', '.join(map(str, v))}" for k, v in lengths.items())
        raise ValueError(
            "Data cardinality is ambiguous. Make sure all arrays contain the same number of "
            f"samples.\n{sizes}"
        )
    return pack_x_y_sample_weight(
        found["x"], found.get("y"), found.get("sample_weight")
    ), different.pop()


def _length(array: Array) -> int:
    return int(array.shape[0]) if array.ndim else 0


def _as_arrays(value: Any) -> Any:
    """Return a nest of arrays; a list is a nest if its items are arrays, or nests of arrays."""
    if hasattr(value, "shape"):
        return as_tensor(value).array
    if isinstance(value, Mapping):
        return {key: _as_arrays(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and _holds_arrays(value):
        return tuple(_as_arrays(item) for item in value)
    return as_tensor(value).array


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_holds_arrays, value))
    return isinstance(value, Mapping) or hasattr(value, "shape")


def split_off(
    x: Any, y: Any, sample_weight: Any, share: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, ...]]:
    """Split arrays into a first part for training and a last part for validation."""
    if _makes_batches(x):
        raise ValueError(
            "`validation_split` is only supported for Tensors or NumPy arrays, found "
            f"{_name(x)}; give validation_data"
        )
    if not 0 < share < 1:
        raise ValueError(f"`validation_split` must be between 0 and 1, got {share}")
    arrays, rows = _arrays(x, y, sample_weight)
    begin = int(rows * (1 - share))
    if begin in (0, rows):
        raise ValueError(
            f"Training data contains {rows} samples, which is not sufficient to split it into a "
            f"validation and training set as specified by `validation_split={share}`. Either provide "
            "more data, or a different value for the `validation_split` argument."
        )
    first = nest.map_structure(lambda a: a[:begin], arrays)
    last = nest.map_structure(lambda a: a[begin:], arrays)
    return unpack_x_y_sample_weight(first), unpack_x_y_sample_weight(last)


# Elements -----------------------------------------------------------------------------------------


def first_of(batches: Any) -> Any:
    """Return the first batch of a dataset or of worker 0, or None if there is none."""
    return batches.first() if isinstance(batches, _BatchesOfWorkers) else next(iter(batches), None)


def rows_of_element(strategy: Strategy, element: Any) -> tuple[list[int], int]:
    """Return the number of examples of each local replica, and of all replicas of all workers."""
    x, _, _ = unpack_x_y_sample_weight(element)
    first = x if x.__class__ is Tensor else nest.flatten(x)[0]
    parts = first.values if isinstance(first, DistributedValues) else (first,)
    rows = [(*as_tensor(part).array.shape, 1)[0] for part in parts]
    return rows, strategy.extended.sum_over_workers(sum(rows))


def weighted_by_class(class_weight: Mapping[int, float]) -> Callable[[Any], Any]:
    """Return a function that multiplies a batch's sample weights by the weights of their classes.

    Classes without an entry have the weight 1, as in Keras 3.
    """
    wrong = [k for k in class_weight if not (isinstance(k, (int, np.integer)) and k >= 0)]
    if wrong:
        raise ValueError(
            "Expected `class_weight` to be a dict whose keys are class numbers, from 0 on, found "
            f"{dict(class_weight)}"
        )
    # The last entry, 1, is the weight of all class numbers outside of the table.
    others = max(class_weight, default=-1) + 1
    table = np.ones(others + 1, floatx())
    for number, weight in class_weight.items():
        table[int(number)] = weight  # a bool would be a mask

    def weighted(data: Any) -> Any:
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        if y is None or nest.is_nested(y):
            raise ValueError("`class_weight` is only supported for Models with a single output.")
        labels = as_tensor(y).array
        if labels.ndim > 1:
            labels = labels.argmax(axis=-1) if labels.shape[-1] > 1 else labels[..., 0]
        if labels.dtype.kind == "f":
            labels = labels.round()
        labels = labels.astype(np.int64)
        labels[(labels < 0) | (labels > others)] = others
        weights = Tensor(asarray(table, like=labels)[labels])
        if sample_weight is not None:
            given = as_tensor(sample_weight, like=weights)
            if given.dtype != weights.dtype:
                given = ops.cast(given, floatx())
            if given.ndim > weights.ndim and given.shape[-1] != 1:
                weights = given * broadcast_weights(weights, given)
            else:
                weights = weights * broadcast_weights(given, weights)
        return x, y, weights

    return weighted


def of_local_replicas(output: Any) -> Any:
    """Return the output of a step, with one tensor for the rows of all local replicas."""

    def joined(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        parts = [np.asarray(as_tensor(part).numpy()) for part in leaf.values]
        return Tensor(np.concatenate(parts) if parts[0].ndim else np.stack(parts))

    return nest.pack_as(output, map(joined, nest.flatten(output, by_key=True)), by_key=True)


def values_of(strategy: Strategy, outputs: Sequence[Any]) -> Any:
    """Return the outputs of steps as NumPy arrays: all examples in order, on every worker."""
    if len(outputs) == 1 and outputs[0].__class__ is Tensor and strategy.extended.is_default:
        return np.array(to_numpy(outputs[0].array), order="C", ndmin=1)
    leaves = [nest.flatten(output, by_key=True) for output in outputs]
    joined = []
    for column in zip(*leaves, strict=True):
        parts = [
            np.asarray(as_tensor(part).numpy())
            for leaf in column
            for part in (leaf.values if isinstance(leaf, DistributedValues) else (leaf,))
        ]
        parts = _of_all_workers(strategy, parts)
        joined.append(np.concatenate(parts) if parts[0].ndim else np.stack(parts))
    return nest.pack_as(outputs[0], joined, by_key=True)


def _of_all_workers(strategy: Strategy, parts: list[Any]) -> list[Any]:
    """Return the outputs of all workers in the order of the rows.

    ``parts`` holds this worker's outputs, one array for each step and local replica. The mini-batches
    of a batch are given to the first replicas of all workers, then to their second replicas, and so
    on.
    """
    workers = strategy.extended.workers
    if workers.count == 1:
        return parts
    count, parts = len(parts), [np.atleast_1d(part) for part in parts]
    lengths, _ = workers.gather(np.asarray([len(part) for part in parts], np.int64), 0)
    rows, _ = workers.gather(np.concatenate(parts), 0)
    pieces = np.split(rows, np.cumsum(lengths)[:-1])
    return [pieces[w * count + k] for k in range(count) for w in range(workers.count)]
