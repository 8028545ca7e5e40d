"""A model's GGUF metadata, read by the description of its family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.families.description import Family, GGUFForm, Key
from fastdecode_hpc.families.known import FAMILIES
from fastdecode_hpc.gguf_header import GGUFHeader, TensorInfo
from fastdecode_hpc.model_shape import Experts, ModelConfig, RopeScaling
from fastdecode_hpc.typed_values import TypedValues

# Fields that some families have, and what llama.cpp calls them; where a file sets one of another family, it is refused.
_NUMBERS = {
    "attention_scale": "attention.scale",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_divisor": "logit_scale",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_MAX_LAYERS = 2**12  # more are refused by `ModelConfig`
_PLAIN_YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
_REFUSED = ("attention.temperature_scale", "expert_shared_count", "leading_dense_block_count")


def config_of_gguf(path: Path, header: GGUFHeader) -> ModelConfig:
    """The model of a GGUF file, but for a scaling that only its ``rope_freqs`` show.

    Raises
    ------
    ConfigError
        If its family isn't computed or not read from such files, or a value is missing or wrong.
    """
    family = _family(path, header)
    assert family.gguf is not None
    prefix = f"{family.gguf.architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    values, tokens = TypedValues(path, own, prefix), TypedValues(path, header.metadata)
    fields = _fixed(family) | _sizes(values, header.tensors, family) | _numbers(values, family)
    fields |= _biases(header.tensors, family.gguf)
    fields |= _positions(values, family, fields["head_dim"])
    fields |= {**_scores(family.gguf, fields), **family.gguf.values}
    if family.experts is not None:  # llama.cpp lets the chosen experts' weights sum to 1
        fields["experts"] = Experts(
            _uniform(values, "expert_count"),
            _uniform(values, "expert_used_count"),
            router_bias=family.experts.router_bias,
        )
    return ModelConfig(
        **fields,
        **_windows(values, family, fields["num_layers"]),
        tie_embeddings=f"{family.gguf.names.head}.weight" not in header.tensors,
        eos_token_ids=_eos_ids(tokens),
        bos_token_id=next(iter(tokens.ids("tokenizer.ggml.bos_token_id")), None),
        architecture=family.name,
    )


def _family(path: Path, header: GGUFHeader) -> Family:
    """The family of the architecture that a file names; with or without experts."""
    architecture = header.metadata.get("general.architecture")
    forms = [family for family in FAMILIES if family.gguf is not None and family.gguf.architecture == architecture]
    if not forms:
        known = dict.fromkeys(family.gguf.architecture for family in FAMILIES if family.gguf is not None)
        raise ConfigError(f"{path} has architecture {show(architecture)}; of GGUF files {', '.join(known)} are read")
    num_experts = header.metadata.get(f"{architecture}.expert_count")
    fitting = [family for family in forms if (family.experts is not None) == bool(num_experts)]
    if len(fitting) > 1:  # of an architecture with and without alternating windows
        has_window = bool(header.metadata.get(f"{architecture}.attention.sliding_window"))
        alternates = [family.window is not None and family.window.period is not None for family in fitting]
        fitting = [family for family, each in zip(fitting, alternates, strict=True) if each == has_window] or fitting
    if not fitting:
        raise ConfigError(f"{path} has {architecture}.expert_count {show(num_experts)}, which isn't supported")
    return fitting[0]


def _fixed(family: Family) -> dict[str, Any]:
    """What the description says without asking config.json; of a key with choices the default."""
    fixed = {name: value for name, value in family.values.items() if not isinstance(value, Key)}
    chosen = {
        name: value.choices[value.default]
        for name, value in family.values.items()
        if isinstance(value, Key) and value.choices is not None
    }
    return fixed | chosen


def _sizes(values: TypedValues, tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, Any]:
    num_heads = _uniform(values, "attention.head_count")
    hidden_size = _uniform(values, "embedding_length")
    head_dim = values.whole("attention.key_length", 0) or hidden_size // max(1, num_heads)
    if values.get("attention.value_length", head_dim) != head_dim:
        length = show(values["attention.value_length"])
        raise ConfigError(
            f"{values.path} has attention.value_length {length} and heads of {head_dim}; they must be equal"
        )
    embeddings = tensors.get("token_embd.weight")
    own_size = family.experts is not None and "expert_feed_forward_length" in values
    eps = "layer_norm_epsilon" if family.values.get("norm") == "layer" else "layer_norm_rms_epsilon"
    return {
        "vocab_size": embeddings.shape[0] if embeddings is not None else values.whole("vocab_size", 0),
        "hidden_size": hidden_size,
        "intermediate_size": _uniform(values, "expert_feed_forward_length" if own_size else "feed_forward_length"),
        "num_layers": _uniform(values, "block_count"),
        "num_heads": num_heads,
        "num_kv_heads": _uniform(values, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_context_len": _uniform(values, "context_length"),
        "norm_eps": values.number(f"attention.{eps}", 1e-5),
    }


def _numbers(values: TypedValues, family: Family) -> dict[str, float | None]:
    """Scales and caps of families that have them."""
    for key in (*_REFUSED, *(key for name, key in _NUMBERS.items() if name not in family.values)):
        if values.get(key):
            raise ConfigError(f"{values.path} sets {values.full_name(key)}, which isn't supported")
    found: dict[str, float | None] = {}
    for name, key in _NUMBERS.items():
        said = family.values.get(name)
        if isinstance(said, Key) and said.power == 1.0:
            found[name] = values.number(key) if key in values else said.default
        elif isinstance(said, Key) and name == "embedding_scale":
            found[name] = _uniform(values, "embedding_length") ** said.power
    if family.values.get("parallel"):
        return found | {"parallel": "use_parallel_residual" not in values or values.flag("use_parallel_residual")}
    return found


def _scores(form: GGUFForm, fields: Mapping[str, Any]) -> dict[str, float]:
    """The scale of scores of a model that is known by its number of layers."""
    if not form.scaled_by_width or fields["num_layers"] != form.scaled_by_width:
        return {}
    return {"attention_scale": (fields["hidden_size"] / max(1, fields["num_heads"])) ** -0.5}


def _biases(tensors: Mapping[str, TensorInfo], form: GGUFForm) -> dict[str, bool]:
    names = {"attention_bias": form.names.qkv[0], "output_bias": form.names.output, "mlp_bias": form.names.down}
    return {field: f"{form.names.layer.format(0)}{name}.bias" in tensors for field, name in names.items()}


def _positions(values: TypedValues, family: Family, head_dim: int) -> dict[str, Any]:
    if family.rotary is None:
        return {"rotary_dim": 0}
    rotated, windowed_theta = values.whole("rope.dimension_count", head_dim), family.rotary.windowed_theta
    if rotated != head_dim and not family.rotary.share_key:
        raise ConfigError(
            f"{values.path} has rope.dimension_count {rotated} and heads of {head_dim}; they must be equal"
        )
    theta = values.number("rope.freq_base", family.rotary.theta)
    if windowed_theta is not None:
        shared = family.rotary.windowed_key == family.rotary.theta_key
        windowed_theta = values.number("rope.freq_base_swa", theta if shared else windowed_theta)
    return {
        "rotary_dim": None if rotated == head_dim else rotated,
        "rope_theta": theta,
        "rope_scaling": _scaling(values, family),
        "windowed_rope_theta": windowed_theta,
    }


def _windows(values: TypedValues, family: Family, num_layers: int) -> dict[str, Any]:
    """The window, and the layers that see all where the family alternates."""
    size, window = values.whole("attention.sliding_window", 0) or None, family.window
    if size is None or window is None or window.period is None or num_layers > _MAX_LAYERS:
        return {"sliding_window": size}
    period = window.period.default
    return {"sliding_window": size, "full_layers": tuple(range(period - 1, num_layers, period))}


def _uniform(values: TypedValues, key: str, default: int | None = None) -> int:
    """A whole number of GGUF metadata; a list per layer only where all entries are equal."""
    listed = values.get(key)
    if not isinstance(listed, list):
        return values.whole(key, default)
    if not listed or any(value != listed[0] for value in listed):
        raise ConfigError(f"{values.path} has {values.full_name(key)} per layer, {show(listed)}; layers must be equal")
    return TypedValues(values.path, {key: listed[0]}, values.full_name("")).whole(key)


def _scaling(values: TypedValues, family: Family) -> RopeScaling | None:
    """The scaling of positions that metadata names; others have their divisors as tensors."""
    kind = values.text("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.number("rope.scaling.factor", 0.0) or values.number("rope.scale_linear", 0.0) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"{values.path} has rope scaling {show(kind)}; supported in GGUF files are linear, yarn and "
            "rope_freqs.weight"
        )
    if kind == "none" or factor == 1.0:
        return None
    return RopeScaling("linear", factor) if kind == "linear" else _yarn(values, family, factor)


def _yarn(values: TypedValues, family: Family, factor: float) -> RopeScaling:
    """As llama.cpp has it, but for the ends of its ramp, which it always takes at whole frequencies."""
    assert family.gguf is not None
    for key, plain in _PLAIN_YARN.items():
        given = values.number(f"rope.scaling.{key}", plain)
        if given != plain:
            name = values.full_name(f"rope.scaling.{key}")
            raise ConfigError(f"{values.path} sets {name} to {given:g}; only {plain:g} is supported")
    if not factor > 1:
        raise ConfigError(f"{values.path} has a yarn scaling with factor {factor:g}; it must be above 1")
    original = values.whole("rope.scaling.original_context_length", 0) or _uniform(values, "context_length")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=(0.1 * math.log(factor) + 1) * values.number("rope.scaling.attn_factor", 1.0),
        beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=family.gguf.truncates_yarn,
    )


def _eos_ids(tokens: TypedValues) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(token for key in keys for token in tokens.ids(f"tokenizer.ggml.{key}")))
