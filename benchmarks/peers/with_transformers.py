"""transformers: its model and its growing cache, stepped greedily; the type that the environment names."""

from __future__ import annotations

import os
import time

import torch
from protocol import Answer, Cell, serve
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 4096  # computed; where a cell has more, the cache of these is repeated for the other sequences


def load(model: dict[str, str], threads: int):
    """The model, read once."""
    torch.set_num_threads(threads)
    dtype = getattr(torch, os.environ.get("PEER_DTYPE", "float32"))
    network = AutoModelForCausalLM.from_pretrained(model["hf"], dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def run_cell(cell: Cell) -> Answer:
        computed = next(n for n in range(cell.batch, 0, -1)
                        if cell.batch % n == 0 and (n == 1 or n * cell.prompt_len <= PROMPT_TOKENS))  # fmt: skip
        prompts = torch.tensor(cell.prompts(network.config.vocab_size, computed))
        began = time.perf_counter()
        out = network(prompts, use_cache=True, logits_to_keep=1)
        prefill_s = time.perf_counter() - began
        cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        cache.batch_repeat_interleave(cell.batch // computed)
        tokens = tokens.repeat_interleave(cell.batch // computed, 0)
        first, began = [tokens[0].item()], time.perf_counter()
        for _ in range(cell.new_tokens - 1):
            tokens = network(tokens, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            first.append(tokens[0].item())
        decode_s = time.perf_counter() - began
        return Answer(cell.batch * (cell.new_tokens - 1) / decode_s, computed * cell.prompt_len / prefill_s, first)

    return run_cell


serve(load)
