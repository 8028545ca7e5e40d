"""A walk through the pipeline on a profile's clock: what both parts do in each stage, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.planner.clock import PipelineClock
from fastdecode_hpc.planner.costs import Costs, SlotTimes
from fastdecode_hpc.schedule.pipeline import Stage
from fastdecode_hpc.schedule.prompts import PromptQueue, Unit
from fastdecode_hpc.schedule.speeds import link_s
from fastdecode_hpc.timing import RankTimes, StepTimes

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Slot:
    times: SlotTimes | None = None  # of the running step; None: it has no rows
    record: StepTimes | None = None
    r_part: list[float] = field(default_factory=list)  # seconds of each worker so far
    sent: list[Floats] = field(default_factory=list)  # of each layer: posted, asked, arrived, before; ``[4, workers]``


class Walk:
    """Advances the clock stage by stage, as S-worker and R-workers would.

    Parameters
    ----------
    costs : Costs
    clock : PipelineClock
    num_slots : int
    """

    def __init__(self, costs: Costs, clock: PipelineClock, *, num_slots: int) -> None:
        self.costs, self.clock = costs, clock
        self.num_layers = costs.model.num_layers
        self._slots = [_Slot() for _ in range(num_slots)]
        self._arrived = np.zeros(clock.num_workers)  # when the last message was at each worker

    def end_step(self, stage: Stage) -> StepTimes | None:
        """End the slot's step before: its last output, logits, sampling; what the step took."""
        state = self._slots[stage.slot]
        self._wait(stage.slot)
        if state.times is not None:
            self._s_work(state, state.times.s_head)
            self.clock.work(state.times.s_turn)
        record, state.record, state.times = state.record, None, None
        if record is not None:
            record.t_end = self.clock.s_free
            record.ranks = {
                rank: RankTimes(
                    seconds, 0.0, 0.0, 0, record.rank_loads.get(rank, 0),
                    num_rows=record.rank_rows.get(rank, 0), t_link=link,
                )
                for (rank, seconds), link in zip(enumerate(state.r_part, start=1), self._links(state), strict=True)
            }  # fmt: skip
        return record

    def begin_step(self, stage: Stage, times: SlotTimes | None, record: StepTimes) -> None:
        """Begin the slot's next step; `times` is None if it has no rows."""
        state = self._slots[stage.slot]
        state.times, state.record = times, record
        state.r_part, state.sent = [0.0] * self.clock.num_workers, []
        record.t_start = self.clock.s_free
        if times is not None:
            self.clock.r_free += times.r_turn
            state.r_part = times.r_turn.tolist()

    def visit(self, stage: Stage) -> None:
        """Bring the slot's rows to the attention of the stage's layer, and through it."""
        state = self._slots[stage.slot]
        if state.times is None:
            return
        if stage.layer:
            self._wait(stage.slot)
        times = state.times
        self._s_work(state, times.s_layer)
        self.clock.work(times.s_stage)
        attention = times.r_layers[self.costs.group_of[stage.layer]]
        posted, asked = np.full_like(attention, self.clock.s_free), self.clock.r_free.copy()
        arrived = self.clock.post(stage.slot, times.qkv_bytes, attention + times.r_stage, times.out_bytes)
        state.sent.append(np.array([posted, asked, arrived, self._arrived]))
        self._arrived = np.where(times.qkv_bytes > 0, arrived, self._arrived)
        state.r_part = [total + own for total, own in zip(state.r_part, attention.tolist(), strict=True)]

    def run_unit(self, stage: Stage, unit: Unit, prompts: PromptQueue) -> None:
        """A chunk of prompts passes a layer; its K and V leave for their owners."""
        state, seconds = self._slots[stage.slot], self.costs.chunk_s(unit.pieces)
        seconds += self.costs.head_s(len(unit.ended)) if unit.ended else 0.0
        self.clock.work(seconds)
        if state.record is not None:
            state.record.t_prefill += seconds
        tokens: dict[int, int] = {}
        for piece in prompts.kept(unit):
            tokens[piece.seq.owner] = tokens.get(piece.seq.owner, 0) + piece.num_tokens
        for owner, count in tokens.items():
            num_bytes = self.costs.kv_bytes(count)
            self._arrived[owner - 1] = self.clock.store(owner - 1, num_bytes, self.costs.store_s(owner - 1, num_bytes))

    def _links(self, state: _Slot) -> Floats:
        """What could be seen of each worker's link in the step; see `link_s`."""
        if not state.sent:
            return np.full(self.clock.num_workers, np.nan)
        latency = np.array([part.latency_s for part in self.costs.parts])
        posted, asked, arrived, before = np.moveaxis(np.array(state.sent), 1, 0)
        found: Floats = link_s(posted, asked, arrived, before, latency)
        return found

    def _s_work(self, state: _Slot, seconds: float) -> None:
        self.clock.work(seconds)
        if state.record is not None:
            state.record.t_s_part += seconds

    def _wait(self, slot: int) -> None:
        waited = self.clock.t_wait
        self.clock.wait(slot)
        record = self._slots[slot].record
        if record is not None:
            record.t_wait += self.clock.t_wait - waited
