"""Every number of the kernels against numpy in float64."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainvet.integrations.torch import host, kernels

Values = npt.NDArray[np.float64]
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SCALED = ("mean", "abs_mean", "std", "abs_max", "min", "max", "rms")
TINY = 1e-18  # squares of smaller numbers vanish in float32
ALL = (*kernels.FULL, "rms")


def truth(name: str, tensor: Tensor) -> float:
    """The statistic as numpy sees it; complex numbers count as pairs of real ones."""
    pairs = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = pairs.to(torch.float64).numpy()
    rows = tensor.to(torch.complex128).numpy()
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(
            {
                "norm": lambda: np.sqrt(np.square(values).sum()),
                "rms": lambda: np.sqrt(np.square(values).mean()),
                "mean": lambda: values.mean(),
                "abs_mean": lambda: np.abs(values).mean(),
                "std": lambda: values.std(),
                "abs_max": lambda: np.abs(values).max(),
                "min": lambda: values.min(),
                "max": lambda: values.max(),
                "zero_share": lambda: (values == 0).mean(),
                "nan": lambda: np.isnan(values).sum(),
                "inf": lambda: np.isinf(values).sum(),
                "identical_rows": lambda: rows.ndim >= 2 and len(rows) >= 2 and bool((rows == rows[:1]).all()),
            }[name]()
        )


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
def test_every_statistic_is_numpys(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, shape)
    columns = kernels.table([tensor], ALL)
    for name in ALL:
        assert float(columns[name]) == pytest.approx(truth(name, tensor), rel=1e-5, abs=1e-6), name
    assert float(kernels.norms([tensor])) == pytest.approx(truth("norm", tensor), rel=1e-5)


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_show_in_norm_and_counts(dtype: torch.dtype, bad: float) -> None:
    tensor = some(dtype, (4, 5))
    tensor[1, 2] = bad
    tensor[3, 0] = float("nan")
    columns = kernels.table([tensor, some(dtype, (3,))], ALL)
    for name in ALL:
        np.testing.assert_allclose(float(columns[name][0]), truth(name, tensor), rtol=1e-5, err_msg=name)
    assert columns["nan"][1] == columns["inf"][1] == 0
    assert not torch.isfinite(kernels.norms([tensor]))
    assert torch.isfinite(kernels.norms([some(dtype, (3,)), tensor])[0])


def test_none_and_empty_tensors_are_zero_and_keep_their_place() -> None:
    tensors = [None, torch.zeros(0, 8), torch.full((2, 2), 3.0), torch.tensor(-2.0), None]
    assert kernels.norms(tensors).tolist() == [0, 0, 6, 2, 0]
    columns = kernels.table(tensors, ALL)
    assert columns["mean"].tolist() == [0, 0, 3, -2, 0]
    assert columns["identical_rows"].tolist() == [0, 0, 1, 0, 0]
    assert kernels.norms([]).tolist() == kernels.norms([None])[1:].tolist() == []
    assert kernels.norms([None, None]).tolist() == [0, 0]


def test_mixed_dtypes_in_one_call() -> None:
    tensors = [some(dtype, (6,), seed) for seed, dtype in enumerate((*REAL, torch.complex64, torch.float32))]
    measured = kernels.norms(tensors)
    assert measured.dtype is torch.float64
    np.testing.assert_allclose(measured.numpy(), [truth("norm", tensor) for tensor in tensors], rtol=1e-5)
    assert kernels.norms([some(torch.bfloat16, (6,)), some(torch.float32, (6,))]).dtype is torch.float32


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), 1e38])
def test_every_statistic_in_host_memory_is_numpys(dtype: torch.dtype, bad: float) -> None:
    tensors = [some(dtype, shape, seed) for seed, shape in enumerate([(), (7,), (3, 5), (2, 3, 4)])]
    tensors += [tensors[2].t(), torch.ones(3, 4, dtype=dtype), torch.full((50,), 1e5, dtype=dtype) + some(dtype, (50,), 9)]
    tensors[2][1, 2] = bad
    values = host.arrays([*tensors, None, torch.zeros(0, 2, dtype=dtype)])
    assert values is not None
    lengths = host.norms(values)
    columns = host.table(values, kernels.FULL, lengths)
    for index, tensor in enumerate(tensors):
        np.testing.assert_allclose(
            lengths[index], np.inf if bad == 1e38 and dtype is torch.float32 and index in (2, 4) else truth("norm", tensor), rtol=1e-5
        )
        for name in kernels.FULL:
            np.testing.assert_allclose(columns[name][index], truth(name, tensor), rtol=2e-3, atol=1e-6, err_msg=f"{name} of {tensor}")
    assert all(column[-2:].tolist() == [0, 0] for column in columns.values())


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_norms_read_at_once_on_cpu_are_the_same(dtype: torch.dtype) -> None:
    tensors = [some(dtype, (4, 5), 1).t(), some(dtype, (30,), 2)[::3], some(dtype, (), 3), torch.zeros(0, dtype=dtype)]
    at_once = host.norms_at_once(tensors)
    if dtype in (torch.float32, torch.float64):
        assert at_once is not None
        np.testing.assert_allclose(at_once, kernels.norms(tensors).numpy(), rtol=1e-6)
    else:
        assert at_once is None


@pytest.mark.parametrize(
    "tensor",
    [None, torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex64), torch.ones(3, requires_grad=True), torch.ones(3).half()],
    ids=str,
)
def test_what_cannot_be_read_at_once_is_left_to_the_other_kernel(tensor: Tensor | None) -> None:
    assert host.norms_at_once([torch.ones(3), tensor]) is None
    assert kernels.norms([torch.ones(3), tensor]).tolist() == pytest.approx([3**0.5, 0.0 if tensor is None else 3**0.5])


def test_a_float16_norm_beyond_its_range_does_not_overflow() -> None:
    tensor = torch.full((100,), 3e4, dtype=torch.float16)
    assert float(kernels.norms([tensor])) == pytest.approx(3e5)
    assert float(kernels.table([tensor], ["rms"])["rms"]) == pytest.approx(3e4)


def test_a_float32_norm_may_overflow_and_the_counts_say_that_no_element_is_infinite() -> None:
    tensor = torch.full((10,), 1e20)
    assert torch.isinf(kernels.norms([tensor]))
    assert np.isinf(host.norms_at_once([tensor]) or 0.0)
    assert kernels.table([tensor], kernels.COUNTS)["inf"] == 0


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_scale_law(dtype: torch.dtype) -> None:
    tensor = some(dtype, (64,))
    once, eight_times = kernels.table([tensor], ALL), kernels.table([tensor * 8], ALL)
    assert float(kernels.norms([tensor * 8])) == pytest.approx(8 * float(kernels.norms([tensor])), rel=1e-6)
    for name in ALL:
        factor = 8 if name in SCALED else 1
        assert float(eight_times[name]) == pytest.approx(factor * float(once[name]), rel=1e-5, abs=1e-6), name


def test_sparse_gradients_are_measured_over_the_rows_they_hold() -> None:
    table = torch.nn.Embedding(50, 3, sparse=True)
    table(torch.tensor([4, 9, 4])).pow(2).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    held = gradient.coalesce().values()
    assert float(kernels.norms([gradient])) == pytest.approx(float(gradient.to_dense().norm()))
    columns = kernels.table([gradient], ALL)
    for name in ("mean", "abs_max", "zero_share", "nan"):
        assert float(columns[name]) == pytest.approx(truth(name, held)), name


def test_a_sparse_gradient_with_equal_rows_is_no_gradient_with_equal_rows() -> None:
    """The rows it does not hold are zero."""
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 4), (9, 4), check_invariants=True)
    assert kernels.table([gradient], ["identical_rows"])["identical_rows"] == 0


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.one_of(st.floats(width=32, min_value=-(2.0**59), max_value=2.0**59), st.sampled_from([0.0, np.nan, np.inf, -np.inf])), max_size=12
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_float32_tensors(lists: list[list[float]]) -> None:
    tensors = [torch.tensor(values, dtype=torch.float32) for values in lists]
    measured, at_once = kernels.norms(tensors).double().numpy(), host.norms_at_once(tensors)
    expected = np.array([truth("norm", tensor) if tensor.numel() else 0.0 for tensor in tensors])
    np.testing.assert_allclose(measured, expected, rtol=1e-5, atol=TINY)
    np.testing.assert_allclose(at_once, expected, rtol=1e-5, atol=TINY)
    columns = kernels.table(tensors, ALL)
    for index, tensor in enumerate(tensors):
        for name in ALL:
            right = truth(name, tensor) if tensor.numel() else 0.0
            size = float(np.abs(tensor.double().numpy()).max()) if tensor.numel() else 0.0
            slack = max(TINY, 1e-5 * size) if np.isfinite(size) else TINY
            np.testing.assert_allclose(float(columns[name][index]), right, rtol=1e-5, atol=slack, err_msg=name)


# ---- updates


def columns(before: Tensor, after: Tensor) -> list[float]:
    """ratio, rms, unchanged."""
    found = kernels.update_columns([before], [after])
    return [float(found[name]) for name in ("ratio", "rms", "unchanged")]


def test_update_columns() -> None:
    before, after = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert columns(before, after) == pytest.approx([0.1, 0.5 / 2**0.5, 0])
    assert columns(before, before.clone()) == [0, 0, 1]
    assert columns(torch.zeros(2), torch.ones(2)) == [float("inf"), 1, 0]
    assert columns(torch.zeros(2), torch.zeros(2)) == [0, 0, 1]
    assert columns(torch.zeros(0), torch.zeros(0)) == [0, 0, 0]


def test_an_update_of_weights_that_are_not_finite_has_no_finite_ratio() -> None:
    ratio, rms, unchanged = columns(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert np.isnan(ratio)
    assert np.isnan(rms)
    assert unchanged == 0


def test_a_float64_update_below_float32_is_seen() -> None:
    before = torch.ones(4, dtype=torch.float64)
    ratio, rms, unchanged = columns(before, before + 1e-12)
    assert ratio == pytest.approx(1e-12, rel=1e-3)
    assert rms == pytest.approx(1e-12, rel=1e-3)
    assert unchanged == 0


def test_updates_of_several_dtypes() -> None:
    before = [some(dtype, (5,)) for dtype in REAL]
    after = [tensor + 1 for tensor in before]
    measured = kernels.update_columns(before, after)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        change = (new.double() - old.double()).norm()
        assert float(measured["ratio"][index]) == pytest.approx(float(change / old.double().norm()), rel=1e-5)


def test_updates_in_host_memory_equal_those_on_a_device() -> None:
    before = [torch.tensor([1.0, 2.0, 2.0]), torch.zeros(0), torch.zeros(2), torch.zeros(2), torch.tensor([3.0]), torch.tensor([float("nan"), 1.0])]
    after = [torch.tensor([1.0, 2.0, 5.0]), torch.zeros(0), torch.zeros(2), torch.ones(2), torch.tensor([3.0]), torch.tensor([1.0, 1.0])]
    there = kernels.update_columns(before, after)
    here = host.update_columns(torch.cat(before).numpy(), torch.cat(after).numpy(), [len(item) for item in before])
    assert here["ratio"][0] == pytest.approx(1.0)
    assert here["unchanged"].tolist() == [0, 0, 1, 0, 1, 0]
    for name, column in there.items():
        np.testing.assert_allclose(here[name], column.double().numpy(), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("size", [7, 5000])
def test_the_share_inside_a_range_with_both_limits(size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0))
    tensor[:3] = torch.tensor([-1.0, 0.0, 2.0])
    tensor[3] = float("nan")
    wanted = ["share[-1.0,0.0]", "share[2.0,2.0]"]
    expected = [float(((tensor >= -1) & (tensor <= 0)).double().mean()), float((tensor == 2).double().mean())]
    on_device = kernels.table([tensor, None], wanted)
    values = host.arrays([tensor, None])
    on_host = host.table(values, wanted, host.norms(values))
    for name, value in zip(wanted, expected, strict=True):
        assert on_device[name].tolist() == pytest.approx([value, 0])
        assert on_host[name].tolist() == pytest.approx([value, 0])
