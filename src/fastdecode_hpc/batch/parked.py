"""Partly generated answers of a run that was stopped, kept in a file beside the output until they are finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.files import OutputError, partial_name, put_in_place


class Parked(NamedTuple):
    """The tokens of a request's choices so far."""

    content_hash: str  # of the request's line
    choices: tuple[tuple[int, ...], ...]


def save_parked(path: Path, parked: Mapping[int, Parked]) -> None:
    """Replace the file by these requests, by index; without any it is removed.

    Raises
    ------
    OutputError
        If the file system fails.
    """
    if not parked:
        path.unlink(missing_ok=True)
        return
    partial = partial_name(path)
    try:
        with partial.open("w") as file:
            for index, entry in sorted(parked.items()):
                file.write(json.dumps({"index": index, **entry._asdict()}) + "\n")
        put_in_place(partial, path)
    except OSError as error:
        raise OutputError(path, error) from None


def load_parked(path: Path) -> dict[int, Parked]:
    """Read what `save_parked` wrote; empty where there is no file.

    Raises
    ------
    ConfigError
        If the file holds something else; it may be removed, which only costs the tokens in it.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    return dict(_parse_line(path, number, line) for number, line in enumerate(text.splitlines(), start=1))


def _parse_line(path: Path, number: int, line: str) -> tuple[int, Parked]:
    try:
        entry = json.loads(line)
        index, content_hash, choices = entry["index"], entry["content_hash"], entry["choices"]
        parked = Parked(content_hash, tuple(tuple(_token(token) for token in choice) for choice in choices))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"line {number}: {error}") from None
    if not isinstance(index, int) or not isinstance(content_hash, str):
        raise _damaged(path, f"line {number} has no index or no content_hash")
    return index, parked


def _token(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no token id")
    return value


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}, which holds partly generated answers, is damaged ({reason}); remove it to generate "
                       "them anew")  # fmt: skip
