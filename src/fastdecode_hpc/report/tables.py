"""Tables of an HDF5 file: groups of columns of one length, which grow."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import h5py
import numpy as np
import numpy.typing as npt

from fastdecode_hpc.report.schema import CODE_NAMES, column_dtype

FLUSH_ROWS = 4096


class Table:
    """Columns that grow in a group of the file; rows are buffered and appended in pieces.

    Parameters
    ----------
    file : h5py.File
    path : str
        Of the group.
    units : mapping of str to str
        One column each.
    """

    def __init__(self, file: h5py.File, path: str, units: Mapping[str, str]) -> None:
        self._buffers = {name: array("d") for name in units}  # exact for integers below 2**53
        self._datasets = {name: _make_column(file, path, name, unit) for name, unit in units.items()}

    def append(self, values: Mapping[str, float]) -> None:
        """Add one row."""
        for name, buffer in self._buffers.items():
            buffer.append(values[name])
        if len(buffer) >= FLUSH_ROWS:
            self.flush()

    def extend(self, columns: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Add rows, as columns of one length."""
        for name, buffer in self._buffers.items():
            buffer.frombytes(np.ascontiguousarray(columns[name], np.float64).tobytes())
        if len(buffer) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand the buffered rows to HDF5."""
        for name, buffer in self._buffers.items():
            if not buffer:
                continue
            dataset = self._datasets[name]
            size = dataset.shape[0]
            dataset.resize(size + len(buffer), axis=0)
            dataset[size:] = np.array(buffer)
            del buffer[:]


def _make_column(file: h5py.File, path: str, name: str, unit: str) -> h5py.Dataset:
    dataset = file.create_dataset(
        f"{path}/{name}",
        shape=(0,),
        maxshape=(None,),
        chunks=(FLUSH_ROWS,),
        dtype=column_dtype(name, unit),
        compression="gzip",
    )
    dataset.attrs["units"] = unit
    if name in CODE_NAMES:
        dataset.attrs["names"] = CODE_NAMES[name]
    return dataset
