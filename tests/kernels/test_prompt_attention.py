"""Causal attention of prompts: against float64, and a query's bits depend on itself and on what it sees alone."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdecode_hpc.isa import active_isa, available_isas, select_isa
from fastdecode_hpc.s_part import layers, prompt_attention

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QKV = tuple[Tensor, Tensor, Tensor]

pytestmark = pytest.mark.usefixtures("restored")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(
    num_tokens: int, kv_heads: int = 2, group: int = 3, head_dim: int = 64, dtype=torch.float32, seed: int = 0
) -> QKV:
    """q, k and v of all tokens as views of rows ``[q|k|v]``, on no alignment but a value's own."""
    sizes = [kv_heads * group * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    rows = torch.randn(num_tokens, sum(sizes) + 5, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, 3:-2]
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in rows.split(sizes, dim=1))
    return q, k, v


def attend(qkv: QKV, start: int = 0, stop: int | None = None, window=None, cap=None, sinks=None) -> Tensor:
    """Queries [start, stop) of a prompt."""
    q, k, v = (x[:stop] for x in qkv)
    assert prompt_attention.take(q, k, v)
    return prompt_attention.attend(q[start:], k, v, start, window, q.shape[-1] ** -0.5, cap, sinks)


def exact(qkv: QKV, window=None, cap=None, sinks=None) -> Tensor:
    """All queries in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in qkv)
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    age = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (age >= 0) & (age < (window or math.inf))
    sink = torch.full((len(q),), -math.inf) if sinks is None else sinks
    column = sink.double()[:, None, None].expand(*scores.shape[:2], 1)  # a score whose value is 0
    weights = torch.cat((scores.masked_fill(~seen, -math.inf), column), dim=-1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(0, 1)


def bits(x: Tensor) -> np.ndarray:
    """NaNs are all alike."""
    plain = torch.where(x.isnan(), torch.full_like(x, torch.nan), x).contiguous()
    return plain.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def check(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """A few steps of fp32 of the values summed up, and the output's rounding; weights may be bfloat16, too."""
    are_rounded = dtype == torch.bfloat16 and active_isa() == "avx512bf16"
    torch.testing.assert_close(got.double(), expected, atol=2e-2 if are_rounded else 4e-6, rtol=torch.finfo(dtype).eps)


@dtypes
@pytest.mark.parametrize("head_dim", [1, 13, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (2, 3), (1, 8), (1, 19)])
def test_against_float64(isa, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = make(150, kv_heads, group, head_dim, dtype)
    expected = exact(qkv)
    check(attend(qkv), expected, dtype)
    check(attend(qkv, 77), expected[77:], dtype)
    check(attend(qkv, 149), expected[149:], dtype)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize("cap", [None, 0.7, 50.0])
def test_windows_and_caps(isa, window: int, cap: float | None) -> None:
    qkv = make(200)
    expected = exact(qkv, window, cap)
    check(attend(qkv, window=window, cap=cap), expected, torch.float32)
    check(attend(qkv, 131, window=window, cap=cap), expected[131:], torch.float32)


@dtypes
@pytest.mark.parametrize("window", [None, 70])
def test_sinks(isa, window: int | None, dtype: torch.dtype) -> None:
    """A score of each head more, whose value is 0: small ones, ones that take nearly all weight, and none."""
    qkv = make(200, dtype=dtype)
    sinks = torch.tensor([0.5, -3.0, 9.0, 60.0, -math.inf, 0.0])
    expected = exact(qkv, window, sinks=sinks)
    check(attend(qkv, window=window, sinks=sinks), expected, dtype)
    check(attend(qkv, 131, window=window, sinks=sinks), expected[131:], dtype)
    assert same(attend(qkv, 131, window=window, sinks=sinks), attend(qkv, window=window, sinks=sinks)[131:])
    assert same(attend(qkv, window=window, sinks=torch.full((6,), -math.inf)), attend(qkv, window=window))


@given(
    num_tokens=st.integers(1, 300),
    start=st.integers(0, 299),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 70)),
    window=st.none() | st.integers(1, 300),
    cap=st.none() | st.floats(0.5, 50),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(available_isas()),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(num_tokens, start, shape, window, cap, dtype, isa) -> None:
    select_isa(isa)
    start = min(start, num_tokens - 1)
    qkv = make(num_tokens, *shape, dtype)
    check(attend(qkv, start, window=window, cap=cap), exact(qkv, window, cap)[start:], dtype)


@dtypes
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 64), (3, 1, 80), (1, 5, 17)])
def test_bits_do_not_depend_on_chunks_threads_or_tasks(
    isa, kv_heads: int, group: int, head_dim: int, window: int | None, dtype: torch.dtype, monkeypatch
) -> None:
    qkv = make(333, kv_heads, group, head_dim, dtype)
    whole = attend(qkv, window=window)
    for borders in ([0, 64, 128, 333], [0, 1, 2, 3, 50, 100, 299, 333], [*range(0, 333, 37), 333]):
        for threads, rows in ((1, 192), (2, 1), (3, 50)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(prompt_attention, "MOST_ROWS", rows)
            parts = [attend(qkv, start, stop, window) for start, stop in itertools.pairwise(borders)]
            assert same(torch.cat(parts), whole), (borders, threads, rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 40])
def test_values_that_are_not_finite_reach_only_queries_that_see_them(isa, window: int | None, value: float) -> None:
    clean = make(160)
    expected = attend(clean, window=window)
    for which, at in itertools.product(range(3), (0, 70, 79, 159)):
        spoilt = tuple(x.clone() for x in clean)
        spoilt[which][at, 1, 5] = value
        got = attend(spoilt, window=window)
        sees = torch.zeros(160, dtype=torch.bool)
        sees[at : at + 1 if which == 0 else at + (window or 160)] = True
        heads = torch.tensor([False, True, *[False] * 4]) if which == 0 else torch.arange(6) // 3 == 1
        touched = sees[:, None] & heads
        assert same(got[~touched], expected[~touched]), (which, at)
        if math.isnan(value) or which == 2:
            assert not got[touched].isfinite().all(-1).any(), (which, at)


@dtypes
def test_as_near_as_torchs(isa, dtype: torch.dtype) -> None:
    qkv = make(400, dtype=dtype)
    q, k, v = (x.transpose(0, 1)[None] for x in qkv)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
    expected = exact(qkv)
    ours, theirs = ((x.double() - expected).square().mean().sqrt() for x in (attend(qkv), torchs.transpose(0, 1)))
    assert ours <= 1.2 * theirs, (float(ours), float(theirs))


def test_scores_far_apart_and_equal(isa) -> None:
    q, k, v = make(100, 1, 1, 32)
    far, scores = (q * 1e3, k, v), 1e3 * 32**0.5 * 9  # of that size
    torch.testing.assert_close(attend(far).double(), exact(far), atol=scores * 2**-24 * 8, rtol=0)
    check(attend((q * 0, k, v)), v.double().cumsum(0) / torch.arange(1, 101)[:, None, None], torch.float32)
    check(attend((q, k, v * 0 + 2.5)), torch.full_like(q, 2.5).double(), torch.float32)


def test_two_python_threads_at_once(isa) -> None:
    cases = [make(200, seed=seed) for seed in range(8)]
    expected = [attend(qkv) for qkv in cases]
    with ThreadPoolExecutor(2) as pool:
        for got, wanted in zip(pool.map(attend, cases), expected, strict=True):
            assert same(got, wanted)


def test_no_queries(isa) -> None:
    assert attend(make(20), 20).shape == (0, 6, 64)


def test_what_the_kernels_do_not_take_is_torchs(isa) -> None:
    qkv = make(30)
    wide = tuple(x.double() for x in qkv)
    assert not prompt_attention.take(*wide)
    q, k, v = qkv
    apart = torch.randn(6, 30, 64).transpose(0, 1)  # a token's heads are not next to each other
    assert not prompt_attention.take(apart, k, v)
    assert not prompt_attention.take(q, k.half(), v)
    for window, cap in itertools.product((None, 7), (None, 2.0)):
        for got, expected in (
            (layers.causal_attention(*wide, 0, window, None, cap), exact(wide, window, cap)),
            (layers.causal_attention(apart, k, v, 0, window, None, cap), exact((apart, k, v), window, cap)),
            (layers.causal_attention(*qkv, 0, window, None, cap), exact(qkv, window, cap)),
        ):
            check(got, expected, torch.float32)


def test_tasks_are_shared_out_but_large_enough() -> None:
    of = prompt_attention.queries_of_task
    assert of(256, 4, 3, 2) == 64  # 192 rows
    assert of(256, 4, 3, 16) == 16
    assert of(256, 4, 3, 200) == 16  # 48 rows, whatever the number of threads
    assert of(1, 4, 3, 2) == 16
    assert of(10_000, 1, 500, 1) == 1
