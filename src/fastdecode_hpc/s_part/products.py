"""Products of rows and weights: on a CPU by oneDNN, with the weights in the order in which its kernels read them.

Notes
-----
torch multiplies fp32 on a CPU with MKL, which on processors of other makers takes 2 to 4 times as long as oneDNN, which
is in torch too; and rows that are few (a decode batch) gain most from weights that need no reordering at each call.
torch offers that combination to its own compiler alone, as an operator without a public name: where it isn't there,
or doesn't take the type on this processor, weights stay as they are and `torch.nn.functional.linear` multiplies.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.s_part.weight_tensors import Weights

ROWS_HINT = 32  # the order is the same for all numbers of rows, but oneDNN asks for one


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for a weight that may be packed.

    Parameters
    ----------
    x : Tensor
        ``[num_rows, in]``
    weight : Tensor
        ``[out, in]``, as `pack` gave it, or as it was loaded, which takes up to twice as long.
    bias : Tensor, optional
        ``[out]``
    """
    if weight.is_mkldnn or (weight.device.type == "cpu" and _can_pack(weight.dtype)):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """A weight as oneDNN reads it fastest, where this processor can use that; a copy of as many bytes."""
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def unpacked(weight: Tensor) -> Tensor:
    """The weight itself, ``[out, in]``."""
    return weight.to_dense() if weight.is_mkldnn else weight


def pack_weights(weights: Weights) -> None:
    """Pack all matrices in place, one after the other: one is in memory twice at a time.

    Of a head that is the embedding, whose rows are looked up, the packed one is a copy. Experts stay as they are.
    """
    for layer in weights.layers:
        for name in layer.matrices():
            setattr(layer, name, pack(getattr(layer, name)))
    weights.lm_head = pack(weights.lm_head)


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether a product with a packed weight of this type works here."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), ROWS_HINT)
        return bool((linear(torch.ones(2, 16, dtype=dtype), weight) == 16).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
