"""What the ranks take: an R-worker is small and loads no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import pytest

from launching import clean_env, mpiexec, run_limited, write_requests
from tiny_models import make_checkpoint

PROGRAM = Path(__file__).with_name("footprint_program.py")
MAX_BYTES = 150 << 20  # beside the KV cache


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict[int, dict], list[dict]]:
    """Footprints by rank, and what the report says of the ranks, of a run on three ranks."""
    folder = tmp_path_factory.mktemp("footprint")
    checkpoint = make_checkpoint(folder / "model", "llama")
    path = write_requests(folder / "in.jsonl", [{"prompt": [1, 2, 3], "max_new_tokens": 4}] * 4)
    command = [*mpiexec(3), sys.executable, str(PROGRAM), "generate", "--model", str(checkpoint), "--input", str(path)]
    command += ["--output", str(folder / "out.jsonl"), "--report", str(folder / "run.h5"), "--kv-memory-bytes", "1M"]
    done = run_limited(command, timeout=60, env=clean_env(FOOTPRINT=str(folder)))
    assert done.returncode == 0, done.stderr
    with h5py.File(folder / "run.h5") as file:
        ranks = json.loads(file.attrs["ranks"])
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)}, ranks


def test_r_workers_load_no_torch_and_stay_small(run) -> None:
    footprints, ranks = run
    assert footprints[0]["torch"]
    for rank in (1, 2):
        assert not footprints[rank]["torch"]
        assert footprints[rank]["peak_bytes"] - ranks[rank]["kv_bytes"] < MAX_BYTES
