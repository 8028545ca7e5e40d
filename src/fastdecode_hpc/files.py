"""Output files: whether they can be written, and JSON files that appear complete or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError


def check_writable(path: Path) -> None:
    """Raise `ConfigError` unless a file of this name can be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"{path} cannot be written: permission denied")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
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
