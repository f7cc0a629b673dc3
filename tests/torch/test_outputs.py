"""Numbers of predictions against numpy in float64, and what made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainvet.integrations.torch import outputs
from trainvet.integrations.torch.activations import Look
from trainvet.integrations.torch.losses import Call
from trainvet.integrations.torch.outputs import measure
from trainvet.statistics import MEANING

WANT = frozenset(key.split(".")[1] for key in MEANING if key.startswith("output.")) | {"share[-0.5,0.5]"}


def right(values: Any, axis: int | None) -> dict[str, float]:
    """The definitions, written down once more."""
    x = np.asarray(values, dtype=np.float64)
    if axis == 0:
        x, axis = x[None], 1
    samples = len(x)
    rows = x.reshape(samples, -1) if axis is None else np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    top = rows.max(1, keepdims=True)
    with np.errstate(over="ignore"):
        sums = np.exp(rows).sum(1)
    normalizer = (top + np.log(np.exp(rows - top).sum(1, keepdims=True)))[:, 0]
    return {
        "mean": x.mean(),
        "std": x.std(),
        "rms": np.sqrt((x * x).mean()),
        "min": x.min(),
        "max": x.max(),
        "abs_max": np.abs(x).max(),
        "abs_mean": np.abs(x).mean(),
        "zero_share": (x == 0).mean(),
        "nan": 0,
        "inf": 0,
        "samples": len(rows),
        "units": rows.shape[1],
        "simplex_share": (((rows >= 0) & (rows <= 1)).all(1) & (np.abs(rows.sum(1) - 1) <= 1e-3)).mean(),
        "log_simplex_share": ((rows <= 0).all(1) & (np.abs(sums - 1) <= 1e-3)).mean(),
        "log_normalizer": np.abs(normalizer).mean(),
        "column_error": np.abs(x.reshape(samples, -1).sum(0) - 1).max(),
        "constant": float(samples > 1 and bool((x == x[:1]).all())),
        "share[-0.5,0.5]": ((x >= -0.5) & (x <= 0.5)).mean(),
    }


def logits(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


GIVEN: dict[str, tuple[Tensor, int | None]] = {
    "logits": (logits(6, 5), 1),
    "probabilities": (logits(6, 5).softmax(1), 1),
    "some rows are probabilities": (torch.cat([logits(6, 5).softmax(1), logits(2, 5)]), 1),
    "log-probabilities": (logits(6, 5).log_softmax(1), 1),
    "softmax over the batch": (logits(6, 5).softmax(0), 1),
    "one unit": (torch.ones(6, 1), 1),
    "segmentation": (logits(3, 4, 5, 6).softmax(1), 1),
    "tokens": (logits(3, 7, 5), 1),
    "no batch": (logits(5), 0),
    "regression": (logits(6, 1), None),
    "regression of several values": (logits(6, 2, 3), None),
    "a row of values": (logits(6), None),
    "a number": (torch.tensor(0.25), None),
    "constant": (torch.full((4, 3), 0.5), None),
    "float64": (logits(6, 5).double(), 1),
    "bfloat16": (logits(6, 5).bfloat16(), 1),
    "float16": (logits(6, 5).half(), 1),
    "zeros": (logits(6, 5).relu(), 1),
    "far from zero": (logits(64, 5) * 0.01 + 5000, 1),
    "large": (logits(6, 5) * 1e4, 1),
}


@pytest.mark.parametrize("block", [1 << 22, 7])
@pytest.mark.parametrize("name", GIVEN)
def test_the_numbers_are_numpys_in_one_block_and_in_many(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "BLOCK", block)
    prediction, axis = GIVEN[name]
    values = prediction.reshape(1) if prediction.dim() == 0 else prediction
    truth = right(values.double().numpy(), axis)
    found = measure(prediction, axis, WANT)
    assert sorted(found) == sorted(truth)
    for key, value in truth.items():
        assert found[key] == pytest.approx(value, rel=2e-5, abs=2e-5), key


@pytest.mark.parametrize("name", GIVEN)
def test_a_device_would_say_the_same_as_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, axis = GIVEN[name]
    host = measure(prediction, axis, WANT)
    monkeypatch.setattr(outputs._Parts, "_plain_on_host", outputs._Parts._plain)
    monkeypatch.setattr(outputs, "SMALL", 0)
    assert {key: float(value) for key, value in measure(prediction, axis, WANT).items()} == pytest.approx(host, rel=1e-4, abs=1e-4)


def test_what_is_not_finite_is_counted() -> None:
    prediction = logits(6, 5)
    prediction[0, 0], prediction[1, 1], prediction[1, 2] = float("nan"), float("inf"), -float("inf")
    found = measure(prediction, 1, WANT)
    assert (found["nan"], found["inf"]) == (1, 2)
    assert found["simplex_share"] == 0
    assert found["constant"] == 0
    assert found["mean"] != found["mean"]


def test_only_what_is_wanted_is_measured() -> None:
    assert set(measure(logits(6, 5), 1, {"std", "units"})) == {"std", "units"}


# ---- what made a prediction


def called(net: nn.Module, loss: Callable[[], Any]) -> list[Call]:
    look = Look({id(child): path for path, child in net.named_modules()}, frozenset(MEANING))
    look.start()
    loss()
    look.pause()
    assert look.error is None
    return look.calls


NET = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
CONV = nn.Sequential(nn.Conv2d(1, 5, 1), nn.Softmax(dim=1))
X, Y, IMAGE = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, 0]), torch.randn(2, 1, 3, 3)
VALUES = torch.randn(6, 5)

ORIGINS: dict[str, tuple[Callable[[], Tensor], tuple[str, int, str]]] = {
    "a linear layer": (lambda: NET(X), ("linear", -1, "2")),
    "F.softmax": (lambda: F.softmax(NET(X), dim=-1), ("softmax", 1, "2")),
    "torch.softmax over the batch": (lambda: torch.softmax(NET(X), 0), ("softmax", 0, "2")),
    "Tensor.softmax": (lambda: NET(X).softmax(1), ("softmax", 1, "2")),
    "F.log_softmax": (lambda: F.log_softmax(NET(X), 1), ("log_softmax", 1, "2")),
    "the logarithm of a softmax": (lambda: NET(X).softmax(1).log(), ("log_softmax", -1, "2")),
    "sigmoid": (lambda: NET(X).sigmoid(), ("sigmoid", -1, "2")),
    "tanh": (lambda: torch.tanh(NET(X)), ("tanh", -1, "2")),
    "relu": (lambda: F.relu(NET(X)), ("relu", -1, "2")),
    "clamp": (lambda: NET(X).clamp(min=0), ("relu", -1, "2")),
    "selu": (lambda: F.selu(NET(X)), ("selu", -1, "2")),
    "in a half": (lambda: NET(X).softmax(1).to(torch.float64), ("softmax", 1, "2")),
    "through a flat form": (lambda: NET(X).softmax(1).reshape(-1).view(6, 5), ("softmax", -1, "2")),
    "through a token axis": (lambda: NET(X.view(2, 3, 4)).softmax(-1).view(-1, 5), ("softmax", 1, "2")),
    "a sum of two": (lambda: NET(X) + NET(X), ("", -1, "")),
    "a product with what was made": (lambda: NET(X) @ torch.randn(5, 5), ("", -1, "")),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_the_function_and_the_layer_that_made_a_prediction(name: str) -> None:
    prediction, expected = ORIGINS[name]
    (call,) = called(NET, lambda: F.cross_entropy(prediction(), Y))
    assert (call.origin.function, call.origin.axis, call.origin.layer) == expected


@pytest.mark.parametrize(
    "form",
    [lambda p: p.transpose(1, 2), lambda p: p.permute(0, 2, 1), lambda p: p.movedim(-1, 1), lambda p: p.unsqueeze(0).squeeze(0).mT],
    ids=["transpose", "permute", "movedim", "unsqueeze"],
)
def test_the_axis_of_a_softmax_is_told_in_the_form_of_the_prediction(form: Callable[[Tensor], Tensor]) -> None:
    (call,) = called(NET, lambda: F.cross_entropy(form(NET(X.view(2, 3, 4)).softmax(-1)), Y.view(2, 3)))
    assert (call.origin.function, call.origin.axis, call.shape) == ("softmax", 1, (2, 5, 3))
    (call,) = called(NET, lambda: F.cross_entropy(form(NET(X.view(2, 3, 4)).softmax(0)), Y.view(2, 3)))
    assert call.origin.axis == 0


def test_a_softmax_without_a_batch_says_nothing_about_the_batch() -> None:
    (call,) = called(NET, lambda: F.cross_entropy(NET(X[0]).softmax(0), Y[0]))
    assert (call.origin.function, call.origin.axis, call.axis) == ("softmax", -1, 0)


def test_a_module_that_is_the_softmax_is_the_layer() -> None:
    (call,) = called(CONV, lambda: F.cross_entropy(CONV(IMAGE), torch.zeros(2, 3, 3, dtype=torch.long)))
    assert (call.origin.function, call.origin.axis, call.origin.layer) == ("softmax", 1, "1")


def test_squeezes_and_slices_keep_what_made_a_value() -> None:
    (call,) = called(NET, lambda: F.mse_loss(NET(X).relu()[:, :1].squeeze(-1), VALUES[:, 0]))
    assert (call.origin.function, call.origin.layer, call.expects) == ("relu", "2", "values")


def test_prediction_and_label_may_change_places_in_a_regression() -> None:
    (call,) = called(NET, lambda: F.mse_loss(VALUES, NET(X)))
    assert call.label is VALUES
    assert call.origin.function == "linear"


def test_a_metric_is_no_loss() -> None:
    assert called(NET, lambda: F.mse_loss(NET(X).detach(), VALUES)) == []


EXPECTED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "cross_entropy": (lambda: F.cross_entropy(NET(X), Y), "logits"),
    "nll_loss": (lambda: F.nll_loss(NET(X).log_softmax(1), Y), "log_probabilities"),
    "binary_cross_entropy": (lambda: F.binary_cross_entropy(NET(X).sigmoid(), (VALUES > 0).float()), "probabilities"),
    "binary_cross_entropy_with_logits": (lambda: F.binary_cross_entropy_with_logits(NET(X), (VALUES > 0).float()), "logits"),
    "mse_loss": (lambda: F.mse_loss(NET(X), VALUES), "values"),
    "l1_loss": (lambda: nn.L1Loss()(NET(X), VALUES), "values"),
    "poisson_nll_loss": (lambda: F.poisson_nll_loss(NET(X), VALUES.abs()), ""),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_loss_function_expects(name: str) -> None:
    (call,) = called(NET, EXPECTED[name][0])
    assert (call.function, call.expects) == (name, EXPECTED[name][1])


def test_weights_and_smoothing_are_seen_apart() -> None:
    weights = torch.ones(5)
    (call,) = called(NET, lambda: nn.CrossEntropyLoss(weight=weights)(NET(X), Y))
    assert (call.weighted, call.smoothed) == (True, False)
    (call,) = called(NET, lambda: nn.CrossEntropyLoss(label_smoothing=0.1)(NET(X), Y))
    assert (call.weighted, call.smoothed) == (False, True)
    (call,) = called(NET, lambda: F.cross_entropy(NET(X), Y, weights))
    assert call.weighted


@pytest.mark.parametrize(("factors", "weighs"), [(torch.rand(6), True), ((Y > 0).float(), False), (Y > 0, None), (0.5, None)], ids=str)
def test_losses_of_samples_that_are_weighted(factors: Any, weighs: bool | None) -> None:
    (call,) = called(NET, lambda: (F.cross_entropy(NET(X), Y, reduction="none") * factors).mean())
    assert (None if call.sample_weights is None else bool(call.sample_weights)) is weighs


@pytest.mark.parametrize(
    "target", [lambda: torch.ones(6, 5), lambda: torch.zeros_like(VALUES), lambda: VALUES.new_full((6, 5), 0.9), lambda: 0.9 * torch.ones(6, 5)]
)
def test_a_target_made_in_the_step_is_known(target: Callable[[], Tensor]) -> None:
    (call,) = called(NET, lambda: F.binary_cross_entropy_with_logits(NET(X), target()))
    assert call.target_made


def test_nothing_of_the_graph_is_kept() -> None:
    look = Look({id(child): path for path, child in NET.named_modules()}, frozenset(MEANING))
    look.start()
    F.cross_entropy(NET(X), Y)
    assert look.handed._made
    look.pause()
    assert not look.handed._made
    assert look.calls[0].result is not None
    assert not look.calls[0].result.requires_grad


# ---- losses that are written out

BY_HAND: dict[str, tuple[Callable[[], Tensor], tuple[str, str, str]]] = {
    "power": (lambda: ((NET(X) - VALUES) ** 2).mean(), ("regression", "mean", "linear")),
    "the other way round": (lambda: (VALUES - NET(X)).pow(2).sum(), ("regression", "sum", "linear")),
    "torch.square": (lambda: torch.mean(torch.square(NET(X).relu() - VALUES)), ("regression", "mean", "relu")),
    "Tensor.square": (lambda: torch.sub(NET(X)[:, 0].sigmoid(), VALUES[:, 0]).square().mean(), ("regression", "mean", "sigmoid")),
    "absolute": (lambda: (NET(X) - VALUES).abs().mean(), ("other_regression", "mean", "linear")),
}
NOT_BY_HAND: dict[str, Callable[[], Tensor]] = {
    "a third power": lambda: ((NET(X) - VALUES) ** 3).mean(),
    "over one axis": lambda: ((NET(X) - VALUES) ** 2).mean(0),
    "between two predictions": lambda: ((NET(X) - NET(X).tanh()) ** 2).mean(),
    "of a parameter": lambda: ((NET[0].weight - torch.zeros(8, 4)) ** 2).sum(),
    "to a number": lambda: ((NET(X) - 1) ** 2).mean(),
    "of shapes that differ": lambda: ((NET(X)[:, :1] - VALUES[:, 0]) ** 2).mean(),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_error_that_is_written_out_is_a_call(name: str) -> None:
    loss, (kind, reduction, function) = BY_HAND[name]
    (call,) = called(NET, loss)
    assert (call.kind, call.reduction, call.origin.function, call.by_hand, call.expects) == (kind, reduction, function, True, "values")
    assert call.label.data_ptr() == VALUES.data_ptr()
    assert call.result is not None
    assert call.result == loss().detach()
    assert call.numbers["max"] > call.numbers["min"]


@pytest.mark.parametrize("name", NOT_BY_HAND)
def test_other_differences_are_none(name: str) -> None:
    assert called(NET, NOT_BY_HAND[name]) == []
