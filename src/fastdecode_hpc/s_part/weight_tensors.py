"""The tensors of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.int8_weights import Int8Weight
from fastdecode_hpc.s_part.panel_weights import PanelWeight

Matrix: TypeAlias = Tensor | Int8Weight | PanelWeight


@dataclass(slots=True)
class LayerWeights:
    """One layer; None: the model has none.

    Matrices are ``[out, in]``, with experts ``[experts, out, in]``, until they are packed: then each is a `Matrix`, and
    those of experts are a list. A norm is ``[size]``, or ``[2, size]`` of weights and biases.
    """

    qkv: Tensor  # [qkv_size, hidden_size]
    qkv_bias: Tensor | None
    output: Tensor  # [hidden_size, q_size]
    output_bias: Tensor | None
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]; half as many rows where there is no gate
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None
    attention_norm: Tensor | None  # before attention
    attention_out_norm: Tensor | None  # of what it adds, or of the sum
    mlp_norm: Tensor | None
    mlp_out_norm: Tensor | None
    q_norm: Tensor | None = None  # [head_dim], or [q_size]
    k_norm: Tensor | None = None  # [head_dim], or [kv_size]
    router: Tensor | None = None  # [experts, hidden_size]
    router_bias: Tensor | None = None
    sinks: Tensor | None = None  # [num_heads]

    def matrices(self) -> list[str]:
        """Names of what rows are multiplied with."""
        return [name for name in ("qkv", "output", "gate_up", "down", "router") if getattr(self, name) is not None]

    def tensors(self) -> list[Matrix]:
        """All tensors that are there."""
        values = [value for name in self.__slots__ if (value := getattr(self, name)) is not None]
        return [each for value in values for each in (value if isinstance(value, list) else [value])]


@dataclass(slots=True)
class Weights:
    """All weights of a model, of one type on one device."""

    embedding: Matrix  # [vocab_size, hidden_size], or of the width of embeddings
    layers: Sequence[LayerWeights]
    final_norm: Tensor | None
    lm_head: Matrix  # as the embedding, which it is where the model ties them
    positions: Tensor | None = None  # [num_positions, hidden_size] learned ones
    project_in: Tensor | None = None  # [hidden_size, width of embeddings]
    project_out: Tensor | None = None  # [width of embeddings, hidden_size]

    @property
    def size_bytes(self) -> int:
        """Memory of all tensors, a tied head counted once."""
        head = None if self.lm_head is self.embedding else self.lm_head
        outside = [self.embedding, self.final_norm, head, self.positions, self.project_in, self.project_out]
        tensors = [*(t for t in outside if t is not None), *(t for layer in self.layers for t in layer.tensors())]
        return sum(t.numel() * t.element_size() if isinstance(t, Tensor) else t.nbytes for t in tensors)


def take_memory(part: Weights | LayerWeights, device: torch.device) -> None:
    """Give the tensors of one part of `describe`'s weights memory on a device, without values."""
    tied = part if isinstance(part, Weights) and part.lm_head is part.embedding else None
    for name in part.__slots__:
        if isinstance(tensor := getattr(part, name), Tensor) and not (tied and name == "lm_head"):
            setattr(part, name, torch.empty_like(tensor, device=device))
    if tied:
        tied.lm_head = tied.embedding


def describe(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Weights whose tensors have types and shapes and no memory (torch's meta device)."""
    hidden, intermediate, width = config.hidden_size, config.intermediate_size, config.embedding_width
    experts = () if config.experts is None else (config.experts.count,)
    place = config.norm_place

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def only(wanted: bool, *shape: int) -> Tensor | None:
        return empty(*shape) if wanted else None

    def norm(wanted: bool, size: int) -> Tensor | None:
        return only(wanted, *((2, size) if config.norm == "layer" else (size,)))

    def qk_norm(size: int) -> Tensor | None:
        return norm(bool(config.qk_norm), config.head_dim if config.qk_norm == "head" else size)

    def layer() -> LayerWeights:
        inputs = config.mlp_inputs * intermediate
        return LayerWeights(
            qkv=empty(config.qkv_size, hidden),
            qkv_bias=only(config.attention_bias, config.qkv_size),
            output=empty(hidden, config.q_size),
            output_bias=only(config.output_bias, hidden),
            gate_up=empty(*experts, inputs, hidden),
            gate_up_bias=only(config.mlp_bias, *experts, inputs),
            down=empty(*experts, hidden, intermediate),
            down_bias=only(config.mlp_bias, *experts, hidden),
            attention_norm=norm(place in ("before", "both"), hidden),
            attention_out_norm=norm(place != "before", hidden),
            mlp_norm=norm(place in ("before", "both"), hidden),
            mlp_out_norm=norm(place != "before", hidden),
            q_norm=qk_norm(config.q_size),
            k_norm=qk_norm(config.kv_size),
            router=only(bool(experts), *experts, hidden),
            router_bias=only(config.experts is not None and config.experts.router_bias, *experts),
            sinks=only(config.attention_sinks, config.num_heads),
        )

    embedding = empty(config.vocab_size, width)
    return Weights(
        embedding,
        [layer() for _ in range(config.num_layers)],
        norm(config.final_norm, hidden),
        embedding if config.tie_embeddings else torch.empty_like(embedding),
        positions=only(config.num_positions > 0, config.num_positions, hidden),
        project_in=only(width != hidden, hidden, width),
        project_out=only(width != hidden, width, hidden),
    )
