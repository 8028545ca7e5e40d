"""What both MPI ends are made of: sizes, communicators and row types.

Every slot has a communicator of its own, prompt K/V and reports have one each, so that none orders
another. Within one, every rank posts every collective in the same order, with count 0 where it has no
rows; the S-worker's rank has count 0 in all of them. Buffers, counts and displacements live as long as
the transport.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode_hpc.transport.mpi import MPI_LOCK, World, row_type


@dataclass(frozen=True, slots=True)
class WireShape:
    """Sizes that both ends agree on before they are made."""

    num_layers: int
    num_slots: int
    max_rows: int  # of one slot
    qkv_size: int
    q_size: int
    kv_size: int
    dtype: Any  # numpy type of the wire


class Comms:
    """Duplicates of the world and the row types, made by all ranks together."""

    def __init__(self, world: World, shape: WireShape) -> None:
        self.slots = [world.duplicate() for _ in range(shape.num_slots)]
        self.prefill = world.duplicate()
        self.reports = world.duplicate()
        itemsize = np.dtype(shape.dtype).itemsize
        with MPI_LOCK:
            self.qkv_type = row_type(shape.qkv_size * itemsize)
            self.out_type = row_type(shape.q_size * itemsize)
            self.kv_type = row_type(2 * shape.kv_size * itemsize)

    def free(self) -> None:
        with MPI_LOCK:
            for comm in (*self.slots, self.prefill, self.reports):
                comm.Free()
            for datatype in (self.qkv_type, self.out_type, self.kv_type):
                datatype.Free()
