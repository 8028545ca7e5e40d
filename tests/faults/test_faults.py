"""A rank that raises, dies or freezes ends the whole job in bounded time, with a non-zero code and its name."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launching import clean_env, is_open_mpi, mpiexec, read_records, run_limited, write_requests
from tiny_models import make_checkpoint, random_prompt

PROGRAM = Path(__file__).with_name("fault_program.py")
BOUND_S = 30  # from the fault to the end of the last process; far more than it takes, as others use this machine too
WATCHDOG = ("--watchdog-s", "4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama")


def run_with_fault(
    checkpoint: Path, folder: Path, kind: str, rank: int, *options: str, ranks: int = 3, tokens: int = 200, **variables
):
    """What the job said, and the seconds from the fault to its end."""
    lines = [{"prompt": random_prompt(5, seed=i), "max_new_tokens": tokens, "ignore_eos": True} for i in range(50)]
    path = write_requests(folder / "in.jsonl", lines)
    command = [*mpiexec(ranks), sys.executable, str(PROGRAM), "generate", "--model", str(checkpoint)]
    command += ["--input", str(path), "--output", str(folder / "out.jsonl")]
    command += ["--kv-memory-bytes", "4M", "--max-batch-size", "4", *options]
    moment = folder / "fault_time"
    env = clean_env(FAULT=kind, FAULT_RANK=str(rank), FAULT_TIME=str(moment), **variables)
    done = run_limited(command, timeout=90, env=env)
    return done, time.time() - float(moment.read_text())


def assert_ended(done, seconds: float) -> str:
    """The whole job is gone; what it said."""
    said = str(done.stdout + done.stderr)
    assert done.returncode not in (0, 2, 3, 4, 75), said
    assert seconds < BOUND_S
    return said


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_raises_ends_the_job_with_its_traceback(checkpoint: Path, tmp_path: Path, rank: int) -> None:
    said = assert_ended(*run_with_fault(checkpoint, tmp_path, "raise", rank))
    assert f"[rank {rank} on " in said
    assert "RuntimeError: planted fault" in said


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_job(checkpoint: Path, tmp_path: Path, rank: int) -> None:
    said = assert_ended(*run_with_fault(checkpoint, tmp_path, "kill", rank))
    assert f"RANK {rank}" in said or f"rank {rank}" in said


def test_rank_0_names_the_frozen_worker_and_tells_how_the_run_stands(checkpoint: Path, tmp_path: Path) -> None:
    said = assert_ended(*run_with_fault(checkpoint, tmp_path, "stop", 1, *WATCHDOG))
    assert "[rank 0 on " in said
    assert "WatchdogError: waited 4 s for " in said
    assert "rank 0: step " in said and " decoding" in said and "KV blocks not promised" in said
    assert "rank 1: gives no answer" in said
    assert "rank 2: waits for " in said and "KV blocks free" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_frozen_rank_0_ends_the_job(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    said = assert_ended(*run_with_fault(checkpoint, tmp_path, kind, 0, *WATCHDOG, AWAY_LIMITS="2"))
    if kind == "stop":
        assert "without a sign of life from rank 0" in said
    else:  # it is alive, so it says itself where it has been for too long
        assert "rank 0 has been away from the pipeline for 8 s, 2 times --watchdog-s" in said
        assert "fault_program.py" in said


def test_a_rank_0_that_is_away_for_longer_than_the_watchdog_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    done, _ = run_with_fault(checkpoint, tmp_path, "pause", 0, "--watchdog-s", "3", tokens=4, PAUSE_S="7")
    assert done.returncode == 0, done.stderr
    assert len(read_records(tmp_path / "out.jsonl")) == 50


def test_a_cache_that_cannot_be_reserved_is_said_before_the_weights_are_read(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--kv-memory-bytes", "256M")
    done, _ = run_with_fault(checkpoint, tmp_path, "small", 1, *options, ranks=2, FAULT_AT="cache")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fastdecode: ")]
    assert "rank 1 on " in line and "cannot reserve 256.0 MiB for its KV cache (32768 blocks of 8.0 KiB)" in line
    assert "ulimit -v" in line and "--kv-memory-bytes" in line
    assert "weights ready" not in done.stderr


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_all_ranks(checkpoint: Path, tmp_path: Path) -> None:
    done, seconds = run_with_fault(checkpoint, tmp_path, "disk", 0, FAULT_AT="load", tokens=4)
    assert "out.jsonl cannot be written: File too large" in assert_ended(done, seconds)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_ends_the_job(checkpoint: Path, tmp_path: Path) -> None:
    said = assert_ended(*run_with_fault(checkpoint, tmp_path, "memory", 2))
    assert "[rank 2 on " in said and "MemoryError" in said


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["start", "load", "end", "exit"])
@pytest.mark.parametrize(("kind", "rank"), [("raise", 1), ("kill", 1), ("stop", 1), ("stop", 0)])
def test_a_fault_at_start_or_end_ends_the_job(
    checkpoint: Path, tmp_path: Path, moment: str, kind: str, rank: int
) -> None:
    # Longer than the watchdog of the other tests: where ranks share few cores they start slowly.
    said = assert_ended(
        *run_with_fault(checkpoint, tmp_path, kind, rank, "--watchdog-s", "8", ranks=2, tokens=4, FAULT_AT=moment)
    )
    if kind == "kill":  # the launcher's words; before ranks have met it may name the one that it ended itself
        assert moment == "start" or "RANK 1" in said or "rank 1" in said
    elif kind == "raise":
        assert "[rank 1 on " in said and "planted fault" in said
    elif rank == 0:
        assert "without a sign of life from rank 0" in said
    else:
        assert "rank 1: gives no answer" in said


@pytest.mark.slow
@pytest.mark.skipif(is_open_mpi(), reason="prterun now and then waits for ever for a process that stopped before MPI")
def test_a_rank_that_never_comes_to_mpi_ends_the_job(checkpoint: Path, tmp_path: Path) -> None:
    options = {"ranks": 2, "FAULT_AT": "init", "LEAST_INIT_S": "1"}
    said = assert_ended(*run_with_fault(checkpoint, tmp_path, "stop", 1, "--watchdog-s", "8", **options))
    assert "Timeout (0:00:08)!" in said and "in init_mpi" in said


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
