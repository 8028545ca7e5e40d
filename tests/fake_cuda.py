"""Stands in for torch.cuda on a CPU: runs everything at once, and finds accesses to memory that nothing orders.

Every stream, and the host, has a vector clock (Lamport, Fidge and Mattern): what it knows to have happened. A stream
learns by waiting for another, the host by an event that it was told is complete, and work that the host enqueues knows
what the host knows. Two accesses to one buffer, one of them writing, must know of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emulated_device import Recording, as_tuple

POLLS = 2  # until an event is told to be complete


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.clock: Counter[str] = Counter()

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock  # the larger count of each

    def record_event(self) -> Event:
        return Event(self.cuda, self)


class Event:
    def __init__(self, cuda: FakeCuda, stream: Stream | None = None) -> None:
        self.cuda, self._polls = cuda, 0
        if stream is not None:
            self.record(stream)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current
        stream.clock |= self.cuda.host.clock
        self.clock = stream.clock.copy()

    def query(self) -> bool:
        assert self.cuda.graph is None, "asked for an event while a graph is being recorded"
        self._polls += 1
        if self._polls > POLLS:
            self.cuda.host.clock |= self.clock
        return self.clock <= self.cuda.host.clock

    def elapsed_time(self, stop: Event) -> float:
        assert self.clock <= stop.clock <= self.cuda.host.clock, "these events have not come to pass"
        return 1.0  # ms


class Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self._recording, self._is_fresh = cuda, Recording(), True

    def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        assert self.cuda.current not in (self.cuda.compute, self.cuda.host)
        self.cuda.graph = self
        self._recording.__enter__()

    def capture_end(self) -> None:
        self._recording.__exit__(None, None, None)
        self.cuda.graph = None

    def replay(self) -> None:
        assert self.cuda.current is self.cuda.compute
        self.cuda.num_replays += 1
        if self._is_fresh:  # recording did the work here; a GPU does it at the first replay
            for func, args, kwargs, out in self._recording.calls:
                self.cuda.note(func, args, kwargs, out)
        else:
            self._recording.replay()
        self._is_fresh = False


class FakeCuda(TorchDispatchMode):
    """Put in torch.cuda's place by `install`; entered around what is checked.

    Attributes
    ----------
    num_accesses : Counter
        Accesses to watched memory by the name of the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host, self.compute = Stream(self, "host"), Stream(self, "compute")
        self.current = self.compute
        self.graph: Graph | None = None
        self.num_replays = 0
        self.num_accesses: Counter[str] = Counter()
        self._pinned: set[int] = set()
        self._keep: list[Tensor] = []  # so that no address comes twice
        self._written: dict[int, tuple[str, int]] = {}  # address |-> stream and its count at the last write
        self._read: dict[int, list[tuple[str, int]]] = {}  # since then

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what `s_part.cuda` uses of torch.cuda."""
        streams = iter(range(100))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, f"stream {next(streams)}"))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._use)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda values, stream: self.watch(values))
        monkeypatch.setattr("fastdecode_hpc.s_part.cuda._pinned", self._make_pinned)
        # A GPU has none of them, and what they read and write by address could not be seen here.
        monkeypatch.setattr("fastdecode_hpc.s_part.row_kernels.take", lambda x, *num_dims: False)
        monkeypatch.setattr("fastdecode_hpc.s_part.products.pays", lambda dtype: False)

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _make_pinned(self, shape, dtype: torch.dtype) -> Tensor:
        assert self.graph is None, "pinned memory was asked for while a graph is being recorded"
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self._keep.append(tensor)
        self._pinned.add(tensor.data_ptr())
        self._read[tensor.data_ptr()] = []
        return tensor

    def watch(self, values: Tensor) -> None:
        """Check this device memory too, which the current stream has written."""
        self._keep.append(values)
        self._read[address(values)] = []
        self.access(self.current, address(values), is_write=True)

    def access(self, stream: Stream, place: int, *, is_write: bool) -> None:
        """The next thing that happens on a stream reads or writes memory; fails if nothing orders that."""
        if place not in self._read:
            return
        stream.clock |= self.host.clock
        stream.clock[stream.name] += 1
        self.num_accesses[stream.name] += 1
        stamp = stream.name, stream.clock[stream.name]
        others = [self._written[place]] if place in self._written else []
        for name, count in others + (self._read[place] if is_write else []):
            assert stream.clock[name] >= count, f"race: {stream.name} {'writes' if is_write else 'reads'} after {name}"
        if is_write:
            self._written[place], self._read[place] = stamp, []
        else:
            self._read[place].append(stamp)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.graph is None:
            self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func, args, kwargs, out) -> None:
        """What an operation read and wrote, on the stream that it ran on."""
        specs = func._schema.arguments
        tensors = [(arg, spec) for arg, spec in zip(args, specs, strict=False) if isinstance(arg, Tensor)]
        writes = {address(arg) for arg, spec in tensors if spec.alias_info and spec.alias_info.is_write}
        reads = {address(arg) for arg, spec in tensors} - writes
        results = {address(item) for item in as_tuple(out) if isinstance(item, Tensor)}
        if not writes and reads & results:
            return  # a view
        stream = self.host if writes & self._pinned and not self._is_copy_of_the_device(func, args) else self.current
        for places, is_write in ((reads, False), (writes, True)):
            for place in places:
                self.access(stream, place, is_write=is_write)

    @staticmethod
    def _is_copy_of_the_device(func, args) -> bool:
        return func.__name__.startswith("copy_") and len(args) > 2 and args[2]  # non_blocking


def address(tensor: Tensor) -> int:
    """Of its memory; packed weights, which are only read, have none to show."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
