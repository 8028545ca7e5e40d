"""Whether a run gets on, and how it stands in words; pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from fastdecode_hpc.schedule.admission import Admission
from fastdecode_hpc.schedule.mini_batch import MiniBatch
from fastdecode_hpc.timing import Patience


class StalledError(RuntimeError):
    """Steps pass and nothing happens in them although sequences are left: admission and cache wait for each other."""


class StallGuard:
    """Ends a run in which no token, no piece of a prompt and no admission has come for `limit_s`.

    Parameters
    ----------
    limit_s : float
        Only time that passes from one step to the next counts: a step that takes long is no stall.
    describe : callable
        How the run stands.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(
        self, limit_s: float, describe: Callable[[], str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._describe = describe
        self._patience = Patience(limit_s, clock=clock)

    def progressed(self) -> None:
        """A token, a piece of a prompt or an admission has come."""
        self._patience.renew()

    def check(self) -> None:
        """Raise `StalledError` if nothing has come for too long; called once a step while sequences are left."""
        if self._patience.is_over():
            raise StalledError(
                f"nothing was admitted, prefilled or decoded for {self._patience.limit_s:g} s although sequences are "
                f"left; this is a fault of the program, please report it with these lines:\n  {self._describe()}"
            )


def describe_run(admission: Admission, batches: Iterable[MiniBatch], step: int) -> str:
    """Queue, slots and KV cache of a run at one moment."""
    placement = admission.placement
    rows = ", ".join(f"{len(batch)} in slot {batch.slot}" for batch in batches)
    free = ", ".join(f"{format_blocks(placement.free_blocks(rank))} of rank {rank}" for rank in placement.owners)
    return f"step {step}; sequences: {admission.describe()}; rows: {rows}; KV blocks not promised: {free}"


def format_blocks(blocks: tuple[int, ...]) -> str:
    """Blocks of each layer group."""
    return "+".join(map(str, blocks))
