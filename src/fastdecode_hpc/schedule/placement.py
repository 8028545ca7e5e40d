"""Which R-worker owns which sequence, and how much KV each can hold.

Pure policy: blocks and shares are numbers here; the bytes live in `r_part.kv_cache`. Placement decides
owners, R-workers do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fastdecode_hpc.config import DTYPE_BYTES, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table: equal window, KV heads, head_dim and type."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    window: int | None = None

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of `block_size` tokens, all KV heads and all layers of the group."""
        elements = 2 * len(self.layers) * self.num_kv_heads * block_size * self.head_dim
        return elements * DTYPE_BYTES[self.kv_dtype]

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

    def worst_case(self, num_tokens: int) -> tuple[int, ...]:
        """Most blocks, for each group, that a sequence of up to `num_tokens` tokens holds at once."""
        return tuple(self.blocks_for(num_tokens, group) for group in self.groups)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a sequence of up to `num_tokens` tokens may need."""
        return sum(
            blocks * group.block_bytes(self.block_size)
            for blocks, group in zip(self.worst_case(num_tokens), self.groups, strict=True)
        )

    def split_budget(self, budget_bytes: int, max_context_len: int) -> tuple[int, ...]:
        """Blocks of each group in `budget_bytes`, shared as one longest sequence would use them."""
        unit = self.worst_case(max_context_len)
        unit_bytes = self.bytes_for(max_context_len)
        return tuple(budget_bytes * blocks // unit_bytes for blocks in unit)


def make_layout(model: ModelConfig, *, block_size: int, kv_dtype: str) -> KVLayout:
    """Group the layers of `model` for the KV cache."""
    group = LayerGroup(
        layers=tuple(range(model.num_layers)),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_dtype=kv_dtype,
        window=model.sliding_window,
    )
    return KVLayout(block_size=block_size, groups=(group,))


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
