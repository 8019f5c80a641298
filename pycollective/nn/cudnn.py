"""Convolution of GPU arrays by cuDNN, if the package ``nvidia-cudnn-frontend`` is installed.

A convolution and each of its two gradients are graphs of one operation. Heuristics of cuDNN choose an
engine at the first use of a graph's shapes. Without an engine, the caller uses im2col and matrix
products.

Images keep their layout ``[n, height, width, channels]``, which strides describe to cuDNN. cuDNN's
filters are ``[filters, kernel_h, kernel_w, channels]``, a reordered copy of ours.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..array_backend import Array, array_module, beside
from .window import Window, end_padding

_log = logging.getLogger("pycollective")

#: cuDNN's types by the names of dtypes.
_TYPES = {"float16": "HALF", "float32": "FLOAT", "float64": "DOUBLE"}


class _Plan(NamedTuple):
    graph: Any
    inputs: Mapping[str, Any]
    output: Any
    workspace: int


class _Plans(threading.local):
    """The handles (by device) and plans of one thread, because a handle serves one thread at a time.

    The key of a plan is operation, device, dtype, shapes and window. A plan is None if cuDNN has no
    engine for it.
    """

    def __init__(self) -> None:
        self.handles: dict[int, Any] = {}
        self.found: dict[tuple[Any, ...], _Plan | None] = {}


_plans = _Plans()


@functools.cache
def _library() -> Any:
    """Return cuDNN's front end, or None if it is not installed or cannot load cuDNN."""
    if importlib.util.find_spec("cudnn") is None:
        return None
    try:
        library = importlib.import_module("cudnn")
        library.backend_version()
    except Exception as error:  # a library that does not fit the machine may raise anything
        _log.warning("convolutions do not use cuDNN, because its front end fails: %s", error)
        return None
    return library


def library_version() -> str:
    """Return cuDNN's version number as text, or an empty string if it cannot be used."""
    library = _library()
    return "" if library is None else str(library.backend_version())


def _channels_second(array: Array) -> Array:
    """Return a view with cuDNN's order of axes."""
    view: Array = array.transpose(0, 3, 1, 2)
    return view


def _described(array: Array) -> tuple[list[int], list[int]]:
    """Return lengths and strides, in elements, in cuDNN's order of axes."""
    view = _channels_second(array)
    return list(view.shape), [step // array.itemsize for step in view.strides]


def _build(
    library: Any,
    handle: Any,
    operation: str,
    inputs: Mapping[str, Array],
    output: Array,
    window: Window,
    ends: Sequence[int],
) -> _Plan | None:
    """Return the plan of an operation for arrays of these shapes, or None if there is no engine."""
    kind = getattr(library.data_type, _TYPES[output.dtype.name])
    compute = library.data_type.DOUBLE if output.dtype == np.float64 else library.data_type.FLOAT
    graph = library.pygraph(
        io_data_type=kind, intermediate_data_type=compute, compute_data_type=compute, handle=handle
    )
    tensors = {}
    for name, array in inputs.items():
        lengths, strides = _described(array)
        tensors[name] = graph.tensor(name=name, dim=lengths, stride=strides, data_type=kind)
    result = getattr(graph, operation)(
        **tensors,
        pre_padding=[window.pad_top, window.pad_left],
        post_padding=list(ends),
        stride=[window.stride_h, window.stride_w],
        dilation=[window.dilation_h, window.dilation_w],
    )
    lengths, strides = _described(output)
    result.set_output(True).set_dim(lengths).set_stride(strides).set_data_type(kind)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
        if output.dtype == np.float32:
            # Engines that round inputs to 10 bits would give less than float32's precision.
            # The heuristics choose Fourier transforms also for small filters, where they are slow.
            note = library.numerical_note
            graph.deselect_numeric_notes([note.TENSOR_CORE, note.DOWN_CONVERT_INPUTS, note.FFT])
        graph.check_support()
        graph.build_plans()
    except (library.cudnnGraphNotSupportedError, ImportError, RuntimeError) as error:
        shapes = {name: array.shape for name, array in inputs.items()}
        _log.info("cuDNN has no %s of %s, %s: %s", operation, shapes, output.dtype, error)
        return None
    return _Plan(graph, tensors, result, int(graph.get_workspace_size()))


def _computed(
    operation: str,
    inputs: Mapping[str, Array],
    output: Array,
    window: Window,
    image: tuple[int, ...],
) -> bool:
    """Compute an operation into ``output``; return False if cuDNN cannot."""
    library = _library()
    if library is None or output.dtype.name not in _TYPES or not image[0]:
        return False
    device = output.device.id  # type: ignore[attr-defined]  # a GPU's array
    ends = end_padding(window, image)
    geometry = (window.pad_top, window.pad_left, *ends, window.stride_h, window.stride_w)
    dilations = (window.dilation_h, window.dilation_w)
    shapes = tuple(array.shape for array in inputs.values())
    key = (operation, device, output.dtype.name, shapes, output.shape, geometry, dilations)
    handle = _plans.handles.get(device)
    if handle is None:
        handle = _plans.handles[device] = library.create_handle()
    if key not in _plans.found:
        _plans.found[key] = _build(library, handle, operation, inputs, output, window, ends)
    plan = _plans.found[key]
    if plan is None:
        return False
    module = array_module(output)
    library.set_stream(handle=handle, stream=module.cuda.get_current_stream().ptr)
    arrays = {plan.inputs[name]: _channels_second(array) for name, array in inputs.items()}
    arrays[plan.output] = _channels_second(output)
    plan.graph.execute(arrays, module.empty(max(plan.workspace, 1), np.uint8), handle=handle)
    return True


def _filters_first(w: Array) -> Array:
    filters: Array = array_module(w).ascontiguousarray(w.transpose(3, 0, 1, 2))
    return filters


def forward(x: Array, w: Array, window: Window) -> Array | None:
    """Return the convolution of a GPU's images ``x`` with filters ``w``, or None without cuDNN.

    The layouts are ``[n, height, width, channels]`` and ``[kernel_h, kernel_w, channels, filters]``.
    """
    if _library() is None:
        return None
    xp = array_module(x)
    with beside(x):
        y: Array = xp.empty((x.shape[0], window.out_h, window.out_w, w.shape[3]), x.dtype)
        inputs = {"image": xp.ascontiguousarray(x), "weight": _filters_first(w)}
        return y if _computed("conv_fprop", inputs, y, window, x.shape) else None


def gradients(
    g: Array, x: Array, w: Array, window: Window, need_x: bool, need_w: bool
) -> tuple[Array | None, Array | None]:
    """Return the gradients of images and filters, each None if not needed or not supported.

    ``g`` is the gradient of the result, ``[n, out_h, out_w, filters]``; the rest is as in `forward`.
    """
    if _library() is None:
        return None, None
    xp = array_module(g)
    dx = dw = None
    with beside(g):
        loss = xp.ascontiguousarray(g)
        if need_x:
            images = xp.empty(x.shape, x.dtype)
            inputs = {"loss": loss, "filter": _filters_first(w)}
            if _computed("conv_dgrad", inputs, images, window, x.shape):
                dx = images
        if need_w:
            filters = xp.empty((w.shape[3], *w.shape[:3]), w.dtype)
            inputs = {"image": xp.ascontiguousarray(x), "loss": loss}
            if _computed("conv_wgrad", inputs, filters, window, x.shape):
                dw = xp.ascontiguousarray(filters.transpose(1, 2, 3, 0))
    return dx, dw
