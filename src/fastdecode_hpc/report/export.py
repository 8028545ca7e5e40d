"""Every table of a report as a CSV file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.report.reader import Report, open_report

ROWS_AT_ONCE = 65536


def export(path: str | Path, folder: Path) -> list[Path]:
    """Write ``steps.csv``, ``ranks-1.csv``, … and the attributes as ``attributes.json`` into a folder.

    Units stand in the head, as ``t_start (s)``; codes are written as the words they stand for, and NaN as nothing.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    ConfigError
        If the report cannot be read, or the folder not be written.
    """
    with open_report(path) as report:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = [_export_table(report, table, folder) for table in report.tables()]
            return [*written, _export_summary(report, folder), _export_attributes(report, folder)]
        except OSError as error:
            raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}") from None


def _export_table(report: Report, table: str, folder: Path) -> Path:
    units = report.units(table)
    columns = report.columns(table)
    words = {name: dict(enumerate(report.names(table, name))) for name in units}
    path = folder / f"{table.replace('/', '-')}.csv"
    num_rows = min(map(len, columns.values()), default=0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_head(units))
        for first in range(0, num_rows, ROWS_AT_ONCE):
            parts = (_cells(columns[name][first : first + ROWS_AT_ONCE].tolist(), words[name]) for name in units)
            writer.writerows(zip(*parts, strict=True))
    return path


def _head(units: dict[str, str]) -> list[str]:
    return [name if unit == "1" else f"{name} ({unit})" for name, unit in units.items()]


def _cells(values: list[Any], words: dict[int, str]) -> Iterable[Any]:
    if words:
        return [words.get(value, value) for value in values]
    return ["" if value != value else value for value in values]


def _export_summary(report: Report, folder: Path) -> Path:
    path = folder / "summary.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "value", "units"])
        writer.writerows([name, value, unit] for name, (value, unit) in report.summary.items())
    return path


def _export_attributes(report: Report, folder: Path) -> Path:
    path = folder / "attributes.json"
    value = {**report.attributes, "notes": report.notes}
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    return path
