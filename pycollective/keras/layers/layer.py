"""`Layer`: the base of layers and models."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import current_mode
from pycollective.dtypes import as_dtype
from pycollective.keras import constraints, initializers, regularizers
from pycollective.keras.backend import name_of_class, unique_name
from pycollective.keras.building import build_scope_of_new
from pycollective.keras.dry_run import dry_run, in_dry_run, keep_values
from pycollective.keras.graph.symbols import KerasTensor, Node, has_symbols
from pycollective.keras.layers.described import Described
from pycollective.keras.layers.holder import Holder, variables_in
from pycollective.keras.layers.recording import outputs_on_zeros, record
from pycollective.keras.layers.shapes import is_shape, map_shapes, shapes_of, without_batch
from pycollective.keras.policy import DTypePolicy, policy_of
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
    ops,
)
from pycollective.tensor.tape import is_tracked, thread_state
from pycollective.train.trackable import is_trackable, structure_changed


class _Calls(threading.local):
    """The nesting depth and ``training`` of this thread's current layer calls."""

    depth = 0
    training: bool | None = None
    #: The variables that layers assigned inside `assignments_in_calls`, with their new values.
    #: None outside of such a block.
    assigned: list[tuple[Variable, Tensor]] | None = None


_calls = _Calls()


def training_of_call() -> bool | None:
    """Return ``training`` of this thread's current layer call, or None."""
    return _calls.training


@contextmanager
def training_in_calls(training: bool | None) -> Iterator[None]:
    """Set ``training`` of this thread's calls inside the ``with`` block."""
    before, _calls.training = _calls.training, training
    try:
        yield
    finally:
        _calls.training = before


def assign_in_call(variable: Variable, value: Tensor) -> None:
    """Assign a value in a layer's call; `assignments_in_calls` lists the assignment."""
    if _calls.assigned is not None:
        _calls.assigned.append((variable, value))
    variable.assign(value)


@contextmanager
def assignments_in_calls() -> Iterator[list[tuple[Variable, Tensor]]]:
    """Collect the assignments of this thread's layer calls inside the ``with`` block."""
    before, _calls.assigned = _calls.assigned, []
    try:
        yield _calls.assigned
    finally:
        _calls.assigned = before


#: The default of ``inputs``: distinguishes missing inputs from None.
_MISSING: Any = object()


class Layer(Described, Holder):
    """A function with variables.

    A subclass overrides `call`, and overrides `build` to make variables that depend on the input's
    shape. The layer tracks attributes that are layers or variables, or lists, tuples and dicts of
    them.

    Parameters
    ----------
    activity_regularizer
        A regularizer of the outputs: a name or a ``callable(tensor)``. Its value, divided by the
        number of rows, is one of `losses`.
    trainable : bool
        True to train the variables.
    name : str, optional
        The name; the default is the class's name with a number.
    dtype
        The dtype of variables and outputs, a `DTypePolicy`, or a policy's name. The default is the
        global policy, which is ``keras.backend.floatx()`` unless `set_dtype_policy` changed it.
        Floating-point inputs of another dtype are converted.
    input_shape
        The shape of one example. If a `Sequential`'s first layer has an ``input_shape``, the model
        is built immediately.

    Notes
    -----
    Replicas call a layer concurrently. The first call makes the variables for all replicas.
    """

    _untracked = frozenset({"_regularized", "_output_shape", "_built_shapes", "inbound_nodes"})
    #: True if `call` has a parameter ``training``.
    _takes_training = False
    #: The default of this parameter, and its position after the inputs; -1: it has none.
    _training_default: Any = None
    _training_position = -1
    #: True if the class overrides `build`, which must run before the first `call`.
    _has_build = False
    #: True if floating-point inputs are converted to the layer's dtype.
    _converts = True
    #: True in classes whose `build` only calls the layer.
    _build_calls = False
    #: The parameters of `build`, if it takes the shapes of several arguments of `call`.
    _build_names: tuple[str, ...] | None = None
    #: The accepted inputs: an `InputSpec`, or a list or dict of them; None accepts any input.
    input_spec: Any = None
    #: True if a list of inputs is an error.
    takes_one_tensor = False
    #: True if integer inputs give integer outputs.
    _keeps_dtype = False
    #: The number of assignments to attributes; `Replayed` and `OnGpu` compare it to detect changes.
    _changes = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.call).parameters
        cls._takes_training = "training" in parameters
        if cls._takes_training:
            default = parameters["training"].default
            cls._training_default = None if default is inspect.Parameter.empty else default
            # Without ``self`` and the inputs: the position of ``training`` among the other arguments.
            kind = parameters["training"].kind
            by_position = kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            cls._training_position = list(parameters).index("training") - 2 if by_position else -1
        if "build" in cls.__dict__ and not cls.__dict__.get("_build_calls", False):
            cls._has_build = True
            names = tuple(inspect.signature(cls.build).parameters)[1:]
            cls._build_names = names if len(names) > 1 else None
            type.__setattr__(cls, "build", _built_once(cls.build))

    def __init__(
        self,
        *,
        activity_regularizer: Any = None,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
        input_shape: Sequence[int | None] | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ValueError(f"the name of a layer must be a text, not {name!r}")
        self._name = unique_name(name_of_class(type(self))) if name is None else name
        self.dtype_policy = policy_of(dtype)
        self.activity_regularizer = regularizers.get(activity_regularizer)
        self._trainable = bool(trainable)
        self._input_shape = None if input_shape is None else (None, *input_shape)
        self._output_shape: Any = None
        #: The shapes of the inputs that the layer was built for.
        self._built_shapes: Any = None
        #: The calls on symbolic tensors.
        self.inbound_nodes: list[Node] = []
        self._regularized: list[tuple[Callable[[Any], Any], Variable]] = []
        self._added_losses = threading.local()
        mode = current_mode()
        self._strategy = None if mode is None else mode.strategy
        devices = () if self._strategy is None else self._strategy.extended.devices
        self._devices = devices if any(device.kind == "GPU" for device in devices) else ()
        self._creation = build_scope_of_new()
        self._building = False
        self.built = False

    def __setattr__(self, name: str, value: Any) -> None:
        if "built" not in self.__dict__ and is_trackable(value):
            raise RuntimeError(
                f"{type(self).__name__}: call super().__init__() before setting {name!r}, so that "
                "the layer can keep track of it"
            )
        super().__setattr__(name, value)
        object.__setattr__(self, "_changes", self._changes + 1)

    # Properties ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name; a default name is unique."""
        return self._name

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the variables."""
        return self._policy.variable_dtype

    variable_dtype = dtype

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the computation and of the outputs."""
        return self._dtype

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The policy that determines `compute_dtype` and `variable_dtype`.

        Assign a policy or its name. Existing variables keep their dtype.
        """
        return self._policy

    @dtype_policy.setter
    def dtype_policy(self, value: Any) -> None:
        self._policy = policy_of(value)
        self._dtype = self._policy.compute_dtype
        #: The dtype that variables are cast to when read; None: no cast is needed.
        self._reads_as = None if self._dtype == self._policy.variable_dtype else self._dtype

    @property
    def trainable(self) -> bool:
        """True if the variables are trained; an assignment applies to the sublayers too."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        for layer in self._flatten_layers():
            layer._trainable = bool(value)
        structure_changed()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self._name}, built={self.built}>"

    # Building --------------------------------------------------------------------------------

    def build(self, input_shape: Any) -> None:
        """Make the variables; called once, before the first `call`.

        If `call` takes several tensors, such as ``query`` and ``value``, `build` may take their
        shapes as ``query_shape`` and ``value_shape``.
        """

    def add_weight(
        self,
        name_or_shape: Any = None,
        /,
        shape: Any = (),
        dtype: Any = None,
        initializer: Any = None,
        regularizer: Any = None,
        constraint: Any = None,
        trainable: bool = True,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        name: Any = None,
    ) -> Variable:
        """Make a variable of this layer.

        Parameters
        ----------
        name
            The variable's name inside the layer.
        shape, dtype
            The shape and dtype; the default is a scalar of the layer's dtype.
        initializer
            A name or a ``callable(shape, dtype)`` that returns the initial value. The default is
            ``"glorot_uniform"`` for floating-point numbers, and zeros for other dtypes.
        regularizer
            A name or a ``callable(variable)`` whose result is one of `losses`.
        constraint
            A name or a ``callable(tensor)`` that an optimizer applies to the value after each step.
        trainable : bool
            True to train the variable. A variable with ``VariableSynchronization.ON_READ`` is never
            trained.
        synchronization, aggregation
            Options that tell a strategy how to keep the replicas' copies.

        Notes
        -----
        Positional arguments may also be in Keras 3's order: shape, initializer, dtype.
        """
        if not isinstance(name_or_shape, (list, tuple)):
            name = name_or_shape if name is None else name
        else:
            shape, given = name_or_shape, shape
            initializer = initializer if given == () else given
        sizes = tuple(int(n) for n in shape)
        variable_dtype = self._policy.variable_dtype if dtype is None else as_dtype(dtype)
        if initializer is None:
            initializer = "glorot_uniform" if variable_dtype.kind in "fV" else "zeros"
        start = initializers.get(initializer)
        assert start is not None
        short = "weight" if name is None else name
        if synchronization is VariableSynchronization.ON_READ:
            trainable = False
        variable = self._new_variable(
            short,
            lambda: start(sizes, variable_dtype),
            label=f"{self._name}/{short}",
            shape=sizes,
            dtype=variable_dtype,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
        )
        variable.constraint = constraints.get(constraint)
        penalty = regularizers.get(regularizer)
        if penalty is not None:
            self._regularized.append((penalty, variable))
        return variable

    def _weight(self, name: str, shape: Any, settings: str = "", **options: Any) -> Variable:
        """Make a variable with the layer's initializer, regularizer and constraint for it.

        ``settings`` is the prefix of these attributes; the default is the variable's name.
        """
        for kind in ("initializer", "regularizer", "constraint"):
            options[kind] = getattr(self, f"{settings or name}_{kind}")
        return self.add_weight(name, shape, **options)

    def ensure_built(self, input_shape: Any) -> None:
        """Build an unbuilt layer, in the scope of the strategy that it was made under."""
        with self._creation(self):
            if self.built:
                return
            if self.takes_one_tensor and not (input_shape is None or is_shape(input_shape)):
                raise self._incompatible(input_shape, "one tensor")
            variables, regularized = dict(self._variables), list(self._regularized)
            self._building = True
            try:
                if self._has_build:
                    with self._creation_scope():
                        self._build_for(input_shape)
            except BaseException:
                # The next build would make the variables of this failed build a second time.
                self._variables.clear()
                self._variables.update(variables)
                self._regularized[:] = regularized
                structure_changed()
                raise
            finally:
                self._building = False
            self._resume_restore()
            if in_dry_run():
                keep_values(variables_in(self))
            if input_shape is not None:
                self._built_shapes = map_shapes(without_batch, input_shape)
            self.built = True

    def _build_for(self, shapes: Any) -> None:
        """Call `build` with one nest of shapes, or with the shapes of several arguments by name."""
        if self._build_names is None:
            self.build(shapes)
        elif isinstance(shapes, Mapping) and set(shapes) <= set(self._build_names):
            self.build(**shapes)
        else:
            self.build(**{self._build_names[0]: shapes})

    def _shapes_to_build(self, inputs: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the shapes to build the layer for, given the arguments of a call."""
        if self._build_names is None:
            return shapes_of(inputs)
        given = inspect.signature(self.call).bind_partial(inputs, *args, **kwargs).arguments
        arguments = {name: given.get(name.removesuffix("_shape")) for name in self._build_names}
        return {name: shapes_of(value) for name, value in arguments.items() if value is not None}

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the shapes that the layer was built for.

        The result is None if the layer is not built, or has nothing to build.
        """
        known = self.built and self._built_shapes is not None
        builds = self._has_build or any(self._sublayers())
        key = "input_shape" if self._build_names is None else "shapes_dict"
        return {key: self._built_shapes} if known and builds else None

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Build the layer and its sublayers for the shapes that `get_build_config` returned."""
        shapes = config.get("input_shape", config.get("shapes_dict"))
        if shapes is None:
            return
        shapes = map_shapes(tuple, shapes)
        if self._has_build:
            self.ensure_built(shapes)
        if not all(layer.built for layer in self._flatten_layers()):
            Layer.compute_output_shape(self, shapes)

    def _creation_scope(self) -> AbstractContextManager[Any]:
        if self._strategy is None or current_mode() is not None:
            return nullcontext()
        return self._strategy.scope()

    # Calling ---------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs from the inputs; subclasses override this method."""
        raise NotImplementedError(f"{type(self).__name__} must override call()")

    def __call__(
        self, inputs: Any = _MISSING, *args: Any, training: bool | None = None, **kwargs: Any
    ) -> Any:
        """Build the layer if it is not built, and `call` it.

        Parameters
        ----------
        inputs, *args, **kwargs
            The arguments of `call`; array-like values become tensors. ``inputs`` may be a nest, and
            may be passed by its name in `call`.
        training
            True in a training step; the default is the value of the enclosing layer's call.

        Raises
        ------
        TypeError
            If the inputs are missing.
        ValueError
            If the inputs do not match `input_spec`, or do not fit the layer.
        """
        if inputs is _MISSING:
            inputs = self._first_of(kwargs)
        if args and 0 <= self._training_position < len(args):
            if training is not None:
                raise TypeError(f"layer {self._name!r} got training twice, by position and by name")
            at = self._training_position
            if len(args) > at + 1:
                names = list(inspect.signature(self.call).parameters)[at + 2 :]
                kwargs = {**dict(zip(names, args[at + 1 :], strict=False)), **kwargs}
            training, args = args[at], args[:at]
        if inputs.__class__ is not Tensor or inputs.array.dtype is not self._dtype:
            if has_symbols(inputs):
                return record(self, (inputs, *args), kwargs, training)
            inputs = self._to_inputs(inputs)
        if args or kwargs:
            if has_symbols((args, kwargs)):
                return record(self, (inputs, *args), kwargs, training)
            args = nest.map_structure(self._to_argument, args)
            kwargs = nest.map_structure(self._to_argument, kwargs)
        # A dry run's batch has one example, so a declared batch size would not match.
        if self.input_spec is not None and not in_dry_run():
            self._check_inputs(inputs)
        first = not self.built
        if first:
            self.ensure_built(self._shapes_to_build(inputs, args, kwargs))
        calls = _calls
        if self._devices and not calls.depth:
            inputs = nest.map_structure(self._on_device, inputs)
        outside = calls.training
        if self._any_added_loss and not calls.depth:
            self._forget_losses()
        calls.depth += 1
        reads_as, inside = thread_state.reads_as, self._reads_as
        if reads_as is not inside:
            thread_state.reads_as = inside
        if training is None:
            training = self._training_default if outside is None else outside
        if training is not outside:
            calls.training = training
        try:
            if training is not None and self._takes_training:
                outputs = self.call(inputs, *args, training=training, **kwargs)
            else:
                outputs = self.call(inputs, *args, **kwargs)
        finally:
            calls.depth -= 1
            if training is not outside:
                calls.training = outside
            if reads_as is not inside:
                thread_state.reads_as = reads_as
        if self.activity_regularizer is not None:
            self._penalize(outputs)
        if first:
            self._output_shape = map_shapes(without_batch, shapes_of(outputs))
        return outputs

    def _to_inputs(self, inputs: Any) -> Any:
        """Convert inputs to tensors, floating-point ones to the layer's dtype."""
        if not nest.is_nested(inputs):
            return self._to_input(inputs)
        if isinstance(inputs, (list, tuple)) and not _holds_arrays(inputs):
            return self._to_input(inputs)
        if self.takes_one_tensor:
            raise self._incompatible(shapes_of(inputs), "one tensor")
        return nest.map_structure(self._to_input, inputs)

    def _to_input(self, value: Any) -> Tensor:
        tensor = as_tensor(value)
        dtype = tensor.array.dtype
        if self._converts and dtype != self._dtype and dtype.kind in "fV":
            tensor = ops.cast(tensor, self._dtype)
        return tensor

    def _on_device(self, value: Any) -> Any:
        """Copy a host tensor to this replica's device; outside of replicas, to the first device."""
        if not isinstance(value, Tensor) or value.array.__class__ is not np.ndarray:
            return value
        if is_tracked(value):  # no tape records the copy, so the tensor would get no gradient
            return value
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        replica = 0 if context is None else context.local_replica_id
        return Tensor(self._devices[replica].place(value.array))

    def _to_argument(self, value: Any) -> Any:
        return self._to_input(value) if isinstance(value, (Tensor, np.ndarray)) else value

    def _first_of(self, kwargs: dict[str, Any]) -> Any:
        """Remove the first argument of `call` from the keyword arguments, and return it."""
        first = next(iter(inspect.signature(self.call).parameters), None)
        if first not in kwargs:
            raise TypeError(
                f"layer {self._name!r} was called without inputs; give {first!r}, the first argument "
                f"of {type(self).__name__}.call()"
            )
        return kwargs.pop(first)

    def _check_inputs(self, inputs: Any) -> None:
        """Raise ``ValueError`` unless the inputs match `input_spec`."""
        specs, given = self.input_spec, inputs
        if isinstance(specs, Mapping) or isinstance(inputs, Mapping):
            named = (
                specs if isinstance(specs, Mapping) else {s.name: s for s in nest.flatten(specs)}
            )
            if isinstance(specs, Mapping) or all(named):
                given = [self._input_of(inputs, name) for name in named]
                specs = list(named.values())
        specs, given = nest.flatten(specs), nest.flatten(given)
        if len(specs) != len(given):
            raise ValueError(
                f'Layer "{self._name}" expects {len(specs)} input(s), but it received {len(given)} '
                "input tensors"
            )
        for number, (spec, value) in enumerate(zip(specs, given, strict=True)):
            mismatch = None if spec is None else spec.refusal(value)
            if mismatch is not None:
                raise ValueError(
                    f'Input {number} of layer "{self._name}" is incompatible with the layer: '
                    f"{mismatch}. Full shape received: {tuple(value.shape)}"
                )

    def _input_of(self, inputs: Any, name: str) -> Any:
        """Return an input of a dict of inputs."""
        if not isinstance(inputs, Mapping) or name not in inputs:
            got = list(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            raise ValueError(
                f'Missing data for input "{name}" of layer "{self._name}", which needs a dict of '
                f"inputs; got {got}"
            )
        return inputs[name]

    def _penalize(self, outputs: Any) -> None:
        """Add the activity regularizer's value for these outputs to `losses`."""
        assert self.activity_regularizer is not None
        for output in nest.flatten(outputs):
            rows = len(output) if output.ndim else 1
            self.add_loss(self.activity_regularizer(output) / max(rows, 1))

    def _incompatible(self, shape: Any, needed: str) -> ValueError:
        return ValueError(
            f'Input 0 of layer "{self._name}" is incompatible with the layer: expected {needed}, '
            f"but received input with shape {shape}"
        )

    # Shapes ----------------------------------------------------------------------------------

    def knows_output_shape(self) -> bool:
        """Return True if the class computes its output shape without a call."""
        return type(self).compute_output_shape is not Layer.compute_output_shape

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the output shape for an input shape; None is any length.

        The default calls the layer on zeros.
        """
        symbols = map_shapes(lambda shape: KerasTensor(shape, self._dtype), input_shape)
        return shapes_of(outputs_on_zeros(self, (symbols,), {}))

    def _called_dry(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a call that changes no variables, metrics or losses."""
        layers = self._flatten_layers()
        with dry_run([variable for layer in layers for variable in variables_in(layer)]):
            return self(*args, **kwargs)

    @property
    def input(self) -> Any:
        """The symbolic inputs of the layer's first symbolic call.

        Raises
        ------
        AttributeError
            If the layer was never called on a symbolic tensor.
        """
        args = self._first_node("input").args
        return args[0] if args else self.output

    @property
    def output(self) -> Any:
        """The symbolic outputs of the layer's first symbolic call.

        Raises
        ------
        AttributeError
            If the layer was never called on a symbolic tensor.
        """
        return self._first_node("output").outputs

    def _first_node(self, attribute: str) -> Node:
        if not self.inbound_nodes:
            raise AttributeError(
                f"layer {self._name!r} has no {attribute}: it was never called on a symbolic tensor"
            )
        return self.inbound_nodes[0]

    @property
    def input_shape(self) -> Any:
        """The declared input shape, with None for the batch; None if no shape was declared."""
        return self._input_shape

    @property
    def output_shape(self) -> Any:
        """The output shape of the last symbolic call, or else of the first call.

        The batch is None unless an `Input` declares its size.

        Raises
        ------
        AttributeError
            If the layer was never called.
        """
        if self._output_shape is None:
            raise AttributeError(f"layer {self._name!r} was never called: it has no output shape")
        return self._output_shape


def _built_once(build: Callable[..., None]) -> Callable[..., None]:
    """Wrap a `build` method so that a direct call ``layer.build(shape)`` marks the layer as built."""

    @functools.wraps(build)
    def building(self: Layer, *args: Any, **kwargs: Any) -> None:
        if self._building:
            build(self, *args, **kwargs)
        elif self._build_names is None:
            self.ensure_built(next(iter((*args, *kwargs.values())), None))
        else:
            given = inspect.signature(build).bind(self, *args, **kwargs).arguments
            self.ensure_built(dict(list(given.items())[1:]))

    return building


def _is_array_like(value: Any) -> bool:
    return hasattr(value, "shape") or hasattr(value, "__tensor__")


def _holds_arrays(inputs: Any) -> bool:
    """Return True if a list is a nest of arrays, not a list of numbers."""
    return any(map(_is_array_like, inputs)) or any(
        _is_array_like(leaf) and not isinstance(leaf, np.generic) for leaf in nest.flatten(inputs)
    )


class SameShape(Layer):
    """A layer whose output has the shape of its input."""

    takes_one_tensor = True

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tuple(input_shape)
