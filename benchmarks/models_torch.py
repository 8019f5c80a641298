"""The models of `models_keras.py` for PyTorch.

PyTorch pads both sides of strided convolutions, Keras more below and on the right. With ``exact`` the
models pad as Keras does, which costs PyTorch a copy; so timed models are without it.
"""

from __future__ import annotations

from typing import Any

import torch
from models_keras import INVERTED, equal_kernels
from torch import nn


class Sum(nn.Module):
    """The sum of what two modules return, perhaps with a relu."""

    def __init__(self, inner: nn.Module, beside: nn.Module, relu: bool) -> None:
        super().__init__()
        self.inner, self.beside, self.relu = inner, beside, relu

    def forward(self, x: Any) -> Any:
        y = self.beside(x) + self.inner(x)
        return torch.relu_(y) if self.relu else y


class Concatenated(nn.Module):
    """The input, and a module's output for this input, side by side."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return torch.cat([x, self.inner(x)], 1)


def _padded(size: int, stride: int, exact: bool) -> tuple[list[nn.Module], int]:
    """Return the padding of a window as modules, and as an argument of the window's module."""
    if not exact or stride == 1 or size <= stride:
        return [], size // 2
    rest = size - stride
    return [nn.ZeroPad2d((rest // 2, rest - rest // 2) * 2)], 0


def _conv(
    before: int,
    filters: int,
    size: int,
    stride: int = 1,
    relu: type[nn.Module] | None = nn.ReLU,
    groups: int = 1,
    exact: bool = False,
) -> list[nn.Module]:
    """Return a convolution, its normalization, and perhaps a relu."""
    pad, padding = _padded(size, stride, exact)
    conv = nn.Conv2d(before, filters, size, stride, padding, groups=groups, bias=False)
    after = [] if relu is None else [relu(inplace=True)]
    return [*pad, conv, nn.BatchNorm2d(filters, eps=1e-3), *after]


def tutorial(exact: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def resnet20(exact: bool = False) -> nn.Module:
    parts, before = _conv(3, 16, 3), 16
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            inner = _conv(before, filters, 3, stride, exact=exact)
            inner += _conv(filters, filters, 3, relu=None)
            beside = (
                nn.Conv2d(before, filters, 1, stride, bias=False) if stride > 1 else nn.Identity()
            )
            parts.append(Sum(nn.Sequential(*inner), beside, relu=True))
            before = filters
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp(exact: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def vgg16(exact: bool = False) -> nn.Module:
    parts: list[nn.Module] = []
    before = 3
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(before, filters, 3, padding=1), nn.ReLU(inplace=True)]
            before = filters
        parts.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, 10)]
    return nn.Sequential(*parts, *head)


def resnet50(exact: bool = False) -> nn.Module:
    pad, padding = _padded(3, 2, exact)
    parts = [*_conv(3, 64, 7, 2, exact=exact), *pad, nn.MaxPool2d(3, 2, padding)]
    before = 64
    for stage, (filters, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            inner = _conv(before, filters, 1) + _conv(filters, filters, 3, stride, exact=exact)
            inner += _conv(filters, 4 * filters, 1, relu=None)
            beside = [] if block else _conv(before, 4 * filters, 1, stride, relu=None)
            parts.append(Sum(nn.Sequential(*inner), nn.Sequential(*beside), relu=True))
            before = 4 * filters
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def mobilenet_v2(exact: bool = False) -> nn.Module:
    parts = _conv(3, 32, 3, 2, nn.ReLU6, exact=exact)
    before = 32
    for expansion, filters, blocks, strides in INVERTED:
        for block in range(blocks):
            wide = expansion * before
            inner = _conv(before, wide, 1, relu=nn.ReLU6) if expansion > 1 else []
            inner += _conv(wide, wide, 3, 1 if block else strides, nn.ReLU6, wide, exact)
            whole = nn.Sequential(*inner, *_conv(wide, filters, 1, relu=None))
            parts.append(Sum(whole, nn.Identity(), relu=False) if block else whole)
            before = filters
    parts += _conv(before, 1280, 1, relu=nn.ReLU6)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


def unet(exact: bool = False) -> nn.Module:
    def twice(before: int, filters: int) -> list[nn.Module]:
        return [
            nn.Conv2d(before, filters, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(filters, filters, 3, padding=1), nn.ReLU(inplace=True),
        ]  # fmt: skip

    def level(before: int, filters: int) -> list[nn.Module]:
        """Return the convolutions of a level, with the deeper levels between them."""
        if filters == 512:
            return twice(before, filters)
        down = twice(before, filters)
        deeper = [nn.MaxPool2d(2), *level(filters, 2 * filters)]
        up = nn.ConvTranspose2d(2 * filters, filters, 2, 2)
        return [*down, Concatenated(nn.Sequential(*deeper, up)), *twice(2 * filters, filters)]

    return nn.Sequential(*level(3, 32), nn.Conv2d(32, 2, 1))


MODELS = {
    "tutorial": tutorial, "resnet20": resnet20, "resnet50": resnet50, "mobilenet_v2": mobilenet_v2,
    "vgg16": vgg16, "unet": unet, "mlp": mlp,
}  # fmt: skip


def give_equal_kernels(model: nn.Module) -> None:
    """Set the kernels as `models_keras.give_equal_kernels` does, and the biases to zero."""

    def kind(m: nn.Module) -> str:
        if isinstance(m, nn.Linear):
            return "Dense"
        if isinstance(m, nn.ConvTranspose2d):
            return "Conv2DTranspose"
        return "DepthwiseConv2D" if m.groups > 1 else "Conv2D"

    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    found = [(kind(m), m) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        for _, m in found:
            if m.bias is not None:
                m.bias.zero_()
        # From Keras's order of axes to PyTorch's.
        orders = {"Dense": (1, 0), "DepthwiseConv2D": (2, 3, 0, 1)}
        axes = [orders.get(name, (3, 2, 0, 1)) for name, _ in found]
        shapes = []
        for order, (_, m) in zip(axes, found, strict=True):
            shape = [0] * len(order)
            for torch_axis, keras_axis in enumerate(order):
                shape[keras_axis] = m.weight.shape[torch_axis]
            shapes.append(tuple(shape))
        arrays = equal_kernels((name, s) for (name, _), s in zip(found, shapes, strict=True))
        for order, (_, m), array in zip(axes, found, arrays, strict=True):
            m.weight.copy_(torch.from_numpy(array.transpose(order).copy()))
