"""Whole runs with an S-worker whose copies take their time: the same tokens as on a plain CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.sequence import SamplingParams
from launching import run_ranks
from tiny_models import make_checkpoint, mixed_requests, random_prompt

INTEGRATION = Path(__file__).parent
FIXED = {"prefill_chunk_tokens": 32}
CONFIGS = [
    {**FIXED, "max_batch_size": 24},
    {**FIXED, "max_batch_size": 24, "cuda_graphs": "off"},
    {**FIXED, "max_batch_size": 9, "num_slots": 3},
    {**FIXED, "max_batch_size": 5, "num_slots": 1, "max_prefill_tokens": 32},
]


def run(program: str, ranks: int, folder: Path, configs: list[dict]) -> tuple[list[dict], str]:
    """Results of all configurations, and what the ranks said."""
    files = [folder / name for name in ("model", "prompts.json", f"{program}-{ranks}.json", "configs.json")]
    files[3].write_text(json.dumps(configs))
    done = run_ranks(ranks, [str(INTEGRATION / program), *map(str, files)], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(files[2].read_text())
    return [results[json.dumps(config, sort_keys=True)] for config in configs], done.stderr


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> tuple[Path, dict]:
    """A folder with checkpoint and prompts, and the tokens that a plain CPU gives."""
    folder = tmp_path_factory.mktemp("case")
    make_checkpoint(folder / "model")
    (folder / "prompts.json").write_text(json.dumps(mixed_requests()))
    (expected,), _ = run("identity_program.py", 1, folder, [FIXED])
    return folder, expected


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_tokens_are_those_of_a_plain_cpu(case, ranks: int) -> None:
    folder, expected = case
    results, said = run("emulated_program.py", ranks, folder, CONFIGS)
    for config, result in zip(CONFIGS, results, strict=True):
        assert result == expected, f"{ranks} ranks, {config}"
    counts = [tuple(map(int, found)) for found in re.findall(r"emulated: (\d+) (\d+) (\d+)", said)]
    assert len(counts) == len(CONFIGS)
    assert all(copies > 100 and fetches > 20 for copies, fetches, _ in counts)
    assert [replays > 20 for _, _, replays in counts] == [True, False, True, True]


def test_rows_that_leave_before_they_are_ready_are_found_out(case, monkeypatch: pytest.MonkeyPatch) -> None:
    from emulated_device import EmulatedDevice
    from fastdecode_hpc.transport.local import LocalSEnd

    monkeypatch.setattr("fastdecode_hpc.run.make_device", lambda *_, **__: EmulatedDevice())
    folder, _ = case
    config = RunConfig(
        model=str(folder / "model"),
        device="cpu",
        wire_dtype="fp32",
        kv_dtype="fp32",
        kv_memory_bytes=4 << 20,
        threads=1,
    )
    prompts, params = [random_prompt(9, seed=seed) for seed in range(4)], SamplingParams(max_new_tokens=6)
    with Engine(config) as engine:
        assert [done.error for done in engine.generate(prompts, params)] == [None] * 4
    scatter = LocalSEnd.scatter_qkv
    monkeypatch.setattr(LocalSEnd, "scatter_qkv", lambda self, slot, ready: scatter(self, slot, lambda: True))
    with Engine(config) as engine, pytest.raises(AssertionError, match="another is under way"):
        engine.generate(prompts, params)
