"""Placement in a whole run: what is printed, what the report says, and where threads really are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import h5py
import pytest

from fastdecode_hpc.affinity import pin_plan
from fastdecode_hpc.topology import core_siblings, huge_page_mode, numa_nodes
from launching import clean_env, mpiexec, run_limited, write_requests
from tiny_models import make_checkpoint

PROGRAM = Path(__file__).with_name("bound_ranks_program.py")
CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="binding two threads needs two cores")


def run(folder: Path, **variables: str):
    """Two ranks of two threads; standard error, and what each rank left."""
    checkpoint = make_checkpoint(folder / "model", "llama")
    prompts = write_requests(folder / "in.jsonl", [{"prompt": [1, 2, 3], "max_new_tokens": 4}] * 4)
    command = [*mpiexec(2), sys.executable, str(PROGRAM), "generate", "--model", str(checkpoint), "--threads", "2"]
    command += ["--input", str(prompts), "--output", str(folder / "out.jsonl"), "--report", str(folder / "run.h5")]
    done = run_limited([*command, "--kv-memory-bytes", "8M"], timeout=60, env=clean_env(CORES=str(folder), **variables))
    assert done.returncode == 0, done.stderr
    return done.stderr, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_rank_with_cores_of_its_own_is_bound_and_says_so(tmp_path: Path) -> None:
    told, ranks = run(tmp_path)
    lines = [line for line in told.splitlines() if line.startswith("rank ")]
    assert [("pinned" in line, "cores " in line) for line in lines] == [(False, True), (True, True)]
    first, last = pin_plan(2, tuple(CORES), core_siblings(tuple(CORES)))
    assert ranks[0] == {"main": CORES, "torch": True}
    assert ranks[1] == {"main": [first], "torch": False, "threads": [[first], [last]]}
    with h5py.File(tmp_path / "run.h5") as file:
        described = json.loads(file.attrs["ranks"])
        assert [rank["pinned"] for rank in described] == [False, True]
        assert described[1]["cores"] == CORES
        assert described[1]["numa_nodes"] == list(numa_nodes(tuple(CORES)))
        assert described[1]["huge_pages"] == huge_page_mode()
        assert 0 <= file["ranks/1"].attrs["kv_huge_pages"] <= 1
        assert file["summary/kv_huge_pages"][()] == file["ranks/1"].attrs["kv_huge_pages"]


@pytest.mark.slow
def test_threads_that_openmp_binds_stay_on_cores_of_their_own_through_a_run(tmp_path: Path) -> None:
    _, ranks = run(tmp_path, OMP_PROC_BIND="true", OMP_PLACES="cores")
    assert ranks[0]["main"] == CORES  # rank 0 has undone it for itself: torch's threads inherit its cores
    assert len(ranks[1]["threads"]) == 2
    assert all(len(cores) == 1 for cores in ranks[1]["threads"])
    assert ranks[1]["threads"][0] != ranks[1]["threads"][1]
