"""Rounding to the wire type, with saturation, into buffers that NumPy and MPI see as plain memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fastdecode_hpc.transport.base import WIRE_NUMPY, Rows

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def always_ready() -> bool:
    """A CPU copy is done when it returns."""
    return True


class WireCast:
    """Converts S-Part rows to the wire type and back, counting what saturates.

    Parameters
    ----------
    wire_dtype : str
    device : torch.device
        With a GPU the buffers are pinned and copies run on its stream; `ready` callables tell when.
    """

    def __init__(self, wire_dtype: str, device: torch.device) -> None:
        self.dtype = TORCH_DTYPES[wire_dtype]
        self.numpy_dtype = WIRE_NUMPY[wire_dtype]
        self.device = device
        self._max = torch.finfo(self.dtype).max
        self._saturated = torch.zeros((), dtype=torch.int64, device=device)
        self._tensors: dict[int, torch.Tensor] = {}

    @property
    def num_saturated(self) -> int:
        """Finite values so far that lay outside the wire type's range."""
        return int(self._saturated)

    def make_rows(self, num_rows: int, row_size: int) -> Rows:
        """A buffer for the whole run, as NumPy sees it; `fill` and `read` find its tensor again."""
        tensor = torch.zeros(num_rows, row_size, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        rows = _as_numpy(tensor)
        self._tensors[rows.ctypes.data] = tensor
        return rows

    def fill(self, rows: Rows, values: torch.Tensor) -> Callable[[], bool]:
        """Round `values` into the first rows of a buffer of `make_rows`; the result says when they are there."""
        target = self._tensors[rows.ctypes.data][: len(values)]
        target.copy_(self._round(values), non_blocking=True)
        if self.device.type != "cuda":
            return always_ready
        event = torch.cuda.Event()
        event.record()
        return lambda: bool(event.query())

    def read(self, rows: Rows) -> torch.Tensor:
        """The rows as a tensor on the S-Part's device."""
        return self._tensors[rows.ctypes.data][: len(rows)].to(self.device, non_blocking=True)

    def to_rows(self, values: torch.Tensor) -> Rows:
        """Round `values`, which the caller gives away, into rows that are filled when this returns."""
        return _as_numpy(self._round(values).cpu().contiguous())

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        """Convert; finite values beyond the wire type's range become its largest, infinity and NaN stay."""
        if values.dtype == self.dtype or self._max >= torch.finfo(values.dtype).max:
            return values.to(self.dtype)
        if values.dtype == torch.bfloat16:
            values = values.float()  # bf16 can't hold fp16's largest value: it would compare and clamp to 65536
        too_large = (values.abs() > self._max) & values.isfinite()
        self._saturated += too_large.sum()
        return torch.where(too_large, values.clamp(-self._max, self._max), values).to(self.dtype)


def _as_numpy(tensor: torch.Tensor) -> Rows:
    plain = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    rows: Rows = np.asarray(plain.numpy())
    return rows
