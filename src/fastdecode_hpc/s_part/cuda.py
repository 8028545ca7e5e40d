"""The S-worker's device seam on an NVIDIA GPU: pinned host memory, copy streams, events, CUDA graphs.

Notes
-----
Work is enqueued on the current stream; copies of twins and prompt K/V have a stream of their own in each direction, so
that they run beside the other slot's stages. That no buffer is overwritten too early follows from the order in
which a slot's messages go round, with no further waits:

- Host q, k, v are written by `to_host` of the next stage, which comes after the slot's output arrived, and the
  transport gives that out only when the scatter that read the buffer is complete.
- Device q, k, v are written by the next stage; the output it needs came back for rows that had left this buffer.
- Host output is written by the next gather, which is posted when the next q, k, v are ready; they were computed after
  the copy of the output to the device.
- Device output is written by the next `to_device`; q, k, v of the stage that read it had to be ready for that. The last
  layer's reader is followed by sampling, for which the host waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fastdecode_hpc.s_part.device import Body, Ready, Twin
from fastdecode_hpc.s_part.graphs import MAX_ROWS, Recorder, padded_rows
from fastdecode_hpc.timing import Stopwatch


class CudaDevice:
    """A GPU (`s_part.device.Device`).

    Parameters
    ----------
    torch_device : torch.device
    use_graphs : bool
        Run stages as CUDA graphs from their second time on.
    """

    def __init__(self, torch_device: torch.device, *, use_graphs: bool) -> None:
        self.torch_device = torch_device
        self._to_host, self._to_device = torch.cuda.Stream(torch_device), torch.cuda.Stream(torch_device)
        self._recorder = Recorder(GraphCapture(torch_device)) if use_graphs else None

    def make_twin(self, num_rows: int, row_size: int, dtype: torch.dtype) -> Twin:
        host = _pinned((num_rows, row_size), dtype).zero_()
        return Twin(host, torch.zeros_like(host, device=self.torch_device))

    def to_host(self, twin: Twin, num_rows: int) -> Ready:
        return self._copy_out(twin.host[:num_rows], twin.device[:num_rows])

    def to_device(self, twin: Twin, num_rows: int) -> None:
        with torch.cuda.stream(self._to_device):
            twin.device[:num_rows].copy_(twin.host[:num_rows], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._to_device)

    def put(self, values: Tensor) -> Tensor:
        return _pinned(values.shape, values.dtype).copy_(values).to(self.torch_device, non_blocking=True)

    def download(self, values: Tensor) -> tuple[Tensor, Ready]:
        host = _pinned(values.shape, values.dtype)
        values.record_stream(self._to_host)  # its memory is not given on before this stream has read it
        return host, self._copy_out(host, values)

    def fetch(self, values: Tensor, poke: Callable[[], None]) -> Tensor:
        # Not on the copy stream: there it would stand behind the rows of the other slot.
        host = _pinned(values.shape, values.dtype).copy_(values, non_blocking=True)
        done = torch.cuda.current_stream().record_event()
        while not done.query():
            poke()
        return host

    def stopwatch(self) -> Stopwatch:
        return EventStopwatch()

    def padded(self, num_rows: int) -> int:
        return padded_rows(num_rows) if self._recorder is not None and self._recorder.works else num_rows

    def record(self, parts: Sequence[Body], num_rows: int) -> Sequence[Body]:
        return parts if self._recorder is None or num_rows > MAX_ROWS else [self._recorder.stage(parts)]

    def _copy_out(self, host: Tensor, values: Tensor) -> Ready:
        self._to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._to_host):
            host.copy_(values, non_blocking=True)
        done: Ready = self._to_host.record_event().query
        return done


class GraphCapture:
    """Records bodies as CUDA graphs that share one pool of memory (`s_part.graphs.Capture`).

    All replays are on one stream and nothing of the pool is read after its replay, so graphs may share memory.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._stream = torch.cuda.Stream(torch_device)  # the default one can't be recorded
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Body) -> Body:
        # `torch.cuda.graph` would synchronise and empty the memory caches for each of some hundred stages.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # thread_local: a progress thread may ask for events meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        replay: Body = graph.replay
        return replay


class EventStopwatch(Stopwatch):
    """Time of the device between events around blocks of work, read when they have come to pass.

    What the device idles inside a block, because the host is slower to enqueue than it is to run, counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        try:
            yield
        finally:
            stop.record()
            self._blocks.append((start, stop))

    def discount(self, seconds: float) -> None:
        """The host's waits are none of the device's."""

    def take(self) -> float:
        """Seconds of the blocks that have ended since the last call; the others come with a later one."""
        while self._blocks and self._blocks[0][1].query():
            start, stop = self._blocks.popleft()
            self.total_s += start.elapsed_time(stop) * 1e-3
        return super().take()


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory that copies run into beside other work.

    torch caches these blocks and gives one on only when the copies that used it are complete. Prompt K/V is bounded by
    what the transport lets be under way.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
