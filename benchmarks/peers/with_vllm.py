"""vLLM's CPU build, its engine stepped by hand in this process; the type that the environment names."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from protocol import Answer, Cell, StepClock, serve
from vllm import LLM, SamplingParams

MAX_TOKENS = 4096


def load(model: dict[str, str], threads: int):
    """The engine, compiled once."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, range(threads))))
    llm = LLM(
        model["hf"], dtype=os.environ.get("PEER_DTYPE", "float32"), skip_tokenizer_init=True, max_num_seqs=256,
        max_num_batched_tokens=MAX_TOKENS, max_model_len=8192, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    engine, vocab_size = llm.llm_engine, int(model["vocab_size"])

    def run_cell(cell: Cell) -> Answer:
        params = SamplingParams(
            max_tokens=cell.most_tokens(MAX_TOKENS), ignore_eos=True, temperature=0.0, detokenize=False
        )
        prompts, clock, begun, first, done = cell.prompts(vocab_size), StepClock(cell), set(), [], False
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                begun.add(output.request_id)
                if output.request_id == "0":
                    first = list(output.outputs[0].token_ids)
            done = done or clock.step_done(len(begun))
        return clock.answer(first)

    return run_cell


serve(load)
