"""One R-worker's KV cache: memory in blocks, and which sequence holds which blocks.

Holds no policy: who may come in is decided by placement, which promises blocks by the worst case.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fastdecode_hpc.mapped import huge_page_share
from fastdecode_hpc.r_part.attention import make_cache_view
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of ARM with 4 KiB pages
GROW_BYTES = 64 << 20  # the arena is first touched in steps of this size, as blocks are first used


def map_arena(num_bytes: int) -> np.ndarray:
    """Reserve zeroed address space that costs memory only where it is touched; huge pages are advised.

    Returns
    -------
    np.ndarray
        [num_bytes] uint8.

    Notes
    -----
    It begins at a border between huge pages, and its mapping ends at one, so that both ends can lie on huge
    pages too. Up to one huge page more than `num_bytes` may come to be used.
    """
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    if num_bytes < HUGE_PAGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
    memory = mmap.mmap(-1, (-(-num_bytes // HUGE_PAGE_BYTES) + 1) * HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do as well, slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return from_huge_page_border(np.frombuffer(memory, np.uint8), num_bytes)


def from_huge_page_border(memory: np.ndarray, num_bytes: int) -> np.ndarray:
    """The first `num_bytes` bytes of `memory`, uint8, that begin at a border between huge pages."""
    first = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[first : first + num_bytes]


def memory_span(memory: np.ndarray) -> tuple[int, int]:
    """First address of a contiguous array, and one past its last."""
    return memory.ctypes.data, memory.ctypes.data + memory.nbytes


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in one layer group, oldest first."""

    first: int  # ids[i] holds the sequence's tokens [(first + i) * block_size, (first + i + 1) * block_size)
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def stop(self) -> int:
        """One past the index of the newest block."""
        return self.first + len(self.ids)

    def extend(self, blocks: Iterable[int]) -> None:
        self.ids = np.append(self.ids, np.fromiter(blocks, np.int32))

    def drop_before(self, index: int) -> list[int]:
        """Forget the blocks before block `index` of the sequence; return them."""
        count = min(max(0, index - self.first), len(self.ids))
        dropped, self.ids = self.ids[:count].tolist(), self.ids[count:]
        self.first = max(self.first, index)
        return list(dropped)


class BlockPool:
    """The blocks of one layer group: their memory, the free ones, and a table for each sequence."""

    def __init__(self, group: LayerGroup, block_size: int, num_blocks: int, *, num_threads: int) -> None:
        self.group, self.block_size, self.num_blocks = group, block_size, num_blocks
        self.block_bytes = group.block_bytes(block_size)
        self.arena = map_arena(num_blocks * self.block_bytes)
        self.view = make_cache_view(self.arena, group, block_size)
        self.tables: dict[int, BlockTable] = {}
        self._num_threads = num_threads
        self._returned: list[int] = []  # a heap of free blocks below `_num_used`
        self._num_used = 0  # blocks handed out at least once; the others follow in order
        self._touched_bytes = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._num_used + len(self._returned)

    def add(self, seq_id: int, start: int) -> None:
        """Open an empty table. Without a window every token is needed, whatever `start` says."""
        assert seq_id not in self.tables, f"sequence {seq_id} is already in the KV cache"
        self.tables[seq_id] = BlockTable(0 if self.group.window is None else start // self.block_size)

    def reserve(self, seq_id: int, num_tokens: int) -> None:
        table = self.tables[seq_id]
        if self.group.is_recent:  # older ones are never read here, whoever stores them
            self.drop_unreachable(seq_id, num_tokens - 1)
        missing = -(-num_tokens // self.block_size) - table.stop
        if missing > 0:
            table.extend(self._take(missing, seq_id))

    def drop_unreachable(self, seq_id: int, position: int) -> None:
        if self.group.window is not None:
            first_block = self.group.first_needed(position) // self.block_size
            self._give_back(self.tables[seq_id].drop_before(first_block))

    def remove(self, seq_id: int) -> None:
        self._give_back(self.tables.pop(seq_id).ids.tolist())

    def locate(self, seq_id: int, tokens: np.ndarray) -> np.ndarray:
        """Where these tokens are: block * block_size + place in the block."""
        table = self.tables[seq_id]
        index = tokens // self.block_size - table.first
        assert index.size == 0 or (index.min() >= 0 and index.max() < len(table.ids)), (
            f"tokens {tokens.min()} to {tokens.max()} of sequence {seq_id}, which holds tokens "
            f"{table.first * self.block_size} to {table.stop * self.block_size - 1}: reserve blocks first"
        )
        blocks = table.ids[index].astype(np.int64)
        return np.asarray(blocks * self.block_size + tokens % self.block_size)

    def check_integrity(self) -> None:
        """Every block that was ever handed out is free or in exactly one table."""
        held = [block for table in self.tables.values() for block in table.ids.tolist()]
        known = sorted(held + self._returned)
        assert known == list(range(self._num_used)), (
            f"{len(held)} blocks in tables and {len(self._returned)} returned ones are not "
            f"the {self._num_used} blocks that were handed out"
        )
        assert self._num_used <= self.num_blocks
        assert self._num_used * self.block_bytes <= self._touched_bytes <= self.arena.size

    def _take(self, count: int, seq_id: int) -> list[int]:
        """The `count` lowest free blocks, so that memory stays proportional to use."""
        assert count <= self.num_free, (
            f"sequence {seq_id} needs {count} more blocks of {self.block_bytes} bytes; "
            f"{self.num_free} of {self.num_blocks} are free"
        )
        blocks = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        num_used = self._num_used + count - len(blocks)
        blocks.extend(range(self._num_used, num_used))
        self._num_used = num_used
        self._touch(num_used * self.block_bytes)
        return blocks

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._returned, block)

    def _touch(self, num_bytes: int) -> None:
        """Let the kernels' threads touch the arena first, so that its pages lie next to them."""
        if num_bytes > self._touched_bytes:
            stop = min(self.arena.size, max(num_bytes, self._touched_bytes + GROW_BYTES))
            self.view.touch(self._touched_bytes, stop, self._num_threads)
            self._touched_bytes = stop


class KVPartition:
    """One R-worker's KV cache in blocks.

    Parameters
    ----------
    layout : KVLayout
    num_blocks : tuple of int
        Blocks of each layer group.
    num_threads : int
        Threads that first touch the memory and store prompts: those that will read it.

    Notes
    -----
    A sequence is opened by `add`, gets blocks by `reserve` before tokens are written, loses those that no
    window reaches any more by `drop_unreachable`, and everything by `remove`. Memory is reserved for all
    blocks but used only as far as the highest block that was ever handed out.
    """

    def __init__(self, layout: KVLayout, num_blocks: tuple[int, ...], *, num_threads: int) -> None:
        if len(num_blocks) != len(layout.groups):
            raise ValueError(f"{len(num_blocks)} numbers of blocks for {len(layout.groups)} layer groups")
        self.layout = layout
        self.num_threads = num_threads
        self.pools = tuple(
            BlockPool(group, layout.block_size, blocks, num_threads=num_threads)
            for group, blocks in zip(layout.groups, num_blocks, strict=True)
        )
        # For each main group its pool, and where that is quantised the one with the copy of recent tokens.
        copies = {pool.group.layers: pool for pool in self.pools if pool.group.is_recent}
        self.pairs = tuple((pool, copies.get(pool.group.layers)) for pool in self.pools if not pool.group.is_recent)
        # layer |-> (main group, index within the group)
        self.layer_places = {
            layer: (g, index) for g, group in enumerate(layout.main_groups) for index, layer in enumerate(group.layers)
        }

    def add(self, seq_id: int, start: int = 0) -> None:
        """Open a new sequence whose windowed groups begin at token `start`: older ones are never stored."""
        for pool in self.pools:
            pool.add(seq_id, start)

    def first_needed(self, position: int) -> int:
        """Oldest token that a query at `position` sees in any group."""
        return min(pool.group.first_needed(position) for pool in self.pools)

    def reserve(self, seq_id: int, num_tokens: int) -> None:
        """Make blocks so that all tokens before `num_tokens` fit.

        Raises
        ------
        AssertionError
            If blocks run out: admission should have prevented it.
        """
        for pool in self.pools:
            pool.reserve(seq_id, num_tokens)

    def drop_unreachable(self, seq_id: int, position: int) -> None:
        """Free the blocks that no query at `position` or later sees."""
        for pool in self.pools:
            pool.drop_unreachable(seq_id, position)

    def remove(self, seq_id: int) -> None:
        """Free all blocks of a sequence."""
        for pool in self.pools:
            pool.remove(seq_id)

    def free_blocks(self) -> tuple[int, ...]:
        """Blocks of each group that no sequence holds."""
        return tuple(pool.num_free for pool in self.pools)

    def huge_page_share(self) -> float | None:
        """Share of the memory in use that lies on huge pages, 0 to 1; None before any is.

        Asks the kernel, which walks over all pages: milliseconds, more where pages are small.
        """
        return huge_page_share([memory_span(pool.arena) for pool in self.pools if pool.arena.nbytes])

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block is free or in exactly one table."""
        for pool in self.pools:
            pool.check_integrity()

    def write_prefill(self, layer: int, seq_id: int, start: int, kv_rows: np.ndarray, wire_dtype: str) -> None:
        """Store K and V of the prompt tokens from `start` on.

        Parameters
        ----------
        kv_rows : np.ndarray
            [num_tokens, 2 * kv_size] rows ``[k|v]`` of `wire_dtype`. Tokens older than the first block of a
            windowed group are left out.
        """
        group, index = self.layer_places[layer]
        for pool in filter(None, self.pairs[group]):
            first = pool.tables[seq_id].first * self.layout.block_size if pool.group.window is not None else 0
            skip = min(len(kv_rows), max(0, first - start))
            places = pool.locate(seq_id, np.arange(start + skip, start + len(kv_rows)))
            pool.view.store(index, places, kv_rows[skip:], 0, wire_dtype, self.num_threads)
