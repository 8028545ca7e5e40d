"""OpenVINO GenAI's continuous batching, stepped by hand; KV cache in fp16, arithmetic in the type that it chooses."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Answer, Cell, StepClock, serve

MAX_TOKENS, CACHE_GB = 4096, 4


def load(model: dict[str, str], threads: int):
    """The pipeline, compiled once."""
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs = CACHE_GB, 256
    scheduling.max_num_batched_tokens = MAX_TOKENS
    pipeline = genai.ContinuousBatchingPipeline(
        model["gguf"], scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "f16"}
    )
    vocab_size = int(model["vocab_size"])

    def run_cell(cell: Cell) -> Answer:
        config = genai.GenerationConfig(
            max_new_tokens=cell.most_tokens(MAX_TOKENS), ignore_eos=True, do_sample=False, eos_token_id=-1
        )
        prompts, clock = cell.prompts(vocab_size), StepClock(cell)
        handles = [
            pipeline.add_request(index, ov.Tensor(np.array([prompt], np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        begun: set[int] = set()
        while True:
            pipeline.step()
            if len(begun) < cell.batch:
                begun |= {index for index, handle in enumerate(handles) if index not in begun and handle.can_read()}
            if clock.step_done(len(begun)):
                break
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return clock.answer(list(handles[0].read_all()[0].generated_ids))

    return run_cell


serve(load)
