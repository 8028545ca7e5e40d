"""S-worker: walks the pipeline on rank 0, from logits of one step to the plan of the next."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.device import Device
from fastdecode_hpc.s_part.prefill import GivenKV, Prefill
from fastdecode_hpc.s_part.sampler import Sampled, choose, pack, unpack
from fastdecode_hpc.s_part.stages import SlotStages
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.schedule.mini_batch import MiniBatch
from fastdecode_hpc.schedule.pipeline import Stage, pipeline
from fastdecode_hpc.schedule.prompts import stage_share
from fastdecode_hpc.schedule.scheduler import Scheduler
from fastdecode_hpc.schedule.stall import StallGuard, describe_run
from fastdecode_hpc.sequence import Sequence
from fastdecode_hpc.timing import RankTimes, StageTimes, StepTimes, Stopwatch
from fastdecode_hpc.transport.base import PlanKind, Rows, SEnd, StepPlan, StepReport

SAMPLE_ROWS = 128

# Called with each new token; True ends the sequence (a stop string is complete).
OnToken = Callable[[Sequence, int], bool]


@dataclass(slots=True)
class SlotState:
    """One mini-batch and its place in the pipeline."""

    batch: MiniBatch
    stages: SlotStages
    s_part: Stopwatch
    head: Stopwatch
    prefill: Stopwatch
    turn: Stopwatch = field(default_factory=Stopwatch)
    plan: StepPlan | None = None
    times: StepTimes | None = None
    t_wait: float = 0.0
    prefill_spans: array[float] = field(default_factory=lambda: array("d"))  # starts and ends in turn


class SWorker:
    """Runs the S-Part of all sequences.

    Parameters
    ----------
    s_part : BaseSPart
    device : Device
        The seam to what `s_part` lies on.
    transport : SEnd
    scheduler : Scheduler
    prefill : Prefill or GivenKV
        Runs what the scheduler lists.
    cast : WireCast
    eos_token_ids : set of int
    on_token, on_finished, on_step : callable
        Told of each token, each ended sequence, each ended step.
    stop_requested : callable
        Whether the run should end early; asked once a step.
    stall_s : float
        How long steps may pass in which nothing happens.
    """

    def __init__(
        self,
        s_part: BaseSPart,
        device: Device,
        transport: SEnd,
        scheduler: Scheduler,
        prefill: Prefill | GivenKV,
        cast: WireCast,
        *,
        eos_token_ids: set[int],
        on_token: OnToken,
        on_finished: Callable[[Sequence], None],
        on_step: Callable[[StepTimes], None],
        stop_requested: Callable[[], bool],
        stall_s: float = math.inf,
    ) -> None:
        self.s_part = s_part
        self.device = device
        self.transport = transport
        self.scheduler = scheduler
        self.prefill = prefill
        self.cast = cast
        self.eos_token_ids = eos_token_ids
        self.on_token = on_token
        self.on_finished = on_finished
        self.on_step = on_step
        self.stop_requested = stop_requested
        self.stopping = False
        self._slots = [self._make_slot(batch) for batch in scheduler.batches]
        self._bodies = Stopwatch()  # the S-Part's work inside a turn, on this host's clock
        self._started_s = 0.0
        self._step = 0
        self._stall = StallGuard(stall_s, self.describe)
        scheduler.on_admitted = self._on_admitted
        transport.describe_with(self.describe)

    def _make_slot(self, batch: MiniBatch) -> SlotState:
        stages = SlotStages(self.s_part, self.cast, self.device, self.scheduler.admission.max_rows)
        self.transport.bind(batch.slot, stages.qkv.rows, stages.out.rows)
        s_part, head, prefill = (self.device.stopwatch() for _ in range(3))
        return SlotState(batch, stages, s_part, head, prefill)

    def run(self) -> None:
        """Work until every sequence has ended (or a stop was asked for) and every slot has stopped."""
        with torch.inference_mode():
            self._walk()
        self.transport.close()

    def describe(self) -> str:
        """How the run stands, in words."""
        return describe_run(self.scheduler.admission, self.scheduler.batches, self._step)

    def _walk(self) -> None:
        self._started_s = time.perf_counter()
        for stage in pipeline(self.s_part.config.num_layers, len(self._slots)):
            state, waited = self._slots[stage.slot], self.transport.t_wait
            self.advance(stage, self.transport.wait_out(stage.slot))
            if all(slot.plan is not None and slot.plan.kind is PlanKind.STOP for slot in self._slots):
                break
            self._run_prefill(stage)
            state.t_wait += self.transport.t_wait - waited

    def advance(self, stage: Stage, out: Rows | None) -> None:
        """Take a mini-batch from one attention to the next: post[i-1] pre[i].

        The stage of layer 0 ends the step before and begins the next.
        """
        state = self._slots[stage.slot]
        if out is not None:
            state.stages.receive()
        if stage.layer == 0:
            with self._turning(state):
                self.end_step(state, has_rows=out is not None)
            self._run_listed(state)
            with self._turning(state):
                self.begin_step(stage, state)
        if state.plan is None or state.plan.kind is not PlanKind.RUN:
            return
        for body in state.stages.bodies(stage.layer):
            self.transport.poke()
            with state.s_part.running():
                body()
        self.transport.scatter_qkv(stage.slot, state.stages.send())

    def end_step(self, state: SlotState, *, has_rows: bool) -> None:
        """Last `post_attention`, logits and sampling of a step; drop the sequences that end with it."""
        if has_rows:
            with state.s_part.running(), self._bodies.running():
                hidden = state.stages.end()
                with state.head.running():
                    choices = self._choose(hidden, state.batch.seqs)
            for seq, result in zip(state.batch.seqs, self._fetch(choices, state.batch.seqs), strict=True):
                self._take_token(seq, result)
            state.batch.grow()
            self._drop_finished(state.batch)
        self._record_step(state)

    def begin_step(self, stage: Stage, state: SlotState) -> None:
        """Make and send the plan of the slot's next step, and embed its rows."""
        if state.plan is not None and state.plan.kind is PlanKind.STOP:
            return
        if not self.stopping and self.stop_requested():
            self._stop()
        self._step = stage.step
        state.plan = self._make_plan(stage, state)
        self.transport.send_plan(stage.slot, state.plan)
        if state.plan.kind is PlanKind.RUN:
            with state.s_part.running(), self._bodies.running():
                state.stages.begin([seq.output_ids[-1] for seq in state.batch.seqs], state.plan.positions)

    @contextmanager
    def _turning(self, state: SlotState) -> Iterator[None]:
        """Count what is done between two steps beside the S-Part's work and waits."""
        waited = self.transport.t_wait
        with state.turn.running():
            yield
        state.turn.discount(self._bodies.take() + self.transport.t_wait - waited)

    def _stop(self) -> None:
        """Admit nobody any more; every slot's next plan ends it."""
        self.stopping = True
        self.scheduler.admission.close()

    def _make_plan(self, stage: Stage, state: SlotState) -> StepPlan:
        content = None if self.stopping else self.scheduler.begin(stage)
        if content is None:
            return StepPlan(PlanKind.STOP, stage.step)
        self._stall.check()
        state.times = self.scheduler.begin_times(content, self._now())
        batch = state.batch
        return StepPlan(
            PlanKind.RUN if batch.seqs else PlanKind.EMPTY,
            stage.step,
            seq_ids=batch.seq_ids,
            owners=batch.owners,
            positions=batch.context_lens - 1,
            new=_ints(content.new),
            finished=_ints(content.finished),
            segments=self.prefill.segments(content.units),
        )

    def _on_admitted(self, seq: Sequence) -> None:
        seq.t_admitted_s = self._now()
        self._stall.progressed()

    def _now(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self._started_s

    def _choose(self, hidden: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
        """Next token of every row, packed; in blocks, as logits of a large vocabulary take much memory."""
        blocks = [slice(first, first + SAMPLE_ROWS) for first in range(0, len(seqs), SAMPLE_ROWS)]
        return pack([choose(self.s_part.logits(hidden[rows]), seqs[rows], self.device.put) for rows in blocks])

    def _fetch(self, choices: torch.Tensor, seqs: list[Sequence]) -> list[Sampled]:
        return unpack(self.device.fetch(choices, self.transport.poke).tolist(), seqs)

    def _take_token(self, seq: Sequence, result: Sampled) -> None:
        """Append a token and see whether it is the last."""
        self._stall.progressed()
        if not result.is_finite:
            seq.error = "the model's logits are not finite; the prompt or the weights drive them out of range"
            return
        token = result.token
        seq.output_ids.append(token)
        if result.logprob is not None:
            seq.logprobs.append(result.logprob)
        if len(seq.output_ids) == 1:
            seq.t_first_token_s = self._now()
        if self.on_token(seq, token) or (token in self.eos_token_ids and not seq.params.ignore_eos):
            seq.finish_reason = "stop"
        elif len(seq.output_ids) >= seq.max_new_tokens:
            seq.finish_reason = "length"

    def _drop_finished(self, batch: MiniBatch) -> None:
        finished = [seq for seq in batch.seqs if seq.is_finished]
        for seq in finished:
            self._finish(seq)
        if finished:
            batch.remove(finished)

    def _finish(self, seq: Sequence) -> None:
        """A sequence has ended; its place is given on with the next plan, which frees its KV."""
        seq.t_finished_s = self._now()
        self.scheduler.ended(seq)
        self.on_finished(seq)

    def _run_prefill(self, stage: Stage) -> None:
        """Run this stage's share of the listed prefill units."""
        num_layers, num_slots = self.s_part.config.num_layers, len(self._slots)
        share = stage_share(self.prefill.prompts, stage, num_layers=num_layers, num_slots=num_slots)
        self._run_units(self._slots[stage.slot], share)

    def _run_listed(self, state: SlotState) -> None:
        self._run_units(state, self.prefill.prompts.num_pending)

    def _run_units(self, state: SlotState, num_units: int) -> None:
        if not num_units:
            return
        waited, started = self.transport.t_wait, time.perf_counter()
        with state.prefill.running():
            done = self.prefill.run(num_units)
            self._stall.progressed()
            seqs = [seq for seq, _ in done]
            choices = self._choose(torch.stack([last for _, last in done]), seqs) if done else None
        state.prefill.discount(self.transport.t_wait - waited)  # too much prompt K/V was under way
        state.prefill_spans.extend((started, time.perf_counter()))
        if choices is None:
            return
        for seq, result in zip(seqs, self._fetch(choices, seqs), strict=True):
            self._take_token(seq, result)
            if seq.is_finished:
                self._finish(seq)
            else:
                self.scheduler.admission.prefilled(seq)

    def _record_step(self, state: SlotState) -> None:
        """Complete the times of the step that ends here with what the R-workers report."""
        reports = self.transport.wait_reports(state.batch.slot)
        if any(report.stop_request for report in reports.values()):
            self._stop()
        if state.times is None:
            return
        times, state.times = state.times, None
        times.t_s_part, times.t_head, times.t_prefill = state.s_part.take(), state.head.take(), state.prefill.take()
        times.t_turn = state.turn.take()
        messages = self.transport.transport_times(state.batch.slot)
        times.t_wait, times.t_transport, times.t_exposed = state.t_wait, messages.t_transport, messages.t_exposed
        state.t_wait, times.t_end = 0.0, self._now()
        times.ranks = {
            rank: RankTimes(
                report.t_r_part,
                report.t_wait,
                messages.ranks_exposed.get(rank, 0.0),
                report.free_blocks,
                times.rank_loads.get(rank, 0),
                report.t_turn,
                times.rank_rows.get(rank, 0),
                messages.ranks_link.get(rank, math.nan),
            )
            for rank, report in reports.items()
        }
        times.stages = self._stage_times(state, reports)
        self.on_step(times)

    def _stage_times(self, state: SlotState, reports: dict[int, StepReport]) -> StageTimes:
        prefill, state.prefill_spans = state.prefill_spans, array("d")
        ranks = {rank: (one.t_asked, one.t_arrived, one.t_posted) for rank, one in reports.items()}
        return StageTimes(self._started_s, *self.transport.layer_times(state.batch.slot), ranks, prefill)


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)
