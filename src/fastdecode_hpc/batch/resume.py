"""Reading an output back, to go on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdecode_hpc.batch.records import RECORD_START
from fastdecode_hpc.batch.requests import RequestError
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.sequence import Request

_ANSWERS = ("text", "choices", "response", "error")  # a record has one of these
_MAX_RECORD_BYTES = 2**30  # 128 choices of 8000 tokens with 20 log-probabilities each, and room


@dataclass(slots=True)
class Recorded:
    """The records an output holds.

    Attributes
    ----------
    hashes : dict of int to int
        Of the input lines that are answered, by index.
    num_failed : int
        How many of the records are errors.
    num_bytes : int
        Length of the file, whole records only.
    """

    hashes: dict[int, int] = field(default_factory=dict)
    num_failed: int = 0
    num_bytes: int = 0

    def __contains__(self, index: int) -> bool:
        return index in self.hashes

    def __len__(self) -> int:
        return len(self.hashes)


def load_recorded(path: str | Path) -> Recorded:
    """Return what records an output file holds, and make the file ready to be resumed.

    A last line that was cut off while it was written is removed from the file. A missing file holds no records.

    Raises
    ------
    ConfigError
        With the line's number, when a line is no record or repeats one.
    """
    path = Path(path)
    recorded = Recorded()
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
    recorded.num_bytes = offset if torn_at is None else torn_at[1]
    if torn_at is not None:
        os.truncate(path, recorded.num_bytes)
    return recorded


def _lines_of(path: Path) -> Iterable[bytes]:
    try:
        with path.open("rb") as file:
            yield from iter(lambda: file.readline(_MAX_RECORD_BYTES), b"")
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
    start = line.strip(b"\0\r\n")[: len(RECORD_START)]  # a crash of the machine can leave NULs
    if not RECORD_START.startswith(start):
        raise ConfigError(f"line {number} of {path} is no record of this program; name another output")


def _add_record(record: Any, recorded: Recorded, number: int, path: Path) -> None:
    index = record.get("index") if isinstance(record, dict) else None
    if not isinstance(index, int) or isinstance(index, bool) or not any(name in record for name in _ANSWERS):
        raise ConfigError(f"line {number} of {path} is no record of this program; name another output")
    if index in recorded:
        raise ConfigError(f"line {number} of {path} repeats the record with index {index}; remove one of them")
    recorded.hashes[index] = hash_number(record.get("content_hash"))
    recorded.num_failed += record.get("error") is not None


def hash_number(text: Any) -> int:
    """A content hash as a number, which takes less memory; -1 for what is none."""
    try:
        return int(text, 16)
    except (TypeError, ValueError):
        return -1


def check_same_input(recorded: Recorded, items: Iterable[Request | RequestError], output: Path) -> None:
    """Refuse to go on with an output that answers other lines than the input has.

    Raises
    ------
    ConfigError
        Naming the first line that differs.
    """
    num_left = len(recorded)
    for item in items:
        if not num_left:
            return
        if item.index not in recorded:
            continue
        num_left -= 1
        if recorded.hashes[item.index] != hash_number(item.content_hash):
            raise ConfigError(
                f"the output {output} belongs to another input: line {item.line} of the input (index {item.index}) is "
                "not the line that its record answers; name another output, or replace this one (--overwrite)"
            )
    if num_left:
        raise ConfigError(
            f"the output {output} belongs to another input: it has {num_left} records of lines that the input does "
            "not have; name another output, or replace this one (--overwrite)"
        )
