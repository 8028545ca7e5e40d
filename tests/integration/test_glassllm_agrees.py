"""A second author's Llama: the trained model that glassllm ships, its steps layer by layer, and its greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.weights import load_weights, read_model_config
from launching import run_ranks

glassllm = pytest.importorskip("glassllm")

TEXTS = ("Alice was beginning to get very tired", "The Queen", '"What a curious feeling!" said')
NUM_TOKENS = 64
PROGRAM = Path(__file__).with_name("families_program.py")


@pytest.fixture(scope="module")
def original() -> tuple[Any, Any]:
    """Model and tokenizer."""
    return glassllm.load_pretrained("en")


@pytest.fixture(scope="module")
def checkpoint(original, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(original[0], tmp_path_factory.mktemp("glassllm"))


def write_checkpoint(model: Any, folder: Path) -> Path:
    """The model as a Llama folder. Its matrices are [in, out], and its rotary pairs stand side by side."""
    from safetensors.numpy import save_file

    cfg, own = model.cfg, {name: parameter.data for name, parameter in model.named_parameters().items()}
    halves = [("self_attn.q_proj", "attn.W_Q", cfg.n_heads), ("self_attn.k_proj", "attn.W_K", cfg.n_kv_heads)]
    whole = [
        ("self_attn.v_proj", "attn.W_V"), ("self_attn.o_proj", "attn.W_O"), ("mlp.gate_proj", "ffn.W1"),
        ("mlp.up_proj", "ffn.W3"), ("mlp.down_proj", "ffn.W2"), ("input_layernorm", "norm1.gamma"),
        ("post_attention_layernorm", "norm2.gamma"),
    ]  # fmt: skip
    tensors = {"model.embed_tokens.weight": own["E"], "model.norm.weight": own["norm_f.gamma"]}
    for i in range(cfg.n_layers):
        layer, block = f"model.layers.{i}.", f"blocks.{i}."
        for name, source, heads in halves:
            tensors[f"{layer}{name}.weight"] = in_halves(own[block + source].T, heads)
        for name, source in whole:
            tensors[f"{layer}{name}.weight"] = own[block + source].T
    save_file({name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model, "intermediate_size": own["blocks.0.ffn.W1"].shape[1],
        "num_hidden_layers": cfg.n_layers, "num_attention_heads": cfg.n_heads, "num_key_value_heads": cfg.n_kv_heads,
        "max_position_embeddings": cfg.max_len, "rms_norm_eps": cfg.eps, "rope_theta": cfg.rope_base,
        "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of pairs that stand side by side, as rows of two halves of a head."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def trace(model: Any, ids: list[int]) -> Any:
    tracer = glassllm.Tracer()
    with glassllm.no_grad():
        model.forward(ids, trace=tracer)
    return tracer


def of_heads(tracer: Any, step: str, layer: int, *, halved: bool = False) -> np.ndarray:
    """A step's [heads, tokens, head_dim] as our rows [tokens, size]."""
    value = tracer.get(step, layer).value
    if halved:
        value = value.reshape(*value.shape[:2], -1, 2).swapaxes(2, 3).reshape(value.shape)
    return value.swapaxes(0, 1).reshape(value.shape[1], -1)


def near(got: Tensor, wanted: np.ndarray, what: str) -> None:
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-5 * scale, err_msg=what)


@pytest.mark.parametrize("text", TEXTS)
def test_every_step_of_every_layer_is_that_of_its_tracer(original, checkpoint: Path, text: str) -> None:
    model, tokenizer = original
    ids = tokenizer.encode(text)
    tracer, cpu = trace(model, ids), torch.device("cpu")
    config = read_model_config(checkpoint)
    weights = load_weights(checkpoint, config, dtype=torch.float32, device=cpu)
    s_part = SPart(config, weights, device=cpu, dtype=torch.float32, batch_invariant=False)
    positions = torch.arange(len(ids))
    hidden = s_part.embed(torch.tensor(ids), positions)
    near(hidden, tracer.get("embed").value, "embedding")
    for layer in range(config.num_layers):
        qkv = s_part.pre_attention(layer, hidden, positions)
        q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=1)
        near(q, of_heads(tracer, "attn.rope_q", layer, halved=True), f"q of layer {layer}")
        near(k, of_heads(tracer, "attn.rope_k", layer, halved=True), f"k of layer {layer}")
        near(v, of_heads(tracer, "attn.v", layer), f"v of layer {layer}")
        o = s_part.prefill_attention(layer, q, k, v, 0)
        near(o, of_heads(tracer, "attn.mix", layer), f"attention of layer {layer}")
        hidden = s_part.post_attention(layer, hidden, o)
        near(hidden, tracer.get("resid.ffn", layer).value, f"layer {layer}")
    near(s_part.logits(hidden), tracer.get("logits").value, "logits")


@pytest.mark.parametrize("ranks", [1, 3])
def test_greedy_text_is_that_of_its_own_cache(original, checkpoint: Path, ranks: int, tmp_path: Path) -> None:
    model, tokenizer = original
    prompts, output = [tokenizer.encode(text) for text in TEXTS], tmp_path / "out.json"
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    done = run_ranks(ranks, [str(PROGRAM), str(tmp_path / "prompts.json"), str(output), "native", str(checkpoint)])
    assert done.returncode == 0, done.stderr[-3000:]
    (texts,) = json.loads(output.read_text()).values()
    wanted = [[step.token for step in model.generate(ids, NUM_TOKENS, greedy=True)] for ids in prompts]
    assert texts == wanted
