"""Products of rows and weights: on a CPU with the weights in the order in which they are read.

Notes
-----
By our own kernel where that is fastest (`panel_weights`), else by oneDNN, which is in torch too: torch itself
multiplies fp32 on a CPU with MKL, which on processors of other makers takes 2 to 4 times as long; and rows that are few
(a decode batch) gain most from weights that need no reordering at each call. torch offers that combination to its own
compiler alone, as an operator without a public name: where it isn't there, or doesn't take the type on this processor,
weights stay as they are and `torch.nn.functional.linear` multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.s_part.int8_weights import Int8Weight
from fastdecode_hpc.s_part.panel_weights import PanelWeight, pays
from fastdecode_hpc.s_part.weight_tensors import LayerWeights, Matrix, Weights

ROWS_HINT = 32  # the order is the same for all numbers of rows, but oneDNN asks for one


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for a weight that may be packed.

    Parameters
    ----------
    x : Tensor
        ``[num_rows, in]``
    weight : Matrix
        ``[out, in]``, as `pack` gave it, or as it was loaded, which takes up to twice as long.
    bias : Tensor, optional
        ``[out]``
    """
    if not isinstance(weight, Tensor):
        return weight.multiply(x, bias)
    if weight.is_mkldnn or (weight.device.type == "cpu" and _can_pack(weight.dtype)):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def pack(weight: Tensor) -> Matrix:
    """A weight in the order in which products are fastest here; a copy of about as many bytes."""
    return PanelWeight(weight) if weight.device.type == "cpu" and pays(weight.dtype) else pack_tensor(weight)


def pack_tensor(weight: Tensor) -> Tensor:
    """A weight that stays a tensor, as oneDNN reads it fastest, where this processor can use that."""
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def look_up(numbers: Tensor, weight: Matrix) -> Tensor:
    """Rows of a matrix by ``[num_rows]`` int64 numbers."""
    return weight.rows(numbers) if isinstance(weight, Int8Weight) else F.embedding(numbers, weight)


def unpacked(weight: Matrix) -> Tensor:
    """The weight itself, ``[out, in]``."""
    if not isinstance(weight, Tensor):
        return weight.unpacked()
    return weight.to_dense() if weight.is_mkldnn else weight


def are_row_wise(part: Weights | LayerWeights) -> bool:
    """Whether products with the head, or with all matrices of a layer, give a row the same bits beside any others."""
    if isinstance(part, Weights):
        return part.project_out is None and not isinstance(part.lm_head, Tensor)
    values = (getattr(part, name) for name in part.matrices())
    return all(
        not isinstance(one, Tensor) for value in values for one in (value if isinstance(value, list) else [value])
    )


def pack_part(part: Weights | LayerWeights, weight_dtype: str = "auto") -> None:
    """Pack matrices in place: the head, or those of a layer, where experts are packed one by one.

    A router stays in floats. A head that is the embedding, whose rows are looked up, is a copy if it is in floats.

    Parameters
    ----------
    part : Weights or LayerWeights
        As `load_weights` gives them to its `finish`.
    weight_dtype : str
        ``auto``: they keep their type; ``int8``.
    """
    pack_one = _PACKERS[weight_dtype]
    if isinstance(part, Weights):
        is_tied, part.lm_head = part.lm_head is part.embedding, pack_one(part.lm_head)
        if is_tied and isinstance(part.lm_head, Int8Weight):
            part.embedding = part.lm_head
        return
    for name in part.matrices():
        value, into = getattr(part, name), pack if name == "router" else pack_one
        setattr(part, name, into(value) if value.ndim == 2 else [into(expert) for expert in value])


_PACKERS: dict[str, Callable[[Tensor], Matrix]] = {"auto": pack, "int8": Int8Weight}


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether a product with a packed weight of this type works here."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), ROWS_HINT)
        return bool((linear(torch.ones(2, 16, dtype=dtype), weight) == 16).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
