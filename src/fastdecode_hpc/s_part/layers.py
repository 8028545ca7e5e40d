"""The arithmetic of a Llama layer as plain functions of tensors; no weights, no state, no batching policy."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.config import ModelConfig, RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, in the type of `x`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows ``[gate|up]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``, computed in float32, in the type of `x`.

    Notes
    -----
    On a CPU torch's own takes a scalar exponential for the last elements of each thread's share and a
    vector one for the others, so a value's last bit depends on its place. `exp` alone rounds alike everywhere.
    """
    if x.device.type != "cpu":
        return F.silu(x)
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair.

    Returns
    -------
    Tensor
        ``[head_dim / 2]`` float32 on the CPU, scaled as `config.rope_scaling` says.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is None:
        return frequencies
    return scale_frequencies(frequencies, config.rope_scaling)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary `frequencies`, float32, stretched as `scaling` says."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    # 0 where a wavelength outlasts the trained context (divide by `factor`), 1 where it fits often (keep).
    fits = scaling.original_max_position / wavelengths
    keep = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequencies * ((1 - keep) / scaling.factor + keep)


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """Cosines and sines of all positions.

    A table makes an angle's bits depend on its position alone: vectorised sines may round differently
    with the place in the batch.

    Returns
    -------
    Tensor
        ``[num_positions, 2, head_dim / 2]`` float32: cosines, then sines.
    """
    angles = torch.outer(torch.arange(num_positions).float(), rope_frequencies(config))
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def rotate_(x: Tensor, rows: Tensor) -> None:
    """Apply rotary embedding to heads in place: element i is paired with i + head_dim / 2.

    Parameters
    ----------
    x : Tensor
        ``[num_rows, num_heads, head_dim]``, any float type; may be a view.
    rows : Tensor
        ``[num_rows, 2, head_dim / 2]`` float32, the rows' lines of `rope_table`.
    """
    cos, sin = rows[:, :1], rows[:, 1:]  # [num_rows, 1, head_dim / 2]
    first, second = x.chunk(2, dim=-1)
    new_first = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(new_first)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """Attention of consecutive queries of one sequence over all its keys so far.

    Parameters
    ----------
    q : Tensor
        ``[num_queries, num_heads, head_dim]``, of positions `start` and following.
    k, v : Tensor
        ``[start + num_queries, num_kv_heads, head_dim]``, same type as `q`.
    window : int or None
        Tokens a query sees, itself included; None: all.

    Returns
    -------
    Tensor
        ``[num_queries, num_heads, head_dim]``
    """
    first = 0 if window is None else max(0, start - window + 1)  # keys before it are out of every window
    num_keys = k.shape[0] - first
    is_square = start == 0 and (window is None or num_keys <= window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # [1, num_heads, num_queries, head_dim]
        k[first:].transpose(0, 1)[None],
        v[first:].transpose(0, 1)[None],
        attn_mask=None if is_square else _visible(q.shape[0], num_keys, start - first, window, q.device),
        is_causal=is_square,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _visible(num_queries: int, num_keys: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees; `start` is the first query's place among the keys."""
    age = torch.arange(start, start + num_queries, device=device)[:, None] - torch.arange(num_keys, device=device)
    seen = age >= 0
    return seen if window is None else seen & (age < window)  # [num_queries, num_keys] bool
