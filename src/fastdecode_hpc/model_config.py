"""The shape of a model, from config.json or GGUF metadata; what can't be computed is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, ModelConfig, RopeScaling, naming, show
from fastdecode_hpc.files import read_json_object
from fastdecode_hpc.gguf_header import GGUFHeader, read_gguf_header
from fastdecode_hpc.typed_values import TypedValues

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
        If the architecture or a feature of it isn't supported, or a value is missing or of another kind.
    """
    path = folder / "config.json"
    with naming(path):
        return _hf_config(folder, read_json_object(path))


def gguf_config(path: Path, header: GGUFHeader) -> ModelConfig:
    """The model of a GGUF file, but for a scaling that only its ``rope_freqs`` show; raises as `read_hf_config`."""
    with naming(path):
        return _gguf_config(path, header)


def read_model_shape(path: Path) -> ModelConfig:
    """The shape of the model at a path that `resolve_model` gave, for who computes nothing with it.

    Of a GGUF file the scaling of positions may be missing. Raises as `read_hf_config`.
    """
    return gguf_config(path, read_gguf_header(path)) if path.suffix == ".gguf" else read_hf_config(path)


def _hf_config(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    given = TypedValues(folder / "config.json", raw)
    family = _family(given)
    _check_features(given)
    # A null replaces the default: a Mistral model without a window says so.
    values = TypedValues(given.path, {**_DEFAULTS[family], **raw})
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise ConfigError(f"{given.path} lacks {', '.join(missing)}")
    rope_theta, rope_scaling = _rope(given, values.whole("max_position_embeddings"))
    num_heads, bias = values.whole("num_attention_heads"), values.flag("attention_bias")
    bos = given.ids("bos_token_id")
    return ModelConfig(
        vocab_size=values.whole("vocab_size"),
        hidden_size=values.whole("hidden_size"),
        intermediate_size=values.whole("intermediate_size"),
        num_layers=values.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=values.whole("num_key_value_heads", 0) or num_heads,
        head_dim=values.whole("head_dim", 0) or values.whole("hidden_size") // max(1, num_heads),
        max_context_len=values.whole("max_position_embeddings"),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=values.flag("tie_word_embeddings"),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=values.flag("mlp_bias"),
        sliding_window=values.whole("sliding_window", 0) or None if family == "mistral" else None,
        eos_token_ids=_eos_ids(folder, given),
        bos_token_id=bos[0] if bos else None,
        architecture=family,
    )


def _gguf_config(path: Path, header: GGUFHeader) -> ModelConfig:
    metadata, tensors = header
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path} has architecture {show(architecture)}; of GGUF files only 'llama' is supported")
    own = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    values, tokens = TypedValues(path, own, "llama."), TypedValues(path, metadata)
    _check_gguf_features(values)
    num_heads = _uniform(values, "attention.head_count")
    hidden_size = _uniform(values, "embedding_length")
    head_dim = values.whole("attention.key_length", 0) or hidden_size // max(1, num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ConfigError(f"{path} has {key} {show(values[key])} and heads of {head_dim}; they must be equal")
    embeddings = tensors.get("token_embd.weight")
    return ModelConfig(
        vocab_size=embeddings.shape[0] if embeddings is not None else values.whole("vocab_size", 0),
        hidden_size=hidden_size,
        intermediate_size=_uniform(values, "feed_forward_length"),
        num_layers=_uniform(values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context_len=_uniform(values, "context_length"),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=values.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_linear_scaling(values),
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        sliding_window=values.whole("attention.sliding_window", 0) or None,
        eos_token_ids=_gguf_eos_ids(tokens),
        bos_token_id=next(iter(tokens.ids("tokenizer.ggml.bos_token_id")), None),
    )


def _family(given: TypedValues) -> str:
    """The supported family that config.json names."""
    listed = given.get("architectures", [])
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    kind = given.text("model_type", "")
    known = [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES]
    if not listed and kind in _ARCHITECTURES.values():
        return kind
    if not known:
        what = ", ".join(names) or kind or show(listed)
        raise ConfigError(f"the model's architecture is {what}; supported are {', '.join(_ARCHITECTURES)}")
    return known[0]


def _check_features(given: TypedValues) -> None:
    """Raise for what changes the arithmetic in a way that isn't implemented."""
    if given.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"the model's hidden_act is {show(given['hidden_act'])}; only 'silu' is supported")
    quantisation = given.inner("quantization_config")
    if quantisation:
        raise ConfigError(
            f"the model has a quantization_config ({quantisation.text('quant_method', 'unnamed')}); only unquantised "
            "safetensors are read: take the original checkpoint or a GGUF file"
        )
    _check_whole_rotation(given)


def _check_whole_rotation(values: TypedValues) -> None:
    factor = values.number("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ConfigError(f"the model's partial_rotary_factor is {factor}; only 1 is supported")


def _rope(given: TypedValues, max_position: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from ``rope_parameters`` or the older ``rope_scaling``."""
    rope = given.inner("rope_parameters") or given.inner("rope_scaling")
    theta = rope.number("rope_theta", 0.0) or given.number("rope_theta", 0.0) or 10000.0
    _check_whole_rotation(rope)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"the model has rope parameters per layer type ({', '.join(rope)}); one set is supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _needed(rope, kind, "factor"))
    if kind != "llama3":
        raise ConfigError(f"the model's rope type is {show(kind)}; supported are default, linear and llama3")
    return theta, RopeScaling(
        "llama3",
        _needed(rope, kind, "factor"),
        _needed(rope, kind, "low_freq_factor"),
        _needed(rope, kind, "high_freq_factor"),
        rope.whole("original_max_position_embeddings", 0) or max_position,
    )


def _needed(rope: TypedValues, kind: str, key: str) -> float:
    if key not in rope:
        raise ConfigError(f"the model's rope scaling of type {kind} lacks {key}")
    return rope.number(key)


def _eos_ids(folder: Path, given: TypedValues) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json, each once."""
    path = folder / "generation_config.json"
    generation = TypedValues(path, read_json_object(path) if path.is_file() else {})
    return tuple(dict.fromkeys((*given.ids("eos_token_id"), *generation.ids("eos_token_id"))))


def _uniform(values: TypedValues, key: str, default: int | None = None) -> int:
    """A whole number of GGUF metadata; a list per layer only where all entries are equal."""
    listed = values.get(key)
    if not isinstance(listed, list):
        return values.whole(key, default)
    if not listed or any(value != listed[0] for value in listed):
        raise ConfigError(f"{values.path} has llama.{key} per layer, {show(listed)}; layers must be equal")
    return TypedValues(values.path, {key: listed[0]}, "llama.").whole(key)


def _check_gguf_features(values: TypedValues) -> None:
    if values.get("expert_count"):
        raise ConfigError(
            f"{values.path} is a mixture of {show(values['expert_count'])} experts, which isn't supported"
        )
    for key in ("attention.scale", "attention.temperature_scale", "logit_scale", "embedding_scale", "residual_scale"):
        if values.get(key):
            raise ConfigError(f"{values.path} sets llama.{key}, which isn't supported")


def _gguf_linear_scaling(values: TypedValues) -> RopeScaling | None:
    kind = values.text("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.number("rope.scaling.factor", 0.0) or values.number("rope.scale_linear", 0.0) or 1.0
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"{values.path} has rope scaling {show(kind)}; supported in GGUF files are linear and rope_freqs.weight"
        )
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def _gguf_eos_ids(tokens: TypedValues) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(token for key in keys for token in tokens.ids(f"tokenizer.ggml.{key}")))
