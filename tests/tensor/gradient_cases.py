"""The cases of `test_gradients`: each differentiable operation, and inputs for it."""

from __future__ import annotations

import numpy as np

import pycollective.nn as nn
import pycollective.tensor as tf
from pycollective import nest
from pycollective.tensor.ops.reductions import sum_over


def numbers(*shape, low=-2.0, high=2.0, seed=0):
    """Return distinct numbers, spread evenly, without 0."""
    count = int(np.prod(shape))
    spread = np.linspace(low, high, count + 2)[1:-1] + 0.0137 + 0.31 * seed
    return np.random.default_rng(seed).permutation(spread).reshape(shape)


def positive(*shape, seed=0):
    return numbers(*shape, low=0.2, high=3.0, seed=seed)


def pairs(op, make=numbers, shapes=None):
    """Return the broadcasting cases of an operation of two operands."""
    shapes = shapes or [
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((3,), (2, 3)),
        ((2, 1), (1, 3)),
        ((), (2, 3)),
        ((2, 3), ()),
        ((), ()),
        ((1,), ()),
        ((4, 1, 3), (2, 1)),
        ((0, 3), (3,)),
    ]
    return [(op, (make(*a), make(*b, seed=1))) for a, b in shapes]


def singles(op, make=numbers, shapes=((2, 3), (), (0, 3))):
    return [(op, (make(*shape),)) for shape in shapes]


def reductions(op):
    options = [{}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 2)}, {"axis": []}]
    options += [{"axis": [2, 0], "keepdims": True}, {"keepdims": True}]
    cases = [(lambda x, o=o: op(x, **o), (numbers(2, 3, 4),)) for o in options]
    return [*cases, (op, (numbers(),)), (lambda x: op(x, axis=1), (numbers(0, 3),))]


IDS = np.array([[2, 0], [2, 1]])
MASK = np.array([[True, False, True], [False, True, True]])
LABELS = np.array([2, 0, 1, 2])

CASES = {
    "add": pairs(tf.add),
    "add_relu": pairs(nn.add_relu),
    "prelu": pairs(nn.prelu),
    "subtract": pairs(tf.subtract),
    "multiply": pairs(tf.multiply),
    "divide": pairs(tf.divide),
    "maximum": pairs(tf.maximum),
    "minimum": pairs(tf.minimum),
    "squared_difference": pairs(tf.squared_difference),
    "pow": [
        *pairs(tf.pow, positive),
        (lambda x: tf.pow(x, 3.0), (numbers(2, 3),)),
        (lambda x: tf.pow(x, 0.0), (np.array([0.0, 1.5]),)),
        (lambda x: tf.pow(x, 1.0), (np.array([0.0, -1.5]),)),
        (lambda x: tf.pow(x, 2), (np.array([0.0, -1.5]),)),
    ],
    "mod": pairs(tf.mod, positive),
    "negative": singles(tf.negative),
    "abs": singles(tf.abs),
    "square": singles(tf.square),
    "sqrt": singles(tf.sqrt, positive),
    "rsqrt": singles(tf.rsqrt, positive),
    "reciprocal": singles(tf.reciprocal, positive),
    "sign": singles(tf.sign),
    "exp": singles(tf.exp),
    "log": singles(tf.log, positive),
    "log1p": singles(tf.log1p, positive),
    "sin": singles(tf.sin),
    "cos": singles(tf.cos),
    "tanh": singles(tf.tanh),
    "sigmoid": [*singles(tf.sigmoid), (tf.sigmoid, (np.array([-40.0, 40.0]),))],
    "where": [
        (lambda x, y: tf.where(MASK, x, y), (numbers(2, 3), numbers(2, 3, seed=1))),
        (lambda x, y: tf.where(MASK, x, y), (numbers(3), numbers(2, 1, seed=1))),
        (lambda x: tf.where(MASK, x, 0.0), (numbers(2, 3),)),
    ],
    "clip_by_value": [
        *singles(lambda x: tf.clip_by_value(x, -0.9, 0.8)),
        *singles(lambda x: tf.clip_by_value(x, tf.stop_gradient(0 * x - 0.9), 0.8)),
    ],
    "reduce_sum": reductions(tf.reduce_sum),
    "reduce_mean": reductions(tf.reduce_mean),
    "sum_over": [
        (lambda x: sum_over(x, 7.0), [numbers(3, 4)]),
        (lambda x: sum_over(x, 2.0), [numbers(40, 30)]),
    ],
    "reduce_max": reductions(tf.reduce_max),
    "reduce_min": reductions(tf.reduce_min),
    "reduce_prod": [
        *reductions(tf.reduce_prod),
        (lambda x: tf.reduce_prod(x, axis=1), (np.array([[2.0, 0.0, 3.0], [0.0, 0.0, 1.0]]),)),
    ],
    "add_n": [(lambda x, y: tf.add_n([x, y, x]), (numbers(2, 3), numbers(2, 3, seed=1)))],
    "matmul": [
        *pairs(
            tf.matmul,
            shapes=[
                ((2, 3), (3, 4)),
                ((5, 2, 3), (3, 4)),
                ((2, 3), (5, 3, 4)),
                ((2, 1, 2, 3), (5, 3, 1)),
                ((0, 3), (3, 4)),
            ],
        ),
        *pairs(lambda a, b: tf.matmul(a, b, transpose_a=True), shapes=[((3, 2), (3, 4))]),
        *pairs(lambda a, b: tf.matmul(a, b, transpose_b=True), shapes=[((5, 2, 3), (4, 3))]),
        *pairs(lambda a, b: tf.matmul(a, b, adjoint_a=True), shapes=[((3, 2), (3, 4))]),
    ],
    "tensordot": [
        *pairs(lambda a, b: tf.tensordot(a, b, 1), shapes=[((2, 3), (3, 4)), ((3,), (3,))]),
        *pairs(lambda a, b: tf.tensordot(a, b, 0), shapes=[((2,), (3,))]),
        *pairs(
            lambda a, b: tf.tensordot(a, b, ([0, 2], [3, 1])), shapes=[((2, 3, 4), (5, 4, 1, 2))]
        ),
    ],
    "identity": singles(tf.identity),
    "cast": singles(lambda x: tf.cast(x, tf.as_tensor(np.float64(0)).dtype)),
    "reshape": singles(lambda x: tf.reshape(x, [-1, 1]), shapes=((2, 3), (), (0, 3))),
    "transpose": [
        (tf.transpose, (numbers(2, 3, 4),)),
        (lambda x: tf.transpose(x, [1, 2, 0]), (numbers(2, 3, 4),)),
    ],
    "expand_dims": singles(lambda x: tf.expand_dims(x, 0)),
    "squeeze": [
        (tf.squeeze, (numbers(1, 3, 1),)),
        (lambda x: tf.squeeze(x, [-1]), (numbers(1, 3, 1),)),
    ],
    "broadcast_to": [(lambda x: tf.broadcast_to(x, (4, 2, 3)), (numbers(2, 1),))],
    "tile": [(lambda x: tf.tile(x, [2, 3]), (numbers(2, 3),))],
    "pad": [(lambda x: tf.pad(x, [[1, 0], [0, 2]], constant_values=5.0), (numbers(2, 3),))],
    "concat": [
        (lambda x, y: tf.concat([x, y], 1), (numbers(2, 3), numbers(2, 1, seed=1))),
        (lambda x, y: tf.concat([x, y, x], 0), (numbers(2, 3), numbers(0, 3, seed=1))),
    ],
    "stack": [
        (lambda x, y: tf.stack([x, y]), (numbers(2, 3), numbers(2, 3, seed=1))),
        (lambda x, y: tf.stack([x, y], axis=-1), (numbers(2, 3), numbers(2, 3, seed=1))),
        (lambda x, y: tf.as_tensor([[x, 1.0], [y, x]]), (numbers(), numbers(seed=1))),
    ],
    "unstack": [(lambda x: tf.unstack(x, axis=1), (numbers(2, 3),))],
    "split": [
        (lambda x: tf.split(x, 3, axis=1), (numbers(2, 3),)),
        (lambda x: tf.split(x, [1, -1])[1], (numbers(4, 3),)),
    ],
    "getitem": [
        (lambda x: x[1], (numbers(4, 3),)),
        (lambda x: x[..., None, 1:], (numbers(4, 3),)),
        (lambda x: x[::-2, 0], (numbers(4, 3),)),
        (lambda x: x[tf.constant([1, 1, 0])], (numbers(4, 3),)),
        (lambda x: x[tf.constant([True, False, True, True])], (numbers(4, 3),)),
        (lambda x: x[x > 0], (numbers(4, 3),)),
        (lambda x: x[tf.constant(1), 2], (numbers(4, 3),)),
        (lambda x: x[-1], (numbers(4),)),
        (lambda x: x[1, 2], (numbers(4, 3),)),
        (lambda x: x[0, ..., 2], (numbers(4, 3),)),
    ],
    "gather": [
        (lambda x: tf.gather(x, IDS), (numbers(3, 2),)),
        (lambda x: tf.gather(x, IDS, axis=-1), (numbers(2, 3),)),
        (lambda x: tf.gather(x, tf.constant(1)), (numbers(3, 2),)),
        (lambda x: tf.gather(x, [[0, 2], [1, 1]], batch_dims=1), (numbers(2, 3, 2),)),
        (lambda x: tf.gather(x, [1, 0], axis=2, batch_dims=1), (numbers(2, 2, 3, 2),)),
    ],
    "relu": singles(nn.relu),
    "softplus": singles(nn.softplus),
    "silu": singles(nn.silu),
    "elu": [*singles(nn.elu), *singles(lambda x: nn.elu(x, 0.3))],
    "selu": singles(nn.selu),
    "leaky_relu": singles(nn.leaky_relu),
    "gelu": [*singles(nn.gelu), *singles(lambda x: nn.gelu(x, approximate=True))],
    "mish": singles(nn.mish),
    "softsign": singles(nn.softsign),
    # The kinks of these functions are at 0 and 6, and at -3 and 3.
    "relu6": singles(lambda x: nn.relu6(x * 4.0)),
    "hard_sigmoid": singles(lambda x: nn.hard_sigmoid(x * 2.0)),
    "hard_silu": singles(lambda x: nn.hard_silu(x * 2.0)),
    "softmax": [
        *singles(nn.softmax, shapes=((2, 3), (0, 3))),
        (lambda x: nn.softmax(x, 0), (numbers(2, 3),)),
    ],
    "log_softmax": singles(nn.log_softmax, shapes=((2, 3), (0, 3), (2, 2, 2))),
    "bias_add": pairs(nn.bias_add, shapes=[((2, 3), (3,)), ((2, 4, 3), (3,)), ((0, 3), (3,))]),
    "dropout": [
        (lambda x: (tf.random.set_seed(1), nn.dropout(x, 0.4))[1], (numbers(4, 3),)),
        (lambda x: (tf.random.set_seed(1), nn.dropout(x, 0.4, (None, 1)))[1], (numbers(4, 3),)),
    ],
    "moments": [
        (lambda x: nn.moments(x, [0]), (numbers(4, 3),)),
        (lambda x: nn.moments(x, None), (numbers(4, 3),)),
        (lambda x: nn.moments(x, [0, 2], keepdims=True), (numbers(2, 3, 4),)),
    ],
    "batch_normalization": [
        (
            lambda x, m, v, b, s: nn.batch_normalization(x, m, v, b, s, 0.01),
            (
                numbers(4, 3),
                numbers(3, seed=1),
                positive(3),
                numbers(3, seed=2),
                numbers(3, seed=3),
            ),
        ),
        (
            lambda x, m, v: nn.batch_normalization(x, m, v, None, None, 0.01),
            (numbers(4, 3), numbers(3, seed=1), positive(3)),
        ),
    ],
    "normalize_batch": [
        (lambda x: nn.normalize_batch(x)[0], (numbers(4, 3),)),
        (
            lambda x, s, b: nn.normalize_batch(x, s, b, 0.1)[0],
            (numbers(2, 3, 2, 3), numbers(3, seed=1), numbers(3, seed=2)),
        ),
        (lambda x, s: nn.normalize_batch(x, s)[0], (numbers(5, 2), numbers(2, seed=1))),
        (lambda x, b: nn.normalize_batch(x, None, b)[0], (numbers(0, 2), numbers(2, seed=1))),
    ],
    "layer_normalization": [
        (nn.layer_normalization, (numbers(4, 3),)),
        (nn.layer_normalization, (numbers(0, 3), numbers(3, seed=1))),
        (
            lambda x, s, b: nn.layer_normalization(x, s, b, axis=[1, 3]),
            (numbers(2, 3, 2, 4), numbers(3, 4, seed=1), numbers(3, 4, seed=2)),
        ),
        (
            lambda x, b: nn.layer_normalization(x, None, b, axis=[1, 2], epsilon=0.5),
            (numbers(2, 3, 4), numbers(3, 4, seed=1)),
        ),
    ],
    "sparse_softmax_cross_entropy_with_logits": [
        (lambda x: nn.sparse_softmax_cross_entropy_with_logits(LABELS, x), (numbers(4, 3),)),
        (lambda x: nn.sparse_softmax_cross_entropy_with_logits(IDS, x), (numbers(2, 2, 3),)),
        (
            lambda x: nn.sparse_softmax_cross_entropy_with_logits(LABELS[:0], x),
            (numbers(0, 3),),
        ),
    ],
    "softmax_cross_entropy_with_logits": [
        *pairs(nn.softmax_cross_entropy_with_logits, shapes=[((2, 3), (2, 3)), ((0, 3), (0, 3))]),
        *pairs(
            lambda y, x: nn.softmax_cross_entropy_with_logits(y, x, axis=0),
            shapes=[((2, 3), (2, 3))],
        ),
    ],
    "sigmoid_cross_entropy_with_logits": pairs(
        nn.sigmoid_cross_entropy_with_logits, shapes=[((2, 3), (2, 3)), ((), ()), ((0, 3), (0, 3))]
    ),
    "l2_loss": singles(nn.l2_loss),
}


def weighted(op, arrays):
    """Return the outputs of ``op``, and a sum of their elements with different weights."""
    outputs = nest.flatten(op(*arrays))
    total = tf.constant(0.0, dtype=outputs[0].dtype)
    for k, out in enumerate(outputs):
        weights = numbers(*out.shape, low=0.5, high=1.5, seed=7 + k).astype(out.dtype)
        total = total + tf.reduce_sum(out * weights)
    return outputs, total


def gradients_of(op, arrays):
    tensors = [tf.constant(a) for a in arrays]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        outputs, total = weighted(op, tensors)
    found = tape.gradient(total, tensors)
    return outputs, [g if g is None else tf.as_tensor(g) for g in found]
