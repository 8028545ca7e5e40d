"""The arithmetic of a decoder layer as plain functions of tensors; no weights, no state, no batching policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.s_part import prompt_attention, row_kernels

_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss

# A norm: of the last dimension of a tensor, by its weights (and biases), with what is added to the variance.
# On a CPU torch's own activations take scalar functions for the last elements of each thread's share and vector ones
# for the others, so a value's last bit depends on its place. `exp` and `erf` alone round alike everywhere.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, in the type of `x`."""
    if row_kernels.take(x, 2, 3) and weight.dtype == x.dtype:
        return row_kernels.rms_norm(x, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rms_norm_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` whose weights are kept less 1, rounded once at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight.float())).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm with the mean taken off; `weight` is ``[2, size]``: weights, then biases."""
    return F.layer_norm(x, x.shape[-1:], weight[0], weight[1], eps)


NORMS = {"rms": rms_norm, "rms-plus-one": rms_norm_plus_one, "layer": layer_norm}
"""By `ModelConfig.norm`."""


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``, computed in float32, in the type of `x`."""
    if x.device.type != "cpu":
        return F.silu(x)
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """``x Phi(x)``, computed in float32, in the type of `x`."""
    if x.device.type != "cpu":
        return F.gelu(x)
    wide = x.float()
    return (wide * (wide * math.sqrt(0.5)).erf_().add_(1).mul_(0.5)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The usual approximation of `gelu`, ``x (1 + tanh(u)) / 2`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    twice_u = (wide.square() * 0.044715).add_(1).mul_(wide).mul_(2 * math.sqrt(2 / math.pi))
    return (wide / twice_u.neg_().exp_().add_(1)).to(x.dtype)  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """``g / (1 + exp(-1.702 g)) * (u + 1)`` of rows ``[gate|up]``, with g at most 7 and u within +-7.

    Computed in float32, in the type of the rows.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return (gate / (gate * -_SWIGLU_ALPHA).exp_().add_(1) * (up + 1)).to(gate_up.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "relu": F.relu,
}
"""By `ModelConfig.activation`."""


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """``activation(gate) * up`` of rows ``[gate|up]``."""
    if activation is silu and row_kernels.take(gate_up, 2):
        return row_kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def activated(activation: str, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """What an MLP does between its products, to rows ``[gate|up]``, or ``[up]`` where nothing gates them."""
    if activation == "clamped-swiglu":
        return clamped_swiglu
    return partial(gated, ACTIVATIONS[activation]) if is_gated else ACTIVATIONS[activation]


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap tanh(x / cap)``."""
    return torch.tanh(x / cap) * cap


def rotate_(x: Tensor, rows: Tensor) -> None:
    """Apply rotary embedding to the first elements of heads in place: element i is paired with i + rotated / 2.

    Parameters
    ----------
    x : Tensor
        ``[num_rows, num_heads, head_dim]``, any float type; may be a view.
    rows : Tensor
        ``[num_rows, 2, rotated / 2]`` float32, the rows' lines of `rope_table`.
    """
    if row_kernels.take(x, 3):
        row_kernels.rotate_(x, rows)
        return
    cos, sin = rows[:, :1], rows[:, 1:]  # [num_rows, 1, rotated / 2]
    first, second = x[..., : 2 * rows.shape[-1]].chunk(2, dim=-1)
    new_first = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(new_first)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of consecutive queries of one sequence over all its keys so far.

    Parameters
    ----------
    q : Tensor
        ``[num_queries, num_heads, head_dim]``, of positions `start` and following.
    k, v : Tensor
        ``[start + num_queries, num_kv_heads, head_dim]``, same type as `q`.
    window : int or None
        Tokens a query sees, itself included; None: all.
    scale : float, optional
        Of scores; default: ``head_dim ** -0.5``.
    cap : float, optional
        Of scores (`softcap`); default: none.
    sinks : Tensor, optional
        ``[num_heads]``, one score more of each head, whose value is 0.

    Returns
    -------
    Tensor
        ``[num_queries, num_heads, head_dim]``
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if prompt_attention.take(q, k, v):
        return prompt_attention.attend(q, k, v, start, window, scale, cap, sinks)
    first = 0 if window is None else max(0, start - window + 1)  # keys before it are out of every window
    num_keys = k.shape[0] - first
    is_plain = cap is None and sinks is None
    is_square = start == 0 and (window is None or num_keys <= window)
    seen = None if is_square and is_plain else _visible(q.shape[0], num_keys, start - first, window, q.device)
    if not is_plain:
        assert seen is not None
        return _own_attention(q, k[first:], v[first:], seen, scale, cap, sinks)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # [1, num_heads, num_queries, head_dim]
        k[first:].transpose(0, 1)[None],
        v[first:].transpose(0, 1)[None],
        attn_mask=seen,
        is_causal=is_square,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _own_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores or sinks, which torch's own has not; scores and weights are float32."""
    heads = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, num_queries, head_dim]
    keys, values = (x.transpose(0, 1)[:, None] for x in (k, v))  # [kv_heads, 1, num_keys, head_dim]
    scores = (heads @ keys.mT).float() * scale
    scores = (scores if cap is None else softcap(scores, cap)).masked_fill_(~seen, -math.inf)
    out = softmax_with_sinks(scores, sinks).to(v.dtype) @ values
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores ``[kv_heads, group, num_queries, num_keys]``; each head's sink, if any, takes its share."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def _visible(num_queries: int, num_keys: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees; `start` is the first query's place among the keys."""
    age = torch.arange(start, start + num_queries, device=device)[:, None] - torch.arange(num_keys, device=device)
    seen = age >= 0
    return seen if window is None else seen & (age < window)  # [num_queries, num_keys] bool
