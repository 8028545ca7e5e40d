"""Runs the same prompts with links of given speed; rank 0 writes tokens, and rows of each R-worker, as JSON.

Usage: slow_links_program.py CHECKPOINT PROMPTS.json OUTPUT.json CASES.json

A case is [options of RunConfig, {rank: [bytes_per_s, latency_s]}].
"""

import json
import sys
from pathlib import Path

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine, connect
from fastdecode_hpc.results import Hooks
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.transport.slow_link import SlowLink


def main() -> None:
    checkpoint, prompts, output, cases = (Path(arg) for arg in sys.argv[1:])
    world, results = None, []
    for options, links in json.loads(cases.read_text()):
        run = RunConfig(model=str(checkpoint), kv_memory_bytes=4 << 20, threads=1, **options)
        world = world or connect(run)
        slow_links = {int(rank): SlowLink(*speeds) for rank, speeds in links.items()}
        engine = Engine(run, world=world, slow_links=slow_links)
        requests = (
            Request(index, None, prompt, params=SamplingParams(max_new_tokens=new, ignore_eos=True))
            for index, (prompt, new) in enumerate(json.loads(prompts.read_text()))
        )
        done, steps = [], []
        stats = engine.run(requests, Hooks(done.append, on_step=steps.append))
        if engine.is_s_rank:
            results.append(
                {
                    "tokens": {one.request.index: one.token_ids for one in done},
                    "rows": [step.rank_rows for step in steps],
                    "links": [{rank: one.t_link for rank, one in step.ranks.items()} for step in steps],
                    "shares": stats.shares.ideal(),
                    "told": stats.shares.describe(),
                }
            )
    if engine.is_s_rank:
        output.write_text(json.dumps(results))
    if world is not None:
        world.finalize()


if __name__ == "__main__":
    main()
