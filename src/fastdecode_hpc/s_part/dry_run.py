"""What a model of transformers asks of attention, found by running it without weights, before memory is taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.families.refused import KindError
from fastdecode_hpc.s_part.transformers_model import SeenTokens, ask

# Arguments that change nothing, or that are read.
_KNOWN = frozenset({"position_ids", "cache_position", "position_embeddings", "scaling", "sliding_window", "softcap"})
_ROWS = 2


@dataclass(frozen=True, slots=True)
class AskedLayer:
    """What one layer asks for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens a query sees, itself included; None: all
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the whole model does."""

    layers: tuple[AskedLayer, ...]
    hidden_size: int

    def common(self, name: str) -> Any:
        """A value that all layers must share."""
        values = sorted({getattr(layer, name) for layer in self.layers}, key=str)
        if len(values) > 1:
            raise ConfigError(
                f"the model's layers differ in {name} ({', '.join(map(str, values))}); one for all is supported"
            )
        return values[0]

    def windows(self) -> tuple[int | None, tuple[int, ...]]:
        """The window of layers that have one, and the layers that have none."""
        sizes = sorted({layer.window for layer in self.layers if layer.window is not None})
        if len(sizes) > 1:
            raise ConfigError(
                f"the model's layers have windows of {', '.join(map(str, sizes))} tokens; one is supported"
            )
        if not sizes:
            return None, ()
        return sizes[0], tuple(number for number, layer in enumerate(self.layers) if layer.window is None)


def dry_run(base: torch.nn.Module, num_layers: int, max_context_len: int) -> Asked:
    """Run a model on the meta device and note what it asks of attention.

    Parameters
    ----------
    base : Module
        Without its head, of `transformers_model.empty_model`.
    num_layers : int
        That it says it has.
    max_context_len : int
        Masks are looked at up to here.

    Raises
    ------
    ConfigError
        If it asks for what R-workers can't compute, or can't be run. `KindError` where the native S-Part may run it.
    """
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ConfigError(
            f"{type(base).__name__} takes no position_ids, so its rows can't stand at places of their own"
        )
    layers: list[AskedLayer] = []
    windows: dict[SeenTokens, int | None] = {}

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Tensor:
        number = getattr(module, "layer_idx", None)
        if number is not None and number != len(layers):
            raise ConfigError(f"its attention number {len(layers)} is of layer {number}")
        _check_options(module, attention_mask, options)
        if attention_mask not in windows:
            windows[attention_mask] = find_window(attention_mask.mask_function, max_context_len)
        layers.append(_layer(query, key, value, windows[attention_mask], options))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    ask(note)
    ones = torch.ones(_ROWS, 1, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            outputs = base(input_ids=ones, position_ids=ones, attention_mask=ones, use_cache=False)
    except ConfigError as error:
        raise type(error)(f"{type(base).__name__} can't be run: {error}") from error
    except Exception as error:  # its code is not ours
        raise ConfigError(
            f"{type(base).__name__} can't be run without weights, to see what it asks of attention: "
            f"{type(error).__name__}: {error}"
        ) from error
    if len(layers) != num_layers:
        raise ConfigError(f"{type(base).__name__} has {num_layers} layers and {len(layers)} of them ask for attention")
    return Asked(tuple(layers), outputs.last_hidden_state.shape[-1])


def _check_options(module: Any, mask: Any, options: dict[str, Any]) -> None:
    """Refuse what would change the arithmetic in a way that isn't computed."""
    sinks = options.get("s_aux")
    if sinks is not None or getattr(module, "sinks", None) is not None:
        raise KindError("its attention has sinks, which only the native S-Part tells the R-workers of")
    if not isinstance(mask, SeenTokens):
        what = "a mask of its own" if isinstance(mask, Tensor) else "no mask"
        raise ConfigError(f"it gives {what} to attention, so the tokens that a query sees aren't known")
    if options.get("is_causal") is False:
        raise ConfigError("its attention is not causal")
    unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in _KNOWN]
    if unknown:
        raise ConfigError(f"it gives {', '.join(unknown)} to attention, which isn't computed")


def _layer(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> AskedLayer:
    num_heads, head_dim, num_kv_heads = query.shape[1], query.shape[3], key.shape[1]
    if key.shape != value.shape or key.shape[3] != head_dim:
        raise ConfigError(
            f"its keys have {num_kv_heads} heads of {key.shape[3]} elements, its values {value.shape[1]} of "
            f"{value.shape[3]}, its queries heads of {head_dim}; equal ones are supported"
        )
    scale, softcap = options.get("scaling"), options.get("softcap")
    return AskedLayer(
        num_heads,
        num_kv_heads,
        head_dim,
        window,
        head_dim**-0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap),
    )


def find_window(mask_function: Callable[..., Tensor], max_context_len: int) -> int | None:
    """How many tokens a query sees by a mask, itself included; None: all up to `max_context_len`.

    Parameters
    ----------
    mask_function : callable
        As transformers has it: of batch, head, query and key indices, whether the key is seen.

    Raises
    ------
    ConfigError
        If what it shows is no window that ends at the query.
    """
    keys = torch.arange(max_context_len)

    def seen(query: int) -> Tensor:
        return torch.as_tensor(mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)).expand(
            max_context_len
        )

    last = max_context_len - 1
    try:
        size = int(seen(last).sum())
        places = {0, 1, size - 1, size, size + 1, last // 2, last // 2 + 1, last - 1, last}
        fits = all(
            torch.equal(seen(query), (keys <= query) & (keys > query - size)) for query in places if 0 <= query <= last
        )
    except Exception as error:  # of a function that needs more than places
        raise ConfigError(f"what its queries see depends on more than their places: {error}") from error
    if not fits:
        raise ConfigError("its queries see other tokens than all before them, or those of a window")
    return None if size > last else size


def pin_rotations(modules: Iterable[torch.nn.Module], max_context_len: int) -> None:
    """Fix rotary frequencies that transformers would change in the middle of a text, for contexts of up to this length.

    Keys in the cache are never rotated anew, and what a row gets must not depend on the longest of its batch: so
    ``longrope`` has one set of divisors for a run, and ``dynamic``, which stretches beyond the model's own limit, none.
    """
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        changing = {layer: kind for layer, kind in by_layer.items() if kind in ("longrope", "dynamic")}
        if not changing:
            continue
        device = next(module.buffers()).device
        place = torch.full((1, 1), max_context_len - 1, dtype=torch.int64, device=device)
        for layer in (layer for layer, kind in changing.items() if kind == "longrope"):
            module(torch.empty(1, 1, 1, device=device), place, **({} if layer is None else {"layer_type": layer}))
        fixed = {layer: "default" if layer in changing else kind for layer, kind in by_layer.items()}
        module.rope_type = fixed if isinstance(kinds, dict) else "default"
