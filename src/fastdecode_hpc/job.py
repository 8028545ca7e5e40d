"""One batch job: a file of prompts in, a file of records out, with progress, status and report."""

from __future__ import annotations

import logging
import os
import select
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdecode_hpc.batch.records import Recorded, RecordWriter, load_recorded
from fastdecode_hpc.batch.requests import RequestError, count_requests, read_requests
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.progress import ProgressLine
from fastdecode_hpc.provenance import run_attributes
from fastdecode_hpc.results import Completion, Hooks, RunStats
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes

logger = logging.getLogger(__name__)

STDIN = "-"
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
SPOOL_BYTES = 1 << 20
SPOOL_POLL_S = 0.2
EXIT_OK, EXIT_INTERNAL, EXIT_USAGE, EXIT_SOME_FAILED, EXIT_TOO_MANY_ERRORS, EXIT_STOPPED = 0, 1, 2, 3, 4, 75
STATE_OF_EXIT = {
    EXIT_OK: "finished",
    EXIT_INTERNAL: "internal error",
    EXIT_USAGE: "usage error",
    EXIT_SOME_FAILED: "finished, some requests failed",
    EXIT_TOO_MANY_ERRORS: "stopped: too many request errors",
    EXIT_STOPPED: "stopped early, resumable",
}


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
        return self.output.with_name(f"{self.output.name}.status.json")

    def check(self) -> None:
        """Find what would fail later, before anything is loaded.

        Raises
        ------
        ConfigError
            With the way out.
        """
        if self.overwrite and self.resume:
            raise ConfigError("--overwrite and --resume contradict each other; give one")
        if self.max_errors is not None and self.max_errors < 0:
            raise ConfigError(f"--max-errors is {self.max_errors}; it must be at least 0")
        if str(self.output) == STDIN:
            raise ConfigError("the output cannot be standard output: records are read back to resume; name a file")
        if self.input != STDIN and not Path(self.input).is_file():
            raise ConfigError(f"the input {self.input} is no file; give a JSONL file, or - for standard input")
        for path in filter(None, (self.output, self.report)):
            check_writable(path)
        if self.report is not None and self.report.exists() and not _is_hdf5(self.report):
            raise ConfigError(f"the report {self.report} exists and is no HDF5 file; name another")
        names = [os.path.realpath(path) for path in (self.input, self.output, self.report, self.status) if path]
        if len(set(names)) < len(names):
            raise ConfigError("input, output, report and the output's status file must be different files")
        if self.output.exists() and self.output.stat().st_size and not (self.overwrite or self.resume):
            raise ConfigError(
                f"the output {self.output} exists; go on with it (--resume), replace it (--overwrite) or name another"
            )


def _is_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE


class Job:
    """Rank 0's view of a batch job.

    Parameters
    ----------
    files : JobFiles
    stop_requested : callable
        Whether the job should end early.
    """

    def __init__(self, files: JobFiles, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.files = files
        self.stop_requested = stop_requested
        self._input = files.input
        self._total = 0
        self._recorded: dict[int, Recorded] = {}
        self._old_errors = 0
        self._cut_short = False  # standard input did not come to its end
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
            self._old_errors = sum(record.failed for record in self._recorded.values())
        if self.files.input == STDIN:
            self._spool()
        self._total = count_requests(self._input) or 0
        self._check_same_input()

    def _spool(self) -> None:
        """Copy standard input to a file beside the output, to be read more than once.

        A slow producer would otherwise keep rank 0 from its main loop, and the other ranks would take it for dead.
        """
        folder = self.files.output.parent
        self._spooled = tempfile.NamedTemporaryFile(prefix=".fastdecode-", suffix=".jsonl", dir=folder)  # noqa: SIM115
        while not self.stop_requested():
            if not select.select([sys.stdin.buffer], [], [], SPOOL_POLL_S)[0]:
                continue
            data = os.read(sys.stdin.fileno(), SPOOL_BYTES)
            if not data:
                break
            self._spooled.write(data)
        else:
            self._cut_short = True
        self._spooled.flush()
        self._input = self._spooled.name

    def _check_same_input(self) -> None:
        """Refuse to go on with an output that belongs to another input."""
        if not self._recorded:
            return
        left = dict(self._recorded)
        for item in read_requests(self._input, self.files.defaults):
            if item.index in left and left.pop(item.index).custom_id != item.custom_id:
                raise ConfigError(
                    f"the output {self.files.output} belongs to another input: its record {item.index} has custom_id "
                    f"{self._recorded[item.index].custom_id!r}, line {item.line} of the input has {item.custom_id!r}"
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
        self.engine, files = engine, self.files
        self._progress = ProgressLine(self._total, len(self._recorded))
        try:
            with RecordWriter(files.output, overwrite=files.overwrite, resume=files.resume) as self._writer:
                stats = self._run_reported() if files.report else self._run_requests(lambda times: None)
        except BaseException as error:
            self._tell_failure(error)
            raise
        finally:
            self._progress.close()
        code = self._exit_code(stats)
        self._tell(stats, code)
        return code

    def _tell_failure(self, error: BaseException) -> None:
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_INTERNAL
        with suppress(OSError):  # what went wrong first is what the user has to see
            write_json(self.files.status, {"state": STATE_OF_EXIT[code], "exit_code": code, "reason": str(error)})

    def _run_reported(self) -> RunStats:
        from fastdecode_hpc.report import ReportWriter

        assert self.files.report is not None
        with ReportWriter(self.files.report, run_attributes(self.engine), self.engine.setup.owners) as self._report:
            stats = self._run_requests(self._report.add_step)
            self._report.finish(stats.summary(self.engine.t_load_s), stats.kv_huge_pages)
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
        self._too_many = limit is not None and self._num_errors > limit

    @property
    def _num_errors(self) -> int:
        """Error records in the output, those of the runs before included."""
        return self._old_errors + self._writer.num_errors

    def _exit_code(self, stats: RunStats) -> int:
        num_left = self._total - len(self._recorded) - self._writer.num_written
        assert num_left >= 0, f"{-num_left} more records than requests"
        if self._too_many:
            return EXIT_TOO_MANY_ERRORS
        if self._cut_short or num_left:
            assert self._cut_short or stats.stopped, f"{num_left} requests have no record"
            return EXIT_STOPPED
        return EXIT_SOME_FAILED if self._num_errors else EXIT_OK

    def _tell(self, stats: RunStats, code: int) -> None:
        figures = {name: value for name, (value, _) in stats.summary(self.engine.t_load_s).items()}
        status = {"state": STATE_OF_EXIT[code], "exit_code": code, "resumed_records": len(self._recorded), **figures}
        write_json(self.files.status, status)
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


def _request_figures(completion: Completion) -> dict[str, float]:
    return {
        "index": completion.request.index,
        "prompt_tokens": completion.prompt_tokens,
        "output_tokens": completion.output_tokens,
        "t_admitted": completion.t_admitted_s,
        "t_first_token": completion.t_first_token_s,
        "t_finished": completion.t_finished_s,
    }
