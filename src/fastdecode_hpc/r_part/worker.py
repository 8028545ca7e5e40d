"""R-worker: attends the rows it is sent over its KV partition, walking the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.pipeline import Stage, pipeline
from fastdecode_hpc.schedule.stall import format_blocks
from fastdecode_hpc.transport.base import Ints, PlanKind, REnd, Rows, Segment, StepPlan, StepReport


class RWorker:
    """One R-worker.

    Parameters
    ----------
    transport : REnd
    partition : KVPartition
    attention : DecodeAttention
    num_layers, num_slots, num_threads : int
    wire_dtype : str
    stop_requested : callable
        Whether this process has been asked to end early; told to rank 0 with every report.
    """

    def __init__(
        self,
        transport: REnd,
        partition: KVPartition,
        attention: DecodeAttention,
        *,
        num_layers: int,
        num_slots: int,
        num_threads: int,
        wire_dtype: str,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.transport = transport
        self.partition = partition
        self.attention = attention
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.num_threads = num_threads
        self.wire_dtype = wire_dtype
        self.stop_requested = stop_requested
        self._plans: dict[int, StepPlan] = {}
        self._work: dict[int, StepWork | None] = {}
        self._t_r_part = dict.fromkeys(range(num_slots), 0.0)
        self._t_turn = dict.fromkeys(range(num_slots), 0.0)
        self._t_wait_told = 0.0
        self._known: set[int] = set()  # sequences with KV here
        self._stage: Stage | None = None
        transport.bind(self.store_prefill)
        transport.describe_with(self.describe)

    def run(self) -> None:
        """Work until every slot has stopped."""
        for _ in self.stages():
            pass

    def stages(self) -> Iterator[Stage]:
        """Do one stage after another, yielding after each (a local transport drives this)."""
        stopped: set[int] = set()
        for stage in pipeline(self.num_layers, self.num_slots):
            if stage.slot not in stopped:
                self.visit(stage)
                if self._plans[stage.slot].kind is PlanKind.STOP:
                    stopped.add(stage.slot)
            if len(stopped) == self.num_slots:
                break
            yield stage
        self.clear()

    def describe(self) -> str:
        """Where this worker is, in words."""
        stage = self._stage
        where = (
            "before the first step" if stage is None else f"step {stage.step}, slot {stage.slot}, layer {stage.layer}"
        )
        return f"{where}; {format_blocks(self.partition.free_blocks())} KV blocks free, {len(self._known)} sequences"

    def visit(self, stage: Stage) -> None:
        """Receive, append, attend and send one layer of one slot."""
        self._stage, slot = stage, stage.slot
        if stage.layer == 0:
            self.begin_step(slot, self.transport.wait_plan(slot))
        if self._plans[slot].kind is PlanKind.RUN:
            qkv = self.transport.wait_qkv(slot)
            self.attend(stage, qkv)
            self.transport.send_out(slot)
        if stage.layer == self.num_layers - 1 and self._plans[slot].kind is not PlanKind.STOP:
            self.end_step(slot)

    def attend(self, stage: Stage, qkv: Rows) -> None:
        """Append this layer's K/V of the rows, then attend piece by piece."""
        work, started = self._work[stage.slot], time.perf_counter()
        if work is None:
            return
        t_poke = 0.0
        out = self.transport.out_rows(stage.slot)
        self.attention.append(stage.layer, work, qkv)
        for piece in range(work.num_pieces):
            if piece:
                t_poke -= time.perf_counter()
                self.transport.poke()
                t_poke += time.perf_counter()
            self.attention.attend(stage.layer, work, qkv, out, piece)
        self._t_r_part[stage.slot] += time.perf_counter() - started - t_poke

    def begin_step(self, slot: int, plan: StepPlan) -> None:
        """Free what is finished, and make room for the rows' newest tokens."""
        self._plans[slot] = plan
        self._release(plan.finished)
        self.transport.wait_prefill(plan.new)
        self.transport.expect(plan.segments)
        started = time.perf_counter()
        mine = plan.owners == self.transport.rank
        seq_ids, positions = plan.seq_ids[mine], plan.positions[mine]
        for seq_id, position in zip(seq_ids.tolist(), positions.tolist(), strict=True):
            self._know(seq_id, self.partition.first_needed(position))
            self.partition.reserve(seq_id, position + 1)
            self.partition.drop_unreachable(seq_id, position)
        self._work[slot] = (
            StepWork(self.partition, seq_ids.tolist(), positions, num_threads=self.num_threads)
            if len(seq_ids)
            else None
        )
        self._t_turn[slot] = time.perf_counter() - started
        self._t_r_part[slot] += self._t_turn[slot]

    def end_step(self, slot: int) -> None:
        """Tell rank 0 how the step went."""
        t_wait = self.transport.t_wait
        asked, arrived, posted, before = self.transport.layer_times(slot)
        report = StepReport(
            t_r_part=self._t_r_part[slot],
            t_turn=self._t_turn[slot],
            t_wait=t_wait - self._t_wait_told,
            free_blocks=sum(self.partition.free_blocks()),
            stop_request=self.stop_requested(),
            t_asked=asked,
            t_arrived=arrived,
            t_posted=posted,
            t_before=before,
        )
        self._t_r_part[slot], self._t_wait_told = 0.0, t_wait
        self.transport.send_report(slot, report)

    def store_prefill(self, segments: list[Segment], rows: Rows) -> None:
        """Put arrived prompt K/V into the cache; `rows` are ``[k|v]`` of all segments, in order."""
        borders = np.cumsum([segment.num_tokens for segment in segments])[:-1]
        for segment, part in zip(segments, np.split(rows, borders), strict=True):
            self._know(segment.seq_id, segment.start)
            self.partition.reserve(segment.seq_id, segment.start + segment.num_tokens)
            self.partition.write_prefill(segment.layer, segment.seq_id, segment.start, part, self.wire_dtype)

    def _know(self, seq_id: int, start: int) -> None:
        """Open the sequence's block tables when it is first met: with prompt K/V, or (window of 1, given) without."""
        if seq_id not in self._known:
            self._known.add(seq_id)
            self.partition.add(seq_id, start)

    def clear(self) -> None:
        """Free all that is left: what ended with the last step, or was abandoned by an early stop."""
        self.transport.wait_prefill()
        self._release(np.array(sorted(self._known), np.int64))

    def _release(self, finished: Ints) -> None:
        self.transport.wait_prefill(finished)
        for seq_id in finished.tolist():
            if seq_id in self._known:
                self._known.remove(seq_id)
                self.partition.remove(seq_id)
