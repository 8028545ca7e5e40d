"""Figures of `bench schedule` from steps whose times are known."""

import numpy as np
import pytest

from fastdecode_hpc.bench.schedule_figures import (
    PEAK_STEPS,
    Window,
    full_steps,
    peak_latency,
    running_median,
    steps_between,
)
from fastdecode_hpc.bench.schedule_lives import load_bound, make_lengths, steady_window, total_rate
from fastdecode_hpc.bench.schedule_session import Recording
from fastdecode_hpc.schedule.step_figures import step_latencies, step_loads
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


def test_a_peak_is_no_single_disturbed_step() -> None:
    def window(*pauses: tuple[int, float]) -> Window:
        steps = make_steps(40)
        for step in steps:
            step.t_start += sum(seconds for after, seconds in pauses if step.step > after)
        return Window.of(steps, 2, 39, num_layers=10, num_slots=2)

    assert peak_latency([window((20, 5.0))]) == pytest.approx(2.0)  # one step takes 7 s
    slow = [(10 + step, 1.0) for step in range(PEAK_STEPS)]
    assert peak_latency([window(*slow)]) == pytest.approx(3.0)  # so many take 3 s
    assert peak_latency([window(*slow), window(), window()]) == pytest.approx(2.0)  # in one run of three


def test_a_running_median_of_too_few_values_is_one() -> None:
    assert running_median(np.array([1.0, 5.0, 2.0]), 9).tolist() == [2.0]
    assert running_median(np.array([1.0, 5.0, 2.0, 3.0]), 3).tolist() == [2.0, 3.0]


def test_the_steady_state_is_between_the_first_end_and_the_last_start() -> None:
    recording = Recording(10, 2, make_steps(20), t_started_s=[0.0, 9.0, 23.0], t_finished_s=[8.5, 30.0, 40.0])
    assert steps_between(recording.steps, 8.5, 23.0) == (5, 11)
    window = steady_window(recording)
    assert (window.num_steps, window.wall_s) == (6, 12.0)
    assert window.peak_load == 200
    assert total_rate(recording) == pytest.approx(20 * 8 / 40.0)


def test_ragged_lengths_have_a_long_tail_and_the_same_mean() -> None:
    equal, ragged = make_lengths("equal", 100, 400), make_lengths("ragged", 100, 400)
    assert set(equal) == {(8, 100)}
    new = np.array([length for _, length in ragged])
    assert 90 < new.mean() < 110
    assert new.max() > 3 * new.mean()
    assert new.min() >= 2


def test_the_bound_of_the_load_is_the_papers_with_prompts() -> None:
    # Equation 6 for prompts of none: half of all at once, and what an interval adds.
    assert load_bound(64, 0, 128, 1) == pytest.approx(64 * 129 / 2 + 0.5)
    assert load_bound(64, 100, 128, 4) == pytest.approx(64 * (100 + 66) + 2)
