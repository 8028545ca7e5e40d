"""The HDF5 file of a sweep: one row a measurement, complete after each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastdecode_hpc.config import ConfigError, differences, option_defaults
from fastdecode_hpc.files import check_writable, partial_name, put_in_place
from fastdecode_hpc.report.schema import PROGRAM

KIND, SWEEP_VERSION = "sweep", 1
FIXED = "fixed"  # attribute: JSON of what is the same for all rows
KEYS = "keys"  # attribute: JSON of the columns that tell one measurement from the others
Row = dict[str, Any]  # text, whole numbers or floats; the same columns in all rows


class SweepFile:
    """Rows of a sweep, kept in memory and in a file that is replaced whole at each new one.

    Parameters
    ----------
    path : Path
        May exist, from the same sweep.
    units : mapping of str to str
        Of all columns; ``text`` for those.
    keys : sequence of str
        Columns that tell one measurement from the others.
    fixed : mapping of str to str
        What is the same for all rows, such as the model.
    attributes : mapping
        Of a new file: where and when it was begun.

    Raises
    ------
    ConfigError
        If the file is none of a sweep with these columns, or of one of something else.
    """

    def __init__(
        self,
        path: Path,
        units: Mapping[str, str],
        keys: Sequence[str],
        *,
        fixed: Mapping[str, str],
        attributes: Mapping[str, Any],
    ) -> None:
        check_writable(path)
        self.path, self.units, self.keys = path, dict(units), tuple(keys)
        self._attributes = {**attributes, FIXED: json.dumps(fixed), KEYS: json.dumps(list(keys))}
        if path.exists():
            self._attributes = _read_attributes(path)
            _check_fixed(path, json.loads(self._attributes.get(FIXED, "{}")), fixed)
        self.rows: list[Row] = read_sweep(path, self.units) if path.exists() else []
        self._known = {self._key(row) for row in self.rows}

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return self._key(row) in self._known

    def add(self, row: Row) -> None:
        """Keep a row; the file has it when this returns."""
        assert set(row) == set(self.units), f"columns {sorted(set(row) ^ set(self.units))}"
        self.rows.append(row)
        self._known.add(self._key(row))
        self._write()

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.keys)

    def _write(self) -> None:
        _write_sweep(self.path, self.units, self.rows, self._attributes)


def _write_sweep(path: Path, units: Mapping[str, str], rows: Sequence[Row], attributes: Mapping[str, Any]) -> None:
    partial = partial_name(path)
    try:
        with h5py.File(partial, "w") as file:
            file.attrs.update({**attributes, "program": PROGRAM, "kind": KIND})
            file.attrs["sweep_version"] = SWEEP_VERSION
            for name, unit in units.items():
                _write_column(file, name, unit, [row[name] for row in rows])
        put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def merge_sweeps(paths: Sequence[Path], out: Path) -> tuple[list[Row], list[str]]:
    """Put the rows of several parts of one sweep, of a job array's tasks, into one file.

    Returns
    -------
    rows : list of dict
    keys : list of str
        Columns that tell one measurement from the others.

    Raises
    ------
    ConfigError
        If a part is no sweep, or of something else than the first, or two have the same measurement.
    """
    check_writable(out)
    attributes, units = _read_attributes(paths[0]), _read_units(paths[0])
    keys: list[str] = json.loads(attributes[KEYS])
    rows: list[Row] = []
    found: dict[tuple[Any, ...], Path] = {}
    for path in paths:
        _check_fixed(path, json.loads(_read_attributes(path)[FIXED]), json.loads(attributes[FIXED]))
        for row in read_sweep(path, units):
            key = tuple(row[name] for name in keys)
            if key in found:
                same = ", ".join(f"{name} {row[name]}" for name in keys)
                raise ConfigError(f"{found[key]} and {path} have the same measurement ({same}); leave one of them out")
            found[key] = path
            rows.append(row)
    hosts = sorted({str(_read_attributes(path).get("host", "")) for path in paths})
    merged = {**attributes, "hosts": json.dumps(hosts), "parts": json.dumps([path.name for path in paths])}
    _write_sweep(out, units, rows, merged)
    return rows, keys


def read_sweep(path: Path, units: Mapping[str, str] | None = None) -> list[Row]:
    """Rows of a sweep's file.

    Parameters
    ----------
    units : mapping of str to str, optional
        The columns that it must have; by default those it has.

    Raises
    ------
    ConfigError
        If it is no such file.
    """
    with _open(path) as file:
        columns = {name: _read_column(data) for name, data in file["samples"].items()}
    if units is not None and set(columns) != set(units):
        names = ", ".join(sorted(set(columns) ^ set(units)))
        raise ConfigError(f"the sweep {path} has other columns ({names}); it is of another version: name another file")
    return _rows(columns)


@contextmanager
def _open(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("kind") != KIND or file.attrs.get("program") != PROGRAM:
                raise ConfigError(f"{path} is no sweep of this program; name another file")
            yield file
    except (OSError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the sweep {path} cannot be read: {str(error).partition(chr(10))[0]}") from None


def _read_attributes(path: Path) -> dict[str, Any]:
    with _open(path) as file:
        return dict(file.attrs)


def _read_units(path: Path) -> dict[str, str]:
    with _open(path) as file:
        return {
            name: "text" if h5py.check_string_dtype(data.dtype) is not None else str(data.attrs["units"])
            for name, data in file["samples"].items()
        }


def _check_fixed(path: Path, known: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuse to mix figures of different models or options."""
    defaults = {name: str(value) for name, value in option_defaults().items()}
    if found := differences(known, wanted, defaults):
        raise ConfigError(f"{path} is a sweep of something else: {'; '.join(found)}; name another file")


def _rows(columns: Mapping[str, Iterable[Any]]) -> list[Row]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _write_column(file: h5py.File, name: str, unit: str, values: list[Any]) -> None:
    dtype = h5py.string_dtype() if unit == "text" else np.array(values).dtype
    data = file.create_dataset(f"samples/{name}", data=values, dtype=dtype, compression="gzip", chunks=True)
    data.attrs["units"] = "1" if unit == "text" else unit


def _read_column(data: h5py.Dataset) -> list[Any]:
    if h5py.check_string_dtype(data.dtype) is not None:
        return [str(value) for value in data.asstr()[:]]
    values: list[Any] = data[:].tolist()
    return values
