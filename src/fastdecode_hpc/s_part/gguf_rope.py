"""The scaling of positions that a GGUF file keeps as divisors of the rotary frequencies."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_shape import ModelConfig, RopeScaling
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.rope import rope_frequencies, scale_frequencies
from fastdecode_hpc.typed_values import TypedValues


def with_gguf_scaling(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """`config` with the scaling whose divisors are tensors of the file: llama3 or longrope.

    Raises
    ------
    ConfigError
        If they are of no scaling that is known.
    """
    short, long = (file.rope_divisors(f"rope_factors_{name}.weight", config.rotated // 2) for name in ("short", "long"))
    if short is not None and long is not None:
        return dataclasses.replace(config, rope_scaling=_longrope(file, short, long))
    divisors = file.rope_divisors("rope_freqs.weight", config.rotated // 2)
    if divisors is None or bool((divisors == 1).all()):
        return config
    return dataclasses.replace(config, rope_scaling=_llama3(file, config, divisors))


def _longrope(file: GGUFFile, short: Tensor, long: Tensor) -> RopeScaling:
    values, prefix = _scaling_values(file)
    return RopeScaling(
        "longrope",
        original_max_position=values.whole(f"{prefix}original_context_length"),
        attention_factor=values.number(f"{prefix}attn_factor", 1.0),
        divisors=tuple(short.tolist()),
        long_divisors=tuple(long.tolist()),
    )


def _llama3(file: GGUFFile, config: ModelConfig, divisors: Tensor) -> RopeScaling:
    """The file keeps the divisors alone, so the usual parameters are tried and must give the same divisors."""
    frequencies = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    if config.rope_scaling is None:
        values, prefix = _scaling_values(file)
        for original in (values.whole(f"{prefix}original_context_length", 0) or 8192, 8192):
            scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, original)
            if torch.allclose(frequencies / divisors, scale_frequencies(frequencies, scaling), rtol=1e-4, atol=0):
                return scaling
    raise ConfigError(
        f"{file.path} has rope_freqs.weight, which is not the llama3 scaling (low_freq_factor 1, high_freq_factor 4, "
        f"8192 positions) with factor {float(divisors.max()):g}; take the safetensors checkpoint"
    )


def _scaling_values(file: GGUFFile) -> tuple[TypedValues, str]:
    """The file's metadata, and how its names of a scaling begin."""
    values = TypedValues(file.path, file.header.metadata)
    return values, f"{values.text('general.architecture', '')}.rope.scaling."
