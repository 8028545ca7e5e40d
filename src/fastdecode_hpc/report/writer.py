"""Writing a report while its run goes on: by rank 0 only, under a name of its own until the run has ended in order.

The file is written in HDF5's single-writer mode (SWMR), in which it can be read at any moment: while the run goes on,
and after a kill. A file system that refuses HDF5 ends no run: what is left of the report then is its summary, as JSON.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import h5py

from fastdecode_hpc.files import put_in_place, write_json
from fastdecode_hpc.report import spans
from fastdecode_hpc.report.schema import (
    COMPLETE,
    LOAD_UNITS,
    PROGRAM,
    RANK_UNITS,
    REQUEST_UNITS,
    RUNNING,
    SCHEMA_VERSION,
    SPAN_UNITS,
    STEP_UNITS,
    partial_report,
)
from fastdecode_hpc.report.spans import S_RANK, SpanGroups, group_spans
from fastdecode_hpc.report.tables import Table
from fastdecode_hpc.timing import StepTimes

logger = logging.getLogger(__name__)

H5_ERRORS = (OSError, RuntimeError)  # h5py has both for what the file system refuses, and for a full disk
FORMAT = "v110"  # of the file: the oldest that can be written and read at the same time
FLUSH_S = 10.0  # between two times at which all rows go to the file
LEAST_FLUSH_S = 1.0  # early in a run
FLUSH_SHARE = 200  # of the time since the last flush, the next takes at most one part of so many

NOTHING: Mapping[Any, Any] = MappingProxyType({})


class ReportWriter:
    """Collects a run's figures; the file gets its name when the run has ended in order, and is `.partial` until then.

    Where HDF5 can't write the file, now or later, a warning says so and `finish` writes attributes and summary to
    `<path>.json` instead.

    Parameters
    ----------
    path : Path
        A partial file that an earlier run left there is replaced.
    attributes : mapping
        Root attributes; what HDF5 can't hold is written as JSON text.
    ranks : sequence of int
        R-workers, one group ``/ranks/<r>`` each.
    notes : mapping of str to str
        What a reader of the summary has to know; attributes of ``/summary``.

    Attributes
    ----------
    load_limit : float
        Most tokens that a step should read, as of the next step; NaN where there is no limit.
    """

    def __init__(
        self,
        path: str | Path,
        attributes: Mapping[str, Any],
        ranks: Sequence[int],
        *,
        load_limit: float | None = None,
        notes: Mapping[str, str] = NOTHING,
    ) -> None:
        self.path = Path(path)
        self.load_limit = math.nan if load_limit is None else load_limit
        self._partial = partial_report(self.path)
        self._attributes = {"program": PROGRAM, "schema_version": SCHEMA_VERSION, "state": RUNNING, **attributes}
        self._notes = notes
        self._groups = SpanGroups()
        self._load = _Load(tuple(ranks))
        self._num_steps = 0
        self._created = self._flushed = time.monotonic()
        self._flush_s = LEAST_FLUSH_S
        self._file: h5py.File | None = None
        self._identity: tuple[int, int] | None = None  # of the partial file that is ours
        with self._or_json():
            self._partial.unlink(missing_ok=True)  # a job that still writes it, though it shouldn't, keeps its file
            self._file = _open(self._partial, "x", locking="best-effort")  # without locks where there are none
            self._identity = _identity(self._partial)
            self._make_tables(self._file, tuple(ranks))

    def _make_tables(self, file: h5py.File, ranks: tuple[int, ...]) -> None:
        """All that the file will hold but the summary: nothing can be added to a file that others may read."""
        _set_attributes(file.attrs, self._attributes)
        _set_attributes(file.create_group("summary").attrs, self._notes)
        self._steps = Table(file, "steps", STEP_UNITS)
        self._loads = Table(file, "load", LOAD_UNITS)
        self._requests = Table(file, "requests", REQUEST_UNITS)
        self._ranks = {rank: Table(file, f"ranks/{rank}", RANK_UNITS) for rank in ranks}
        self._spans = {rank: Table(file, f"ranks/{rank}/spans", SPAN_UNITS) for rank in {S_RANK, *ranks}}
        _set_attributes(file["ranks"].attrs, {
            "spans_group_steps": spans.GROUP_STEPS, "spans_least_gap_steps": spans.LEAST_GAP,
            "spans_max_groups": spans.MAX_GROUPS, "spans_max_spans": spans.MAX_SPANS,
        })  # fmt: skip
        self._tables = (self._steps, self._loads, self._requests, *self._ranks.values(), *self._spans.values())
        file.swmr_mode = True

    @property
    def fallback(self) -> Path:
        """Where the summary goes if HDF5 can't write."""
        return self.path.with_name(f"{self.path.name}.json")

    def add_step(self, times: StepTimes) -> None:
        """One step of one slot."""
        if self._file is None:
            return
        self._num_steps += 1
        with self._or_json():
            self._steps.append({name: getattr(times, name) for name in STEP_UNITS})
            for rank, rank_times in times.ranks.items():
                self._ranks[rank].append({name: getattr(rank_times, name) for name in RANK_UNITS})
            if row := self._load.add(times, self.load_limit):
                self._loads.append(row)
            self._add_spans(self._groups.add(times))
            if time.monotonic() - self._flushed > self._flush_s:
                self.flush()

    def _add_spans(self, group: list[StepTimes]) -> None:
        if not group:
            return
        found = group_spans(group)
        for rank, columns in found.items():
            self._spans[rank].extend(columns)
        self._groups.bound(sum(len(columns["kind"]) for columns in found.values()))

    def add_request(self, values: Mapping[str, float]) -> None:
        """One request that has its record (`REQUEST_UNITS`)."""
        if self._file is None:
            return
        with self._or_json():
            self._requests.append(values)

    def flush(self) -> None:
        """Hand all rows to the operating system: whoever opens the file from now on finds them."""
        if self._file is None:
            return
        started = time.monotonic()
        with self._or_json():
            for table in self._tables:
                table.flush()
            if self._file is not None:
                self._file.flush()
        self._flushed = time.monotonic()
        wanted = min(FLUSH_S, max(LEAST_FLUSH_S, self._flushed - self._created))
        self._flush_s = max(wanted, FLUSH_SHARE * (self._flushed - started))

    def finish(
        self, summary: Mapping[str, tuple[float, str]], of_ranks: Mapping[int, Mapping[str, Any]] = NOTHING
    ) -> None:
        """Write ``/summary`` (value and unit by name), bring all to the disk and give the file its name.

        Parameters
        ----------
        of_ranks : mapping
            Attributes of R-workers, by rank.
        """
        if self._file is not None:
            with self._or_json():
                self._finish_file(summary, of_ranks)
                return
        figures = {name: {"value": value, "units": unit} for name, (value, unit) in summary.items()}
        attributes = json.loads(json.dumps(self._attributes | {"state": COMPLETE}, default=str))
        try:
            write_json(self.fallback, {"attributes": attributes, "summary": figures, "notes": dict(self._notes)})
        except OSError as error:
            logger.warning("%s cannot be written either: %s", self.fallback, error.strerror)

    def _finish_file(self, summary: Mapping[str, tuple[float, str]], of_ranks: Mapping[int, Mapping[str, Any]]) -> None:
        self._add_rest()
        self._close()
        if _identity(self._partial) != self._identity:
            raise OSError(f"{self._partial} has been replaced by another job that writes the same report")
        with _open(self._partial, "r+", locking=False) as file:  # somebody may look at it
            for name, (value, unit) in summary.items():
                file.create_dataset(f"summary/{name}", data=value).attrs["units"] = unit
            for rank, attributes in of_ranks.items():
                _set_attributes(file[f"ranks/{rank}"].attrs, attributes)
            file.attrs["state"] = COMPLETE
        put_in_place(self._partial, self.path)

    def _add_rest(self) -> None:
        """Write what steps and groups that are not complete hold."""
        self._add_spans(self._groups.take())
        if row := self._load.take():
            self._loads.append(row)
        for table in self._tables:
            table.flush()

    @contextmanager
    def _or_json(self) -> Iterator[None]:
        """Give the HDF5 file up if it can't be written; the run goes on."""
        try:
            yield
        except H5_ERRORS as error:
            logger.warning(
                "the report %s cannot be written: %s; the run goes on, and its summary will be in %s. Where the file "
                "system has no locks, HDF5_USE_FILE_LOCKING=FALSE in the environment helps; else name another folder",
                self.path,
                str(error).partition("\n")[0],
                self.fallback,
            )
            self._drop_file()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _drop_file(self) -> None:
        with suppress(*H5_ERRORS):
            self._close()
        with suppress(OSError):
            if _identity(self._partial) == self._identity:
                self._partial.unlink()

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Of a run that failed leave what is known of its steps."""
        if self._file is None:
            return
        if not self._num_steps:
            self._drop_file()
            return
        with self._or_json():
            self._add_rest()
            self._close()


class _Load:
    """Adds up the load of a step over its slots, and how it lies on the R-workers."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._row: dict[str, float] | None = None
        self._of_rank: dict[int, int] = {}

    def add(self, times: StepTimes, limit: float) -> dict[str, float] | None:
        """Take a step of one slot; the row of the step before, if that is complete now."""
        done = None
        if self._row is None or self._row["step"] != times.step:
            done = self.take()
            self._row = {"step": times.step, "load_tokens": 0, "load_limit": limit}
            self._of_rank = dict.fromkeys(self._ranks, 0)
        self._row["load_tokens"] += times.load_tokens
        for rank, of_rank in times.ranks.items():
            self._of_rank[rank] += of_rank.load_tokens
        return done

    def take(self) -> dict[str, float] | None:
        """The row of the step that is not followed by another yet."""
        row, self._row = self._row, None
        if row is not None:
            loads = list(self._of_rank.values()) or [0]
            row |= {"rank_load_max": max(loads), "rank_load_mean": sum(loads) / len(loads)}
        return row


def _open(path: Path, mode: str, *, locking: str | bool) -> h5py.File:
    try:
        return h5py.File(path, mode, libver=FORMAT, locking=locking)
    except AttributeError:  # an HDF5 library that can't be told
        return h5py.File(path, mode, libver=FORMAT)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _set_attributes(attributes: h5py.AttributeManager, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        attributes[name] = value if isinstance(value, str | int | float) else json.dumps(value, default=str)
