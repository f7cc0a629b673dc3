"""What only the edge knows about a run."""

from __future__ import annotations

import dataclasses

from trainvet.statistics import Schedule

# what the facts take over from the edge as it is
TOLD = (
    "manual_optimization", "resumed", "batches_per_epoch", "samples_per_epoch", "repeats_batches", "shuffled", "seeded", "deterministic",
    "finetuning", "processes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Known:
    """What only the edge knows; handed over at the start and whenever it changes. The names are those of Facts; ``clips_exactly``: the trainer itself
    clips by the norm of all gradients, so that its factor follows from the norm; ``waits``: the edge says when a batch is waited for."""

    framework: str = "torch"
    planned_steps: int | None = None
    schedules: tuple[Schedule, ...] = ()
    precision: str = "32"
    clipping: float | None = None
    clipping_by: str = ""
    accumulation: int = 1
    clips_exactly: bool = False
    manual_optimization: bool = False
    resumed: bool = False
    batches_per_epoch: int | None = None
    samples_per_epoch: int | None = None
    repeats_batches: bool = False
    shuffled: bool | None = None
    balanced: bool = False
    seeded: bool | None = None
    deterministic: bool | None = None
    finetuning: bool = False
    processes: int = 1
    waits: bool = False
    unobservable: dict[str, str] = dataclasses.field(default_factory=dict)


def unmeasured(known: Known, optimizers: int, alone: bool) -> dict[str, str]:
    """Series that there is no way to, and why. ``alone``: no process group was seen."""
    reasons = {"run.replica_difference": "one process" if known.processes == 1 and alone else "the processes are not compared"}
    if not known.waits:
        reasons["run.wait_seconds"] = "a hand-written loop does not say when it waits for a batch"
    if known.accumulation < 2 or known.manual_optimization:
        reasons["run.noise_scale"] = "the trainer accumulates no micro-batches"
    if optimizers > 1:
        reasons["run.stale_gradient"] = "several optimizers: a backward may be meant for any of them"
    if known.framework != "lightning":
        reasons |= dict.fromkeys(("metric", "validation_input", "validation_module"), "a hand-written loop does not say when it evaluates")
        reasons["run.other_weights"] = "a hand-written loop does not say when it tests"
    elif known.manual_optimization:
        reasons["run.clip_scale"] = "under manual optimization gradients are seen after clipping"
    return reasons
