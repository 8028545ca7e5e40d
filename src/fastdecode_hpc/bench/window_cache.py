"""The real KV cache and kernels under whole windows of text, one row for each token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.kv_layout import make_layout

WIRE = "fp32"  # so that rows lose nothing on their way: only the cache's type differs between two runs


class WindowCache:
    """A KV partition of one type that holds a batch of windows, each a sequence of its own.

    Parameters
    ----------
    kv_dtype : str
        As ``--kv-dtype`` takes it.
    context : int
        Tokens of a window.
    max_windows : int
        Windows of the largest batch.
    block_size : int
        Tokens of a block.
    """

    def __init__(
        self, model: ModelConfig, kv_dtype: str, *, context: int, max_windows: int, block_size: int, num_threads: int
    ) -> None:
        layout = make_layout(model, block_size=block_size, kv_dtype=kv_dtype)
        # Every token is once the newest here, so the copy of recent tokens keeps all.
        groups = (replace(group, window=None) if group.is_recent else group for group in layout.groups)
        self.layout = replace(layout, groups=tuple(groups))
        self._context, self._num_threads = context, num_threads
        self._q_size = model.q_size
        num_blocks = max_windows * -(-context // block_size)
        # Even with a sliding window: all tokens are stored before the first one is read.
        self._partition = KVPartition(self.layout, (num_blocks,) * len(self.layout.groups), num_threads=num_threads)
        self._attention = DecodeAttention(
            self._partition, num_heads=model.num_heads, wire_dtype=WIRE, num_threads=num_threads
        )
        self._open(max_windows)

    def set_sinks(self, sinks: np.ndarray | None) -> None:
        """Of a model that has them: [num_layers, num_heads] float32."""
        if sinks is not None:
            self._attention.set_sinks(sinks)

    def begin(self, num_windows: int) -> None:
        """Forget the last batch and make room for one of `num_windows`."""
        for seq_id in range(self._num_windows):
            self._partition.remove(seq_id)
        self._open(num_windows)

    def _open(self, num_windows: int) -> None:
        self._num_windows = num_windows
        for seq_id in range(num_windows):
            self._partition.add(seq_id)
            self._partition.reserve(seq_id, self._context)
        # A row for every token: its sequence, and its own place as the newest token that it sees.
        seq_ids = np.repeat(np.arange(num_windows), self._context).tolist()
        positions = np.tile(np.arange(self._context), num_windows)
        self._work = StepWork(self._partition, seq_ids, positions, num_threads=self._num_threads)
        self._out = np.empty((len(positions), self._q_size), np.float32)

    def attend(self, layer: int, qkv: np.ndarray) -> np.ndarray:
        """Store K and V of all tokens, then let every token attend to itself and those before it.

        Parameters
        ----------
        qkv : np.ndarray
            [num_windows * context, qkv_size] float32

        Returns
        -------
        np.ndarray
            [num_windows * context, q_size] float32, until the next call.
        """
        for seq_id in range(self._num_windows):
            rows = slice(seq_id * self._context, (seq_id + 1) * self._context)
            kv_rows = np.ascontiguousarray(qkv[rows, self._q_size :])
            self._partition.write_prefill(layer, seq_id, 0, kv_rows, WIRE)
        for piece in range(self._work.num_pieces):
            self._attention.attend(layer, self._work, qkv, self._out, piece)
        return self._out
