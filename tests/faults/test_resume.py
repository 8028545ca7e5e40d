"""Jobs that are killed or stopped, and go on: every request is answered once, as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launching import clean_env, fastdecode, read_records, write_requests
from tiny_models import make_checkpoint, random_prompt

TYPES = (
    "--kv-memory-bytes",
    "8M",
    "--wire-dtype",
    "fp32",
    "--kv-dtype",
    "fp32",
    "--max-batch-size",
    "12",
    "--threads",
    "1",
)
NUM_LINES = 40
LIMIT_S = 240  # of one run; far above what it takes, as others may use the machine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama")


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    """Greedy, sampled and penalised rows, several choices, equal prompts, bad lines, OpenAI batch lines."""
    lines: list[dict] = []
    for number in range(NUM_LINES):
        prompt = random_prompt(1 + 7 * number % 50, seed=number // 2)  # each twice
        line: dict = {"prompt": prompt, "max_tokens": 10 + 13 * number % 70, "ignore_eos": True}
        line |= [{}, {"temperature": 0.8}, {"repetition_penalty": 1.3, "n": 3, "temperature": 1}, {"logprobs": 2}][
            number % 4
        ]
        if number % 5 == 0:
            line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": line}
        lines.append(line)
    lines[7], lines[31] = {"prompt": []}, {"prompt": [1], "temperature": -1}
    return lines


@pytest.fixture(scope="module")
def expected(checkpoint: Path, lines: list[dict], tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole")
    done = fastdecode(*command(folder, checkpoint, lines, ranks=1), timeout=LIMIT_S)
    assert done.returncode == 3, done.stderr
    return timeless(folder)


def command(folder: Path, checkpoint: Path, lines: list[dict], *, ranks: int, options: tuple[str, ...] = ()) -> list:
    path = folder / "in.jsonl"
    if not path.exists():
        write_requests(path, lines)
    files = ["--input", path, "--output", folder / "out.jsonl", "--ranks", ranks]
    return ["generate", "--model", checkpoint, *files, *TYPES, *options]


def timeless(folder: Path) -> list[dict]:
    records = read_records(folder / "out.jsonl")
    for record in records:
        if record.get("response"):
            assert abs(record["response"]["body"].pop("created") - time.time()) < 3600
    return records


def start(arguments: list) -> subprocess.Popen:
    program = [sys.executable, "-m", "fastdecode_hpc", *map(str, arguments)]
    return subprocess.Popen(program, env=clean_env(), stderr=subprocess.PIPE, text=True, start_new_session=True)


def kill_all(process: subprocess.Popen) -> None:
    """Kill the launcher and every rank at once, as a failing node does."""
    try:
        root = psutil.Process(process.pid)
        victims = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:  # it ended right now
        victims = []
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
    psutil.wait_procs(victims, timeout=10)
    process.communicate()


def wait_until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_and_resume(
    folder: Path, checkpoint: Path, lines: list[dict], expected: list[dict], *, kills: int, ranks: int, seed: int
) -> None:
    """Kill jobs again and again, each going on where the one before was killed; at its end it begins anew."""
    rng, output = random.Random(seed), folder / "out.jsonl"
    while kills:
        process, before = start(command(folder, checkpoint, lines, ranks=ranks)), count_lines(output)
        more = rng.choice([0, 1, 1, 2, 3, 5])
        wait_until(lambda least=before + more: count_lines(output) >= least, process)
        time.sleep(rng.uniform(0, 0.3))
        if process.poll() is None:
            kill_all(process)
            kills -= 1
        else:
            _, err = process.communicate()
            assert process.returncode == 3, err
        if count_lines(output) == NUM_LINES:
            assert timeless(folder) == expected
            output.unlink()
    done = fastdecode(*command(folder, checkpoint, lines, ranks=ranks), timeout=LIMIT_S)
    assert done.returncode == 3, done.stderr
    assert timeless(folder) == expected


def test_a_job_killed_at_any_moment_goes_on(checkpoint, lines, expected, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, checkpoint, lines, expected, kills=3, ranks=2, seed=os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_jobs_killed_ten_times_go_on(checkpoint, lines, expected, tmp_path: Path, ranks: int) -> None:
    kill_and_resume(tmp_path, checkpoint, lines, expected, kills=10, ranks=ranks, seed=ranks)


def rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    """The process of one rank."""
    for child in psutil.Process(launcher.pid).children(recursive=True):
        env = child.environ()
        if str(rank) in (env.get("PMI_RANK"), env.get("OMPI_COMM_WORLD_RANK")) and "generate" in child.cmdline():
            return child
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize(
    ("ranks", "number", "to_rank"),
    [
        (1, signal.SIGUSR1, None),
        pytest.param(3, signal.SIGTERM, None, marks=pytest.mark.slow),
        (3, signal.SIGUSR2, 2),
    ],
)
def test_a_stopped_job_goes_on_where_it_was(
    checkpoint, lines, expected, tmp_path: Path, ranks: int, number: signal.Signals, to_rank: int | None
) -> None:
    output, parked = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parked.jsonl"
    process = start(command(tmp_path, checkpoint, lines, ranks=ranks))
    wait_until(lambda: count_lines(output) >= 4, process)
    (process if to_rank is None else rank_process(process, to_rank)).send_signal(number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, err
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert status["reason"] == (number.name if to_rank is None else "another rank was asked to stop")
    kept = [json.loads(line) for line in parked.read_text().splitlines()]
    assert status["parked_requests"] == len(kept) > 0
    assert status["remaining_requests"] == NUM_LINES - count_lines(output)
    done = fastdecode(*command(tmp_path, checkpoint, lines, ranks=2), timeout=LIMIT_S)
    assert done.returncode == 3, done.stderr
    assert timeless(tmp_path) == expected
    assert not parked.exists()
    # Parked tokens were not generated again: the later run counts only its own.
    counts = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    earlier = sum(len(choice) for entry in kept for choice in entry["choices"])
    later = [json.loads(line) for line in output.read_text().splitlines()[status["num_requests"] :]]
    assert counts["output_tokens"] + earlier == sum(map(output_tokens, later))


def output_tokens(record: dict) -> int:
    answer = record["response"]["body"] if record.get("response") else record
    return answer["usage"]["completion_tokens"] if "usage" in answer else 0


def test_a_time_budget_cuts_a_job_into_pieces(checkpoint, lines, expected, tmp_path: Path) -> None:
    for budget in ("6s", "12s", "1d"):  # on a busy machine the first ones may pass before there is a record
        process = start(command(tmp_path, checkpoint, lines, ranks=1, options=("--time-budget", budget)))
        _, err = process.communicate(timeout=LIMIT_S)
        if process.returncode == 3:
            break
        assert process.returncode == 75, err
        assert json.loads((tmp_path / "out.jsonl.status.json").read_text())["reason"] == "--time-budget"
    assert process.returncode == 3
    assert timeless(tmp_path) == expected
