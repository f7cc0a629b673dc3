"""Inputs, labels and predictions on the host, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from trainvet.integrations.keras import outputs
from trainvet.integrations.keras.batches import BLOCK, Batches, Target, measure

EVERY = frozenset({"mean", "std", "min", "max", "nan", "inf", "count", "zero_share", "abs_mean", "integers", "constant_features", "padding_share"})
EVERY |= {"channel_offset", "channel_std_min", "channel_std_max", "fingerprint", "mean_square"}
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("first", [False, True])
def test_an_input_is_measured_per_channel(first):
    x = (RNG.standard_normal((10, 3, 4, 5)) * [1, 2, 3, 4, 5] + 7).astype("float32")
    x[..., 4] = 2.0
    cells = measure(np.moveaxis(x, -1, 1) if first else x, EVERY, first)
    flat = x.reshape(-1, 5).astype(np.float64)
    assert cells["std"] == pytest.approx(x.std(dtype=np.float64), rel=1e-5)
    assert cells["channel_offset"] == pytest.approx((np.abs(flat.mean(0)) / np.where(flat.std(0) > 0, flat.std(0), np.inf)).max(), rel=1e-4)
    assert cells["channel_std_min"] == pytest.approx(flat.std(0)[:4].min(), rel=1e-4)
    assert cells["channel_std_max"] == pytest.approx(flat.std(0).max(), rel=1e-4)
    assert (cells["constant_features"], cells["integers"], cells["count"]) == (12, 0, 10)


def test_blocks_are_put_together():
    x = RNG.standard_normal((3, BLOCK // 2)).astype("float32") + 3
    x[1, :7] = 0
    cells = measure(x, EVERY)
    assert cells["mean"] == pytest.approx(x.mean(dtype=np.float64), rel=1e-6)
    assert cells["std"] == pytest.approx(x.std(dtype=np.float64), rel=1e-5)
    assert cells["zero_share"] == pytest.approx((x == 0).mean())
    assert cells["abs_mean"] == pytest.approx(np.abs(x).mean(dtype=np.float64), rel=1e-6)


def test_a_fingerprint_tells_batches_apart():
    x = RNG.standard_normal((4, 6)).astype("float32")
    one, same, other = (measure(array, EVERY)["fingerprint"] for array in (x, x.copy(), x[::-1]))
    assert one == same != other
    assert 0 <= one < 2**24


def test_padding_is_counted_where_the_embedding_masks_it():
    ids = np.array([[1, 2, 0, 0]], dtype="int32")
    assert measure(ids, EVERY, padded=True)["padding_share"] == 0.5
    assert "padding_share" not in measure(ids, EVERY)


def labels(label, target, weights=None, x=None, batches=None):
    names = ("entropy", "batch_entropy", "seen", "classes", "top_share", "rarest_share", "out_of_range", "pairs", "contradictions")
    batches = batches or Batches({"label": names})
    x = np.arange(len(label), dtype="float32")[:, None] if x is None else x
    data = (x, label) if weights is None else (x, label, weights)
    table = batches.tables(data, {"label": target})["label"]
    return {key: float(column[0]) for key, column in table.columns.items()}, batches


SPARSE = Target("cross_entropy", 3, True)


def test_class_indices_are_counted_over_the_run():
    first, batches = labels(np.array([0, 0, 1, 5]), SPARSE)
    assert (first["out_of_range"], first["seen"], first["classes"], first["rarest_share"]) == (1, 3, 2, 0)
    second, _ = labels(np.array([2, 2, 2, -1]), SPARSE, batches=batches)
    assert (second["out_of_range"], second["seen"], second["classes"], second["top_share"]) == (1, 6, 3, 0.5)
    assert second["entropy"] == pytest.approx(-sum(p * np.log(p) for p in (2 / 6, 1 / 6, 3 / 6)))
    assert second["batch_entropy"] == 0


def test_sample_weights_change_the_entropy_and_not_the_counts():
    found, _ = labels(np.array([0, 0, 0, 1]), SPARSE, np.array([1.0, 1, 1, 3]))
    assert found["entropy"] == pytest.approx(np.log(2))
    assert found["top_share"] == 0.75
    assert found["batch_entropy"] < 0.6


def test_labels_that_the_loss_ignores_are_not_counted():
    found, _ = labels(np.array([0, 255, 1]), Target("cross_entropy", 3, True, 255), np.array([1.0, 5, 1]))
    assert (found["out_of_range"], found["seen"]) == (0, 2)
    assert found["entropy"] == pytest.approx(np.log(2))


def test_one_hot_and_binary_labels():
    found, _ = labels(np.eye(3, dtype="float32")[[0, 1, 1, 2]], Target("cross_entropy", 3))
    assert (found["seen"], found["top_share"], found["out_of_range"]) == (4, 0.5, 0)
    found, _ = labels(np.array([[0.0], [1], [1], [2]]), Target("binary_cross_entropy", 2))
    assert (found["out_of_range"], found["seen"], found["classes"]) == (1, 3, 2)


def test_equal_inputs_with_other_labels_contradict():
    x = np.array([[1.0], [2], [1], [2]], dtype="float32")
    found, _ = labels(np.array([0, 1, 1, 1]), SPARSE, x=x)
    assert (found["pairs"], found["contradictions"]) == (2, 1)


WANT = frozenset({"samples", "units", "simplex_share", "log_simplex_share", "column_error", "constant", "log_normalizer", "min", "std", "rms"})


def test_predictions_are_measured_as_rows():
    logits = RNG.standard_normal((6, 4)).astype("float32")
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    table = outputs.table({"a": share, "b": np.log(share), "c": logits}, {}, {"c": False}, WANT)
    row = {key: column.tolist() for key, column in table.columns.items()}
    assert row["simplex_share"] == [1, 0, 0]
    assert row["log_simplex_share"] == [0, 1, 0]
    assert row["units"] == [4, 4, 4]
    assert row["log_normalizer"][2] == pytest.approx(np.abs(np.log(np.exp(logits).sum(1))).mean(), rel=1e-5)
    assert row["column_error"][0] == pytest.approx(np.abs(share.sum(0) - 1).max(), rel=1e-5)
    assert row["std"][2] == pytest.approx(logits.std(), rel=1e-5)


def test_of_a_part_of_the_batch_no_column_is_judged_and_one_sample_is_not_constant():
    part = np.ones((2, 3), dtype="float32")
    assert "column_error" not in outputs.measure(part, False, True, WANT)
    assert outputs.measure(part, True, True, WANT)["constant"] == 1
    assert outputs.measure(part[:1], True, True, WANT)["constant"] == 0
