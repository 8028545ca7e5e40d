"""Small files: whether they can be written, JSON that appears complete or not at all, JSON of others read with care."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError

_MAX_JSON_BYTES = 64 << 20  # far above any configuration or index


def check_writable(path: Path) -> None:
    """Raise `ConfigError` unless a file of this name can be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"{path} cannot be written: permission denied")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step; it does not wait for the disk, as files of status are written often."""
    partial = partial_name(path)
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)


def partial_name(path: Path) -> Path:
    """Where a file is written until it is complete: beside its place, hidden, named by the process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def put_in_place(partial: Path, path: Path) -> None:
    """Replace a file by a complete one in one step, after its data has reached the disk."""
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(path)


class OutputError(Exception):
    """A file of results can't be written any more: the disk is full, a quota is used up, the file system fails.

    Parameters
    ----------
    path : Path
    error : OSError
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path} cannot be written: {error.strerror or error}; the records before are kept, so make room and go on "
            "with the same output"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that somebody else wrote.

    Raises
    ------
    ConfigError
        If it cannot be read, is far too large, or holds anything but one JSON object.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_JSON_BYTES:
                raise ConfigError(f"{path} is larger than {_MAX_JSON_BYTES} bytes, so it is not what its name says")
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return parse_json_object(data)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parse UTF-8 JSON strictly: Python's parser lets the last of equal keys win, and other programs the first.

    Raises
    ------
    ValueError
        Unless it is one object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_with_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, and must hold an object")
    return value


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {key!r} is given twice")
    return found
