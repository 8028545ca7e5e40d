"""Tiny random checkpoints of every supported family, made with transformers, and a plain dense reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Far above the usual 0.02: logits then lie units apart and a greedy choice is no near-tie.
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that tiny tests are beyond it
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 3}
_QWEN3_MOE = {
    "model_type": "qwen3_moe", **_EXPERTS, "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 24,
    "norm_topk_prob": True,
}  # fmt: skip
_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_OPT = {"model_type": "opt", "ffn_dim": 96, "init_std": 0.25}
_GEMMA = {"head_dim": 24, "tie_word_embeddings": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-mha": {**_LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "llama3-rope-scaled": {**_LLAMA, "rope_parameters": _LLAMA3_ROPE, "max_position_embeddings": 256},
    "linear-rope": {**_LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "dynamic-rope": {**_LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn-rope": {**_LLAMA, "rope_parameters": _YARN_ROPE, "max_position_embeddings": 256},
    "mistral-window": {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 16, "head_dim": 24},
    "tied": {**_LLAMA, "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1},
    "biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "sharded": {**_LLAMA, "num_hidden_layers": 3},
    "mixtral": {"model_type": "mixtral", **_EXPERTS, "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-windows": {
        "model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3-moe": _QWEN3_MOE,
    "qwen3-moe-shares": {**_QWEN3_MOE, "norm_topk_prob": False},
    "gpt-oss": {
        "model_type": "gpt_oss", **_EXPERTS, "num_local_experts": 4, "intermediate_size": 32, "head_dim": 24,
        "sliding_window": 16, "rope_parameters": {**_YARN_ROPE, "truncate": False},
    },
    "phi3": {"model_type": "phi3", "sliding_window": 20},
    "phi3-long": {"model_type": "phi3", "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    "phi3-partial": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 16,
        "rope_parameters": {
            "full_attention": {**_YARN_ROPE, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
    },
    "granite": {
        "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
        "logits_scaling": 0.5, "attention_bias": True,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 16, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", **_GEMMA},
    "gemma2": {
        "model_type": "gemma2", **_GEMMA, "num_hidden_layers": 4, "sliding_window": 16, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 7, "sliding_window": 16,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt-neox": {"model_type": "gpt_neox"},
    "gpt-neox-serial": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    "gpt2": {**_GPT2, "tie_word_embeddings": True},
    "gpt2-inner": {**_GPT2, "n_inner": 80, "tie_word_embeddings": True, "activation_function": "relu"},
    "opt": {**_OPT, "tie_word_embeddings": True},
    "opt-350m": {**_OPT, "tie_word_embeddings": True, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
}  # fmt: skip

# Of no native family, so run by transformers' own code.
_COHERE = {"logit_scale": 0.5, "tie_word_embeddings": True}
_GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8}
_FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "glm4": {"model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "cohere": {"model_type": "cohere", **_COHERE, "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", **_COHERE, "sliding_window": 16, "num_hidden_layers": 5},
    "nemotron": {"model_type": "nemotron", "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 0, 1], "num_hidden_layers": 4},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 24},
    "exaone4": {"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 4, "num_hidden_layers": 5},
    "gptj": {"model_type": "gptj", **_GPTJ},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
}  # fmt: skip
# The same, tried where there is more time.
MORE_OTHERS: dict[str, dict[str, Any]] = {
    "glm": {"model_type": "glm", "head_dim": 16, "partial_rotary_factor": 0.5},
    "arcee": {"model_type": "arcee"},
    "apertus": {"model_type": "apertus"},
    "helium": {"model_type": "helium", "head_dim": 16},
    "olmo": {"model_type": "olmo", "clip_qkv": 1.5},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "persimmon": {"model_type": "persimmon"},
    "codegen": {"model_type": "codegen", **_GPTJ},
    "gpt_bigcode": {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "ministral": {"model_type": "ministral", "sliding_window": 16, "head_dim": 16},
    "vaultgemma": {
        "model_type": "vaultgemma", "head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0,
    },
    "granitemoe": {"model_type": "granitemoe", **_FOUR_EXPERTS},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"model_type": "phimoe", **_FOUR_EXPERTS, "sliding_window": 16},
    "glm4_moe": {
        "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "head_dim": 16, "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_layer_start_index": 1, "num_hidden_layers": 3,
    },
    "gemma3n": {
        "model_type": "gemma3n_text", "head_dim": 24, "num_hidden_layers": 6, "sliding_window": 16,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, *[0.0] * 5], "intermediate_size": [96] * 6,
        "final_logit_softcapping": 20.0,
    },
    "minimax_m2": {"model_type": "minimax_m2", **_FOUR_EXPERTS, "head_dim": 16},
}  # fmt: skip


def tiny_options(family: str, **overrides: Any) -> dict[str, Any]:
    """Fields of the transformers configuration of a tiny model."""
    return {**_SIZES, **{**FAMILIES, **OTHERS, **MORE_OTHERS}[family], **overrides}


def make_checkpoint(folder: str | Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint of a family into `folder` and return it.

    `overrides` replace fields of the transformers configuration. Norms and biases are random too, so that
    a forgotten or misplaced one shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options = tiny_options(family, **overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options)).float()
    centre = 0.0 if str(options["model_type"]).startswith("gemma") else 1.0  # Gemma keeps weights of norms less 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.5)
            elif parameter.ndim == 1:
                parameter.uniform_(centre - 0.5, centre + 0.5)
    model.save_pretrained(folder, max_shard_size="60KB" if family == "sharded" else "5GB")
    return Path(folder)


def load_reference(folder: str | Path) -> Any:
    """The checkpoint as a transformers model: float32, eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Logits at every position, ``[len(token_ids), vocab_size]`` float32, from one pass without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


def reference_greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """The most likely continuation, every token from a full pass; end-of-sequence tokens are ignored."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt_ids) :]


def random_prompt(length: int, vocab_size: int = 320, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def mixed_requests(seed: int = 1) -> list[dict]:
    """40 requests: short and long prompts (several chunks), greedy and sampled, different lengths of output."""
    rng = random.Random(seed)
    requests = []
    for index in range(40):
        params = {"max_new_tokens": rng.choice([1, 2, 9, 20, 33])}
        if index % 3 == 1:
            params |= {"temperature": 0.9, "top_p": 0.9, "seed": index}
        if index % 6 == 2:
            params |= {"temperature": 1.2, "top_k": 7, "repetition_penalty": 1.3}
        if index % 5 == 3:
            params |= {"presence_penalty": 0.8, "frequency_penalty": 0.5, "logit_bias": [[7, 1.5]]}
        prompt = random_prompt(rng.choice([1, 3, 17, 32, 33, 70, 150]), seed=index)
        requests.append({"index": index, "prompt": prompt, "params": params})
    return requests
