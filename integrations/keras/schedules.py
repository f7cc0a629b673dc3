"""Learning-rate schedules of Keras, looked at ahead of time and outside the training step."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainvet.statistics import Schedule, Vector

POINTS = 200


def rates(schedule: Any, steps: Vector) -> Vector | None:
    """The learning rate at each of ``steps`` (float64 [T]); None where the schedule cannot be evaluated.

    Keras' own schedules are computed from their configuration; others are called at up to 200 of the steps, with straight lines in between.
    """
    if type(schedule).__module__.startswith("keras."):
        try:
            known = _known(type(schedule).__name__, schedule.get_config(), steps)
        except (KeyError, TypeError, ValueError):
            known = None
        if known is not None:
            return known
    if not len(steps):
        return np.zeros(0)
    at = np.unique(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).round().astype(int))
    try:
        values = np.array([float(schedule(int(steps[index]))) for index in at])
    except Exception:  # a schedule of the user's that wants something else than a number
        return None
    return np.interp(np.arange(len(steps)), at, values)


def describe(group: str, schedule: Any, planned: int | None, start: int) -> Schedule | None:
    """The schedule from iteration ``start`` over ``planned`` steps; None where nothing can be said about it."""
    config: dict[str, Any] = {}
    if type(schedule).__module__.startswith("keras."):
        config = schedule.get_config()
    horizon = _horizon(type(schedule).__name__, config)
    length = planned if planned is not None else int(horizon or 0)
    curve = rates(schedule, start + np.arange(length, dtype=np.float64))
    if curve is None or not length:
        return None
    kind = type(schedule).__name__
    restarts = kind == "CosineDecayRestarts" or bool(config.get("cycle"))
    return Schedule(group, kind, "step", curve, None if restarts else horizon, restarts)


def _horizon(kind: str, config: dict[str, Any]) -> float | None:
    if kind == "PolynomialDecay":
        return float(config["decay_steps"])
    if kind == "CosineDecay":
        return float(config["decay_steps"]) + (float(config["warmup_steps"]) if config.get("warmup_target") is not None else 0.0)
    if kind == "PiecewiseConstantDecay" and config["boundaries"]:
        return float(config["boundaries"][-1])
    return None


def _known(kind: str, config: dict[str, Any], steps: Vector) -> Vector | None:
    if kind == "PiecewiseConstantDecay":
        values = np.array([float(value) for value in config["values"]])
        return values[np.searchsorted(np.array([float(bound) for bound in config["boundaries"]]), steps, side="left")]
    if "initial_learning_rate" not in config:
        return None
    first = float(config["initial_learning_rate"])
    if kind == "ExponentialDecay":
        power = steps / float(config["decay_steps"])
        return first * float(config["decay_rate"]) ** (np.floor(power) if config["staircase"] else power)
    if kind == "InverseTimeDecay":
        power = steps / float(config["decay_steps"])
        return first / (1.0 + float(config["decay_rate"]) * (np.floor(power) if config["staircase"] else power))
    if kind == "PolynomialDecay":
        length = np.full_like(steps, float(config["decay_steps"]))
        if config["cycle"]:
            length *= np.where(steps == 0, 1.0, np.ceil(steps / length))
        last = float(config["end_learning_rate"])
        return (first - last) * (1.0 - np.minimum(steps, length) / length) ** float(config["power"]) + last
    if kind == "CosineDecay":
        return _cosine(config, first, steps)
    if kind == "CosineDecayRestarts":
        return _restarts(config, first, steps)
    return None


def _cosine(config: dict[str, Any], first: float, steps: Vector) -> Vector:
    decay, alpha = float(config["decay_steps"]), float(config["alpha"])
    if config.get("warmup_target") is None:
        peak, warm = first, 0.0
    else:
        peak, warm = float(config["warmup_target"]), float(config["warmup_steps"])
    done = np.clip((steps - warm) / decay, 0.0, 1.0)
    falling = peak * ((1.0 - alpha) * 0.5 * (1.0 + np.cos(np.pi * done)) + alpha)
    return np.where(steps < warm, first + (peak - first) * steps / warm, falling) if warm else falling


def _restarts(config: dict[str, Any], first: float, steps: Vector) -> Vector:
    length, longer = float(config["first_decay_steps"]), float(config["t_mul"])
    done = steps / length
    if longer == 1.0:
        turn = np.floor(done)
        done = done - turn
    else:
        turn = np.floor(np.log(1.0 - done * (1.0 - longer)) / np.log(longer))
        done = (done - (1.0 - longer**turn) / (1.0 - longer)) / longer**turn
    alpha = float(config["alpha"])
    cosine = 0.5 * float(config["m_mul"]) ** turn * (1.0 + np.cos(np.pi * done))
    return first * ((1.0 - alpha) * cosine + alpha)
