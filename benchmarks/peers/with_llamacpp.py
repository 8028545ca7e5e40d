"""llama.cpp: one server slot a sequence, one computed prompt copied to all of them."""

from __future__ import annotations

import os
from pathlib import Path

from protocol import Answer, Cell, serve

from fastdecode_hpc.bench.peers_llamacpp import LlamaServer


def load(model: dict[str, str], threads: int):
    """A server for each cell: its slots have the cell's number and room."""
    variant = os.environ.get("LLAMACPP_VARIANT", "flash attention")

    def run_cell(cell: Cell) -> Answer:
        prompt = cell.prompts(int(model["vocab_size"]), 1)[0]
        server = LlamaServer(
            Path(model["gguf"]), prompt, num_slots=cell.batch, num_threads=threads, variant=variant,
            num_steps=cell.new_tokens,
        )  # fmt: skip
        return Answer(server.decode(), server.prefill_tokens_per_s, [])  # it answers with text alone

    return run_cell


serve(load)
