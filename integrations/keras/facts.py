"""What is known of a Keras run beside its numbers: optimizers, schedules, losses, precision, and whether it starts from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.schedules import describe
from trainvet.statistics import Loss, Optimizer, Schedule, Subject

# optimizers that divide by a running root mean square
ADAPTIVE = ("Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Lamb")
KINDS = {
    "sparse_categorical_crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "binary_crossentropy": "binary_cross_entropy",
    "mean_squared_error": "regression",
}
REDUCTIONS = {"sum_over_batch_size": "mean", "mean": "mean", "mean_with_sample_weight": "mean", "sum": "sum", None: "none", "none": "none"}


@dataclasses.dataclass
class Traits:
    """What tracing a measured step taught: the leaf layers in the order of their calls, the parameters each optimizer was given, the subjects
    that were seen, the shape of each prediction, and whether samples were weighted or a penalty was added to the loss."""

    order: tuple[str, ...] = ()
    owned: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    subjects: dict[tuple[str, str], Subject] = dataclasses.field(default_factory=dict)
    predictions: tuple[tuple[int | None, ...], ...] = ()
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


def describe_losses(model: Any, traits: Traits, batch: int) -> tuple[Loss, ...]:
    """The compiled losses under the names of their series; "unknown" where the value holds more than the loss says."""
    flat = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ()
    own = type(model).compute_loss.__module__.startswith("keras.")
    if not flat or not own:
        return (Loss("loss", samples=batch, weighted=traits.weighted),)
    told = [] if len(flat) == 1 else [Loss("loss", samples=batch, weighted=True)]
    for index, item in enumerate(flat):
        function = getattr(item.loss, "fn", item.loss)
        kind = KINDS.get(str(getattr(function, "__name__", "")), "unknown")
        shape: tuple[int | None, ...] = traits.predictions[index] if index < len(traits.predictions) else ()
        classes, samples = 0, batch
        sizes = [int(size or 1) for size in shape[1:]]
        if kind == "cross_entropy" and sizes:
            classes, samples = sizes[-1], batch * int(np.prod(sizes[:-1], dtype=np.int64))
        elif kind == "binary_cross_entropy":
            classes, samples = 2, batch * int(np.prod(sizes, dtype=np.int64))
        elif kind == "regression":
            samples = batch * int(np.prod(sizes, dtype=np.int64))
        smoothed = float((getattr(item.loss, "_fn_kwargs", None) or {}).get("label_smoothing") or 0.0) > 0
        weighted = traits.weighted or smoothed or (len(flat) == 1 and item.loss_weights is not None)
        alone = len(flat) > 1 or (not traits.penalised and item.loss_weights is None)
        told.append(
            Loss(
                name="loss" if len(flat) == 1 else str(item.name),
                kind=kind if alone else "unknown",
                classes=classes,
                samples=samples,
                reduction=REDUCTIONS.get(getattr(item.loss, "reduction", "mean"), "mean"),
                weighted=weighted,
            )
        )
    return tuple(told)


def precision_of(plan: Plan) -> str:
    """ "32", "64", "16-mixed", "bf16-mixed", "16-true" or "bf16-true", from the policies of the layers that hold weights."""
    layers = [place.layer for place in plan.places if place.name and getattr(place.layer, "_trainable_variables", None)]
    layers = layers or [place.layer for place in plan.places if place.name] or [plan.model]
    pairs = {(str(layer.compute_dtype), str(layer.variable_dtype)) for layer in layers}
    for half, name in (("float16", "16"), ("bfloat16", "bf16")):
        if any(compute == half for compute, _ in pairs):
            return f"{name}-true" if all(variable == half for _, variable in pairs) else f"{name}-mixed"
    return "64" if any(variable == "float64" for _, variable in pairs) else "32"


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
