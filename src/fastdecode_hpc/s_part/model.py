"""The native S-Part: everything of a forward pass that has weights, layer half by layer half.

It knows nothing of sequences, schedules or where the attention between its two halves is computed.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part import layers
from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.products import are_row_wise, linear, look_up
from fastdecode_hpc.s_part.rope import rope_tables
from fastdecode_hpc.s_part.row_tiles import BASE_SIZES, RowTiles, find_row_tiles
from fastdecode_hpc.s_part.weights import LayerWeights, Weights
from fastdecode_hpc.s_part.wide_weights import as_float32

LAYER_TILES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts tried for the halves of a layer."""

HEAD_TILES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Row counts tried for the logits: few, because the head is by far the largest product to check."""


class SPart(BaseSPart):
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
        self.max_positions = max_positions or config.max_context_len
        self.config, self.weights = config.for_context(self.max_positions), weights
        self.device, self.dtype = device, dtype
        self._norm, self._activated = layers.NORMS[config.norm], layers.activated(config.activation, config.gated)
        scale = config.embedding_scale  # rounded to the weights' type, as these models were trained
        self._embedding_scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)
        self._norms_sum = config.norm_place == "sum"
        self._ropes = rope_tables(self.config, self.max_positions, device)
        self.layer_tiles, self.head_tiles = RowTiles(), RowTiles()
        self.embed_tiles, self.expert_tiles = RowTiles(), RowTiles()
        if batch_invariant:
            with torch.inference_mode():
                self._find_tiles()

    @property
    def can_be_recorded(self) -> bool:
        """Whether the halves of layers do the same whatever the rows hold; experts take others each time."""
        return self.config.experts is None

    def sinks(self, layer: int) -> Tensor | None:
        return self.weights.layers[layer].sinks

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of tokens: ``[num_rows]`` int64, ids and positions, to ``[num_rows, hidden_size]``."""
        with torch.inference_mode():
            return self.embed_tiles.run(self._embed, token_ids, positions)

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

    def make_pass(self, max_rows: int) -> NativePass:
        return NativePass(self, max_rows)

    def plain(self) -> SPart:
        """In float32, with no tiles; layers are widened when they are used."""
        return SPart(
            self.config,
            as_float32(self.weights),
            device=self.device,
            dtype=torch.float32,
            batch_invariant=False,
            max_positions=self.max_positions,
        )

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        config, weights = self.config, self.weights
        hidden = look_up(token_ids, weights.embedding).to(self.dtype)
        if weights.project_in is not None:
            hidden = linear(hidden, weights.project_in)
        if weights.positions is not None:
            hidden = hidden + F.embedding(positions + config.position_offset, weights.positions)
        return hidden if self._embedding_scale is None else hidden * self._embedding_scale

    def _pre_attention(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        weights, config, rope = self.weights.layers[layer], self.config, self._ropes[layer]
        qkv = linear(self._normed(hidden, weights.attention_norm), weights.qkv, weights.qkv_bias)
        if weights.q_norm is not None and weights.k_norm is not None:
            self._norm_qk_(qkv, weights.q_norm, weights.k_norm)
        if rope is not None:
            qk = qkv[:, : config.q_size + config.kv_size].unflatten(-1, (-1, config.head_dim))
            layers.rotate_(qk, rope[positions])
        return qkv

    def _norm_qk_(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Norm q and k of rows ``[q|k|v]`` in place: each head, or all of a row's heads at once."""
        config = self.config
        q, k, _ = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        for rows, norm in ((q, q_norm), (k, k_norm)):
            heads = rows.unflatten(-1, (-1, norm.shape[-1]))
            heads.copy_(self._norm(heads, norm, config.norm_eps))

    def _post_attention(self, layer: int, hidden: Tensor, o: Tensor) -> Tensor:
        weights = self.weights.layers[layer]
        attended = linear(o.to(self.dtype), weights.output, weights.output_bias)
        if self.config.parallel:
            return hidden + attended + self._mlp(weights, self._normed(hidden, weights.mlp_norm))
        hidden = self._add(hidden, attended, weights.attention_out_norm)
        return self._add(hidden, self._mlp(weights, self._normed(hidden, weights.mlp_norm)), weights.mlp_out_norm)

    def _normed(self, hidden: Tensor, norm: Tensor | None) -> Tensor:
        return hidden if norm is None else self._norm(hidden, norm, self.config.norm_eps)

    def _add(self, hidden: Tensor, update: Tensor, norm: Tensor | None) -> Tensor:
        """The residual sum; `norm` is of the update or, where the family has it so, of the sum."""
        if self.config.residual_scale != 1.0:
            update = update * self.config.residual_scale
        return self._normed(hidden + update, norm) if self._norms_sum else hidden + self._normed(update, norm)

    def _mlp(self, weights: LayerWeights, normed: Tensor) -> Tensor:
        if weights.router is not None:
            return self._mixture(weights, normed)
        gate_up = linear(normed, weights.gate_up, weights.gate_up_bias)
        return linear(self._activated(gate_up), weights.down, weights.down_bias)

    def _mixture(self, weights: LayerWeights, normed: Tensor) -> Tensor:
        """Each row through the experts that the router gives it, weighed and summed in the order of experts."""
        experts = self.config.experts
        assert experts is not None and weights.router is not None
        shares = linear(normed, weights.router, weights.router_bias).float().softmax(dim=-1)
        chosen, numbers = shares.topk(experts.per_token, dim=-1)
        if experts.normalised:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(normed)
        for expert in numbers.unique().tolist():
            rows, places = (numbers == expert).nonzero(as_tuple=True)
            result = self.expert_tiles.run(partial(self._expert, weights, expert), normed[rows])
            out.index_add_(0, rows, result * chosen[rows, places, None].to(result.dtype))
        return out

    def _expert(self, weights: LayerWeights, expert: int, normed: Tensor) -> Tensor:
        up_bias, down_bias = (
            None if bias is None else bias[expert] for bias in (weights.gate_up_bias, weights.down_bias)
        )
        return linear(
            self._activated(linear(normed, weights.gate_up[expert], up_bias)), weights.down[expert], down_bias
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        config, weights = self.config, self.weights
        normed = self._normed(hidden, weights.final_norm)
        if weights.project_out is not None:
            normed = linear(normed, weights.project_out)
        logits = linear(normed, weights.lm_head).float()
        if config.logit_divisor != 1.0:
            logits = logits / config.logit_divisor
        return logits if config.logit_softcap is None else layers.softcap(logits, config.logit_softcap)

    def _find_tiles(self) -> None:
        """Find row counts that are safe here for an expert, both halves of a layer, the logits and the embedding.

        Layers have equal shapes, so the first stands for all. The check runs the very functions that the
        batches run, so it sees norms, rotary embedding and activation as well as the products.
        """
        num_samples, config, weights = max(BASE_SIZES), self.config, self.weights.layers[0]
        generator = torch.Generator().manual_seed(0)

        def sample(size: int) -> Tensor:
            return torch.randn(num_samples, size, generator=generator).to(self.device, self.dtype)

        def both_halves(hidden: Tensor, positions: Tensor, o: Tensor) -> Tensor:
            return torch.cat((self._pre_attention(0, hidden, positions), self._post_attention(0, hidden, o)), dim=1)

        hidden, o = sample(config.hidden_size), sample(config.q_size)
        positions = torch.arange(num_samples, device=self.device) * 37 % self.max_positions
        if config.experts is not None:  # a layer's rows are dealt out to these, some to each
            expert = partial(self._expert, weights, 0)
            self.expert_tiles = find_row_tiles("expert", expert, (hidden,), LAYER_TILES, row_wise=are_row_wise(weights))
        self.layer_tiles = find_row_tiles(
            "layer", both_halves, (hidden, positions, o), LAYER_TILES, row_wise=are_row_wise(weights)
        )
        self.head_tiles = find_row_tiles(
            "logits", self._logits, (hidden,), HEAD_TILES, row_wise=are_row_wise(self.weights)
        )
        if self.weights.project_in is not None:
            token_ids = torch.arange(num_samples, device=self.device) % config.vocab_size
            self.embed_tiles = find_row_tiles("embedding", self._embed, (token_ids, positions), LAYER_TILES)


class NativePass:
    """Rows of an `SPart` in buffers that stay where they are (`s_part.base.Pass`)."""

    def __init__(self, s_part: SPart, max_rows: int) -> None:
        self._s_part = s_part
        self.hidden = torch.zeros(max_rows, s_part.config.hidden_size, dtype=s_part.dtype, device=s_part.device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=s_part.device)

    def start(self, token_ids: Tensor, positions: Tensor, num_rows: int) -> None:
        num_tokens = len(token_ids)
        self._positions[:num_tokens] = positions
        self.hidden[:num_tokens] = self._s_part.embed(token_ids, self._positions[:num_tokens])
        self.hidden[num_tokens:num_rows].zero_()

    def pre_attention(self, layer: int, num_rows: int) -> Tensor:
        return self._s_part.pre_attention(layer, self.hidden[:num_rows], self._positions[:num_rows])

    def post_attention(self, layer: int, o: Tensor) -> None:
        hidden = self.hidden[: len(o)]
        hidden.copy_(self._s_part.post_attention(layer, hidden, o))
