"""Weights of another type, or packed, in float32: a layer at a time, and of its experts one matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastdecode_hpc.s_part.products import unpacked
from fastdecode_hpc.s_part.weight_tensors import LayerWeights, Matrix, Weights


def as_float32(weights: Weights) -> Weights:
    """The same weights in float32; layers, and in them matrices of experts, only as long as they are used."""
    return Weights(
        weights.embedding,  # rows of it are widened when they are looked up
        _Layers(weights.layers),
        _float32(weights.final_norm),
        unpacked(weights.lm_head).float(),
        _float32(weights.positions),
        _float32(weights.project_in),
        _float32(weights.project_out),
    )


class _Layers(Sequence[LayerWeights]):
    """Layers that are widened when they are asked for; the last one stays."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers
        self._last: tuple[int, LayerWeights] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> LayerWeights:  # type: ignore[override]
        if self._last is None or self._last[0] != index:
            self._last = None  # free it first
            layer = self._layers[index]
            self._last = index, LayerWeights(*(_wide(layer, name) for name in layer.__slots__))
        return self._last[1]


class _Experts(Sequence[Tensor]):
    """A matrix of each expert, widened whenever it is asked for: a layer of them may be most of a host's memory."""

    def __init__(self, experts: Tensor | Sequence[Matrix]) -> None:
        self._experts = experts

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return _float32(self._experts[index])


def _wide(layer: LayerWeights, name: str) -> Tensor | _Experts | None:
    value = getattr(layer, name)
    of_experts = layer.router is not None and name in ("gate_up", "down")
    return _Experts(value) if of_experts else _float32(value)


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else unpacked(x).float()
