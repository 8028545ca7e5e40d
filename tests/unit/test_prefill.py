"""Prefill units: every token of every prompt in every layer once, in order, within the budget."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.device import CpuDevice
from fastdecode_hpc.s_part.prefill import Prefill
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.schedule.prompts import PromptQueue, cut_chunks
from fastdecode_hpc.sequence import SamplingParams, Sequence


def make_seq(seq_id: int, length: int, owner: int = 1) -> Sequence:
    return Sequence(seq_id, seq_id, list(range(length)), SamplingParams(), 4, owner=owner)


LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=12)


@given(LENGTHS, st.sampled_from([8, 16, 32]))
def test_chunks_cover_each_prompt_at_borders_of_its_own(lengths: list[int], chunk_tokens: int) -> None:
    seqs = [make_seq(i, length, owner=1 + i % 3) for i, length in enumerate(lengths)]
    chunks = cut_chunks(seqs, chunk_tokens)
    pieces = defaultdict(list)
    for chunk in chunks:
        assert 0 < sum(piece.stop - piece.start for piece in chunk) <= chunk_tokens
        assert [piece.seq.owner for piece in chunk] == sorted(piece.seq.owner for piece in chunk)
        for piece in chunk:
            pieces[piece.seq.seq_id].append((piece.start, piece.stop))
    for seq in seqs:
        borders = [*range(0, seq.prompt_len, chunk_tokens), seq.prompt_len]
        assert pieces[seq.seq_id] == list(itertools.pairwise(borders))


class FakeSPart:
    """Counts tokens through the layers; K and V name layer and position."""

    def __init__(self, model: ModelConfig) -> None:
        self.config, self.device = model, torch.device("cpu")

    def make_pass(self, max_rows):
        return FakePass(self.config)

    def prefill_attention(self, layer, q, k, v, start):
        assert k[:, 0].tolist() == [layer * 1000 + p for p in range(start + len(q))]
        return torch.zeros(len(q), self.config.q_size)


class FakePass:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def start(self, ids, positions, num_rows):
        assert len(ids) == len(positions) == num_rows
        self.hidden, self.positions = ids[:, None].float(), positions

    def pre_attention(self, layer, num_rows):
        assert num_rows == len(self.hidden)
        assert (self.hidden[:, 0] - self.positions == layer * 1000).all()  # every row has passed every layer before
        return (layer * 1000 + self.positions)[:, None].float().expand(-1, self.config.qkv_size).clone()

    def post_attention(self, layer, o):
        self.hidden = self.hidden + 1000


class FakeTransport:
    def __init__(self) -> None:
        self.sent = []

    def send_kv(self, segments, rows, ready) -> None:
        assert ready()
        self.sent.append((segments, rows))

    def poke(self) -> None:
        pass


@given(
    LENGTHS, st.integers(1, 400), st.sampled_from([None, 5, 24]), st.integers(1, 64), st.sampled_from(["fp32", "int8"])
)
@settings(max_examples=60, deadline=None)
def test_units_send_what_is_listed_and_end_each_prompt_once(
    lengths, budget, window, max_batch_tokens, kv_dtype
) -> None:
    model = ModelConfig(
        200, 8, 8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, max_context_len=128, sliding_window=window
    )
    layout = make_layout(model, block_size=8, kv_dtype=kv_dtype)
    transport = FakeTransport()
    prompts = PromptQueue(layout, chunk_tokens=16, max_batch_tokens=max_batch_tokens)
    prefill = Prefill(FakeSPart(model), CpuDevice(), transport, prompts, WireCast("fp32", torch.device("cpu")))
    waiting = [make_seq(i, length, owner=1 + i % 2) for i, length in enumerate(lengths)]
    seqs, listed, done = list(waiting), [], []
    admit = lambda: waiting.pop(0) if waiting else None  # noqa: E731
    for _ in range(100_000):
        units = prompts.list_units(budget, admit)
        assert sum(unit.num_tokens for unit in units) < budget + 16  # less than one chunk too many
        listed += prefill.segments(units)
        if not prompts.num_pending:
            break
        done += prefill.run(2)
        done += prefill.run(prompts.num_pending)
    assert sorted(seq.seq_id for seq, _ in done) == list(range(len(lengths)))
    for seq, hidden in done:
        assert hidden.tolist() == [seq.prompt_len - 1 + 3000]
    # What went out is exactly what was listed, one message for each unit and owner, in order.
    assert [s for segments, _ in transport.sent for s in segments] == listed
    got = defaultdict(list)
    for segments, rows in transport.sent:
        assert len({(s.unit, s.owner) for s in segments}) == 1
        values = iter(rows[:, 0].tolist())
        for s in segments:
            for position in range(s.start, s.start + s.num_tokens):
                assert next(values) == s.layer * 1000 + position
                got[s.seq_id, s.layer].append(position)
    for seq in seqs:
        first = 0 if window is None else max(0, seq.prompt_len + 1 - window)
        for layer in range(3):
            assert got.get((seq.seq_id, layer), []) == list(range(first, seq.prompt_len))
