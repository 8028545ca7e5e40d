"""What the stages of a run take on a profile's machine, for a model and the options of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.config import DTYPE_BYTES, ConfigError, RunConfig
from fastdecode_hpc.model_shape import Experts, ModelConfig
from fastdecode_hpc.planner.profile import KVRates, Profile
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup, make_layout
from fastdecode_hpc.schedule.prompts import Piece, cut_chunks
from fastdecode_hpc.schedule.row_tiles import TileSizes
from fastdecode_hpc.schedule.shares import Shares
from fastdecode_hpc.schedule.worker_costs import WorkerCost, deal_rows
from fastdecode_hpc.sequence import SamplingParams
from fastdecode_hpc.sequence import Sequence as Prompt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LONG_CONTEXT = 4096  # tokens, over which what one takes is averaged


def transfer_ratio(model: ModelConfig, layout: KVLayout, wire_dtype: str, context_len: int) -> float:
    """KV bytes that a token's attention reads over the bytes of q, k, v and o that cross instead, exactly.

    Notes
    -----
    For each layer of a row ``(context_len * kv_bytes) / (wire_bytes * (2 q_size + 2 kv_size))``; the batch cancels.
    With as many KV heads as heads, fp16 and no window it is half the context.
    """
    return read_bytes(layout, context_len) / (model.num_layers * wire_row_bytes(model, wire_dtype))


def wire_row_bytes(model: ModelConfig, wire_dtype: str) -> int:
    """Bytes of q, k, v and o of one row in one layer."""
    return DTYPE_BYTES[wire_dtype] * (model.qkv_size + model.q_size)


def make_prompts(lengths: Iterable[int]) -> list[Prompt]:
    """Sequences with prompts of these lengths, of no tokens in particular."""
    return [
        Prompt(index, index, range(length), SamplingParams(), 2)  # type: ignore[arg-type]
        for index, length in enumerate(lengths)
    ]


def chunk_counts(pieces: Sequence[Piece]) -> tuple[int, int, int, int]:
    """What a chunk of prompts is made of: itself (1), pieces, tokens, pairs of a query and a key that it sees."""
    tokens = sum(piece.num_tokens for piece in pieces)
    pairs = sum(piece.num_tokens * (piece.start + piece.stop + 1) // 2 for piece in pieces)
    return 1, len(pieces), tokens, pairs


def row_bytes(group: LayerGroup, context_lens: Ints) -> Ints:
    """K and V, scales included, that attention of rows with these contexts reads in one layer."""
    seen = context_lens if group.window is None else context_lens.clip(max=group.window)
    return group.row_bytes(seen)


def read_bytes(layout: KVLayout, context_len: int) -> int:
    """K and V, scales included, that attention of a row with this context reads in all layers."""
    contexts = np.array([context_len])
    return sum(len(group.layers) * int(row_bytes(group, contexts)[0]) for group in layout.main_groups)


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """What one step of one slot takes; times in seconds, of R-workers as arrays ``[num_workers]``.

    Attributes
    ----------
    s_layer : float
        A stage of the S-Part.
    s_head : float
        Logits and sampling.
    s_turn : float
        Between two steps beside that.
    s_stage : float
        Of a stage, outside its body.
    r_layers : list of float arrays
        Attention of one layer, for each layer group.
    r_turn : float array
        At the start of the step.
    r_stage : float array
        Of a stage, beside attention.
    qkv_bytes, out_bytes : float arrays
        Of a stage's messages.
    """

    s_layer: float
    s_head: float
    s_turn: float
    s_stage: float
    r_layers: list[Floats]
    r_turn: Floats
    r_stage: Floats
    qkv_bytes: Floats
    out_bytes: Floats


class Costs:
    """Times of a run's stages.

    Parameters
    ----------
    profile : Profile
    model : ModelConfig
    config : RunConfig
        Types and block size count.
    num_workers : int

    Raises
    ------
    ConfigError
        If the profile has no rates for the cache's type.
    """

    def __init__(self, profile: Profile, model: ModelConfig, config: RunConfig, *, num_workers: int) -> None:
        self.profile, self.model, self.num_workers = profile, model, num_workers
        self.layout = make_layout(model, block_size=config.block_size, kv_dtype=config.kv_dtype)
        self.group_of = {layer: place for place, group in enumerate(self.layout.main_groups) for layer in group.layers}
        self.parts = [profile.r_part(worker) for worker in range(num_workers)]
        self._rates = kv_rates(profile, config, num_workers)
        self._bytes_per_s = np.array([rates.bytes_per_s for rates in self._rates])
        self._call_s = np.array([rates.call_s for rates in self._rates])
        self._pair_s = np.array([rates.pair_s for rates in self._rates])
        self._layer_scale = model.active_weights / profile.model.active_weights
        self._head_scale = model.head_weights / profile.model.head_weights
        self._layer_tiles = TileSizes(profile.s_part.layer_tiles)
        self._head_tiles = TileSizes(profile.s_part.head_tiles)
        wire_bytes = DTYPE_BYTES[config.wire_dtype]
        self._qkv_row_bytes, self._out_row_bytes = wire_bytes * model.qkv_size, wire_bytes * model.q_size
        self._weights = config.r_worker_weights
        self._kv_token_bytes = wire_bytes * 2 * model.kv_size

    def s_layer(self, num_rows: int) -> float:
        """Seconds of both halves of a layer."""
        experts, launch_s = self.model.experts, self.profile.s_part.launch_s
        if experts in (None, self.profile.model.experts) or not num_rows:
            return launch_s + self._growing_s(num_rows) * self._layer_scale
        assert experts is not None
        return launch_s + self._mixture_s(num_rows, experts)

    def _mixture_s(self, num_rows: int, experts: Experts) -> float:
        """What grows with the model where the profile's has other experts: rows dealt out evenly, one after another."""
        model, weights = self.model, self.profile.model.active_weights
        passes = num_rows * experts.per_token
        used = min(experts.count, passes)
        mixture = used * self._growing_s(passes / used) * model.mlp_weights
        return (self._growing_s(num_rows) * model.attention_weights + mixture) / weights

    def _growing_s(self, num_rows: float) -> float:
        """Seconds of a layer of the profile's model beside what any layer takes."""
        s_part, rows = self.profile.s_part, self._layer_tiles.padded(math.ceil(num_rows))
        return max(0.0, s_part.layer(rows) - s_part.launch_s)

    def slot_times(self, context_lens: Ints, workers: Ints) -> SlotTimes:
        """Times of one step of a slot.

        Parameters
        ----------
        context_lens, workers : int64 arrays
            ``[num_rows]``: of each row its context, the newest token counted, and the number of its R-worker, from 0.
        """
        rows = np.bincount(workers, minlength=self.num_workers)
        reads = [self._by_worker(workers, row_bytes(group, context_lens)) for group in self.layout.main_groups]
        return self._slot_times(rows, reads)

    def even_slot_times(self, rows: Ints, context_len: float, reads: Sequence[float] = ()) -> SlotTimes:
        """The same for rows that are alike.

        Parameters
        ----------
        rows : int64 array
            ``[num_workers]``: of each R-worker.
        context_len : float
            Mean over the rows.
        reads : sequence of float, optional
            Bytes that a row reads in a layer of each main group, mean over rows; by default those of `context_len`.
        """
        context = np.array([round(context_len)], np.int64)
        reads = reads or [float(row_bytes(group, context)[0]) for group in self.layout.main_groups]
        return self._slot_times(rows, [rows * own for own in reads])

    def read_tables(self, longest: int) -> list[Ints]:
        """Bytes that a row reads in a layer of each main group, by its context from 0 to `longest` tokens."""
        return [row_bytes(group, np.arange(longest + 1)) for group in self.layout.main_groups]

    def _slot_times(self, rows: Ints, reads: Sequence[npt.NDArray[Any]]) -> SlotTimes:
        """`rows` of each R-worker, and the bytes they read in a layer of each main group, ``[num_workers]`` all."""
        num_rows, by_worker = int(rows.sum()), rows.astype(np.float64)
        return SlotTimes(
            s_layer=self.s_layer(num_rows),
            s_head=self.head_s(num_rows),
            s_turn=self.profile.s_part.turn(num_rows),
            s_stage=self.profile.s_part.stage(num_rows),
            r_layers=[
                self._attention(group, own, by_worker)
                for group, own in zip(self.layout.main_groups, reads, strict=True)
            ],
            r_turn=self._of_workers("turn", by_worker),
            r_stage=self._of_workers("stage", by_worker),
            qkv_bytes=by_worker * self._qkv_row_bytes,
            out_bytes=by_worker * self._out_row_bytes,
        )

    def read_len(self, context_len: float) -> float:
        """Tokens that a row with this context reads, averaged over layers: no more than their windows."""
        return int(self.layout.loads(np.array([round(context_len)]))[0]) / self.layout.num_layers

    def worker_costs(self) -> list[WorkerCost]:
        """What each R-worker takes for tokens and rows in a step."""
        layers = self.model.num_layers
        token_bytes = read_bytes(self.layout, LONG_CONTEXT) / self.read_len(LONG_CONTEXT)
        row_bytes = layers * (self._qkv_row_bytes + self._out_row_bytes)
        return [
            WorkerCost(token_bytes / rates.bytes_per_s, row_bytes / part.link_bytes_per_s, layers * 2 * part.latency_s)
            for rates, part in zip(self._rates, self.parts, strict=True)
        ]

    def deal_rows(self, num_rows: int, context_len: float, most: Ints | None = None) -> Ints:
        """Rows of each R-worker once its share has settled, ``[num_workers]``, and no more than `most` of them."""
        costs = self.shares(num_rows, context_len).costs
        by_worker = [costs.get(owner, WorkerCost()) for owner in self.owners]
        return deal_rows(by_worker, num_rows, self.read_len(context_len), most)

    def deal_batch(
        self, batch_size: int, num_slots: int, context_len: float, room: Sequence[int] | None = None
    ) -> list[Ints]:
        """Rows of each R-worker in each slot.

        Parameters
        ----------
        room : sequence of int, optional
            ``[num_workers]``: sequences for which each R-worker has memory; enough together. They are spread over all
            slots.
        """
        dealt = []
        for slot in range(num_slots):
            most = None if room is None else np.diff((np.cumsum(room) + slot) // num_slots, prepend=0)
            dealt.append(self.deal_rows((batch_size + slot) // num_slots, context_len, most))
        return dealt

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks of the R-workers, also where one process runs both parts."""
        return tuple(range(1, self.num_workers + 1))

    def shares(self, num_rows: float, context_len: float = 1.0, *, knows_profile: bool = True) -> Shares:
        """Shares of the R-workers, of mini-batches with so many rows, as a run begins with them."""
        return Shares(
            self._weights,
            self.owners,
            num_layers=self.model.num_layers,
            back_ratio=self._out_row_bytes / self._qkv_row_bytes,
            start=dict(zip(self.owners, self.worker_costs(), strict=True)) if knows_profile else None,
            latencies={owner: part.latency_s for owner, part in zip(self.owners, self.parts, strict=True)},
            num_rows=num_rows,
            context_len=self.read_len(context_len),
        )

    def head_s(self, num_rows: int) -> float:
        """Seconds of logits and sampling."""
        return self.profile.s_part.head(self._head_tiles.padded(num_rows)) * self._head_scale

    def chunk_s(self, pieces: Sequence[Piece]) -> float:
        """Seconds of a chunk of prompts in one layer."""
        s_part, (_, _, tokens, pairs) = self.profile.s_part, chunk_counts(pieces)
        growing = tokens * s_part.chunk_token_s if s_part.has_chunks else self._growing_s(tokens)
        heads = self.model.q_size / self.profile.model.q_size
        fixed = s_part.chunk_s + len(pieces) * s_part.chunk_piece_s
        return fixed + growing * self._layer_scale + pairs * s_part.chunk_pair_s * heads

    def prompts_s(self, lengths: Iterable[int], chunk_tokens: int) -> float:
        """Seconds of the S-Part for prompts of these lengths that are computed together, all layers."""
        chunks = cut_chunks(make_prompts(lengths), chunk_tokens)
        return self.model.num_layers * sum(map(self.chunk_s, chunks))

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the K and V of prompt tokens on the wire, one layer."""
        return num_tokens * self._kv_token_bytes

    def store_s(self, worker: int, num_bytes: float) -> float:
        """Seconds in which an R-worker puts arrived K and V away."""
        return num_bytes / float(self._bytes_per_s[worker])

    def _attention(self, group: LayerGroup, read_bytes: Floats, rows: Floats) -> Floats:
        seconds = self._call_s + rows * group.num_kv_heads * self._pair_s + read_bytes / self._bytes_per_s
        return np.where(rows > 0, seconds, 0.0)

    def _by_worker(self, workers: Ints, values: Ints) -> Floats:
        return np.bincount(workers, values, self.num_workers).astype(np.float64)

    def _of_workers(self, name: str, rows: Floats) -> Floats:
        curves = [getattr(part, name) for part in self.parts]
        return np.array([curve(count) if count else 0.0 for curve, count in zip(curves, rows.tolist(), strict=True)])


def kv_rates(profile: Profile, config: RunConfig, num_workers: int) -> list[KVRates]:
    """Rates of each R-worker for the cache's type.

    Raises
    ------
    ConfigError
        If the profile has none.
    """
    found = []
    for worker in range(num_workers):
        rates = profile.r_part(worker).rates
        if config.kv_dtype not in rates:
            raise ConfigError(
                f"profile {profile.name} has no rates for kv_dtype {config.kv_dtype}; it has {', '.join(rates)}: name "
                "one of these, or calibrate with it"
            )
        found.append(rates[config.kv_dtype])
    return found
