"""Rounding to the wire type, with saturation."""

from __future__ import annotations

import torch
from torch import Tensor

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
    look_first : bool
        Look whether all values are within the wire type's range before doing anything about those that are not: most
        of the work is saved then. Not for devices that the host would have to wait for.
    """

    def __init__(self, wire_dtype: str, device: torch.device, *, look_first: bool = False) -> None:
        self.dtype = TORCH_DTYPES[wire_dtype]
        self._look_first = look_first
        self._max = torch.finfo(self.dtype).max
        self._saturated = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def num_saturated(self) -> int:
        """Finite values so far that lay outside the wire type's range; waits for the device."""
        return int(self._saturated)

    def round(self, values: Tensor) -> Tensor:
        """Convert; finite values beyond the wire type's range become its largest, infinity and NaN stay."""
        if values.dtype == self.dtype or self._max >= torch.finfo(values.dtype).max:
            return values.to(self.dtype)
        if self._look_first and self._holds(values):
            return values.to(self.dtype)
        if values.dtype == torch.bfloat16:
            values = values.float()  # bf16 can't hold fp16's largest value: it would compare and clamp to 65536
        too_large = (values.abs() > self._max) & values.isfinite()
        self._saturated += too_large.sum()
        return torch.where(too_large, values.clamp(-self._max, self._max), values).to(self.dtype)

    def _holds(self, values: Tensor) -> bool:
        """Whether all values are numbers within the wire type's range."""
        if not values.numel():
            return True
        low, high = (end.item() for end in values.aminmax())  # both are NaN where any value is
        return bool(-self._max <= low and high <= self._max)
