"""Who may start, and in which slot: continuous batching as pure policy.

A sequence passes three places: *waiting* (read, not started), *prefilling* (its worst case is reserved on
an R-worker) and *ready* (prefilled, joins a slot at one of the next plans).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.sequence import MiniBatch, Sequence


class Admission:
    """Admits in the order of arrival, never more than can finish.

    Parameters
    ----------
    placement : Placement
        Reserves each sequence's worst case, so that an admitted sequence never waits for KV again.
    arrivals : iterator of Sequence
        Read lazily: no more than one sequence is held that has not been admitted.
    max_batch_size : int
        Most sequences in prefill, ready or decode at once.
    num_slots : int
    """

    def __init__(
        self, placement: Placement, arrivals: Iterator[Sequence], *, max_batch_size: int, num_slots: int
    ) -> None:
        self.placement = placement
        self.max_batch_size = max_batch_size
        self.num_slots = num_slots
        self._arrivals = arrivals
        self._next: Sequence | None = None
        self._closed = False
        self._running: set[int] = set()
        self._ready: dict[int, deque[Sequence]] = {rank: deque() for rank in placement.owners}

    @property
    def max_rows(self) -> int:
        """Most rows of one slot."""
        return -(-self.max_batch_size // self.num_slots)

    def is_done(self) -> bool:
        """Whether nothing runs and nothing waits (this may read one arrival)."""
        return not self._running and self._peek() is None

    def close(self) -> None:
        """Admit nobody any more."""
        self._closed, self._next = True, None

    def admit(self) -> Sequence | None:
        """Start the next sequence, if there is one and it fits beside those running.

        The head of the queue is never overtaken: a long sequence can't be starved by short ones.
        """
        seq = self._peek()
        if seq is None or len(self._running) >= self.max_batch_size:
            return None
        owner = self.placement.place(seq.seq_id, seq.max_context_len)
        if owner is None:
            return None
        self._next = None
        self._running.add(seq.seq_id)
        seq.owner = owner
        return seq

    def prefilled(self, seq: Sequence) -> None:
        """Its K/V is listed completely and its first token known: it may join a slot."""
        self._ready[seq.owner].append(seq)

    def joiners(self, batch: MiniBatch, num_in_slots: int) -> list[Sequence]:
        """Take the sequences that join `batch` now.

        Parameters
        ----------
        batch : MiniBatch
        num_in_slots : int
            Sequences in all slots, this one included.

        Notes
        -----
        Slots are kept equally long, and within a slot every owner gets its share: were a slot's rows all
        on one R-worker, the others would idle through its every stage.
        """
        num_ready = sum(map(len, self._ready.values()))
        target = min(self.max_rows, -(-(num_in_slots + num_ready) // self.num_slots))
        rows = Counter(seq.owner for seq in batch.seqs)
        taken: list[Sequence] = []
        for _ in range(min(num_ready, target - len(batch))):
            owner = min((rank for rank, queue in self._ready.items() if queue), key=lambda rank: rows[rank])
            rows[owner] += 1
            taken.append(self._ready[owner].popleft())
        return taken

    def finished(self, seq: Sequence) -> None:
        """Give back what a sequence held; its R-worker frees the KV on the same plan."""
        self._running.remove(seq.seq_id)
        self.placement.release(seq.seq_id)

    def _peek(self) -> Sequence | None:
        if self._next is None and not self._closed:
            self._next = next(self._arrivals, None)
        return self._next
