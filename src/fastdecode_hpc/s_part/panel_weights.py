"""Matrices of floats in the order in which our own kernel multiplies them with rows; on a CPU.

Notes
-----
A decode batch has few rows, for which torch's libraries leave much of memory's speed unused: oneDNN takes 1.1 to 2.3
times as long as this kernel up to 64 rows and about as long from 128 on, in bf16 without a processor's own instructions
for it 4 to 5 times. A row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.isa import active_isa
from fastdecode_hpc.s_part import row_kernels

FAST_ISAS = ("avx2", "avx512", "avx512bf16")
"""Instruction sets with which products were measured to be fast."""


def pays(dtype: torch.dtype) -> bool:
    """Whether products with such weights are faster with this kernel than with torch's libraries."""
    if dtype not in row_kernels.PRODUCT_DTYPES or active_isa() not in FAST_ISAS:
        return False
    return dtype == torch.float32 or not _has_tiles()


class PanelWeight:
    """A matrix ``[out, in]`` in panels of outputs: a copy that takes as many bytes but for what fills the last panel.

    Parameters
    ----------
    weight : Tensor
        ``[out, in]`` float32 or bfloat16, on a CPU.

    Attributes
    ----------
    panels : Tensor
        ``[panels, in / n, 32, n]``, n being 1 for float32 and 2 for bfloat16.
    """

    __slots__ = ("num_in", "num_out", "panels")

    def __init__(self, weight: Tensor) -> None:
        self.num_out, self.num_in = weight.shape
        pairs, panel = 1 if weight.dtype == torch.float32 else 2, row_kernels.PANEL
        self.panels = weight.new_empty(-(-self.num_out // panel), -(-self.num_in // pairs), panel, pairs)
        full = self.num_out // panel  # apart from the last one, so that not all is copied to fill that one up
        _put(weight[: full * panel], self.panels[:full])
        _put(weight[full * panel :], self.panels[full:])

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.num_out, self.num_in

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        """Memory of the panels."""
        return int(self.panels.nbytes)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``, summed in float32 and rounded to the type of `x` once.

        Parameters
        ----------
        x : Tensor
            ``[num_rows, in]``, in the type of the weight.
        bias : Tensor, optional
            ``[out]``
        """
        return row_kernels.multiply(x, self.panels, self.num_out, bias)

    def unpacked(self) -> Tensor:
        """The whole matrix as it was."""
        return self.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self.num_out, : self.num_in]


def _put(weight: Tensor, panels: Tensor) -> None:
    """Copy outputs to their panels, with zeros where these are larger."""
    target = panels.transpose(1, 2)
    num_panels, panel, steps, pairs = target.shape
    more = (0, steps * pairs - weight.shape[1], 0, num_panels * panel - weight.shape[0])
    target.copy_((F.pad(weight, more) if any(more) else weight).view(target.shape))


def _has_tiles() -> bool:
    """Whether this processor multiplies whole tiles of bf16 (AMX), which oneDNN uses and our kernel does not."""
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)  # no public name
    return known is not None and bool(known())
