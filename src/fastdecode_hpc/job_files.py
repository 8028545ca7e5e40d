"""The files of a batch job, checked before anything is loaded."""

from __future__ import annotations

import os
import select
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.files import check_writable
from fastdecode_hpc.report.schema import partial_report
from fastdecode_hpc.sequence import SamplingParams

STDIN = "-"
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
SPOOL_BYTES = 1 << 20
SPOOL_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What a job reads and writes, and how it takes its input's lines."""

    input: str
    output: Path
    overwrite: bool = False
    report: Path | None = None
    verify: int = 0  # finished requests to recompute afterwards
    max_errors: int | None = None
    auto_id: bool = False
    defaults: SamplingParams = field(default_factory=SamplingParams)

    @property
    def status(self) -> Path:
        """The state of the job in words, beside the output."""
        return self.output.with_name(f"{self.output.name}.status.json")

    @property
    def fingerprint(self) -> Path:
        """How the output was made, beside it."""
        return self.output.with_name(f"{self.output.name}.job.json")

    @property
    def parked(self) -> Path:
        """Partly generated answers, beside the output."""
        return self.output.with_name(f"{self.output.name}.parked.jsonl")

    @property
    def has_output(self) -> bool:
        """Whether there is an output to go on with."""
        return not self.overwrite and self.output.exists() and self.output.stat().st_size > 0

    def check(self) -> None:
        """Find what would fail later, before anything is loaded.

        Raises
        ------
        ConfigError
            With the way out.
        """
        if self.max_errors is not None and self.max_errors < 0:
            raise ConfigError(f"--max-errors is {self.max_errors}; it must be at least 0")
        if self.verify < 0:
            raise ConfigError(f"--verify is {self.verify}; it must be at least 0")
        if str(self.output) == STDIN:
            raise ConfigError("the output cannot be standard output: records are read back to resume; name a file")
        if self.input != STDIN and not Path(self.input).is_file():
            raise ConfigError(f"the input {self.input} is no file; give a JSONL file, or - for standard input")
        for path in filter(None, (self.output, self.report)):
            check_writable(path)
        unfinished = partial_report(self.report) if self.report is not None else None
        for path in filter(None, (self.report, unfinished)):
            if path.exists() and not _is_hdf5(path):
                raise ConfigError(f"the report {path} exists and is no HDF5 file; name another")
        beside = (self.status, self.fingerprint, self.parked)
        names = [os.path.realpath(path) for path in (self.input, self.output, self.report, unfinished, *beside) if path]
        if len(set(names)) < len(names):
            raise ConfigError(
                "input, output, report and the files beside the output "
                f"({', '.join(path.name for path in beside)}) must be different files"
            )


def _is_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE


def spool_standard_input(folder: Path, stop_requested: Callable[[], bool]) -> tuple[IO[bytes], bool]:
    """Copy standard input to a temporary file in a folder, to be read more than once.

    A slow producer would otherwise keep rank 0 from its main loop, and the other ranks would take it for dead.

    Returns
    -------
    file
        Removed when it is closed.
    bool
        Whether the input came to its end before a stop was requested.

    Raises
    ------
    ConfigError
        If the copy cannot be written.
    """
    try:
        file = tempfile.NamedTemporaryFile(prefix=".fastdecode-", suffix=".jsonl", dir=folder)  # noqa: SIM115
        while not (stopped := stop_requested()):
            if not select.select([sys.stdin.buffer], [], [], SPOOL_POLL_S)[0]:
                continue
            data = os.read(sys.stdin.fileno(), SPOOL_BYTES)
            if not data:
                break
            file.write(data)
        file.flush()
    except OSError as error:
        raise ConfigError(f"standard input cannot be copied to the folder {folder}: {error.strerror}") from None
    return file, not stopped
