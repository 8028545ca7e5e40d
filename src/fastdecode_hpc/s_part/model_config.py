"""The shape of a model, from config.json or GGUF metadata; what can't be computed is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastdecode_hpc.config import ConfigError, ModelConfig, RopeScaling
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.layers import rope_frequencies, scale_frequencies

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}

# What transformers assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_hf_config(folder: Path) -> ModelConfig:
    """The model of a folder with config.json.

    Raises
    ------
    ConfigError
        If the architecture or a feature of it isn't supported, or a value is missing.
    """
    raw = _read_json(folder / "config.json")
    family = _family(raw)
    _check_features(raw)
    values = {**_DEFAULTS[family], **raw}
    missing = [name for name in _REQUIRED if values.get(name) is None]
    if missing:
        raise ConfigError(f"{folder / 'config.json'} lacks {', '.join(missing)}")
    rope_theta, rope_scaling = _rope(raw, values["max_position_embeddings"])
    num_heads, bias = values["num_attention_heads"], bool(values.get("attention_bias"))
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
        max_context_len=values["max_position_embeddings"],
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(values.get("mlp_bias")),
        sliding_window=values["sliding_window"] if family == "mistral" else None,
        eos_token_ids=_eos_ids(folder, raw),
        bos_token_id=raw.get("bos_token_id"),
        architecture=family,
    )


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file; raises as `read_hf_config`."""
    meta, shapes = file.metadata, file.shapes
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file.path} has architecture {architecture!r}; of GGUF files only 'llama' is supported")
    values = {key.removeprefix("llama."): value for key, value in meta.items() if key.startswith("llama.")}
    _check_gguf_features(file.path, values)
    num_heads = _uniform(file.path, values, "attention.head_count")
    hidden_size = _uniform(file.path, values, "embedding_length")
    head_dim = int(values.get("attention.key_length") or hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ConfigError(f"{file.path} has {key} {values[key]} and heads of {head_dim}; they must be equal")
    config = ModelConfig(
        vocab_size=shapes.get("model.embed_tokens.weight", (int(values.get("vocab_size", 0)),))[0],
        hidden_size=hidden_size,
        intermediate_size=_uniform(file.path, values, "feed_forward_length"),
        num_layers=_uniform(file.path, values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(file.path, {"attention.head_count_kv": num_heads, **values}, "attention.head_count_kv"),
        head_dim=head_dim,
        max_context_len=_uniform(file.path, values, "context_length"),
        rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(values.get("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_linear_scaling(file.path, values),
        tie_embeddings="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in shapes,
        sliding_window=values.get("attention.sliding_window") or None,
        eos_token_ids=_gguf_eos_ids(meta),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
    )
    return _with_gguf_divisors(file, config, values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _family(raw: Mapping[str, Any]) -> str:
    """The supported family that config.json names."""
    names = raw.get("architectures") or []
    known = [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES]
    if not names and raw.get("model_type") in _ARCHITECTURES.values():
        return str(raw["model_type"])
    if not known:
        what = ", ".join(names) or raw.get("model_type")
        raise ConfigError(f"the model's architecture is {what}; supported are {', '.join(_ARCHITECTURES)}")
    return known[0]


def _check_features(raw: Mapping[str, Any]) -> None:
    """Raise for what changes the arithmetic in a way that isn't implemented."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"the model's hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ConfigError(
            f"the model has a quantization_config ({method}); only unquantised safetensors are read: take the "
            "original checkpoint or a GGUF file"
        )
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"the model's partial_rotary_factor is {raw['partial_rotary_factor']}; only 1 is supported")


def _rope(raw: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from ``rope_parameters`` or the older ``rope_scaling``."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"the model's partial_rotary_factor is {rope['partial_rotary_factor']}; only 1 is supported")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"the model has rope parameters per layer type ({', '.join(rope)}); one set is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(_needed(rope, "factor")))
    if kind != "llama3":
        raise ConfigError(f"the model's rope type is {kind!r}; supported are default, linear and llama3")
    scaling = RopeScaling(
        "llama3",
        float(_needed(rope, "factor")),
        float(_needed(rope, "low_freq_factor")),
        float(_needed(rope, "high_freq_factor")),
        int(rope.get("original_max_position_embeddings") or max_position),
    )
    if not scaling.high_freq_factor > scaling.low_freq_factor:
        raise ConfigError(f"rope high_freq_factor {scaling.high_freq_factor} must be above {scaling.low_freq_factor}")
    return theta, scaling


def _needed(rope: Mapping[str, Any], key: str) -> Any:
    if rope.get(key) is None:
        raise ConfigError(f"the model's rope scaling of type {rope.get('rope_type', rope.get('type'))} lacks {key}")
    return rope[key]


def _eos_ids(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json, each once."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    ids: dict[int, None] = {}
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]))
    return tuple(ids)


def _uniform(path: Path, values: Mapping[str, Any], key: str) -> int:
    """A whole number of GGUF metadata; a list per layer only where all entries are equal."""
    value = values.get(key)
    if value is None:
        raise ConfigError(f"{path} lacks the metadata llama.{key}")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ConfigError(f"{path} has llama.{key} per layer, {value}; layers must be equal")
        value = value[0]
    return int(value)


def _check_gguf_features(path: Path, values: Mapping[str, Any]) -> None:
    if values.get("expert_count"):
        raise ConfigError(f"{path} is a mixture of {values['expert_count']} experts, which isn't supported")
    for key in ("attention.scale", "attention.temperature_scale", "logit_scale", "embedding_scale", "residual_scale"):
        if values.get(key):
            raise ConfigError(f"{path} sets llama.{key}, which isn't supported")


def _gguf_linear_scaling(path: Path, values: Mapping[str, Any]) -> RopeScaling | None:
    kind = values.get("rope.scaling.type") or ("linear" if "rope.scale_linear" in values else "none")
    factor = float(values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0)
    if kind not in ("none", "linear"):
        raise ConfigError(f"{path} has rope scaling {kind!r}; supported in GGUF files are linear and rope_freqs.weight")
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def _with_gguf_divisors(file: GGUFFile, config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """`config` with the llama3 scaling that ``rope_freqs.weight`` was made from.

    The file keeps the divisors alone, so the usual parameters are tried and must give the same divisors.
    """
    import dataclasses

    divisors = file.rope_divisors()
    if divisors is None or bool((divisors == 1).all()):
        return config
    frequencies = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    if config.rope_scaling is None and divisors.shape == frequencies.shape:
        for original in (values.get("rope.scaling.original_context_length"), 8192):
            scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, int(original or 8192))
            if torch.allclose(frequencies / divisors, scale_frequencies(frequencies, scaling), rtol=1e-4, atol=0):
                return dataclasses.replace(config, rope_scaling=scaling)
    raise ConfigError(
        f"{file.path} has rope_freqs.weight, which is not the llama3 scaling (low_freq_factor 1, high_freq_factor 4, "
        f"8192 positions) with factor {float(divisors.max()):g}; take the safetensors checkpoint"
    )


def _gguf_eos_ids(meta: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (meta.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))
