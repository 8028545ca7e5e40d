"""Where each tensor of a checkpoint goes, by the names that its family's description has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastdecode_hpc.families.description import WeightNames
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.weight_tensors import LayerWeights, Weights, take_memory

Order = Callable[[Tensor, int], Tensor]


class Target(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    place: Tensor  # view of a weight, its elements in the order of the file
    shape: tuple[int, ...]  # in the file
    is_norm: bool = False


def list_targets(config: ModelConfig, names: WeightNames, weights: Weights) -> list[Target]:
    """Every tensor that a checkpoint of this model holds."""
    return [target for _, targets in list_by_part(config, names, weights) for target in targets]


def list_by_part(
    config: ModelConfig, names: WeightNames, weights: Weights, device: torch.device | None = None
) -> Iterator[tuple[Weights | LayerWeights, list[Target]]]:
    """Those outside layers, with all weights, then those of each layer, with that layer.

    With `device`, a part gets memory there no sooner than it is asked for.
    """
    if device is not None:
        take_memory(weights, device)
    yield weights, list(_outside(names, weights))
    for index, layer in enumerate(weights.layers):
        if device is not None:
            take_memory(layer, device)
        yield layer, list(_layer(config, names, names.prefix + names.layer.format(index), layer))


def _outside(names: WeightNames, weights: Weights) -> Iterator[Target]:
    yield from _matrix(names.prefix + names.embedding, weights.embedding)
    for name, matrix in (
        (names.positions, weights.positions),
        (names.project_in, weights.project_in),
        (names.project_out, weights.project_out),
    ):
        if matrix is not None:
            yield from _matrix(names.prefix + name, matrix)
    yield from _norm(names.prefix + names.final_norm, weights.final_norm)
    if weights.lm_head is not weights.embedding:
        yield from _matrix(names.head, weights.lm_head)


def _layer(config: ModelConfig, names: WeightNames, prefix: str, layer: LayerWeights) -> Iterator[Target]:
    for name, norm in _norm_names(config, names, layer):
        yield from _norm(prefix + name, norm)
    yield from _qkv(config, names, prefix, layer)
    yield from _matrix(prefix + names.output, layer.output, layer.output_bias, is_transposed=names.is_transposed)
    if layer.router is not None:
        yield from _matrix(prefix + names.router, layer.router, layer.router_bias)
    if layer.sinks is not None:
        yield Target(prefix + names.sinks, layer.sinks, tuple(layer.sinks.shape))
    yield from _fused_experts(names, prefix, layer) if names.fused_experts else _mlp(names, prefix, layer)


def _norm_names(config: ModelConfig, names: WeightNames, layer: LayerWeights) -> Iterator[tuple[str, Tensor | None]]:
    is_sum = config.norm_place == "sum"
    yield names.attention_norm, layer.attention_out_norm if is_sum else layer.attention_norm
    yield names.mlp_norm, layer.mlp_out_norm if is_sum else layer.mlp_norm
    yield names.attention_out_norm, None if is_sum else layer.attention_out_norm
    yield names.mlp_out_norm, None if is_sum else layer.mlp_out_norm
    yield names.q_norm, layer.q_norm
    yield names.k_norm, layer.k_norm


def _norm(name: str, norm: Tensor | None) -> Iterator[Target]:
    if norm is not None:
        parts = norm if norm.ndim == 2 else norm[None]
        for kind, part in zip(("weight", "bias"), parts, strict=False):
            yield Target(f"{name}.{kind}", part, tuple(part.shape), is_norm=True)


def _matrix(name: str, weight: Tensor, bias: Tensor | None = None, *, is_transposed: bool = False) -> Iterator[Target]:
    place = weight.mT if is_transposed else weight
    yield Target(name + ".weight", place, tuple(place.shape))
    if bias is not None:
        yield Target(name + ".bias", bias, tuple(bias.shape))


def _qkv(config: ModelConfig, names: WeightNames, prefix: str, layer: LayerWeights) -> Iterator[Target]:
    if names.interleaved_qkv:
        yield from _reordered(config, prefix + names.qkv[0], layer.qkv, layer.qkv_bias, _by_head)
    elif len(names.qkv) == 1:
        yield from _matrix(prefix + names.qkv[0], layer.qkv, layer.qkv_bias, is_transposed=names.is_transposed)
    else:
        sizes = [config.q_size, config.kv_size, config.kv_size]
        biases = [None] * 3 if layer.qkv_bias is None else layer.qkv_bias.split(sizes)
        for place, (name, weight, bias) in enumerate(zip(names.qkv, layer.qkv.split(sizes), biases, strict=True)):
            if names.permuted_qk and place < 2:
                yield from _reordered(config, prefix + name, weight, bias, _by_pair)
            else:
                yield from _matrix(prefix + name, weight, bias)


def _reordered(config: ModelConfig, name: str, weight: Tensor, bias: Tensor | None, order: Order) -> Iterator[Target]:
    yield Target(name + ".weight", order(weight, config.head_dim), tuple(weight.shape))
    if bias is not None:
        yield Target(name + ".bias", order(bias, config.head_dim), tuple(bias.shape))


def _by_head(place: Tensor, head_dim: int) -> Tensor:
    """Rows of q, k and v in the order head, then q, k, v."""
    return place.unflatten(0, (3, -1, head_dim)).transpose(0, 1)  # [heads, 3, head_dim, (columns)]


def _by_pair(place: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k in the order of interleaved rotary embedding.

    Row ``2 i + s`` of a head there is row ``i + s * head_dim / 2`` here: pairs stand side by side there, in two halves
    here.
    """
    return place.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2)  # [heads, head_dim / 2, 2, (columns)]


def _mlp(names: WeightNames, prefix: str, layer: LayerWeights) -> Iterator[Target]:
    if "{}" not in names.down:
        yield from _one_mlp(names, prefix, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias)
        return
    for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
        for target in _one_mlp(names, prefix, gate_up, None, down, None):
            yield target._replace(name=target.name.format(expert))


def _fused_experts(names: WeightNames, prefix: str, layer: LayerWeights) -> Iterator[Target]:
    """Of all experts, ``[experts, in, out]``, the inputs of an MLP in turn: of each output gate, then up."""
    for name, weight, bias, parts in (
        (names.mlp_inputs[0], layer.gate_up, layer.gate_up_bias, 2),
        (names.down, layer.down, layer.down_bias, 1),
    ):
        experts, num_out, num_in = weight.shape
        place = weight.unflatten(1, (parts, -1)).permute(0, 3, 2, 1)  # [experts, in, out of a part, parts]
        yield Target(prefix + name, place, (experts, num_in, num_out))
        if bias is not None:
            yield Target(f"{prefix}{name}_bias", bias.unflatten(1, (parts, -1)).mT, (experts, num_out))


def _one_mlp(
    names: WeightNames,
    prefix: str,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> Iterator[Target]:
    parts = len(names.mlp_inputs)
    biases = [None] * parts if gate_up_bias is None else gate_up_bias.chunk(parts, dim=-1)
    for name, weight, bias in zip(names.mlp_inputs, gate_up.chunk(parts, dim=-2), biases, strict=True):
        yield from _matrix(prefix + name, weight, bias, is_transposed=names.is_transposed)
    yield from _matrix(prefix + names.down, down, down_bias, is_transposed=names.is_transposed)
