"""Descriptions of families: what they read from config.json, what they refuse, what they say of sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastdecode_hpc
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.families.config_json import forms_to_take
from fastdecode_hpc.families.known import BY_NAME, FAMILIES
from fastdecode_hpc.families.refused import KindError, reason_to_refuse
from fastdecode_hpc.families.table import THROUGH_TRANSFORMERS, format_models
from fastdecode_hpc.model_config import read_model_shape
from fastdecode_hpc.model_shape import Experts, ModelConfig, RopeScaling
from fastdecode_hpc.planner.profile import model_of
from fastdecode_hpc.s_part.weight_targets import list_targets
from fastdecode_hpc.s_part.weight_tensors import describe
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.typed_values import TypedValues
from tiny_models import FAMILIES as TINY
from tiny_models import MORE_OTHERS, OTHERS, tiny_options

DOCS = Path(fastdecode_hpc.__file__).parents[2] / "docs"


def read(folder: Path, name: str, **changes: Any) -> ModelConfig:
    """The model of a tiny family as transformers writes its config.json, with changes; an ellipsis drops a key."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**tiny_options(name))
    config.architectures = [BY_NAME[config.model_type].architecture]
    values = {**json.loads(config.to_json_string()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return read_model_shape(folder)


@pytest.mark.parametrize("name", TINY)
def test_sizes_are_those_of_the_tensors(tmp_path: Path, name: str) -> None:
    config = read(tmp_path, name)
    weights = describe(config, torch.float32)
    small = [t for layer in weights.layers for t in _small(layer)]
    small += [weights.final_norm] if weights.final_norm is not None else []
    assert config.num_weights == weights.size_bytes // 4 - sum(t.numel() for t in small)
    names = BY_NAME[config.architecture].names
    targets = list_targets(config, names, weights)
    assert len({target.name for target in targets}) == len(targets)
    assert 4 * sum(target.place.numel() for target in targets) == weights.size_bytes


def _small(layer: Any) -> list[torch.Tensor]:
    """Biases and norms."""
    fields = [name for name in layer.__slots__ if name.endswith(("bias", "norm", "sinks"))]
    return [value for value in (getattr(layer, name) for name in fields) if value is not None]


@pytest.mark.parametrize("name", TINY)
def test_a_model_survives_a_profiles_json(tmp_path: Path, name: str) -> None:
    config = read(tmp_path, name)
    written = json.loads(json.dumps(dataclasses.asdict(config)))
    assert model_of(TypedValues(tmp_path, written)) == config


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", [None, None]),
        ("mistral-window", [16, 16]),
        ("qwen2-windows", [None, None, 16, 16]),
        ("gemma2", [16, None, 16, None]),
        ("olmo3", [16, 16, 16, None, 16]),
        ("gemma3", [16, 16, 16, 16, 16, None, 16]),
    ],
)
def test_windows_of_layers(tmp_path: Path, name: str, windows: list[int | None]) -> None:
    config = read(tmp_path, name)
    assert [config.window_of(layer) for layer in range(config.num_layers)] == windows
    assert read_windows_without_types(tmp_path, name) == windows


def read_windows_without_types(folder: Path, name: str) -> list[int | None]:
    """Older versions of transformers wrote no list of types."""
    config = read(folder, name, layer_types=..., sliding_window_pattern=6)
    return [config.window_of(layer) for layer in range(config.num_layers)]


def test_layers_are_grouped_by_what_their_attention_is_told(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma2")
    layout = make_layout(config, block_size=8, kv_dtype="int8")
    assert [(group.layers, group.window, group.is_recent) for group in layout.groups] == [
        ((0, 2), 16, False), ((0, 2), 16, True), ((1, 3), None, False), ((1, 3), 64, True),
    ]  # fmt: skip
    assert {(group.scale, group.softcap) for group in layout.groups} == {(20**-0.5, 3.0)}
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * 2  # K and V of a token in fp16
    plain = make_layout(config, block_size=8, kv_dtype="fp16")
    # Of 100 tokens windowed layers keep up to 3 blocks of 8, the others all 13.
    assert plain.bytes_for(100) == kv_bytes * 8 * (2 * 3 + 2 * 13)
    assert dataclasses.replace(config, num_layers=1).window_of(0) == 16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; of gpt2 only"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
        ("opt", {"do_layer_norm_before": "no"}, "do_layer_norm_before 'no'; it must be true or false"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "experts per token is 9; it must be a whole number of at least 1"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantization_config \(mxfp4\)"),
        ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0; of gpt_oss only 7.0 is supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"query_pre_attn_scalar": -1.0}, r"query_pre_attn_scalar is -1\.0; it must be above 0"),
        ("gemma2", {"layer_types": ["linear_attention"] * 4}, "layers of type linear_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ("gemma2", {"num_hidden_layers": 2**62, "layer_types": ...}, "model num_layers is"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping '30'; it must be a number"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "scales the positions of layers"),
        ("granite", {"residual_multiplier": 0}, "residual_scale is 0"),
        ("starcoder2", {"hidden_act": "mish"}, "hidden_act is 'mish'; supported are silu, swish, gelu"),
        ("gpt-neox", {"rope_parameters": ..., "rotary_pct": 1.5}, r"rotary_pct is 1\.5; it must be above 0"),
        ("qwen2", {"rope_parameters": ..., "partial_rotary_factor": 0.5}, "only 1 is supported"),
        ("qwen2", {"rope_scaling": {"rope_type": "mrope"}, "rope_parameters": ...}, "rope type is 'mrope'"),
        ("phi3-long", {"rope_parameters": {"rope_type": "longrope"}}, "type longrope lacks short_factor"),
        ("phi3-long", {"head_dim": 32}, "has 8 divisors; its 32 rotated elements need 16"),
        ("yarn-rope", {"head_dim": 12}, "head_dim is 12; the attention kernels take multiples of 8"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, name, **changes)


WRONG = [None, -1, 0, 3, 2**63, 1e308, 0.5, float("nan"), "x", [], [1], ["full_attention"], {}, {"a": 1}, True, False]


@pytest.mark.parametrize(
    "name", ["qwen2-windows", "qwen3-moe", "phi3-long", "granite", "gemma3", "gpt-neox", "gpt2", "opt"]
)
def test_wrong_values_are_configuration_errors(tmp_path: Path, name: str) -> None:
    read(tmp_path, name)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    for key in plain:
        for value in WRONG:
            path.write_text(json.dumps({**plain, key: value}))
            with contextlib.suppress(ConfigError):
                read_model_shape(tmp_path)


@pytest.mark.parametrize("kind", ["mamba", "deepseek_v3", "t5", "bloom", "rwkv"])
def test_other_families_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=f"architecture is {kind}; supported are LlamaForCausalLM, Mistral"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "cohere"}, ""),
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "new", "mamba_d_state": 16}, "state-space"),
        ({"model_type": "new", "mamba_d_state": 16, "layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({"model_type": "new", "layer_types": ["attention", "mamba"]}, "state-space"),
        ({"model_type": "new", "layer_types": ["full_attention", "conv"]}, "state-space"),
        ({"model_type": "new", "hybrid_override_pattern": "M-M*"}, "state-space"),
        ({"model_type": "new", "layer_types": ["linear_attention"]}, "linear attention"),
        ({"model_type": "new", "linear_num_key_heads": 2}, "linear attention"),
        ({"model_type": "new", "layer_types": ["chunked_attention"]}, "within chunks"),
        ({"model_type": "new", "layer_types": ["indexed_attention"]}, "sparse attention"),
        ({"model_type": "new", "layer_types": ["full_attention", "wavelet"]}, "layers of type 'wavelet'"),
        ({"model_type": "new", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "new", "kv_lora_rank": None}, ""),
        ({"model_type": "new", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "new", "is_encoder_decoder": True}, "cross-attention"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "new", "cross_attention_layers": [3]}, "cross-attention"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "falcon", "alibi": False}, ""),
        ({"model_type": "new", "text_config": {}}, "other than text"),
        ({"model_type": 5, "layer_types": {"a": 1}, "index_topk": [], "kv_lora_rank": "x"}, "MLA"),
        ({"model_type": ["mamba"], "layer_types": [1, None, {}]}, ""),
    ],
)  # fmt: skip
def test_what_no_s_part_computes_is_told_by_config_json(raw: dict[str, Any], reason: str) -> None:
    found = reason_to_refuse(raw)
    assert reason in found
    assert bool(found) == bool(reason)


def test_an_unknown_family_is_told_of_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere"}))
    with pytest.raises(KindError, match=r"supported are .*ForCausalLM$"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="it has state-space"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("raw", "forms"),
    [
        ({"model_type": "gpt_oss"}, "a GGUF file or an unquantised safetensors checkpoint"),
        ({"architectures": ["LlamaForCausalLM"]}, "a GGUF file or an unquantised safetensors checkpoint"),
        ({"model_type": "opt"}, "an unquantised safetensors checkpoint"),
        ({"model_type": "cohere"}, "an unquantised safetensors checkpoint"),
    ],
)
def test_a_quantised_model_is_told_of_forms_that_are_read(raw: dict[str, Any], forms: str) -> None:
    assert forms_to_take(raw) == forms


def test_a_quantisation_is_told_when_nothing_else_stands_against_the_model(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(KindError, match=r"\(gptq\); .*take a GGUF file or an unquantised safetensors checkpoint$"):
        read(tmp_path, "gpt2", **quantised)
    with pytest.raises(ConfigError, match="scale_attn_by_inverse_layer_idx is True"):
        read(tmp_path, "gpt2", **quantised, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ConfigError, match=r"layers of type linear_attention"):
        read(tmp_path, "gemma2", **quantised, layer_types=["linear_attention"] * 4)


def test_a_run_of_longrope_has_one_set_of_divisors() -> None:
    both = RopeScaling("longrope", original_max_position=32, divisors=(1.0, 2.0), long_divisors=(3.0, 4.0))
    assert both.for_context(32).divisors == (1.0, 2.0)
    assert both.for_context(33).divisors == (3.0, 4.0)
    assert both.for_context(33).for_context(8) == both.for_context(33)  # as what recomputes a short text needs it


def test_older_names_of_rotary_parameters(tmp_path: Path) -> None:
    old = read(tmp_path, "gpt-neox", rope_parameters=..., rotary_pct=0.5, rotary_emb_base=500)
    assert (old.rotated, old.rope_theta) == (8, 500)
    assert read(tmp_path, "gpt-neox", rope_parameters=...).rotated == 4  # a quarter by default
    gemma = read(
        tmp_path, "gemma3", rope_parameters=..., rope_theta=5e5, rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    assert (gemma.rope_theta, gemma.windowed_rope_theta) == (5e5, 2e4)
    assert gemma.rope_scaling == RopeScaling("linear", 8.0)
    assert read(tmp_path, "mixtral", rope_parameters=...).rope_theta == 1e6
    olmo = read(tmp_path, "olmo3", rope_parameters=..., rope_theta=7e4, rope_scaling={"rope_type": "yarn", "factor": 8})
    assert (olmo.rope_theta, olmo.windowed_rope_theta) == (7e4, 7e4)  # of which layers with a window are not scaled
    assert olmo.rope_scaling is not None
    assert read(tmp_path, "qwen3-moe", num_local_experts=..., num_experts=8).experts == Experts(8, 2)


def test_the_table_names_every_family_and_is_in_the_docs() -> None:
    table = format_models()
    for family in FAMILIES:
        assert f"{family.name} " in table
    assert table in (DOCS / "models.md").read_text()
    assert {options["model_type"] for options in TINY.values()} == set(BY_NAME)
    tested = {options["model_type"] for options in (*OTHERS.values(), *MORE_OTHERS.values())}
    assert tested == set(THROUGH_TRANSFORMERS)
