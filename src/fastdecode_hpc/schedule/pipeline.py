"""The token-level two-stage pipeline as data: who works on which layer of which mini-batch, in order.

This generator is the only place that decides an order. The S-worker, the R-workers and the simulator
walk it side by side; that is why nobody has to announce a message inside the layer loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Stage(NamedTuple):
    """One visit of one mini-batch to one layer."""

    step: int
    layer: int
    slot: int


def pipeline(num_layers: int, num_slots: int) -> Iterator[Stage]:
    """Yield the stages of all steps, for ever.

    Two mini-batches A and B (slots 0 and 1) alternate between the parts (the token-level pipeline of FastDecode)::

        S-worker | post A[i-1] pre A[i] | post B[i-1] pre B[i] | post A[i] pre A[i+1] | ...
        R-worker |     attend B[i-1]    |      attend A[i]     |     attend B[i]      | ...

    The pipeline does not drain between steps: the S-worker's stage with layer 0 also ends the step
    before (last `post_attention`, logits, sampling) while the other slots are in attention.

    Notes
    -----
    For an S-worker the stage ``(step, layer, slot)`` is what leads to the attention of that layer; for
    an R-worker it is that attention. A slot whose plan is empty skips its stages of that step on both
    sides.
    """
    for step in itertools.count():
        for layer in range(num_layers):
            for slot in range(num_slots):
                yield Stage(step, layer, slot)
