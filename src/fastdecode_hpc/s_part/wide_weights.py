"""Weights of a half type in float32, a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastdecode_hpc.s_part.products import unpacked
from fastdecode_hpc.s_part.weight_tensors import LayerWeights, Weights


def as_float32(weights: Weights) -> Weights:
    """The same weights in float32; layers only as long as they are used."""
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
            self._last = index, LayerWeights(*(_float32(getattr(layer, name)) for name in layer.__slots__))
        return self._last[1]


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else unpacked(x).float()
