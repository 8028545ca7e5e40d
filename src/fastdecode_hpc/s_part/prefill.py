"""Prompts through the S-Part, unit by unit (`schedule.prompts`), between decode stages.

A batch of prompts holds its hidden states and one layer's K and V; what a unit computes of these leaves for its owners
at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from fastdecode_hpc.s_part.base import BaseSPart, Pass
from fastdecode_hpc.s_part.device import Device, as_rows
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.schedule.prompts import GivenPrompts, Piece, PromptQueue, Unit
from fastdecode_hpc.sequence import Sequence
from fastdecode_hpc.transport.base import Segment, SEnd

Done = list[tuple[Sequence, torch.Tensor]]  # sequences whose prefill is complete, each with its last token's [hidden]


class Prefill:
    """Runs listed units of prompts.

    Parameters
    ----------
    s_part : BaseSPart
    device : Device
    transport : SEnd
    prompts : PromptQueue
    cast : WireCast
    """

    def __init__(
        self, s_part: BaseSPart, device: Device, transport: SEnd, prompts: PromptQueue, cast: WireCast
    ) -> None:
        self.s_part = s_part
        self.device = device
        self.transport = transport
        self.prompts = prompts
        self.cast = cast
        self._chunks: dict[int, Pass] = {}  # of the batch that passes the layers, by number
        self._kv: dict[int, torch.Tensor] = {}  # one layer's rows [k|v] of a whole prompt, by sequence

    def segments(self, units: Iterable[Unit]) -> list[Segment]:
        """K and V that running these units will send, in order."""
        return [
            Segment(unit.number, piece.seq.seq_id, piece.seq.owner, unit.layer, piece.start, piece.num_tokens)
            for unit in units
            for piece in self.prompts.kept(unit)
        ]

    def run(self, num_units: int) -> Done:
        """Run listed units."""
        done: Done = []
        for _ in range(min(num_units, self.prompts.num_pending)):
            done += self._run_unit(self.prompts.take())
            self.transport.poke()
        return done

    def _run_unit(self, unit: Unit) -> Done:
        config = self.s_part.config
        chunk = self._chunks.pop(unit.chunk) if unit.layer else self._embed(unit)
        sizes = [piece.num_tokens for piece in unit.pieces]
        qkv = chunk.pre_attention(unit.layer, sum(sizes))
        self._send(unit, qkv[:, config.q_size :].split(sizes))
        out = [self._attend(unit, piece, rows) for piece, rows in zip(unit.pieces, qkv.split(sizes), strict=True)]
        chunk.post_attention(unit.layer, torch.cat(out))
        if unit.is_last_layer:
            return _ended(unit, chunk.hidden)
        self._chunks[unit.chunk] = chunk
        return []

    def _embed(self, unit: Unit) -> Pass:
        tokens = [token for seq, start, stop in unit.pieces for token in seq.prompt_ids[start:stop]]
        places = [position for _, start, stop in unit.pieces for position in range(start, stop)]
        chunk = self.s_part.make_pass(len(tokens))
        chunk.start(self._tensor(tokens), self._tensor(places), len(tokens))
        return chunk

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return self.device.put(torch.tensor(values, dtype=torch.int64))

    def _attend(self, unit: Unit, piece: Piece, qkv: torch.Tensor) -> torch.Tensor:
        config = self.s_part.config
        q, kv = qkv.split([config.q_size, 2 * config.kv_size], dim=-1)
        k, v = self._kept(unit, piece, kv).split(config.kv_size, dim=-1)
        return self.s_part.prefill_attention(unit.layer, q, k, v, piece.start)

    def _kept(self, unit: Unit, piece: Piece, kv: torch.Tensor) -> torch.Tensor:
        """Rows ``[k|v]`` of the prompt up to this piece; they stay for the pieces after it."""
        seq, start, stop = piece
        if piece.num_tokens == seq.prompt_len:
            return kv
        if seq.seq_id not in self._kv:
            self._kv[seq.seq_id] = kv.new_empty(seq.prompt_len, kv.shape[1])
        rows = self._kv[seq.seq_id]
        rows[start:stop] = kv
        if unit.is_last_layer and stop == seq.prompt_len:
            del self._kv[seq.seq_id]
        return rows[:stop]

    def _send(self, unit: Unit, kv: tuple[torch.Tensor, ...]) -> None:
        """Send each owner its segments' rows in one message."""
        rows_of = {piece.seq.seq_id: rows for piece, rows in zip(unit.pieces, kv, strict=True)}
        for _, group in itertools.groupby(self.segments([unit]), key=lambda segment: segment.owner):
            segments = list(group)
            rows = torch.cat([rows_of[segment.seq_id][-segment.num_tokens :] for segment in segments])
            kv_rows, ready = self.device.download(self.cast.round(rows))
            self.transport.send_kv(segments, as_rows(kv_rows), ready)


class GivenKV:
    """Takes the place of `Prefill` where nothing is to be computed: a prompt's K and V are what its blocks hold.

    For measurements of decode, whose time does not depend on the values. The first token is sampled from a hidden state
    of zeros.
    """

    def __init__(self, s_part: BaseSPart, prompts: GivenPrompts) -> None:
        self.s_part = s_part
        self.prompts = prompts

    def segments(self, units: Iterable[Unit]) -> list[Segment]:
        return []

    def run(self, num_units: int) -> Done:
        seqs = [self.prompts.take() for _ in range(min(num_units, self.prompts.num_pending))]
        hidden = torch.zeros(self.s_part.config.hidden_size, dtype=self.s_part.dtype, device=self.s_part.device)
        return [(seq, hidden) for seq in seqs]


def _ended(unit: Unit, hidden: torch.Tensor) -> Done:
    """Sequences whose prompt ends in this chunk, with their last token's hidden state."""
    done, row = [], 0
    for seq, start, stop in unit.pieces:
        row += stop - start
        if stop == seq.prompt_len:
            done.append((seq, hidden[row - 1]))
    return done
