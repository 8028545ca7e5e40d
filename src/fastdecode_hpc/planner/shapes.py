"""Shapes of well-known models, for who plans without having them."""

from __future__ import annotations

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.model_config import read_model_shape
from fastdecode_hpc.model_files import resolve_model
from fastdecode_hpc.model_shape import Experts, ModelConfig

# vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, max_context_len
_SHAPES = {
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama-2-13b": (32000, 5120, 13824, 40, 40, 40, 128, 4096),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8, 128, 4096),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8, 128, 8192),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8, 128, 8192),
    "mistral-7b": (32768, 4096, 14336, 32, 32, 8, 128, 32768),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, 128, 32768),
    "qwen2.5-72b": (152064, 8192, 29568, 80, 64, 8, 128, 32768),
    "qwen3-32b": (151936, 5120, 25600, 64, 64, 8, 128, 40960),
}
SHAPES = {name: ModelConfig(*values) for name, values in _SHAPES.items()} | {
    "opt-175b": ModelConfig(
        50272, 12288, 49152, 96, 96, 96, 128, 2048, gated=False, rotary_dim=0, position_offset=2, tie_embeddings=True,
        norm="layer", activation="relu",
    ),
    "mixtral-8x7b": ModelConfig(32000, 4096, 14336, 32, 32, 8, 128, 32768, experts=Experts(8, 2)),
}  # fmt: skip


def find_shape(name: str, *, s_part: str = "native", trust_remote_code: bool = False) -> ModelConfig:
    """The shape of a model that `resolve_model` finds, or of a well-known one, as a kind of S-Part has it.

    Raises
    ------
    ConfigError
        If there is none of this name, or it can't be read.
    """
    if s_part != "native":
        if name in SHAPES:
            raise ConfigError(f"{name} is a shape of the native S-Part; with s_part {s_part!r} name a folder")
        from fastdecode_hpc.s_part.kinds import find_kind  # torch: the model's code is run without weights

        run = RunConfig(s_part=s_part, load_format="dummy", device="cpu", trust_remote_code=trust_remote_code)
        return find_kind(run, resolve_model(name)).read_model()
    return SHAPES[name] if name in SHAPES else read_model_shape(resolve_model(name))
