"""GGUF files of tiny checkpoints, as llama.cpp keeps them, with a vocabulary that it accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from fastdecode_hpc.families.known import BY_NAME
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.weight_targets import list_targets
from fastdecode_hpc.s_part.weight_tensors import describe
from fastdecode_hpc.s_part.weights import load_weights, read_model_config

# llama.cpp knows no windows of these families, no biases of Qwen3's attention, no other scales of Gemma's scores.
GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (
        "llama", "tied", "biases", "linear-rope", "qwen2", "qwen3-moe", "olmo2", "granite", "gemma", "phi3-partial",
        "phi3-long", "yarn-rope", "olmo3", "gpt-neox", "gpt-neox-serial", "gpt2",
    )},
    "mixtral": ("mixtral", {"sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": None}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "qwen3": ("qwen3", {"attention_bias": False}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24}),
    # llama.cpp lets the ramp of yarn end at whole frequencies, which this family doesn't.
    "gpt-oss": ("gpt-oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}  # fmt: skip


def write_twin(folder: Path, path: Path) -> ModelConfig:
    """Write the checkpoint in `folder` as the file `path`; the model."""
    config = read_model_config(folder)
    family = BY_NAME[config.architecture]
    assert family.gguf is not None
    weights = load_weights(folder, config, dtype=torch.float32, device=torch.device("cpu"))
    writer = gguf.GGUFWriter(path, family.gguf.architecture)
    add_sizes(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    for target in list_targets(config, family.gguf.names, weights):
        values = target.place.reshape(target.shape).numpy()
        if config.norm == "rms-plus-one" and target.is_norm:
            values = values + 1  # such files keep the weights themselves
        writer.add_tensor(target.name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def add_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Write the metadata of a model."""
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    (writer.add_layer_norm_eps if config.norm == "layer" else writer.add_layer_norm_rms_eps)(config.norm_eps)
    if config.rotated:
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_rope_dimension_count(config.rotated)
    if config.experts is None:
        writer.add_feed_forward_length(config.intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.per_token)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position)
        writer.add_rope_scaling_attn_factors(config.rope_scaling.attention_factor)
        writer.add_tensor("rope_factors_short.weight", np.array(config.rope_scaling.divisors, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(config.rope_scaling.long_divisors, np.float32))
    if config.rope_scaling is not None and config.rope_scaling.kind == "yarn":
        scaling = config.rope_scaling
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if config.attention_softcap is not None:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.logit_softcap is not None:
        writer.add_final_logit_softcapping(config.logit_softcap)
    if config.architecture == "gpt_neox":
        writer.add_parallel_residual(config.parallel)
    if config.architecture == "granite":
        writer.add_attention_scale(config.score_scale)
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(config.logit_divisor)


def _add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Words of ASCII, so that each is whole text."""
    tokens = ["a", "b", "ab", *(f"<{place}>" for place in range(3, vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)


def make_q4_gguf(path: Path, config: ModelConfig) -> None:
    """A Q4_0 file of random blocks: quantising this many numbers would take long."""
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    rng = np.random.default_rng(0)
    for target in list_targets(config, BY_NAME["llama"].gguf.names, describe(config, torch.float32)):
        if len(target.shape) == 1:
            writer.add_tensor(target.name, np.ones(target.shape, np.float32))
            continue
        rows, columns = target.shape
        blocks = rng.integers(0, 256, (rows, columns // 32, 18), np.uint8)
        blocks[:, :, :2] = np.array([0.01], np.float16).view(np.uint8)
        writer.add_tensor(target.name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
