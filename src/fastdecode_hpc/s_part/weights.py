"""A model's weights: a checkpoint, read tensor by tensor into fused tensors.

Every byte goes from the file through one small buffer to its place, and a layer gets memory when it is read. So loading
needs hardly more memory than the weights, and, where they are packed, the layer that is being packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.families.description import WeightNames
from fastdecode_hpc.families.known import BY_NAME
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.checkpoint import (
    Checkpoint,
    checkpoint_dtype,
    open_checkpoint,
    read_model_config,
)
from fastdecode_hpc.s_part.weight_targets import Target, list_by_part, list_targets
from fastdecode_hpc.s_part.weight_tensors import LayerWeights, Weights, describe

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


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    first_layers: bool = False,
    progress: Callable[[int, int], None] | None = None,
    finish: Callable[[Weights | LayerWeights], None] | None = None,
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
    finish : callable, optional
        Called with all weights once those outside layers are there, then with each layer, before memory for the next is
        taken; may replace their tensors.

    Raises
    ------
    ConfigError
        If tensors are missing, unknown or of another shape, all named before anything is read.
    """
    checkpoint = open_checkpoint(path)
    names = checkpoint.names_of(BY_NAME[config.architecture])
    present = {name for name in checkpoint.shapes if not _is_ignored(name, names, config, first_layers)}
    # Before memory is taken: what the files hold bounds it, whatever sizes the configuration claims.
    weights = describe(config, dtype)
    _check_names(path, checkpoint, present, list_targets(config, names, weights))
    done_bytes, total_bytes = 0, weights.size_bytes
    for part, targets in list_by_part(config, names, weights, device):
        for target in targets:
            _fill(target, checkpoint)
            done_bytes += target.place.numel() * target.place.element_size()
            if progress is not None:
                progress(done_bytes, total_bytes)
        del target, targets  # they hold what is replaced
        if finish is not None:
            finish(part)
    return weights


def dummy_weights(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    finish: Callable[[Weights | LayerWeights], None] | None = None,
) -> Weights:
    """Random weights that keep activations near unit size, for benchmarks without a checkpoint.

    `finish` is as for `load_weights`.
    """
    weights = describe(config, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for part, targets in list_by_part(config, BY_NAME[config.architecture].names, weights, device):
        for target in targets:
            _fill_randomly(target, config, generator)
        del target, targets
        if finish is not None:
            finish(part)
    return weights


def _fill_randomly(target: Target, config: ModelConfig, generator: torch.Generator) -> None:
    if len(target.shape) > 1:
        num_in = target.place.shape[target.place.stride().index(1)]  # a matrix's inputs lie side by side
        bound = math.sqrt(3 / num_in)
        target.place.uniform_(-bound, bound, generator=generator)
    else:
        is_norm_weight = target.is_norm and target.name.endswith(".weight")
        target.place.fill_(1.0 if is_norm_weight and config.norm != "rms-plus-one" else 0.0)


def _check_names(path: Path, checkpoint: Checkpoint, names: set[str], targets: Iterable[Target]) -> None:
    """Raise unless these tensors of the checkpoint are exactly the targets, in their shapes."""
    wanted = {target.name: target.shape for target in targets}
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


def _is_ignored(name: str, names: WeightNames, config: ModelConfig, first_layers: bool) -> bool:
    """Old checkpoints keep what is computed here, such as rotary frequencies; tied ones a copy of the embedding."""
    before, after = (names.prefix + names.layer).split("{}")
    number = name.removeprefix(before).split(after, 1)[0]
    if first_layers and name.startswith(before) and number.isdecimal() and int(number[:9]) >= config.num_layers:
        return True
    return name.endswith(names.ignored) or (config.tie_embeddings and name == names.head + ".weight")


def _list_names(problem: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{problem} tensors {', '.join(names[:_MAX_NAMES])}{more}"


def _fill(target: Target, checkpoint: Checkpoint) -> None:
    """Read one tensor into its place, some rows at a time."""
    first, num_columns = 0, target.shape[-1]
    for part in _pieces(target.place if len(target.shape) > 1 else target.place[None], num_columns):
        num_rows = part.numel() // num_columns
        part.copy_(checkpoint.read(target.name, first, num_rows).view(part.shape))
        first += num_rows


def _pieces(place: Tensor, num_columns: int) -> Iterator[Tensor]:
    """A place cut into small pieces of whole rows of its file, in that one's order."""
    size = place[0].numel()
    if size > max(num_columns, _CHUNK_BYTES // 4):  # such as one expert
        for part in place:
            yield from _pieces(part, num_columns)
    else:
        yield from place.split(max(1, _CHUNK_BYTES // (4 * size)))
