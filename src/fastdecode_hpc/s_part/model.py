"""The S-Part: everything of a forward pass that has weights, layer half by layer half.

It knows nothing of sequences, schedules or where the attention between its two halves is computed.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.config import ModelConfig
from fastdecode_hpc.s_part import layers
from fastdecode_hpc.s_part.products import linear
from fastdecode_hpc.s_part.row_tiles import BASE_SIZES, RowTiles, find_row_tiles
from fastdecode_hpc.s_part.weights import Weights

LAYER_TILES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts tried for the halves of a layer."""

HEAD_TILES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Row counts tried for the logits: few, because the head is by far the largest product to check."""


class SPart:
    """Embedding, both halves of every layer, and logits, on one device.

    Parameters
    ----------
    config : ModelConfig
    weights : Weights
        On `device`, in `dtype`.
    batch_invariant : bool
        Make a row's bits independent of the rows computed with it and of its place. Decided here once, by
        a check that holds for the current number of torch threads: set that before.
    max_positions : int, optional
        Positions that will be used; default: `config.max_context_len`.

    Raises
    ------
    ConfigError
        If `batch_invariant` is asked for and this machine cannot do it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        max_positions: int | None = None,
    ) -> None:
        self.config, self.weights = config, weights
        self.device, self.dtype = device, dtype
        self._rope = layers.rope_table(config, max_positions or config.max_context_len, device)
        self.layer_tiles, self.head_tiles = RowTiles(), RowTiles()
        if batch_invariant:
            with torch.inference_mode():
                self.layer_tiles, self.head_tiles = self._check_tiles()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states of tokens: ``[num_rows]`` int64 to ``[num_rows, hidden_size]``."""
        with torch.inference_mode():
            return F.embedding(token_ids, self.weights.embedding)

    def pre_attention(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """Norm, QKV projection and rotary embedding.

        Parameters
        ----------
        hidden : Tensor
            ``[num_rows, hidden_size]``
        positions : Tensor
            ``[num_rows]`` int64, each below `max_positions`.

        Returns
        -------
        Tensor
            ``[num_rows, qkv_size]``, rows ``[q|k|v]``.
        """
        with torch.inference_mode():
            return self.layer_tiles.run(partial(self._pre_attention, layer), hidden, positions)

    def post_attention(self, layer: int, hidden: Tensor, o: Tensor) -> Tensor:
        """Output projection, residual, norm, MLP, residual.

        Parameters
        ----------
        hidden : Tensor
            ``[num_rows, hidden_size]``, as given to `pre_attention`; not changed.
        o : Tensor
            ``[num_rows, q_size]``, any float type.

        Returns
        -------
        Tensor
            ``[num_rows, hidden_size]``, input of the next layer.
        """
        with torch.inference_mode():
            return self.layer_tiles.run(partial(self._post_attention, layer), hidden, o)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: ``[num_rows, hidden_size]`` to ``[num_rows, vocab_size]`` float32."""
        with torch.inference_mode():
            return self.head_tiles.run(self._logits, hidden)

    def prefill_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Causal attention of one chunk of one prompt; its result depends on nothing else.

        Parameters
        ----------
        q : Tensor
            ``[num_queries, q_size]``, positions `start` to ``start + num_queries - 1``.
        k, v : Tensor
            ``[start + num_queries, kv_size]``, all of this prompt's keys and values of `layer` so far.

        Returns
        -------
        Tensor
            ``[num_queries, q_size]`` in the type of `q`.

        Raises
        ------
        ValueError
            If the number of keys isn't ``start + num_queries``.
        """
        if not k.shape[0] == v.shape[0] == start + q.shape[0]:
            raise ValueError(f"{k.shape[0]} keys and {v.shape[0]} values for {q.shape[0]} queries from {start} on")
        with torch.inference_mode():
            q, k, v = (x.to(q.dtype).unflatten(-1, (-1, self.config.head_dim)) for x in (q, k, v))
            return layers.causal_attention(q, k, v, start, self.config.sliding_window).flatten(-2)

    def _pre_attention(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        weights, config = self.weights.layers[layer], self.config
        normed = layers.rms_norm(hidden, weights.attention_norm, config.rms_norm_eps)
        qkv = linear(normed, weights.qkv, weights.qkv_bias)
        qk = qkv[:, : config.q_size + config.kv_size].unflatten(-1, (-1, config.head_dim))
        layers.rotate_(qk, self._rope[positions])
        return qkv

    def _post_attention(self, layer: int, hidden: Tensor, o: Tensor) -> Tensor:
        weights = self.weights.layers[layer]
        hidden = hidden + linear(o.to(self.dtype), weights.output, weights.output_bias)
        normed = layers.rms_norm(hidden, weights.mlp_norm, self.config.rms_norm_eps)
        gate_up = linear(normed, weights.gate_up, weights.gate_up_bias)
        return hidden + linear(layers.swiglu(gate_up), weights.down, weights.down_bias)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = layers.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return linear(normed, self.weights.lm_head).float()

    def _check_tiles(self) -> tuple[RowTiles, RowTiles]:
        """Row counts that are safe here for both halves of a layer, and for the logits.

        Layers have equal shapes, so the first stands for all. The check runs the very functions that the
        batches run, so it sees norms, rotary embedding and activation as well as the products.
        """
        num_samples, config = max(BASE_SIZES), self.config
        generator = torch.Generator().manual_seed(0)

        def sample(size: int) -> Tensor:
            return torch.randn(num_samples, size, generator=generator).to(self.device, self.dtype)

        def both_halves(hidden: Tensor, positions: Tensor, o: Tensor) -> Tensor:
            return torch.cat((self._pre_attention(0, hidden, positions), self._post_attention(0, hidden, o)), dim=1)

        hidden, o = sample(config.hidden_size), sample(config.q_size)
        positions = torch.arange(num_samples, device=self.device) * 37 % self._rope.shape[0]
        layer_tiles = find_row_tiles("layer", both_halves, (hidden, positions, o), LAYER_TILES)
        return layer_tiles, find_row_tiles("logits", self._logits, (hidden,), HEAD_TILES)
