"""Shapes of well-known models, for who plans without having them."""

from __future__ import annotations

from fastdecode_hpc.config import ModelConfig
from fastdecode_hpc.model_config import read_model_shape
from fastdecode_hpc.model_files import resolve_model

# vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, max_context_len
# OPT's MLP has two matrices of 4 h; three of 8/3 h, as below, have as many weights.
_SHAPES = {
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama-2-13b": (32000, 5120, 13824, 40, 40, 40, 128, 4096),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8, 128, 4096),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8, 128, 8192),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8, 128, 8192),
    "mistral-7b": (32768, 4096, 14336, 32, 32, 8, 128, 32768),
    "opt-175b": (50272, 12288, 32768, 96, 96, 96, 128, 2048),
}
SHAPES = {name: ModelConfig(*values) for name, values in _SHAPES.items()}


def find_shape(name: str) -> ModelConfig:
    """The shape of a model that `resolve_model` finds, or of a well-known one.

    Raises
    ------
    ConfigError
        If there is none of this name, or it can't be read.
    """
    return SHAPES[name] if name in SHAPES else read_model_shape(resolve_model(name))
