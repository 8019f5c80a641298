"""Which strategy and which context is in force where."""

from __future__ import annotations

import threading

import pytest
from strategies import mirrored

from pycollective import distribute as d
from pycollective.tensor import Variable


def facts():
    return (
        d.get_strategy(),
        d.get_replica_context(),
        d.in_cross_replica_context(),
        d.has_strategy(),
    )


def test_outside_everything():
    strategy, context, cross, has = facts()
    assert strategy is d.get_strategy()
    assert context.replica_id_in_sync_group == 0
    assert isinstance(context.replica_id_in_sync_group, int)
    assert (cross, has) == (False, False)
    assert strategy.num_replicas_in_sync == 1
    assert float(strategy.reduce("SUM", 1.0, axis=None)) == 1.0
    assert strategy.experimental_local_results(3) == (3,)
    assert strategy.run(lambda x: x + 1, args=(2,)) == 3
    assert context.merge_call(lambda s, x: (s, x, facts()[1:]), args=(5,)) == (
        strategy,
        5,
        (None, True, False),
    )
    with pytest.raises(RuntimeError, match="single instance"):
        type(strategy)()


def test_in_a_scope(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert facts() == (strategy, None, True, True)
        with strategy.scope():  # the same one again is allowed
            assert facts() == (strategy, None, True, True)
        assert d.has_strategy()
    assert not d.has_strategy()


def test_in_a_replica(strategy):
    def replica():
        got, context, cross, has = facts()
        assert (got, cross, has) == (strategy, False, True)
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        merged = context.merge_call(lambda s: (s is strategy, facts()[1:]))
        assert merged == (True, (None, True, True))
        return int(context.replica_id_in_sync_group)

    ids = strategy.experimental_local_results(strategy.run(replica))
    assert ids == tuple(range(strategy.num_replicas_in_sync))


def test_scopes_that_do_not_nest():
    one, other = mirrored(2), mirrored(2)
    with one.scope():
        with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
            with other.scope():
                pass
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.run(lambda: 0)
        assert d.get_strategy() is one
    with pytest.raises(RuntimeError, match="cross-replica context"):
        one.run(lambda: one.reduce("SUM", 1.0, axis=None))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        one.run(lambda: one.run(lambda: 0))


def test_the_default_strategy_does_not_nest_in_others():
    default = d.get_strategy()
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="Must not nest"):
        with default.scope():
            pass


def test_scopes_belong_to_threads():
    seen = []
    with mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(d.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_stale_context_is_refused(two):
    kept = two.run(d.get_replica_context)
    with pytest.raises(RuntimeError):
        kept.values[0].merge_call(lambda s: 0)
    with two.scope(), pytest.raises(RuntimeError, match="call_for_each_replica"):
        kept.values[1].all_reduce("SUM", 1.0)


def test_one_device_strategy():
    strategy = d.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = Variable(2.0)
    assert type(v) is Variable
    assert strategy.extended.variable_created_in_scope(v)
    assert float(strategy.run(lambda x: x * v, args=(3.0,))) == 6.0
    assert float(strategy.reduce("MEAN", 4.0, axis=None)) == 4.0
    with pytest.raises(ValueError, match="no device 'gpu:9'"):
        d.OneDeviceStrategy("gpu:9")
