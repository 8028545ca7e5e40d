"""A model's GGUF metadata, read by the description of its family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, Experts, ModelConfig, RopeScaling, show
from fastdecode_hpc.families.description import Family, Key
from fastdecode_hpc.families.known import BY_GGUF
from fastdecode_hpc.gguf_header import GGUFHeader, TensorInfo
from fastdecode_hpc.typed_values import TypedValues

_REFUSED = ("attention.scale", "attention.temperature_scale", "logit_scale", "embedding_scale", "residual_scale")


def gguf_family(path: Path, header: GGUFHeader) -> Family:
    """The family that a GGUF file names.

    Raises
    ------
    ConfigError
        If it isn't computed, or not read from such files.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in BY_GGUF:
        raise ConfigError(
            f"{path} has architecture {show(architecture)}; of GGUF files {', '.join(BY_GGUF)} are supported"
        )
    return BY_GGUF[architecture]


def config_of_gguf(path: Path, header: GGUFHeader) -> ModelConfig:
    """The model of a GGUF file, but for a scaling that only its ``rope_freqs`` show.

    Raises
    ------
    ConfigError
        If a feature of the model isn't computed, or a value is missing or wrong.
    """
    metadata, tensors = header
    family = gguf_family(path, header)
    assert family.gguf is not None
    prefix = f"{family.gguf.architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    values, tokens = TypedValues(path, own, prefix), TypedValues(path, metadata)
    _check_features(values, family)
    num_heads = _uniform(values, "attention.head_count")
    hidden_size = _uniform(values, "embedding_length")
    head_dim = values.whole("attention.key_length", 0) or hidden_size // max(1, num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ConfigError(f"{path} has {key} {show(values[key])} and heads of {head_dim}; they must be equal")
    embeddings = tensors.get("token_embd.weight")
    eps = "attention.layer_norm_epsilon" if family.values.get("norm") == "layer" else "attention.layer_norm_rms_epsilon"
    fields = _fixed(family) | {
        "vocab_size": embeddings.shape[0] if embeddings is not None else values.whole("vocab_size", 0),
        "hidden_size": hidden_size,
        "intermediate_size": _uniform(values, _mlp_size_key(family)),
        "num_layers": _uniform(values, "block_count"),
        "num_heads": num_heads,
        "num_kv_heads": _uniform(values, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_context_len": _uniform(values, "context_length"),
        "norm_eps": values.number(eps, 1e-5),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "rope_scaling": _linear_scaling(values),
        "tie_embeddings": "output.weight" not in tensors,
        "sliding_window": values.whole("attention.sliding_window", 0) or None,
        "eos_token_ids": _eos_ids(tokens),
        "bos_token_id": next(iter(tokens.ids("tokenizer.ggml.bos_token_id")), None),
        "architecture": family.name,
        **_biases(tensors),
    }
    if family.experts is not None:
        fields["experts"] = _experts(values, family)
    return ModelConfig(**fields)


def _fixed(family: Family) -> dict[str, Any]:
    """What the description says without asking config.json; of a key with choices the default."""
    fixed = {name: value for name, value in family.values.items() if not isinstance(value, Key)}
    chosen = {
        name: value.choices[value.default]
        for name, value in family.values.items()
        if isinstance(value, Key) and value.choices is not None
    }
    return fixed | chosen


def _biases(tensors: Mapping[str, TensorInfo]) -> dict[str, bool]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _mlp_size_key(family: Family) -> str:
    return "feed_forward_length" if family.experts is None else "expert_feed_forward_length"


def _experts(values: TypedValues, family: Family) -> Experts:
    # llama.cpp always scales the chosen experts' weights to sum to 1 for these families.
    return Experts(_uniform(values, "expert_count"), _uniform(values, "expert_used_count"))


def _uniform(values: TypedValues, key: str, default: int | None = None) -> int:
    """A whole number of GGUF metadata; a list per layer only where all entries are equal."""
    listed = values.get(key)
    if not isinstance(listed, list):
        return values.whole(key, default)
    if not listed or any(value != listed[0] for value in listed):
        raise ConfigError(f"{values.path} has {values.full_name(key)} per layer, {show(listed)}; layers must be equal")
    return TypedValues(values.path, {key: listed[0]}, values.full_name("")).whole(key)


def _check_features(values: TypedValues, family: Family) -> None:
    if values.get("expert_count") and family.experts is None:
        raise ConfigError(
            f"{values.path} is a mixture of {show(values['expert_count'])} experts, which isn't supported"
        )
    for key in _REFUSED:
        if values.get(key):
            raise ConfigError(f"{values.path} sets {values.full_name(key)}, which isn't supported")


def _linear_scaling(values: TypedValues) -> RopeScaling | None:
    kind = values.text("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.number("rope.scaling.factor", 0.0) or values.number("rope.scale_linear", 0.0) or 1.0
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"{values.path} has rope scaling {show(kind)}; supported in GGUF files are linear and rope_freqs.weight"
        )
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def _eos_ids(tokens: TypedValues) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(token for key in keys for token in tokens.ids(f"tokenizer.ggml.{key}")))
