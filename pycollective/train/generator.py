"""`Generator`: random numbers whose state is a variable, for replicas and checkpoints."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

import numpy as np

from pycollective.array_backend import to_numpy
from pycollective.distribute.context import has_strategy, mixing_message
from pycollective.distribute.default import get_replica_context, get_strategy
from pycollective.distribute.variables import DistributedVariable
from pycollective.dtypes import as_dtype, float32, int32, int64, uint64
from pycollective.tensor import Tensor, Variable, as_tensor, random
from pycollective.tensor.ops.arrays import shape_of
from pycollective.train.trackable import Trackable


class Algorithm(enum.Enum):
    """Algorithms that compute random numbers from a state; TensorFlow's THREEFRY is not implemented."""

    PHILOX = 1
    THREEFRY = 2
    AUTO_SELECT = 3


#: Number of words of the state: the counter's lower and upper half, and the key.
_WORDS = 3
#: Steps of the counter for each number, as in TensorFlow: no number needs more.
_STEPS = 256
_MASK = 2**64 - 1


def _checked_algorithm(alg: Any) -> int:
    """Return the number of an algorithm from a number, a name or an `Algorithm`."""
    try:
        found = Algorithm[alg.upper()] if isinstance(alg, str) else Algorithm(alg)
    except (KeyError, ValueError):
        raise ValueError(
            f"unknown algorithm {alg!r}: the random numbers come from 'philox' (or 'auto_select')"
        ) from None
    if found is Algorithm.THREEFRY:
        raise NotImplementedError("the algorithm 'threefry' is not implemented; use 'philox'")
    return Algorithm.PHILOX.value


def create_rng_state(seed: Any, alg: Any = "philox") -> Any:
    """Return the state for a seed, as an array of int64.

    Parameters
    ----------
    seed : int or sequence of int
        One integer, of which the lowest 192 bits count, or up to three integers of 64 bits. A
        single word becomes the key.
    alg : str, int or Algorithm
        The algorithm.

    Raises
    ------
    NotImplementedError
        The algorithm is ``"threefry"``.
    TypeError
        The seed does not consist of integers.
    ValueError
        The algorithm is unknown.
    """
    _checked_algorithm(alg)
    array = to_numpy(as_tensor(seed).array) if not isinstance(seed, int) else None
    if array is None:
        whole, words = int(seed), []
        for _ in range(_WORDS):
            words.append(whole & _MASK)
            whole >>= 64
        words.reverse()
    elif array.dtype.kind not in "iu":
        raise TypeError(f"a seed consists of integers, not of {array.dtype}")
    else:
        words = [int(word) & _MASK for word in array.ravel()[:_WORDS].tolist()]
    words = [0] * (_WORDS - len(words)) + words
    return np.array(words, np.uint64).view(np.int64)


class Generator(Trackable):
    """A source of random numbers, whose state is a variable that a `Checkpoint` saves.

    Make one with `from_seed`, `from_non_deterministic_state`, `from_state` or `from_key_counter`.

    Parameters
    ----------
    copy_from : Generator, optional
        A generator whose state and algorithm are copied.
    state : sequence of int, optional
        Three integers of 64 bits: the counter's lower and upper half, and the key.
    alg : str, int or Algorithm, optional
        The algorithm: ``"philox"``.

    Raises
    ------
    ValueError
        The arguments are not ``copy_from`` alone, or ``state`` with ``alg``. The state does not
        consist of three integers, or the algorithm is unknown.

    Notes
    -----
    The interface is TensorFlow's, the numbers are not: they come from NumPy's Philox. Equal states
    give equal numbers in every program and on every machine with the same version of NumPy.

    A generator that was made in a strategy's scope has a state on each replica. In a replica function
    each replica draws from its own stream, which depends on the state and the replica's number.
    Outside of a replica function, a draw advances the states of all replicas. A checkpoint saves
    one replica's state, so all replicas should make the same draws before it. A checkpoint can be
    restored into a strategy with another number of replicas: a replica's stream depends on its
    number only.
    """

    def __init__(self, copy_from: Generator | None = None, state: Any = None, alg: Any = None):
        if copy_from is not None:
            if state is not None or alg is not None:
                raise ValueError("Generator() takes copy_from, or state and alg, not both")
            state, alg = copy_from._state_words(), copy_from._alg
        if state is None or alg is None:
            raise ValueError(
                "Generator() needs copy_from, or state and alg; see Generator.from_seed"
            )
        self._alg: int = _checked_algorithm(alg)
        self._strategy = get_strategy() if has_strategy() else None
        self._state_var = Variable(_checked_state(state), trainable=False, name="StateVar")

    @classmethod
    def from_seed(cls, seed: Any, alg: Any = None) -> Generator:
        """Return a generator for a seed: an integer, or up to three integers of 64 bits."""
        alg = Algorithm.PHILOX if alg is None else alg
        return cls(state=create_rng_state(seed, alg), alg=alg)

    @classmethod
    def from_state(cls, state: Any, alg: Any) -> Generator:
        """Return a generator that continues from a state, such as another generator's `state`."""
        return cls(state=state, alg=alg)

    @classmethod
    def from_key_counter(cls, key: int, counter: Any, alg: Any) -> Generator:
        """Return a generator for a key and a counter: an integer, or its lower and upper half."""
        return cls(state=_key_counter(key, counter), alg=alg)

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> Generator:
        """Return a generator seeded with random numbers of the operating system."""
        alg = Algorithm.PHILOX if alg is None else alg
        words = np.random.SeedSequence().generate_state(_WORDS, np.uint64)
        return cls(state=words.view(np.int64), alg=alg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generator:
        copied = Generator(copy_from=self)
        memo[id(self)] = copied
        return copied

    # The state ----------------------------------------------------------------------------------

    @property
    def state(self) -> Variable:
        """The state: a variable of three int64."""
        return self._state_var

    @property
    def algorithm(self) -> int:
        """The number of the algorithm: 1, Philox."""
        return self._alg

    @property
    def key(self) -> Tensor:
        """The part of the state that draws do not change."""
        return as_tensor(self._state_var)[-1]

    def reset(self, state: Any) -> None:
        """Continue from a state."""
        self._state_var.assign(_checked_state(state))

    def reset_from_seed(self, seed: Any) -> None:
        """Restart from a seed; see `from_seed`."""
        self._state_var.assign(create_rng_state(seed, self._alg))

    def reset_from_key_counter(self, key: int, counter: Any) -> None:
        """Continue from a key and a counter; see `from_key_counter`."""
        self._state_var.assign(_key_counter(key, counter))

    def skip(self, delta: Any) -> Tensor:
        """Skip the numbers of a draw of shape ``[delta]``; return the old state."""
        return Tensor(self._advance(index(delta)))

    def _state_words(self) -> Any:
        return to_numpy(as_tensor(self._state_var).array)

    def _advance(self, count: int) -> Any:
        """Advance the state by a number of draws, and return the old state."""
        if self._strategy is not None and has_strategy() and get_strategy() is not self._strategy:
            raise RuntimeError(mixing_message(get_strategy(), self._strategy))
        variable = self._state_var
        replica, strategy = self._replica(), self._strategy
        if replica is not None and strategy and strategy.extended.updates_variables_once:
            # The replicas share the state, and advance it once.
            updated = strategy.extended.update(variable, _advance_one, args=(count,))
            return to_numpy(as_tensor(updated).array)
        if isinstance(variable, DistributedVariable) and variable._replica() is None:
            olds = [_advance_one(component, count) for component in variable.values]
            return olds[0].array
        return _advance_one(variable.local(), count).array

    def _replica(self) -> int | None:
        """Return the current replica's number among all replicas, or None outside of a replica."""
        context = get_replica_context()
        if self._strategy is None or context is None or context.strategy is not self._strategy:
            return None
        return self._strategy.extended.first_replica + context.local_replica_id

    @contextmanager
    def _drawing(self, shape: Any) -> Iterator[np.random.Generator]:
        """Let the functions of `random` draw numbers of a shape from the present state."""
        low, high, key = np.asarray(self._advance(int(np.prod(shape_of(shape))))).view(np.uint64)
        replica = self._replica()
        # The third word of the counter selects the stream: 0, or the replica's number + 1.
        counter = np.array([low, high, 0 if replica is None else replica + 1, 0], np.uint64)
        bits = np.random.Philox(counter=counter, key=np.array([key, 0], np.uint64))
        generator = np.random.Generator(bits)
        with random.generator_scope(generator):
            yield generator

    # Numbers ------------------------------------------------------------------------------------

    def normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = float32, name: Any = None
    ) -> Tensor:
        """Return normally distributed numbers."""
        with self._drawing(shape):
            return random.normal(shape, mean, stddev, dtype)

    def truncated_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = float32, name: Any = None
    ) -> Tensor:
        """Return normally distributed numbers, all within two ``stddev`` of ``mean``."""
        with self._drawing(shape):
            return random.truncated_normal(shape, mean, stddev, dtype)

    def uniform(
        self,
        shape: Any,
        minval: Any = 0,
        maxval: Any = None,
        dtype: Any = float32,
        name: Any = None,
    ) -> Tensor:
        """Return uniform numbers from ``minval`` to below ``maxval`` (for floats by default 1).

        Integers without both (``minval=None``) are uniform over the whole dtype.
        """
        if minval is None and maxval is None and as_dtype(dtype).kind in "iu":
            return self.uniform_full_int(shape, dtype)
        with self._drawing(shape):
            return random.uniform(shape, 0 if minval is None else minval, maxval, dtype)

    def uniform_full_int(self, shape: Any, dtype: Any = uint64, name: Any = None) -> Tensor:
        """Return integers that are uniform over the whole dtype."""
        kind = as_dtype(dtype)
        if kind.kind not in "iu":
            raise ValueError(f"uniform_full_int makes integers, got dtype {kind}")
        info = np.iinfo(kind)
        with self._drawing(shape) as generator:
            numbers = generator.integers(info.min, info.max, shape_of(shape), kind, endpoint=True)
        return Tensor(np.asarray(numbers))

    def binomial(
        self, shape: Any, counts: Any, probs: Any, dtype: Any = int32, name: Any = None
    ) -> Tensor:
        """Return numbers of successes in ``counts`` trials, each with probability ``probs``.

        ``counts`` and ``probs`` are broadcast to ``shape``.
        """
        trials, chances = (to_numpy(as_tensor(value).array) for value in (counts, probs))
        with self._drawing(shape) as generator:
            numbers = generator.binomial(trials.astype(np.int64), chances, shape_of(shape))
        return Tensor(np.asarray(numbers).astype(as_dtype(dtype)))

    def make_seeds(self, count: int = 1) -> Tensor:
        """Return seeds for stateless functions: int64 of shape ``[2, count]``."""
        keys = self.uniform_full_int([count], int64).array
        return Tensor(np.stack([keys, np.zeros_like(keys)]))

    def split(self, count: int = 1) -> list[Generator]:
        """Return new generators, independent of this one and of each other."""
        keys = self.uniform_full_int([count], int64).array.tolist()
        return [Generator(state=[0, 0, key], alg=self._alg) for key in keys]

    def __repr__(self) -> str:
        return f"<tf.random.Generator: state={self._state_words().tolist()}>"


def _checked_state(state: Any) -> Any:
    array = to_numpy(as_tensor(state).array)
    if array.shape != (_WORDS,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"the state of a generator is {_WORDS} integers of 64 bits, not {array.dtype} of shape "
            f"{tuple(array.shape)}"
        )
    words = [int(word) & _MASK for word in array.tolist()]
    return np.array(words, np.uint64).view(np.int64)


def _key_counter(key: Any, counter: Any) -> Any:
    halves = to_numpy(as_tensor(counter).array).ravel().tolist()
    if len(halves) > 2:
        raise ValueError(f"a counter is an integer, or its lower and upper half, not {counter!r}")
    if len(halves) == 1:
        halves = [halves[0] & _MASK, halves[0] >> 64 & _MASK]
    return create_rng_state([_signed(word) for word in (*halves, index(key))])


def _signed(word: int) -> int:
    """Return a word of 64 bits as a signed integer."""
    return (word + 2**63) % 2**64 - 2**63


def _advance_one(variable: Variable, count: int) -> Tensor:
    """Advance the state in a variable without components; return the old state."""
    with variable._lock:  # replicas may share a generator made outside of a strategy
        old = np.array(to_numpy(variable.current().array))
        low, high, key = old.view(np.uint64).tolist()
        counter = (low | high << 64) + count * _STEPS
        words = [counter & _MASK, counter >> 64 & _MASK, key]
        variable.assign(np.array(words, np.uint64).view(np.int64))
    return Tensor(old)


_global: Generator | None = None
_lock = threading.Lock()


def get_global_generator() -> Generator:
    """Return the program's generator; the first call makes one with a random seed."""
    global _global
    with _lock:
        if _global is None:
            _global = Generator.from_non_deterministic_state()
        return _global


def set_global_generator(generator: Generator) -> None:
    """Set the program's generator.

    Raises
    ------
    TypeError
        ``generator`` is not a `Generator`.
    """
    global _global
    if not isinstance(generator, Generator):
        raise TypeError(f"set_global_generator needs a Generator, not {generator!r}")
    with _lock:
        _global = generator
