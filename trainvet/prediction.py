"""What is wrong with a prediction for the loss it is given to: decided from one batch of outputs and labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trainvet.statistics import Loss

RANGES = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "softplus": (0.0, math.inf),
    "sigmoid": (0.0, 1.0),
    "hard_sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
}
OVER_CLASSES = ("logits", "log_probabilities", "probabilities")
REACH, BEYOND = 1.25, 0.5
FLAT = 1e-2


def faults(loss: Loss, output: Mapping[str, float], label: Mapping[str, float], keras: bool) -> Iterator[tuple[str, str, str]]:
    """What is wrong with one batch: key, message, fix."""
    function, layer = loss.output_function, loss.output_layer or "the last layer"
    units, rows = output.get("units", 0.0), output.get("samples", 0.0)
    values = loss.kind == "regression" or loss.expects == "values"
    classes = loss.expects in OVER_CLASSES and not values
    sigmoid = f"give {layer} activation='sigmoid' and use binary cross-entropy" if keras else "use binary_cross_entropy_with_logits on the one unit"
    if units == 1 and function in ("softmax", "log_softmax") and not (values and label.get("std") == 0):
        yield "single", f"a softmax over one unit gives {'1' if function == 'softmax' else '0'} whatever the input", sigmoid
    elif units == 1 and classes and loss.kind == "cross_entropy":
        yield "single", "a cross-entropy over one class is 0 whatever the input", sigmoid
    if classes and units > 1 and rows > 1 and function in ("softmax", "log_softmax"):
        astray = output.get("simplex_share" if function == "softmax" else "log_simplex_share", math.nan) < 0.5
        columns = function == "softmax" and output.get("column_error", math.nan) < FLAT
        if astray and (loss.output_axis == 0 or columns):
            yield (
                "axis",
                f"the {function} runs over the batch: the classes of a sample do not sum to 1",
                "apply it over the classes, axis -1",
            )
    if function == "relu" and loss.expects == "logits" and loss.kind == "binary_cross_entropy":
        yield "negative", "a ReLU in front of a binary loss on logits: no probability can fall below 0.5", f"remove the ReLU after {layer}"
    if not values:
        return
    if function == "relu" and output.get("constant") == 1 and output.get("max") == 0 and (label.get("std", 0.0) > 0 or label.get("mean", 0.0) != 0):
        yield "dead", "the ReLU at the end gives 0 for every sample", f"remove the ReLU after {layer}"
    low, high = RANGES.get(function, (-math.inf, math.inf))
    mean, std, least, most = (label.get(key, math.nan) for key in ("mean", "std", "min", "max"))
    if mean - REACH * std < low and low - least > BEYOND * std:
        yield "range", f"targets reach from {least:.3g} to {most:.3g}, a {function} gives nothing below {low:g}", _fix(layer, function, keras)
    elif mean + REACH * std > high and most - high > BEYOND * std:
        yield "range", f"targets reach from {least:.3g} to {most:.3g}, a {function} gives nothing above {high:g}", _fix(layer, function, keras)


def _fix(layer: str, function: str, keras: bool) -> str:
    return f"give {layer} no activation (activation=None)" if keras else f"remove the {function} after {layer}, or scale the targets into its range"
