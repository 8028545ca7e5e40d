"""Layer-major chunked prefill on the S-worker.

Prompts are packed into a prefill batch; all its chunks pass layer l before layer l+1, so only hidden
states and one layer's K/V are held. The unit of work is (layer, chunk); its K and V leave for their
owners at once. Units run between decode stages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fastdecode_hpc.s_part.device import Device, as_rows
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence
from fastdecode_hpc.transport.base import Segment, SEnd


class Piece(NamedTuple):
    """Consecutive prompt tokens of one sequence."""

    seq: Sequence
    start: int
    stop: int


def cut_chunks(seqs: list[Sequence], chunk_tokens: int) -> list[list[Piece]]:
    """Cut prompts into pieces at multiples of `chunk_tokens` and pack whole pieces into chunks.

    The borders of a piece depend on its own prompt alone. A chunk holds at most `chunk_tokens` tokens.
    """
    chunks: list[list[Piece]] = []
    room = 0
    for seq in seqs:
        for start in range(0, seq.prompt_len, chunk_tokens):
            piece = Piece(seq, start, min(start + chunk_tokens, seq.prompt_len))
            size = piece.stop - piece.start
            if size > room:
                chunks.append([])
                room = chunk_tokens
            chunks[-1].append(piece)
            room -= size
    for chunk in chunks:
        chunk.sort(key=lambda piece: (piece.seq.owner, piece.seq.seq_id))  # one message an owner
    return chunks


@dataclass(slots=True)
class _Batch:
    """Prompts that pass the layers together."""

    chunks: list[list[Piece]]
    hidden: list[torch.Tensor]  # of each chunk: [num_tokens, hidden]
    positions: list[torch.Tensor]  # of each chunk: [num_tokens] int64
    visits: Iterator[tuple[int, int]]  # (layer, chunk) still to list
    keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # this layer's, by sequence


class Unit(NamedTuple):
    """One chunk of a batch in one layer."""

    number: int
    batch: _Batch
    layer: int
    chunk: int

    @property
    def pieces(self) -> list[Piece]:
        return self.batch.chunks[self.chunk]


class Prefill:
    """Runs prompts through the S-Part in listed units.

    Parameters
    ----------
    s_part : SPart
    device : Device
    transport : SEnd
    layout : KVLayout
        Says which tokens a windowed layer will never need; those are not sent.
    cast : WireCast
    chunk_tokens : int
        Longest chunk.
    max_batch_tokens : int
        Prompt tokens of one prefill batch (one longer prompt is a batch of its own).
    """

    def __init__(
        self,
        s_part: SPart,
        device: Device,
        transport: SEnd,
        layout: KVLayout,
        cast: WireCast,
        *,
        chunk_tokens: int,
        max_batch_tokens: int,
    ) -> None:
        self.s_part = s_part
        self.device = device
        self.transport = transport
        self.cast = cast
        self.chunk_tokens = chunk_tokens
        self.max_batch_tokens = max_batch_tokens
        self._groups = {layer: group for group in layout.main_groups for layer in group.layers}
        self._batch: _Batch | None = None
        self._listed: deque[Unit] = deque()
        self._num_units = 0

    @property
    def num_pending(self) -> int:
        """Units listed but not run yet."""
        return len(self._listed)

    def list_units(self, budget: int, admit: Callable[[], Sequence | None]) -> tuple[list[Segment], int]:
        """Choose units of about `budget` token-layers; the caller runs them before the next call for this slot.

        Returns
        -------
        list of Segment
            K/V that their running will send, in order.
        int
            Their token-layers.
        """
        segments: list[Segment] = []
        listed = 0
        while listed < budget and (unit := self._next_unit(admit)) is not None:
            listed += sum(piece.stop - piece.start for piece in unit.pieces)
            segments += self._segments(unit)
            self._listed.append(unit)
        return segments, listed

    def run(self, num_units: int) -> list[tuple[Sequence, torch.Tensor]]:
        """Run listed units.

        Returns
        -------
        list of (Sequence, Tensor)
            Sequences whose prefill is complete, each with its last token's hidden state ``[hidden]``.
        """
        done: list[tuple[Sequence, torch.Tensor]] = []
        for _ in range(min(num_units, len(self._listed))):
            done += self._run_unit(self._listed.popleft())
            self.transport.poke()
        return done

    def _next_unit(self, admit: Callable[[], Sequence | None]) -> Unit | None:
        visit = next(self._batch.visits, None) if self._batch is not None else None
        if visit is None:
            self._batch = self._make_batch(admit)
            visit = next(self._batch.visits) if self._batch is not None else None
        if self._batch is None or visit is None:
            return None
        self._num_units += 1
        return Unit(self._num_units, self._batch, *visit)

    def _make_batch(self, admit: Callable[[], Sequence | None]) -> _Batch | None:
        seqs: list[Sequence] = []
        total = 0
        while total < self.max_batch_tokens and (seq := admit()) is not None:
            seqs.append(seq)
            total += seq.prompt_len
        if not seqs:
            return None
        chunks = cut_chunks(seqs, self.chunk_tokens)
        tokens = [[t for piece in chunk for t in piece.seq.prompt_ids[piece.start : piece.stop]] for chunk in chunks]
        positions = [[p for piece in chunk for p in range(piece.start, piece.stop)] for chunk in chunks]
        num_layers = self.s_part.config.num_layers
        return _Batch(
            chunks=chunks,
            hidden=[self.s_part.embed(self._tensor(ids)) for ids in tokens],
            positions=[self._tensor(places) for places in positions],
            visits=((layer, chunk) for layer in range(num_layers) for chunk in range(len(chunks))),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return self.device.put(torch.tensor(values, dtype=torch.int64))

    def _segments(self, unit: Unit) -> list[Segment]:
        """What of a unit's K/V its owners will ever read."""
        group = self._groups[unit.layer]
        segments = []
        for seq, start, stop in unit.pieces:
            if seq.max_new_tokens == 1:  # ends with its prefill
                continue
            start = max(start, group.first_needed(seq.prompt_len))
            if start < stop:
                segments.append(Segment(unit.number, seq.seq_id, seq.owner, unit.layer, start, stop - start))
        return segments

    def _run_unit(self, unit: Unit) -> list[tuple[Sequence, torch.Tensor]]:
        config, hidden = self.s_part.config, unit.batch.hidden[unit.chunk]
        qkv = self.s_part.pre_attention(unit.layer, hidden, unit.batch.positions[unit.chunk])
        sizes = [piece.stop - piece.start for piece in unit.pieces]
        self._send(unit, qkv[:, config.q_size :].split(sizes))
        out = [self._attend(unit, piece, rows) for piece, rows in zip(unit.pieces, qkv.split(sizes), strict=True)]
        unit.batch.hidden[unit.chunk] = self.s_part.post_attention(unit.layer, hidden, torch.cat(out))
        return _ended(unit) if unit.layer == config.num_layers - 1 else []

    def _attend(self, unit: Unit, piece: Piece, qkv: torch.Tensor) -> torch.Tensor:
        config, keys, seq_id = self.s_part.config, unit.batch.keys, piece.seq.seq_id
        q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        if piece.start:
            old_k, old_v = keys.pop(seq_id)
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        if piece.stop < piece.seq.prompt_len:
            keys[seq_id] = (k, v)
        return self.s_part.prefill_attention(unit.layer, q, k, v, piece.start)

    def _send(self, unit: Unit, kv: tuple[torch.Tensor, ...]) -> None:
        """Send each owner its segments' rows in one message."""
        rows_of = {piece.seq.seq_id: rows for piece, rows in zip(unit.pieces, kv, strict=True)}
        for _, group in itertools.groupby(self._segments(unit), key=lambda segment: segment.owner):
            segments = list(group)
            rows = torch.cat([rows_of[segment.seq_id][-segment.num_tokens :] for segment in segments])
            kv, ready = self.device.download(self.cast.round(rows))
            self.transport.send_kv(segments, as_rows(kv), ready)


class GivenKV:
    """Takes the place of `Prefill` where nothing is to be computed: a prompt's K and V are what its blocks hold.

    For measurements of decode, whose time does not depend on the values. The first token is sampled from a hidden state
    of zeros.
    """

    def __init__(self, s_part: SPart) -> None:
        self.s_part = s_part
        self._admitted: deque[Sequence] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._admitted)

    def list_units(self, budget: int, admit: Callable[[], Sequence | None]) -> tuple[list[Segment], int]:
        while (seq := admit()) is not None:
            self._admitted.append(seq)
        return [], 0

    def run(self, num_units: int) -> list[tuple[Sequence, torch.Tensor]]:
        seqs = [self._admitted.popleft() for _ in range(min(num_units, len(self._admitted)))]
        hidden = torch.zeros(self.s_part.config.hidden_size, dtype=self.s_part.dtype, device=self.s_part.device)
        return [(seq, hidden) for seq in seqs]


def _ended(unit: Unit) -> list[tuple[Sequence, torch.Tensor]]:
    """Sequences whose prompt ends in this chunk, with their last token's hidden state."""
    done, row = [], 0
    for seq, start, stop in unit.pieces:
        row += stop - start
        if stop == seq.prompt_len:
            done.append((seq, unit.batch.hidden[unit.chunk][row - 1]))
    return done
