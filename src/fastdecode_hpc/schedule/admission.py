"""Who may start, and in which slot: continuous batching as pure policy.

A sequence passes three places: *waiting* (read, not started), *prefilling* (its worst case is reserved on
an R-worker) and *ready* (prefilled, joins a slot when the schedule lets it start).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered

import numpy as np

from fastdecode_hpc.schedule.levelling import LoadedSequence, Loads, choose_leaving, is_level, sum_loads, take_level
from fastdecode_hpc.schedule.load_stabilizing import Starts
from fastdecode_hpc.schedule.mini_batch import MiniBatch
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.sequence import Sequence


class Admission:
    """Admits in the order of arrival, never more than can finish.

    Parameters
    ----------
    placement : Placement
        Reserves each sequence's worst case, so that an admitted sequence never waits for KV again.
    arrivals : iterator of Sequence
        Read lazily: no more than one sequence is held that has not been admitted.
    starts : Starts
        How many may be prefilled, and when they start to decode.
    max_batch_size : int
        Most sequences in decode at once.
    num_slots : int
    """

    def __init__(
        self,
        placement: Placement,
        arrivals: Iterator[Sequence],
        starts: Starts,
        *,
        max_batch_size: int,
        num_slots: int,
    ) -> None:
        self.placement = placement
        self.starts = starts
        self.num_slots = num_slots
        self.max_rows = -(-max_batch_size // num_slots)
        self._arrivals = arrivals
        self._next: Sequence | None = None
        self._closed = False
        self._prefilling: set[int] = set()
        self._decoding: set[int] = set()
        self._ready: deque[Sequence] = deque()
        self._moving: deque[Sequence] = deque()  # left one slot for another

    def is_done(self) -> bool:
        """Whether nothing runs and nothing waits (this may read one arrival)."""
        return not (self._prefilling or self._ready or self._decoding) and self._peek() is None

    def close(self) -> None:
        """Admit nobody any more."""
        self._closed, self._next = True, None

    def describe(self) -> str:
        """How many sequences are where, in words."""
        head = "none read that waits"
        if self._next is not None:
            need = self.placement.layout.worst_case(self._next.max_context_len)
            head = f"the next one waits and needs {'+'.join(map(str, need))} KV blocks"
        return (
            f"{head}, {len(self._prefilling)} prefilling, {len(self._ready)} ready, {len(self._decoding)} decoding "
            f"(of these {len(self._moving)} between two slots)"
        )

    def admit(self, step: int) -> Sequence | None:
        """Start the next sequence in `step`, if there is one and it fits beside those running.

        The head of the queue is never overtaken: a long sequence can't be starved by short ones.
        """
        seq = self._peek()
        if seq is None or not self.starts.may_admit(len(self._prefilling) + len(self._ready), len(self._decoding)):
            return None
        if self.placement.place(seq, step) is None:
            return None
        self._next = None
        self._prefilling.add(seq.seq_id)
        self.starts.admitted(seq)
        return seq

    def prefilled(self, seq: Sequence) -> None:
        """Its K/V is listed completely and its first token known: it may join a slot."""
        self._prefilling.remove(seq.seq_id)
        self._ready.append(seq)

    def refill(self, batch: MiniBatch, batches: Ordered[MiniBatch], step: int) -> list[Sequence]:
        """Bring one of the slots to its share of rows and of load: sequences join it, or leave it for another.

        Parameters
        ----------
        batch : MiniBatch
            Of the slot; changed.
        batches : sequence of MiniBatch
            Of all slots, this one included.
        step : int
            Whose plan is being made.

        Returns
        -------
        list of Sequence
            Those that decode for the first time.

        Notes
        -----
        Slots are kept equally long and equally loaded, and within a slot every owner gets its share: were a slot's
        load all on one R-worker, the others would idle through its every stage.
        """
        startable = list(itertools.islice(self._ready, self.starts.num_startable(self._ready, step)))
        waiting = [*self._moving, *startable]
        num_rows = sum(map(len, batches)) + len(waiting)
        share = min(self.max_rows, -(-num_rows // self.num_slots))
        targets = self._targets(batches, waiting)
        own = self._batch_loads(batch)
        if len(batch) > share or (len(batch) == share and not is_level(own, targets, share)):
            leaving = choose_leaving(self._loaded(batch.seqs), share, targets)
            self._moving.extend(leaving)
            batch.remove(leaving)
            return []
        if not waiting or len(batch) == share:
            return []
        taken = self._take(waiting, share - len(batch), targets, own)
        batch.add(taken)
        self._moving = deque(_without(self._moving, taken))
        self._ready = deque(_without(self._ready, taken))
        for seq in taken:
            self.starts.started(seq, step)
        new = [seq for seq in taken if seq.seq_id not in self._decoding]
        self._decoding.update(seq.seq_id for seq in new)
        return new

    def finished(self, seq: Sequence, step: int) -> None:
        """Give back what a sequence held that ended before `step`; its R-worker frees the KV on the same plan."""
        self._prefilling.discard(seq.seq_id)
        self._decoding.discard(seq.seq_id)
        self.starts.finished(seq, step)
        self.placement.release(seq, step)

    def _take(self, waiting: list[Sequence], count: int, targets: Mapping[int, float], own: Loads) -> list[Sequence]:
        """Up to `count` of `waiting`, those on the move first, that bring the slot's owners near their loads."""
        moving = list(self._moving)[:count]
        present = own + sum_loads(self._loaded(moving))
        missing: Loads = Counter({owner: round(load - present[owner]) for owner, load in targets.items()})
        candidates = self._loaded(_without(waiting, moving))
        return [*moving, *take_level(candidates, count - len(moving), missing)]

    def _targets(self, batches: Ordered[MiniBatch], waiting: list[Sequence]) -> dict[int, float]:
        """A slot's share of the load of each R-worker."""
        totals = sum(map(self._batch_loads, batches), sum_loads(self._loaded(waiting)))
        return {owner: load / self.num_slots for owner, load in totals.items()}

    def _batch_loads(self, batch: MiniBatch) -> Loads:
        """What a slot's next step reads on each R-worker."""
        return batch.loads_by_owner(self.placement.layout)

    def _loaded(self, seqs: Ordered[Sequence]) -> list[LoadedSequence]:
        lens = np.array([seq.context_len for seq in seqs], np.int64)
        loads = self.placement.layout.loads(lens).tolist()
        return [LoadedSequence(seq, load) for seq, load in zip(seqs, loads, strict=True)]

    def _peek(self) -> Sequence | None:
        if self._next is None and not self._closed:
            self._next = next(self._arrivals, None)
        return self._next


def _without(seqs: Iterable[Sequence], gone: list[Sequence]) -> list[Sequence]:
    ids = {seq.seq_id for seq in gone}
    return [seq for seq in seqs if seq.seq_id not in ids]
