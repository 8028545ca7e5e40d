"""The families that are computed, one description each. A new one is a new entry, and a line in its test's list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode_hpc.families.description import ExpertKeys, Family, GGUFForm, Key, Rotary, WeightNames, Window

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
}


def _activation(name: str = "hidden_act", default: str = "silu") -> Key:
    return Key(name, default, _ACTIVATIONS)


def _sizes(*, kv_heads: int = 0, head_dim: int = 0, max_positions: int = 2048) -> dict[str, Any]:
    """The sizes under their usual keys; 0 KV heads: as many as heads; head_dim 0: hidden_size / heads."""
    return {
        "vocab_size": Key("vocab_size"),
        "hidden_size": Key("hidden_size"),
        "intermediate_size": Key("intermediate_size"),
        "num_layers": Key("num_hidden_layers"),
        "num_heads": Key("num_attention_heads"),
        "num_kv_heads": Key("num_key_value_heads", kv_heads),
        "head_dim": Key("head_dim", head_dim),
        "max_context_len": Key("max_position_embeddings", max_positions),
    }


def _llama_like(eps: float = 1e-6, *, tied: bool = False, **sizes: int) -> dict[str, Any]:
    """RMS norms before a gated MLP with SiLU."""
    return {
        **_sizes(**sizes),
        "norm_eps": Key("rms_norm_eps", eps),
        "tie_embeddings": Key("tie_word_embeddings", tied),
        "activation": _activation(),
    }


_ALL_ATTENTION_BIASES = {"attention_bias": Key("attention_bias", False), "output_bias": Key("attention_bias", False)}
_MLP_BIAS = {"mlp_bias": Key("mlp_bias", False)}

_GGUF_NAMES = WeightNames(
    prefix="",
    embedding="token_embd",
    positions="position_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    attention_out_norm="post_attention_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    output="attn_output",
    mlp_norm="ffn_norm",
    mlp_out_norm="post_ffw_norm",
    router="ffn_gate_inp",
    mlp_inputs=("ffn_gate", "ffn_up"),
    down="ffn_down",
    ignored=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)
_GGUF_PERMUTED = replace(_GGUF_NAMES, permuted_qk=True)
_GGUF_FUSED_UP = replace(_GGUF_NAMES, qkv=("attn_qkv",), mlp_inputs=("ffn_up",))
_GGUF_UP = replace(_GGUF_NAMES, mlp_inputs=("ffn_up",))
_GGUF_EXPERTS = replace(_GGUF_NAMES, mlp_inputs=("ffn_gate_exps", "ffn_up_exps"), down="ffn_down_exps")

_BOTH_NORMS = WeightNames(mlp_norm="pre_feedforward_layernorm")

_GEMMA: dict[str, Any] = {
    **_llama_like(tied=True, kv_heads=16, head_dim=256, max_positions=8192),
    **_ALL_ATTENTION_BIASES,
    "norm": "rms-plus-one",
    "embedding_scale": Key("hidden_size", power=0.5),
}
_QWEN = Window(default=4096, enabled_by="use_sliding_window", first=Key("max_window_layers", 28))

FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", "Llama 1/2/3, SmolLM2, TinyLlama, Yi",
        {**_llama_like(), **_ALL_ATTENTION_BIASES, **_MLP_BIAS},
        gguf=GGUFForm("llama", _GGUF_PERMUTED),
    ),
    Family(
        "mistral", "MistralForCausalLM", "Mistral 7B, Nemo, Small",
        _llama_like(kv_heads=8, max_positions=131072), window=Window(default=4096),
        gguf=GGUFForm("llama", _GGUF_PERMUTED),
    ),
    Family(
        "mixtral", "MixtralForCausalLM", "Mixtral 8x7B, 8x22B",
        _llama_like(1e-5, kv_heads=8, max_positions=131072), rotary=Rotary(theta=1e6), window=Window(),
        experts=ExpertKeys(Key("num_local_experts", 8), Key("num_experts_per_tok", 2)),
        names=WeightNames(
            router="block_sparse_moe.gate",
            mlp_inputs=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            down="block_sparse_moe.experts.{}.w2",
        ),
        gguf=GGUFForm("llama", replace(_GGUF_EXPERTS, permuted_qk=True)),
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM", "Qwen2, Qwen2.5",
        {**_llama_like(kv_heads=32, max_positions=32768), "attention_bias": True}, window=_QWEN,
        gguf=GGUFForm("qwen2", _GGUF_NAMES),
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", "Qwen3",
        {**_llama_like(kv_heads=32, head_dim=128, max_positions=32768), **_ALL_ATTENTION_BIASES, "qk_norm": "head"},
        window=_QWEN, gguf=GGUFForm("qwen3", _GGUF_NAMES),
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-30B-A3B, 235B-A22B",
        {
            **_llama_like(kv_heads=4, max_positions=32768), **_ALL_ATTENTION_BIASES, "qk_norm": "head",
            "intermediate_size": Key("moe_intermediate_size", 768),
        },
        window=Window(default=4096, enabled_by="use_sliding_window"),
        experts=ExpertKeys(
            Key("num_experts", 128, newer="num_local_experts"), Key("num_experts_per_tok", 8),
            normalised=Key("norm_topk_prob", False),
        ),
        names=WeightNames(
            mlp_inputs=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), down="mlp.experts.{}.down_proj"
        ),
        computed={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        gguf=GGUFForm("qwen3moe", _GGUF_EXPERTS),
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM", "gpt-oss 20b, 120b",
        {
            **_llama_like(1e-5, kv_heads=8, head_dim=64, max_positions=131072),
            "attention_bias": Key("attention_bias", True), "output_bias": Key("attention_bias", True),
            "mlp_bias": True, "activation": Key("hidden_act", "silu", {"silu": "clamped-swiglu"}),
            "attention_sinks": True,
        },
        rotary=Rotary(theta=150000.0), window=Window(default=128, period=Key("", 2)),
        experts=ExpertKeys(Key("num_local_experts", 128), Key("num_experts_per_tok", 4), router_bias=True),
        names=WeightNames(
            router="mlp.router", mlp_inputs=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj",
            fused_experts=True,
        ),
        computed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        gguf=GGUFForm(
            "gpt-oss", replace(_GGUF_EXPERTS, mlp_norm="post_attention_norm", sinks="attn_sinks.weight"),
            truncates_yarn=False,
        ),
    ),
    Family(
        "phi3", "Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4",
        _llama_like(1e-5, max_positions=4096), window=Window(),
        rotary=Rotary(share_key="partial_rotary_factor", longrope_names=("longrope", "su", "yarn")),
        names=WeightNames(qkv=("self_attn.qkv_proj",), mlp_inputs=("mlp.gate_up_proj",)),
        gguf=GGUFForm("phi3", _GGUF_FUSED_UP),
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", "OLMo 2",
        {**_llama_like(1e-5), **_ALL_ATTENTION_BIASES, "norm_place": "after", "qk_norm": "row"},
        gguf=GGUFForm("olmo2", _GGUF_NAMES),
    ),
    Family(
        "olmo3", "Olmo3ForCausalLM", "OLMo 3",
        {**_llama_like(1e-5), **_ALL_ATTENTION_BIASES, "norm_place": "after", "qk_norm": "row"},
        rotary=Rotary(theta=5e5, windowed_theta=5e5, windowed_key="rope_theta"),
        window=Window(default=4096, period=Key("", 4)),
        gguf=GGUFForm("olmo2", _GGUF_NAMES),
    ),
    Family(
        "granite", "GraniteForCausalLM", "Granite 3",
        {
            **_llama_like(), **_ALL_ATTENTION_BIASES, **_MLP_BIAS,
            "embedding_scale": Key("embedding_multiplier", 1.0), "residual_scale": Key("residual_multiplier", 1.0),
            "attention_scale": Key("attention_multiplier", 1.0), "logit_divisor": Key("logits_scaling", 1.0),
        },
        gguf=GGUFForm("granite", _GGUF_PERMUTED),
    ),
    Family(
        "starcoder2", "Starcoder2ForCausalLM", "StarCoder2",
        {
            **_llama_like(tied=True, kv_heads=2, max_positions=4096),
            "norm": "layer", "norm_eps": Key("norm_epsilon", 1e-5), "gated": False,
            "activation": _activation(default="gelu_pytorch_tanh"),
            "attention_bias": Key("use_bias", True), "output_bias": Key("use_bias", True),
            "mlp_bias": Key("use_bias", True),
        },
        window=Window(), names=WeightNames(mlp_inputs=("mlp.c_fc",), down="mlp.c_proj"),
        gguf=GGUFForm("starcoder2", _GGUF_UP),
    ),
    Family(
        "gemma", "GemmaForCausalLM", "Gemma 1",
        {**_GEMMA, "activation": Key("hidden_act", "gelu_pytorch_tanh", {**_ACTIVATIONS, "gelu": "gelu-tanh"})},
        computed={"use_bidirectional_attention": (False,)},
        gguf=GGUFForm("gemma", _GGUF_NAMES, {"norm": "rms"}),
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", "Gemma 2",
        {
            **_GEMMA, "num_kv_heads": Key("num_key_value_heads", 4), "norm_place": "both",
            "activation": _activation("hidden_activation", "gelu_pytorch_tanh"),
            "attention_scale": Key("query_pre_attn_scalar", 256, power=-0.5),
            "attention_softcap": Key("attn_logit_softcapping", 50.0),
            "logit_softcap": Key("final_logit_softcapping", 30.0),
        },
        window=Window(default=4096, period=Key("", 2)), names=_BOTH_NORMS,
        computed={"use_bidirectional_attention": (False,)},
        gguf=GGUFForm("gemma2", _GGUF_NAMES, {"norm": "rms"}, scaled_by_width=46),
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", "Gemma 3 (text)",
        {
            **_GEMMA, "num_kv_heads": Key("num_key_value_heads", 4), "norm_place": "both", "qk_norm": "head",
            "max_context_len": Key("max_position_embeddings", 131072),
            "activation": _activation("hidden_activation", "gelu_pytorch_tanh"),
            "attention_scale": Key("query_pre_attn_scalar", 256, power=-0.5),
            "attention_softcap": Key("attn_logit_softcapping", None),
            "logit_softcap": Key("final_logit_softcapping", None),
        },
        rotary=Rotary(theta=1e6, windowed_theta=10000.0),
        window=Window(default=4096, period=Key("sliding_window_pattern", 6)), names=_BOTH_NORMS,
        computed={"use_bidirectional_attention": (False,)},
        gguf=GGUFForm("gemma3", _GGUF_NAMES, {"norm": "rms"}, scaled_by_width=62),
    ),
    Family(
        "gpt_neox", "GPTNeoXForCausalLM", "Pythia, GPT-NeoX-20B",
        {
            **_sizes(), "norm": "layer", "norm_eps": Key("layer_norm_eps", 1e-5), "gated": False, "num_kv_heads": 0,
            "head_dim": 0, "activation": _activation(default="gelu"),
            "tie_embeddings": Key("tie_word_embeddings", False), "attention_bias": Key("attention_bias", True),
            "output_bias": Key("attention_bias", True), "mlp_bias": True,
            "parallel": Key("use_parallel_residual", True),
        },
        rotary=Rotary(theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct"),
        names=WeightNames(
            prefix="gpt_neox.", embedding="embed_in", final_norm="final_layer_norm", head="embed_out",
            qkv=("attention.query_key_value",), interleaved_qkv=True, output="attention.dense",
            mlp_inputs=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h",
            ignored=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
        ),
        gguf=GGUFForm("gptneox", _GGUF_FUSED_UP),
    ),
    Family(
        "gpt2", "GPT2LMHeadModel", "GPT-2",
        {
            "vocab_size": Key("vocab_size"), "hidden_size": Key("n_embd"), "num_layers": Key("n_layer"),
            "num_heads": Key("n_head"), "intermediate_size": Key("n_inner", 0), "num_kv_heads": 0, "head_dim": 0,
            "max_context_len": Key("n_positions", 1024), "norm": "layer", "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "gated": False, "activation": _activation("activation_function", "gelu_new"),
            "tie_embeddings": Key("tie_word_embeddings", True), "attention_bias": True, "output_bias": True,
            "mlp_bias": True,
        },
        rotary=None,
        names=WeightNames(
            prefix="transformer.", embedding="wte", positions="wpe", final_norm="ln_f", layer="h.{}.",
            attention_norm="ln_1", qkv=("attn.c_attn",), output="attn.c_proj", mlp_norm="ln_2",
            mlp_inputs=("mlp.c_fc",), down="mlp.c_proj", is_transposed=True,
            ignored=(".attn.bias", ".attn.masked_bias"),
        ),
        computed={
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        },
        gguf=GGUFForm("gpt2", _GGUF_FUSED_UP),
    ),
    Family(
        "opt", "OPTForCausalLM", "OPT 125m to 175b",
        {
            **_sizes(), "intermediate_size": Key("ffn_dim"), "num_kv_heads": 0, "head_dim": 0, "norm": "layer",
            "norm_place": Key("do_layer_norm_before", True, {True: "before", False: "sum"}),
            "final_norm": Key("do_layer_norm_before", True), "gated": False,
            "activation": _activation("activation_function", "relu"),
            "tie_embeddings": Key("tie_word_embeddings", True), "attention_bias": Key("enable_bias", True),
            "output_bias": Key("enable_bias", True), "mlp_bias": Key("enable_bias", True), "position_offset": 2,
            "embedding_size": Key("word_embed_proj_dim", None),
        },
        rotary=None,
        names=WeightNames(
            prefix="model.decoder.", final_norm="final_layer_norm", attention_norm="self_attn_layer_norm",
            output="self_attn.out_proj", mlp_norm="final_layer_norm", mlp_inputs=("fc1",), down="fc2",
        ),
        computed={"layer_norm_elementwise_affine": (True,), "_remove_final_layer_norm": (False,)},
    ),
)  # fmt: skip

BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
