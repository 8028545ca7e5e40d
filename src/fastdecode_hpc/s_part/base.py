"""What an S-Part is to whoever drives one: rows in passes through its layers, and logits.

There are several kinds (`s_part.kinds`); schedules, transport and the S-worker see this alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part import layers
from fastdecode_hpc.s_part.row_tiles import RowTiles

Floats = npt.NDArray[np.float32]


class Pass(Protocol):
    """Some rows on their way through the layers, halted at each layer's attention.

    Between two calls all that the rows have become so far is kept here; several passes may stand at different layers.
    """

    @property
    def hidden(self) -> Tensor:
        """After the last layer: ``[num_rows, hidden_size]``, input of the head."""

    def start(self, token_ids: Tensor, positions: Tensor, num_rows: int) -> None:
        """Embed tokens and stand before the first layer; what was under way before is dropped.

        Parameters
        ----------
        token_ids, positions : Tensor
            ``[at most num_rows]`` int64
        num_rows : int
            Rows that the pass is run with: more than there are tokens only where `BaseSPart.can_be_recorded`. What
            becomes of the others goes nowhere.
        """

    def pre_attention(self, layer: int, num_rows: int) -> Tensor:
        """What stands between a layer's input and its attention: ``[num_rows, qkv_size]``, rows ``[q|k|v]``."""

    def post_attention(self, layer: int, o: Tensor) -> None:
        """Take attention output ``[num_rows, q_size]``, of any float type, and finish the layer.

        A pass may put the work off until it is asked for more, so `o` must not change before.
        """


class BaseSPart(ABC):
    """Everything of a forward pass that has weights, on one device.

    Attributes
    ----------
    config : ModelConfig
    device : torch.device
    dtype : torch.dtype
        Of hidden states.
    layer_tiles, head_tiles : RowTiles
        Row counts that layers and logits run in; none where rows are computed as they come.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    layer_tiles: RowTiles
    head_tiles: RowTiles

    @property
    @abstractmethod
    def can_be_recorded(self) -> bool:
        """Whether the halves of layers do the same whatever the rows hold, in buffers that stay where they are."""

    @abstractmethod
    def make_pass(self, max_rows: int) -> Pass:
        """A pass for up to so many rows; it may be started again and again."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[num_rows, vocab_size]`` float32 of what a pass has left."""

    @abstractmethod
    def plain(self) -> BaseSPart:
        """The same model, as plain as it can be, to check what this one gives."""

    def sinks(self, layer: int) -> Tensor | None:
        """A score of each head of a layer that takes weight and has no value, ``[num_heads]``; None: it has none."""
        return None

    def all_sinks(self) -> Floats | None:
        """`sinks` of all layers, ``[num_layers, num_heads]`` float32; None: the model has none."""
        found = [self.sinks(layer) for layer in range(self.config.num_layers)]
        kept = [sinks.float().cpu().numpy() for sinks in found if sinks is not None]
        return np.stack(kept) if kept else None

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
            config = self.config
            out = layers.causal_attention(
                q, k, v, start, config.window_of(layer), config.attention_scale, config.attention_softcap,
                self.sinks(layer),
            )  # fmt: skip
            return out.flatten(-2)
