"""Rounding to the wire type, with saturation."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdecode_hpc.s_part import row_kernels

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that options have for a type of `TORCH_DTYPES`."""
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


class WireCast:
    """Converts S-Part rows to the wire type, counting what saturates.

    Parameters
    ----------
    wire_dtype : str
    device : torch.device
        Where the rows lie.
    """

    def __init__(self, wire_dtype: str, device: torch.device) -> None:
        self.dtype = TORCH_DTYPES[wire_dtype]
        self._max = torch.finfo(self.dtype).max
        self._saturated = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def num_saturated(self) -> int:
        """Finite values so far that lay outside the wire type's range; waits for the device."""
        return int(self._saturated)

    def round(self, values: Tensor) -> Tensor:
        """Convert; finite values beyond the wire type's range become its largest, infinity and NaN stay.

        Parameters
        ----------
        values : Tensor
            ``[num_rows, size]``
        """
        if values.dtype == self.dtype:
            return values
        target = torch.empty(values.shape, dtype=self.dtype, device=values.device)
        self.round_into(values, target)
        return target

    def round_into(self, values: Tensor, target: Tensor) -> None:
        """`round` into rows of the wire type."""
        if row_kernels.take(values, 2) and row_kernels.take(target, 2):
            row_kernels.to_wire(values, target, self._saturated)
        else:
            target.copy_(self._saturate(values))

    def _saturate(self, values: Tensor) -> Tensor:
        """Values that the wire type can hold; no look at them makes the host wait for a device."""
        if self._max >= torch.finfo(values.dtype).max:
            return values
        if values.dtype == torch.bfloat16:
            values = values.float()  # bf16 can't hold fp16's largest value: it would compare and clamp to 65536
        too_large = (values.abs() > self._max) & values.isfinite()
        self._saturated += too_large.sum()
        return torch.where(too_large, values.clamp(-self._max, self._max), values)
