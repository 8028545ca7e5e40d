"""Models that neither kind of S-Part can run, told by their config.json: what they have that isn't computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastdecode_hpc.config import ConfigError, show

_MLA = "latent attention (MLA), whose cache holds no keys and values of heads"
_CROSS = "cross-attention, to keys and values of another input than the text"
_STATE = "state-space or other recurrent layers, whose state is no cache of keys and values"
_LINEAR = "linear attention, whose state is no cache of keys and values"
_ALIBI = "ALiBi, which adds to scores by distance"
_CHUNKED = "attention within chunks of the text, which is neither full nor a sliding window"
_SPARSE = "sparse attention, which reads tokens that an index picks"
_MEDIA = "inputs other than text"

_BY_TYPE = {
    _MLA: ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "glm4_moe_lite", "youtu"),
    _CROSS: (
        "t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "whisper",
        "trocr", "mllama", "mllama_text_model", "blt",
    ),
    _STATE: (
        "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2",
        "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe", "zaya",
    ),
    _LINEAR: ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "minimax",
              "olmo_hybrid", "bailing_hybrid"),
    _ALIBI: ("bloom", "mpt"),
    _CHUNKED: ("llama4", "llama4_text"),
}  # fmt: skip
_BY_LAYER = {
    "linear_attention": _LINEAR,
    "chunked_attention": _CHUNKED,
    **dict.fromkeys(("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"), _SPARSE),
    **dict.fromkeys(("compressed_sparse_attention", "minimax_m3_sparse"), _SPARSE),
    **dict.fromkeys(("mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"), _STATE),
    "full_attention": "",
    "sliding_attention": "",
    "attention": "",
}
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
_STATE_KEYS = ("mamba_", "ssm_", "rwkv_", "lru_", "conv_L_cache", "state_size")
_LINEAR_KEYS = ("linear_conv_", "linear_num_", "linear_attn_")


class KindError(ConfigError):
    """One kind of S-Part can't run a model that another may."""


def reason_to_refuse(raw: Mapping[str, Any]) -> str:
    """What a model has that no S-Part and no R-worker can compute; empty: nothing that config.json shows.

    Parameters
    ----------
    raw : mapping
        What config.json holds; values may be of any kind.
    """
    return next(_reasons(raw), "")


def _reasons(raw: Mapping[str, Any]) -> Iterator[str]:
    kind = raw.get("model_type")
    yield from (reason for reason, kinds in _BY_TYPE.items() if isinstance(kind, str) and kind in kinds)
    if raw.get("kv_lora_rank") is not None:
        yield _MLA
    if any(raw.get(key) for key in ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers")):
        yield _CROSS
    layers = [raw[key] for key in _LAYER_KEYS if raw.get(key)]
    for listed in layers:
        yield from filter(None, (_of_layer(name) for name in listed if isinstance(listed, list)))
        if not isinstance(listed, list):
            yield _STATE  # a pattern of letters
    if not layers:
        yield from (_STATE for key in raw if key.startswith(_STATE_KEYS))
        yield from (_LINEAR for key in raw if key.startswith(_LINEAR_KEYS))
    if raw.get("alibi") is True:
        yield _ALIBI
    if raw.get("index_topk") is not None:
        yield _SPARSE
    if any(raw.get(key) is not None for key in ("vision_config", "audio_config", "text_config")):
        yield _MEDIA


def _of_layer(name: Any) -> str:
    other = f"layers of type {show(name)}, which may be neither full nor sliding attention"
    return _BY_LAYER.get(name, other) if isinstance(name, str) else ""
