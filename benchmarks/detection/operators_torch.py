"""Faults in PyTorch models, losses and loops."""

from __future__ import annotations

import re

import torch
from torch import nn

from benchmarks.detection.operators import RUNAWAY, STANDSTILL, Catalogue
from benchmarks.detection.operators_settings import labelled, normalises, plain, sgd
from benchmarks.detection.setup import Setup

OWN = Catalogue()
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
RELUS = (nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU)


def weighted(setup: Setup) -> dict[str, nn.Module]:
    """Layers with a trainable matrix, by name, in order."""
    return {name: module for name, module in setup.model.named_modules() if isinstance(module, WEIGHTED) and module.weight.requires_grad}


def sequential(setup: Setup) -> bool:
    """A plain stack that can be taken apart: two hidden layers or more, the last one gives the outputs."""
    return setup.own and isinstance(setup.model, nn.Sequential) and len(weighted(setup)) >= 2


def activations(setup: Setup) -> list[int]:
    """Positions of the stack's activations."""
    return [index for index, module in enumerate(setup.model) if isinstance(module, (*RELUS, nn.Tanh))]


def stacked(setup: Setup) -> bool:
    """A stack with two activations."""
    return sequential(setup) and len(activations(setup)) >= 2


def linear(setup: Setup) -> bool:
    """A stack of linear layers."""
    return stacked(setup) and all(isinstance(layer, nn.Linear) for layer in weighted(setup).values())


def marks(*names: str) -> str:
    """A pattern for any of these names, whatever the model's own name in front of them."""
    return "|".join(rf"(^|[ .]){re.escape(name)}($|[ .,])" for name in names)


INITIAL = {"WT107"}


@OWN.add(INITIAL, "init|equal|constant", "initialisation", lambda setup: setup.own and len(weighted(setup)) >= 2, structural=True)
def zero_initialisation(setup):
    for layer in weighted(setup).values():
        nn.init.zeros_(layer.weight)


@OWN.add(INITIAL, "init|equal|constant", "initialisation", stacked, structural=True)
def constant_initialisation(setup):
    for layer in weighted(setup).values():
        nn.init.constant_(layer.weight, 0.05)


@OWN.add({"LO108", "WT108", "AC103", "GR101", "WT106"}, "init|weights", "initialisation", stacked)
def weights_start_too_large(setup):
    with torch.no_grad():
        for layer in weighted(setup).values():
            layer.weight.mul_(15)


@OWN.add({"AC101", "AC102", "AC104", "AC105", "GR104"}, "", "bias", lambda setup: stacked(setup) and not normalises(setup), structural=True)
def dead_bias(setup):
    at = next((index for index in activations(setup)[1:] if isinstance(setup.model[index], nn.ReLU)), activations(setup)[-1])
    before = max(index for index in range(at) if isinstance(setup.model[index], WEIGHTED))
    nn.init.constant_(setup.model[before].bias, -20.0)
    setup.mark = marks(str(before), str(at), f"{before}.weight", f"{before}.bias")


@OWN.add({"GR102", "AC103", "WT106", "LO104"}, "gradient|sigmoid|fade", "stack", lambda setup: labelled(setup) and linear(setup))
def stack_of_sigmoids(setup):
    layers = list(setup.model)
    at = activations(setup)[-1]
    width = next(layer.out_features for layer in reversed(layers[:at]) if isinstance(layer, nn.Linear))
    deep = [part for _ in range(8) for part in (nn.Linear(width, width), nn.Sigmoid())]
    layers = [nn.Sigmoid() if isinstance(layer, (*RELUS, nn.Tanh)) else layer for layer in layers]
    setup.model = nn.Sequential(*layers[: at + 1], *deep, *layers[at + 1 :])


@OWN.add({"LO109", "LO110"}, "softmax|loss", "loss", lambda setup: labelled(setup) and plain(setup), structural=True)
def softmax_twice(setup):
    setup.criterion = _After(setup.criterion, nn.Softmax(-1))


@OWN.add({"LO109", "LO110"}, "softmax|log|loss", "loss", lambda setup: labelled(setup) and plain(setup), structural=True)
def logits_into_nll(setup):
    setup.criterion = nn.functional.nll_loss


@OWN.add({"LO109", "LO110"}, "softmax|axis|loss", "loss", lambda setup: labelled(setup) and plain(setup), structural=True)
def softmax_over_the_batch(setup):
    setup.criterion = _After(nn.functional.nll_loss, nn.LogSoftmax(0))


class _After:
    """A criterion that is given what ``first`` makes of the outputs."""

    def __init__(self, criterion, first) -> None:
        self.criterion, self.first = criterion, first

    def __call__(self, outputs, targets):
        return self.criterion(self.first(outputs), targets)


@OWN.add({"LO101", "GR101", "WT105", "LO103", "AC107", "LO110"}, "loss|sign", "loss", plain, structural=True)
def loss_with_the_wrong_sign(setup):
    criterion = setup.criterion
    setup.criterion = lambda outputs, targets: -criterion(outputs, targets)


@OWN.add({"LO110", "LO108", *RUNAWAY}, "sum|averag|mean|learning rate", "sum", lambda setup: plain(setup) and sgd(setup))
def summed_loss(setup):
    criterion = setup.criterion
    setup.criterion = lambda outputs, targets: criterion(outputs, targets) * len(targets)


@OWN.add({"LO110"}, "output|relu|target", "outputs", lambda setup: setup.kind == "values" and plain(setup), structural=True)
def relu_for_signed_targets(setup):
    setup.model = nn.Sequential(*setup.model, nn.ReLU())


@OWN.add({"MO101"}, "frozen|freez", "freeze", lambda setup: len(weighted(setup)) >= 3 and setup.own, structural=True)
def frozen_by_accident(setup):
    names = list(weighted(setup))[:-1]
    for name in names:
        for value in setup.model.get_submodule(name).parameters():
            value.requires_grad_(False)
    setup.mark = marks(*names, *{name.split(".")[0] for name in names if "." in name})


@OWN.add({"WT102"}, "optimizer", "optimizer", lambda setup: len(weighted(setup)) >= 2, structural=True)
def missing_from_the_optimizer(setup):
    name = next(iter(weighted(setup)))
    setup.trains = lambda parameter: not parameter.startswith(name + ".")
    setup.mark = marks(name, f"{name}.weight", f"{name}.bias")


class _Through(nn.Module):
    """A layer and what is done to its output."""

    def __init__(self, layer, then) -> None:
        super().__init__()
        self.layer, self.then = layer, then

    def forward(self, x):
        return self.then(self.layer(x))


def _wrap(setup: Setup, then) -> None:
    at = activations(setup)[0]
    before = max(index for index in range(at) if isinstance(setup.model[index], WEIGHTED))
    setup.model[at] = _Through(setup.model[at], then)
    setup.mark = marks(str(before), str(at), f"{before}.weight", f"{before}.bias")


@OWN.add({"GR104", "GR108"}, "", "detach", stacked, structural=True)
def detached_branch(setup):
    _wrap(setup, lambda hidden: hidden.detach())


@OWN.add({"GR104", "GR108"}, "", "detach", lambda setup: stacked(setup) and setup.precision == "32", structural=True)
def rounded_in_the_middle(setup):
    _wrap(setup, lambda hidden: torch.round(hidden * 4) / 4)


@OWN.add({"NF101"}, "", "root", lambda setup: stacked(setup) and isinstance(setup.model[activations(setup)[0]], nn.ReLU), structural=True)
def log_of_zero(setup):
    _wrap(setup, torch.log)


@OWN.add({"NF101"}, "", "initialisation", lambda setup: len(weighted(setup)) >= 2, structural=True)
def weight_that_is_not_a_number(setup):
    name = list(weighted(setup))[1]
    with torch.no_grad():
        setup.model.get_submodule(name).weight.view(-1)[0] = float("nan")
    setup.mark = marks(name, f"{name}.weight")


@OWN.add({"MO107"}, "", "activation", lambda setup: stacked(setup) and not normalises(setup), structural=True)
def no_activation_between(setup):
    at = activations(setup)[-1]
    before = max(index for index in range(at) if isinstance(setup.model[index], WEIGHTED))
    after = min(index for index in range(at, len(setup.model)) if isinstance(setup.model[index], WEIGHTED))
    setup.model[at] = nn.Identity()
    setup.mark = marks(str(before), str(after))


@OWN.add({"MO109"}, "momentum|running|statistics", "running", normalises, structural=False)
def running_statistics_unsettled(setup):
    for module in setup.model.modules():
        if "BatchNorm" in type(module).__name__:
            module.momentum = 0.001


def stochastic(setup: Setup) -> bool:
    """Does training mode matter?"""
    return normalises(setup) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in setup.model.modules())


@OWN.add({"MO104"}, "eval|mode|train", "mode", stochastic, structural=True)
def left_in_eval_mode(setup):
    setup.mode = "eval"


@OWN.add({"GR106"}, "zero_grad|clear", "clears", lambda setup: setup.accumulate == 1, structural=True)
def gradients_never_cleared(setup):
    setup.clears = False


@OWN.add({"LS104", "LS103"}, "float16|scal", "precision", lambda setup: setup.own and setup.precision == "32" and stacked(setup), structural=True)
def float16_without_scaler(setup):
    setup.precision = "fp16-unscaled"


@OWN.add(
    {"WT103", "WT101", *STANDSTILL},
    "bf16|bfloat16|precision|swallow|unchanged|rate",
    "precision",
    lambda setup: setup.own and setup.precision == "32",
)
def bfloat16_weights_at_a_small_rate(setup):
    setup.precision, setup.rate = "bf16-true", setup.rate / (100 if setup.optimizer in ("adam", "adamw") else 30)


@OWN.add({"MO103", "GR104"}, "", "unused", lambda setup: setup.own, structural=True)
def layer_that_is_never_called(setup):
    setup.model.register_module("spare", nn.Linear(8, 8)) if not isinstance(setup.model, nn.Sequential) else _spare(setup)
    setup.mark = "spare"


def _spare(setup: Setup) -> None:
    inner = setup.model
    setup.model = nn.ModuleDict({"inner": inner, "spare": nn.Linear(8, 8)})
    forward = setup.forward
    setup.forward = (lambda model, *x: model["inner"](*x)) if forward is None else (lambda model, *x: forward(model["inner"], *x))


@OWN.add({"LR102", *STANDSTILL}, "schedule|learning rate", "schedule", lambda setup: setup.accumulate == 1, structural=True)
def schedule_for_epochs_stepped_per_batch(setup):
    setup.schedule, setup.interval = lambda optimizer, setup: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1), "step"


@OWN.add({"LR102", *STANDSTILL}, "schedule|learning rate", "schedule", lambda s: s.schedule is not None and s.interval == "step", structural=True)
def schedule_for_steps_stepped_per_epoch(setup):
    setup.interval = "epoch"


@OWN.add({"LR102", *STANDSTILL}, "schedule|learning rate", "schedule")
def schedule_too_short(setup):
    setup.schedule = lambda optimizer, setup: torch.optim.lr_scheduler.PolynomialLR(optimizer, max(2, setup.steps // 10))
    setup.interval = "step"
