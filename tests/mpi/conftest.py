"""MPI tests run as ``mpiexec -n N python -m pytest --with-mpi tests/mpi``."""

from __future__ import annotations

import atexit
import sys

import pytest


def _world():
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi.COMM_WORLD if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A rank that fails leaves the others waiting for it: say why, then end the whole job."""
    report = yield
    world = _world()
    if report.failed and world is not None and world.size > 1:
        sys.__stderr__.write(f"\n[rank {world.rank}] FAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        sys.__stderr__.flush()
        world.Abort(1)
    return report


@pytest.fixture(scope="session")
def world():
    """All ranks."""
    from fastdecode_hpc.transport.mpi import init_mpi

    hook = sys.excepthook
    made = init_mpi()
    sys.excepthook = hook  # pytest catches exceptions itself
    atexit.register(sys.modules["mpi4py.MPI"].Finalize)  # after pytest-mpi's last look at the world
    atexit.register(made.control.close)
    return made
