"""The current strategy and context in scopes, replica functions and merge functions."""

from __future__ import annotations

import threading

import pytest
from strategies import mirrored, replica_id

from pycollective import distribute as d
from pycollective.distribute.context import current_mode
from pycollective.tensor import Variable, creator_scope


def facts():
    return (
        d.get_strategy(),
        d.get_replica_context(),
        d.in_cross_replica_context(),
        d.has_strategy(),
    )


def test_context_outside_every_scope_is_the_default():
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


def test_scope_has_the_strategy_in_cross_replica_context(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert facts() == (strategy, None, True, True)
        with strategy.scope():  # a scope of the same strategy is allowed
            assert facts() == (strategy, None, True, True)
        assert d.has_strategy()
    assert not d.has_strategy()


def test_replica_function_has_the_context_of_its_replica(strategy):
    def replica():
        got, context, cross, has = facts()
        assert (got, cross, has) == (strategy, False, True)
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        merged = context.merge_call(lambda s: (s is strategy, facts()[1:]))
        assert merged == (True, (None, True, True))
        return int(context.replica_id_in_sync_group)

    ids = strategy.experimental_local_results(strategy.run(replica))
    assert ids == tuple(range(strategy.num_replicas_in_sync))


def test_scopes_of_different_strategies_do_not_nest():
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
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="Must not nest tf.distribute.Str"):
        with default.scope():
            pass


def test_other_strategies_nest_in_the_default_strategy():
    default, two = d.get_strategy(), mirrored(2)
    with default.scope() as entered, default.scope():
        assert entered is default
        assert facts()[2:] == (False, False)
        assert type(Variable(1.0)) is Variable
        with two.scope():
            assert facts() == (two, None, True, True)
            with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objec"):
                Variable(1.0)
    with two.scope():
        assert type(Variable(1.0)) is not Variable


def test_a_scope_is_counted_and_can_be_used_again(two):
    scope, other = two.scope(), two.scope()
    for _ in range(2):
        with scope, other, scope:
            assert facts() == (two, None, True, True)
        assert not d.has_strategy()
    # The scope that was entered first stays in force until the program leaves it.
    scope.__enter__()
    other.__enter__()
    other.__exit__(None, None, None)
    assert d.get_strategy() is two
    scope.__exit__(None, None, None)
    assert not d.has_strategy()
    assert type(Variable(1.0)) is Variable
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert not d.has_strategy()


def test_scopes_left_out_of_order_raise(two):
    scope = two.scope()
    scope.__enter__()
    creators = creator_scope(lambda next_creator, **kwargs: next_creator(**kwargs))
    creators.__enter__()
    with pytest.raises(
        RuntimeError, match="^Variable creator scope nesting error: move call to tf"
    ):
        scope.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="Exiting variable_creator_scope without proper nesting"):
        creators.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="has not entered the scope of"):
        scope.__exit__(None, None, None)

    scope.__enter__()
    with pytest.raises(RuntimeError, match="^Device scope nesting error"):
        two.run(lambda: replica_id() or scope.__exit__(None, None, None))
    assert d.get_strategy() is two
    scope.__exit__(None, None, None)
    # No scope stays in force.
    assert facts()[2:] == (False, False)
    assert type(Variable(1.0)) is Variable
    with two.scope():
        assert type(Variable(1.0)) is not Variable


def test_scope_that_a_merge_function_does_not_leave_raises(two):
    with pytest.raises(RuntimeError, match="^Device scope nesting error"):
        d.get_replica_context().merge_call(lambda s: two.scope().__enter__())
    assert not d.has_strategy()
    assert type(Variable(1.0)) is Variable


def test_set_strategy_applies_outside_of_scopes_only(two):
    other = mirrored(3)
    try:
        d.experimental_set_strategy(two)
        assert facts() == (two, None, True, True)
        assert type(Variable(1.0)) is not Variable
        with two.scope():
            assert d.get_strategy() is two
            with pytest.raises(
                RuntimeError, match="Must not be called inside a `tf.distribute.Str"
            ):
                d.experimental_set_strategy(other)
        with pytest.raises(RuntimeError, match="Mixing different"), other.scope():
            pass
        with pytest.raises(RuntimeError, match="Must not be called inside"):
            two.run(lambda: d.experimental_set_strategy(None))
        d.experimental_set_strategy(other)
        assert d.get_strategy() is other
    finally:
        d.experimental_set_strategy(None)
    assert not d.has_strategy()
    d.experimental_set_strategy(None)
    with two.scope():
        for new in (other, None):
            with pytest.raises(
                RuntimeError, match="Must not be called inside a `tf.distribute.Str"
            ):
                d.experimental_set_strategy(new)
    default = d.get_strategy().scope()
    with default:
        d.experimental_set_strategy(two)
        assert d.get_strategy() is two
        d.experimental_set_strategy(None)
        assert type(Variable(1.0)) is Variable
    default.__enter__()
    d.experimental_set_strategy(two)
    with pytest.raises(
        RuntimeError, match="scope nesting error: move call to tf.distribute.set_str"
    ):
        default.__exit__(None, None, None)
    assert not d.has_strategy()
    d.experimental_set_strategy(two)
    d.experimental_set_strategy(None)
    assert type(Variable(1.0)) is Variable


def test_update_calls_its_function_for_each_replica_in_cross_replica_context(two):
    with two.scope():
        v = Variable(1.0)
    seen = []
    two.extended.update(v, lambda c: seen.append((facts(), current_mode().replica)))
    assert seen == [((two, None, True, True), r) for r in (0, 1)]


def test_variable_creators_of_the_caller_apply_in_the_replicas(two):
    def named(next_creator, **kwargs):
        return next_creator(**{**kwargs, "name": "mine"})

    with two.scope(), creator_scope(named):
        v = two.run(lambda: Variable(1.0))
    assert v.name == "mine"
    assert len(v.values) == 2


def test_scopes_belong_to_threads():
    seen = []
    with mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(d.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_stale_context_is_refused(two):
    kept = two.run(d.get_replica_context)
    for context in kept.values:
        with pytest.raises(RuntimeError, match="Mismatching tf.distribute.Strategy objects: "):
            context.merge_call(lambda s: 0)
        with two.scope(), pytest.raises(RuntimeError, match="Need to be inside `call_for_each_rep"):
            context.all_reduce("SUM", 1.0)
        with two.scope(), pytest.raises(RuntimeError, match="Need to be inside `call_for_each_rep"):
            context.all_gather([1.0], axis=0)
        with pytest.raises(RuntimeError, match="Mismatching ReplicaContext."):
            two.run(lambda context=context: context.merge_call(lambda s: 0))


def test_one_device_strategy_computes_without_wrappers():
    strategy = d.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = Variable(2.0)
    assert type(v) is Variable
    assert strategy.extended.variable_created_in_scope(v)
    assert float(strategy.run(lambda x: x * v, args=(3.0,))) == 6.0
    assert float(strategy.reduce("MEAN", 4.0, axis=None)) == 4.0
    with pytest.raises(ValueError, match="no device 'gpu:9'"):
        d.OneDeviceStrategy("gpu:9")
