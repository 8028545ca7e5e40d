"""The rotary embedding that config.json describes, under its new key or the older ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.families.description import Rotary
from fastdecode_hpc.model_shape import RopeScaling
from fastdecode_hpc.typed_values import TypedValues

_KINDS = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")


def read_rope(given: TypedValues, rotary: Rotary, head_dim: int, max_position: int) -> dict[str, Any]:
    """Fields of `ModelConfig` that say how positions are rotated.

    Raises
    ------
    ConfigError
        If a kind of scaling isn't known, or lacks a parameter.
    """
    rope = given.inner("rope_parameters") or given.inner("rope_scaling")
    windowed_theta = rotary.windowed_theta
    if windowed_theta is not None:
        windowed_theta = _windowed_theta(given, rope.inner("sliding_attention"), rotary.windowed_key, windowed_theta)
        if "full_attention" in rope or "sliding_attention" in rope:
            rope = rope.inner("full_attention")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"the model has rope parameters per layer type ({', '.join(rope)}); one set is supported")
    theta = rope.number("rope_theta", 0.0) or given.number(rotary.theta_key, 0.0) or rotary.theta
    return {
        "rope_theta": theta,
        "windowed_rope_theta": windowed_theta,
        "rotary_dim": _rotary_dim(given, rope, rotary, head_dim),
        "rope_scaling": _scaling(given, rope, rotary, max_position),
    }


def _windowed_theta(given: TypedValues, rope: TypedValues, key: str, default: float) -> float:
    """The base of layers with a window; older files have it under a key of its own."""
    if rope.text("rope_type", "default") != "default":
        raise ConfigError(f"the model scales the positions of layers with a window, {show(dict(rope))}")
    return rope.number("rope_theta", given.number(key, default))


def _rotary_dim(given: TypedValues, rope: TypedValues, rotary: Rotary, head_dim: int) -> int | None:
    key = rotary.share_key or "partial_rotary_factor"
    share = rope.number("partial_rotary_factor", given.number(key, rotary.share))
    if not 0 < share <= 1 or (share != 1 and not rotary.share_key):
        allowed = "it must be above 0 and at most 1" if rotary.share_key else "only 1 is supported"
        raise ConfigError(f"the model's {key} is {share}; {allowed}")
    return None if share == 1 else int(head_dim * share)


def _scaling(given: TypedValues, rope: TypedValues, rotary: Rotary, max_position: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in rotary.longrope_names:
        kind = "longrope"
    if kind not in _KINDS:
        raise ConfigError(f"the model's rope type is {show(kind)}; supported are {', '.join(_KINDS)}")
    if kind in ("default", "dynamic"):  # dynamic stretches beyond max_position alone, where no run goes
        return None
    if kind == "linear":
        return RopeScaling("linear", _needed(rope, kind, "factor"))
    original = given.whole("original_max_position_embeddings", 0) or rope.whole("original_max_position_embeddings", 0)
    if kind == "longrope":
        return _longrope(rope, original, max_position)
    original = original or max_position
    if kind == "yarn":
        return _yarn(rope, original, max_position)
    return RopeScaling(
        "llama3",
        _needed(rope, kind, "factor"),
        _needed(rope, kind, "low_freq_factor"),
        _needed(rope, kind, "high_freq_factor"),
        original,
    )


def _yarn(rope: TypedValues, original: int, max_position: int) -> RopeScaling:
    factor = rope.number("factor", 0.0) or max_position / original
    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    ratio = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", 0.0) or ratio,
        beta_fast=rope.number("beta_fast", 0.0) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0) or 1.0,
        truncate="truncate" not in rope or rope.flag("truncate"),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: TypedValues, original: int, max_position: int) -> RopeScaling:
    for key in ("short_factor", "long_factor"):
        if key not in rope:
            raise ConfigError(f"the model's rope scaling of type longrope lacks {key}")
    if original < 2:
        raise ConfigError("the model's rope scaling of type longrope lacks original_max_position_embeddings")
    factor = rope.number("factor", 0.0) or max_position / original
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope",
        original_max_position=original,
        attention_factor=rope.number("attention_factor", 0.0) or grown,
        divisors=rope.numbers("short_factor"),
        long_divisors=rope.numbers("long_factor"),
    )


def _needed(rope: TypedValues, kind: str, key: str) -> float:
    if key not in rope:
        raise ConfigError(f"the model's rope scaling of type {kind} lacks {key}")
    return rope.number(key)
