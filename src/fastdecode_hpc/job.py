"""One batch job: a file of prompts in, a file of records out, with progress, status and report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastdecode_hpc.batch.fingerprint import check_fingerprint, save_fingerprint, take_fingerprint
from fastdecode_hpc.batch.openai_records import Responses
from fastdecode_hpc.batch.parked import Parked, load_parked, save_parked
from fastdecode_hpc.batch.records import RecordWriter
from fastdecode_hpc.batch.requests import RequestError, count_requests, read_requests
from fastdecode_hpc.batch.resume import Recorded, check_same_input, load_recorded
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.files import write_json
from fastdecode_hpc.job_files import STDIN, JobFiles, spool_standard_input
from fastdecode_hpc.job_status import (
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_SOME_FAILED,
    EXIT_STOPPED,
    EXIT_TOO_MANY_ERRORS,
    EXIT_USAGE,
    STATE_OF_EXIT,
    format_status,
    last_code,
)
from fastdecode_hpc.progress import ProgressLine
from fastdecode_hpc.provenance import run_attributes, run_notes
from fastdecode_hpc.report.rows import completion_row, failed_row
from fastdecode_hpc.results import Completion, Hooks, RunStats
from fastdecode_hpc.sequence import Request
from fastdecode_hpc.signals import StopRequest
from fastdecode_hpc.startup import Dismissed
from fastdecode_hpc.timing import StepTimes
from fastdecode_hpc.verify import Reservoir

logger = logging.getLogger(__name__)


class Job:
    """Rank 0's view of a batch job.

    Parameters
    ----------
    files : JobFiles
    run : RunConfig
    stop : callable
        Whether the job should end early; its ``reason`` says why.
    """

    def __init__(self, files: JobFiles, run: RunConfig, stop: StopRequest) -> None:
        self.files, self.run_config, self.stop = files, run, stop
        self._input = files.input
        self._total = 0
        self._recorded = Recorded()
        self._parked: dict[int, Parked] = {}
        self._cut_short = False  # standard input did not come to its end
        self._too_many = False

    def check(self, model: Path) -> None:
        """Find what would fail later, before anything is loaded; for `Engine`'s preflight.

        Raises
        ------
        ConfigError
            With the way out.
        Dismissed
            Where every request has its record already.
        """
        files = self.files
        files.check()
        fingerprint = take_fingerprint(self.run_config, files.defaults, model, auto_id=files.auto_id)
        if files.has_output:
            check_fingerprint(files.fingerprint, fingerprint, files.output)
            self._recorded = load_recorded(files.output)
            parked = load_parked(files.parked).items()  # a run that was killed has answered some of these
            self._parked = {index: entry for index, entry in parked if index not in self._recorded}
        if files.input == STDIN:
            self._spooled, is_whole = spool_standard_input(files.output.parent, self.stop)
            self._input, self._cut_short = self._spooled.name, not is_whole
        self._total = count_requests(self._input) or 0
        check_same_input(self._recorded, self._read(), files.output)
        self._leave_if_done()
        self._fingerprint = fingerprint

    def _leave_if_done(self) -> None:
        if not self.files.has_output or self._cut_short or len(self._recorded) < self._total:
            return
        code = EXIT_SOME_FAILED if self._recorded.num_failed else EXIT_OK
        logger.info("all %d requests have their record in %s; nothing to run", self._total, self.files.output)
        if last_code(self.files.status) != code:  # the run that wrote the last record was killed right then
            self._write_status(code, total_requests=self._total)
        raise Dismissed(code)

    def _start_anew(self) -> None:
        """Remove what an earlier job left beside the output, which is emptied when it is opened."""
        for path in (self.files.parked, self.files.status):
            path.unlink(missing_ok=True)
        save_fingerprint(self.files.fingerprint, self._fingerprint)

    def _read(self) -> Iterator[Request | RequestError]:
        return read_requests(self._input, self.files.defaults, auto_id=self.files.auto_id)

    def run(self, engine: Engine) -> int:
        """Answer every request once.

        Returns
        -------
        int
            The exit code.
        """
        self.engine, files = engine, self.files
        self._sample: Reservoir[Completion] = Reservoir(files.verify, engine.run_config.seed)
        self._progress = ProgressLine(self._total, len(self._recorded))
        tokenizer, model = engine.tokenizer, self.run_config.model
        responses = Responses(Path(model).name, tokenizer.token_bytes if tokenizer is not None else None)
        go_on_at = self._recorded.num_bytes if files.has_output else None
        try:
            with RecordWriter(files.output, responses, go_on_at=go_on_at) as self._writer:
                if go_on_at is None:
                    self._start_anew()
                self._put_status({"state": "running", "exit_code": None})
                stats = self._run_reported() if files.report else self._run_requests(lambda times: None)
        except BaseException as error:
            self._tell_failure(error)
            raise
        finally:
            self._progress.close()
        code = self._exit_code(stats)
        save_parked(files.parked, self._parked)
        status = self._tell(stats, code)
        if files.verify:
            self._verify(status)
        return code

    def _tell_failure(self, error: BaseException) -> None:
        self._write_status(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_INTERNAL, reason=str(error))

    def _write_status(self, code: int, **more: Any) -> dict[str, Any]:
        status = {"state": STATE_OF_EXIT[code], "exit_code": code, "reason": None, **more}
        self._put_status(status)
        return status

    def _put_status(self, status: dict[str, Any]) -> None:
        try:
            write_json(self.files.status, status)
        except OSError as error:  # a full disk: it must not hide how the job ended, nor end one that goes on
            logger.warning("%s cannot be written: %s", self.files.status, error.strerror)

    def _run_reported(self) -> RunStats:
        from fastdecode_hpc.report.writer import ReportWriter

        assert self.files.report is not None
        with ReportWriter(
            self.files.report,
            run_attributes(self.engine),
            self.engine.setup.owners,
            load_limit=self.run_config.load_limit,
            notes=run_notes(self.engine),
        ) as self._report:
            stats = self._run_requests(self._report.add_step)
            self._report.finish(stats.summary(self.engine.t_load_s), stats.of_ranks())
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
            on_parked=self._park,
        )
        stats = self.engine.run(self._requests(), hooks)
        assert stats is not None
        # Lines that hold no request never reached the engine.
        stats.num_requests, stats.num_errors = self._writer.num_written, self._writer.num_errors
        return stats

    def _requests(self) -> Iterator[Request]:
        """Requests of the input that have no record yet; lines that hold none get their error record here."""
        for item in self._read():
            if item.index in self._recorded:
                continue
            if isinstance(item, RequestError):
                if self.files.report:
                    self._report.add_request(failed_row(item.index))
                self._fail(item, item.code, item.message)
            else:
                yield self._with_known_tokens(item)
            if self._too_many:
                return

    def _with_known_tokens(self, request: Request) -> Request:
        """The request with what an earlier run generated for it."""
        parked = self._parked.get(request.index)
        if parked is not None and parked.content_hash == request.content_hash:
            request.known_ids = parked.choices
        return request

    def _park(self, request: Request, choices: Sequence[Sequence[int]]) -> None:
        self._parked[request.index] = Parked(request.content_hash, tuple(map(tuple, choices)))

    def _complete(self, completion: Completion) -> None:
        request = completion.request
        if self.files.report:
            self._report.add_request(completion_row(completion))
        if completion.error is not None:
            self._fail(request, *completion.error)
            return
        self._writer.write_completion(
            request, completion.choices, prompt_tokens=completion.prompt_tokens, notes=completion.notes
        )
        self._parked.pop(request.index, None)
        self._progress.request(failed=False)
        self._sample.offer(request.index, completion)

    def _fail(self, item: Request | RequestError, code: str, message: str) -> None:
        self._writer.write_error(item, code, message)
        self._parked.pop(item.index, None)
        self._progress.request(failed=True)
        limit = self.files.max_errors
        self._too_many = limit is not None and self._num_errors > limit

    @property
    def _num_errors(self) -> int:
        """Error records in the output, those of the runs before included."""
        return self._recorded.num_failed + self._writer.num_errors

    def _exit_code(self, stats: RunStats) -> int:
        num_left = self._total - len(self._recorded) - self._writer.num_written
        assert num_left >= 0, f"{-num_left} more records than requests"
        if self._too_many:
            return EXIT_TOO_MANY_ERRORS
        if self._cut_short or num_left:
            assert self._cut_short or stats.stopped, f"{num_left} requests have no record"
            return EXIT_STOPPED
        return EXIT_SOME_FAILED if self._num_errors else EXIT_OK

    def _tell(self, stats: RunStats, code: int) -> dict[str, Any]:
        """Say how the job ended: in the status file for programs, in a few lines for people."""
        figures = {name: value for name, (value, _) in stats.summary(self.engine.t_load_s).items()}
        num_left = self._total - len(self._recorded) - self._writer.num_written
        status = self._write_status(
            code,
            reason=self._reason(code),
            total_requests=self._total,
            resumed_records=len(self._recorded),
            resumed_errors=self._recorded.num_failed,
            remaining_requests=num_left,
            parked_requests=len(self._parked),
            errors_by_code=dict(self._writer.errors.most_common()),
            shares=stats.shares.describe() if stats.shares is not None else "",
            **figures,
        )
        logger.info("%s", format_status(status, self.files.output, self.files.report))
        return status

    def _verify(self, status: dict[str, Any]) -> None:
        """Recompute some of what was written, and add the outcome to the status; the exit code is as it was.

        The records are complete and the status is written, so a signal or a time limit costs nothing here.
        """
        sample = self._sample.items
        logger.info("verify: recomputing %d finished requests with a plain reference", len(sample))
        found = self.engine.verify(sample)
        for is_warning, text in found.lines():
            logger.log(logging.WARNING if is_warning else logging.INFO, text)
        self._put_status({**status, "verify": found.as_dict()})

    def _reason(self, code: int) -> str | None:
        if code == EXIT_TOO_MANY_ERRORS:
            return f"{self._num_errors} requests failed, more than --max-errors {self.files.max_errors}"
        return self.stop.reason or "another rank was asked to stop" if code == EXIT_STOPPED else None
