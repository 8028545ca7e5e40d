"""Completes the same ragged prompts with many tiny checkpoints, on the ranks it is started with; rank 0 writes tokens.

Usage: families_program.py PROMPTS.json OUTPUT.json KIND-OF-S-PART CHECKPOINT...
"""

import json
import sys
from pathlib import Path

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine, connect
from fastdecode_hpc.sequence import Request, SamplingParams

OPTIONS = {
    "wire_dtype": "fp32", "kv_dtype": "fp32", "kv_memory_bytes": 4 << 20, "threads": 1, "max_batch_size": 4,
    "prefill_chunk_tokens": 32,
}  # fmt: skip


def main() -> None:
    prompts, output, checkpoints = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[4:]
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    world, results = None, {}
    for checkpoint in checkpoints:
        run = RunConfig(model=checkpoint, s_part=sys.argv[3], **OPTIONS)
        world = world or connect(run)
        engine = Engine(run, world=world)
        requests = [Request(index, None, prompt, params=params) for index, prompt in enumerate(prompts)]
        done = sorted(engine.generate(requests), key=lambda completion: completion.request.index)
        results[Path(checkpoint).name] = [completion.token_ids for completion in done]
    if engine.is_s_rank:
        output.write_text(json.dumps(results))
    if world is not None:
        world.finalize()


if __name__ == "__main__":
    main()
