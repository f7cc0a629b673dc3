"""What is known of a Keras run beside its numbers: optimizers, schedules, losses, precision, and whether it starts from scratch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.schedules import describe
from trainvet.statistics import Optimizer, Schedule, Subject

# optimizers that divide by a running root mean square
ADAPTIVE = ("Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Lamb")


@dataclasses.dataclass(frozen=True)
class Origin:
    """What made a prediction: layer, function ("linear" for a layer without one, "" unknown), and the axis of a softmax (-1: unknown)."""

    layer: str = ""
    function: str = ""
    axis: int = -1


@dataclasses.dataclass(frozen=True)
class Given:
    """A prediction or a label that the loss is given: its place in the structure, its name as a subject, its shape as traced, what made it."""

    path: tuple[Any, ...]
    name: str
    shape: tuple[int | None, ...] = ()
    origin: Origin = Origin()


@dataclasses.dataclass
class Traits:
    """What tracing a measured step taught: the leaf layers in the order of their calls, the parameters each optimizer was given, the subjects
    that were seen, what the loss is given (``own_labels``: the labels of the batch as they are), how often each leaf layer was called, in which mode
    and on whose output, the inputs that are ``embedded`` (where, and is 0 padding), and whether samples were weighted or a penalty was added to the
    loss."""

    order: tuple[str, ...] = ()
    owned: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    subjects: dict[tuple[str, str], Subject] = dataclasses.field(default_factory=dict)
    outputs: tuple[Given, ...] = ()
    labels: tuple[Given, ...] = ()
    own_labels: bool = False
    called: dict[str, int] = dataclasses.field(default_factory=dict)
    training: dict[str, float] = dataclasses.field(default_factory=dict)
    after: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    embedded: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    calls: int = 0
    weighted: bool = False
    penalised: bool = False


def optimizers_of(model: Any) -> dict[str, Any]:
    """The model's optimizers by name: "optimizer" for the compiled one, the attribute's name for others a user keeps on the model."""
    found: dict[str, Any] = {}
    compiled = getattr(model, "optimizer", None)
    if isinstance(compiled, keras.optimizers.Optimizer):
        found["optimizer"] = compiled
    for name, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not other for other in found.values()):
            found[name.lstrip("_")] = value
    return found


def inner(optimizer: Any) -> Any:
    """The optimizer below a loss scaler; the optimizer itself without one."""
    return getattr(optimizer, "inner_optimizer", None) or optimizer


def group_of(name: str, optimizer: Any) -> str:
    """The one parameter group of a Keras optimizer: its type, with its name where it is not the compiled one."""
    kind = type(inner(optimizer)).__name__
    return kind if name == "optimizer" else f"{kind} {name}"


def scaled(optimizers: Iterable[Any]) -> bool:
    """Does one of them scale the loss dynamically (and so skip steps by itself)?"""
    return any(getattr(optimizer, "inner_optimizer", None) is not None for optimizer in optimizers)


def describe_optimizers(plan: Plan, optimizers: Mapping[str, Any], owned: Mapping[str, tuple[str, ...]]) -> tuple[Optimizer, ...]:
    """Each optimizer with its family, hyper-parameters and parameters."""
    known = {id(variable) for variable in plan.parameters.values()}
    told = []
    for name, outer in optimizers.items():
        optimizer = inner(outer)
        kind = type(optimizer).__name__
        held = getattr(optimizer, "_trainable_variables", None) or ()
        told.append(
            Optimizer(
                name=name,
                type=kind,
                family="adam" if kind in ADAPTIVE else "sgd" if kind == "SGD" else "other",
                epsilon=number(getattr(optimizer, "epsilon", 0.0)),
                momentum=number(getattr(optimizer, "momentum", 0.0)) if kind in ("SGD", "RMSprop") else 0.0,
                weight_decay=number(getattr(optimizer, "weight_decay", 0.0)),
                betas=tuple(number(getattr(optimizer, beta)) for beta in ("beta_1", "beta_2") if hasattr(optimizer, beta)),
                decayed=decayed(optimizer, {key: plan.parameters[key] for key in owned.get(name, ()) if key in plan.parameters}),
                groups=(group_of(name, outer),),
                parameters=tuple(owned.get(name, ())),
                unknown_parameters=sum(id(variable) not in known for variable in held) if plan.built else 0,
            )
        )
    return tuple(told)


def describe_schedules(optimizers: Mapping[str, Any], planned: int | None, companions: Sequence[Any]) -> tuple[Schedule, ...]:
    """Schedules that can be looked at ahead. One driven by a metric is marked reactive; a LearningRateScheduler may do anything and is left out."""
    found = []
    for name, outer in optimizers.items():
        optimizer = inner(outer)
        rate, group = getattr(optimizer, "_learning_rate", None), group_of(name, outer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            schedule = describe(group, rate, planned, int(keras.ops.convert_to_numpy(optimizer._iterations)))
            if schedule is not None:
                found.append(schedule)
        elif any(isinstance(other, keras.callbacks.ReduceLROnPlateau) for other in companions):
            curve = np.full(planned or 0, float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
            found.append(Schedule(group, "ReduceLROnPlateau", "epoch", curve, reactive=True))
    return tuple(found)


def precision_of(plan: Plan) -> str:
    """ "32", "64", "16-mixed", "bf16-mixed", "16-true" or "bf16-true", from the policies of the layers that hold weights."""
    layers = [place.layer for place in plan.places if place.name and getattr(place.layer, "_trainable_variables", None)]
    layers = layers or [place.layer for place in plan.places if place.name] or [plan.model]
    pairs = {(str(layer.compute_dtype), str(layer.variable_dtype)) for layer in layers}
    for half, name in (("float16", "16"), ("bfloat16", "bf16")):
        if any(compute == half for compute, _ in pairs):
            return f"{name}-true" if all(variable == half for _, variable in pairs) else f"{name}-mixed"
    return "64" if any(variable == "float64" for _, variable in pairs) else "32"


def autocast_of(plan: Plan) -> str:
    """The half precision that layers compute in beside float32 variables; "" without one."""
    mixed = [place.layer for place in plan.places if place.name and str(place.layer.compute_dtype) != str(place.layer.variable_dtype)]
    return next((str(layer.compute_dtype) for layer in mixed if str(layer.compute_dtype) in ("float16", "bfloat16")), "")


def augments(plan: Plan) -> bool:
    """Do layers of the model change its training inputs at random?"""
    return any(type(place.layer).__name__.startswith("Random") for place in plan.places)


def decayed(optimizer: Any, variables: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters under the optimizer's weight decay (decoupled, in Keras)."""
    if not getattr(optimizer, "weight_decay", None):
        return ()
    excluded = {id(item) for item in getattr(optimizer, "_exclude_from_weight_decay", ()) or () if not isinstance(item, str)}
    patterns = [re.compile(item) for item in getattr(optimizer, "_exclude_from_weight_decay_pattern", None) or ()]
    keys = set(getattr(optimizer, "_exclude_from_weight_decay", ()) or ())
    return tuple(
        name
        for name, variable in variables.items()
        if id(variable) not in excluded and optimizer._var_key(variable) not in keys and not any(item.search(variable.name) for item in patterns)
    )


def trained_before(plan: Plan, optimizers: Iterable[Any]) -> tuple[bool, bool]:
    """(resumed, pretrained): an optimizer has made steps; weights are not those a fresh model starts with.

    A fresh model's biases are exactly 0 and its running means too, where their initialisers say so; trained ones are not.
    """
    resumed = any(int(keras.ops.convert_to_numpy(inner(optimizer)._iterations)) > 0 for optimizer in optimizers)
    for place in plan.places:
        layer = place.layer
        for attribute, initializer in (("bias", "bias_initializer"), ("moving_mean", "moving_mean_initializer"), ("beta", "beta_initializer")):
            variable = getattr(layer, attribute, None)
            zero = type(getattr(layer, initializer, None)).__name__ == "Zeros"
            if zero and id(variable) in plan.names and np.any(keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))):
                return resumed, True
    return resumed, False


def clipping_of(optimizers: Iterable[Any]) -> tuple[float | None, str]:
    """What gradients are clipped to and how ("norm" of all together, of "each", or by "value"); (None, "") where they are not."""
    for optimizer in optimizers:
        for attribute, how in (("global_clipnorm", "norm"), ("clipnorm", "each"), ("clipvalue", "value")):
            limit = getattr(inner(optimizer), attribute, None)
            if limit is not None:
                return number(limit), how
    return None, ""


def accumulation_of(optimizers: Iterable[Any]) -> int:
    """Batches whose gradients make one update."""
    return max([int(getattr(inner(optimizer), "gradient_accumulation_steps", None) or 1) for optimizer in optimizers], default=1)


def hyper_parameters(model: Any) -> dict[str, Any]:
    """Numbers and names of the compiled optimizer, for the run's record."""
    found: dict[str, Any] = {}
    for name, outer in optimizers_of(model).items():
        try:
            config = inner(outer).get_config()
        except Exception:  # a user's optimizer without a configuration
            config = {}
        prefix = "" if name == "optimizer" else f"{name}."
        found[f"{prefix}optimizer"] = type(inner(outer)).__name__
        found |= {f"{prefix}{key}": value for key, value in config.items() if isinstance(value, int | float | str | bool) and key != "name"}
    return found


def running_means(model: Any) -> dict[str, Any]:
    """The metrics whose running mean appears in the logs as a loss: "loss" and, with several outputs, each output's."""
    found: dict[str, Any] = {}
    tracker = getattr(model, "_loss_tracker", None)
    for metric in [tracker, *(metric for metric in model.metrics if metric is not tracker)]:
        if isinstance(metric, keras.metrics.Mean) and metric.name == "loss":
            found.setdefault("loss", metric)
    for metric in getattr(getattr(model, "_compile_loss", None), "metrics", ()):
        if isinstance(metric, keras.metrics.Mean):
            found.setdefault(str(metric.name), metric)
    return found


def loss_names(logs: Any) -> list[str]:
    """The losses in the logs: "loss", and "<output>_loss" of each output where there are several."""
    return [name for name in logs if name == "loss" or name.endswith("_loss")]


def number(value: Any) -> float:
    """A hyper-parameter as a float; 0 for what is absent."""
    return float(value) if isinstance(value, int | float) else 0.0
