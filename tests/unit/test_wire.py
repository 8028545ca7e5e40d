"""Rounding to the wire type."""

import numpy as np
import pytest
import torch

from fastdecode_hpc.s_part.wire import WireCast

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("fp32", np.float32), ("fp16", np.float16), ("bf16", np.uint16)])
def test_values_round_to_nearest_and_come_back(dtype: str, numpy_dtype) -> None:
    cast = WireCast(dtype, CPU)
    rows = cast.make_rows(4, 8)
    assert rows.dtype == numpy_dtype
    values = torch.randn(3, 8)
    assert cast.fill(rows, values)()
    back = cast.read(rows[:3])
    assert back.dtype == cast.dtype
    assert torch.equal(back, values.to(cast.dtype))
    assert np.array_equal(cast.to_rows(values), rows[:3])


def test_large_values_saturate_and_are_counted_but_infinity_and_nan_stay() -> None:
    cast = WireCast("fp16", CPU)
    values = torch.tensor([[1e6, -1e6, float("inf"), float("nan"), 65504.0, 1.0]])
    rows = cast.to_rows(values)
    assert rows[0, :3].tolist() == [65504.0, -65504.0, float("inf")]
    assert np.isnan(rows[0, 3])
    assert rows[0, 4:].tolist() == [65504.0, 1.0]
    assert cast.num_saturated == 2


def test_a_bf16_s_part_saturates_at_the_wire_types_limit() -> None:
    cast = WireCast("fp16", CPU)
    values = torch.tensor([[65280.0, 65536.0, -1e6]], dtype=torch.bfloat16)
    assert cast.to_rows(values)[0].tolist() == [65280.0, 65504.0, -65504.0]
    assert cast.num_saturated == 2
