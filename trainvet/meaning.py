"""The vocabulary: every statistic's name, unit and meaning.

A statistic is named ``target.name``; the same key is used in a rule's ``reads``, in ``Watchpoint``, in ``history`` and as
the column in TensorBoard. Rows of a target stand for subjects of its kind: parameters, activations (module or function outputs),
buffers, inputs, labels, outputs (what the loss is given), modules, and once more inputs and modules during an evaluation.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

PARAMETER_TARGETS = ("gradient", "weight", "update")
TARGETS = (
    *PARAMETER_TARGETS,
    "activation",
    "buffer",
    "input",
    "label",
    "output",
    "module",
    "validation_input",
    "validation_module",
    "loss",
    "optimizer",
    "metric",
    "run",
)
# tables that an evaluation fills; all others belong to a sampled training step
EVALUATION_TARGETS = ("validation_input", "validation_module")
# these come as series (tracks); all other targets as tables on sampled steps
SERIES_TARGETS = ("loss", "optimizer", "metric", "run")

MEANING: dict[str, str] = {
    # gradients: unscaled, per optimizer step, before clipping
    "gradient.norm": "L2 norm over the elements",
    "gradient.present": "1 where the step produced a gradient, 0 where it was None (all other numbers are then 0)",
    "gradient.rms": "root mean square over the elements",
    "gradient.mean": "mean",
    "gradient.abs_mean": "mean of absolute values",
    "gradient.std": "standard deviation (population)",
    "gradient.abs_max": "largest absolute value",
    "gradient.min": "smallest value",
    "gradient.max": "largest value",
    "gradient.zero_share": "share of elements that are exactly 0",
    "gradient.nan": "number of NaN elements",
    "gradient.inf": "number of infinite elements",
    "gradient.identical_rows": "1 where all rows (first dimension) are equal and not all zero",
    "gradient.underflow_share": "share of the non-zero elements whose scaled magnitude is below 2^-14 (subnormal in float16; loss scaler only)",
    # weights: after the update of the step
    "weight.norm": "L2 norm over the elements",
    "weight.rms": "root mean square over the elements",
    "weight.mean": "mean",
    "weight.abs_mean": "mean of absolute values",
    "weight.std": "standard deviation (population)",
    "weight.abs_max": "largest absolute value",
    "weight.min": "smallest value",
    "weight.max": "largest value",
    "weight.zero_share": "share of elements that are exactly 0",
    "weight.nan": "number of NaN elements",
    "weight.inf": "number of infinite elements",
    "weight.identical_rows": "1 where all rows (first dimension) are equal",
    # updates: weight after minus weight before the optimizer step, from a fixed random sample of elements
    "update.ratio": "norm of the update over the norm of the weight before it, both over the same sample of elements",
    "update.rms": "root mean square of the update",
    "update.unchanged": "1 where no sampled element changed",
    "update.close": "1 where every sampled element moved by at most 1e-8 + 1e-5 times its size before",
    "update.abs_mean_ratio": "mean absolute change over mean absolute weight before it (plus 1e-9)",
    "update.swallowed_share": "share of sampled elements with a gradient other than 0 whose value did not change (float16, bfloat16)",
    "update.moment_ratio": "root mean square of the gradient over Adam's bias-corrected second moment before the step",
    # activations: module or function outputs of the training forward
    "activation.mean": "mean",
    "activation.abs_mean": "mean of absolute values",
    "activation.std": "standard deviation (population)",
    "activation.rms": "root mean square",
    "activation.abs_max": "largest absolute value",
    "activation.min": "smallest value",
    "activation.max": "largest value",
    "activation.zero_share": "share of elements that are exactly 0 in this batch",
    "activation.nan": "number of NaN elements",
    "activation.inf": "number of infinite elements",
    "activation.dead_share": "share of units that never left the flat part in the current window of samples: ReLU, LeakyReLU and PReLU above 0, "
    "GELU, ELU and SELU above -3, SiLU above -6 (their input)",
    "activation.saturated_share": "share of elements whose slope is below 5 % of its maximum (sigmoid, tanh)",
    "activation.positions": "positions per unit seen in the current window (batch times other dimensions)",
    "activation.batches": "sampled batches in the current window",
    "activation.constant": "1 where all samples of the batch (two or more) gave the same output, unless what the data do not reach (positions)",
    "activation.entropy": "softmax only: mean entropy of a row over the logarithm of the entries it may choose from (exact zeros cannot be chosen)",
    "activation.batch_axis": "softmax only: 1 where it runs along axis 0, that axis is as long as the batch and no other one is",
    "activation.input_abs_max": "softmax only: largest absolute finite value of what it is given",
    # buffers
    "buffer.nonfinite": "number of NaN or infinite elements",
    "buffer.abs_max": "largest absolute value",
    "buffer.rms": "root mean square over the elements",
    "buffer.changed": "1 where the buffer changed since the sample before (0 on the first one)",
    # inputs and labels, first tensor dimension = batch
    "input.mean": "mean",
    "input.std": "standard deviation (population)",
    "input.min": "smallest value",
    "input.max": "largest value",
    "input.nan": "number of NaN elements",
    "input.inf": "number of infinite elements",
    "input.count": "number of samples",
    "input.zero_share": "share of elements that are exactly 0",
    "input.abs_mean": "mean of absolute values",
    "input.integers": "1 where every element is a whole number",
    "input.channel_offset": "largest |mean| over standard deviation of a channel that is not constant (floating inputs)",
    "input.channel_std_min": "smallest standard deviation of a channel that is not constant (floating inputs)",
    "input.channel_std_max": "largest standard deviation of a channel (floating inputs)",
    "input.constant_features": "number of features (positions of one sample) with one value in the whole batch, other than 0",
    "input.padding_share": "integer inputs: share of elements that are the padding index",
    "input.fingerprint": "a whole number below 2^24 computed from all elements: equal batches have equal ones",
    "label.mean": "mean",
    "label.std": "standard deviation (population)",
    "label.min": "smallest value",
    "label.max": "largest value",
    "label.mean_square": "mean of squares",
    "label.count": "number of samples",
    "label.nan": "number of NaN elements",
    "label.inf": "number of infinite elements",
    "label.abs_mean": "mean of absolute values",
    "label.classes": "class labels: distinct classes counted in the run so far",
    "label.seen": "class labels: labels counted in the run so far (sampled batches)",
    "label.entropy": "class labels: entropy in nats of all labels counted so far, weighted where the loss weights classes",
    "label.top_share": "class labels: share of the most frequent class counted so far",
    "label.rarest_share": "class labels: share of the rarest class counted so far, 0 for one that the loss knows and no label named",
    "label.batch_entropy": "class labels: entropy in nats of this batch alone",
    "label.out_of_range": "number of labels in this batch that the loss has no room for",
    "label.pairs": "pairs of samples with identical inputs met so far (sampled batches)",
    "label.contradictions": "such pairs whose labels differ",
    # outputs: what the loss function is given as prediction; classes along the axis the loss uses
    "output.mean": "mean",
    "output.std": "standard deviation (population)",
    "output.rms": "root mean square",
    "output.min": "smallest value",
    "output.max": "largest value",
    "output.abs_max": "largest absolute value",
    "output.abs_mean": "mean of absolute values",
    "output.zero_share": "share of elements that are exactly 0",
    "output.nan": "number of NaN elements",
    "output.inf": "number of infinite elements",
    "output.samples": "rows: elements over classes (regression: samples in the batch)",
    "output.units": "entries along the class axis (regression: values per sample)",
    "output.simplex_share": "share of rows that lie in [0, 1] and sum to 1 within 1e-3",
    "output.log_simplex_share": "share of rows that are at most 0 and whose exponentials sum to 1 within 1e-3",
    "output.column_error": "largest distance from 1 of a column's sum over the batch",
    "output.constant": "1 where all samples of the batch (two or more) have the same output",
    "output.log_normalizer": "mean absolute logarithm of the softmax normaliser of the rows",
    # modules: calls in the training forward of the sampled step
    "module.called": "how often its forward ran (all micro-batches of the step)",
    "module.training": "1 where it was in training mode, 0 in evaluation mode",
    "module.values": "batch normalisation in training mode: values per channel it normalised over",
    "module.samples": "batch normalisation in training mode: samples in the batch",
    "module.index_min": "embedding: smallest index it was given",
    "module.index_max": "embedding: largest index it was given",
    # evaluation: taken from the first batches of each validation, under the name of the input or module
    "validation_input.mean": "mean over the first batches of the evaluation",
    "validation_input.std": "standard deviation over the first batches of the evaluation",
    "validation_input.min": "smallest value",
    "validation_input.max": "largest value",
    "validation_input.count": "samples these numbers come from",
    "validation_module.training": "1 where the module was in training mode during the evaluation",
    "validation_module.unsettled": "batch normalisation in evaluation mode: share of the initial running statistics still in them "
    "(momentum to the power of updates)",
    # every step (series); in Keras the gradient norm only on sampled steps
    "loss.value": "the loss that is minimised, as the user wrote it (not divided by accumulation steps)",
    "optimizer.learning_rate": "learning rate of a parameter group",
    "run.gradient_norm": "L2 norm over all gradients of the step, unscaled, before clipping",
    "run.loss_scale": "the loss scale in force during the step",
    "metric.value": "a metric the trainer reports once per epoch or evaluation (val_loss, val_accuracy, loss)",
    "run.clip_scale": "norm of the gradients after clipping over the norm before, 1 where nothing was clipped",
    "run.stale_gradient": "1 where a gradient other than 0 was left over when an accumulation cycle began (sampled steps)",
    "run.noise_scale": "the gradient noise scale B_simple in samples, from one micro-batch against the whole step (accumulation only, sampled steps)",
    "run.batch_size": "samples in the optimizer step",
    "run.step_seconds": "wall-clock time from the end of the step before to the end of this one, without evaluations and checkpoints",
    "run.wait_seconds": "the part of it that was spent waiting for the next batch",
    "run.replica_difference": "largest difference of a parameter checksum between data-parallel processes",
    "run.other_weights": "1 where a test or prediction ran with weights other than the ones trained or the checkpoint named",
    "run.skipped": "1 where the optimizer step was skipped (loss scaler, or our guard)",
}

# "weight.share[-1.0,0.0]": the share of elements between two limits, both included; measured where a watchpoint asks for it
RANGED_TARGETS = ("weight", "activation", "input", "output")
_SHARE = re.compile(r"share\[(\S+),(\S+)\]")


def share_inside(target: str, low: float, high: float) -> str:
    """The key of the share of elements in [low, high]. Raises ValueError for a target that has none, or limits that are no range."""
    if target not in RANGED_TARGETS:
        raise ValueError(f"no share of elements is measured of {target!r}; one of {', '.join(RANGED_TARGETS)}")
    if math.isnan(low) or math.isnan(high) or not low <= high:
        raise ValueError(f"inside=({low!r}, {high!r}) must be a range, low <= high")
    return f"{target}.share[{float(low)!r},{float(high)!r}]"


def limits_of(statistic: str) -> tuple[float, float] | None:
    """The limits of a statistic such as "share[-1.0,0.0]" (the part of the key behind the target); None for any other."""
    found = _SHARE.fullmatch(statistic)
    return (float(found[1]), float(found[2])) if found else None


def shares(target: str, keys: Iterable[str]) -> list[str]:
    """The statistics "share[…]" of ``target`` among ``keys``, without the target."""
    return [key.partition(".")[2] for key in keys if key.startswith(f"{target}.share[")]


def is_known(key: str) -> bool:
    """Is ``key`` a statistic of :data:`MEANING` or a share inside a range?"""
    target, _, statistic = key.partition(".")
    return key in MEANING or (target in RANGED_TARGETS and _SHARE.fullmatch(statistic) is not None)


def meaning(key: str) -> str:
    """What a known statistic means; empty for an unknown one."""
    limits = limits_of(key.partition(".")[2])
    return f"share of elements in [{limits[0]:g}, {limits[1]:g}]" if limits else MEANING.get(key, "")


def nearest(key: str) -> str:
    """What could have been meant by an unknown key, for an error's text."""
    return " or ".join(difflib.get_close_matches(key, MEANING, n=3)) or "one of trainvet.statistics.MEANING"
