"""Jobs of the scripts under slurm/, on the Slurm that scripts/slurm_up.sh has started (scripts/slurm_test.sh)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import fastdecode
from slurm_jobs import ROOT, Job, read_texts, run, write_prompts

# Nothing to run elsewhere: other Slurms than that of scripts/slurm_test.sh are never asked.
collect_ignore_glob = [] if "FASTDECODE_SLURM_DIR" in os.environ else ["test_*.py"]


@pytest.fixture
def submit(tmp_path: Path):
    """Submit a script of slurm/ (or a command, with --wrap) in a folder of its own; what is left of it is cancelled."""
    jobs: list[Job] = []

    def submit(script: str, *options: str, **variables: str) -> Job:
        log = tmp_path / ("%x-%A_%a.out" if any(option.startswith("--array") for option in options) else "%x-%j.out")
        what = [str(ROOT / "slurm" / f"{script}.sbatch")] if script else []
        env = {**os.environ, **{name.upper(): value for name, value in variables.items()}}
        command = ["sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={log}", *options, *what]
        jobs.append(Job(run(*command, env=env).strip(), tmp_path))
        return jobs[-1]

    yield submit
    for job in jobs:
        subprocess.run(["scancel", "--signal=KILL", "--full", job.number], capture_output=True, check=False)
        subprocess.run(["scancel", job.number], capture_output=True, check=False)


@pytest.fixture(scope="session")
def answers(tmp_path_factory) -> Callable[[int, int], list[tuple[int, str]]]:
    """What one process without MPI or Slurm says to so many prompts, with so many tokens each."""
    known: dict[tuple[int, int], list[tuple[int, str]]] = {}

    def answers(count: int, max_new_tokens: int) -> list[tuple[int, str]]:
        if (count, max_new_tokens) not in known:
            folder = tmp_path_factory.mktemp("alone")
            prompts = write_prompts(folder / "prompts.jsonl", count, max_new_tokens)
            done = fastdecode("generate", "--input", prompts, "--output", folder / "out.jsonl", timeout=300)
            assert done.returncode == 0, done.stderr
            known[count, max_new_tokens] = read_texts(folder / "out.jsonl")
        return known[count, max_new_tokens]

    return answers
