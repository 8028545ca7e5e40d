"""Which R-worker owns which sequence, and how much KV each can hold.

Pure policy: blocks and shares are numbers here; the bytes live in `r_part.kv_cache`. Placement decides
owners, R-workers do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from fastdecode_hpc.config import QUANTISED_DTYPES, ModelConfig, kv_token_bytes, parse_kv_dtype

if TYPE_CHECKING:
    import numpy as np

# Of a quantised cache, the newest token and at least this many before it are read as they came: those from the
# last multiple of it that leaves so many.
RECENT_TOKENS = 32
RECENT_WINDOW = 2 * RECENT_TOKENS  # tokens that must be kept for that
RECENT_SHARE = 3  # the copies of recent tokens get at most one part in so many of the memory
RECENT_DTYPE = "fp16"

Positions = TypeVar("Positions", int, "np.ndarray")


def recent_border(position: Positions) -> Positions:
    """First token that a row at `position` reads from the copy of recent tokens; below 0: all are read there."""
    return (position - RECENT_TOKENS) // RECENT_TOKENS * RECENT_TOKENS


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table: equal window, KV heads, head_dim and types.

    A quantised group has a second one beside it, `is_recent`: the most recent tokens of the same layers, as they
    came. Attention reads those instead, which costs little and keeps most of the accuracy.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    k_dtype: str
    v_dtype: str
    window: int | None = None
    is_recent: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.k_dtype in QUANTISED_DTYPES or self.v_dtype in QUANTISED_DTYPES

    @property
    def head_token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer and KV head, scales included."""
        return kv_token_bytes(self.k_dtype, self.head_dim) + kv_token_bytes(self.v_dtype, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers of the group."""
        return len(self.layers) * self.num_kv_heads * self.head_token_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of `block_size` tokens, all KV heads and all layers of the group."""
        return block_size * self.token_bytes

    def row_bytes(self, num_tokens: int) -> int:
        """K and V, scales included, that attention of a row with this context reads in one layer (no window)."""
        border = max(0, recent_border(num_tokens - 1)) if self.is_quantised else num_tokens
        copy = with_recent(self)[-1]
        head_bytes = border * self.head_token_bytes + (num_tokens - border) * copy.head_token_bytes
        return self.num_kv_heads * head_bytes

    def first_needed(self, position: int) -> int:
        """Oldest token that a query at `position` still sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the KV cache of every R-worker is cut into blocks."""

    block_size: int
    groups: tuple[LayerGroup, ...]

    def blocks_for(self, num_tokens: int, group: LayerGroup) -> int:
        """Most blocks that a sequence of up to `num_tokens` tokens holds at once in `group`."""
        blocks = -(-num_tokens // self.block_size)
        if group.window is None:
            return blocks
        # A window may start anywhere in a block, and the newest token is appended before the oldest is dropped.
        return min(blocks, -(-group.window // self.block_size) + 1)

    @property
    def main_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that hold all tokens; every layer is in one. Copies of recent tokens are left out."""
        return tuple(group for group in self.groups if not group.is_recent)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, scales included; the copy of recent tokens, of fixed size, is left out."""
        return sum(group.token_bytes for group in self.main_groups)

    def worst_case(self, num_tokens: int) -> tuple[int, ...]:
        """Most blocks, for each group, that a sequence of up to `num_tokens` tokens holds at once."""
        return tuple(self.blocks_for(num_tokens, group) for group in self.groups)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a sequence of up to `num_tokens` tokens may need."""
        return sum(
            blocks * group.block_bytes(self.block_size)
            for blocks, group in zip(self.worst_case(num_tokens), self.groups, strict=True)
        )

    def split_budget(self, budget_bytes: int, max_context_len: int, max_sequences: int) -> tuple[int, ...]:
        """Blocks of each group in `budget_bytes`.

        Copies of recent tokens get what `max_sequences` sequences need, which does not grow with their length, up to
        a share of the memory; the others share the rest as one longest sequence would use it.
        """
        unit = dict(zip(self.groups, self.worst_case(max_context_len), strict=True))
        sizes = {group: group.block_bytes(self.block_size) for group in self.groups}
        recent = {
            group: max(unit[group], min(max_sequences * unit[group], budget_bytes // RECENT_SHARE // sizes[group]))
            for group in self.groups
            if group.is_recent
        }
        rest = max(0, budget_bytes - sum(sizes[group] * blocks for group, blocks in recent.items()))
        unit_bytes = sum(sizes[group] * unit[group] for group in self.main_groups)
        return tuple(recent.get(group, rest * unit[group] // unit_bytes) for group in self.groups)


def make_layout(model: ModelConfig, *, block_size: int, kv_dtype: str) -> KVLayout:
    """Group the layers of `model` for the KV cache; `kv_dtype` as `config.parse_kv_dtype` reads it."""
    k_dtype, v_dtype = parse_kv_dtype(kv_dtype)
    group = LayerGroup(
        layers=tuple(range(model.num_layers)),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        k_dtype=k_dtype,
        v_dtype=v_dtype,
        window=model.sliding_window,
    )
    return KVLayout(block_size=block_size, groups=with_recent(group))


def with_recent(group: LayerGroup) -> tuple[LayerGroup, ...]:
    """The group, and where it is quantised the one that keeps its recent tokens."""
    if not group.is_quantised:
        return (group,)
    window = RECENT_WINDOW if group.window is None else min(RECENT_WINDOW, group.window)
    k_dtype, v_dtype = (RECENT_DTYPE if t in QUANTISED_DTYPES else t for t in (group.k_dtype, group.v_dtype))
    return group, replace(group, k_dtype=k_dtype, v_dtype=v_dtype, window=window, is_recent=True)


@dataclass(slots=True)
class Placement:
    """Owners of sequences, and the blocks each R-worker has promised to them.

    Parameters
    ----------
    layout : KVLayout
    capacity : mapping of rank to tuple of int
        Blocks of each layer group that each R-worker holds. Rank 0 stands for a partition in the
        S-worker's own process.
    weights : mapping of rank to float, optional
        Share of the load that each R-worker should carry; equal by default. A worker of weight 2 gets
        twice the tokens of one of weight 1.

    Notes
    -----
    A sequence is admitted with its worst case (longest prompt plus output), so what has been admitted
    always finishes: nothing is evicted and nothing waits for blocks in mid-flight.
    """

    layout: KVLayout
    capacity: Mapping[int, tuple[int, ...]]
    weights: Mapping[int, float] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(init=False)
    _load: dict[int, int] = field(init=False)
    _held: dict[int, tuple[int, int]] = field(init=False)  # seq_id |-> (owner, worst-case tokens)

    def __post_init__(self) -> None:
        self._free = {rank: list(blocks) for rank, blocks in self.capacity.items()}
        self._load = dict.fromkeys(self.capacity, 0)
        self._held = {}

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(sorted(self.capacity))

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether some R-worker could hold `num_tokens` tokens if it were empty."""
        need = self.layout.worst_case(num_tokens)
        return any(_covers(blocks, need) for blocks in self.capacity.values())

    def place(self, seq_id: int, num_tokens: int) -> int | None:
        """Reserve the worst case of a sequence on the least loaded R-worker that has room.

        Returns
        -------
        int or None
            The owner's rank; None while no R-worker has room.
        """
        need = self.layout.worst_case(num_tokens)
        room = [rank for rank in self.owners if _covers(self._free[rank], need)]
        if not room:
            return None
        owner = min(room, key=lambda rank: (self._load_after(rank, num_tokens), rank))
        self._take(owner, need, num_tokens)
        self._held[seq_id] = (owner, num_tokens)
        return owner

    def release(self, seq_id: int) -> None:
        """Give the reservation of a finished sequence back."""
        owner, num_tokens = self._held.pop(seq_id)
        self._take(owner, tuple(-n for n in self.layout.worst_case(num_tokens)), -num_tokens)

    def free_blocks(self, rank: int) -> tuple[int, ...]:
        """Blocks of each group not promised to anybody."""
        return tuple(self._free[rank])

    def load(self, rank: int) -> int:
        """Worst-case tokens promised on `rank`."""
        return self._load[rank]

    def _load_after(self, rank: int, num_tokens: int) -> float:
        return (self._load[rank] + num_tokens) / self.weights.get(rank, 1.0)

    def _take(self, rank: int, need: Iterable[int], num_tokens: int) -> None:
        self._free[rank] = [free - blocks for free, blocks in zip(self._free[rank], need, strict=True)]
        self._load[rank] += num_tokens


def _covers(have: Iterable[int], need: Iterable[int]) -> bool:
    return all(a >= b for a, b in zip(have, need, strict=True))


def row_counts(owners: Iterable[int], size: int) -> list[int]:
    """Rows of a mini-batch that each rank owns, as MPI's counts; `owners` is sorted.

    Raises
    ------
    AssertionError
        If the rows are not ordered by owner: the scatter would not be contiguous.
    """
    counts, last = [0] * size, 0
    for owner in owners:
        assert owner >= last, "rows of a mini-batch must be ordered by owner"
        counts[owner] += 1
        last = owner
    return counts
