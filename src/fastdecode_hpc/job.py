"""One batch job: a file of prompts in, a file of records out, with progress, status and report."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fastdecode_hpc import __version__
from fastdecode_hpc.batch.records import RecordWriter, load_recorded
from fastdecode_hpc.batch.requests import RequestError, count_requests, read_requests
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.engine import Completion, Engine, Hooks, RunStats
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes

logger = logging.getLogger(__name__)

STDIN = "-"
EXIT_OK, EXIT_INTERNAL, EXIT_USAGE, EXIT_SOME_FAILED, EXIT_TOO_MANY_ERRORS, EXIT_STOPPED = 0, 1, 2, 3, 4, 75
STATE_OF_EXIT = {
    EXIT_OK: "finished",
    EXIT_INTERNAL: "internal error",
    EXIT_USAGE: "usage error",
    EXIT_SOME_FAILED: "finished, some requests failed",
    EXIT_TOO_MANY_ERRORS: "stopped: too many request errors",
    EXIT_STOPPED: "stopped early, resumable",
}
PLAIN_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What a job reads and writes."""

    input: str
    output: Path
    overwrite: bool = False
    resume: bool = False
    report: Path | None = None
    max_errors: int | None = None
    defaults: SamplingParams = field(default_factory=SamplingParams)

    @property
    def status(self) -> Path:
        """The state of the job in words, beside the output."""
        return self.output.with_name(f"{self.output.stem}.status.json")

    def check(self) -> None:
        """Find what would fail later, before anything is loaded.

        Raises
        ------
        ConfigError
            With the way out.
        """
        if self.overwrite and self.resume:
            raise ConfigError("--overwrite and --resume contradict each other; give one")
        if self.input != STDIN and not Path(self.input).is_file():
            raise ConfigError(f"the input {self.input} is no file; give a JSONL file, or - for standard input")
        for path in filter(None, (self.output, self.report)):
            _check_writable(path)
        names = [os.path.realpath(path) for path in (self.input, self.output, self.report) if path]
        if len(set(names)) < len(names):
            raise ConfigError("input, output and report must be different files")
        if self.output.exists() and self.output.stat().st_size and not (self.overwrite or self.resume):
            raise ConfigError(
                f"the output {self.output} exists; go on with it (--resume), replace it (--overwrite) or name another"
            )


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


class ProgressLine:
    """A bar on a terminal; elsewhere one plain line every 10 s."""

    def __init__(self, total: int | None, done: int) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._total, self._done, self._errors, self._tokens = total, done, 0, 0
        self._started = self._told = time.monotonic()
        self._first = done
        self._bar = tqdm(total=total, initial=done, unit="req", disable=not self._is_terminal, dynamic_ncols=True)

    def token(self) -> None:
        """Count one output token."""
        self._tokens += 1

    def request(self, failed: bool) -> None:
        """Count one finished request."""
        self._done += 1
        self._errors += failed
        self._bar.update(1)

    def tick(self) -> None:
        """Say how things stand, if it is time; called once a step."""
        now = time.monotonic()
        every = 1.0 if self._is_terminal else PLAIN_LINE_EVERY_S
        if now - self._told < every:
            return
        self._told = now
        rate = self._tokens / (now - self._started)
        if self._is_terminal:
            self._bar.set_postfix_str(f"{rate:.0f} tok/s, {self._errors} errors")
        else:
            total = "?" if self._total is None else self._total
            line = f"{self._done}/{total} requests, {rate:.1f} tok/s, ETA {self._eta(now)}, {self._errors} errors"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()

    def _eta(self, now: float) -> str:
        done = self._done - self._first
        if self._total is None or not done:
            return "?"
        return str(tqdm.format_interval((now - self._started) / done * (self._total - self._done)))


class Job:
    """Rank 0's view of a batch job.

    Parameters
    ----------
    files : JobFiles
    """

    def __init__(self, files: JobFiles) -> None:
        self.files = files
        self._recorded: dict[int, str | None] = {}
        self._too_many = False

    def check(self) -> None:
        """Find what would fail later, before anything is loaded; for `Engine`'s preflight.

        Raises
        ------
        ConfigError
            With the way out.
        """
        self.files.check()
        if self.files.resume:
            self._recorded = load_recorded(self.files.output)
            self._check_same_input()

    def _check_same_input(self) -> None:
        """Refuse to go on with an output that belongs to another input."""
        if self.files.input == STDIN:
            return
        left = dict(self._recorded)
        for item in read_requests(self.files.input, self.files.defaults):
            if item.index in left and left.pop(item.index) != item.custom_id:
                raise ConfigError(
                    f"the output {self.files.output} belongs to another input: its record {item.index} has custom_id "
                    f"{self._recorded[item.index]!r}, line {item.line} of the input has {item.custom_id!r}"
                )
        if left:
            raise ConfigError(
                f"the output {self.files.output} belongs to another input: it has a record {max(left)}, which the "
                "input does not reach"
            )

    def run(self, engine: Engine) -> int:
        """Answer every request once.

        Returns
        -------
        int
            The exit code.
        """
        self.engine = engine
        with _spooled(self.files.input) as self._input:
            total = count_requests(self._input)
            self._progress = ProgressLine(total, len(self._recorded))
            try:
                with RecordWriter(
                    self.files.output, overwrite=self.files.overwrite, resume=self.files.resume
                ) as self._writer:
                    stats = self._run_reported() if self.files.report else self._run_requests(lambda times: None)
            except BaseException:
                write_status(self.files.status, {"state": STATE_OF_EXIT[EXIT_INTERNAL], "exit_code": EXIT_INTERNAL})
                raise
            finally:
                self._progress.close()
        code = self._exit_code(stats)
        self._check_complete(code, total)
        self._tell(stats, code)
        return code

    def _run_reported(self) -> RunStats:
        from fastdecode_hpc.report import ReportWriter

        assert self.files.report is not None
        with ReportWriter(self.files.report, run_attributes(self.engine), self.engine.setup.owners) as self._report:
            stats = self._run_requests(self._report.add_step)
            self._report.finish(stats.summary(self.engine.t_load_s))
        return stats

    def _run_requests(self, on_step: Any) -> RunStats:
        def step(times: StepTimes) -> None:
            on_step(times)
            self._progress.tick()

        hooks = Hooks(
            on_completion=self._complete,
            on_token=self._progress.token,
            on_step=step,
            stop_requested=lambda: self._too_many,
        )
        stats = self.engine.run(self._requests(), hooks)
        assert stats is not None
        # Lines that hold no request never reached the engine.
        stats.num_requests, stats.num_errors = self._writer.num_written, self._writer.num_errors
        return stats

    def _requests(self) -> Iterator[Request]:
        """Requests of the input that have no record yet; lines that hold none get their error record here."""
        for item in read_requests(self._input, self.files.defaults):
            if item.index in self._recorded:
                continue
            if isinstance(item, RequestError):
                self._fail(item.index, item.custom_id, item.code, item.message)
            else:
                yield item
            if self._too_many:
                return

    def _complete(self, completion: Completion) -> None:
        request = completion.request
        if completion.error is not None:
            self._fail(request.index, request.custom_id, *completion.error)
            return
        assert completion.finish_reason is not None
        self._writer.write_completion(
            request,
            text=completion.text,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            output_tokens=len(completion.token_ids),
            logprobs=completion.logprobs,
            notes=completion.notes,
        )
        self._progress.request(failed=False)
        if self.files.report:
            self._report.add_request(_request_figures(completion))

    def _fail(self, index: int, custom_id: str | None, code: str, message: str) -> None:
        self._writer.write_error(index, custom_id, code, message)
        self._progress.request(failed=True)
        limit = self.files.max_errors
        self._too_many = limit is not None and self._writer.num_errors > limit

    def _exit_code(self, stats: RunStats) -> int:
        if self._too_many:
            return EXIT_TOO_MANY_ERRORS
        if stats.stopped:
            return EXIT_STOPPED
        return EXIT_SOME_FAILED if self._writer.num_errors else EXIT_OK

    def _check_complete(self, code: int, total: int | None) -> None:
        written = len(self._recorded) + self._writer.num_written
        if code in (EXIT_OK, EXIT_SOME_FAILED):
            assert written == total, f"{written} records for {total} requests"

    def _tell(self, stats: RunStats, code: int) -> None:
        figures = {name: value for name, (value, _) in stats.summary(self.engine.t_load_s).items()}
        status = {"state": STATE_OF_EXIT[code], "exit_code": code, "resumed_records": len(self._recorded), **figures}
        write_status(self.files.status, status)
        logger.info(
            "%s: %d records, %d errors; %d tokens in %.1f s: decode %.1f tok/s, prefill %.1f tok/s",
            STATE_OF_EXIT[code],
            self._writer.num_written,
            self._writer.num_errors,
            stats.output_tokens,
            stats.t_run_s,
            figures["decode_tokens_per_s"],
            figures["prefill_tokens_per_s"],
        )


@contextmanager
def _spooled(path: str) -> Iterator[str]:
    """The input as a file that can be read twice; standard input is copied to a temporary one first.

    A slow producer would otherwise keep rank 0 from its main loop, and the other ranks would take it for dead.
    """
    if path != STDIN:
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="fastdecode-", suffix=".jsonl") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield file.name


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Replace the status file in one step."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(status, indent=2) + "\n")
    partial.replace(path)


def run_attributes(engine: Engine) -> dict[str, Any]:
    """The report's root attributes: enough to know later what was run, where, and with what."""
    ranks = [
        {"rank": r.rank, "host": r.host, "role": r.role, "threads": r.threads, "cores": list(r.cores), "isa": r.isa,
         "kv_bytes": r.kv_bytes, "start_s": r.start_s}
        for r in engine.setup.ranks
    ]  # fmt: skip
    return {
        "program_version": __version__,
        "git_commit": _git_commit(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": engine.run_config.as_dict(),
        "model_config": _plain(engine.setup.model),
        "model_path": str(engine.model_path),
        "hostnames": sorted({r.host for r in engine.setup.ranks}),
        "ranks": ranks,
        "clock_errors_s": [error for _, error in engine.clocks],
        "mpi_library": _mpi_library(engine),
        "slurm": {name: value for name, value in os.environ.items() if name.startswith("SLURM_")},
    }


def _plain(model: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(model)


def _mpi_library(engine: Engine) -> str:
    if engine.world is None:
        return "none (one process)"
    from fastdecode_hpc.transport.mpi import library_version

    return library_version()


def _git_commit() -> str:
    """Commit of the source tree the program runs from; empty for an installed one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _request_figures(completion: Completion) -> dict[str, float]:
    return {
        "index": completion.request.index,
        "prompt_tokens": completion.prompt_tokens,
        "output_tokens": len(completion.token_ids),
        "t_admitted": completion.t_admitted_s,
        "t_first_token": completion.t_first_token_s,
        "t_finished": completion.t_finished_s,
    }
