"""One measured training step on TensorFlow: what its forward, its loss and its optimizers show.

Everything here runs while the step is traced (or, with ``run_eagerly``, while it runs). Nothing is created but operations: no variable, no
random number, no state that outlives the trace.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainvet.integrations.keras import kernels
from trainvet.integrations.keras.batches import named
from trainvet.integrations.keras.facts import Given, Traits, inner
from trainvet.integrations.keras.layout import needed
from trainvet.integrations.keras.plan import Place, Plan
from trainvet.integrations.keras.shadow import Shadows
from trainvet.integrations.keras.structure import kind_of
from trainvet.integrations.keras.wiring import Wiring


@dataclasses.dataclass
class Applied:
    """One call of an optimizer's ``apply``: variables and gradients (None where there was none) by name, as they were handed over.

    ``scale`` is the loss scale that is still in the gradients; ``held`` what earlier batches of this update had accumulated, ``batches`` how many
    make one update; ``rate`` the learning rate where it is a variable; ``iterations`` the optimizer's count before and after.
    """

    optimizer: str
    variables: dict[str, Any]
    gradients: dict[str, Any]
    scale: Any = None
    held: dict[str, Any] = dataclasses.field(default_factory=dict)
    batches: int = 1
    rate: Any = None
    iterations: list[Any] = dataclasses.field(default_factory=list)
    updates: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LossCall:
    """One call of ``compute_loss``: labels and predictions as they were handed over, and the value."""

    labels: Any
    predictions: Any
    weighted: bool
    penalised: bool
    value: Any


@dataclasses.dataclass
class Shown:
    """One output of a leaf layer, the mask of its padded steps [batch, time] where there is one, and the first floating tensor it was given."""

    place: Place
    tensor: Any
    mask: Any
    given: Any = None


class Look:
    """Shadows ``call`` of the leaf layers, ``compute_loss`` and ``apply`` for one step and keeps what they show, for :class:`Reduction`.

    ``order`` are the leaf layers as they were called. With ``keep``, ``kept`` holds the weights from before the update, by the variables' ids.
    """

    def __init__(self, plan: Plan, optimizers: Mapping[str, Any], want: frozenset[str], keep: bool = False, data: Any = None) -> None:
        """``data``: the batch as ``train_step`` is given it."""
        self.x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self._labels = [id(leaf) for leaf in keras.tree.flatten(y) if leaf is not None]
        self.plan = plan
        self.optimizers = optimizers
        self.want = want
        self.keep = keep
        self.kept: dict[str, Any] = {}
        self.order: list[str] = []
        self.shown: list[Shown] = []
        self.calls: list[LossCall] = []
        self.applied: list[Applied] = []
        self.errors: list[str] = []
        self.wiring = Wiring(plan)
        self.fed: dict[str, tuple[Place, Any]] = {}
        self._graph = _trace()

    def shadow(self, shadows: Shadows) -> None:
        """Put the shadows on; ``shadows`` takes them off."""
        if any(key.split(".", 1)[0] in ("activation", "module", "output") for key in self.want):
            for place in self.plan.places:
                if place.leaf and place.name:
                    shadows.put(place.layer, "call", self._call(place, place.layer.call))
        model = self.plan.model
        shadows.put(model, "compute_loss", self._compute_loss(model.compute_loss))
        for name, optimizer in self.optimizers.items():
            shadows.put(optimizer, "apply", self._apply(name, optimizer, optimizer.apply))

    @property
    def own_labels(self) -> bool:
        """Is the loss given the labels of the batch, as they are?"""
        return bool(self.calls) and [id(leaf) for leaf in keras.tree.flatten(self.calls[0].labels) if leaf is not None] == self._labels

    def safely(self, part: Callable[[], None]) -> None:
        """A fault of ours while tracing costs the numbers in question, never the user's step."""
        try:
            part()
        except Exception:
            self.errors.append(traceback.format_exc())

    def traits(self) -> Traits:
        """What this step taught about the model's structure."""
        predictions, labels = ([] if not self.calls else keras.tree.flatten_with_path(value) for value in self._given())
        names = {target: list(named(value, target)) for target, value in zip(("output", "label"), self._given(), strict=True)}
        regularised = any(getattr(variable, "regularizer", None) is not None for variable in self.plan.parameters.values())
        return Traits(
            order=tuple(self.order),
            owned={applied.optimizer: tuple(applied.variables) for applied in self.applied},
            outputs=tuple(
                Given(tuple(path), name, tuple(leaf.shape), self.wiring.origin(leaf))
                for (path, leaf), name in zip(_some(predictions), names["output"], strict=True)
            ),
            labels=tuple(Given(tuple(path), name, tuple(leaf.shape)) for (path, leaf), name in zip(_some(labels), names["label"], strict=True)),
            own_labels=self.own_labels,
            called=dict(self.wiring.called),
            training=dict(self.wiring.training),
            after=self.wiring.given(),
            embedded=self._embedded(),
            calls=len(self.calls),
            weighted=any(call.weighted for call in self.calls),
            penalised=regularised or any(call.penalised for call in self.calls),
        )

    def _given(self) -> tuple[Any, Any]:
        return (self.calls[0].predictions, self.calls[0].labels) if self.calls else (None, None)

    def _embedded(self) -> dict[str, tuple[str, bool]]:
        """The inputs that go to an embedding: its name, and whether 0 is padding there."""
        inputs = {self.wiring.key(leaf): name for name, leaf in named(self.x, "input").items() if isinstance(leaf, tf.Tensor)}
        found = {}
        for place, tensor in self.fed.values():
            name = inputs.get(self.wiring.source(tensor))
            if name is not None and kind_of(place.layer) == "embedding":
                found[name] = (place.name, bool(getattr(place.layer, "mask_zero", False)))
        return found

    # ---- what stands in front of the user's own

    def _here(self) -> bool:
        """Cells of an RNN and branches are traced in graphs of their own: their tensors do not belong into this one."""
        return _trace() is self._graph

    def _call(self, place: Place, call: Callable[..., Any]) -> Callable[..., Any]:
        def shown(*args: Any, **kwargs: Any) -> Any:
            self.safely(lambda: self.wiring.call(place, kwargs))
            output = call(*args, **kwargs)
            if self._here():
                self.safely(lambda: self._show(place, args, kwargs, output))
            return output

        return shown

    def _show(self, place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if place.name not in self.order:
            self.order.append(place.name)
        self.wiring.made(place, args, kwargs, output)
        given = [leaf for leaf in tf.nest.flatten((args, dict(kwargs))) if isinstance(leaf, tf.Tensor)]
        if given and kind_of(place.layer) in ("batch_norm", "embedding"):
            self.fed[place.name] = place, given[0]
        tensor = next((leaf for leaf in tf.nest.flatten(output) if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating), None)
        if tensor is not None and place.measured and tensor.shape.rank is not None:
            self.shown.append(Shown(place, tensor, _mask(args, kwargs, tensor), next((leaf for leaf in given if leaf.dtype.is_floating), None)))

    def _compute_loss(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            value = compute(*args, **kwargs)
            given = dict(zip(("x", "y", "y_pred", "sample_weight", "training"), args, strict=False)) | kwargs
            if value is not None and self._here():
                penalised = any(getattr(place.layer, "_losses", None) for place in self.plan.places)
                self.calls.append(LossCall(given.get("y"), given.get("y_pred"), given.get("sample_weight") is not None, penalised, value))
            return value

        return compute_loss

    def _apply(self, name: str, optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        def measured(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = list(trainable_variables if trainable_variables is not None else optimizer._trainable_variables)
            found: list[tuple[Applied, kernels.Sketch | None]] = []
            if self._here():
                self.safely(lambda: found.append(self._before(name, optimizer, grads, variables)))
            result = apply(grads, variables)
            for applied, sketch in found:
                self.safely(lambda applied=applied, sketch=sketch: self._after(optimizer, applied, sketch))  # type: ignore[misc]
            return result

        return measured

    def _before(self, name: str, optimizer: Any, grads: list[Any], variables: list[Any]) -> tuple[Applied, kernels.Sketch | None]:
        if any(id(variable) not in self.plan.names for variable in variables):  # built by this very forward
            self.plan = Plan(self.plan.model)
        if self.keep:
            self.kept |= {str(id(variable)): tf.identity(variable.value) for variable in variables}
        names, lower = [self.plan.name(variable) for variable in variables], inner(optimizer)
        applied = Applied(name, dict(zip(names, variables, strict=True)), dict(zip(names, grads, strict=True)), scale=scale_of(optimizer))
        if getattr(lower, "gradient_accumulation_steps", None):
            kernels.build_optimizer(optimizer, variables)
            applied.batches = int(lower.gradient_accumulation_steps)
            sums = [lower._accumulated_gradients[lower._get_variable_index(variable)] for variable in variables]
            applied.held = {key: tf.identity(held.value) for key, held in zip(names, sums, strict=True) if held is not None}
        if isinstance(getattr(lower, "_learning_rate", None), keras.Variable):  # a schedule is evaluated on the host
            applied.rate = tf.identity(lower._learning_rate.value)
        applied.iterations.append(tf.identity(lower._iterations.value))
        self.applied.append(applied)
        return applied, self._sketch(applied)

    def _sketch(self, applied: Applied) -> kernels.Sketch | None:
        raw = needed(self.want, "update")
        return kernels.Sketch(applied.variables, applied.gradients, raw) if raw else None

    def _after(self, optimizer: Any, applied: Applied, sketch: kernels.Sketch | None) -> None:
        if sketch is not None:
            applied.updates = sketch.compare()
        applied.iterations.append(tf.identity(inner(optimizer)._iterations.value))


def scale_of(optimizer: Any) -> Any:
    """The loss scale in force, a scalar tensor; None without one."""
    if getattr(optimizer, "inner_optimizer", None) is not None:
        return tf.identity(optimizer.dynamic_scale.value) if optimizer.built else tf.constant(float(optimizer.initial_scale))
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else tf.constant(float(factor))


def _some(flat: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(path, leaf) for path, leaf in flat if leaf is not None]


def _trace() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _mask(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """The mask of padded steps, where one fits the output [batch, time, …]."""
    mask = kwargs.get("mask")
    if mask is None and args:
        mask = getattr(args[0], "_keras_mask", None)
    if not isinstance(mask, tf.Tensor) or mask.dtype != tf.bool or mask.shape.rank is None:
        return None
    fits = mask.shape.rank == output.shape.rank - 1 and output.shape[-1] is not None
    return mask if fits and mask.shape.is_compatible_with(output.shape[:-1]) else None
