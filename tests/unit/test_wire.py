"""Rounding to the wire type."""

import pytest
import torch

from fastdecode_hpc.s_part import row_kernels
from fastdecode_hpc.s_part.wire import TORCH_DTYPES, WireCast

CPU = torch.device("cpu")


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(row_kernels, "take", lambda x, *num_dims: False)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_values_round_to_nearest(dtype: str) -> None:
    cast = WireCast(dtype, CPU)
    values = torch.randn(3, 8)
    rounded = cast.round(values)
    assert rounded.dtype == cast.dtype
    assert torch.equal(rounded, values.to(cast.dtype))
    assert cast.num_saturated == 0


def test_large_values_saturate_and_are_counted_but_infinity_and_nan_stay() -> None:
    cast = WireCast("fp16", CPU)
    (row,) = cast.round(torch.tensor([[1e6, -1e6, float("inf"), float("nan"), 65504.0, 1.0, -float("inf"), 65505.0]]))
    assert row[:3].tolist() == [65504.0, -65504.0, float("inf")]
    assert row[3].isnan()
    assert row[4:].tolist() == [65504.0, 1.0, -float("inf"), 65504.0]
    assert cast.num_saturated == 3


def test_a_bf16_s_part_saturates_at_the_wire_types_limit() -> None:
    cast = WireCast("fp16", CPU)
    values = torch.tensor([[65280.0, 65536.0, -1e6]], dtype=torch.bfloat16)
    assert cast.round(values).tolist() == [[65280.0, 65504.0, -65504.0]]
    assert cast.num_saturated == 2


@pytest.mark.parametrize("wire_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_go_into_a_part_of_others(dtype: torch.dtype, wire_dtype: str) -> None:
    values = (torch.randn(5, 20).double() * 1e5).clamp(-6e4, 6e4).to(dtype)[:, 3:]
    target = torch.full((5, 30), 7.0, dtype=TORCH_DTYPES[wire_dtype])
    cast = WireCast(wire_dtype, CPU)
    cast.round_into(values, target[:, 9:26])
    assert torch.equal(target[:, 9:26], cast.round(values))
    assert torch.equal(target[:, 9:26], values.to(cast.dtype))
    assert bool((target[:, :9] == 7).all() and (target[:, 26:] == 7).all())
    assert cast.num_saturated == 0


def test_no_rows() -> None:
    cast = WireCast("fp16", CPU)
    assert cast.round(torch.zeros(0, 8)).shape == (0, 8)
