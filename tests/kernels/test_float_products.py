"""Products with weights of floats in panels: against float64, and a row's bits depend on nothing else."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastdecode_hpc import _kernels
from fastdecode_hpc.isa import available_isas, select_isa
from fastdecode_hpc.s_part import panel_weights
from fastdecode_hpc.s_part.panel_weights import PanelWeight, pays
from fastdecode_hpc.s_part.row_kernels import PANEL

SHAPES = [(1, 1), (32, 128), (33, 129), (100, 64), (65, 33), (96, 341), (960, 576), (16, 2053), (40, 1537)]
NUM_ROWS = (0, 1, 2, 5, 6, 7, 11, 12, 13, 25, 95, 96, 97, 200, 400)
DTYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("restored")
shapes = pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@shapes
@dtypes
def test_a_matrix_stays_as_it_is(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight = random(num_out, num_in, dtype=dtype)
    packed = PanelWeight(weight)
    assert torch.equal(packed.unpacked(), weight)
    assert (packed.shape, packed.dtype) == (weight.shape, dtype)
    pairs = 1 if dtype == torch.float32 else 2
    assert packed.nbytes == math.ceil(num_out / PANEL) * PANEL * math.ceil(num_in / pairs) * pairs * weight.itemsize


@dtypes
def test_of_a_matrix_that_does_not_fill_its_panels_only_the_last_one_is_copied_once_more(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded, pad = [], panel_weights.F.pad
    monkeypatch.setattr(panel_weights.F, "pad", lambda x, more: padded.append(len(x)) or pad(x, more))
    weight = random(33 * PANEL + 5, 64, dtype=dtype)
    assert torch.equal(PanelWeight(weight).unpacked(), weight)
    assert padded == [5]
    views = random(64, 70, dtype=dtype).T, random(70, 128, dtype=dtype)[:, 32:96]
    assert all(torch.equal(PanelWeight(view).unpacked(), view) for view in views)


@shapes
@dtypes
def test_products_are_near_those_of_float64(isa, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight = random(num_out, num_in, dtype=dtype)
    packed, bias = PanelWeight(weight), random(num_out, dtype=dtype, seed=1)
    for num_rows in NUM_ROWS:
        x = random(num_rows, num_in, dtype=dtype, seed=2)
        exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        for out, wanted in ((packed.multiply(x), exact), (packed.multiply(x, bias), exact + bias.double())):
            assert (out.dtype, out.shape) == (dtype, (num_rows, num_out))
            assert out.is_contiguous()
            allowed = 2e-6 * size + 0.51 * torch.finfo(dtype).eps * wanted.abs() + 1e-7
            assert bool(((out.double() - wanted).abs() <= allowed).all()), num_rows


@dtypes
def test_bits_do_not_depend_on_threads_neighbours_or_place_nor_on_the_instruction_set(dtype: torch.dtype) -> None:
    packed, x, by_rounding = PanelWeight(random(200, 1300, dtype=dtype)), random(500, 1300, dtype=dtype, seed=1), {}
    for isa in available_isas():
        select_isa(isa)
        # A processor's own products of pairs of bf16 round as they do.
        whole = by_rounding.setdefault(dtype == torch.bfloat16 and _kernels.has_pair_products(), packed.multiply(x))
        for threads in (1, 2, 3, 7, 24):  # the last ones share out a panel's rows
            torch.set_num_threads(threads)
            assert torch.equal(packed.multiply(x), whole)
            for rows in ([499], [3, 4], list(range(499, -1, -1)), list(range(100, 117)), list(range(241))):
                assert torch.equal(packed.multiply(x[rows]), whole[rows]), (isa, threads, rows)


@dtypes
def test_rows_may_be_a_view(isa, dtype: torch.dtype) -> None:
    packed, wide = PanelWeight(random(40, 16, dtype=dtype)), random(10, 64, dtype=dtype, seed=1)
    for x in (wide[:, 16:32], wide[:, :32:2], wide[::2, 3:19]):
        assert torch.equal(packed.multiply(x), packed.multiply(x.contiguous()))


@dtypes
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_stays_in_its_output_or_row(isa, value: float, dtype: torch.dtype) -> None:
    weight, x = random(70, 301, dtype=dtype), random(20, 301, dtype=dtype, seed=1)
    clean = PanelWeight(weight).multiply(x)
    spoilt = weight.clone()
    spoilt[33, 200] = value
    out = PanelWeight(spoilt).multiply(x)
    assert not bool(out[:, 33].isfinite().any())
    others = [column for column in range(70) if column != 33]
    assert torch.equal(out[:, others], clean[:, others])
    x[7, 300] = value
    out = PanelWeight(weight).multiply(x)
    assert not bool(out[7].isfinite().any())
    rows = [row for row in range(20) if row != 7]
    assert torch.equal(out[rows], clean[rows])


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, has_tiles in itertools.product(available_isas(), (False, True)):
        select_isa(isa)
        monkeypatch.setattr(panel_weights, "_has_tiles", lambda has_tiles=has_tiles: has_tiles)
        assert pays(torch.float32) == (isa in panel_weights.FAST_ISAS)
        assert pays(torch.bfloat16) == (isa in panel_weights.FAST_ISAS and not has_tiles)
        assert not pays(torch.float16)
