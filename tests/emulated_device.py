"""A CPU that behaves like a GPU with copy streams and CUDA graphs, and raises where the S-worker is too early.

Copies are complete after some polls; until then host memory holds poison. Whoever writes a buffer that a copy still
reads, or starts a copy into memory under way, fails an assertion. Recorded stages repeat the very operations on the
very memory that they were recorded with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastdecode_hpc import _kernels
from fastdecode_hpc.s_part import row_kernels
from fastdecode_hpc.s_part.device import Body, Ready, Twin
from fastdecode_hpc.s_part.graphs import Recorder, padded_rows
from fastdecode_hpc.timing import Stopwatch

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


def poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 62))


@dataclass
class Incoming:
    """A copy to the device: complete at the latest when something enqueued after it is."""

    host: Tensor
    at_start: Tensor

    def check(self) -> None:
        assert torch.equal(bits(self.host), self.at_start), "host rows were overwritten while being copied"


@dataclass
class Outgoing:
    """A copy to the host."""

    host: Tensor
    values: Tensor
    at_start: Tensor
    polls_left: int
    before: list[Incoming] = field(default_factory=list)

    def complete(self) -> None:
        for incoming in self.before:
            incoming.check()
        assert torch.equal(bits(self.values), self.at_start), (
            "device rows were overwritten while they were being copied"
        )
        assert torch.equal(bits(self.host), self.poisoned), (
            "host rows were written while a copy into them was under way"
        )
        self.host.copy_(self.values)

    def start(self) -> None:
        poison(self.host)
        self.poisoned = bits(self.host)


class EmulatedDevice:
    """`s_part.device.Device`.

    Parameters
    ----------
    polls : int
        How often a copy is asked for until it is complete.
    use_graphs : bool
    """

    torch_device = torch.device("cpu")

    def __init__(self, polls: int = 3, *, use_graphs: bool = True) -> None:
        self.polls, self.use_graphs = polls, use_graphs
        self.num_copies = self.num_fetches = self.num_recorded = self.num_replays = 0
        self._recorder = Recorder(self._capture)
        self._incoming: list[Incoming] = []
        self._outgoing: list[Outgoing] = []  # complete in this order, as on one stream
        self._lock = threading.Lock()  # a progress thread polls too

    def make_twin(self, num_rows: int, row_size: int, dtype: torch.dtype) -> Twin:
        return Twin(torch.zeros(num_rows, row_size, dtype=dtype), torch.zeros(num_rows, row_size, dtype=dtype))

    def to_host(self, twin: Twin, num_rows: int) -> Ready:
        return self._send(twin.host[:num_rows], twin.device[:num_rows])

    def to_device(self, twin: Twin, num_rows: int) -> None:
        twin.device[:num_rows] = twin.host[:num_rows]
        self._incoming.append(Incoming(twin.host[:num_rows], bits(twin.host[:num_rows])))

    def put(self, values: Tensor) -> Tensor:
        return values.clone()

    def download(self, values: Tensor) -> tuple[Tensor, Ready]:
        host = torch.empty_like(values)
        return host, self._send(host, values)

    def fetch(self, values: Tensor, poke: Callable[[], None]) -> Tensor:
        before, self._incoming = self._incoming, []
        for _ in range(self.polls):
            poke()
        for incoming in before:
            incoming.check()
        self.num_fetches += 1
        return values.clone()

    def stopwatch(self) -> Stopwatch:
        return Stopwatch()

    def padded(self, num_rows: int) -> int:
        return padded_rows(num_rows) if self.use_graphs else num_rows

    def record(self, parts: Sequence[Body], num_rows: int) -> Sequence[Body]:
        return [self._recorder.stage(parts)] if self.use_graphs else parts

    def _send(self, host: Tensor, values: Tensor) -> Ready:
        with self._lock:
            first, last = host.data_ptr(), host.data_ptr() + host.nbytes
            for other in self._outgoing:
                apart = last <= other.host.data_ptr() or other.host.data_ptr() + other.host.nbytes <= first
                assert apart, "a copy was started into host rows that another is under way to"
            copy = Outgoing(host, values, bits(values), self.polls, self._incoming)
            self._incoming = []
            copy.start()
            self._outgoing.append(copy)
            self.num_copies += 1
        return lambda: self._poll(copy)

    def _poll(self, copy: Outgoing) -> bool:
        with self._lock:
            if any(copy is other for other in self._outgoing):
                head = self._outgoing[0]
                head.polls_left -= 1
                if head.polls_left <= 0:
                    head.complete()
                    self._outgoing.pop(0)
            return not any(copy is other for other in self._outgoing)

    def _capture(self, body: Body) -> Body:
        with Recording() as recording:
            body()
        self.num_recorded += 1
        fresh = True  # recording has done the work once; a GPU's hasn't

        def replay() -> None:
            nonlocal fresh
            if not fresh:
                recording.replay()
                self.num_replays += 1
            fresh = False

        return replay


class Recording(TorchDispatchMode):
    """All operations of a block with the memory that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __enter__(self):
        row_kernels._kernels = RecordedKernels(self.calls)
        return super().__enter__()

    def __exit__(self, *error) -> None:
        row_kernels._kernels = _kernels
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in SYNCHRONISING, f"a recorded stage must not look at values: {name}"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(as_tuple(out), as_tuple(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


class RecordedKernels:
    """Native kernels, which torch doesn't see."""

    DTYPES = _kernels.DTYPES

    def __init__(self, calls: list[tuple]) -> None:
        self._calls = calls

    def __getattr__(self, name: str):
        def call(*args) -> None:
            getattr(_kernels, name)(*args)
            self._calls.append((getattr(_kernels, name), args, {}, None))

        return call


def as_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
