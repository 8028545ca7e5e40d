"""Matrices in 8 bits, for products with rows of floats; on a CPU.

Notes
-----
torch has such a product for its compiler's use, `_weight_int8pack_mm`: with one scale an output, which costs more
perplexity, in the rows' type, and in fp32 tens of times slower than this one. Here codes become floats once for all
rows of a batch, so with many rows a product takes about as long as in fp32, and less with few. A row's bits depend on
that row alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.s_part import row_kernels

PANEL, GROUP, SCALED = row_kernels.PANEL, row_kernels.INT8_GROUP, row_kernels.INT8_SCALED
BLOCK_OUT = 128 * PANEL  # outputs whose values are quantised at once: what is made on the way is several times as large
BLOCK_VALUES = 1 << 18  # dequantised at once


class Int8Weight:
    """A matrix ``[out, in]`` in codes of 8 bits; 32 inputs of an output share a scale and an offset.

    A value is offset + scale * code. Where 32 values are multiples of one number or lie on 16 levels, as files of types
    Q8_0 and Q4_1 have them, they stay but for a float's rounding. Those beside an infinite one become no numbers.

    Parameters
    ----------
    weight : Tensor
        ``[out, in]`` of floats, on a CPU.
    """

    __slots__ = ("codes", "num_in", "num_out", "offsets", "scales")

    def __init__(self, weight: Tensor) -> None:
        self.num_out, self.num_in = weight.shape
        padded = -(-self.num_out // PANEL) * PANEL
        self.codes = torch.empty(self.num_in * padded, dtype=torch.int8)  # as kernels.h has them
        self.scales, self.offsets = torch.empty(2, -(-self.num_in // SCALED), padded)
        for inputs, target in self._groups():
            for first in range(0, padded, BLOCK_OUT):
                self._put(weight[first : first + BLOCK_OUT, inputs].float(), first, inputs, target)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.num_out, self.num_in

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and offsets."""
        return int(self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``, summed in float32 and rounded to the type of `x` once.

        Parameters
        ----------
        x : Tensor
            ``[num_rows, in]``
        bias : Tensor, optional
            ``[out]``
        """
        rows = x.float()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = row_kernels.multiply_int8(rows, self.codes, self.scales, self.offsets)
        out = out[:, : self.num_out].contiguous()
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        """Some rows of the matrix, by ``[n]`` int64 numbers: ``[n, in]`` float32, exactly what products take."""
        panels, lanes = numbers // PANEL, numbers % PANEL
        codes = torch.cat([group[panels, :, lanes] for _, group in self._groups()], dim=1)
        scales, offsets = (
            x[:, numbers].T.repeat_interleave(SCALED, dim=1)[:, : self.num_in] for x in (self.scales, self.offsets)
        )
        return codes * scales + offsets

    def unpacked(self) -> Tensor:
        """The whole matrix, ``[out, in]`` float32."""
        out = torch.empty(self.num_out, self.num_in)
        for numbers in torch.arange(self.num_out).split(max(1, BLOCK_VALUES // self.num_in)):
            out[numbers[0] : numbers[-1] + 1] = self.rows(numbers)
        return out

    def _put(self, values: Tensor, first: int, inputs: slice, target: Tensor) -> None:
        """Quantise some outputs' values of a group of inputs, ``[n, inputs]``; `first` is a multiple of `PANEL`."""
        num_out, count = values.shape
        values = F.pad(values, (0, -count % SCALED, 0, -num_out % PANEL)).unflatten(1, (-1, SCALED))
        codes, scales, offsets = _quantise(values)
        panels = codes.flatten(1)[:, :count].unflatten(0, (-1, PANEL)).transpose(1, 2)
        target[first // PANEL : first // PANEL + len(panels)].copy_(panels)
        places = slice(inputs.start // SCALED, inputs.start // SCALED + values.shape[1])
        outputs = slice(first, first + len(values))
        self.scales[places, outputs], self.offsets[places, outputs] = scales.T, offsets.T

    def _groups(self) -> Iterator[tuple[slice, Tensor]]:
        """Inputs of each group, and their codes ``[panels, inputs, 32]``."""
        padded = self.scales.shape[1]
        for first in range(0, self.num_in, GROUP):
            stop = min(first + GROUP, self.num_in)
            yield slice(first, stop), self.codes[first * padded : stop * padded].view(-1, stop - first, PANEL)


def _quantise(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, n, 32]``, scales and offsets ``[out, n]`` of values ``[out, n, 32]``.

    Codes are spread over what the values span, or, where that comes nearer to them, evenly about 0.
    """
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    scales, even_scales = (high - low) / 255, torch.maximum(high, -low) / 127
    offsets, no_offsets = low + 128 * scales, torch.zeros_like(low)
    codes, errors = _codes(values, scales, offsets)
    even_codes, even_errors = _codes(values, even_scales, no_offsets)
    spans = errors < even_errors
    return (
        torch.where(spans[..., None], codes, even_codes),
        torch.where(spans, scales, even_scales),
        torch.where(spans, offsets, no_offsets),
    )


def _codes(values: Tensor, scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, as floats, and the sum of squares of what they are off by."""
    scales, offsets = scales[..., None], offsets[..., None]
    codes = ((values - offsets) / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-128, 127)  # 0 / 0 is 0 here
    return codes, (codes * scales + offsets - values).square_().sum(dim=-1)
