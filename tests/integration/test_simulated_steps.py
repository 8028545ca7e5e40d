"""A simulated run holds in every step of every slot what the real run does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_config import read_model_shape
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.planner.profile import load_profile
from fastdecode_hpc.planner.simulate import Simulation
from launching import run_ranks
from tiny_models import make_checkpoint

PROGRAM = Path(__file__).with_name("steps_program.py")
CONFIGS = [
    {"max_batch_size": 8, "kv_memory_bytes": 1 << 20},
    {"max_batch_size": 12, "num_slots": 3, "max_prefill_tokens": 24, "kv_memory_bytes": 1 << 20},
    {"max_batch_size": 32, "kv_memory_bytes": 200_000},  # the cache is what limits
    {"max_batch_size": 10, "schedule": "load-stabilizing", "kv_memory_bytes": 1 << 20},
    {"max_batch_size": 9, "schedule": "load-stabilizing", "start_interval": 2, "load_limit": 300,
     "kv_memory_bytes": 1 << 20},
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["llama", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_steps_are_those_of_the_real_run(tmp_path: Path, ranks: int, kind: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", kind)
    rng = random.Random(ranks)
    lengths = [(rng.randint(1, 60), rng.randint(1, 40)) for _ in range(40)]
    files = [tmp_path / name for name in ("lengths.json", "configs.json", "steps.json")]
    files[0].write_text(json.dumps(lengths))
    files[1].write_text(json.dumps(CONFIGS))
    done = run_ranks(ranks, [str(PROGRAM), str(checkpoint), *map(str, files)], timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    model = read_model_shape(checkpoint)
    for options, real in zip(CONFIGS, json.loads(files[2].read_text()), strict=True):
        config = RunConfig(r_worker_weights="equal", **options)
        run = Simulation(load_profile("a10-epyc7452"), model, config, num_workers=max(1, ranks - 1))
        simulated = run.run(Lengths(*entry) for entry in lengths)
        steps = [
            [s.step, s.slot, s.num_rows, s.load_tokens, s.prefill_tokens, list(s.rank_loads.values())]
            for s in simulated.steps
        ]
        assert steps == real, options
