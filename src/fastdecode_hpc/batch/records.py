"""Writing the output, one JSON record a line.

A record is handed to the file system before the next one is made, so a killed run loses at most the line it was
writing.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from fastdecode_hpc.batch.openai_records import Responses
from fastdecode_hpc.batch.requests import RequestError
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.files import OutputError
from fastdecode_hpc.sequence import Choice, Request, TokenLogprob

RECORD_START: Final = b'{"index": '  # how every record begins
# Inside JSON strings these end a line for some readers (`str.splitlines`), so they are written as escapes.
_LINE_SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class RecordWriter:
    """Appends records to the output, each flushed when it is written.

    Parameters
    ----------
    path : str or Path
        The output file.
    responses : Responses
        Writes answers to OpenAI batch lines.
    go_on_at : int or None
        Bytes that the file holds, as `resume.load_recorded` left it; None: it is emptied.

    Attributes
    ----------
    num_written : int
        Records this writer wrote, errors among them.
    errors : Counter
        How many of them were errors, by code.

    Raises
    ------
    ConfigError
        When the file cannot be opened, another process writes to it, or it has changed since it was read.
    """

    def __init__(self, path: str | Path, responses: Responses, *, go_on_at: int | None = None) -> None:
        self.path = Path(path)
        self.num_written = 0
        self.errors: Counter[str] = Counter()
        self._responses = responses
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None
        _lock(self._file, self.path)
        if go_on_at is None:
            self._file.truncate(0)
        elif os.fstat(self._file.fileno()).st_size != go_on_at:
            raise ConfigError(f"the output {path} was changed while this job started; is another job writing to it?")

    @property
    def num_errors(self) -> int:
        """Error records this writer wrote."""
        return self.errors.total()

    def write_completion(
        self, request: Request, choices: Sequence[Choice], *, prompt_tokens: int, notes: Sequence[str] = ()
    ) -> None:
        """Append the record of a request that was run.

        Notes
        -----
        Token ids are written where the request asks for them, log-probabilities and `notes` where there are any.
        """
        if request.endpoint is None:
            record = {
                "index": request.index,
                "custom_id": request.custom_id,
                **_own_answer(request, choices, prompt_tokens),
            }
        else:
            record = self._responses.record(request, choices, prompt_tokens)
        if notes:
            record["notes"] = list(notes)
        self._append(record, request.content_hash)

    def write_error(self, item: Request | RequestError, code: str, message: str) -> None:
        """Append the record of a request that could not be run, or not to its end."""
        record: dict[str, Any] = {"index": item.index, "custom_id": item.custom_id}
        if item.is_batch_line:
            record["response"] = None
        record["error"] = {"code": code, "message": message}
        self._append(record, item.content_hash)
        self.errors[code] += 1

    def close(self) -> None:
        """Bring the records to the disk and close the file."""
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            with suppress(OSError):  # what is buffered fails once more, but the file is closed
                self._file.close()
            raise OutputError(self.path, error) from None

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OutputError) if error is not None else nullcontext():  # what failed first has to be seen
            self.close()

    def _append(self, record: dict[str, Any], content_hash: str) -> None:
        record["content_hash"] = content_hash
        try:
            self._file.write(encode_record(record))
            self._file.flush()
        except OSError as error:
            raise OutputError(self.path, error) from None
        self.num_written += 1


def encode_record(record: dict[str, Any]) -> bytes:
    """One record as a line of UTF-8 JSON; half surrogate pairs become U+FFFD."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    for separator, escape in _LINE_SEPARATORS.items():
        line = line.replace(separator, escape)
    try:
        return f"{line}\n".encode()
    except UnicodeEncodeError:
        return f"{line}\n".encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep other jobs from writing to the file at the same time, where the file system has locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another job is writing to the output {path}; wait for it, or name another output") from None
    except OSError:
        return


def _own_answer(request: Request, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    """The program's own form; a single choice stands flat."""
    answers = [_own_choice(request, choice) for choice in choices]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sum(len(choice.token_ids) for choice in choices)}
    return {**(answers[0] if len(answers) == 1 else {"choices": answers}), "usage": usage}


def _own_choice(request: Request, choice: Choice) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": choice.text, "finish_reason": choice.finish_reason}
    if request.return_token_ids:
        answer["token_ids"] = choice.token_ids
    if choice.logprobs is not None:
        answer["logprobs"] = [_logprob_fields(item) for item in choice.logprobs]
    return answer


def _logprob_fields(item: TokenLogprob) -> dict[str, Any]:
    top = [[token, _finite(logprob)] for token, logprob in item.top]
    return {"token": item.token, "logprob": _finite(item.logprob), "top": top}


def _finite(value: float) -> float | None:
    """JSON has no infinity; the log-probability of an impossible token is written as null."""
    return float(value) if math.isfinite(value) else None
