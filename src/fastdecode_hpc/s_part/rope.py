"""Rotary frequencies, as a model's scaling has them, and tables of their angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastdecode_hpc.model_shape import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair.

    Returns
    -------
    Tensor
        ``[rotated / 2]`` float32 on the CPU, scaled as `config.rope_scaling` says.
    """
    plain = _plain_frequencies(config.rope_theta, config.rotated)
    if config.rope_scaling is None:
        return plain
    return scale_frequencies(plain, config.rope_scaling, config.rope_theta)


def _plain_frequencies(theta: float, rotated: int) -> Tensor:
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return 1.0 / (theta**exponent)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float = 10000.0) -> Tensor:
    """Rotary `frequencies` of a base `theta`, float32, stretched as `scaling` says."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        return frequencies / torch.tensor(scaling.divisors)
    keep = _yarn_share(frequencies, scaling, theta) if scaling.kind == "yarn" else _llama3_share(frequencies, scaling)
    return frequencies * ((1 - keep) / scaling.factor + keep)


def _llama3_share(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """0 where a wavelength outlasts the trained context (divide by `factor`), 1 where it fits often (keep)."""
    wavelengths = 2 * math.pi / frequencies
    fits = scaling.original_max_position / wavelengths
    keep = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return keep.clamp(0, 1)


def _yarn_share(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """1 up to the frequency that turns `beta_fast` times in the trained context, 0 from `beta_slow` on, else a ramp."""
    rotated = 2 * len(frequencies)

    def place(rotations: float) -> float:
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return rotated * math.log(turns) / (2 * math.log(theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(len(frequencies)).float() - low) / width).clamp(0, 1)


def rope_tables(config: ModelConfig, num_positions: int, device: torch.device) -> list[Tensor | None]:
    """For each layer its `rope_table`; layers share one. None: nothing is rotated."""
    if not config.rotated:
        return [None] * config.num_layers
    table = rope_table(config, num_positions, device)
    windowed = table
    if config.windowed_rope_theta is not None and config.sliding_window is not None:
        plain = _plain_frequencies(config.windowed_rope_theta, config.rotated)
        windowed = _angles(plain, num_positions, 1.0).to(device)
    return [table if config.window_of(layer) is None else windowed for layer in range(config.num_layers)]


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """Cosines and sines of all positions.

    A table makes an angle's bits depend on its position alone: vectorised sines may round differently
    with the place in the batch.

    Returns
    -------
    Tensor
        ``[num_positions, 2, rotated / 2]`` float32: cosines, then sines.
    """
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return _angles(rope_frequencies(config), num_positions, factor).to(device)


def _angles(frequencies: Tensor, num_positions: int, factor: float) -> Tensor:
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    return table if factor == 1.0 else table * factor
