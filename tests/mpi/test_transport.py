"""The protocol over MPI: right rows to the right owner, in order, with nothing assumed about timing."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from fastdecode_hpc.schedule.pipeline import pipeline
from fastdecode_hpc.transport.base import PlanKind, Segment, StepPlan, StepReport
from fastdecode_hpc.transport.clocks import Clocks

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

NUM_LAYERS, Q_SIZE, KV_SIZE = 3, 16, 8
QKV_SIZE = Q_SIZE + 2 * KV_SIZE
NUM_STEPS = 25


def make_ends(
    world,
    num_slots: int,
    dtype=np.float32,
    *,
    wait: str = "sleep",
    use_thread: bool = False,
    clocks: Clocks | None = None,
):
    from fastdecode_hpc.transport.mpi_comms import WireShape
    from fastdecode_hpc.transport.mpi_progress import Progress
    from fastdecode_hpc.transport.mpi_r_end import MpiREnd
    from fastdecode_hpc.transport.mpi_s_end import MpiSEnd

    shape = WireShape(NUM_LAYERS, num_slots, 12, QKV_SIZE, Q_SIZE, KV_SIZE, dtype)
    progress = Progress(world.control, wait=wait, use_thread=use_thread)
    trips = world.align_clocks()
    if world.is_s_rank:
        return MpiSEnd(world, shape, progress, clocks or Clocks(trips, time.perf_counter()))
    return MpiREnd(world, shape, progress)


def value_of(step: int, slot: int, layer: int, seq_id: int) -> float:
    return float(step % 7 + 10 * slot + 100 * layer + 300 * (seq_id % 50))


def make_plans(size: int, num_slots: int, seed: int) -> list[list[StepPlan]]:
    """Plans of every slot and step: random owners (some without rows), empty steps, prompt K/V."""
    rng, units, next_seq = random.Random(seed), itertools.count(1), itertools.count(1)
    plans: list[list[StepPlan]] = [[] for _ in range(num_slots)]
    for step, slot in itertools.product(range(NUM_STEPS), range(num_slots)):
        owners = sorted(rng.choices(range(1, size), k=rng.choice([0, 0, 1, 5, 12])))
        seq_ids = [next(next_seq) for _ in owners]
        segments = []
        for _ in range(rng.choice([0, 0, 3])):
            unit, layer = next(units), rng.randrange(NUM_LAYERS)
            for owner in sorted(rng.choices(range(1, size), k=3)):
                segments.append(Segment(unit, next(next_seq), owner, layer, rng.randrange(9), rng.randrange(1, 6)))
        array = lambda values: np.array(values, np.int64)  # noqa: E731
        kind = PlanKind.RUN if owners else PlanKind.EMPTY
        plans[slot].append(StepPlan(kind, step, array(seq_ids), array(owners), array(seq_ids) * 3, segments=segments))
    return plans


def kv_rows(segments: list[Segment], dtype) -> np.ndarray:
    """Rows that name their segment and token."""
    rows = [
        np.full(2 * KV_SIZE, 16 * (s.seq_id % 64) + s.start + token) for s in segments for token in range(s.num_tokens)
    ]
    return np.array(rows).astype(dtype)


def filled_after(target: np.ndarray, rows: np.ndarray, polls: int) -> Callable[[], bool]:
    """Puts the rows where they leave from when asked for the n-th time, as a device's copy does."""
    asked = itertools.count()

    def ready() -> bool:
        if next(asked) < polls:
            return False
        target[:] = rows
        return True

    return ready


def run_s_side(end, plans: list[list[StepPlan]], dtype) -> None:
    num_slots = len(plans)
    buffers = [(np.zeros((12, QKV_SIZE), dtype), np.zeros((12, Q_SIZE), dtype)) for _ in range(num_slots)]
    for slot, (qkv, out) in enumerate(buffers):
        end.bind(slot, qkv, out)
    current: list[StepPlan | None] = [None] * num_slots
    units = itertools.count()
    for stage in pipeline(NUM_LAYERS, num_slots):
        slot = stage.slot
        out, plan = end.wait_out(slot), current[slot]
        if out is not None:
            step, layer = (stage.step, stage.layer - 1) if stage.layer else (stage.step - 1, NUM_LAYERS - 1)
            want = [2 * value_of(step, slot, layer, seq_id) + owner for seq_id, owner in
                    zip(plan.seq_ids.tolist(), plan.owners.tolist(), strict=True)]  # fmt: skip
            assert out.tolist() == [[value] * Q_SIZE for value in want]
        if stage.layer == 0:
            reports = end.wait_reports(slot)
            if plan is not None:
                check_reports(end, slot, plan, reports)
            plan = current[slot] = plans[slot][stage.step] if stage.step < NUM_STEPS else StepPlan(PlanKind.STOP, 0)
            end.send_plan(slot, plan)
            for _, group in itertools.groupby(plan.segments, key=lambda s: (s.unit, s.owner)):
                segments = list(group)
                rows = kv_rows(segments, dtype)
                late = np.zeros_like(rows)
                end.send_kv(segments, late, filled_after(late, rows, polls=next(units) % 4))
        if all(p is not None and p.kind is PlanKind.STOP for p in current):
            break
        if plan.kind is PlanKind.RUN:
            rows = [value_of(stage.step, slot, stage.layer, seq_id) for seq_id in plan.seq_ids.tolist()]
            buffers[slot][0][: len(rows)] = np.array(rows, dtype)[:, None]
            polls = itertools.count()
            end.scatter_qkv(slot, lambda polls=polls: next(polls) >= 2)  # not filled when first asked
    end.close()


def check_reports(end, slot: int, plan: StepPlan, reports: dict[int, StepReport]) -> None:
    assert sorted(reports) == list(range(1, end.size))
    for rank, report in reports.items():
        assert report.free_blocks == 1000 * rank + plan.step
        assert report.t_r_part == plan.num_rows
    times = end.transport_times(slot)
    assert 0 <= times.t_transport < 60
    assert (times.t_transport > 0) == (plan.num_rows > 0)
    assert 0 <= times.t_exposed <= end.t_wait
    assert sorted(times.ranks_exposed) == sorted(set(plan.owners.tolist()))
    assert all(0 <= exposed < 60 for exposed in times.ranks_exposed.values())


def run_r_side(end, plans: list[list[StepPlan]], dtype) -> None:
    arrived: list[tuple[list[Segment], np.ndarray]] = []
    end.bind(lambda segments, rows: arrived.append((segments, rows.copy())))
    expected, stopped, current = [], set(), {}
    for stage in pipeline(NUM_LAYERS, len(plans)):
        slot = stage.slot
        if slot in stopped:
            continue
        if stage.layer == 0:
            plan = current[slot] = end.wait_plan(slot)
            if plan.kind is PlanKind.STOP:
                stopped.add(slot)
                if len(stopped) == len(plans):
                    break
                continue
            want = plans[slot][stage.step]
            assert plan.segments == want.segments
            assert plan.positions.tolist() == want.positions.tolist()
            end.expect(plan.segments)
            expected += [s for s in plan.segments if s.owner == end.rank]
        plan = current[slot]
        mine = plan.seq_ids[plan.owners == end.rank].tolist()
        if plan.kind is PlanKind.RUN:
            rows = end.wait_qkv(slot)
            want_rows = [[value_of(stage.step, slot, stage.layer, seq_id)] * QKV_SIZE for seq_id in mine]
            assert rows.tolist() == want_rows
            if random.random() < 0.2:
                time.sleep(0.001 * end.rank)
            end.out_rows(slot)[:] = 2 * rows[:, :Q_SIZE] + end.rank
            end.send_out(slot)
            end.poke()
        if stage.layer == NUM_LAYERS - 1:
            times = end.layer_times(slot)
            if mine:
                assert (times[2] >= times[:2]).all()  # posted after it was asked for and arrived
            end.send_report(slot, StepReport(plan.num_rows, 0.0, 0.0, 1000 * end.rank + plan.step, False, *times))
    end.wait_prefill(np.array([s.seq_id for s in expected], np.int64))
    end.close()
    assert [s for segments, _ in arrived for s in segments] == expected
    for segments, rows in arrived:
        assert rows.tolist() == kv_rows(segments, dtype).tolist()


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_every_row_comes_back_from_its_owner(world, num_slots: int, dtype) -> None:
    if dtype is not np.float32 and num_slots != 2:
        pytest.skip("types are tried with two slots")
    plans = make_plans(world.size, num_slots, seed=num_slots)
    if dtype is not np.float32:  # small types can't hold the large values exactly
        for plan in itertools.chain(*plans):
            plan.seq_ids %= 2
    end = make_ends(world, num_slots, dtype)
    (run_s_side if world.is_s_rank else run_r_side)(end, plans, dtype)


@pytest.mark.parametrize("wait", ["spin", "sleep"])
@pytest.mark.parametrize("use_thread", [True, False])
def test_progress_thread_and_waiting_change_nothing(world, wait: str, use_thread: bool) -> None:
    plans = make_plans(world.size, 2, seed=9)
    end = make_ends(world, 2, wait=wait, use_thread=use_thread)
    (run_s_side if world.is_s_rank else run_r_side)(end, plans, np.float32)


def test_objects_reach_everybody(world) -> None:
    assert world.bcast({"a": [1, 2]} if world.is_s_rank else None) == {"a": [1, 2]}
    gathered = world.gather(f"rank {world.rank}" * world.rank, "name")
    if world.is_s_rank:
        assert gathered == [f"rank {rank}" * rank for rank in range(world.size)]
    else:
        assert gathered is None


def test_clocks_of_one_host_agree(world) -> None:
    clocks = world.align_clocks()
    if world.is_s_rank:
        assert len(clocks) == world.size
        for offset, error in clocks:
            # One host has one monotonic clock: the measured offset may be no larger than the stated error.
            assert abs(offset) <= error + 1e-9


@pytest.mark.parametrize("use_thread", [True, False])
def test_clocks_are_aligned_again_during_a_run(world, use_thread: bool) -> None:
    """Offsets that are far off, as if hosts had drifted apart for days, are mended by questions beside the pipeline."""
    clocks = Clocks([(0.0, 0.0)] + [(5000.0, 100.0)] * (world.size - 1), time.perf_counter())
    plans = make_plans(world.size, 2, seed=4)
    end = make_ends(world, 2, use_thread=use_thread, clocks=clocks)
    if not world.is_s_rank:
        run_r_side(end, plans, np.float32)
        return
    run_s_side(end, plans, np.float32)
    for rank in range(1, world.size):
        assert abs(clocks.offsets_s[rank]) <= clocks.errors_s[rank] < 100.0
        assert not clocks.drifts(rank)  # one host: it is found out, and not asked any more


def test_prompt_kv_counts_as_the_message_before(world) -> None:
    """What comes after it on the link was behind it."""
    end = make_ends(world, 1)
    array = lambda values: np.array(values, np.int64)  # noqa: E731
    segments = [Segment(1, 1, 1, 0, 0, 4)]
    plan = StepPlan(PlanKind.RUN, 0, array([2]), array([1]), array([0]), segments=segments)
    stop = StepPlan(PlanKind.STOP, 1)
    if world.is_s_rank:
        end.bind(0, np.zeros((12, QKV_SIZE), np.float32), np.zeros((12, Q_SIZE), np.float32))
        end.send_plan(0, plan)
        end.send_kv(segments, kv_rows(segments, np.float32), lambda: True)
        world.barrier("prompt K/V to be stored")
        for _ in range(NUM_LAYERS):
            end.scatter_qkv(0, lambda: True)
            end.wait_out(0)
        report = end.wait_reports(0)[1]
        assert (report.t_before > 0).all() and report.t_before[0] <= report.t_arrived[0]
        end.send_plan(0, stop)
    else:
        end.bind(lambda segments, rows: None)
        end.expect(end.wait_plan(0).segments)
        end.wait_prefill()
        world.barrier("prompt K/V to be stored")
        for _ in range(NUM_LAYERS):
            end.wait_qkv(0)
            end.send_out(0)
        end.send_report(0, StepReport(0.0, 0.0, 0.0, 0, False, *end.layer_times(0)))
        end.wait_plan(0)
    end.close()


def test_a_wait_in_vain_names_what_it_was_for_and_where_all_ranks_are(world) -> None:
    """Rank 0 gives up; the others, which wait for it, live on its beats and answer its question."""
    from fastdecode_hpc.transport.control import WatchdogError
    from fastdecode_hpc.transport.mpi import World
    from fastdecode_hpc.transport.mpi_progress import Progress

    impatient = World(world.comm, watchdog_s=2)
    impatient.control.describe = lambda: f"step 7 of rank {world.rank}"
    if world.is_s_rank:
        progress = Progress(impatient.control, wait="sleep", use_thread=False)
        with pytest.raises(WatchdogError) as caught:
            progress.wait_until(lambda: False, "a rank that never comes")
        first, *lines = str(caught.value).split("\n  ")
        assert first == "waited 2 s for a rank that never comes"
        for rank in range(1, world.size):
            assert f"rank {rank}: waits for what rank 0 tells all ranks; step 7 of rank {rank}" in lines
    assert impatient.bcast("go on" if world.is_s_rank else None) == "go on"
    impatient.control.close()


def test_the_progress_thread_runs_where_it_is_told_and_its_maker_stays(world) -> None:
    from fastdecode_hpc.transport.mpi_progress import Progress

    cores = os.sched_getaffinity(0)
    last = max(cores)
    progress = Progress(world.control, wait="sleep", use_thread=True, thread_cores=(last,))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "mpi-progress")
    until = time.monotonic() + 30
    while os.sched_getaffinity(thread.native_id) != {last} and time.monotonic() < until:
        time.sleep(0.001)
    assert os.sched_getaffinity(thread.native_id) == {last}
    assert os.sched_getaffinity(0) == cores
    progress.stop()
    world.barrier()


def test_prompt_kv_that_is_under_way_is_bounded(world, monkeypatch) -> None:
    """Rows count from when they are given away, whether a device still copies them or they are being sent."""
    from fastdecode_hpc.transport import mpi_s_end

    monkeypatch.setattr(mpi_s_end, "MAX_KV_UNDER_WAY", 3 * 4 * 2 * KV_SIZE)
    end = make_ends(world, 1)
    segments = [Segment(unit, unit, 1, 0, 0, 1) for unit in range(1, 9)]
    plans = [[StepPlan(PlanKind.EMPTY, step, segments=segments if step == 0 else []) for step in range(NUM_STEPS)]]
    if not world.is_s_rank:
        run_r_side(end, plans, np.float32)
        return
    waited = []
    send_kv = end.send_kv

    def counted(segments, rows, ready) -> None:
        before = end.t_wait
        send_kv(segments, rows, ready)
        waited.append(end.t_wait > before)
        assert end._kv_bytes <= mpi_s_end.MAX_KV_UNDER_WAY

    end.send_kv = counted
    run_s_side(end, plans, np.float32)
    assert len(waited) == 8
    assert not any(waited[:3])
    assert end._kv_bytes == 0
