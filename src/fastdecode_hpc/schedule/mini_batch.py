"""The rows of one slot, as sequences and as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence

Ints = npt.NDArray[np.int64]


class MiniBatch:
    """The sequences of one slot, ordered by owner (then by age), so that a scatter is contiguous.

    Parameters
    ----------
    slot : int

    Attributes
    ----------
    seqs : list of Sequence
    seq_ids, owners, context_lens : int64 arrays
        ``[num_rows]``, of `seqs`: what plans are made of, so that a step costs no Python for each row. The first two
        are never changed in place.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.seqs: list[Sequence] = []
        self._number()

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Sequences join."""
        self.seqs = sorted([*self.seqs, *seqs], key=lambda seq: (seq.owner, seq.seq_id))
        self._number()

    def remove(self, seqs: Iterable[Sequence]) -> None:
        """Sequences leave."""
        gone = {seq.seq_id for seq in seqs}
        self.seqs = [seq for seq in self.seqs if seq.seq_id not in gone]
        self._number()

    def grow(self) -> None:
        """Every sequence got a token."""
        self.context_lens += 1

    def loads_by_owner(self, layout: KVLayout) -> Counter[int]:
        """Token-layers that each R-worker reads in the next step, by its rank."""
        sums = np.bincount(self.owners, layout.loads(self.context_lens))
        return Counter({owner: int(sums[owner]) for owner in np.flatnonzero(sums).tolist()})

    def rows_by_owner(self) -> dict[int, int]:
        """Rows of each R-worker that has any, by its rank."""
        owners, rows = np.unique(self.owners, return_counts=True)
        return dict(zip(owners.tolist(), rows.tolist(), strict=True))

    def _number(self) -> None:
        self.seq_ids = _ints(seq.seq_id for seq in self.seqs)
        self.owners = _ints(seq.owner for seq in self.seqs)
        self.context_lens = _ints(seq.context_len for seq in self.seqs)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)
