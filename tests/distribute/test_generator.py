"""`tf.random.Generator`: its state, its numbers, under strategies and in checkpoints."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
from strategies import EVERY, mirrored, workers
from workers import run

import pycollective as tf
from pycollective import distribute

Generator = tf.random.Generator


def numbers(values):
    """Return the replicas' tensors as lists."""
    return [np.asarray(v).tolist() for v in getattr(values, "values", (values,))]


# Without a strategy -----------------------------------------------------------------------------


DRAWS = {
    "normal": lambda g: g.normal([100]),
    "truncated_normal": lambda g: g.truncated_normal([100], mean=1.0, stddev=2.0),
    "uniform": lambda g: g.uniform([100], 2.0, 3.0),
    "uniform, ints": lambda g: g.uniform([100], 2, 9, tf.int32),
    "uniform, all ints": lambda g: g.uniform([100], None, None, tf.int64),
    "uniform_full_int": lambda g: g.uniform_full_int([100], tf.uint8),
    "binomial": lambda g: g.binomial([100], 10.0, 0.5),
    "make_seeds": lambda g: g.make_seeds(100),
    "split": lambda g: tf.stack([part.normal([]) for part in g.split(3)]),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_equal_states_give_equal_numbers_and_each_draw_gives_new_ones(draw):
    g, h = Generator.from_seed(1), Generator.from_seed(1)
    first, second = np.asarray(draw(g)), np.asarray(draw(g))
    assert first.tolist() == np.asarray(draw(h)).tolist()
    assert first.tolist() != second.tolist()
    assert np.asarray(draw(Generator.from_seed(2))).tolist() not in (
        first.tolist(),
        second.tolist(),
    )
    state = g.state.numpy()
    third = np.asarray(draw(g)).tolist()
    g.reset(state)
    assert np.asarray(draw(g)).tolist() == third


NUMBERS_OF_SEED_1 = [5599841837815857887, 15655913098571550255]


def test_numbers_stay_the_same_from_release_to_release():
    g = Generator.from_seed(1)
    assert g.uniform_full_int([2], tf.uint64).numpy().tolist() == NUMBERS_OF_SEED_1
    assert Generator.from_seed(1).normal([2]).numpy() == pytest.approx([1.020288, 0.7597132])


def test_distributions_have_the_means_and_ranges_of_their_arguments():
    g = Generator.from_seed(5)
    x = g.normal([20000], 3.0, 2.0, tf.float64).numpy()
    assert x.dtype == np.float64
    assert abs(x.mean() - 3) < 0.1 and abs(x.std() - 2) < 0.1
    x = g.truncated_normal([20000], 3.0, 2.0).numpy()
    assert x.min() >= -1 and x.max() <= 7 and abs(x.mean() - 3) < 0.1
    x = g.uniform([20000], -1.0, 1.0).numpy()
    assert x.min() >= -1 and x.max() < 1 and abs(x.mean()) < 0.05
    assert set(g.uniform([200], 2, 5, tf.int32).numpy().tolist()) == {2, 3, 4}
    full = g.uniform_full_int([2000], tf.int8).numpy()
    assert full.dtype == np.int8 and len(set(full.tolist())) == 256
    x = g.binomial([2000, 2], [10.0, 20.0], [0.8, 0.5])
    assert x.dtype == np.int32 and x.shape == (2000, 2)
    assert np.abs(x.numpy().mean(0) - [8, 10]).max() < 0.3
    assert g.make_seeds(3).shape == (2, 3)
    assert g.normal([]).shape == () and g.normal([0, 2]).shape == (0, 2)


def test_draws_do_not_overlap():
    """A draw of n numbers advances the counter as `skip(n)` does."""
    one, two = Generator.from_seed(1), Generator.from_seed(1)
    one.normal([3])
    one.truncated_normal([2, 2])
    assert two.skip(7).numpy().tolist() == [0, 0, 1]
    assert one.state.numpy().tolist() == two.state.numpy().tolist()
    assert one.normal([2]).numpy().tolist() == two.normal([2]).numpy().tolist()
    assert two.skip(tf.constant(1)).numpy().tolist() == one.state.numpy().tolist()


def test_generator_state_is_set_and_read():
    g = Generator.from_state([1, 2, 3], "philox")
    assert g.state.numpy().tolist() == [1, 2, 3]
    assert (g.state.dtype, g.state.trainable, g.algorithm, int(g.key)) == (tf.int64, False, 1, 3)
    assert repr(g) == "<tf.random.Generator: state=[1, 2, 3]>"
    assert Generator.from_key_counter(3, [1, 2], 1).state.numpy().tolist() == [1, 2, 3]
    assert Generator.from_key_counter(-3, 7, tf.random.Algorithm.AUTO_SELECT).key.numpy() == -3
    g.reset_from_key_counter(5, [6, 7])
    assert g.state.numpy().tolist() == [6, 7, 5]
    g.reset_from_seed(2**64 + 9)
    assert g.state.numpy().tolist() == [0, 1, 9]
    assert Generator.from_seed([4, 5]).state.numpy().tolist() == [0, 4, 5]
    assert Generator.from_seed(tf.constant(4)).state.numpy().tolist() == [0, 0, 4]
    assert Generator.from_seed(-1).key.numpy() == -1
    g = Generator.from_state([-1, 0, 3], 1)  # the lower half is full: skip() carries into the upper
    g.skip(1)
    assert g.state.numpy().tolist() == [255, 1, 3]
    states = {tuple(Generator.from_non_deterministic_state().state.numpy()) for _ in range(4)}
    assert len(states) == 4
    for copied in (Generator(copy_from=g), copy.deepcopy(g)):
        assert copied.state.numpy().tolist() == g.state.numpy().tolist()
        copied.skip(1)
        assert copied.state.numpy().tolist() != g.state.numpy().tolist()


def test_generator_wrong_arguments_raise():
    for call, error, message in (
        (Generator, ValueError, "needs copy_from, or state and alg"),
        (lambda: Generator(Generator.from_seed(1), alg=1), ValueError, "not both"),
        (lambda: Generator.from_state([1, 2], 1), ValueError, r"3 integers .* shape \(2,\)"),
        (lambda: Generator.from_state([1.0, 2.0, 3.0], 1), ValueError, "not float32"),
        (lambda: Generator.from_seed(1.5), TypeError, "a seed consists of integers"),
        (lambda: Generator.from_seed(1, "dice"), ValueError, "unknown algorithm 'dice'"),
        (lambda: Generator.from_seed(1, "threefry"), NotImplementedError, "use 'philox'"),
        (lambda: Generator.from_seed(1).uniform_full_int([2], tf.float32), ValueError, "integers"),
        (lambda: tf.random.set_global_generator(3), TypeError, "needs a Generator, not 3"),
        (lambda: tf.random.stateless_normal([2], 3), ValueError, "seed must be two integers"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_global_generator_can_be_set():
    before = tf.random.get_global_generator()
    assert tf.random.get_global_generator() is before
    g = Generator.from_seed(3)
    try:
        tf.random.set_global_generator(g)
        assert tf.random.get_global_generator() is g
        assert tf.random.experimental.get_global_generator() is g
    finally:
        tf.random.set_global_generator(before)


def test_stateless_numbers_follow_from_their_seeds():
    seeds = Generator.from_seed(1).make_seeds(2)
    for draw in (
        tf.random.stateless_normal,
        tf.random.stateless_uniform,
        tf.random.stateless_truncated_normal,
    ):
        one, other = (draw([5], seeds[:, i]).numpy().tolist() for i in (0, 1))
        assert draw([5], seeds[:, 0]).numpy().tolist() == one != other
    assert tf.random.stateless_uniform([3], [1, 2], 5, 6, tf.int32).numpy().tolist() == [5, 5, 5]


def test_generator_does_not_change_other_random_numbers():
    tf.random.set_seed(1)
    expected = tf.random.normal([3]).numpy().tolist()
    tf.random.set_seed(1)
    Generator.from_seed(1).normal([3])
    assert tf.random.normal([3]).numpy().tolist() == expected


def test_threads_that_share_a_generator_draw_different_numbers():
    g = Generator.from_seed(1)
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend(float(g.normal([])) for _ in range(50)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 200
    assert int(g.state[0]) == 200 * 256


# Under strategies -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in EVERY if name != "default"])
def test_each_replica_draws_numbers_of_its_own(name):
    strategy = EVERY[name]()
    replicas = strategy.num_replicas_in_sync

    def new_generator():
        with strategy.scope():
            return Generator.from_seed(1)

    g = new_generator()
    first, second = (numbers(strategy.run(lambda: g.normal([3]))) for _ in range(2))
    drawn = [tuple(x) for x in first + second]
    assert len(set(drawn)) == len(drawn) == 2 * replicas
    h = new_generator()
    assert numbers(strategy.run(lambda: h.normal([3]))) == first
    assert numbers(strategy.run(tf.function(lambda: h.normal([3])))) == second
    assert h.state.numpy().tolist() == [6 * 256, 0, 1]
    outside = h.normal([3]).numpy().tolist()
    assert tuple(outside) not in drawn
    assert h.state.numpy().tolist() == [9 * 256, 0, 1]
    with strategy.scope():
        assert h.normal([3]).numpy().tolist() != outside
    third = numbers(strategy.run(lambda: h.normal([3])))
    strategy.run(lambda: g.skip(6))
    assert numbers(strategy.run(lambda: g.normal([3]))) == third


def test_replicas_streams_depend_on_their_numbers_only():
    found = []
    for replicas in (2, 4):
        strategy = mirrored(replicas)
        with strategy.scope():
            g = Generator.from_seed(1)
        found.append(numbers(strategy.run(lambda: g.uniform([2]))))  # noqa: B023
    assert found[1][:2] == found[0]


def test_replicas_share_a_generator_that_no_strategy_made(two):
    g = Generator.from_seed(1)
    drawn = numbers(two.run(lambda: g.normal([2])))
    again = Generator.from_seed(1)
    assert sorted(drawn) == sorted([again.normal([2]).numpy().tolist() for _ in range(2)])


def test_replicas_that_draw_different_counts_have_different_states(two):
    with two.scope():
        g = Generator.from_seed(1)

    def draws():
        replica = int(distribute.get_replica_context().replica_id_in_sync_group)
        return g.normal([1 + replica])

    two.run(draws)
    assert [int(c[0]) for c in g.state.values] == [256, 512]
    g.skip(1)
    assert [int(c[0]) for c in g.state.values] == [512, 768]
    g.reset_from_seed(4)
    assert [c.numpy().tolist() for c in g.state.values] == [[0, 0, 4]] * 2


def test_generator_of_another_strategy_is_refused(two):
    with two.scope():
        g = Generator.from_seed(1)
    other = mirrored(2)
    with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
        other.run(lambda: g.normal([1]))


def test_generator_of_a_strategy_starts_alike_on_all_replicas(two):
    with two.scope():
        g = Generator.from_non_deterministic_state()
        halves = g.split(2)
    assert len({tuple(c.numpy()) for c in g.state.values}) == 1
    assert len({tuple(part.state.numpy()) for part in halves}) == 2
    for part in halves:
        assert len({tuple(c.numpy()) for c in part.state.values}) == 1
        assert numbers(two.run(lambda part=part: part.normal([2])))


# In checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", [1, 2, 4])
@pytest.mark.parametrize("restored_by", [1, 2, 4])
def test_checkpoint_restores_every_replicas_stream(tmp_path, saved_by, restored_by):
    def make(replicas, seed):
        strategy = workers(replicas)
        with strategy.scope():
            g = Generator.from_seed(seed)
        return strategy, g, tf.train.Checkpoint(my_generator=g)

    one, g, checkpoint = make(saved_by, 1)
    one.run(lambda: g.normal([3]))
    path = checkpoint.save(str(tmp_path / "kept"))
    expected = numbers(one.run(lambda: g.normal([3])))
    two, h, other = make(restored_by, 2)
    other.restore(path).assert_consumed()
    found = numbers(two.run(lambda: h.normal([3])))
    same = min(saved_by, restored_by)
    assert found[:same] == expected[:same]


def test_checkpoint_restores_a_generator_without_a_strategy(tmp_path):
    g = Generator.from_seed(1)
    g.normal([3])
    path = tf.train.Checkpoint(g=g).write(str(tmp_path / "kept"))
    expected = g.normal([3]).numpy().tolist()
    h = Generator.from_non_deterministic_state()
    tf.train.Checkpoint(g=h).restore(path).assert_consumed()
    assert h.normal([3]).numpy().tolist() == expected


DRAWS_OF_WORKERS = """
strategy = strategy_of()
with strategy.scope():
    g = tf.random.Generator.from_non_deterministic_state()
before = g.state.numpy()
drawn = strategy.run(lambda: g.normal([2]))
say(before=before, after=g.state.numpy(), drawn=[np.asarray(v) for v in drawn.values])
"""


@pytest.mark.slow
def test_replicas_of_several_workers_draw_numbers_of_their_own(tmp_path):
    said = run(tmp_path, 2, DRAWS_OF_WORKERS, replicas=2).said
    assert said[0]["before"] == said[1]["before"]
    assert said[0]["after"] == said[1]["after"]
    drawn = {tuple(x) for one in said for x in one["drawn"]}
    assert len(drawn) == 4
