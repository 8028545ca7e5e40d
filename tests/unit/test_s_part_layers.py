"""The layer functions against plain float64 formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdecode_hpc.model_shape import ModelConfig, RopeScaling
from fastdecode_hpc.s_part import layers, rope
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.weights import dummy_weights

CPU = torch.device("cpu")


def make_config(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "max_context_len": 128,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 32), torch.rand(32)
    wide = x.double().numpy()
    expected = weight.numpy() * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(layers.rms_norm(x, weight, 1e-3).numpy(), expected, rtol=1e-5)


def test_rms_norm_of_half_type_is_computed_in_float32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # its square is beyond float16
    out = layers.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.ones_like(x))


def test_layer_norm() -> None:
    x, weight = torch.randn(3, 32), torch.rand(2, 32)
    wide = x.double().numpy()
    plain = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    expected = weight[0].numpy() * plain + weight[1].numpy()
    np.testing.assert_allclose(layers.layer_norm(x, weight, 1e-3).numpy(), expected, rtol=1e-4, atol=1e-6)


def test_rms_norm_whose_weights_are_kept_less_one() -> None:
    x, weight = torch.randn(3, 32), torch.rand(32)
    out = layers.rms_norm_plus_one(x, weight - 1, 1e-5)
    torch.testing.assert_close(out, layers.rms_norm(x, weight, 1e-5))
    less_one = torch.full((32,), 1e-3, dtype=torch.bfloat16)
    half = layers.rms_norm_plus_one(x.bfloat16(), less_one, 1e-5).double()
    wide = x.bfloat16().double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + less_one.double())
    step = torch.exp2(torch.frexp(exact).exponent.double() - 8)
    assert bool(((half - exact).abs() <= 0.505 * step).all())  # 1.001 is none in bf16, and is not rounded to one


PLAIN_ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu-tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_activations(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    expected = [PLAIN_ACTIVATIONS[name](value) for value in x.double().tolist()]
    np.testing.assert_allclose(layers.ACTIVATIONS[name](x).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert layers.ACTIVATIONS[name](x.half()).dtype == torch.float16


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_an_activation_of_a_value_does_not_depend_on_its_place(name: str) -> None:
    activation = layers.ACTIVATIONS[name]
    gate = torch.randn(128, 2 * 1544)[:, :1544] * 4
    alone = torch.cat([activation(row[None]) for row in gate])
    before = torch.get_num_threads()
    try:
        for num_threads in (2, 3, 7):  # shares of 3 and 7 threads end amid a vector
            torch.set_num_threads(num_threads)
            for count in (7, 56, 64, 80, 112, 128):
                assert torch.equal(activation(gate[:count]), alone[:count]), (num_threads, count)
    finally:
        torch.set_num_threads(before)


def test_silu_of_extreme_values() -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    torch.testing.assert_close(layers.silu(x), torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    config = make_config(rope_theta=500.0)
    x, positions = torch.randn(2, 3, 8), torch.tensor([5, 77])
    expected = np.empty((2, 3, 8))
    for row, position in enumerate(positions.tolist()):
        for i in range(4):
            turn = np.exp(1j * position * 500.0 ** (-2 * i / 8))
            pair = (x[row, :, i].double().numpy() + 1j * x[row, :, i + 4].double().numpy()) * turn
            expected[row, :, i], expected[row, :, i + 4] = pair.real, pair.imag
    layers.rotate_(x, rope.rope_table(config, 128, CPU)[positions])
    np.testing.assert_allclose(x.numpy(), expected, atol=1e-5)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = rope.rope_frequencies(make_config())
    scaled = rope.rope_frequencies(make_config(rope_scaling=RopeScaling("linear", 4.0)))
    torch.testing.assert_close(scaled, plain / 4)


@pytest.mark.parametrize(("wavelength", "divisor"), [(100.0, 1.0), (2000.0, 1.0), (9000.0, 8.0), (4096.0, 2.4)])
def test_llama3_scaling_keeps_short_and_divides_long_waves(wavelength: float, divisor: float) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    frequency = torch.tensor([2 * math.pi / wavelength])
    # In between the share kept is (8192 / wavelength - 1) / (4 - 1): a third at 4096.
    expected = {2.4: 1 / (1 / 3 + 2 / 3 / 8)}.get(divisor, divisor)
    torch.testing.assert_close(frequency / rope.scale_frequencies(frequency, scaling), torch.tensor([expected]))


def plain_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    window: int | None,
    scale: float | None = None,
    cap: float = math.inf,
    sinks: Tensor | None = None,
) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for row, head in np.ndindex(*q.shape[:2]):
        first = 0 if window is None else max(0, start + row + 1 - window)
        keys, values = (x[first : start + row + 1, head // group].double().numpy() for x in (k, v))
        scores = keys @ q[row, head].double().numpy() * (scale or 1 / math.sqrt(q.shape[2]))
        scores = scores if cap == math.inf else cap * np.tanh(scores / cap)
        weights = np.exp(scores)
        out[row, head] = weights @ values / (weights.sum() + (0 if sinks is None else math.exp(sinks[head])))
    return out


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 16), (0, 40), (5, 8), (20, 1), (33, 40)])
def test_causal_attention(start: int, count: int, window: int | None) -> None:
    q, k, v = torch.randn(count, 4, 8), torch.randn(start + count, 2, 8), torch.randn(start + count, 2, 8)
    expected = plain_causal(q, k, v, start, window)
    np.testing.assert_allclose(layers.causal_attention(q, k, v, start, window).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_causal_attention_with_scale_and_cap(window: int | None, cap: float | None) -> None:
    q, k, v = torch.randn(8, 4, 8), torch.randn(28, 2, 8), torch.randn(28, 2, 8)
    expected = plain_causal(q, k, v, 20, window, 0.7, cap or math.inf)
    np.testing.assert_allclose(layers.causal_attention(q, k, v, 20, window, 0.7, cap).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(("start", "count"), [(0, 20), (20, 8)])
def test_causal_attention_with_sinks(window: int | None, cap: float | None, start: int, count: int) -> None:
    q, k, v = torch.randn(count, 4, 8), torch.randn(start + count, 2, 8), torch.randn(start + count, 2, 8)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0])
    expected = plain_causal(q, k, v, start, window, 0.7, cap or math.inf, sinks)
    got = layers.causal_attention(q, k, v, start, window, 0.7, cap, sinks)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


def test_clamped_swiglu() -> None:
    gate, up = torch.linspace(-20, 20, 83), torch.linspace(-9, 9, 83).flip(0)
    g, u = (x.double().numpy() for x in (gate.clamp(max=7), up.clamp(-7, 7)))
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    rows = torch.cat((gate, up))[None]
    np.testing.assert_allclose(layers.clamped_swiglu(rows)[0].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert layers.clamped_swiglu(rows.half()).dtype == torch.float16


def make_s_part(config: ModelConfig) -> SPart:
    weights = dummy_weights(config, dtype=torch.float32, device=CPU)
    return SPart(config, weights, device=CPU, dtype=torch.float32, batch_invariant=False)


def test_prefill_attention_needs_all_keys() -> None:
    s_part = make_s_part(make_config())
    with pytest.raises(ValueError, match="7 keys and 7 values for 4 queries from 4 on"):
        s_part.prefill_attention(0, torch.zeros(4, 32), torch.zeros(7, 16), torch.zeros(7, 16), 4)


def test_prefill_attention_takes_views_and_keys_of_another_type() -> None:
    s_part = make_s_part(make_config())
    qkv = torch.randn(12, 64)
    q, k, v = qkv.split([32, 16, 16], dim=1)
    expected = s_part.prefill_attention(0, q.contiguous(), k.half().float(), v.half().float(), 0)
    assert torch.equal(s_part.prefill_attention(0, q, k.half(), v.half(), 0), expected)
    assert expected.shape == (12, 32)


def test_halves_do_not_change_their_inputs() -> None:
    s_part = make_s_part(make_config())
    hidden, o, positions = torch.randn(3, 32), torch.randn(3, 32, dtype=torch.float16), torch.arange(3)
    copies = hidden.clone(), o.clone(), positions.clone()
    s_part.pre_attention(0, hidden, positions)
    s_part.post_attention(0, hidden, o)
    assert all(torch.equal(x, copy) for x, copy in zip((hidden, o, positions), copies, strict=True))


def test_post_attention_takes_any_float_type() -> None:
    s_part = make_s_part(make_config())
    hidden, o = torch.randn(3, 32), torch.randn(3, 32).half()
    assert torch.equal(s_part.post_attention(0, hidden, o), s_part.post_attention(0, hidden, o.float()))


def test_a_position_beyond_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        make_s_part(make_config()).pre_attention(0, torch.zeros(1, 32), torch.tensor([128]))
