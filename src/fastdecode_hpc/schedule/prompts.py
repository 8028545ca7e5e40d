"""Prompts on their way through the layers, as units of work. Pure.

Prefill is layer-major: prompts are packed into a batch, cut into chunks, and all chunks pass layer l before layer l+1.
The unit of work is (layer, chunk). Units are listed on a slot's plan and run between decode stages, before the slot's
next plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.schedule.pipeline import Stage
from fastdecode_hpc.sequence import Sequence

Admit = Callable[[], Sequence | None]  # the next sequence that may be prefilled, if there is one


class Piece(NamedTuple):
    """Consecutive prompt tokens of one sequence."""

    seq: Sequence
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def cut_chunks(seqs: list[Sequence], chunk_tokens: int) -> list[list[Piece]]:
    """Cut prompts into pieces at multiples of `chunk_tokens` and pack whole pieces into chunks.

    The borders of a piece depend on its own prompt alone. A chunk holds at most `chunk_tokens` tokens.
    """
    chunks: list[list[Piece]] = []
    room = 0
    for seq in seqs:
        for start in range(0, seq.prompt_len, chunk_tokens):
            piece = Piece(seq, start, min(start + chunk_tokens, seq.prompt_len))
            if piece.num_tokens > room:
                chunks.append([])
                room = chunk_tokens
            chunks[-1].append(piece)
            room -= piece.num_tokens
    for chunk in chunks:
        chunk.sort(key=lambda piece: (piece.seq.owner, piece.seq.seq_id))  # one message an owner
    return chunks


@dataclass(frozen=True, slots=True)
class Unit:
    """One chunk of a batch of prompts in one layer."""

    number: int
    layer: int
    chunk: int  # number of the chunk in its batch
    pieces: list[Piece]
    is_last_layer: bool

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def ended(self) -> list[Sequence]:
        """Sequences whose prefill ends with this unit."""
        if not self.is_last_layer:
            return []
        return [seq for seq, _, stop in self.pieces if stop == seq.prompt_len]


class Prompts(Protocol):
    """Where sequences are between admission and their first token."""

    @property
    def num_pending(self) -> int:
        """Pieces of work listed but not taken yet."""

    def list_units(self, budget: int, admit: Admit) -> list[Unit]:
        """Choose units of about `budget` token-layers; they must be run before the next call for this slot."""


class PromptQueue:
    """Cuts admitted prompts into units and lists them.

    Parameters
    ----------
    layout : KVLayout
        Says which tokens a windowed layer will never need.
    chunk_tokens : int
        Longest chunk.
    max_batch_tokens : int
        Prompt tokens of one prefill batch (one longer prompt is a batch of its own).
    """

    def __init__(self, layout: KVLayout, *, chunk_tokens: int, max_batch_tokens: int) -> None:
        self.num_layers = layout.num_layers
        self.chunk_tokens = chunk_tokens
        self.max_batch_tokens = max_batch_tokens
        self._groups = {layer: group for group in layout.main_groups for layer in group.layers}
        self._unlisted: Iterator[Unit] = iter(())
        self._listed: deque[Unit] = deque()
        self._num_units = 0

    @property
    def num_pending(self) -> int:
        return len(self._listed)

    def list_units(self, budget: int, admit: Admit) -> list[Unit]:
        units: list[Unit] = []
        listed = 0
        while listed < budget and (unit := self._next_unit(admit)) is not None:
            listed += unit.num_tokens
            units.append(unit)
        self._listed += units
        return units

    def take(self) -> Unit:
        """The next listed unit, which is to be run now."""
        return self._listed.popleft()

    def kept(self, unit: Unit) -> Iterator[Piece]:
        """What of a unit's K and V its owners will ever read."""
        group = self._groups[unit.layer]
        for seq, start, stop in unit.pieces:
            first = max(start, group.first_needed(seq.prompt_len))
            if seq.max_new_tokens > 1 and first < stop:  # else it ends with its prefill
                yield Piece(seq, first, stop)

    def _next_unit(self, admit: Admit) -> Unit | None:
        unit = next(self._unlisted, None)
        if unit is None:
            self._unlisted = self._cut(admit)
            unit = next(self._unlisted, None)
        return unit

    def _cut(self, admit: Admit) -> Iterator[Unit]:
        """The units of a new batch of prompts."""
        seqs: list[Sequence] = []
        total = 0
        while total < self.max_batch_tokens and (seq := admit()) is not None:
            seqs.append(seq)
            total += seq.prompt_len
        chunks = cut_chunks(seqs, self.chunk_tokens)
        for layer in range(self.num_layers):
            for number, pieces in enumerate(chunks):
                self._num_units += 1
                yield Unit(self._num_units, layer, number, pieces, layer == self.num_layers - 1)


class GivenPrompts:
    """Takes the place of `PromptQueue` where no prompts are computed: sequences only pass through."""

    def __init__(self) -> None:
        self._admitted: deque[Sequence] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._admitted)

    def list_units(self, budget: int, admit: Admit) -> list[Unit]:
        while (seq := admit()) is not None:
            self._admitted.append(seq)
        return []

    def take(self) -> Sequence:
        """The next sequence whose prompt counts as computed."""
        return self._admitted.popleft()


def stage_share(prompts: Prompts, stage: Stage, *, num_layers: int, num_slots: int) -> int:
    """How many of the listed units are to be run after this stage.

    Units listed on a slot's plan must have run before its next plan: they are spread over the stages until then.
    """
    stages_left = max(1, (num_layers - stage.layer - 1) * num_slots + 1)
    return math.ceil(prompts.num_pending / stages_left)
