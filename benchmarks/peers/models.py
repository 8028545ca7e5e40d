"""The models that peers are compared on, in each form that a peer reads: fp16 weights, the same in all."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fastdecode_hpc.model_config import read_model_shape
from fastdecode_hpc.model_files import resolve_model

SMALL = "llama-110m"  # 12 layers, hidden 768, 12 heads over 4 KV heads; the vocabulary of SmolLM2
MODELS = (SMALL, "smollm2")
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def make_model(name: str, folder: Path) -> dict[str, str]:
    """Paths of a model by form (``hf``, ``gguf``), written unless they are there, and its ``vocab_size``."""
    hf, file = folder / name, folder / f"{name}.gguf"
    source = resolve_model("smollm2")
    if not (hf / "config.json").is_file() or not file.is_file():
        network = (_random_llama() if name == SMALL else _dequantised(source)).half()
        network.save_pretrained(hf)
        write_gguf(file, network, source)
    vocab_size = LlamaConfig.from_pretrained(hf).vocab_size
    return {"hf": str(hf), "gguf": str(file), "vocab_size": str(vocab_size)}


def _random_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=0.06,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _dequantised(path: Path) -> PreTrainedModel:
    """The Llama with tied embeddings of a GGUF file."""
    model = read_model_shape(path)
    config = LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads, rms_norm_eps=model.norm_eps,
        num_key_value_heads=model.num_kv_heads, max_position_embeddings=model.max_context_len,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, tie_word_embeddings=True,
        bos_token_id=model.bos_token_id, eos_token_id=model.eos_token_ids[0],
    )  # fmt: skip
    network, tensors = LlamaForCausalLM(config), gguf.GGUFReader(path).tensors
    values = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    state = {
        name: torch.from_numpy(_rotation_order(name, values[_gguf_name(name)], config, to_gguf=False).copy())
        for name in network.state_dict()
        if name != "lm_head.weight"
    }
    network.load_state_dict(state, strict=False)
    network.tie_weights()
    return network


def write_gguf(path: Path, network: PreTrainedModel, tokenizer_of: Path) -> None:
    """Write a Llama with tied embeddings and the tokenizer of another GGUF file."""
    config, writer = network.config, gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for field in gguf.GGUFReader(tokenizer_of).fields.values():
        if field.name.startswith("tokenizer."):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[0] if inner else None)
    for name, weights in network.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*_tensor(name, weights, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor(name: str, weights: torch.Tensor, config: LlamaConfig) -> tuple[str, np.ndarray]:
    """Its name and values in a GGUF file; norms are fp32 there."""
    values = weights.numpy()
    if weights.ndim == 1:
        values = values.astype(np.float32)
    return _gguf_name(name), _rotation_order(name, values, config, to_gguf=True)


def _gguf_name(name: str) -> str:
    _, layers, rest = name.partition("model.layers.")
    if not layers:
        return NAMES[name]
    layer, _, kind = rest.partition(".")
    return f"blk.{layer}.{NAMES[kind]}"


def _rotation_order(name: str, values: np.ndarray, config: LlamaConfig, *, to_gguf: bool) -> np.ndarray:
    """Rows of q and k as the other form's rotation wants them: pairs side by side in GGUF files, else in halves."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            shape = (heads, 2, -1) if to_gguf else (heads, values.shape[0] // heads // 2, 2)
            return values.reshape(*shape, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values
