"""An S-Part that computes nothing, to measure what is around it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.weights import dummy_weights


class EmptySPart(SPart):
    """Halves of layers that do nothing; logits are computed.

    Parameters
    ----------
    config : ModelConfig
        A small one.
    """

    def __init__(self, config: ModelConfig) -> None:
        torch.set_num_threads(1)  # a second one costs more than the little that is left to compute
        cpu, dtype = torch.device("cpu"), torch.float32
        weights = dummy_weights(config, dtype=dtype, device=cpu, seed=0)
        super().__init__(config, weights, device=cpu, dtype=dtype, batch_invariant=False)

    def pre_attention(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self.config.qkv_size)

    def post_attention(self, layer: int, hidden: Tensor, o: Tensor) -> Tensor:
        return hidden
