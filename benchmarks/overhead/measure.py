"""What every overhead benchmark shares: interleaved rounds, a control, a median with its interval, and a word on the machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence


@dataclasses.dataclass
class Arm:
    """One way of training. ``round`` trains some steps and gives back CPU seconds per step; ``own`` our own seconds per step, if we were there."""

    name: str
    round: Callable[[], float]
    own: Callable[[], float] | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)


def interleave(arms: Sequence[Arm], rounds: int) -> None:
    """Run all arms ``rounds`` times in a changing order, after one round each that does not count."""
    order = list(arms)
    shuffle = random.Random(0)
    for arm in order:
        arm.round()
    for _ in range(rounds):
        shuffle.shuffle(order)
        for arm in order:
            arm.seconds.append(arm.round())


def ratio(arm: Arm, base: Arm, draws: int = 2000) -> tuple[float, float, float]:
    """Median of the rounds' ratios to ``base``, with a 95 % bootstrap interval."""
    pairs = [mine / theirs for mine, theirs in zip(arm.seconds, base.seconds, strict=True)]
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    return statistics.median(pairs), medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def report(title: str, arms: Sequence[Arm], steps: int, dense: float | None = None) -> None:
    """Print the table of one program; the first arm is the base, one called "bare again" the control."""
    base = arms[0]
    print(f"\n{title}: {len(base.seconds)} rounds of {steps} steps, base {1e3 * statistics.median(base.seconds):.2f} ms CPU per step")
    for arm in arms[1:]:
        middle, low, high = ratio(arm, base)
        own = f"   own time {1e6 * arm.own():.0f} us per step, {100 * arm.own() / statistics.median(base.seconds):.1f} % of it" if arm.own else ""
        print(f"  {arm.name:<34} {middle:6.3f}   95 % interval {low:.3f} .. {high:.3f}{own}")
    if dense is not None:
        print(f"  dense start (first 10 steps, every one measured in full): {1e3 * dense:.2f} ms own time per step")


def machine() -> None:
    """Print what the figures were measured on."""
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load average {load:.1f}, Python {platform.python_version()}, one thread per process")
    print('ratios of CPU time in one process, rounds interleaved; "bare again" is the noise of the measurement')
