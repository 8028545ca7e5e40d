"""The HDF5 report of a run: written by rank 0 only, in pieces to a temporary name, renamed when complete.

The only h5py import. Columns are chunked, compressed datasets with a ``units`` attribute.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import h5py
import numpy as np

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.timing import StepTimes

SCHEMA_VERSION = 1
FLUSH_ROWS = 4096

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
    "t_prefill": "s",
}
RANK_UNITS = {"t_r_part": "s", "t_wait": "s", "t_exposed": "s", "free_blocks": "blocks", "load_tokens": "tokens"}
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

    Parameters
    ----------
    path : Path
    attributes : mapping
        Root attributes; what HDF5 can't hold is written as JSON text.
    ranks : sequence of int
        R-workers, one group ``/ranks/<r>`` each.

    Raises
    ------
    ConfigError
        If the file can't be made; the run then need not start.
    """

    def __init__(self, path: str | Path, attributes: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            self._file = h5py.File(self._partial, "w")
        except OSError as error:
            raise ConfigError(
                f"the report {path} cannot be written: {error}; name another folder, or set "
                "HDF5_USE_FILE_LOCKING=FALSE where the file system has no locks"
            ) from None
        _set_attributes(self._file, {"schema_version": SCHEMA_VERSION, **attributes})
        self._steps = _Table(self._file, "steps", STEP_UNITS)
        self._requests = _Table(self._file, "requests", REQUEST_UNITS)
        self._ranks = {rank: _Table(self._file, f"ranks/{rank}", RANK_UNITS) for rank in ranks}

    def add_step(self, times: StepTimes) -> None:
        """One step of one slot."""
        self._steps.append({name: getattr(times, name) for name in STEP_UNITS})
        for rank, rank_times in times.ranks.items():
            self._ranks[rank].append({name: getattr(rank_times, name) for name in RANK_UNITS})

    def add_request(self, values: Mapping[str, float]) -> None:
        """One finished request (`REQUEST_UNITS`)."""
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
        for table in (self._steps, self._requests, *self._ranks.values()):
            table.flush()
        for name, (value, unit) in summary.items():
            self._file.create_dataset(f"summary/{name}", data=value).attrs["units"] = unit
        for rank, share in kv_huge_pages.items():
            self._file[f"ranks/{rank}"].attrs["kv_huge_pages"] = share
        self._file.close()
        with self._partial.open("rb") as file:
            os.fsync(file.fileno())
        self._partial.replace(self.path)

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()
        self._partial.unlink(missing_ok=True)


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
