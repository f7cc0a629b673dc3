"""Does the first advice help? It is followed word for word where that can be automated, and the run is trained again.

Two kinds of advice are understood: a number for a setting, which is applied to the faulty run as it stands; and a repair in words, which takes out
the fault of that kind and nothing else, and only where the finding is at the fault's place. Advice to look at something is not understood, and
counts as such.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.detection.operators import Operator
from benchmarks.detection.setup import Setup
from trainvet.finding import Finding, Severity

NUMBER = r"([0-9][0-9.]*(?:e[+-]?[0-9]+)?)"


def set_rate(setup: Setup, number: float) -> None:
    """What every step is multiplied by; a jump goes on from it."""
    setup.rate = number


def divide_rate(setup: Setup, number: float) -> None:
    """By the number named."""
    setup.rate /= number


def set_clip(setup: Setup, number: float) -> None:
    """The norm at which gradients are clipped."""
    setup.clip = number


def divide_decay(setup: Setup, number: float) -> None:
    """By the number named."""
    setup.decay /= number


def set_decay(setup: Setup, number: float) -> None:
    """To the number named."""
    setup.decay = number


def set_momentum(setup: Setup, number: float) -> None:
    """To the number named."""
    setup.momentum = number


def set_epsilon(setup: Setup, number: float) -> None:
    """To the number named."""
    setup.epsilon = number


def stay(setup: Setup, number: float) -> None:
    """At the rate named, without a jump."""
    setup.rate, setup.jump = number, None


# advice with a number: what it does to the setup as it stands
NUMBERS: tuple[tuple[str, Callable[[Setup, float], None]], ...] = (
    (rf"(?:set|lower|raise) the learning rate to (?:about )?{NUMBER}", set_rate),
    (rf"divide the learning rate by {NUMBER}", divide_rate),
    (rf"clip the gradient norm (?:at|to) {NUMBER}", set_clip),
    (rf"(?:raise|lower) the clipping threshold to (?:about )?{NUMBER}", set_clip),
    (rf"set Adam's epsilon to (?:about )?{NUMBER}", set_epsilon),
    (rf"keep the rate at {NUMBER}", stay),
    (rf"set weight_decay={NUMBER}", set_decay),
    (rf"set momentum={NUMBER}", set_momentum),
    (rf"divide the weight decay by {NUMBER}", divide_decay),
    (rf"(?:set|lower) (?:the )?weight[ _]decay to (?:about )?{NUMBER}", set_decay),
    (rf"(?:set|lower) (?:the )?momentum to (?:about )?{NUMBER}", set_momentum),
)
# advice in words: which repairs (an operator's ``cure``) do what it says
WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"hand them to the optimizer|add (them|it) to", ("optimizer",)),
    (r"unfreeze|requires_grad *= *True|trainable *= *True", ("freeze",)),
    (r"^connect |take the operation|remove (the )?(detach|operation)|straight-through", ("detach", "unused")),
    (r"zero_grad", ("clears",)),
    (r"initialis|reset_parameters", ("initialisation",)),
    (r"start biases at 0|bias", ("bias",)),
    (r"ReLU or GELU", ("stack",)),
    (r"softmax|activation for the targets|last activation", ("loss", "outputs")),
    (r"normalise the inputs|scale the inputs|divide .*255|standardise", ("inputs", "validation")),
    (r"same (transform|normalisation|preprocessing)|validation", ("validation",)),
    (r"(scale|standardise|normalise|divide) the targets", ("targets",)),
    (r"drop or fill the bad samples|bad samples", ("rows",)),
    (r"labels? (follow|to|in|from|range)|join of inputs and labels|number of classes", ("labels",)),
    (r"shuffle", ("shuffle",)),
    (r"class weights|weighted sampler|sampler|resample", ("balance",)),
    (r"average the loss|reduction", ("sum",)),
    (r"\bsign\b", ("sign", "loss")),
    (r"model\.train\(\)|training mode", ("mode",)),
    (r"bfloat16|GradScaler|float32 weights|mixed precision|dynamic scaler", ("precision",)),
    (r"momentum of|running statistics|momentum=", ("running",)),
    (r"default for this setting", ("momentum", "decay")),
    (r"optimizer steps long|step the schedule|schedule", ("schedule",)),
    (r"larger batch|batch size", ("batch",)),
    (r"non-?linear|activation between|put .* between", ("activation",)),
    (r"vocabulary|\btable\b|indices", ("indices",)),
    (r"eps or a clamp|sqrt\(x", ("root",)),
    (r"loaded or assigned|how the weight is initialised", ("initialisation",)),
    (r"what sets the rate|gives at this step", ("jump", "rate")),
)


@dataclasses.dataclass(frozen=True)
class Action:
    """What an advice was understood to mean: a change of the setup, or the ``cures`` it stands for."""

    change: Callable[[Setup], None] | None = None
    cures: tuple[str, ...] = ()


def _put(put: Callable[[Setup, float], None], number: float, setup: Setup) -> None:
    put(setup, number)


def understood(advice: str) -> Action | None:
    """The action behind an advice; None where there is none."""
    for pattern, put in NUMBERS:
        found = re.search(pattern, advice)
        if found:
            number = float(found.group(1).rstrip("."))
            return Action(change=functools.partial(_put, put, number))
    interval = re.search(r"step the schedule after every (optimizer )?(step|epoch)", advice)
    if interval:
        return Action(change=lambda setup: setattr(setup, "interval", interval.group(2)))
    cures = next((cures for pattern, cures in WORDS if re.search(pattern, advice, re.IGNORECASE)), None)
    return None if cures is None else Action(cures=cures)


def faulty(setup: Setup, fault: Operator, action: Action) -> Setup:
    """The setup with the fault in it, after the action."""
    if fault.cure not in action.cures:
        fault.put(setup)
    if action.change is not None:
        action.change(setup)
    return setup


def tried(job: Any, fault: Operator, findings: Sequence[Finding], trainer: Any) -> dict[str, Any]:
    """Follow the first advice of the first headline that is at least a warning. "fixed_score" is absent where the advice is no action."""
    from benchmarks.detection.run import build, score

    finding = next((finding for finding in findings if finding.severity >= Severity.WARNING and finding.fixes), None)
    advice = "" if finding is None else finding.fixes[0]
    action = understood(advice) if advice else None
    if action is None or finding is None:
        return {"advice": advice, "understood": False}
    if action.cures:
        marked = build(job)
        fault.put(marked)
        if marked.mark and not fault.placed(marked, finding.to_dict()):
            action = Action()  # it repairs another layer
    setup = faulty(build(job), fault, action)
    _, crash = trainer.train(setup, job.framework, None)
    return {"advice": advice, "understood": True, "fixed_score": None if crash else score(trainer, setup)}
