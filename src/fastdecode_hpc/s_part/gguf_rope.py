"""The scaling of positions that a GGUF file keeps as divisors of the rotary frequencies."""

from __future__ import annotations

import dataclasses

import torch

from fastdecode_hpc.config import ConfigError, ModelConfig, RopeScaling
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.rope import rope_frequencies, scale_frequencies
from fastdecode_hpc.typed_values import TypedValues


def with_gguf_scaling(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """`config` with the llama3 scaling that ``rope_freqs.weight`` was made from.

    The file keeps the divisors alone, so the usual parameters are tried and must give the same divisors.

    Raises
    ------
    ConfigError
        If none does.
    """
    divisors = file.rope_divisors(config.rotated // 2)
    if divisors is None or bool((divisors == 1).all()):
        return config
    frequencies = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    if config.rope_scaling is None:
        values = TypedValues(file.path, file.header.metadata)
        key = f"{values.text('general.architecture', '')}.rope.scaling.original_context_length"
        for original in (values.whole(key, 0) or 8192, 8192):
            scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, original)
            if torch.allclose(frequencies / divisors, scale_frequencies(frequencies, scaling), rtol=1e-4, atol=0):
                return dataclasses.replace(config, rope_scaling=scaling)
    raise ConfigError(
        f"{file.path} has rope_freqs.weight, which is not the llama3 scaling (low_freq_factor 1, high_freq_factor 4, "
        f"8192 positions) with factor {float(divisors.max()):g}; take the safetensors checkpoint"
    )
