"""The HDF5 report of a run: written by rank 0 only, in pieces to a temporary name, renamed when complete.

A file system that refuses HDF5 ends no run: what is left of the report then is its summary, as JSON.

The only h5py import. Columns are chunked, compressed datasets with a ``units`` attribute.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import h5py
import numpy as np

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.files import partial_name, put_in_place, write_json
from fastdecode_hpc.timing import StepTimes

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
FLUSH_ROWS = 4096
H5_ERRORS = (OSError, RuntimeError)  # h5py has both for what the file system refuses, and for a full disk

STEP_UNITS = {
    "step": "1",
    "slot": "1",
    "t_start": "s",
    "t_end": "s",
    "num_rows": "1",
    "load_tokens": "tokens",
    "prefill_tokens": "tokens",
    "t_s_part": "s",
    "t_head": "s",
    "t_r_part": "s",
    "t_transport": "s",
    "t_exposed": "s",
    "t_wait": "s",
    "t_turn": "s",
    "t_prefill": "s",
}
RANK_UNITS = {
    "t_r_part": "s",
    "t_turn": "s",
    "t_wait": "s",
    "t_exposed": "s",
    "free_blocks": "blocks",
    "load_tokens": "tokens",
}
REQUEST_UNITS = {
    "index": "1",
    "prompt_tokens": "tokens",
    "output_tokens": "tokens",
    "t_admitted": "s",
    "t_first_token": "s",
    "t_finished": "s",
}
_WHOLE = {"1": np.int64, "tokens": np.int64, "blocks": np.int64}


class _Table:
    """Columns that grow in a group of the file; rows are buffered and appended in pieces."""

    def __init__(self, file: h5py.File, path: str, units: Mapping[str, str]) -> None:
        self._buffers = {name: array("d") for name in units}
        self._datasets = {name: _make_column(file, f"{path}/{name}", unit) for name, unit in units.items()}

    def append(self, values: Mapping[str, float]) -> None:
        for name, buffer in self._buffers.items():
            buffer.append(values[name])
        if len(buffer) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        for name, buffer in self._buffers.items():
            dataset = self._datasets[name]
            size = dataset.shape[0]
            dataset.resize(size + len(buffer), axis=0)
            dataset[size:] = np.array(buffer)
            del buffer[:]


def _make_column(file: h5py.File, path: str, unit: str) -> h5py.Dataset:
    dataset = file.create_dataset(
        path, shape=(0,), maxshape=(None,), chunks=(FLUSH_ROWS,), dtype=_WHOLE.get(unit, np.float64), compression="gzip"
    )
    dataset.attrs["units"] = unit
    return dataset


class ReportWriter:
    """Collects a run's figures; the file appears under its name when the run is complete.

    Where HDF5 can't write the file, now or later, a warning says so and `finish` writes attributes and summary to
    `<path>.json` instead.

    Parameters
    ----------
    path : Path
    attributes : mapping
        Root attributes; what HDF5 can't hold is written as JSON text.
    ranks : sequence of int
        R-workers, one group ``/ranks/<r>`` each.
    """

    def __init__(self, path: str | Path, attributes: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        self.path = Path(path)
        self._partial = partial_name(self.path)
        self._attributes = {"schema_version": SCHEMA_VERSION, **attributes}
        self._file: h5py.File | None = None
        with self._or_json():
            self._file = _create(self._partial)
            _set_attributes(self._file, self._attributes)
            self._steps = _Table(self._file, "steps", STEP_UNITS)
            self._requests = _Table(self._file, "requests", REQUEST_UNITS)
            self._ranks = {rank: _Table(self._file, f"ranks/{rank}", RANK_UNITS) for rank in ranks}

    @property
    def fallback(self) -> Path:
        """Where the summary goes if HDF5 can't write."""
        return self.path.with_name(f"{self.path.name}.json")

    def add_step(self, times: StepTimes) -> None:
        """One step of one slot."""
        if self._file is None:
            return
        with self._or_json():
            self._steps.append({name: getattr(times, name) for name in STEP_UNITS})
            for rank, rank_times in times.ranks.items():
                self._ranks[rank].append({name: getattr(rank_times, name) for name in RANK_UNITS})

    def add_request(self, values: Mapping[str, float]) -> None:
        """One finished request (`REQUEST_UNITS`)."""
        if self._file is None:
            return
        with self._or_json():
            self._requests.append(values)

    def finish(
        self, summary: Mapping[str, tuple[float, str]], kv_huge_pages: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        """Write ``/summary`` (value and unit by name), bring all to the disk and give the file its name.

        Parameters
        ----------
        kv_huge_pages : mapping
            Share of the KV memory in use that lies on huge pages, by R-worker.
        """
        if self._file is not None:
            with self._or_json():
                self._finish_file(self._file, summary, kv_huge_pages)
                return
        figures = {name: {"value": value, "units": unit} for name, (value, unit) in summary.items()}
        attributes = json.loads(json.dumps(self._attributes, default=str))
        try:
            write_json(self.fallback, {"attributes": attributes, "summary": figures})
        except OSError as error:
            logger.warning("%s cannot be written either: %s", self.fallback, error.strerror)

    def _finish_file(
        self, file: h5py.File, summary: Mapping[str, tuple[float, str]], kv_huge_pages: Mapping[int, float]
    ) -> None:
        for table in (self._steps, self._requests, *self._ranks.values()):
            table.flush()
        for name, (value, unit) in summary.items():
            file.create_dataset(f"summary/{name}", data=value).attrs["units"] = unit
        for rank, share in kv_huge_pages.items():
            file[f"ranks/{rank}"].attrs["kv_huge_pages"] = share
        file.close()
        put_in_place(self._partial, self.path)

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

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        with suppress(*H5_ERRORS):
            if file:
                file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_file()


def _create(path: Path) -> h5py.File:
    """A new file; on a file system without locks, without one: nobody else knows its temporary name."""
    try:
        return h5py.File(path, "w", locking="best-effort")
    except AttributeError:  # an HDF5 library that can't be told
        return h5py.File(path, "w")


def _set_attributes(file: h5py.File, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        file.attrs[name] = value if isinstance(value, str | int | float) else json.dumps(value, default=str)


def format_report(path: str | Path) -> str:
    """The report as text for people: attributes, summary, and means of the steps.

    Raises
    ------
    ConfigError
        If the file is no report of this program.
    """
    try:
        with h5py.File(path, "r") as file:
            if "schema_version" not in file.attrs:
                raise ConfigError(f"{path} is no report of this program: it has no schema_version")
            return "\n".join([*_attribute_lines(file), "", *_summary_lines(file), "", *_step_lines(file)])
    except OSError as error:
        raise ConfigError(f"the report {path} cannot be read: {error}") from None


def _attribute_lines(file: h5py.File) -> list[str]:
    return [f"{name:18} {value}" for name, value in sorted(file.attrs.items())]


def _summary_lines(file: h5py.File) -> list[str]:
    rows = ((name, dataset[()], dataset.attrs["units"]) for name, dataset in file["summary"].items())
    return ["summary", *(f"  {name:32} {value:14.6g} {_unit(unit)}" for name, value, unit in rows)]


def _step_lines(file: h5py.File) -> list[str]:
    steps = {name: dataset[:] for name, dataset in file["steps"].items()}
    busy = steps["num_rows"] > 0
    lines = [f"steps ({int(busy.sum())} with rows, of {len(busy)}; per step and slot)", _STEP_HEAD]
    for name in ("num_rows", "load_tokens", "t_s_part", "t_r_part", "t_transport", "t_wait", "t_prefill"):
        values, unit = steps[name][busy], _unit(STEP_UNITS[name])
        if len(values):
            quantiles = np.quantile(values, (0.5, 0.95))
            figures = (values.mean(), *quantiles, values.max(), values.sum())
            lines.append(f"  {name:16}" + "".join(f"{x:12.5g}" for x in figures) + f" {unit}")
    return lines


def _unit(unit: str) -> str:
    return "" if unit == "1" else unit


_STEP_HEAD = "  " + " " * 16 + "".join(f"{name:>12}" for name in ("mean", "median", "p95", "max", "sum"))
