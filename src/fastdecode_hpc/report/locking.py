"""Whether HDF5 can lock files in a folder: some network file systems can't."""

from __future__ import annotations

import os
from pathlib import Path

import h5py


def try_locks(folder: Path) -> str:
    """Write a small file there as reports are written; why it can't be locked, empty where it can.

    Raises
    ------
    OSError
        If no file can be written there at all.
    """
    path = folder / f".fastdecode-doctor.{os.getpid()}.h5"
    try:
        path.touch()
        with h5py.File(path, "w", locking=True) as file:
            file["x"] = 1.0
    except OSError as error:
        if not path.exists():
            raise
        return str(error).partition("\n")[0]
    finally:
        path.unlink(missing_ok=True)
    return ""
