"""An S-Part on a GPU gives the tokens of one on a CPU; skipped without a GPU."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.results import Hooks
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes
from launching import BIN, run_ranks
from tiny_models import make_checkpoint, mixed_requests, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.timeout(120),
]
PROGRAM = Path(__file__).parent.parent / "integration" / "identity_program.py"
GPU = {"device": "cuda", "dtype": "fp32", "prefill_chunk_tokens": 32}  # torch's products are without TF32 by default
CONFIGS = [
    {**GPU, "max_batch_size": 24},
    {**GPU, "max_batch_size": 24, "cuda_graphs": "off"},
    {**GPU, "max_batch_size": 9, "num_slots": 3},
]


def run(ranks: int, folder: Path, configs: list[dict]) -> list[dict]:
    """Results of all configurations, in order."""
    files = [folder / name for name in ("model", "prompts.json", f"out-{ranks}.json", "configs.json")]
    files[3].write_text(json.dumps(configs))
    done = run_ranks(ranks, [str(PROGRAM), *map(str, files)], timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "can't be recorded" not in done.stderr
    results = json.loads(files[2].read_text())
    return [results[json.dumps(config, sort_keys=True)] for config in configs]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A folder with checkpoint and prompts, greedy and sampled, and the tokens that a CPU gives."""
    folder = tmp_path_factory.mktemp("case")
    make_checkpoint(folder / "model")
    (folder / "prompts.json").write_text(json.dumps(mixed_requests()))
    return folder, run(1, folder, [{**GPU, "device": "cpu"}])[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tokens_are_those_of_a_cpu(case: tuple[Path, dict], ranks: int) -> None:
    if ranks > 1 and not ((BIN / "mpiexec").exists() or shutil.which("mpiexec")):
        pytest.skip("there is no mpiexec")
    folder, expected = case
    for config, result in zip(CONFIGS, run(ranks, folder, CONFIGS), strict=True):
        assert result == expected, f"{ranks} ranks, {config}"


def generate(folder: Path, on_step: Callable[[StepTimes], None], **options) -> int:
    """Complete 12 prompts on the GPU in one process; the number of tokens."""
    run_config = RunConfig(model=str(folder / "model"), kv_memory_bytes=4 << 20, threads=1, **{**GPU, **options})
    params = SamplingParams(
        max_new_tokens=20, temperature=0.8, top_p=0.9, logprobs=2, repetition_penalty=1.1, presence_penalty=0.5,
        logit_bias=((7, 1.0),),
    )  # fmt: skip
    requests = [Request(i, None, random_prompt(40, seed=i), params=params) for i in range(12)]
    with Engine(run_config) as engine:
        stats = engine.run(iter(requests), Hooks(lambda completion: None, on_step=on_step))
    assert stats is not None
    assert stats.num_errors == 0
    return stats.output_tokens


@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
def test_nothing_but_the_wait_for_tokens_stops_the_host(case, monkeypatch: pytest.MonkeyPatch, cuda_graphs) -> None:
    from fastdecode_hpc.s_part.worker import SWorker

    walk = SWorker._walk

    def strict_walk(worker: SWorker) -> None:
        torch.cuda.set_sync_debug_mode("error")  # raises at any call that synchronises behind our back
        try:
            walk(worker)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(SWorker, "_walk", strict_walk)
    assert generate(case[0], lambda times: None, cuda_graphs=cuda_graphs) > 100


def test_stages_are_replayed_as_graphs(case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or replay(graph))
    with caplog.at_level(logging.WARNING):
        generate(case[0], lambda times: None)
    assert len(replays) > 20
    assert "can't be recorded" not in caplog.text


def test_stage_times_are_the_devices(case) -> None:
    steps: list[StepTimes] = []
    generate(case[0], steps.append)
    busy, wall = sum(step.t_s_part for step in steps), max(step.t_end for step in steps)
    assert 0 < busy < wall
    assert 0 < sum(step.t_head for step in steps) < busy
    assert sum(step.t_prefill for step in steps) > 0
