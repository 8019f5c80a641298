"""`StringLookup`: the conversion of strings to integers, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import to_numpy
from pycollective.dtypes import string
from pycollective.keras.layers.layer import SameShape
from pycollective.tensor import Tensor, as_tensor
from pycollective.tensor.text import as_text, is_text

__all__ = ["StringLookup"]


class StringLookup(SameShape):
    """The index of each string in a vocabulary, or the string of each index.

    The indices are those of ``mask_token``, of ``oov_token``, and of the vocabulary, in this order.

    Parameters
    ----------
    max_tokens : int, optional
        The largest number of indices after `adapt`, including those of ``mask_token`` and
        ``oov_token``.
    num_oov_indices : int
        1 to give all strings outside of the vocabulary the index of ``oov_token``; 0 to raise
        ``ValueError`` for them.
    mask_token : str, optional
        A string with index 0, for example ``""`` for padding.
    oov_token : str
        The string that stands for strings outside of the vocabulary.
    vocabulary : sequence of str, optional
        Strings without duplicates. Without a vocabulary, call `adapt`.
    invert : bool
        True to convert indices to strings.
    output_mode : str
        Must be ``"int"``: other outputs are not supported.

    Notes
    -----
    Inputs are strings, and outputs are of dtype int64. With ``invert``, inputs are integers, and outputs
    are strings. The layer runs on the host.
    """

    _config_names = (
        "max_tokens",
        "num_oov_indices",
        "mask_token",
        "oov_token",
        "invert",
        "output_mode",
    )
    _fixed = (
        ("pad_to_max_tokens", False),
        ("idf_weights", None),
        ("sparse", False),
        ("encoding", "utf-8"),
        ("vocabulary_dtype", "string"),
    )

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str = "[UNK]",
        vocabulary: Sequence[str | bytes] | None = None,
        invert: bool = False,
        output_mode: str = "int",
        **options: Any,
    ) -> None:
        options["dtype"] = "int64"
        super().__init__(**options)
        if num_oov_indices not in (0, 1):
            raise ValueError(
                f"StringLookup: num_oov_indices must be 0 or 1, got {num_oov_indices!r}"
            )
        if output_mode != "int":
            raise ValueError(f"StringLookup: output_mode must be 'int', got {output_mode!r}")
        self.output_mode = output_mode
        self.max_tokens = max_tokens
        self.num_oov_indices = num_oov_indices
        self.mask_token = mask_token
        self.oov_token = oov_token
        self.invert = bool(invert)
        if self.invert:
            self._dtype = string
        self._tokens: list[str] = []
        self._indices: dict[bytes, int] = {}
        if vocabulary is not None:
            self.set_vocabulary(vocabulary)

    def get_config(self) -> dict[str, Any]:
        vocabulary = self.get_vocabulary(include_special_tokens=False) or None
        return {**super().get_config(), "vocabulary": vocabulary}

    @property
    def _special(self) -> list[str]:
        mask = [] if self.mask_token is None else [self.mask_token]
        return mask + [self.oov_token] * self.num_oov_indices

    def set_vocabulary(self, vocabulary: Sequence[str | bytes]) -> None:
        """Set the strings; their indices follow those of ``mask_token`` and ``oov_token``.

        These two tokens may also be the first strings of ``vocabulary``.

        Raises
        ------
        ValueError
            If a string occurs twice, or ``vocabulary`` is a single string.
        """
        if isinstance(vocabulary, str):
            raise ValueError(
                f"StringLookup: vocabulary must be a list of strings, got {vocabulary!r}; read a file "
                "with open(path).read().splitlines()"
            )
        tokens = [v.decode() if isinstance(v, bytes) else str(v) for v in vocabulary]
        special = self._special
        if special and tokens[: len(special)] == special:
            tokens = tokens[len(special) :]
        repeated = [token for token, n in Counter(special + tokens).items() if n > 1]
        if repeated:
            raise ValueError(f"StringLookup: the vocabulary has strings twice: {repeated[:5]}")
        self._tokens = special + tokens
        self._indices = {token.encode(): index for index, token in enumerate(self._tokens)}

    def adapt(self, data: Any) -> None:
        """Make the strings of data the vocabulary; the most frequent string comes first.

        Parameters
        ----------
        data
            Strings, or batches of them such as a `Dataset`.
        """
        counts: Counter[bytes] = Counter()
        for batch in [data] if is_text(data) or isinstance(data, Tensor) else data:
            counts.update(_strings_of(batch).ravel().tolist())
        special = {token.encode() for token in self._special}
        found = sorted(counts, key=lambda token: (counts[token], token), reverse=True)
        tokens = [token.decode() for token in found if token not in special]
        count = None if self.max_tokens is None else max(0, self.max_tokens - len(special))
        self.set_vocabulary(tokens[:count])

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[str]:
        """Return the strings, ordered by their indices."""
        return self._tokens[0 if include_special_tokens else len(self._special) :]

    def vocabulary_size(self) -> int:
        """Return the number of indices."""
        return len(self._tokens)

    def _to_input(self, value: Any) -> Tensor:
        return as_tensor(value) if self.invert else Tensor(_strings_of(value))

    def call(self, inputs: Tensor) -> Tensor:
        if not self._tokens:
            raise ValueError(f'layer "{self._name}" has no vocabulary; pass one, or call adapt()')
        array = to_numpy(inputs.array)
        found = (
            self._strings(array.ravel()) if self.invert else self._numbers(array.ravel().tolist())
        )
        return Tensor(found.reshape(array.shape))

    def _numbers(self, strings: Iterable[bytes]) -> Any:
        other = None if not self.num_oov_indices else self._tokens.index(self.oov_token)
        numbers = [self._indices.get(item, other) for item in strings]
        if None in numbers:
            raise ValueError(
                f'layer "{self._name}" has num_oov_indices=0, and the inputs have strings outside of '
                "the vocabulary; consider num_oov_indices=1"
            )
        return np.array(numbers, np.int64)

    def _strings(self, indices: Any) -> Any:
        tokens, other = [token.encode() for token in self._tokens], self.oov_token.encode()
        found = np.empty(len(indices), string)
        found[:] = [tokens[i] if 0 <= i < len(tokens) else other for i in indices.tolist()]
        return found


def _strings_of(value: Any) -> Any:
    """Return strings as an array of bytes objects; raise ``TypeError`` for other values."""
    array = value.array if isinstance(value, Tensor) else value
    if not is_text(array):
        raise TypeError(f"StringLookup: inputs must be strings, got {value!r}")
    return as_text(array)
