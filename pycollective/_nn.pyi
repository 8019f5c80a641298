"""Kernels of neural networks and optimizers, and records of their calls; see csrc/nn."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

class Window:
    def __init__(
        self,
        height: int,
        width: int,
        channels: int,
        kernel_h: int,
        kernel_w: int,
        stride_h: int,
        stride_w: int,
        dilation_h: int,
        dilation_w: int,
        same: bool,
    ) -> None: ...
    def cropped(self, out_h: int, out_w: int) -> Window: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def kernel_h(self) -> int: ...
    @property
    def kernel_w(self) -> int: ...
    @property
    def stride_h(self) -> int: ...
    @property
    def stride_w(self) -> int: ...
    @property
    def dilation_h(self) -> int: ...
    @property
    def dilation_w(self) -> int: ...
    @property
    def pad_top(self) -> int: ...
    @property
    def pad_left(self) -> int: ...
    @property
    def out_h(self) -> int: ...
    @property
    def out_w(self) -> int: ...

class Record:
    def __init__(self) -> None: ...
    def begin(self, inputs: Sequence[NDArray[Any]]) -> bool: ...
    def end(self, outputs: Sequence[NDArray[Any]]) -> bool: ...
    def stop(self) -> None: ...
    def plan(self) -> int: ...
    @property
    def refusal(self) -> str: ...

class Replay:
    def __init__(self, record: Record, memory: NDArray[Any]) -> None: ...
    def run(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool: ...

def vector_bytes() -> int: ...
def limit_vector_bytes(bytes: int) -> int: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def im2col(x: NDArray[Any], cols: NDArray[Any], window: Window, first: int, rows: int) -> None: ...
def col2im(cols: NDArray[Any], x: NDArray[Any], window: Window, first: int, rows: int) -> None: ...
def bias_relu(z: NDArray[Any], bias: NDArray[Any] | None, relu: bool) -> None: ...
def sum_of_squares(x: NDArray[Any]) -> float: ...
def add_multiple(x: NDArray[Any], factor: float, y: NDArray[Any], z: NDArray[Any]) -> None: ...
def binary(name: str, x: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> None: ...
def binary_gradient(
    name: str,
    g: NDArray[Any],
    x: NDArray[Any],
    y: NDArray[Any],
    dx: NDArray[Any] | None,
    dy: NDArray[Any] | None,
) -> None: ...
def select(mask: NDArray[Any], x: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> None: ...
def reduce(
    name: str, x: NDArray[Any], y: NDArray[Any], outer: int, count: int, inner: int
) -> None: ...
def extremum_gradient(
    x: NDArray[Any],
    top: NDArray[Any],
    g: NDArray[Any],
    dx: NDArray[Any],
    outer: int,
    count: int,
    inner: int,
) -> None: ...
def copy(source: NDArray[Any], target: NDArray[Any]) -> bool: ...
def add_rows(rows: NDArray[Any], index: NDArray[Any], y: NDArray[Any]) -> None: ...
def activation(
    name: str, x: NDArray[Any], y: NDArray[Any], alpha: float = 1.0, beta: float = 0.0
) -> None: ...
def activation_gradient(
    name: str,
    g: NDArray[Any],
    x: NDArray[Any],
    dx: NDArray[Any],
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None: ...
def relu_gradient(
    g: NDArray[Any],
    y: NDArray[Any] | None,
    dz: NDArray[Any] | None,
    bias_gradient: NDArray[Any] | None,
) -> None: ...
def normalize_rows(
    x: NDArray[Any],
    factor: NDArray[Any],
    shift: NDArray[Any],
    y: NDArray[Any],
    means: NDArray[Any],
    inverses: NDArray[Any],
    epsilon: float,
) -> None: ...
def normalize_rows_gradient(
    g: NDArray[Any],
    x: NDArray[Any],
    factor: NDArray[Any],
    means: NDArray[Any],
    inverses: NDArray[Any],
    dx: NDArray[Any],
    by_factor: NDArray[Any],
    by_shift: NDArray[Any],
) -> None: ...
def softmax(x: NDArray[Any], y: NDArray[Any], logarithm: bool) -> None: ...
def softmax_gradient(
    g: NDArray[Any], y: NDArray[Any], dx: NDArray[Any], logarithm: bool
) -> None: ...
def softmax_cross_entropy(
    logits: NDArray[Any],
    labels: NDArray[Any],
    losses: NDArray[Any],
    gradient: NDArray[Any] | None,
) -> None: ...
def loss_rows(
    name: str,
    t: NDArray[Any],
    p: NDArray[Any],
    losses: NDArray[Any],
    slopes: NDArray[Any] | None,
    number: float,
) -> None: ...
def max_pool(
    x: NDArray[Any],
    bias: NDArray[Any] | None,
    y: NDArray[Any],
    codes: NDArray[Any],
    window: Window,
    relu: bool,
) -> None: ...
def max_pool_gradient(
    g: NDArray[Any],
    codes: NDArray[Any],
    dx: NDArray[Any],
    bias_gradient: NDArray[Any] | None,
    window: Window,
) -> None: ...
def resample(
    x: NDArray[Any], down: NDArray[Any], across: NDArray[Any], y: NDArray[Any]
) -> None: ...
def depthwise_forward(
    x: NDArray[Any],
    weights: NDArray[Any] | None,
    bias: NDArray[Any] | None,
    y: NDArray[Any],
    window: Window,
) -> None: ...
def depthwise_gradient(
    g: NDArray[Any], weights: NDArray[Any] | None, dx: NDArray[Any], window: Window
) -> None: ...
def depthwise_weight_gradient(
    x: NDArray[Any], g: NDArray[Any], weight_gradient: NDArray[Any], window: Window
) -> None: ...
def direct_forward(
    x: NDArray[Any],
    weights: NDArray[Any],
    bias: NDArray[Any] | None,
    y: NDArray[Any],
    codes: NDArray[Any] | None,
    window: Window,
    pool: Window | None,
    relu: bool,
) -> None: ...
def winograd_forward(
    x: NDArray[Any],
    weights: NDArray[Any],
    bias: NDArray[Any] | None,
    y: NDArray[Any],
    codes: NDArray[Any] | None,
    window: Window,
    pool: Window | None,
    relu: bool,
) -> None: ...
def winograd_gradient(
    x: NDArray[Any],
    weights: NDArray[Any],
    g: NDArray[Any],
    y: NDArray[Any] | None,
    x_gradient: NDArray[Any] | None,
    weight_gradient: NDArray[Any] | None,
    bias_gradient: NDArray[Any] | None,
    window: Window,
) -> None: ...
def sparse_gradient(
    x: NDArray[Any],
    weights: NDArray[Any],
    g: NDArray[Any],
    codes: NDArray[Any],
    x_gradient: NDArray[Any] | None,
    weight_gradient: NDArray[Any] | None,
    bias_gradient: NDArray[Any] | None,
    window: Window,
    pool: Window,
) -> None: ...
def sparse_fits(window: Window, filters: int) -> bool: ...
def blocked_forward(
    x: NDArray[Any],
    weights: NDArray[Any],
    bias: NDArray[Any] | None,
    y: NDArray[Any],
    codes: NDArray[Any] | None,
    window: Window,
    pool: Window | None,
    relu: bool,
) -> None: ...
def blocked_gradient(
    x: NDArray[Any],
    weights: NDArray[Any],
    g: NDArray[Any],
    y: NDArray[Any] | None,
    codes: NDArray[Any] | None,
    x_gradient: NDArray[Any] | None,
    weight_gradient: NDArray[Any] | None,
    bias_gradient: NDArray[Any] | None,
    window: Window,
    pool: Window | None,
) -> None: ...
def dense_forward(
    x: NDArray[Any],
    weights: NDArray[Any],
    bias: NDArray[Any] | None,
    y: NDArray[Any],
    relu: bool,
) -> None: ...
def dense_gradient(
    x: NDArray[Any],
    weights: NDArray[Any],
    g: NDArray[Any],
    y: NDArray[Any] | None,
    x_gradient: NDArray[Any] | None,
    weight_gradient: NDArray[Any] | None,
    bias_gradient: NDArray[Any] | None,
) -> None: ...
def batch_moments(x: NDArray[Any], mean: NDArray[Any], variance: NDArray[Any]) -> None: ...
def move_average(
    average: NDArray[Any], value: NDArray[Any], moved: NDArray[Any], weight: float
) -> None: ...
def normalize_batch(
    x: NDArray[Any],
    factor: NDArray[Any] | None,
    shift: NDArray[Any] | None,
    mean: NDArray[Any],
    variance: NDArray[Any],
    y: NDArray[Any],
    epsilon: float,
    relu: bool = False,
) -> None: ...
def normalize_batch_gradient(
    g: NDArray[Any],
    x: NDArray[Any],
    factor: NDArray[Any] | None,
    shift: NDArray[Any] | None,
    mean: NDArray[Any],
    variance: NDArray[Any],
    dx: NDArray[Any] | None,
    by_factor: NDArray[Any],
    by_shift: NDArray[Any],
    epsilon: float,
    relu: bool = False,
    constant: bool = False,
) -> None: ...
def alike(columns: Sequence[Sequence[NDArray[Any]]]) -> bool: ...
def rule_update(
    name: str,
    p: Sequence[NDArray[Any]],
    g: Sequence[NDArray[Any]],
    slots: Sequence[Sequence[NDArray[Any]]],
    numbers: Sequence[float],
) -> None: ...
def sgd_update(
    p: Sequence[NDArray[Any]],
    g: Sequence[NDArray[Any]],
    velocity: Sequence[NDArray[Any]] | None,
    rate: float,
    momentum: float,
    nesterov: bool,
) -> None: ...
def rmsprop_update(
    p: NDArray[Any],
    g: NDArray[Any],
    v: NDArray[Any],
    mean: NDArray[Any] | None,
    speed: NDArray[Any] | None,
    rate: float,
    rho: float,
    momentum: float,
    epsilon: float,
) -> None: ...
