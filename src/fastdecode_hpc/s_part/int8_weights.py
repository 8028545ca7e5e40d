"""Matrices in 8 bits, for products with rows of floats; on a CPU.

Notes
-----
torch has such a product for its compiler's use, `_weight_int8pack_mm`: with one scale an output, in the rows' type, 1.3
times as long as this one for 32 rows in bf16 and 60 times in fp32. Here codes become floats once for all rows of a
batch, so a product takes about as long as in float32 where there are many rows, and where there are few, as long as
reading a quarter of the bytes does. A row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.s_part import row_kernels

PANEL, GROUP = row_kernels.INT8_PANEL, row_kernels.INT8_GROUP
_LARGEST = 127


class Int8Weight:
    """A matrix ``[out, in]`` whose values are a code of 8 bits times a scale of their group.

    A group is 128 inputs of one output, the last one perhaps fewer; its largest magnitude has the code 127. A group
    with an infinite value, or with one that is no number, has no numbers.

    Parameters
    ----------
    weight : Tensor
        ``[out, in]`` of floats, on a CPU.
    """

    __slots__ = ("codes", "num_in", "num_out", "scales")

    def __init__(self, weight: Tensor) -> None:
        self.num_out, self.num_in = weight.shape
        num_panels = -(-self.num_out // PANEL)
        self.codes = torch.empty(self.num_in * num_panels * PANEL, dtype=torch.int8)  # as kernels.h has them
        self.scales = torch.empty(-(-self.num_in // GROUP), num_panels * PANEL)
        for scales, (inputs, codes) in zip(self.scales, self._groups(), strict=True):
            values = F.pad(weight[:, inputs].float(), (0, 0, 0, num_panels * PANEL - self.num_out))
            torch.div(values.abs().amax(dim=1), _LARGEST, out=scales)
            values = (values / scales[:, None]).nan_to_num_(0.0, 0.0, 0.0).round_()  # 0 / 0 is 0 here
            codes.copy_(values.unflatten(0, (num_panels, PANEL)).transpose(1, 2))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.num_out, self.num_in

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return int(self.codes.nbytes + self.scales.nbytes)

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
        out = row_kernels.multiply_int8(rows if rows.stride(1) == 1 else rows.contiguous(), self.codes, self.scales)
        out = out[:, : self.num_out].contiguous()
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        """Some rows of the matrix, by ``[n]`` int64 numbers: ``[n, in]`` float32, exactly what products take."""
        panels, lanes = numbers // PANEL, numbers % PANEL
        parts = (
            codes[panels, :, lanes] * scales[numbers, None]
            for scales, (_, codes) in zip(self.scales, self._groups(), strict=True)
        )
        return torch.cat(list(parts), dim=1)

    def dequantised(self) -> Tensor:
        """The whole matrix, ``[out, in]`` float32."""
        return self.rows(torch.arange(self.num_out))

    def _groups(self) -> Iterator[tuple[slice, Tensor]]:
        """Inputs of each group, and their codes ``[panels, inputs, 32]``."""
        padded = self.scales.shape[1]
        for first in range(0, self.num_in, GROUP):
            count = min(GROUP, self.num_in - first)
            codes = self.codes[first * padded : (first + count) * padded]
            yield slice(first, first + count), codes.view(-1, count, PANEL)
