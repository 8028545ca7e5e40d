"""Figures of `bench schedule` from steps whose times are known."""

import pytest

from fastdecode_hpc.bench.schedule_figures import Window, full_steps, solve_context, step_latencies, step_loads
from fastdecode_hpc.timing import RankTimes, StepTimes


def make_steps(num_steps: int) -> list[StepTimes]:
    """Two slots, 10 layers; a step takes 2 s: S-Part 0.8 s a slot (0.1 of it head), R-Part 0.9 s."""
    steps = []
    for step in range(num_steps):
        for slot in range(2):
            times = StepTimes(step, slot, 2.0 * step + slot, num_rows=4, load_tokens=100, prefill_tokens=0)
            times.t_s_part, times.t_head, times.t_exposed = 0.8, 0.1, 0.01
            times.ranks = {1: RankTimes(0.9, 0.1, 0.03, 5, 60), 2: RankTimes(0.7, 0.1, 0.02, 5, 40)}
            steps.append(times)
    return steps


def test_a_window_counts_whole_steps_of_all_slots() -> None:
    window = Window.of(make_steps(10), 2, 7, num_layers=10, num_slots=2)
    assert (window.num_steps, window.wall_s, window.step_s) == (5, 10.0, 2.0)
    assert window.tokens_per_s == pytest.approx(4.0)
    assert window.t_s_part == pytest.approx(8.0)
    assert window.t_r_part == pytest.approx(9.0)  # of the slowest
    assert window.pipeline_efficiency == pytest.approx(0.9)
    assert window.exposed_transport == pytest.approx(10 * (0.01 + 0.03) / 10.0)
    assert window.imbalance == pytest.approx(1.2)
    # 10 stages of 0.09 a slot set the pace, but the head of one slot is longer than the other's attention by 0.08.
    assert 0.9 < window.bound <= 1.0


def test_only_full_steps_without_prefill_count() -> None:
    steps = make_steps(8)
    for step in steps:
        step.num_rows = 1 if step.step in (0, 7) else 4
        step.t_prefill = 0.1 if step.step == 1 else 0.0
    assert full_steps(steps, 8) == (2, 6)
    assert full_steps(steps, 99) == (0, 0)


def test_latencies_and_loads_are_of_all_slots() -> None:
    assert step_latencies(make_steps(4)).tolist() == [2.0] * 3
    assert step_loads(make_steps(3)).tolist() == [200] * 3


def test_the_context_is_solved_from_two_probes() -> None:
    assert solve_context((100, 1.5), (300, 3.5), 5.5) == 500
    assert solve_context((100, 1.0), (300, 1.0), 5.5) == 300  # attention takes no measurable time
