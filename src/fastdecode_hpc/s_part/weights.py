"""A model's weights: a checkpoint, read tensor by tensor into fused tensors.

Every byte goes from the file through one small buffer to its final place, so loading needs hardly more
memory than the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError, ModelConfig
from fastdecode_hpc.s_part.checkpoint import (
    Checkpoint,
    checkpoint_dtype,
    open_checkpoint,
    read_model_config,
)

__all__ = [
    "LayerWeights",
    "Weights",
    "checkpoint_dtype",
    "dummy_weights",
    "load_weights",
    "read_model_config",
]

_CHUNK_BYTES = 1 << 20  # of float32; bounds what a read holds beside the weights
_MAX_NAMES = 8  # in one message
_LAYER_NUMBER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(slots=True)
class LayerWeights:
    """One layer; matrices are ``[out, in]``, biases None where the model has none."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [qkv_size, hidden_size]
    qkv_bias: Tensor | None
    output: Tensor  # [hidden_size, q_size]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None

    def matrices(self) -> list[str]:
        """Names of what rows are multiplied with."""
        return [name for name in self.__slots__ if (value := getattr(self, name)) is not None and value.ndim == 2]

    def tensors(self) -> list[Tensor]:
        """All tensors that are there."""
        values = (getattr(self, name) for name in self.__slots__)
        return [value for value in values if value is not None]


@dataclass(slots=True)
class Weights:
    """All weights of a model, of one type on one device."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: Sequence[LayerWeights]
    final_norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]; the embedding itself where the model ties them

    @property
    def size_bytes(self) -> int:
        """Memory of all tensors, a tied head counted once."""
        head = [] if self.lm_head is self.embedding else [self.lm_head]
        tensors = [self.embedding, self.final_norm, *head, *(t for layer in self.layers for t in layer.tensors())]
        return sum(t.numel() * t.element_size() for t in tensors)


class _Target(NamedTuple):
    """Where one tensor of a checkpoint goes."""

    name: str
    place: Tensor  # view of a weight
    head_dim: int | None = None  # of Q and K, whose rows may be permuted inside each head


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    first_layers: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Read all weights of a checkpoint.

    Parameters
    ----------
    path : Path
        As `model_files.resolve_model` gave it.
    config : ModelConfig
        As `read_model_config` gave it.
    first_layers : bool
        The checkpoint may have more layers than `config`; these are left out.
    progress : callable, optional
        Called after every tensor with the bytes of weights in place and their total.

    Raises
    ------
    ConfigError
        If tensors are missing, unknown or of another shape, all named before anything is read.
    """
    checkpoint = open_checkpoint(path)
    names = {name for name in checkpoint.shapes if not _is_ignored(name, config, first_layers)}
    # Before memory is taken: what the files hold bounds it, whatever sizes the configuration claims.
    _check_names(path, checkpoint, names, _targets(config, _allocate(config, dtype, torch.device("meta"))))
    weights = _allocate(config, dtype, device)
    targets = list(_targets(config, weights))
    done_bytes, total_bytes = 0, weights.size_bytes
    for target in targets:
        _fill(target, checkpoint)
        done_bytes += target.place.numel() * target.place.element_size()
        if progress is not None:
            progress(done_bytes, total_bytes)
    return weights


def dummy_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Random weights that keep activations near unit size, for benchmarks without a checkpoint."""
    weights = _allocate(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for target in _targets(config, weights):
        if target.place.ndim == 2:
            bound = math.sqrt(3 / target.place.shape[1])
            target.place.uniform_(-bound, bound, generator=generator)
        else:
            target.place.fill_(1.0 if target.name.endswith("norm.weight") else 0.0)
    return weights


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights without values; their memory is not touched yet."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def bias(wanted: bool, size: int) -> Tensor | None:
        return empty(size) if wanted else None

    def layer() -> LayerWeights:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        return LayerWeights(
            attention_norm=empty(hidden),
            qkv=empty(config.qkv_size, hidden),
            qkv_bias=bias(config.attention_bias, config.qkv_size),
            output=empty(hidden, config.q_size),
            output_bias=bias(config.output_bias, hidden),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * intermediate, hidden),
            gate_up_bias=bias(config.mlp_bias, 2 * intermediate),
            down=empty(hidden, intermediate),
            down_bias=bias(config.mlp_bias, hidden),
        )

    embedding = empty(config.vocab_size, config.hidden_size)
    lm_head = embedding if config.tie_embeddings else torch.empty_like(embedding)
    return Weights(embedding, [layer() for _ in range(config.num_layers)], empty(config.hidden_size), lm_head)


def _targets(config: ModelConfig, weights: Weights) -> Iterator[_Target]:
    """Every tensor that a checkpoint of this model holds, with its place."""
    yield _Target("model.embed_tokens.weight", weights.embedding)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        yield _Target(prefix + "input_layernorm.weight", layer.attention_norm)
        yield from _qkv_targets(config, prefix + "self_attn.", layer)
        yield from _linear_targets(prefix + "self_attn.o_proj", layer.output, layer.output_bias)
        yield _Target(prefix + "post_attention_layernorm.weight", layer.mlp_norm)
        for half, name in enumerate(("gate_proj", "up_proj")):
            bias = None if layer.gate_up_bias is None else layer.gate_up_bias.chunk(2)[half]
            yield from _linear_targets(prefix + "mlp." + name, layer.gate_up.chunk(2)[half], bias)
        yield from _linear_targets(prefix + "mlp.down_proj", layer.down, layer.down_bias)
    yield _Target("model.norm.weight", weights.final_norm)
    if not config.tie_embeddings:
        yield _Target("lm_head.weight", weights.lm_head)


def _qkv_targets(config: ModelConfig, prefix: str, layer: LayerWeights) -> Iterator[_Target]:
    sizes = [config.q_size, config.kv_size, config.kv_size]
    weights = layer.qkv.split(sizes)
    biases = [None] * 3 if layer.qkv_bias is None else layer.qkv_bias.split(sizes)
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        head_dim = None if name == "v" else config.head_dim
        yield from _linear_targets(f"{prefix}{name}_proj", weight, bias, head_dim)


def _linear_targets(name: str, weight: Tensor, bias: Tensor | None, head_dim: int | None = None) -> Iterator[_Target]:
    yield _Target(name + ".weight", weight, head_dim)
    if bias is not None:
        yield _Target(name + ".bias", bias, head_dim)


def _check_names(path: Path, checkpoint: Checkpoint, names: set[str], targets: Iterable[_Target]) -> None:
    """Raise unless these tensors of the checkpoint are exactly the targets, in their shapes."""
    wanted = {target.name: tuple(target.place.shape) for target in targets}
    present = {name: shape for name, shape in checkpoint.shapes.items() if name in names}
    problems = [
        _list_names("lacks", [name for name in wanted if name not in present]),
        _list_names("has unknown", [name for name in present if name not in wanted]),
        _list_names(
            "has wrongly shaped",
            [
                f"{name} {list(present[name])} instead of {list(shape)}"
                for name, shape in wanted.items()
                if present.get(name, shape) != shape
            ],
        ),
    ]
    text = "; ".join(problem for problem in problems if problem)
    if text:
        raise ConfigError(f"the checkpoint {path} does not fit its configuration: it {text}")


def _is_ignored(name: str, config: ModelConfig, first_layers: bool) -> bool:
    """Old checkpoints keep rotary frequencies; tied ones may keep a copy of the embedding."""
    layer = _LAYER_NUMBER.match(name)
    if first_layers and layer is not None and int(layer[1]) >= config.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _list_names(problem: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{problem} tensors {', '.join(names[:_MAX_NAMES])}{more}"


def _fill(target: _Target, checkpoint: Checkpoint) -> None:
    """Read one tensor into its place, some rows at a time."""
    place, rows_per_unit = target.place, 1
    if target.head_dim is not None and checkpoint.permuted_qk:
        rows_per_unit = target.head_dim if place.ndim == 2 else 1
        place = _interleaved(place, target.head_dim)
    elif place.ndim == 1:
        place = place[None]
    step = max(1, _CHUNK_BYTES // (4 * place[0].numel()))
    for first in range(0, place.shape[0], step):
        part = place[first : first + step]
        rows = checkpoint.read(target.name, first * rows_per_unit, part.shape[0] * rows_per_unit)
        part.copy_(rows.view(part.shape))


def _interleaved(place: Tensor, head_dim: int) -> Tensor:
    """A view of a Q or K weight in the row order of interleaved rotary embedding.

    Row ``2 i + s`` of a head there is row ``i + s * head_dim / 2`` here: pairs stand side by side there, in
    two halves here.
    """
    heads = place.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2)  # [heads, head_dim / 2, 2, (columns)]
    return heads if place.ndim == 2 else heads[None]
