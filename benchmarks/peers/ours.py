"""fastdecode_hpc in one process: one slot, as nothing overlaps there."""

from __future__ import annotations

import dataclasses
import os
import time

from protocol import Answer, Cell, serve

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.results import Hooks
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes


def load(model: dict[str, str], threads: int):
    """One engine, and so one KV cache, for all cells."""
    run = RunConfig(
        model=model["hf"], ranks=1, device="cpu", dtype=os.environ.get("OURS_DTYPE", "auto"), num_slots=1,
        max_batch_size=256, max_prefill_tokens=1 << 20, threads=threads,
    )  # fmt: skip
    engine = Engine(run)

    def run_cell(cell: Cell) -> Answer:
        prompts = cell.prompts(engine.setup.model.vocab_size)
        params = SamplingParams(max_new_tokens=cell.new_tokens, ignore_eos=True)
        requests = (Request(index, None, prompt, params=params) for index, prompt in enumerate(prompts))
        ends, done = [], []

        def on_step(times: StepTimes) -> None:
            if times.num_rows == cell.batch:
                ends.append(time.perf_counter())

        engine.run(requests, Hooks(done.append, on_step=on_step), dataclasses.replace(run, max_batch_size=cell.batch))
        prefill_s = max(completion.t_first_token_s for completion in done)
        first = next(completion for completion in done if completion.request.index == 0)
        decode = cell.batch * (len(ends) - 1) / (ends[-1] - ends[0])
        return Answer(decode, cell.batch * cell.prompt_len / prefill_s, list(first.token_ids))

    return run_cell


serve(load)
