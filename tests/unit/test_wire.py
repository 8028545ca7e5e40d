"""Rounding to the wire type."""

import pytest
import torch

from fastdecode_hpc.s_part.wire import WireCast

CPU = torch.device("cpu")


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
    row = cast.round(torch.tensor([1e6, -1e6, float("inf"), float("nan"), 65504.0, 1.0]))
    assert row[:3].tolist() == [65504.0, -65504.0, float("inf")]
    assert row[3].isnan()
    assert row[4:].tolist() == [65504.0, 1.0]
    assert cast.num_saturated == 2


def test_a_bf16_s_part_saturates_at_the_wire_types_limit() -> None:
    cast = WireCast("fp16", CPU)
    values = torch.tensor([65280.0, 65536.0, -1e6], dtype=torch.bfloat16)
    assert cast.round(values).tolist() == [65280.0, 65504.0, -65504.0]
    assert cast.num_saturated == 2
