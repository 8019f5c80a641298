"""Convolution by blocks of output rows, in which BLAS multiplies patches with filters."""

from __future__ import annotations

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array
from ..workspace import workspace
from .window import Window

# Patches of one block take about this many bytes, so that they, the product and the filters stay in the
# second-level cache.
_BLOCK_BYTES = 1 << 20


class Blocks:
    """The division of a convolution into blocks of output rows, of which there are ``n * out_h``."""

    def __init__(self, x: Array, w: Array, window: Window, unit: int = 1) -> None:
        self.x = x
        self.window = window
        self.out_h: int = window.out_h
        self.out_w: int = window.out_w
        self.filters = w.shape[3]
        self.patch = w.size // w.shape[3]
        self.matrix = w.reshape(self.patch, self.filters)
        self.rows = x.shape[0] * self.out_h
        # With a 1 x 1 kernel at every pixel, the image's own rows are the patches.
        self.pointwise = (
            self.patch == x.shape[3]
            and (window.stride_h, window.stride_w) == (1, 1)
            and (self.out_h, self.out_w) == x.shape[1:3]
        )
        row_bytes = self.out_w * max(self.patch, self.filters) * x.itemsize
        step = max(_BLOCK_BYTES // row_bytes, 1)
        # Whole images if they fit, else whole units: the rows of one pooling window.
        self.step = step // self.out_h * self.out_h or max(step // unit, 1) * unit

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and the last row + 1 of each block."""
        return [(r, min(r + self.step, self.rows)) for r in range(0, self.rows, self.step)]

    def pixels(self, matrix: Array, first: int, last: int) -> Array:
        """Return a block's rows of a matrix with one row for each output pixel."""
        return matrix[first * self.out_w : last * self.out_w]

    def columns(self, rows: int) -> Array:
        """Return scratch memory for the patches of ``rows`` output rows."""
        return workspace.scratch("columns", (rows * self.out_w, self.patch), self.x.dtype)

    def patches(self, first: int, last: int) -> Array:
        """Return the patches of a block, ``[pixels, patch]``."""
        if self.pointwise:
            return self.pixels(self.x.reshape(-1, self.patch), first, last)
        columns = self.columns(last - first)
        kernels.im2col(self.x, columns, self.window, first, last - first)
        return columns


class Gradients:
    """Sums of the gradients of filters and images over blocks."""

    def __init__(self, blocks: Blocks, w: Array, need_x: bool, need_w: bool) -> None:
        self.blocks = blocks
        x = blocks.x
        self.dw = np.zeros(w.shape, w.dtype) if need_w else None
        self.part = (
            workspace.scratch("part", blocks.matrix.shape, w.dtype) if need_w else blocks.matrix
        )
        self.dx = workspace.empty(x.shape, x.dtype) if need_x else None
        self.cleared = 0

    def add(self, dz: Array, first: int, last: int) -> None:
        """Add the gradient of a block of the product, ``[pixels, filters]``."""
        blocks = self.blocks
        if self.dw is not None:
            np.matmul(blocks.patches(first, last).T, dz, out=self.part)
            dw = self.dw.reshape(self.part.shape)
            np.add(dw, self.part, out=dw)
        if self.dx is None:
            return
        if blocks.pointwise:
            out = blocks.pixels(self.dx.reshape(-1, blocks.patch), first, last)
            np.matmul(dz, blocks.matrix.T, out=out)
            return
        # Clear an image only when its block comes, so that it is in cache for the sum.
        images = -(-last // blocks.out_h)
        self.dx[self.cleared : images] = 0
        self.cleared = images
        columns = blocks.columns(last - first)
        np.matmul(dz, blocks.matrix.T, out=columns)
        kernels.col2im(columns, self.dx, blocks.window, first, last - first)
