"""Runs the same prompts under several configurations on the ranks it is started with; rank 0 writes results as JSON.

Usage: identity_program.py CHECKPOINT PROMPTS.json OUTPUT.json CONFIG.json
"""

import dataclasses
import json
import random
import sys
from pathlib import Path

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine, connect
from fastdecode_hpc.sequence import Request, SamplingParams


def main() -> None:
    checkpoint, prompts, output, configs = (Path(arg) for arg in sys.argv[1:])
    requests = [
        Request(entry["index"], None, entry["prompt"], params=SamplingParams(**entry["params"]))
        for entry in json.loads(prompts.read_text())
    ]
    world, results = None, {}
    for number, options in enumerate(json.loads(configs.read_text())):
        fixed = {"model": str(checkpoint), "kv_memory_bytes": 4 << 20, "threads": 1}
        run = RunConfig(**{"wire_dtype": "fp32", "kv_dtype": "fp32", **fixed, **options})
        world = world or connect(run)
        engine = Engine(run, world=world)
        shuffled = random.Random(number).sample(requests, len(requests))
        done = engine.generate(shuffled)
        results[json.dumps(options, sort_keys=True)] = {
            completion.request.index: [
                completion.token_ids,
                completion.finish_reason,
                completion.error,
                [dataclasses.astuple(one) for one in completion.logprobs or ()],
            ]
            for completion in done
        }
    if engine.is_s_rank:
        output.write_text(json.dumps(results))
    if world is not None:
        world.finalize()


if __name__ == "__main__":
    main()
