"""The cases of layers.py: arguments, shapes, and the peers' counterparts of each registered name.

A case's shapes are those of its inputs, separated by ";". "N" is the batch. A last word changes the
values, which are normal by default. "<10" makes integers below 10, "p" numbers between 0.05 and
0.95, "s" rows that sum to 1, and "h" one-hot rows. Expressions name the inputs x, y and z, and a
layer's trainable weights w and b, in its order. PyTorch's images are NCHW, and its kernels OIHW.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call to measure.

    Attributes
    ----------
    shapes : str
        The inputs, as this module describes them.
    arguments : str
        Arguments of a class, or of the call of a function (without: all inputs).
    torch, jax : str
        The peers' expressions; empty if there is no counterpart.
    transposed : bool
        True if a layer's inputs of four dimensions are NCHW in PyTorch.
    random : bool
        True if results are random, and so are not compared.
    """

    shapes: str
    arguments: str = ""
    torch: str = ""
    jax: str = ""
    transposed: bool = True
    random: bool = False


def both(shapes: str, arguments: str, expression: str) -> Case:
    """Return a case with one expression for both peers: ``xp`` is torch or jax.numpy."""
    return Case(shapes, arguments, expression, expression, transposed=False)


def conv(shapes: str, filters: int, size: int, stride: int = 1, dilation: int = 1) -> Case:
    """Return a convolution with padding "same" if it has no stride."""
    pad = dilation * (size // 2) if stride == 1 else 0
    arguments = f"{filters}, {size}, strides={stride}, dilation_rate={dilation}"
    return Case(
        shapes, arguments + (", padding='same'" if stride == 1 else ""),
        f"F.conv2d(x, w, b, stride={stride}, padding={pad}, dilation={dilation})",
        f"conv(x, w, {stride}, {'SAME' if stride == 1 else 'VALID'!r}, {dilation}) + b",
    )  # fmt: skip


def up(shapes: str, filters: int, size: int) -> Case:
    """Return a transposed convolution that doubles height and width."""
    pad = (size - 2) // 2
    return Case(
        shapes, f"{filters}, {size}, strides=2, padding='same'",
        f"F.conv_transpose2d(x, w, b, stride=2, padding={pad})",
        "lax.conv_transpose(x, w, (2, 2), 'SAME', dimension_numbers=NHWC, transpose_kernel=True) + b",
    )  # fmt: skip


def pool(shapes: str, size: int, stride: int, kind: str) -> Case:
    """Return a pooling of a kind: the maximum or the average."""
    jax = {
        "max": f"lax.reduce_window(x, -jnp.inf, lax.max, (1, {size}, {size}, 1), "
        f"(1, {stride}, {stride}, 1), 'VALID')",
        "avg": f"lax.reduce_window(x, 0.0, lax.add, (1, {size}, {size}, 1), "
        f"(1, {stride}, {stride}, 1), 'VALID') / {size * size}",
    }[kind]
    return Case(shapes, f"{size}, {stride}", f"F.{kind}_pool2d(x, {size}, {stride})", jax)


_IMAGE = "N 56 56 64"
_TWO = "N 56 56 64; N 56 56 64"
_CLASSES = "N 1000"

LAYERS: dict[str, list[Case]] = {
    "Activation": [Case(_IMAGE, "'relu'", "F.relu(x)", "jax.nn.relu(x)")],
    "ActivityRegularization": [Case(_IMAGE, "l2=1e-5")],
    "Add": [Case(_TWO, "", "x + y", "x + y")],
    "Average": [Case(_TWO, "", "(x + y) / 2", "(x + y) / 2")],
    "AveragePooling2D": [pool(_IMAGE, 2, 2, "avg"), pool("N 35 35 192", 3, 1, "avg")],
    "BatchNormalization": [
        Case(shapes, "", "F.batch_norm(x, None, None, w, b, True, 0.01, 1e-3)",
             "batch_norm(x, w, b)") for shapes in (_IMAGE, "N 7 7 1280")
    ],
    "Concatenate": [Case(_TWO, "", "torch.cat([x, y], 1)", "jnp.concatenate([x, y], -1)")],
    "Conv2D": [
        conv("N 230 230 3", 64, 7, 2), conv(_IMAGE, 64, 3), conv(_IMAGE, 256, 1),
        conv("N 14 14 256", 256, 3), conv("N 28 28 1", 32, 3), conv("N 28 28 128", 128, 5),
        conv("N 28 28 64", 64, 3, 1, 2), conv("N 57 57 64", 128, 3, 2),
        conv("N 128 128 32", 32, 3), conv("N 56 56 96", 24, 1),
        Case("N 17 17 192", "192, (1, 7), padding='same'", "F.conv2d(x, w, b, padding=(0, 3))",
             "conv(x, w, 1, 'SAME') + b"),
        Case("N 28 28 128", "128, 3, padding='same', groups=32",
             "F.conv2d(x, w, b, padding=1, groups=32)", "conv(x, w, 1, 'SAME', 1, 32) + b"),
    ],
    "Conv2DTranspose": [up("N 28 28 128", 64, 2), up("N 14 14 128", 64, 4)],
    "Dense": [
        Case(shapes, units, "F.linear(x, w.T, b)", "x @ w + b")
        for shapes, units in (("N 1600", "64"), ("N 2048", "1000"), ("N 4096", "4096"))
    ],
    "DepthwiseConv2D": [
        Case(shapes, "3, padding='same'", "F.conv2d(x, w, b, padding=1, groups=x.shape[1])",
             "depthwise(x, w) + b") for shapes in ("N 28 28 96", "N 112 112 32", "N 7 7 960")
    ],
    "Dropout": [Case("N 4096", "0.5", "F.dropout(x, 0.5)", random=True)],
    "ELU": [Case(_IMAGE, "", "F.elu(x)", "jax.nn.elu(x)")],
    "Embedding": [Case("N 64 <50000", "50000, 64", "F.embedding(x, w, sparse=True)", "w[x]")],
    "Flatten": [both("N 7 7 512", "", "x.reshape(len(x), -1)")],
    "GlobalAveragePooling2D": [Case("N 7 7 2048", "", "x.mean((2, 3))", "x.mean((1, 2))")],
    "GlobalMaxPooling2D": [Case("N 7 7 2048", "", "x.amax((2, 3))", "x.max((1, 2))")],
    "LayerNormalization": [
        Case("N 256 1024", "", "F.layer_norm(x, x.shape[-1:], w, b, 1e-3)", "layer_norm(x, w, b)")
    ],
    "LeakyReLU": [Case(_IMAGE, "0.2", "F.leaky_relu(x, 0.2)", "jax.nn.leaky_relu(x, 0.2)")],
    "MaxPooling2D": [pool(_IMAGE, 3, 2, "max"), pool("N 56 56 256", 2, 2, "max")],
    "Maximum": [Case(_TWO, "", "torch.maximum(x, y)", "jnp.maximum(x, y)")],
    "Minimum": [Case(_TWO, "", "torch.minimum(x, y)", "jnp.minimum(x, y)")],
    "Multiply": [Case(_TWO, "", "x * y", "x * y")],
    "Normalization": [Case("N 224 224 3", "mean=0.5, variance=0.25", "(x - .5) / .5", "(x - .5) / .5")],
    "PReLU": [Case(_IMAGE, "shared_axes=[1, 2]", "F.prelu(x, w.flatten())",
                   "jnp.where(x > 0, x, w * x)")],
    "Permute": [Case("N 56 56 64", "(3, 1, 2)", "x.permute(0, 3, 1, 2).contiguous()",
                     "x.transpose(0, 3, 1, 2)", transposed=False)],
    "RandomCrop": [Case("N 256 256 3", "224, 224", random=True)],
    "RandomFlip": [Case("N 224 224 3", "'horizontal'", random=True)],
    "ReLU": [Case(_IMAGE, "", "F.relu(x)", "jax.nn.relu(x)")],
    "Rescaling": [Case("N 224 224 3", "1 / 255", "x * (1 / 255)", "x * (1 / 255)")],
    "Reshape": [both("N 7 7 512", "(49, 512)", "x.reshape(len(x), 49, 512)")],
    "Softmax": [Case(_CLASSES, "", "F.softmax(x, -1)", "jax.nn.softmax(x)")],
    "Subtract": [Case(_TWO, "", "x - y", "x - y")],
    "UpSampling2D": [
        Case("N 28 28 64", "2", "F.interpolate(x, scale_factor=2)",
             "jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)"),
        Case("N 28 28 64", "2, interpolation='bilinear'",
             "F.interpolate(x, scale_factor=2, mode='bilinear')",
             "jax.image.resize(x, (len(x), 56, 56, 64), 'bilinear')"),
    ],
    "ZeroPadding2D": [Case("N 224 224 3", "3", "F.pad(x, (3,) * 4)",
                           "jnp.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)))")],
}  # fmt: skip

_SAME_NAME = "elu relu relu6 selu silu softplus"  # in torch.nn.functional and jax.nn
ACTIVATIONS: dict[str, list[Case]] = {
    **{n: [Case(_IMAGE, "", f"F.{n}(x)", f"jax.nn.{n}(x)")] for n in _SAME_NAME.split()},
    "exponential": [both(_IMAGE, "", "xp.exp(x)")],
    "gelu": [Case(_IMAGE, "", "F.gelu(x)", "jax.nn.gelu(x, approximate=False)")],
    "hard_sigmoid": [Case(_IMAGE, "", "F.hardsigmoid(x)", "jax.nn.hard_sigmoid(x)")],
    "hard_silu": [Case(_IMAGE, "", "F.hardswish(x)", "jax.nn.hard_silu(x)")],
    "leaky_relu": [Case(_IMAGE, "", "F.leaky_relu(x, 0.2)", "jax.nn.leaky_relu(x, 0.2)")],
    "log_softmax": [Case(_CLASSES, "", "F.log_softmax(x, -1)", "jax.nn.log_softmax(x)")],
    "mish": [Case(_IMAGE, "", "F.mish(x)", "jax.nn.mish(x)")],
    "sigmoid": [Case(_IMAGE, "", "torch.sigmoid(x)", "jax.nn.sigmoid(x)")],
    "softmax": [Case(_CLASSES, "", "F.softmax(x, -1)", "jax.nn.softmax(x)")],
    "softsign": [Case(_IMAGE, "", "F.softsign(x)", "jax.nn.soft_sign(x)")],
    "tanh": [both(_IMAGE, "", "xp.tanh(x)")],
}

_P = "N 1000 p; N 1000 p"
_LABELS = "N 1000 h; N 1000"
_SPARSE = "N <1000; N 1000"
_LOGITS = "from_logits=True"
LOSSES: dict[str, list[Case]] = {
    "BinaryCrossentropy": [Case("N 1000 p; N 1000", _LOGITS,
                                "F.binary_cross_entropy_with_logits(y, x)",
                                "(jax.nn.softplus(y) - x * y).mean()")],
    "CategoricalCrossentropy": [Case(_LABELS, _LOGITS, "F.cross_entropy(y, x)",
                                     "-(x * jax.nn.log_softmax(y)).sum(-1).mean()")],
    "CategoricalHinge": [Case("N 1000 h; N 1000", "",
        "F.relu(1 - (x * y).sum(-1) + ((1 - x) * y).amax(-1)).mean()",
        "jax.nn.relu(1 - (x * y).sum(-1) + ((1 - x) * y).max(-1)).mean()")],
    "CosineSimilarity": [Case("N 1000; N 1000", "", "-F.cosine_similarity(x, y).mean()",
        "-((x * y).sum(-1) / jnp.linalg.norm(x, axis=-1) / jnp.linalg.norm(y, axis=-1)).mean()")],
    "Hinge": [Case("N 1000 h; N 1000", "", "F.relu(1 - (2 * x - 1) * y).mean()",
                   "jax.nn.relu(1 - (2 * x - 1) * y).mean()")],
    "Huber": [Case("N 1000; N 1000", "", "F.huber_loss(y, x)",
                   "jnp.where(abs(y - x) < 1, (y - x) ** 2 / 2, abs(y - x) - 0.5).mean()")],
    "KLDivergence": [both("N 1000 s; N 1000 s", "", "(x * xp.log(x / y)).sum(-1).mean()")],
    "LogCosh": [Case("N 1000; N 1000", "", "(y - x + F.softplus(2 * (x - y)) - 0.6931472).mean()",
                     "(y - x + jax.nn.softplus(2 * (x - y)) - 0.6931472).mean()")],
    "MeanAbsoluteError": [Case("N 1000; N 1000", "", "F.l1_loss(y, x)", "abs(y - x).mean()")],
    "MeanAbsolutePercentageError": [both(_P, "", "100 * abs((x - y) / x).mean()")],
    "MeanSquaredError": [Case("N 1000; N 1000", "", "F.mse_loss(y, x)", "((y - x) ** 2).mean()")],
    "MeanSquaredLogarithmicError": [both(_P, "", "((xp.log1p(x) - xp.log1p(y)) ** 2).mean()")],
    "Poisson": [both(_P, "", "(y - x * xp.log(y + 1e-7)).mean()")],
    "SparseCategoricalCrossentropy": [Case(_SPARSE, _LOGITS, "F.cross_entropy(y, x.long())",
        "-jnp.take_along_axis(jax.nn.log_softmax(y), x[:, None], 1).mean()")],
    "SquaredHinge": [Case("N 1000 h; N 1000", "", "(F.relu(1 - (2 * x - 1) * y) ** 2).mean()",
                          "(jax.nn.relu(1 - (2 * x - 1) * y) ** 2).mean()")],
}  # fmt: skip

_WITH_LABELS = [
    Case(_LABELS, "", "(x.argmax(-1) == y.argmax(-1)).float().mean()",
         "(x.argmax(-1) == y.argmax(-1)).mean()")
]  # fmt: skip
METRICS: dict[str, list[Case]] = {
    **{n: LOSSES[n] for n in LOSSES if n not in ("Huber", "LogCosh", "CosineSimilarity")},
    "Accuracy": [Case("N <10; N <10", "", "(x == y).float().mean()", "(x == y).mean()")],
    "AUC": [Case("N <2; N p")],
    "BinaryAccuracy": [Case("N <2; N p", "", "((y > 0.5) == x).float().mean()",
                            "((y > 0.5) == x).mean()")],
    "CategoricalAccuracy": _WITH_LABELS,
    "CosineSimilarity": [Case("N 1000; N 1000", "", "F.cosine_similarity(x, y).mean()",
                              LOSSES["CosineSimilarity"][0].jax.removeprefix("-"))],
    **{n: [both("N 1000 <2; N 1000 p", "", e)] for n, e in {
        "FalseNegatives": "((y <= 0.5) & (x == 1)).sum()",
        "FalsePositives": "((y > 0.5) & (x == 0)).sum()",
        "TrueNegatives": "((y <= 0.5) & (x == 0)).sum()",
        "TruePositives": "((y > 0.5) & (x == 1)).sum()",
        "Precision": "((y > 0.5) & (x == 1)).sum() / (y > 0.5).sum()",
        "Recall": "((y > 0.5) & (x == 1)).sum() / (x == 1).sum()",
    }.items()},
    "LogCoshError": LOSSES["LogCosh"],
    "Mean": [both("N 1000", "", "x.mean()")],
    "RootMeanSquaredError": [both("N 1000; N 1000", "", "xp.sqrt(((x - y) ** 2).mean())")],
    "SparseCategoricalAccuracy": [Case(_SPARSE, "", "(y.argmax(-1) == x).float().mean()",
                                       "(y.argmax(-1) == x).mean()")],
    "SparseTopKCategoricalAccuracy": [Case(
        _SPARSE, "", "(y.topk(5)[1] == x[:, None]).any(-1).float().mean()",
        "(lax.top_k(y, 5)[1] == x[:, None]).any(-1).mean()")],
    "Sum": [both("N 1000", "", "x.sum()")],
    "TopKCategoricalAccuracy": [Case(
        _LABELS, "", "(y.topk(5)[1] == x.argmax(-1)[:, None]).any(-1).float().mean()",
        "(lax.top_k(y, 5)[1] == x.argmax(-1)[:, None]).any(-1).mean()")],
}  # fmt: skip

#: Parameters of one stage of ResNet-50, and a classifier. The inputs are parameters, not data.
_PARAMETERS = "3 3 256 256; 256; 1 1 256 1024; 1024; 2048 1000; 1000"
OPTIMIZERS: dict[str, list[Case]] = {
    name: [Case(_PARAMETERS, arguments, torch)]
    for name, arguments, torch in [
        ("Adadelta", "", "torch.optim.Adadelta(p, lr=1e-3, rho=0.95, eps=1e-7)"),
        ("Adagrad", "", "torch.optim.Adagrad(p, 1e-3, initial_accumulator_value=0.1, eps=1e-7)"),
        ("Adam", "epsilon=1e-8", "torch.optim.Adam(p, 1e-3)"),
        ("AdamW", "epsilon=1e-8", "torch.optim.AdamW(p, 1e-3, weight_decay=0.004)"),
        ("Adamax", "", "torch.optim.Adamax(p, 1e-3, eps=1e-7)"),
        ("Nadam", "", "torch.optim.NAdam(p, 1e-3, eps=1e-7)"),
        ("RMSprop", "epsilon=1e-12", "torch.optim.RMSprop(p, 1e-3, alpha=0.9, eps=1e-12)"),
        ("SGD", "momentum=0.9", "torch.optim.SGD(p, 1e-2, momentum=0.9)"),
    ]
}

_TWO_INPUTS = {
    "add": "x + y", "subtract": "x - y", "multiply": "x * y", "divide": "x / y",
    "maximum": "xp.maximum(x, y)", "minimum": "xp.minimum(x, y)",
    "squared_difference": "(x - y) ** 2", "pow": "x ** y", "mod": "xp.remainder(x, y)",
}  # fmt: skip
_ONE_INPUT = {
    "negative": "-x", "abs": "xp.abs(x)", "square": "xp.square(x)", "sqrt": "xp.sqrt(x)",
    "rsqrt": "1 / xp.sqrt(x)", "reciprocal": "1 / x", "exp": "xp.exp(x)", "log": "xp.log(x)",
    "log1p": "xp.log1p(x)", "sin": "xp.sin(x)", "cos": "xp.cos(x)",
}  # fmt: skip
_BATCH = "N 56 56 64 p"
OPERATIONS: dict[str, list[Case]] = {
    **{n: [both(f"{_BATCH}; {_BATCH}", "", e)] for n, e in _TWO_INPUTS.items()},
    **{n: [both(_BATCH, "", e)] for n, e in _ONE_INPUT.items()},
    "add_n": [both(_TWO, "[x, y]", "x + y")],
    "prelu": [
        Case(
            "N 56 56 64; 64", "", "F.prelu(x.permute(0, 3, 1, 2), y).permute(0, 2, 3, 1)",
            "jnp.where(x < 0, x * y, x)", transposed=False,
        )
    ],
    "add_relu": [Case(_TWO, "", "F.relu(x + y)", "jax.nn.relu(x + y)")],
    "bias_add": [both("N 56 56 64; 64", "", "x + y")],
    "broadcast_to": [both("1 1 64", "x, (56, 56, 64)", "xp.broadcast_to(x, (56, 56, 64))")],
    "clip_by_value": [both(_BATCH, "x, 0.2, 0.8", "xp.clip(x, 0.2, 0.8)")],
    "concat": [both(_TWO, "[x, y], -1", "xp.concatenate([x, y], -1)")],
    "expand_dims": [both(_BATCH, "x, 0", "x[None]")],
    "gather": [Case("50000 64; N 64 <50000", "", "F.embedding(y, x, sparse=True)", "x[y]")],
    "getitem": [both(_IMAGE, "x, (slice(None), slice(1, -1))", "x[:, 1:-1]")],
    "matmul": [both("N 1024; 1024 1024", "", "x @ y"), both("N 49 64; N 64 49", "", "x @ y")],
    "pad": [Case(_IMAGE, "x, [[0, 0], [1, 1], [1, 1], [0, 0]]", "F.pad(x, (0, 0, 1, 1, 1, 1))",
                 "jnp.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])")],
    **{f"reduce_{n}": [
        both("1000 1000", f"x, {a}", f"x.{n}({a.replace('axis=', '')})")
        for a in ("axis=0", "axis=1")] for n in ("sum", "mean")},
    **{f"reduce_{n}": [Case("1000 1000", "x, axis=1", f"x.a{n}(1)", f"x.{n}(1)")]
       for n in ("max", "min")},
    "reduce_prod": [both("N 56 56 8 p", "x, axis=-1", "x.prod(-1)")],
    "reshape": [both(_IMAGE, "x, (-1, 64)", "x.reshape(-1, 64)")],
    "split": [Case(_IMAGE, "x, 2, -1", "x.split(32, -1)", "jnp.split(x, 2, -1)")],
    "squeeze": [both("N 1 1 2048", "x, [1, 2]", "x.reshape(-1, 2048)")],
    "stack": [both(_TWO, "[x, y]", "xp.stack([x, y])")],
    "sum_over": [both("N 1000", "x, 1000.0", "x.sum() / 1000")],
    "tensordot": [both("N 7 64; 64 64", "x, y, 1", "x @ y")],
    "tile": [both("N 64", "x, [1, 4]", "xp.tile(x, (1, 4))")],
    "transpose": [Case(_IMAGE, "x, [0, 3, 1, 2]", "x.permute(0, 3, 1, 2).contiguous()",
                       "x.transpose(0, 3, 1, 2)")],
    "unstack": [Case("8 N 1000", "x", "x.unbind()", "[x[i] for i in range(8)]")],
    "where": [both(f"{_BATCH}; {_BATCH}", "x > 0.5, x, y", "xp.where(x > 0.5, x, y)")],
    "l2_loss": [both("N 1000", "", "(x * x).sum() / 2")],
    "moments": [Case(_IMAGE, "x, [0, 1, 2]", "torch.var_mean(x, (0, 1, 2), correction=0)[::-1]",
                     "(x.mean((0, 1, 2)), x.var((0, 1, 2)))")],
    "normalize_batch": [Case("N 56 56 64; 64; 64")],
    "sigmoid_cross_entropy_with_logits": [Case(
        "N 1000 p; N 1000", "", "F.binary_cross_entropy_with_logits(y, x, reduction='none')",
        "jax.nn.softplus(y) - x * y")],
    "softmax_cross_entropy_with_logits": [Case(
        "N 1000 s; N 1000", "", "-(x * F.log_softmax(y, -1)).sum(-1)",
        "-(x * jax.nn.log_softmax(y)).sum(-1)")],
    "sparse_softmax_cross_entropy_with_logits": [Case(
        _SPARSE, "", "F.cross_entropy(y, x.long(), reduction='none')",
        "-jnp.take_along_axis(jax.nn.log_softmax(y), x[:, None], 1)[:, 0]")],
    "batch_normalization": [Case(
        "N 56 56 64; 64; 64 p", "x, y, z, None, None, 1e-3", "(x - y) / torch.sqrt(z + 1e-3)",
        "(x - y) / jnp.sqrt(z + 1e-3)")],
    "dropout": [Case("N 4096", "x, 0.5", "F.dropout(x, 0.5)", random=True)],
    "layer_normalization": [Case(
        "N 256 1024; 1024; 1024", "", "F.layer_norm(x, x.shape[-1:], y, z, 1e-3)",
        "layer_norm(x, y, z)")],
}  # fmt: skip

CASES = {
    "layers": LAYERS, "activations": ACTIVATIONS, "losses": LOSSES, "metrics": METRICS,
    "optimizers": OPTIMIZERS, "operations": OPERATIONS,
}  # fmt: skip

#: Base classes, wrappers and inputs, which compute nothing of their own, views, and strings.
NOT_MEASURED = {
    "Input", "InputLayer", "InputSpec", "Layer", "Loss", "LossFunctionWrapper", "LossScaleOptimizer",
    "MeanMetricWrapper", "Metric", "Optimizer", "Identity", "cast", "identity", "linear",
    "deserialize", "get", "serialize", "StringLookup",
}  # fmt: skip
