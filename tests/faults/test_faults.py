"""A rank that raises, dies or freezes ends the whole job in bounded time, with a non-zero code and its name."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launching import clean_env, mpiexec, read_records, run_limited, write_requests
from tiny_models import make_checkpoint, random_prompt

PROGRAM = Path(__file__).with_name("fault_program.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama")


def run_with_fault(checkpoint: Path, folder: Path, kind: str, rank: int, *options: str):
    lines = [{"prompt": random_prompt(5, seed=i), "max_new_tokens": 200, "ignore_eos": True} for i in range(50)]
    path = write_requests(folder / "in.jsonl", lines)
    command = [*mpiexec(3), sys.executable, str(PROGRAM), "generate", "--model", str(checkpoint), "--input", str(path)]
    command += ["--output", str(folder / "out.jsonl"), "--kv-memory-bytes", "4M", "--max-batch-size", "4", *options]
    moment = folder / "fault_time"
    env = clean_env(FAULT=kind, FAULT_RANK=str(rank), FAULT_TIME=str(moment))
    done = run_limited(command, timeout=60, env=env)
    return done, time.time() - float(moment.read_text())


BOUND_S = 10  # from the fault to the end of the last process


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_raises_ends_the_job_with_its_traceback(checkpoint: Path, tmp_path: Path, rank: int) -> None:
    done, seconds = run_with_fault(checkpoint, tmp_path, "raise", rank)
    assert done.returncode not in (0, 2, 3, 4, 75)
    assert seconds < BOUND_S
    assert f"[rank {rank} on " in done.stderr
    assert "RuntimeError: planted fault" in done.stderr


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_job(checkpoint: Path, tmp_path: Path, rank: int) -> None:
    done, seconds = run_with_fault(checkpoint, tmp_path, "kill", rank)
    assert done.returncode not in (0, 2, 3, 4, 75)
    assert seconds < BOUND_S
    said = done.stdout + done.stderr
    assert f"RANK {rank}" in said or f"rank {rank}" in said


def test_a_frozen_rank_ends_the_job_by_the_watchdog(checkpoint: Path, tmp_path: Path) -> None:
    done, seconds = run_with_fault(checkpoint, tmp_path, "hang", 1, "--watchdog-s", "3")
    assert done.returncode not in (0, 2, 3, 4, 75)
    assert seconds < BOUND_S
    assert "WatchdogError" in done.stderr


def test_what_was_finished_before_a_fault_is_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    lines = [{"prompt": random_prompt(5, seed=i), "max_new_tokens": 1} for i in range(6)]
    lines += [{"prompt": random_prompt(5, seed=i), "max_new_tokens": 200, "ignore_eos": True} for i in range(6, 20)]
    path = write_requests(tmp_path / "in.jsonl", lines)
    command = [*mpiexec(2), sys.executable, str(PROGRAM), "generate", "--model", str(checkpoint), "--input", str(path)]
    command += ["--output", str(tmp_path / "out.jsonl"), "--kv-memory-bytes", "4M", "--max-batch-size", "4"]
    done = run_limited(
        command, timeout=60, env=clean_env(FAULT="raise", FAULT_RANK="1", FAULT_TIME=str(tmp_path / "t"))
    )
    assert done.returncode not in (0, 75)
    assert [record["index"] for record in read_records(tmp_path / "out.jsonl")] == list(range(6))
