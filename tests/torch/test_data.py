"""Numbers of inputs and labels against numpy in float64; class counts, hashes, and indices of embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainvet.integrations.torch import labels as labels_module
from trainvet.integrations.torch.data import _masked, plain, structure
from trainvet.integrations.torch.hashes import SLOTS, Hasher, Pairs
from trainvet.integrations.torch.labels import Classes, ignored
from trainvet.integrations.torch.losses import Call, read_call
from trainvet.integrations.torch.outputs import measure
from trainvet.statistics import MEANING

LABEL = frozenset(key.split(".")[1] for key in MEANING if key.startswith("label."))
OUTPUT = frozenset(key.split(".")[1] for key in MEANING if key.startswith("output."))
INPUT = frozenset(key.split(".")[1] for key in MEANING if key.startswith("input.")) | {"share[0.0,1.0]"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


# ---- inputs

INPUTS: dict[str, Tensor] = {
    "rows": 3 * normal(16, 5) + 1,
    "images": normal(4, 3, 5, 5) * torch.tensor([1.0, 2.0, 0.5]).reshape(3, 1, 1) + 4,
    "pixels": whole(256, 4, 3, 5, 5).float(),
    "bytes": whole(256, 4, 3, 5, 5).to(torch.uint8),
    "tokens": whole(50, 4, 7),
    "a column": normal(9),
    "constant columns": torch.cat([normal(16, 2), torch.full((16, 1), 0.1), torch.zeros(16, 1)], 1),
    "bfloat16": normal(16, 5).bfloat16(),
    "float64": normal(16, 5).double(),
    "not contiguous": normal(5, 16).T,
    "one sample": normal(1, 5),
}


def right(x: Any, floating: bool) -> dict[str, float]:
    axis = 1 if x.ndim > 1 else None
    parts = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) if axis is not None else x[None]
    varying = parts[parts.max(1) > parts.min(1)]
    offset = (np.abs(varying.mean(1)) / varying.std(1)).max() if len(varying) else math.nan
    truth = {
        "mean": x.mean(),
        "std": x.std(),
        "min": x.min(),
        "max": x.max(),
        "abs_mean": np.abs(x).mean(),
        "zero_share": (x == 0).mean(),
        "nan": 0.0,
        "inf": 0.0,
        "count": float(len(x)),
        "integers": float((x == np.floor(x)).all()),
        "constant_features": float(((x == x[:1]).all(0) & (x[0] != 0)).sum()) if len(x) > 1 else 0.0,
        "share[0.0,1.0]": ((x >= 0) & (x <= 1)).mean(),
    }
    if floating:
        least = varying.std(1).min() if len(varying) else math.nan
        most = varying.std(1).max() if len(varying) else 0.0
        truth |= {"channel_offset": offset, "channel_std_min": least, "channel_std_max": most}
    return truth


@pytest.mark.parametrize("name", INPUTS)
def test_numbers_of_inputs_are_numpys(name: str) -> None:
    tensor = INPUTS[name]
    found = plain(tensor, INPUT) | structure(tensor, INPUT)
    truth = right(tensor.double().numpy(), tensor.is_floating_point())
    assert sorted(found) == sorted(truth)
    for key, value in truth.items():
        assert float(found[key]) == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), key


def test_what_is_not_finite_is_counted() -> None:
    tensor = normal(16, 5)
    tensor[0, 0], tensor[1, 1], tensor[2, 2] = math.nan, math.inf, -math.inf
    found = plain(tensor, INPUT) | structure(tensor, INPUT)
    assert (found["nan"], found["inf"], found["integers"]) == (1, 2, 0)


def test_only_what_is_wanted_is_measured() -> None:
    assert set(plain(normal(4, 4), {"std"}) | structure(normal(4, 4), {"std"})) == {"std"}


# ---- labels


def call_of(function: Any, prediction: Tensor, label: Tensor, **arguments: Any) -> Call:
    read = read_call(function, (prediction, label), arguments)
    assert read is not None
    return read[0]


@pytest.fixture(params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels in host memory go through numpy; here also the way of a device."""
    if request.param == "device":
        monkeypatch.setattr(labels_module, "_read_host", labels_module._read)


def numbers(*calls: Call) -> dict[str, float]:
    """What is told after the last of some calls of one loss."""
    counted = Classes()
    found: dict[str, Any] = {}
    for call in calls:
        found = plain(call.label, LABEL, ignored(call)) | counted.add(call, LABEL)
    return {key: float(value) for key, value in found.items()}


def spread(*counts: float) -> float:
    shares = np.array([count for count in counts if count], dtype=np.float64) / sum(counts)
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.usefixtures("way")
def test_class_indices_are_counted_over_the_run() -> None:
    first = call_of(F.cross_entropy, normal(6, 4), torch.tensor([0, 0, 0, 1, 1, 2]))
    second = call_of(F.cross_entropy, normal(2, 4), torch.tensor([1, 1]))
    found = numbers(first, second)
    assert found["classes"] == 3
    assert found["seen"] == 8
    assert found["top_share"] == 0.5
    assert found["rarest_share"] == 0, "the loss knows a fourth class that no label named"
    assert found["entropy"] == pytest.approx(spread(3, 4, 1))
    assert found["batch_entropy"] == 0
    assert found["out_of_range"] == 0
    assert (found["count"], found["min"], found["max"], found["mean_square"]) == (2, 1, 1, 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_labels_that_the_loss_ignores_are_no_labels(function: Any) -> None:
    labels = torch.tensor([[0, 1, -100, -100], [2, -100, -100, -100]])
    found = numbers(call_of(function, normal(2, 3, 4), labels))
    assert (found["seen"], found["classes"], found["out_of_range"]) == (3, 3, 0)
    assert (found["min"], found["max"], found["mean"], found["count"]) == (0, 2, 1, 2)
    found = numbers(call_of(function, normal(2, 3, 4), labels.clamp_min(0), ignore_index=0))
    assert (found["seen"], found["classes"], found["min"]) == (2, 2, 1)
    found = numbers(call_of(function, normal(2, 3, 4), labels, ignore_index=-1))
    assert found["out_of_range"] == 5, "another index is ignored, so these have no room"


@pytest.mark.usefixtures("way")
def test_a_batch_of_nothing_but_ignored_labels() -> None:
    found = numbers(call_of(F.cross_entropy, normal(2, 3), torch.full((2,), -100)))
    assert (found["seen"], found["entropy"], found["top_share"], found["out_of_range"]) == (0, 0, 0, 0)
    assert "mean" not in found


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("label", "bad"), [([1, 2, 3], 1), ([-1, 0, 2], 1), ([3, 4, 3], 3), ([0, 1, 2], 0)])
def test_labels_that_the_loss_has_no_room_for(label: list[int], bad: int) -> None:
    found = numbers(call_of(F.cross_entropy, normal(3, 3), torch.tensor(label)))
    assert found["out_of_range"] == bad
    assert found["seen"] == 3 - bad


@pytest.mark.usefixtures("way")
def test_labels_of_every_pixel_and_of_no_batch() -> None:
    labels = whole(3, 2, 5, 6)
    found = numbers(call_of(F.cross_entropy, normal(2, 3, 5, 6), labels))
    counts = np.bincount(labels.numpy().ravel(), minlength=3)
    assert found["seen"] == 60
    assert found["entropy"] == pytest.approx(spread(*counts))
    assert found["rarest_share"] == pytest.approx(counts.min() / 60)
    assert numbers(call_of(F.cross_entropy, normal(3), torch.tensor(2)))["seen"] == 1


@pytest.mark.usefixtures("way")
def test_entropy_is_weighted_where_the_loss_weighs_classes() -> None:
    weights = torch.tensor([1.0, 5.0])
    found = numbers(call_of(F.cross_entropy, normal(6, 2), torch.tensor([0, 0, 0, 0, 0, 1]), weight=weights))
    assert found["entropy"] == pytest.approx(math.log(2))
    assert found["top_share"] == pytest.approx(5 / 6)
    binary = call_of(F.binary_cross_entropy_with_logits, normal(6), torch.tensor([0.0, 0, 0, 0, 0, 1]), pos_weight=torch.tensor(5.0))
    assert numbers(binary)["entropy"] == pytest.approx(math.log(2))
    assert binary.weighted


@pytest.mark.usefixtures("way")
def test_one_hot_and_soft_labels() -> None:
    hard = F.one_hot(torch.tensor([0, 1, 1, 1]), 3).float()
    found = numbers(call_of(F.cross_entropy, normal(4, 3), hard))
    assert (found["classes"], found["seen"], found["out_of_range"]) == (2, 4, 0)
    assert found["entropy"] == pytest.approx(spread(1, 3))
    soft = 0.9 * hard + 0.1 / 3
    found = numbers(call_of(F.cross_entropy, normal(4, 3), soft))
    assert (found["classes"], found["seen"], found["out_of_range"]) == (2, 4, 0)
    assert found["entropy"] == pytest.approx(spread(*soft.sum(0).tolist()), rel=1e-6)
    found = numbers(call_of(F.cross_entropy, normal(4, 3), 2 * hard))
    assert found["out_of_range"] == 4


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("function", [F.binary_cross_entropy, F.binary_cross_entropy_with_logits])
def test_binary_labels_are_two_classes(function: Any, shape: tuple[int, ...]) -> None:
    labels = torch.tensor([0.0, 0, 0, 0, 1, 1]).reshape(shape)
    found = numbers(call_of(function, normal(*shape), labels))
    assert (found["classes"], found["seen"], found["out_of_range"]) == (2, 6, 0)
    assert found["top_share"] == pytest.approx(4 / 6)
    assert found["entropy"] == pytest.approx(spread(4, 2))
    assert numbers(call_of(function, normal(*shape), labels + 1))["out_of_range"] == 2
    assert numbers(call_of(function, normal(*shape), 2 * labels - 1))["out_of_range"] == 4
    soft = numbers(call_of(function, normal(*shape), 0.8 * labels + 0.1))
    assert (soft["classes"], soft["out_of_range"]) == (2, 0)


@pytest.mark.usefixtures("way")
def test_several_binary_labels_per_sample_are_no_classes() -> None:
    labels = (normal(6, 20) > 1.5).float()
    found = numbers(call_of(F.binary_cross_entropy_with_logits, normal(6, 20), labels))
    assert found["out_of_range"] == 0
    assert not {"classes", "seen", "entropy", "top_share", "batch_entropy"} & set(found)


@pytest.mark.usefixtures("way")
def test_values_of_a_regression_are_no_classes() -> None:
    labels = 2e5 + 1e4 * normal(6, 1)
    found = numbers(call_of(F.mse_loss, normal(6, 1), labels))
    truth = labels.double().numpy()
    assert not {"classes", "seen", "out_of_range"} & set(found)
    for key, value in {"mean": truth.mean(), "std": truth.std(), "mean_square": np.square(truth).mean(), "abs_mean": truth.mean()}.items():
        assert found[key] == pytest.approx(value, rel=1e-6)


@pytest.mark.usefixtures("way")
def test_targets_made_in_the_step_have_no_classes() -> None:
    call = call_of(F.binary_cross_entropy, normal(6).sigmoid(), torch.ones(6))
    call.target_made = True
    assert set(Classes().add(call, LABEL)) == {"out_of_range"}


@pytest.mark.usefixtures("way")
def test_a_nan_label_does_not_poison_the_counts() -> None:
    clean, bad = (call_of(F.binary_cross_entropy, normal(2).sigmoid(), torch.tensor([0.0, last])) for last in (1.0, math.nan))
    found = numbers(bad, clean)
    assert (found["seen"], found["nan"]) == (3, 0)
    assert found["entropy"] == pytest.approx(spread(2, 1))


# ---- hashes


class Elsewhere(Hasher):
    """Takes the way of a device."""

    def samples(self, tensor: Tensor) -> Any:
        return torch.from_numpy(np.ascontiguousarray(super().samples(tensor)))


@pytest.mark.parametrize(
    "tensor", [normal(5, 7), normal(5, 3, 4, 4), whole(9, 5, 6), normal(5), normal(5, 7).half(), normal(5, 7) > 0, normal(7, 5).T], ids=str
)
def test_equal_samples_have_equal_hashes_and_others_do_not(tensor: Tensor) -> None:
    hasher = Hasher()
    hashes = hasher.samples(tensor)
    assert len(set(hashes.tolist())) == 5
    assert hasher.samples(tensor.clone()).tolist() == hashes.tolist()
    print_of = hasher.fingerprint(hashes)
    assert isinstance(print_of, float)
    assert print_of == int(print_of) < 1 << 24
    assert hasher.fingerprint(hasher.samples(tensor.flip(0))) != print_of, "the order of samples counts"
    assert float(Hasher().fingerprint(torch.from_numpy(hashes))) == print_of, "a device gives the same number"


def test_a_hash_sees_every_element_also_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainvet.integrations.torch.hashes.LONGEST", 8)
    hasher = Hasher()
    tensor = normal(1, 50)
    kept = int(hasher.samples(tensor)[0])
    for place in range(50):
        other = tensor.clone()
        other[0, place] += 1
        assert int(hasher.samples(other)[0]) != kept


def test_fingerprints_of_many_batches_differ() -> None:
    hasher = Hasher()
    prints = {hasher.fingerprint(hasher.samples(torch.full((4, 2), float(index)))) for index in range(500)}
    assert len(prints) >= 499


@pytest.mark.parametrize("kind", [Hasher, Elsewhere])
def test_pairs_of_samples_and_those_that_contradict_each_other(kind: type[Hasher]) -> None:
    hasher, pairs = kind(), Pairs()
    x = normal(4, 3)
    y = torch.tensor([0, 1, 2, 3])
    assert [float(value) for value in pairs.add([hasher.samples(x)], hasher.samples(y))] == [0, 0]
    assert [float(value) for value in pairs.add([hasher.samples(x[:2])], hasher.samples(y[:2]))] == [2, 0]
    assert [float(value) for value in pairs.add([hasher.samples(x[2:])], hasher.samples(torch.tensor([2, 9])))] == [4, 1]
    twice = torch.cat([normal(1, 3, seed=5)] * 2)
    assert [float(value) for value in pairs.add([hasher.samples(twice)], hasher.samples(y[:2]))] == [5, 2], "within one batch too"


@pytest.mark.parametrize("kind", [Hasher, Elsewhere])
def test_two_inputs_make_one_sample(kind: type[Hasher]) -> None:
    hasher, pairs = kind(), Pairs()
    left, right_half, y = normal(4, 3), normal(4, 2, seed=1), hasher.samples(torch.arange(4))
    pairs.add([hasher.samples(left), hasher.samples(right_half)], y)
    assert float(pairs.add([hasher.samples(left), hasher.samples(right_half + 1)], y)[0]) == 0
    assert float(pairs.add([hasher.samples(left), hasher.samples(right_half)], y)[0]) == 4


def test_the_table_of_samples_is_bounded() -> None:
    hasher, pairs = Hasher(), Pairs()
    for index in range(20):
        x = hasher.samples(torch.arange(index * 500, index * 500 + 500))
        assert pairs.add([x], x) == (0, 0)
    assert len(pairs._seen) == SLOTS


# ---- a device


@pytest.mark.parametrize("name", INPUTS)
def test_a_device_is_not_waited_for(name: str) -> None:
    """Meta tensors have no values: whatever reads one on the host raises."""
    far = INPUTS[name].to("meta")
    found = plain(far, INPUT) | structure(far, INPUT)
    assert all(value.dim() == 0 for value in found.values() if isinstance(value, Tensor))
    hasher, pairs = Hasher(), Pairs()
    hashes = hasher.samples(far)
    assert hasher.fingerprint(hashes).shape == ()  # type: ignore[union-attr]
    for _ in range(2):
        assert [cell.shape for cell in pairs.add([hashes], hashes)] == [(), ()]  # type: ignore[union-attr]


FAR: dict[str, tuple[Any, Tensor, Tensor]] = {
    "classes": (F.cross_entropy, normal(6, 4), whole(4, 6)),
    "tokens": (F.nll_loss, normal(6, 4, 5), whole(4, 6, 5)),
    "soft": (F.cross_entropy, normal(6, 4), normal(6, 4).softmax(1)),
    "binary": (F.binary_cross_entropy_with_logits, normal(6), whole(2, 6).float()),
    "several": (F.binary_cross_entropy, normal(6, 3).sigmoid(), whole(2, 6, 3).float()),
    "values": (F.mse_loss, normal(6, 1), normal(6, 1)),
}


@pytest.mark.parametrize("name", FAR)
def test_labels_and_predictions_on_a_device_are_not_waited_for(name: str) -> None:
    function, prediction, label = FAR[name]
    call = call_of(function, prediction.to("meta"), label.to("meta"))
    counted = Classes()
    for _ in range(2):
        found = plain(call.label, LABEL, ignored(call)) | counted.add(call, LABEL) | measure(prediction.to("meta"), call.axis, OUTPUT)
        assert len(found) > 15
        assert all(value.dim() == 0 for value in found.values() if isinstance(value, Tensor))


def test_what_is_ignored_on_a_device_is_left_out_as_on_the_host() -> None:
    label = torch.tensor([[0, 1, -100], [2, 0, -100]])
    names = [name for name in LABEL if name in plain(label, LABEL) and name != "count"] + ["share[0.0,1.0]"]
    masked = _masked(label.float(), label != -100, names)
    host = plain(label, {*names}, label == -100)
    assert {key: float(value) for key, value in masked.items()} == pytest.approx(host)


# ---- embeddings


def test_indices_of_embeddings_are_seen_before_the_call() -> None:
    from trainvet.integrations.torch.activations import Look

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(10, 4), nn.Embedding(5, 4)

        def forward(self, words: Tensor, places: Tensor) -> Tensor:
            return self.words(words) + self.words(words + 1) + self.places(places)

    net = Net()
    look = Look({id(child): path for path, child in net.named_modules()}, frozenset(MEANING))
    look.start()
    with pytest.raises(IndexError):
        net(torch.tensor([3, 7]), torch.tensor([5, 0]))
    look.stop()
    assert look.handed.indices == {"words": (3, 8), "places": (0, 5)}
