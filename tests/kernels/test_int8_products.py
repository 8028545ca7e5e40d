"""Products with weights of 8 bits: against float64 of the values that codes and scales stand for, and bit by bit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from fastdecode_hpc.config import INT8_WEIGHT_BYTES
from fastdecode_hpc.isa import active_isa, available_isas, select_isa
from fastdecode_hpc.s_part.int8_weights import PANEL, SCALED, Int8Weight

SHAPES = [(1, 1), (32, 128), (33, 129), (100, 64), (65, 33), (96, 341), (960, 576), (16, 2053)]
NUM_ROWS = (0, 1, 2, 5, 6, 7, 11, 12, 13, 25, 239, 240, 241, 300)

shapes = pytest.mark.parametrize(("num_out", "num_in"), SHAPES)


@pytest.fixture(autouse=True)
def restored():
    isa, threads = active_isa(), torch.get_num_threads()
    yield
    select_isa(isa)
    torch.set_num_threads(threads)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_weight(weight: Tensor) -> np.ndarray:
    """What is left of a matrix, by the definition, in float64: each 32 inputs on 256 levels, of two ways the nearer."""
    plain, result = weight.numpy(), np.zeros(weight.shape)
    for out, first in np.ndindex(plain.shape[0], -(-plain.shape[1] // SCALED)):
        part = plain[out, first * SCALED : (first + 1) * SCALED]
        full = np.zeros(SCALED, np.float32)  # a part that isn't full is filled with zeros
        full[: len(part)] = part
        span, even = (full.max() - full.min()) / np.float32(255), np.abs(full).max() / np.float32(127)
        ways = []
        for scale, offset in ((even, np.float32(0)), (span, full.min() + 128 * span)):
            codes = np.clip(np.rint((full - offset) / scale), -128, 127) if scale > 0 else np.zeros(SCALED)
            ways.append(codes * np.float64(scale) + offset)
        nearer = min(ways, key=lambda way: np.square(way - full).sum())
        result[out, first * SCALED : (first + 1) * SCALED] = nearer[: len(part)]
    return result


@shapes
def test_a_matrix_keeps_its_values_to_half_a_step(num_out: int, num_in: int) -> None:
    weight = random(num_out, num_in)
    weight[0] = 0
    packed = Int8Weight(weight)
    assert packed.shape == (num_out, num_in)
    np.testing.assert_allclose(packed.unpacked().numpy(), rounded_weight(weight), rtol=2e-6, atol=1e-6)
    groups = math.ceil(num_in / SCALED)
    for group in range(groups):
        inputs = slice(group * SCALED, (group + 1) * SCALED)
        step = weight[:, inputs].abs().amax(dim=1, keepdim=True) / 127
        assert bool(((packed.unpacked() - weight)[:, inputs].abs() <= 0.5001 * step).all())
    assert packed.nbytes == math.ceil(num_out / PANEL) * PANEL * (num_in + 8 * groups)
    if not num_out % PANEL and not num_in % SCALED:
        assert packed.nbytes == num_out * num_in * INT8_WEIGHT_BYTES


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_values_of_quantised_files_stay(kind: str) -> None:
    rows = random(70, 288).numpy() * np.float32(0.02)
    weight = torch.from_numpy(dequantize(quantize(rows, GGMLQuantizationType[kind]), GGMLQuantizationType[kind]))
    error = (Int8Weight(weight).unpacked() - weight).abs().max() / weight.abs().max()
    assert error < 1e-6 if kind != "F16" else 1e-4 < error < 4e-3


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_rounded_weights(isa, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight = random(num_out, num_in)
    packed, exact_weight = Int8Weight(weight), torch.from_numpy(rounded_weight(weight))
    bias = random(num_out, seed=1).to(dtype)
    for num_rows in NUM_ROWS:
        x = random(num_rows, num_in, seed=2).to(dtype)
        exact = x.double() @ exact_weight.T
        size = x.double().abs() @ exact_weight.abs().T
        for out, wanted in ((packed.multiply(x), exact), (packed.multiply(x, bias), exact + bias.double())):
            assert (out.dtype, out.shape) == (dtype, (num_rows, num_out))
            assert out.is_contiguous()
            allowed = 2e-6 * size + 0.51 * torch.finfo(dtype).eps * wanted.abs() + 1e-7
            assert bool(((out.double() - wanted).abs() <= allowed).all()), num_rows


def test_bits_do_not_depend_on_instruction_set_threads_neighbours_or_place() -> None:
    packed, x = Int8Weight(random(200, 341)), random(500, 341, seed=1)
    whole = packed.multiply(x)
    for isa, threads in itertools.product(available_isas(), (1, 2, 3, 7)):
        select_isa(isa)
        torch.set_num_threads(threads)
        assert torch.equal(packed.multiply(x), whole)
        for rows in ([499], [3, 4], list(range(499, -1, -1)), list(range(100, 117)), list(range(241))):
            assert torch.equal(packed.multiply(x[rows]), whole[rows]), (isa, threads, rows)


def test_rows_may_be_a_view(isa) -> None:
    packed, wide = Int8Weight(random(40, 16)), random(10, 64, seed=1)
    for x in (wide[:, 16:32], wide[:, :32:2], wide[::2, 3:19]):
        assert torch.equal(packed.multiply(x), packed.multiply(x.contiguous()))


@shapes
def test_rows_of_the_matrix(num_out: int, num_in: int) -> None:
    packed = Int8Weight(random(num_out, num_in))
    numbers = torch.randint(num_out, (17,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed.rows(numbers), packed.unpacked()[numbers])
    assert packed.rows(numbers[:0]).shape == (0, num_in)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_stays_in_its_output_or_row(isa, value: float) -> None:
    weight, x = random(70, 300), random(20, 300, seed=1)
    clean = Int8Weight(weight).multiply(x)
    spoilt = weight.clone()
    spoilt[33, 200] = value
    out = Int8Weight(spoilt).multiply(x)
    assert bool(out[:, 33].isnan().all())
    others = [column for column in range(70) if column != 33]
    assert torch.equal(out[:, others], clean[:, others])
    x[7, 5] = value
    out = Int8Weight(weight).multiply(x)
    assert not bool(out[7].isfinite().any())
    rows = [row for row in range(20) if row != 7]
    assert torch.equal(out[rows], clean[rows])


def test_tiny_and_large_values(isa) -> None:
    weight = torch.tensor([[1e-45, 0.0, -1e-45], [1e-39, -1e-39, 0.0], [3e38, -1e38, 1.0], [0.0, 0.0, 0.0]])
    got = Int8Weight(weight).unpacked()
    assert bool(got.isfinite().all())
    assert torch.equal(got[3], torch.zeros(3))
    assert got[2].tolist() == pytest.approx([3e38, -1e38, 0.0], rel=0.01)
