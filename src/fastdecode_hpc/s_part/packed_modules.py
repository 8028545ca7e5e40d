"""Linear modules of a model that is not ours, with their weights as `s_part.products` packs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastdecode_hpc.s_part.products import linear, pack_tensor


def pack_modules(model: Any, after_each: Callable[[], None]) -> None:
    """Pack weights of plain linear modules in place, where that is of use, one after the other.

    A weight that another module has too, as a head that is the embedding, stays there as it was.
    """
    for module in model.modules():
        if type(module) is not torch.nn.Linear:  # others, such as quantised ones, have products of their own
            continue
        packed = pack_tensor(module.weight.detach())
        if packed.is_mkldnn:
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
            module.forward = partial(linear, weight=module.weight, bias=module.bias)
        after_each()


def tied_head_weights(model: Any) -> int:
    """Elements of a head that is the embedding; 0 where it has weights of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return int(head.weight.numel()) if head is not None and head.weight is embedding.weight else 0
