"""What the stage loop itself takes: both parts of a run in one process, with nothing to compute in their stages."""

from __future__ import annotations

from typing import Any

from fastdecode_hpc.bench.figures import Figures, add_spread
from fastdecode_hpc.bench.measure import Spread
from fastdecode_hpc.bench.schedule_figures import Window, full_steps
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.r_part.attention import DecodeAttention
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.r_part.worker import RWorker
from fastdecode_hpc.s_part.device import make_device
from fastdecode_hpc.s_part.empty import EmptySPart
from fastdecode_hpc.s_part.prefill import GivenKV
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.s_part.worker import SWorker
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.schedule.prompts import GivenPrompts
from fastdecode_hpc.schedule.scheduler import make_scheduler
from fastdecode_hpc.sequence import SamplingParams, Sequence
from fastdecode_hpc.timing import StepTimes
from fastdecode_hpc.transport.local import OWNER, make_local

NUM_LAYERS, NUM_SLOTS, NUM_STEPS = 30, 2, 24
SETTLING_STEPS = 4
MODEL = ModelConfig(
    vocab_size=32, hidden_size=8, intermediate_size=8, num_layers=NUM_LAYERS, num_heads=1, num_kv_heads=1, head_dim=8,
    max_context_len=1024,
)  # fmt: skip


class EmptyAttention(DecodeAttention):
    """Reads and writes nothing."""

    def append(self, *args: Any) -> None:
        pass

    def attend(self, *args: Any) -> None:
        pass


def measure_empty_stages(batch: int, rounds: int) -> Figures:
    """Seconds of a stage of both parts together: ``stage_s`` all of it, ``loop_s`` what is outside the bodies.

    Outside are the loop itself, plans, tokens, reports and the transport in one process; in the bodies are left copies
    to and from the wire's type, logits and sampling, and what the R-worker prepares once a step.

    Parameters
    ----------
    batch : int
        Rows of both slots together.
    """
    row: Figures = {"name": "empty-stages", "batch": batch, "num_layers": NUM_LAYERS, "num_slots": NUM_SLOTS}
    windows = [_window(_run(batch), batch) for _ in range(rounds + 1)][1:]  # the first one warms up
    stages = NUM_LAYERS * NUM_SLOTS
    add_spread(row, "stage_s", Spread.of([w.step_s / stages for w in windows]))
    outside = [w.wall_s - w.t_s_part - w.t_r_part for w in windows]
    add_spread(row, "loop_s", Spread.of([s / (w.num_steps * stages) for s, w in zip(outside, windows, strict=True)]))
    return row


def _window(steps: list[StepTimes], batch: int) -> Window:
    first, last = full_steps(steps, batch)
    return Window.of(steps, first + SETTLING_STEPS, last, num_layers=NUM_LAYERS, num_slots=NUM_SLOTS)


def _run(batch: int) -> list[StepTimes]:
    s_part, layout, steps = EmptySPart(MODEL), make_layout(MODEL, block_size=32, kv_dtype="fp16"), list[StepTimes]()
    device = make_device(s_part.device, cuda_graphs="off")
    seqs = [Sequence(i, i, [1], SamplingParams(ignore_eos=True), NUM_STEPS) for i in range(batch)]
    num_blocks = tuple(batch * blocks for blocks in layout.worst_case(NUM_STEPS + 2))
    partition = KVPartition(layout, num_blocks, num_threads=1)
    s_end, r_end = make_local(NUM_LAYERS)
    r_worker = RWorker(
        r_end,
        partition,
        EmptyAttention(partition, num_heads=MODEL.num_heads, wire_dtype="fp16", num_threads=1),
        num_layers=NUM_LAYERS,
        num_slots=NUM_SLOTS,
        num_threads=1,
        wire_dtype="fp16",
    )
    s_end.drive(r_worker.stages())
    prompts, config = GivenPrompts(), RunConfig(max_batch_size=batch, num_slots=NUM_SLOTS)
    scheduler = make_scheduler(config, Placement(layout, {OWNER: num_blocks}), iter(seqs), prompts)
    SWorker(
        s_part,
        device,
        s_end,
        scheduler,
        GivenKV(s_part, prompts),
        WireCast("fp16", s_part.device),
        eos_token_ids=set(),
        on_token=lambda seq, token: False,
        on_finished=lambda seq: None,
        on_step=steps.append,
        stop_requested=lambda: False,
    ).run()
    return steps
