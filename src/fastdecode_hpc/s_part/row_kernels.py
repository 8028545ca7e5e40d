"""Native kernels for what a layer does to its rows; for tensors of a CPU.

Notes
-----
Each takes the place of several calls of torch, which cost more than what they compute. A row's bits depend on that row
alone, not on its place, the number of threads or the instruction set. Callers ask `take` first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc import _kernels
from fastdecode_hpc.isa import choose_isa

DTYPES = {
    torch.float32: _kernels.DTYPES["fp32"],
    torch.float16: _kernels.DTYPES["fp16"],
    torch.bfloat16: _kernels.DTYPES["bf16"],
}
"""What the kernels take, by the names they have there."""

PRODUCT_DTYPES = (torch.float32, torch.bfloat16)
"""Of the floats that `multiply` takes."""

PANEL, INT8_GROUP, INT8_SCALED = _kernels.PANEL, _kernels.INT8_GROUP, _kernels.INT8_SCALED
"""Of a matrix: outputs of a panel; in 8 bits, inputs of a group, inputs that share a scale."""


def take(x: Tensor, *num_dims: int) -> bool:
    """Whether a kernel for this many dimensions can work on `x`; the last one's values must lie next to each other."""
    return x.is_cpu and x.dtype in DTYPES and x.dim() in num_dims and x.stride(-1) == 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm`.

    Parameters
    ----------
    x : Tensor
        ``[num_rows, size]`` or ``[num_rows, num_heads, size]``; may be a view.
    weight : Tensor
        ``[size]``, in the type of `x`.

    Returns
    -------
    Tensor
        Contiguous, in shape and type of `x`.
    """
    size = x.shape[-1]
    assert size > 0 and weight.is_cpu and weight.dtype == x.dtype
    assert weight.shape == (size,) and weight.is_contiguous(), (weight.shape, weight.stride())
    out, item = torch.empty(x.shape, dtype=x.dtype), x.element_size()
    inner = x.shape[1] if x.dim() == 3 else 1
    choose_isa()
    _kernels.rms_norm(
        x.data_ptr(), x.shape[0] * inner, max(inner, 1), x.stride(0) * item, x.stride(-2) * item, weight.data_ptr(),
        out.data_ptr(), DTYPES[x.dtype], size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """`layers.gated` with `silu`: ``[num_rows, 2 * size]``, may be a view, to contiguous ``[num_rows, size]``."""
    num_rows, size = gate_up.shape[0], gate_up.shape[-1] // 2
    assert gate_up.shape[1] == 2 * size, gate_up.shape
    out = torch.empty(num_rows, size, dtype=gate_up.dtype)
    choose_isa()
    _kernels.swiglu(
        gate_up.data_ptr(), num_rows, gate_up.stride(0) * gate_up.element_size(), out.data_ptr(),
        DTYPES[gate_up.dtype], size, torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotate_(x: Tensor, rows: Tensor) -> None:
    """`layers.rotate_`: heads ``[num_rows, num_heads, head_dim]``, a view or not, by ``[num_rows, 2, pairs]``."""
    num_rows, num_heads, head_dim = x.shape
    pairs = rows.shape[-1]
    assert rows.is_cpu and rows.dtype == torch.float32 and 2 * pairs <= head_dim, (x.shape, rows.dtype, rows.shape)
    assert rows.shape == (num_rows, 2, pairs) and rows.is_contiguous(), (rows.shape, rows.stride())
    choose_isa()
    _kernels.rotate(
        x.data_ptr(), num_rows, x.stride(0) * x.element_size(), num_heads, x.stride(1), rows.data_ptr(), pairs,
        DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip


def to_wire(values: Tensor, target: Tensor, num_saturated: Tensor) -> None:
    """Convert rows into others of the same shape and another type.

    Parameters
    ----------
    values, target : Tensor
        ``[num_rows, size]``; may be views.
    num_saturated : Tensor
        ``[]`` int64; raised by the number of finite values beyond the target type's range, which become its largest.
    """
    assert values.shape == target.shape, (values.shape, target.shape)
    assert num_saturated.is_cpu and num_saturated.dtype == torch.int64
    choose_isa()
    _kernels.to_wire(
        values.data_ptr(), values.shape[0], values.stride(0) * values.element_size(), DTYPES[values.dtype],
        target.data_ptr(), target.stride(0) * target.element_size(), DTYPES[target.dtype], values.shape[1],
        num_saturated.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def pick(rows: Tensor) -> Tensor:
    """Place of the first of the largest values of each row, -1 where not all are finite.

    Parameters
    ----------
    rows : Tensor
        ``[num_rows, size]`` float32; may be a view.

    Returns
    -------
    Tensor
        ``[num_rows]`` int64
    """
    assert rows.is_cpu and rows.dtype == torch.float32 and rows.stride(1) == 1, (rows.device, rows.dtype, rows.stride())
    places = torch.empty(rows.shape[0], dtype=torch.int64)
    choose_isa()
    _kernels.pick(
        rows.data_ptr(), rows.shape[0], rows.stride(0) * rows.element_size(), rows.shape[1], places.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return places


def multiply(rows: Tensor, panels: Tensor, num_out: int, bias: Tensor | None) -> Tensor:
    """Products of rows with the outputs of a matrix of floats, summed in float32 and rounded once.

    Parameters
    ----------
    rows : Tensor
        ``[num_rows, in]`` in the type of `panels`.
    panels : Tensor
        float32 or bfloat16, in the order of kernels.h.
    num_out : int
    bias : Tensor, optional
        ``[out]``

    Returns
    -------
    Tensor
        ``[num_rows, out]`` in the type of `rows`.
    """
    (num_rows, num_in), dtype = rows.shape, rows.dtype
    pairs = 1 if dtype == torch.float32 else 2
    assert rows.is_cpu and dtype == panels.dtype and dtype in PRODUCT_DTYPES, (rows.device, dtype, panels.dtype)
    assert panels.shape == (-(-num_out // PANEL), -(-num_in // pairs), PANEL, pairs), (panels.shape, rows.shape)
    assert panels.is_contiguous() and (bias is None or bias.shape == (num_out,))
    choose_isa()
    out = torch.empty(num_rows, num_out, dtype=dtype)
    if num_in % pairs:
        rows = F.pad(rows, (0, 1))
    if pairs == 2 and not _kernels.has_pair_products():
        rows = rows.float()
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    added = None if bias is None else bias.float().contiguous()
    _kernels.multiply(
        rows.data_ptr(), num_rows, rows.stride(0), DTYPES[rows.dtype], rows.shape[1], panels.data_ptr(),
        DTYPES[panels.dtype], num_out, 0 if added is None else added.data_ptr(), out.data_ptr(), DTYPES[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def multiply_int8(rows: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Products of rows with the outputs of a matrix in 8 bits.

    Parameters
    ----------
    rows : Tensor
        ``[num_rows, in]`` float32; may be a view whose values of a row lie next to each other.
    codes : Tensor
        int8, in the order of kernels.h.
    scales, offsets : Tensor
        ``[in / INT8_SCALED, out]`` float32; `out` is a multiple of `PANEL`.

    Returns
    -------
    Tensor
        ``[num_rows, out]`` float32
    """
    (num_rows, num_in), num_out, threads = rows.shape, scales.shape[1], torch.get_num_threads()
    assert rows.is_cpu and rows.dtype == torch.float32 and rows.stride(1) == 1, (rows.dtype, rows.stride())
    assert codes.numel() == num_in * num_out and num_out % PANEL == 0, (codes.shape, rows.shape, scales.shape)
    assert scales.shape == offsets.shape == (-(-num_in // INT8_SCALED), num_out), (scales.shape, offsets.shape)
    assert all(x.is_contiguous() for x in (codes, scales, offsets))
    out, workspace = torch.empty(num_rows, num_out), torch.empty(threads, _kernels.PRODUCT_FLOATS)
    choose_isa()
    _kernels.multiply_int8(
        rows.data_ptr(), num_rows, rows.stride(0), num_in, codes.data_ptr(), scales.data_ptr(), offsets.data_ptr(),
        num_out // PANEL, out.data_ptr(), workspace.data_ptr(), threads,
    )  # fmt: skip
    return out
