"""Linear modules of a model that is not ours, with their weights as `s_part.products` packs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdecode_hpc.s_part.products import linear, pack
from fastdecode_hpc.s_part.weight_tensors import Matrix


def pack_modules(model: Any, after_each: Callable[[], None]) -> None:
    """Pack weights of plain linear modules in place, where that is of use, one after the other.

    A weight that another module has too, as a head that is the embedding, stays there as it was. A module whose weight
    is no tensor any more keeps an empty one, of its type and device, so that what reads it otherwise fails.
    """
    for module in model.modules():
        if type(module) is not torch.nn.Linear:  # others, such as quantised ones, have products of their own
            continue
        weight = module.weight.detach()
        packed = pack(weight)
        if packed is not weight:
            kept = packed if isinstance(packed, Tensor) else weight.new_empty(0)
            module.weight = torch.nn.Parameter(kept, requires_grad=False)
            module.forward = partial(_multiply, packed, module.bias)
        del weight
        after_each()


def _multiply(weight: Matrix, bias: Tensor | None, x: Tensor) -> Tensor:
    """`linear` with any dimensions before the last."""
    return linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def tied_head_weights(model: Any) -> int:
    """Elements of a head that is the embedding; 0 where it has weights of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return int(head.weight.numel()) if head is not None and head.weight is embedding.weight else 0
