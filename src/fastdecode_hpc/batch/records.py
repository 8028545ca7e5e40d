"""Writing the output, one JSON record a line, and reading it back to resume a run.

A record is handed to the file system before the next one is made, so a killed run loses at most the line it was
writing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.sequence import Request, TokenLogprob

_HEAD: Final = b'{"index": '  # how every record starts
# Inside JSON strings these end a line for some readers (`str.splitlines`), so they are written as escapes.
_LINE_SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class RecordWriter:
    """Appends records to the output, each flushed when it is written.

    Parameters
    ----------
    path : str or Path
        The output file.
    overwrite : bool
        Replace what the file holds.
    resume : bool
        Go on after the records the file holds; call `load_recorded` first, which repairs its end.

    Attributes
    ----------
    num_written : int
        Records this writer wrote, errors among them.
    num_errors : int
        Error records this writer wrote.

    Raises
    ------
    ConfigError
        When the file holds something and neither `overwrite` nor `resume` is set, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = Path(path)
        self.num_written = 0
        self.num_errors = 0
        if overwrite and resume:
            raise ConfigError("overwrite and resume contradict each other; give one")
        _check_may_write(self.path, overwrite=overwrite, resume=resume)
        try:
            self._file = self.path.open("wb" if overwrite else "ab")
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None

    def write_completion(
        self,
        request: Request,
        *,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str,
        prompt_tokens: int,
        output_tokens: int,
        logprobs: Sequence[TokenLogprob] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Append the record of a request that was run.

        Notes
        -----
        `token_ids` are written where the request asks for them, `logprobs` and `notes` where there are any.
        """
        record: dict[str, Any] = {
            "index": request.index,
            "custom_id": request.custom_id,
            "text": text,
            "finish_reason": finish_reason,
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens},
        }
        if request.return_token_ids:
            record["token_ids"] = list(token_ids)
        if logprobs is not None:
            record["logprobs"] = [_logprob_fields(item) for item in logprobs]
        if notes:
            record["notes"] = list(notes)
        self._append(record)

    def write_error(self, index: int, custom_id: str | None, code: str, message: str) -> None:
        """Append the record of a request that could not be run, or not to its end."""
        self._append({"index": index, "custom_id": custom_id, "error": {"code": code, "message": message}})
        self.num_errors += 1

    def close(self) -> None:
        """Bring the records to the disk and close the file."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(encode_record(record))
        self._file.flush()
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


class Recorded(NamedTuple):
    """What a resumed run needs to know of a record."""

    custom_id: str | None
    failed: bool


def load_recorded(path: str | Path) -> dict[int, Recorded]:
    """Return every record of an output file by its index, and make the file ready to be resumed.

    A last line that was cut off while it was written is removed from the file. A missing file holds no records.

    Raises
    ------
    ConfigError
        With the line's number, when a line is no record or repeats one.
    """
    path = Path(path)
    recorded: dict[int, Recorded] = {}
    torn_at: tuple[int, int] | None = None  # number and offset of a line that may be torn, if it is the last
    offset = 0
    for number, line in enumerate(_lines_of(path), start=1):
        if torn_at is not None:
            raise ConfigError(f"line {torn_at[0]} of {path} is damaged; remove it to run its request again")
        record = _parse_line(line)
        if record is None:
            _check_is_ours(line, number, path)
            torn_at = number, offset
        else:
            _add_record(record, recorded, number, path)
        offset += len(line)
    if torn_at is not None:
        os.truncate(path, torn_at[1])
    return recorded


def _check_may_write(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Never destroy results by accident, and never glue a record to a torn line."""
    if overwrite or not path.exists() or path.stat().st_size == 0:
        return
    if not resume:
        raise ConfigError(f"the output {path} exists and is not empty; overwrite it, resume it, or name another")
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            raise ConfigError(f"the output {path} ends in the middle of a line; it has to be repaired to be resumed")


def _lines_of(path: Path) -> Iterable[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"the output {path} cannot be read: {error.strerror}") from None


def _parse_line(line: bytes) -> Any:
    """The JSON value of a complete line, or None."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check_is_ours(line: bytes, number: int, path: Path) -> None:
    """Refuse to cut off a last line that this program did not start to write."""
    start = line.strip(b"\0\r\n")[: len(_HEAD)]  # a crash of the machine can leave NULs
    if not _HEAD.startswith(start):
        raise ConfigError(f"line {number} of {path} is no record of this program; name another output")


def _add_record(record: Any, recorded: dict[int, Recorded], number: int, path: Path) -> None:
    index = record.get("index") if isinstance(record, dict) else None
    if not isinstance(index, int) or isinstance(index, bool) or not ("text" in record or "error" in record):
        raise ConfigError(f"line {number} of {path} is no record of this program; name another output")
    if index in recorded:
        raise ConfigError(f"line {number} of {path} repeats the record with index {index}; remove one of them")
    recorded[index] = Recorded(record.get("custom_id"), "error" in record)


def _logprob_fields(item: TokenLogprob) -> dict[str, Any]:
    top = [[token, _finite(logprob)] for token, logprob in item.top]
    return {"token": item.token, "logprob": _finite(item.logprob), "top": top}


def _finite(value: float) -> float | None:
    """JSON has no infinity; the log-probability of an impossible token is written as null."""
    return float(value) if math.isfinite(value) else None
