"""Norm, activation, rotation and rounding of rows: against float64, and a row's bits depend on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdecode_hpc.isa import available_isas, select_isa
from fastdecode_hpc.s_part import layers, row_kernels

SIZES = (1, 7, 16, 31, 64, 100, 768, 4096 + 3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("restored")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = pytest.mark.parametrize("size", SIZES)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Rows of a wider tensor: apart, and on no alignment but a value's own."""
    wide = torch.randn(*shape[:-1], shape[-1] + 5, generator=torch.Generator().manual_seed(seed)) * scale
    return wide.to(dtype)[..., 3 : 3 + shape[-1]]


def bits(x: Tensor) -> np.ndarray:
    """NaNs are all alike: which of two operands' an operation keeps is the processor's choice."""
    plain = torch.where(x.isnan(), torch.full_like(x, torch.nan), x).contiguous()
    return plain.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """From values to the next ones of a type, as float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp_min(info.tiny)).exponent - 1
    return info.eps * torch.exp2(exponent.double())


def weights_of(size: int, dtype: torch.dtype) -> Tensor:
    return random(1, size, dtype=dtype, seed=1)[0].contiguous()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    out = x.clone()
    row_kernels.rotate_(out, angles)
    return out


def angles_of(num_rows: int, pairs: int) -> Tensor:
    angles = torch.randn(num_rows, pairs, generator=torch.Generator().manual_seed(2)) * 100
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def sent(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    target, num_saturated = torch.empty(values.shape, dtype=dtype), torch.zeros((), dtype=torch.int64)
    row_kernels.to_wire(values, target, num_saturated)
    return target, int(num_saturated)


def all_kernels(x: Tensor) -> list[Tensor]:
    """Of rows ``[num_rows, size]`` with an even size, in one call each."""
    size, dtype = x.shape[1], x.dtype
    angles = angles_of(1, size // 2).expand(len(x), -1, -1).contiguous()
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    return [
        row_kernels.rms_norm(x, weights_of(size, dtype), EPS),
        row_kernels.swiglu(x),
        rotated(x[:, None], angles)[:, 0],
        sent(x, other)[0],
    ]


@dtypes
@sizes
def test_rms_norm(isa, size: int, dtype: torch.dtype) -> None:
    x, weight = random(5, size, dtype=dtype, scale=3), weights_of(size, dtype)
    got, wide = row_kernels.rms_norm(x, weight, EPS), x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    # The sum is off by less than 4 steps of fp32, and is under a root; then two roundings, the first times the weight.
    allowed = step(exact, dtype) * (0.5 if dtype != torch.float32 else 3.0) * weight.double().abs()
    error = (got.double() - exact * weight.double()).abs()
    assert bool((error <= 1.1 * (allowed + 0.5 * step(got.double(), dtype))).all())


@dtypes
def test_rms_norm_of_heads_that_lie_in_rows(isa, dtype: torch.dtype) -> None:
    rows, weight = random(6, 200, dtype=dtype), weights_of(24, dtype)
    heads = rows[:, 8 : 8 + 5 * 24].unflatten(1, (5, 24))
    expected = row_kernels.rms_norm(heads.reshape(-1, 24), weight, EPS)
    assert same(row_kernels.rms_norm(heads, weight, EPS).reshape(-1, 24), expected)


@dtypes
@sizes
def test_swiglu(isa, size: int, dtype: torch.dtype) -> None:
    x = random(5, 2 * size, dtype=dtype, scale=4)
    got, gate, up = row_kernels.swiglu(x), x.double()[:, :size], x.double()[:, size:]
    exact = gate / (1 + (-gate).exp())
    allowed = step(exact, dtype) * (0.51 if dtype != torch.float32 else 2.4) * up.abs()
    error = (got.double() - exact * up).abs()
    assert bool((error <= 1.01 * (allowed + 0.5 * step(got.double(), dtype))).all())


def test_silu_over_its_range(isa) -> None:
    """Every 997th float: at most 2.4 units in the last place, from where exp(-x) is finite on."""
    patterns = np.arange(0x30000000, 0x7F000000, 997, dtype=np.uint32).view(np.float32)
    gate = torch.from_numpy(np.concatenate([patterns, -patterns[patterns < 88.6]]))[None]
    got = row_kernels.swiglu(torch.cat((gate, torch.ones_like(gate)), dim=1)).double()
    exact = gate.double() / (1 + (-gate.double()).exp())
    worst = ((got - exact).abs() / step(exact, torch.float32)).max()
    assert worst <= 2.4, float(worst)


def test_silu_of_extreme_values(isa) -> None:
    inf, nan = float("inf"), float("nan")
    gates = [0.0, -0.0, -88.0, -89.0, -100.0, -1e4, -3e38, 1e-45, -1e-45, 100.0, 3e38, inf, -inf, nan]
    gate_up = torch.tensor([[*gates, *[1.0] * len(gates)]])
    got = row_kernels.swiglu(gate_up)[0].tolist()
    assert got[:2] == [0.0, 0.0]
    assert got[2] == pytest.approx(-88 * np.exp(-88.0), rel=1e-6)
    assert got[3:7] == [0.0] * 4
    assert got[7] in (0.0, 1e-45)
    assert got[8] in (0.0, -1e-45)
    assert got[9:12] == [100.0, float(np.float32(3e38)), inf]
    assert np.isnan(got[12:]).all()  # as torch has it: a sum that went to minus infinity is not to be hidden
    for dtype in (torch.float16, torch.bfloat16):
        narrow = gate_up.to(dtype)
        wide = narrow.float()
        expected = row_kernels.swiglu(wide).to(dtype)
        assert same(row_kernels.swiglu(narrow), expected)


@dtypes
@pytest.mark.parametrize("head_dim", [2, 8, 14, 48, 64, 96, 128, 256])
def test_rotation(isa, dtype: torch.dtype, head_dim: int) -> None:
    x, angles = random(4, 3, head_dim, dtype=dtype), angles_of(4, head_dim // 2)
    a, b = x.double().chunk(2, dim=-1)
    cos, sin = angles.double()[:, :1], angles.double()[:, 1:]
    exact = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    error = (rotated(x, angles).double() - exact).abs()
    assert bool((error <= 0.51 * step(exact, dtype) + 2e-7 * torch.cat((a.abs() + b.abs(),) * 2, dim=-1)).all())


def test_rotation_of_a_part_leaves_the_rest(isa) -> None:
    rows, angles = random(4, 70, dtype=torch.float32), angles_of(4, 5)
    before = rows.clone()
    row_kernels.rotate_(rows[:, 1:49].unflatten(1, (3, 16)), angles)
    heads, old = (x[:, 1:49].reshape(4, 3, 16) for x in (rows, before))
    assert same(heads[..., :10], rotated(old[..., :10], angles))
    assert same(heads[..., 10:], old[..., 10:])
    assert same(rows[:, 49:], before[:, 49:])
    assert same(rows[:, :1], before[:, :1])


AWKWARD = [
    0.0, -0.0, 1e-45, -1e-45, 1e-40, 6e-8, 2.9e-8, 6.1e-5, 65504.0, -65504.0, 65505.0, 65519.9, 65520.0, -65536.0, 1e6,
    3.3895e38, 3.3896e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 1.00390625, 1.01171875, 2049.0,
]  # fmt: skip


@dtypes
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@sizes
def test_conversion(isa, size: int, dtype: torch.dtype, wire: torch.dtype) -> None:
    values = random(3, size, dtype=dtype, scale=1e5)
    flat = torch.tensor(list(itertools.islice(itertools.cycle(AWKWARD), size)))
    values[0], values[2] = flat, flat.flip(0)
    got, num_saturated = sent(values, wire)
    most = torch.finfo(wire).max
    too_large = (values.double().abs() > most) & values.isfinite()
    expected = torch.where(too_large, values.double().clamp(-most, most), values.double()).float().to(wire)
    assert same(got, expected)
    assert num_saturated == int(too_large.sum())


@dtypes
def test_values_that_are_not_finite_stay_in_their_row(isa, dtype: torch.dtype) -> None:
    x = random(6, 200, dtype=dtype)
    clean = all_kernels(x)
    for value in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[2, 199], spoilt[4, 0] = value, value
        for got, expected in zip(all_kernels(spoilt), clean, strict=True):
            assert same(got[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])
            assert not got[2].isfinite().all()
            assert not got[4].isfinite().all()


@dtypes
@pytest.mark.parametrize("size", [2, 14, 100, 768, 4102])
def test_bits_do_not_depend_on_instruction_set_threads_neighbours_or_place(dtype: torch.dtype, size: int) -> None:
    x = random(70, size, dtype=dtype, scale=3)
    results = {}
    for isa, threads in itertools.product(available_isas(), (1, 2, 3)):
        select_isa(isa)
        torch.set_num_threads(threads)
        results[isa, threads] = all_kernels(x)
        for rows in ([69], [3, 4], list(range(69, -1, -1))):
            for part, whole in zip(all_kernels(x[rows]), results[isa, threads], strict=True):
                assert same(part, whole[rows]), (isa, threads, rows)
    first, *others = results.values()
    for other in others:
        assert all(same(a, b) for a, b in zip(first, other, strict=True))


@dtypes
def test_a_value_has_its_bits_wherever_it_stands_in_a_row(isa, dtype: torch.dtype) -> None:
    values = random(1, 37, dtype=dtype, scale=3)
    for at in range(37):
        turned = values.roll(at, dims=1)
        pairs = torch.cat((turned, turned), dim=1)
        assert same(row_kernels.swiglu(pairs).roll(-at, dims=1), row_kernels.swiglu(torch.cat((values, values), dim=1)))


@dtypes
def test_the_other_way_rounds_at_the_same_places(isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels, as on a GPU: rotation to the last bit, others but for fp32's last bits."""
    x, weight, angles = random(9, 96, dtype=dtype), weights_of(96, dtype), angles_of(9, 16)
    heads = [x.unflatten(1, (3, 32)).clone() for _ in range(2)]
    norm, product = layers.rms_norm(x, weight, EPS), layers.gated(layers.silu, x)
    layers.rotate_(heads[0], angles)
    monkeypatch.setattr(row_kernels, "take", lambda x, *num_dims: False)
    layers.rotate_(heads[1], angles)
    assert same(*heads)
    for got, expected in ((norm, layers.rms_norm(x, weight, EPS)), (product, layers.gated(layers.silu, x))):
        steps = (got.double() - expected.double()).abs() / step(expected.double(), dtype)
        assert steps.max() <= (4 if dtype == torch.float32 else 2)
        assert dtype == torch.float32 or (steps > 0).float().mean() < 0.01


def test_what_the_kernels_do_not_take_goes_the_other_way() -> None:
    x, weight = torch.randn(4, 32, dtype=torch.float64), torch.rand(32)
    assert layers.rms_norm(x, weight.double(), EPS).dtype == torch.float64
    assert layers.gated(layers.silu, x).dtype == torch.float64
    apart = torch.randn(32, 4).T  # values of a row are not next to each other
    assert not row_kernels.take(apart, 2)
    torch.testing.assert_close(layers.rms_norm(apart, weight, EPS), layers.rms_norm(apart.contiguous(), weight, EPS))
    torch.testing.assert_close(layers.gated(layers.silu, apart), layers.gated(layers.silu, apart.contiguous()))
    assert layers.rms_norm(apart.half().contiguous(), weight, EPS).dtype == torch.float32  # as torch mixes types


def test_no_rows(isa) -> None:
    x = torch.zeros(0, 32)
    assert [out.shape for out in all_kernels(x)] == [(0, 32), (0, 16), (0, 32), (0, 32)]


@pytest.mark.parametrize("size", [1, 7, 64, 1024, 1031, 4099])
def test_the_first_of_the_largest_values_is_picked(isa, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-9, 10, (40, size), generator=generator).float()  # the largest comes often
    exact = [int(np.argmax(row)) for row in rows.numpy()]  # NumPy says which of equal ones it takes
    assert row_kernels.pick(rows).tolist() == exact
    assert row_kernels.pick(rows - 100).tolist() == exact, "the largest may be below 0"
    wide = torch.full((40, size + 9), 1000.0)
    wide[:, 3 : 3 + size] = rows
    assert row_kernels.pick(wide[:, 3 : 3 + size]).tolist() == exact
    for value in (torch.inf, -torch.inf, torch.nan):
        for place in {0, size // 2, size - 1}:
            spoilt = rows.clone()
            spoilt[7, place] = value
            assert row_kernels.pick(spoilt).tolist() == [*exact[:7], -1, *exact[8:]]
    assert row_kernels.pick(rows[:0]).shape == (0,)
