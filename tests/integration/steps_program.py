"""Runs sequences of given lengths under several configurations; rank 0 writes what each step held as JSON.

Usage: steps_program.py CHECKPOINT LENGTHS.json CONFIGS.json OUTPUT.json
"""

import json
import sys
from pathlib import Path

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine, connect
from fastdecode_hpc.results import Hooks
from fastdecode_hpc.sequence import Request, SamplingParams


def main() -> None:
    checkpoint, lengths, configs, output = (Path(arg) for arg in sys.argv[1:])
    world, results = None, []
    for options in json.loads(configs.read_text()):
        run = RunConfig(model=str(checkpoint), threads=1, r_worker_weights="equal", **options)
        world = world or connect(run)
        engine, steps = Engine(run, world=world), []
        requests = (
            Request(index, None, [1] * prompt, params=SamplingParams(max_new_tokens=new, ignore_eos=True))
            for index, (prompt, new) in enumerate(json.loads(lengths.read_text()))
        )
        engine.run(requests, Hooks(lambda completion: None, on_step=steps.append))
        results.append(
            [[s.step, s.slot, s.num_rows, s.load_tokens, s.prefill_tokens, list(s.rank_loads.values())] for s in steps]
        )
    if engine.is_s_rank:
        output.write_text(json.dumps(results))
    if world is not None:
        world.finalize()


if __name__ == "__main__":
    main()
