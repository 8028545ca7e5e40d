"""The pipeline's bound against cases that can be counted on paper, and against laws that hold for all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_hpc.schedule.bound import StageTimes, best_step_time

SECONDS = st.floats(0.001, 10.0)


def test_two_equal_slots_in_balance_idle_nowhere() -> None:
    assert best_step_time([StageTimes(1.0, 0.0, 1.0)] * 2, 5) == pytest.approx(10.0)


def test_one_slot_overlaps_nothing() -> None:
    assert best_step_time([StageTimes(1.0, 0.5, 2.0)], 5) == pytest.approx(5 * 3.0 + 0.5)
    assert best_step_time([StageTimes(1.0, 0.0, 2.0)], 5, message_s=0.25) == pytest.approx(5 * 3.5)


@pytest.mark.parametrize("s_layer,r_layer,expected", [(1.0, 2.0, 20.0), (2.0, 1.0, 20.0)])
def test_the_longer_part_sets_the_pace(s_layer: float, r_layer: float, expected: float) -> None:
    assert best_step_time([StageTimes(s_layer, 0.0, r_layer)] * 2, 5) == pytest.approx(expected)


def test_a_long_head_is_covered_by_one_attention_only() -> None:
    # SmolLM2: a head as long as 8 of 30 layers. While one slot is at it, the other's attention covers one layer.
    balanced = best_step_time([StageTimes(1.0, 8.0, 38 / 30)] * 2, 30)
    assert 2 * 38.0 / balanced == pytest.approx(0.83, abs=0.03)


def test_messages_are_hidden_where_a_part_has_other_work() -> None:
    assert best_step_time([StageTimes(1.0, 0.0, 2.0)] * 2, 5, message_s=0.4) == pytest.approx(20.0)
    assert best_step_time([StageTimes(1.0, 0.0, 1.0)] * 3, 5, message_s=0.4) == pytest.approx(15.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=4), st.integers(1, 6), SECONDS)
def test_a_step_is_no_shorter_than_either_part_and_no_longer_than_both(times, num_layers, message_s) -> None:
    slots = [StageTimes(*one) for one in times]
    s_part = sum(num_layers * slot.s_layer + slot.s_turn for slot in slots)
    r_part = sum(num_layers * slot.r_layer for slot in slots)
    step = best_step_time(slots, num_layers)
    assert max(s_part, r_part) * (1 - 1e-9) <= step <= (s_part + r_part) * (1 + 1e-9)
    assert best_step_time(slots, num_layers, message_s=message_s) >= step * (1 - 1e-9)
