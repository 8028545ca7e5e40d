"""A model's config.json, read by the description of its family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.families.description import REQUIRED, ExpertKeys, Family, Key, Window
from fastdecode_hpc.families.known import BY_ARCHITECTURE, BY_NAME, FAMILIES
from fastdecode_hpc.families.refused import KindError, reason_to_refuse
from fastdecode_hpc.families.rope import read_rope
from fastdecode_hpc.files import read_json_object
from fastdecode_hpc.model_shape import Experts, ModelConfig
from fastdecode_hpc.typed_values import TypedValues

_TYPES = {spec.name: str(spec.type) for spec in dataclasses.fields(ModelConfig)}


def config_of(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """The model whose config.json holds `raw`.

    Raises
    ------
    ConfigError
        If its family isn't computed, it differs from its family in a way that isn't, or a value is missing or wrong.
        `KindError` where the family or a quantisation is all that stands against it.
    """
    given = TypedValues(folder / "config.json", raw)
    family = _family(given)
    _check_features(given, family)
    missing = _missing(given, family)
    if missing:
        raise ConfigError(f"{given.path} lacks {', '.join(missing)}")
    fields = {name: _field(given, raw, name, value) for name, value in family.values.items()}
    fields |= _filled(fields)
    if family.rotary is None:
        fields["rotary_dim"] = 0
    else:
        fields |= read_rope(given, family.rotary, fields["head_dim"], fields["max_context_len"])
    if family.experts is not None:
        fields["experts"] = _read_experts(given, raw, family.experts)
    bos = given.ids("bos_token_id")
    config = ModelConfig(
        **fields,
        eos_token_ids=eos_ids(folder, given),
        bos_token_id=bos[0] if bos else None,
        architecture=family.name,
    )
    if family.window is not None:
        config = dataclasses.replace(config, **_read_window(given, raw, family.window, config.num_layers))
    _check_unquantised(given, raw)  # last: without it nothing else stands against the model
    return config


def forms_to_take(raw: Mapping[str, Any], *, gguf: str = "a GGUF file") -> str:
    """In which forms a model that is quantised in its safetensors can be run; `gguf` is what the first is called."""
    family, _ = _find_family(TypedValues(Path("config.json"), raw))
    plain = "an unquantised safetensors checkpoint"
    return plain if family is None or family.gguf is None else f"{gguf} or {plain}"


def _find_family(given: TypedValues) -> tuple[Family | None, str]:
    """The family that config.json names, if it is one of ours, and what it names."""
    listed = given.get("architectures", [])
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    kind = given.text("model_type", "")
    known = [BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE]
    if not listed and kind in BY_NAME:
        known = [BY_NAME[kind]]
    return known[0] if known else None, ", ".join(names) or kind or show(listed)


def _family(given: TypedValues) -> Family:
    family, what = _find_family(given)
    if family is not None:
        return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    text = f"the model's architecture is {what}; supported are {supported}"
    reason = reason_to_refuse(given)
    raise ConfigError(f"{text}; it has {reason}") if reason else KindError(text)


def _check_unquantised(given: TypedValues, raw: Mapping[str, Any]) -> None:
    quantisation = given.inner("quantization_config")
    if quantisation:
        raise KindError(
            f"the model has a quantization_config ({quantisation.text('quant_method', 'unnamed')}); natively only "
            f"unquantised safetensors are read: take {forms_to_take(raw)}"
        )


def _check_features(given: TypedValues, family: Family) -> None:
    """Raise for what changes the arithmetic in a way that isn't computed."""
    for key, choices in family.computed.items():
        value = given.get(key, choices[0])
        if value not in choices:
            supported = " or ".join(show(choice) for choice in choices)
            raise ConfigError(f"the model's {key} is {show(value)}; of {family.name} only {supported} is supported")


def _missing(given: TypedValues, family: Family) -> list[str]:
    keys = [value for value in family.values.values() if isinstance(value, Key)]
    return [key.name for key in keys if key.default is REQUIRED and key.name not in given]


def _field(given: TypedValues, raw: Mapping[str, Any], name: str, value: Any) -> Any:
    """One field of `ModelConfig`."""
    return _read(given, raw, value, _TYPES[name]) if isinstance(value, Key) else value


def _read(given: TypedValues, raw: Mapping[str, Any], key: Key, kind: str) -> Any:
    """The value of a key, for a field of type `kind`. A null means none where that is a value, else nothing is said."""
    name = key.newer if key.newer in given else key.name
    if name not in given:
        value = None if name in raw and kind.endswith("| None") else key.default
    elif kind.startswith("bool") or True in (key.choices or ()):
        value = given.flag(name)
    elif key.choices is not None:
        value = given.text(name, "")
    else:
        value = given.whole(name) if kind.startswith("int") else given.number(name)
    return _power(key, value) if key.choices is None else _choice(key, value)


def _choice(key: Key, value: Any) -> Any:
    assert key.choices is not None
    if value not in key.choices:
        raise ConfigError(f"the model's {key.name} is {show(value)}; supported are {', '.join(map(str, key.choices))}")
    return key.choices[value]


def _power(key: Key, value: Any) -> Any:
    if key.power == 1.0 or value is None:
        return value
    if not value > 0:
        raise ConfigError(f"the model's {key.name} is {value}; it must be above 0")
    return float(value) ** key.power


def _filled(fields: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that follow from others where they are 0."""
    heads, hidden_size = fields["num_heads"], fields["hidden_size"]
    return {
        "num_kv_heads": fields["num_kv_heads"] or heads,
        "head_dim": fields["head_dim"] or hidden_size // max(1, heads),
        "intermediate_size": fields["intermediate_size"] or 4 * hidden_size,
    }


def _read_window(given: TypedValues, raw: Mapping[str, Any], window: Window, num_layers: int) -> dict[str, Any]:
    """`sliding_window`, and `full_layers` where not all have it."""
    enabled = not window.enabled_by or given.flag(window.enabled_by)
    size = (given.whole("sliding_window", 0) or None) if "sliding_window" in raw else window.default
    if size is None or not enabled:
        return {"sliding_window": None}
    full = _full_layers(given, window, num_layers)
    return {"sliding_window": size if len(full) < num_layers else None, "full_layers": full}


def _full_layers(given: TypedValues, window: Window, num_layers: int) -> tuple[int, ...]:
    types = given.texts("layer_types")
    if types and (window.period or window.first):
        unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
        if unknown:
            raise ConfigError(f"the model has layers of type {', '.join(unknown)}; only sliding and full are supported")
        if len(types) < num_layers:
            raise ConfigError(f"{given.path} has {len(types)} layer_types for {num_layers} layers")
        return tuple(layer for layer in range(num_layers) if types[layer] == "full_attention")
    if window.first is not None:
        return tuple(range(min(num_layers, _read(given, {}, window.first, "int"))))
    period = _read(given, {}, window.period, "int") if window.period is not None else 0
    return tuple(range(period - 1, num_layers, period)) if period else ()


def _read_experts(given: TypedValues, raw: Mapping[str, Any], keys: ExpertKeys) -> Experts:
    normalised = keys.normalised
    return Experts(
        count=_read(given, raw, keys.count, "int"),
        per_token=_read(given, raw, keys.per_token, "int"),
        normalised=_read(given, raw, normalised, "bool") if isinstance(normalised, Key) else normalised,
        router_bias=keys.router_bias,
    )


def eos_ids(folder: Path, given: TypedValues) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json, each once."""
    path = folder / "generation_config.json"
    generation = TypedValues(path, read_json_object(path) if path.is_file() else {})
    return tuple(dict.fromkeys((*given.ids("eos_token_id"), *generation.ids("eos_token_id"))))
