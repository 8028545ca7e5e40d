"""The one seam between the S-worker and what its tensors lie on: copies, waits, clocks and recorded stages.

The S-worker runs the same code on every device. What differs is behind `Device`: on a CPU a buffer and its host twin
are one and everything is done when a call returns; on a GPU (`s_part.cuda`) copies run beside the computing and only
`fetch` makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.timing import Stopwatch
from fastdecode_hpc.transport.base import Rows

Ready = Callable[[], bool]  # whether a copy is complete; asked again and again, from any thread
Body = Callable[[], None]  # a piece of a stage: reads and writes buffers that stay where they are


@dataclass(frozen=True, slots=True)
class Twin:
    """A buffer on the device and the host memory that MPI sees in its place; on a CPU both are the same."""

    host: Tensor  # [num_rows, row_size]
    device: Tensor  # the same shape and type

    @property
    def rows(self) -> Rows:
        """The host memory as NumPy sees it."""
        return as_rows(self.host)


class Device(Protocol):
    """What the S-worker asks of the device that its tensors lie on.

    Everything is called from the S-worker's own thread, and what it enqueues runs in order, copies excepted.
    """

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of the S-Part lie."""

    def make_twin(self, num_rows: int, row_size: int, dtype: torch.dtype) -> Twin:
        """A pair of buffers of zeros for the whole run."""

    def to_host(self, twin: Twin, num_rows: int) -> Ready:
        """Start to copy the first rows of a twin to the host, after all that was enqueued before.

        Until that is ready nobody may read the host rows or write the device rows.
        """

    def to_device(self, twin: Twin, num_rows: int) -> None:
        """Start to copy the first host rows of a twin; what is enqueued later waits for them, the host does not.

        Until something that was enqueued later is known to be complete nobody may write the host rows.
        """

    def put(self, values: Tensor) -> Tensor:
        """A small host tensor on the device, for what is enqueued later; `values` may be dropped at once."""

    def download(self, values: Tensor) -> tuple[Tensor, Ready]:
        """Start to copy a tensor to host memory of its own, and when it is there; `values` may be dropped at once."""

    def fetch(self, values: Tensor, poke: Callable[[], None]) -> Tensor:
        """Wait for a small tensor on the host, poking meanwhile: the host's only wait for the device."""

    def stopwatch(self) -> Stopwatch:
        """Measures what the device spends on blocks of work."""

    def padded(self, num_rows: int) -> int:
        """Rows that a step of `num_rows` is run with: recorded stages are there for few row counts."""

    def record(self, parts: Sequence[Body], num_rows: int) -> Sequence[Body]:
        """What to call in place of the `parts` of a stage, in order; the host may do other things in between."""


class CpuDevice:
    """The host itself: twins are one buffer, nothing is under way when a call returns, nothing is recorded."""

    torch_device = torch.device("cpu")

    def make_twin(self, num_rows: int, row_size: int, dtype: torch.dtype) -> Twin:
        buffer = torch.zeros(num_rows, row_size, dtype=dtype)
        return Twin(buffer, buffer)

    def to_host(self, twin: Twin, num_rows: int) -> Ready:
        return _always

    def to_device(self, twin: Twin, num_rows: int) -> None:
        pass

    def put(self, values: Tensor) -> Tensor:
        return values

    def download(self, values: Tensor) -> tuple[Tensor, Ready]:
        return values, _always

    def fetch(self, values: Tensor, poke: Callable[[], None]) -> Tensor:
        return values

    def stopwatch(self) -> Stopwatch:
        return Stopwatch()

    def padded(self, num_rows: int) -> int:
        return num_rows

    def record(self, parts: Sequence[Body], num_rows: int) -> Sequence[Body]:
        return parts


def make_device(torch_device: torch.device, *, cuda_graphs: str) -> Device:
    """The seam of one run; `cuda_graphs` is the option of that name."""
    if torch_device.type == "cpu":
        return CpuDevice()
    from fastdecode_hpc.s_part.cuda import CudaDevice

    return CudaDevice(torch_device, use_graphs=cuda_graphs != "off")


def as_rows(tensor: Tensor) -> Rows:
    """A host tensor as NumPy, and so MPI, sees it: bf16 as uint16. It keeps the tensor's memory alive."""
    plain = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    rows: Rows = np.asarray(plain.numpy())
    return rows


def _always() -> bool:
    return True
