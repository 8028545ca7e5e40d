"""After a crash: a report of what the records of an output hold."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from fastdecode_hpc import __version__
from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.files import check_writable, partial_name, put_in_place
from fastdecode_hpc.report.rows import failed_row, reason_code
from fastdecode_hpc.report.schema import FINISH_REASONS, PROGRAM, REBUILT, REQUEST_UNITS, SCHEMA_VERSION
from fastdecode_hpc.report.tables import Table

MAX_LINE_BYTES = 2**30


def rebuild(output: Path, path: Path) -> str:
    """Write the report; a line for people that says what is in it.

    Records hold neither steps nor times, so there are ``/requests`` and a summary of counts only.

    Raises
    ------
    ConfigError
        If the output cannot be read or a line before the last is no record, or the report cannot be written.
    """
    check_writable(path)
    if path.resolve() == output.resolve():
        raise ConfigError(f"the report {path} is the output itself; name another file")
    partial = partial_name(path)
    try:
        with h5py.File(partial, "w") as file:
            counts = _fill(file, output)
        put_in_place(partial, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return (
        f"{path}: {counts['num_requests']} requests, {counts['num_errors']} of them with an error, "
        f"{counts['output_tokens']} output tokens, rebuilt from {output}"
    )


def _fill(file: h5py.File, output: Path) -> Counter[str]:
    file.attrs.update({
        "program": PROGRAM, "schema_version": SCHEMA_VERSION, "program_version": __version__, "state": REBUILT,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "rebuilt_from": str(output),
    })  # fmt: skip
    if job := _job_of(output):
        file.attrs["job"] = job
    requests, counts = Table(file, "requests", REQUEST_UNITS), Counter[str]()
    for record in read_records(output):
        row = record_row(record)
        requests.append(row)
        counts.update(num_requests=1, num_errors=int(row["failed"]))
        counts.update({name: int(row[name]) for name in ("prompt_tokens", "output_tokens")})
    requests.flush()
    for name in ("num_requests", "num_errors", "prompt_tokens", "output_tokens"):
        unit = "tokens" if name.endswith("tokens") else "1"
        file.create_dataset(f"summary/{name}", data=counts[name]).attrs["units"] = unit
    file["summary"].attrs["rebuilt"] = (
        f"from the records of {output.name}, of all runs that wrote it; they hold no times"
    )
    return counts


def _job_of(output: Path) -> str:
    """How the output was made, as JSON, where that lies beside it."""
    try:
        return output.with_name(f"{output.name}.job.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def read_records(output: Path) -> Iterator[dict[str, Any]]:
    """All whole records of an output; a last line that was cut off is left out.

    Raises
    ------
    ConfigError
        If the file cannot be read, or another line is no record.
    """
    try:
        file = output.open("rb")
    except OSError as error:
        raise ConfigError(f"the output {output} cannot be read: {error.strerror}") from None
    with file:
        torn, shown = 0, ""
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if torn:
                raise ConfigError(f"line {torn} of {output} is no record of this program: {show(shown)}")
            record = _parse(line)
            if record is None:
                torn, shown = number, line[:200].decode("utf-8", "replace")
            else:
                yield record
        if torn == 1:
            raise ConfigError(f"{output} holds no record of this program: {show(shown)}")


def _parse(line: bytes) -> dict[str, Any] | None:
    """A record, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("index"), int) and line.endswith(b"\n")
    return record if is_record and {"text", "choices", "response", "error"} & set(record) else None


def record_row(record: dict[str, Any]) -> dict[str, float]:
    """The row of ``/requests`` that a record holds; times are NaN.

    Raises
    ------
    ConfigError
        If parts of the record are not what this program writes.
    """
    row = failed_row(record["index"])
    if record.get("error") is not None:
        return row
    try:
        answer = record if "response" not in record else record["response"]["body"]
        usage, choices = answer["usage"], answer.get("choices") or [answer]
        code = reason_code([choice["finish_reason"] for choice in choices])
        counts = {"prompt_tokens": int(usage["prompt_tokens"]), "output_tokens": int(usage["completion_tokens"])}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"the record of index {record['index']} is none of this program") from None
    assert 0 <= code < len(FINISH_REASONS)
    return {**row, **counts, "finish_reason": code, "failed": False}
