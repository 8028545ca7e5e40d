"""How the KV cache is cut: layer groups, blocks, and what sequences of a length need and read. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from fastdecode_hpc.config import QUANTISED_DTYPES, kv_token_bytes, parse_kv_dtype
from fastdecode_hpc.model_shape import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
    """Layers that share a block table and the arithmetic of their attention: what an R-worker must know of them.

    They have equal window, KV heads, head_dim and types, and one scale and cap of scores.

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
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    softcap: float | None = None  # scores become cap * tanh(score / cap)

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

    def row_bytes(self, num_tokens: Positions) -> Positions:
        """K and V, scales included, that attention of a row with this context reads in one layer (no window)."""
        border = num_tokens
        if self.is_quantised:
            border = recent_border(num_tokens - 1)
            border = border * (border > 0)
        copy = with_recent(self)[-1]
        head_bytes = border * self.head_token_bytes + (num_tokens - border) * copy.head_token_bytes
        total: Positions = self.num_kv_heads * head_bytes
        return total

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
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.main_groups)

    def loads(self, context_lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Token-layers that attention reads of rows with these contexts, the newest token counted."""
        total = context_lens * 0
        for group in self.main_groups:  # copies of recent tokens are read instead of others
            seen = context_lens if group.window is None else context_lens.clip(max=group.window)
            total += seen * len(group.layers)
        return total

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
    windows: dict[int | None, list[int]] = {}
    for layer in range(model.num_layers):
        windows.setdefault(model.window_of(layer), []).append(layer)
    groups = (
        LayerGroup(
            layers=tuple(layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            k_dtype=k_dtype,
            v_dtype=v_dtype,
            window=window,
            scale=model.attention_scale,
            softcap=model.attention_softcap,
        )
        for window, layers in windows.items()
    )
    return KVLayout(block_size=block_size, groups=tuple(part for group in groups for part in with_recent(group)))


def with_recent(group: LayerGroup) -> tuple[LayerGroup, ...]:
    """The group, and where it is quantised the one that keeps its recent tokens."""
    if not group.is_quantised:
        return (group,)
    window = RECENT_WINDOW if group.window is None else min(RECENT_WINDOW, group.window)
    k_dtype, v_dtype = (RECENT_DTYPE if t in QUANTISED_DTYPES else t for t in (group.k_dtype, group.v_dtype))
    return group, replace(group, k_dtype=k_dtype, v_dtype=v_dtype, window=window, is_recent=True)
