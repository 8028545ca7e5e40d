"""Stages recorded once and replayed: which row counts, and when a stage is recorded. The recording is the device's.

Notes
-----
A graph holds the addresses that its stage read and wrote when it was recorded, so stages work on buffers that stay.
There is one for each slot, layer and row count, made when that is met for the second time: a run whose slots stay
full makes ``num_slots * num_layers``, any run at most that times the padded row counts (15 up to 256, 27 up to 2048).
A graph takes the driver's memory for each of its 30 or so kernels (how much, `benchmarks/gpu_check.py` measures); what
its kernels hold in between lies in one pool that all graphs share, as large as the largest stage needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from fastdecode_hpc.s_part.device import Body

logger = logging.getLogger(__name__)

MAX_ROWS = 2048
"""Larger steps run as they are: a layer then takes the GPU far longer than starting its kernels takes the host."""

FINE_ROWS = 64
"""Up to here row counts are powers of two: so few rows take as long as one, for reading the weights is what costs."""

# Runs a body once without effect and returns what repeats it.
Capture = Callable[[Body], Body]


def padded_rows(num_rows: int) -> int:
    """The row count that `num_rows` are padded to: powers of two, from 64 on with three steps in between."""
    if num_rows <= 1 or num_rows > MAX_ROWS:
        return num_rows
    bits = (num_rows - 1).bit_length()
    step = 1 << (bits if num_rows <= FINE_ROWS else bits - 3)
    return -(-num_rows // step) * step


class Recorder:
    """Makes stages that record themselves; goes on without when the device can't.

    Parameters
    ----------
    capture : callable
        Records a body.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.works = True

    def stage(self, parts: Sequence[Body]) -> Body:
        """One body for all `parts`."""
        return _Stage(self, parts)

    def record(self, body: Body) -> Body | None:
        """What repeats `body`, or None where that can't be."""
        if self.works:
            try:
                return self._capture(body)
            except RuntimeError as error:
                self.works = False
                logger.warning("stages can't be recorded as CUDA graphs, so they run without: %s", error)
        return None


class _Stage:
    """Runs as it is at first, which loads kernels and makes work spaces; recorded at the second call."""

    def __init__(self, recorder: Recorder, parts: Sequence[Body]) -> None:
        self._recorder, self._parts = recorder, parts
        self._replay: Body | None = None
        self._is_warm = False

    def __call__(self) -> None:
        if self._replay is None and self._is_warm:
            self._replay = self._recorder.record(self._run)
        (self._replay or self._run)()
        self._is_warm = True

    def _run(self) -> None:
        for part in self._parts:
            part()
