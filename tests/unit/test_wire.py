"""Rounding to the wire type."""

import pytest
import torch

from fastdecode_hpc.s_part.wire import WireCast

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["looks", "branchless"])
def look_first(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_values_round_to_nearest(dtype: str, look_first: bool) -> None:
    cast = WireCast(dtype, CPU, look_first=look_first)
    values = torch.randn(3, 8)
    rounded = cast.round(values)
    assert rounded.dtype == cast.dtype
    assert torch.equal(rounded, values.to(cast.dtype))
    assert cast.num_saturated == 0


def test_large_values_saturate_and_are_counted_but_infinity_and_nan_stay(look_first: bool) -> None:
    cast = WireCast("fp16", CPU, look_first=look_first)
    row = cast.round(torch.tensor([1e6, -1e6, float("inf"), float("nan"), 65504.0, 1.0]))
    assert row[:3].tolist() == [65504.0, -65504.0, float("inf")]
    assert row[3].isnan()
    assert row[4:].tolist() == [65504.0, 1.0]
    assert cast.num_saturated == 2


def test_a_bf16_s_part_saturates_at_the_wire_types_limit(look_first: bool) -> None:
    cast = WireCast("fp16", CPU, look_first=look_first)
    values = torch.tensor([65280.0, 65536.0, -1e6], dtype=torch.bfloat16)
    assert cast.round(values).tolist() == [65280.0, 65504.0, -65504.0]
    assert cast.num_saturated == 2


@pytest.mark.parametrize("value", [65504.0, 65505.0, -70000.0, float("nan"), float("inf"), -float("inf")])
def test_looking_first_changes_nothing(value: float) -> None:
    values = torch.tensor([[1.0, value], [-2.0, 3.0]])
    casts = [WireCast("fp16", CPU, look_first=look) for look in (True, False)]
    first, second = (cast.round(values) for cast in casts)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))
    assert casts[0].num_saturated == casts[1].num_saturated
    assert casts[0].round(values[:0]).shape == (0, 2)
