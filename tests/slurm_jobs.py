"""Jobs on a Slurm of our own, for tests: submitted, waited for, signalled, their ranks found and killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
POLL_S = 0.2  # of a Slurm of our own; one of others is asked once a minute at most
SMALL = ("--allow-oversubscribe", "--threads", "1", "--kv-memory-bytes", "64M", "--max-batch-size", "16")


@dataclass
class Job:
    """A job that was submitted.

    Attributes
    ----------
    folder : Path
        Where it runs.
    """

    number: str
    folder: Path

    def show(self) -> str:
        """What the controller knows about it."""
        return run("scontrol", "show", "job", self.number)

    def field(self, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self.show())
        assert match is not None, self.show()
        return match[1]

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"*-{self.number}*.out")))

    def wait(self, limit_s: float = 120.0) -> int:
        """Its exit code, once it has ended."""
        self.wait_for(lambda: self.field("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), limit_s)
        return int(self.field("ExitCode").partition(":")[0])

    def wait_for(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end, f"{limit_s} s are over\n{self.show()}\n{self.log[-4000:]}"
            time.sleep(POLL_S)

    def start_again(self) -> None:
        """Start a job that was queued again now, and not in two minutes.

        Slurm waits that long so that the daemons of the turn before are gone, which is waited for here: they would
        remove the sockets of the next turn, whose steps have the same numbers.
        """
        self.wait_for(lambda: self.field("JobState") in ("PENDING", "RUNNING"))
        self.wait_for(lambda: self.field("JobState") == "RUNNING" or not self._has_daemons())
        if self.field("JobState") == "PENDING":
            run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def _has_daemons(self) -> bool:
        name = f"slurmstepd: [{self.number}.".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().startswith(name):
                    return True
        return False

    def signal(self, name: str) -> None:
        """As a user would: to the steps, not to the batch shell."""
        run("scancel", f"--signal={name}", self.number)

    def process_of_rank(self, rank: int) -> int:
        """Process id of a rank, found by what Slurm wrote into its environment."""
        wanted = {f"SLURM_JOB_ID={self.number}", f"SLURM_PROCID={rank}", "SLURM_STEP_ID=0"}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                env, command = (folder / "environ").read_bytes().decode(), (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if wanted <= set(env.split("\0")) and b"fastdecode" in command:
                return int(folder.name)
        raise AssertionError(f"no process of rank {rank}\n{self.log}")

    def kill_rank(self, rank: int) -> None:
        os.kill(self.process_of_rank(rank), signal.SIGKILL)


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def read_texts(path: Path) -> list[tuple[int, str]]:
    """Index and text of every record."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((record["index"], record["text"]) for record in records)


def write_prompts(path: Path, count: int, max_new_tokens: int) -> Path:
    lines = [
        {"prompt": f"Number {index} comes after", "max_new_tokens": max_new_tokens, "ignore_eos": True}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
