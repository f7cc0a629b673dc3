"""The compiled losses: what each expects to be given, what it is given, and which labels it knows."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from trainvet.integrations.keras.batches import Target
from trainvet.integrations.keras.facts import Given, Origin, Traits
from trainvet.statistics import Loss

KINDS = {
    "sparse_categorical_crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "binary_crossentropy": "binary_cross_entropy",
    "mean_squared_error": "regression",
}
# losses with an argument ``from_logits``
OVER_CLASSES = frozenset({*KINDS, "binary_focal_crossentropy", "categorical_focal_crossentropy"} - {"mean_squared_error"})
VALUES = frozenset({
    "mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_logarithmic_error", "huber", "log_cosh",
})  # fmt: skip
REDUCTIONS = {"sum_over_batch_size": "mean", "mean": "mean", "mean_with_sample_weight": "mean", "sum": "sum", None: "none", "none": "none"}


def describe_losses(model: Any, traits: Traits, batch: int) -> tuple[Loss, ...]:
    """The compiled losses under the names of their series; "unknown" where the value holds more than the loss says."""
    flat = _flat(model)
    if not flat:
        return (Loss("loss", samples=batch, weighted=traits.weighted),)
    told = [] if len(flat) == 1 else [Loss("loss", samples=batch, weighted=True, label="", output="")]
    for index, item in enumerate(flat):
        name = function_name(item.loss)
        kind, output, label = KINDS.get(name, "unknown"), _at(traits.outputs, item, index), _at(traits.labels, item, index)
        classes, samples = 0, batch
        sizes = [int(size or 1) for size in output.shape[1:]]
        if kind == "cross_entropy" and sizes:
            classes, samples = sizes[-1], batch * int(np.prod(sizes[:-1], dtype=np.int64))
        elif kind == "binary_cross_entropy":
            classes, samples = 2, batch * int(np.prod(sizes, dtype=np.int64))
        elif kind == "regression":
            samples = batch * int(np.prod(sizes, dtype=np.int64))
        smoothed = float(_arguments(item.loss).get("label_smoothing") or 0.0) > 0
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
                smoothed=smoothed,
                function=title(item.loss),
                expects=expects(item.loss),
                output_function=output.origin.function,
                output_axis=output.origin.axis,
                output_layer=output.origin.layer,
                label=label.name,
                output=output.name,
            )
        )
    return tuple(told)


def targets_of(model: Any, traits: Traits) -> dict[str, Target]:
    """What the losses make of their labels, by the labels' names."""
    found = {}
    for index, item in enumerate(_flat(model)):
        name, output, label = function_name(item.loss), _at(traits.outputs, item, index), _at(traits.labels, item, index)
        classes = int(output.shape[-1] or 0) if len(output.shape) > 1 else 0
        ignored = _arguments(item.loss).get("ignore_class")
        found[label.name] = Target(KINDS.get(name, "unknown"), classes, name.startswith("sparse"), ignored)
    return found


def by_class(model: Any, traits: Traits) -> dict[str, bool]:
    """Do the entries of a prediction's last axis belong together? By the predictions' names."""
    return {_at(traits.outputs, item, index).name: function_name(item.loss) not in VALUES for index, item in enumerate(_flat(model))}


def expects(loss: Any) -> str:
    """What a loss of Keras wants: "logits", "probabilities", "values", or "" where it cannot be known."""
    name = function_name(loss)
    if name in VALUES:
        return "values"
    if name not in OVER_CLASSES:
        return ""
    return "logits" if _arguments(loss).get("from_logits", False) else "probabilities"


def function_name(loss: Any) -> str:
    """The function of Keras behind a loss; "" for a user's own."""
    function = getattr(loss, "fn", loss)
    own = inspect.unwrap(function) if callable(function) else function
    return str(getattr(function, "__name__", "")) if str(getattr(own, "__module__", "")).startswith("keras.") else ""


def title(loss: Any) -> str:
    """What a user calls it."""
    kind = type(loss).__name__
    name = str(getattr(getattr(loss, "fn", loss), "__name__", kind)) if kind in ("LossFunctionWrapper", "function") else kind
    return f"{name}(from_logits=True)" if _arguments(loss).get("from_logits", False) else name


def _arguments(loss: Any) -> dict[str, Any]:
    return dict(getattr(loss, "_fn_kwargs", None) or {})


def _flat(model: Any) -> list[Any]:
    """The losses that ``compile`` was given, where the model computes its loss from nothing else."""
    flat = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ()
    return list(flat) if type(model).compute_loss.__module__.startswith("keras.") else []


def _at(given: tuple[Given, ...], item: Any, index: int) -> Given:
    """The prediction or label of a loss: by its place, else by its number."""
    found = next((one for one in given if one.path == tuple(item.path)), None)
    return found or (given[index] if index < len(given) else Given((), "", (), Origin()))
