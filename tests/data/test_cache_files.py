"""Files of caches: damage has one error class, and a later pass deletes a killed writer's file."""

import os
from pathlib import Path

import numpy as np
import pytest

from pycollective.data import Dataset
from pycollective.errors import DataLossError, InvalidArgumentError


def test_damaged_file_of_a_cache_raises_data_loss_error_or_has_the_same_elements(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kept"

    def dataset() -> Dataset:
        return Dataset.from_tensor_slices((["ab", "c", ""], [1.5, 2.5, 3.5])).cache(file)

    written = [tuple(part.array.tolist() for part in element) for element in dataset()]
    whole = file.read_bytes()
    random = np.random.default_rng(2)
    for number in range(200):
        damaged = bytearray(whole)
        for _ in range(3):
            last = len(damaged) if number % 2 else 200
            damaged[len(damaged) - 1 - int(random.integers(last))] = int(random.integers(256))
        file.write_bytes(damaged if number % 3 else whole[: random.integers(len(whole))])
        try:
            read = [tuple(part.array.tolist() for part in element) for element in dataset()]
        except DataLossError:
            continue
        assert read == written


def test_next_pass_deletes_the_unfinished_file_of_a_killed_pass(tmp_path: Path) -> None:
    (tmp_path / "kept.0123456789abcdef.unfinished").write_bytes(b"half")
    assert [int(x) for x in Dataset.range(3).cache(tmp_path / "kept")] == [0, 1, 2]
    assert os.listdir(tmp_path) == ["kept"]


def test_cache_of_elements_of_unknown_structure_raises_in_the_first_pass(tmp_path):
    pairs = Dataset.from_generator(lambda: iter([(1, 2), (3, 4)])).cache(str(tmp_path / "c"))
    with pytest.raises(InvalidArgumentError, match="the structure of the elements must be known"):
        list(pairs)
