"""Tiny random checkpoints of every supported family, made with transformers, and a plain dense reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LLAMA = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Far above the usual 0.02: logits then lie units apart and a greedy choice is no near-tie.
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that tiny tests are beyond it
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4, "num_hidden_layers": 3},
    "llama3-rope-scaled": {"rope_parameters": _LLAMA3_ROPE, "max_position_embeddings": 256},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "mistral-window": {"sliding_window": 16, "head_dim": 24},
    "tied": {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"num_hidden_layers": 3},
}


def make_checkpoint(folder: str | Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint of a family into `folder` and return it.

    `overrides` replace fields of the transformers configuration. Norms and biases are random too, so that
    a forgotten or misplaced one shows.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    mistral = family.startswith("mistral")
    options = {**_LLAMA, **FAMILIES[family], **overrides}
    config = MistralConfig(**options) if mistral else LlamaConfig(**options)
    torch.manual_seed(seed)
    model = (MistralForCausalLM if mistral else LlamaForCausalLM)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.5)
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
