"""Opens a report, be it complete, unfinished or of an older version, and hands out its tables as arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.report.schema import COMPLETE, PROGRAM, RUNNING, SCHEMA_VERSION, partial_report

Array = npt.NDArray[Any]

_HEAD = struct.Struct("<8xB2xB16xQ")  # of a file: version, flags, end
_SUPERBLOCK, _SWMR_FLAG = 3, 4
_H5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # what h5py has for damaged files


class Report:
    """One open report.

    Attributes
    ----------
    path : Path
        Of the file that was opened: a partial one where there is no other.
    version : int
        Of the schema.
    state : str
        ``complete``, ``running`` (or killed), or ``rebuilt``.
    attributes : dict
        Of the root; JSON texts as the values they stand for.
    """

    def __init__(self, path: Path, file: h5py.File) -> None:
        self.path, self._file = path, file
        with self._reading("its attributes"):
            if "schema_version" not in file.attrs or file.attrs.get("program", PROGRAM) != PROGRAM:
                raise ConfigError(f"{path} is no report of this program: it has no schema_version of {PROGRAM}")
            self.version = int(file.attrs["schema_version"])
            self.attributes = {name: _decoded(value) for name, value in file.attrs.items()}
        self.state = str(self.attributes.get("state", COMPLETE))  # version 1 has complete ones only
        if self.version > SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema_version {self.version}, and this program reads up to {SCHEMA_VERSION}; read it "
                f"with the program that wrote it, {self.attributes.get('program_version', 'a newer one')}, or later"
            )

    @property
    def is_complete(self) -> bool:
        """Whether its run has ended in order."""
        return self.state != RUNNING

    @property
    def notes(self) -> dict[str, str]:
        """What has to be known of the summary, by name."""
        group = self._group("summary")
        return {} if group is None else {name: str(value) for name, value in group.attrs.items()}

    @property
    def summary(self) -> dict[str, tuple[float, str]]:
        """Figures by name, each with its unit; empty where the run has not ended."""
        group = self._group("summary")
        with self._reading("/summary"):
            return {} if group is None else {
                name: (float(data[()]), str(data.attrs["units"])) for name, data in group.items()
            }  # fmt: skip

    @property
    def ranks(self) -> list[int]:
        """The R-workers."""
        return self._ranks_with("t_r_part")

    @property
    def span_ranks(self) -> list[int]:
        """The ranks with spans."""
        return self._ranks_with("spans")

    def _ranks_with(self, name: str) -> list[int]:
        group = self._group("ranks")
        return [] if group is None else sorted(int(rank) for rank in group if name in group[rank])

    @property
    def spans_group_steps(self) -> int:
        """Consecutive steps of which spans are kept together."""
        return int(self._file["ranks"].attrs.get("spans_group_steps", 1))

    def rank_attributes(self, rank: int) -> dict[str, Any]:
        """What is told of an R-worker as a whole."""
        return dict(self._file[f"ranks/{rank}"].attrs)

    def tables(self) -> list[str]:
        """Paths of all tables, such as ``ranks/1/spans``; ``summary`` is none."""
        found: set[str] = set()

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.ndim == 1:
                found.add(name.rpartition("/")[0])

        with self._reading("its tables"):
            self._file.visititems(visit)
        return sorted(found)

    def has(self, table: str, column: str = "") -> bool:
        """Whether there is such a table, or such a column in it."""
        return f"{table}/{column}".rstrip("/") in self._file

    def units(self, table: str) -> dict[str, str]:
        """Unit of each column of a table."""
        group = self._table(table)
        with self._reading(f"/{table}"):
            columns = {name: data for name, data in group.items() if isinstance(data, h5py.Dataset)}
            return {name: str(data.attrs["units"]) for name, data in columns.items()}

    def names(self, table: str, column: str) -> list[str]:
        """What the codes of a column mean; empty where they are numbers."""
        return [str(name) for name in self._file[f"{table}/{column}"].attrs.get("names", ())]

    def columns(self, table: str, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Columns of a table, cut to one length: the file may be written to meanwhile.

        Parameters
        ----------
        names : iterable of str, optional
            All by default.

        Raises
        ------
        ConfigError
            If the table or a column is missing, or damaged.
        """
        group = self._table(table)
        names = list(self.units(table) if names is None else names)
        if missing := [name for name in names if name not in group]:
            raise ConfigError(f"{self.path} has no {', '.join(missing)} in /{table}{self._age()}")
        with self._reading(f"/{table}"):
            found = {name: np.asarray(group[name][:]) for name in names}
        length = min((len(values) for values in found.values()), default=0)
        return {name: values[:length] for name, values in found.items()}

    def _table(self, table: str) -> h5py.Group:
        group = self._group(table)
        if group is None:
            raise ConfigError(f"{self.path} has no table /{table}{self._age()}")
        return group

    def _group(self, name: str) -> h5py.Group | None:
        with self._reading(f"/{name}"):
            group = self._file.get(name)
        return group if isinstance(group, h5py.Group) else None

    def _age(self) -> str:
        old = self.version < SCHEMA_VERSION
        return f": its schema_version is {self.version}, which has less than {SCHEMA_VERSION}" if old else ""

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except _H5_ERRORS as error:
            raise ConfigError(f"{self.path} is damaged: {what} cannot be read: {_first_line(error)}") from None


@contextmanager
def open_report(path: str | Path) -> Iterator[Report]:
    """A report, under its own name or, where only a run has been killed or goes on, its partial file.

    Raises
    ------
    ConfigError
        If the file is no report of this program, or none that it can read.
    """
    path = Path(path)
    if not path.exists() and partial_report(path).exists():
        path = partial_report(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    with _open(path) as file:
        yield Report(path, file)


def _open(path: Path) -> h5py.File:
    """Open a file, and one that is not closed in the way that its writer has provided for."""
    if not h5py.is_hdf5(path):
        raise ConfigError(f"{path} is no HDF5 file, or its beginning is damaged")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        # HDF5 may read in circles where this mode meets another kind of fault.
        if _is_left_open(path):
            with suppress(OSError):
                return h5py.File(path, "r", swmr=True)
        raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from None


def _is_left_open(path: Path) -> bool:
    """Whether a file is marked as being written in the mode that allows reading, and is as long as it should be."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        length = file.seek(0, 2)
    if len(head) < _HEAD.size:
        return False
    version, flags, end = _HEAD.unpack(head)
    return version == _SUPERBLOCK and bool(flags & _SWMR_FLAG) and length >= end


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _decoded(value: Any) -> Any:
    """An attribute's value: JSON objects and lists as such."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value.item() if isinstance(value, np.generic) else value
    try:
        return json.loads(value)
    except ValueError:
        return value
