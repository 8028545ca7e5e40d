"""Tiny valid model files as bytes, made by hand so that every field of them can be given a wrong value."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 16,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": [2],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip

# GGUF name, name in safetensors, shape.
TENSORS = [
    ("token_embd.weight", "model.embed_tokens.weight", (16, 16)),
    ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", (16,)),
    ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", (16, 16)),
    ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", (8, 16)),
    ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", (8, 16)),
    ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", (16, 16)),
    ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", (16,)),
    ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", (24, 16)),
    ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", (24, 16)),
    ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", (16, 24)),
    ("output_norm.weight", "model.norm.weight", (16,)),
    ("output.weight", "lm_head.weight", (16, 16)),
]

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10  # GGUF's types of metadata
TOKENS = ["<unk>", "<s>", "</s>", "▁", *"abcdefghi", "ab", "▁a", "▁ab"]


def size_of(shape: Iterable[int]) -> int:
    """Bytes of a float32 tensor."""
    count = 1
    for dimension in shape:
        count *= dimension
    return 4 * count


# -- GGUF


def gguf_string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: int, value: Any) -> bytes:
    """A value without its type; an array is ``(kind of items, items)``."""
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        return struct.pack("<IQ", value[0], len(value[1])) + b"".join(gguf_value(value[0], item) for item in value[1])
    return struct.pack({U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q", 5: "<i"}[kind], value)


def gguf_metadata(**changes: Any) -> dict[str, tuple[int, Any]]:
    """Metadata of the tiny model by key, as ``(type, value)``; `changes` have ``__`` in place of dots, None removes."""
    pairs = {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (U32, 1),
        "llama.context_length": (U32, 64),
        "llama.embedding_length": (U32, 16),
        "llama.feed_forward_length": (U32, 24),
        "llama.attention.head_count": (U32, 2),
        "llama.attention.head_count_kv": (U32, 1),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.dimension_count": (U32, 8),
        "llama.rope.freq_base": (F32, 10000.0),
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [-float(place) for place in range(16)])),
        "tokenizer.ggml.token_type": (ARRAY, (5, [2, 3, 3, *[1] * 13])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.unknown_token_id": (U32, 0),
        "tokenizer.chat_template": (STRING, "{{ messages[0]['content'] }}"),
    }
    pairs |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in pairs.items() if value is not None}


def gguf_tensor(name: str | bytes, shape: Iterable[int], offset: int, kind: int = 0) -> bytes:
    """The description of a tensor; `shape` has the slowest dimension first, `kind` 0 is float32."""
    dims = list(shape)[::-1]
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_tensors() -> list[bytes]:
    """The descriptions of the tiny model's tensors, whose data stand one after the other."""
    described, offset = [], 0
    for name, _, shape in TENSORS:
        described.append(gguf_tensor(name, shape, offset))
        offset += size_of(shape)
    return described


def gguf_file(
    metadata: dict[str, tuple[int, Any]] | None = None,
    tensors: list[bytes] | None = None,
    *,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    data_bytes: int | None = None,
    extra: bytes = b"",
) -> bytes:
    """A whole file: by default the tiny model, its weights the bytes 0 to 255 in turn.

    `extra` stands behind the metadata; `num_pairs` and `num_tensors` are what the file claims.
    """
    metadata = gguf_metadata() if metadata is None else metadata
    tensors = gguf_tensors() if tensors is None else tensors
    pairs = [
        gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value) for key, (kind, value) in metadata.items()
    ]
    claimed_tensors = len(tensors) if num_tensors is None else num_tensors
    claimed_pairs = len(pairs) if num_pairs is None else num_pairs
    head = (
        struct.pack("<4sIQQ", b"GGUF", 3, claimed_tensors, claimed_pairs) + b"".join(pairs) + extra + b"".join(tensors)
    )
    return head + b"\0" * (-len(head) % 32) + weights(data_bytes)


def weights(num_bytes: int | None = None) -> bytes:
    """Finite float32 numbers."""
    total = sum(size_of(shape) for *_, shape in TENSORS) if num_bytes is None else num_bytes
    return (struct.pack("<f", 0.5) * (total // 4 + 1))[:total]


# -- safetensors


def safetensors_header(**changes: Any) -> dict[str, Any]:
    """The header of the tiny model; `changes` replace descriptions of tensors, by GGUF name with ``_`` for dots."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for short, name, shape in TENSORS:
        info = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size_of(shape)]}
        header[name] = changes.get(short.replace(".", "_"), info)
        offset += size_of(shape)
    return header


def safetensors_file(header: Any = None, *, header_bytes: int | None = None, data_bytes: int | None = None) -> bytes:
    """A whole file: by default the tiny model; `header` may be bytes, `header_bytes` what the file claims."""
    header = safetensors_header() if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(text) if header_bytes is None else header_bytes
    return struct.pack("<Q", claimed) + text + weights(data_bytes)


def index_file(**places: Any) -> bytes:
    """``model.safetensors.index.json`` of the tiny model in one shard; `places` are added."""
    weight_map = {name: "model-00001-of-00001.safetensors" for _, name, _ in TENSORS}
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": {**weight_map, **places}}).encode()


def config_file(**changes: Any) -> bytes:
    """``config.json`` of the tiny model."""
    return json.dumps({**CONFIG, **changes}).encode()
