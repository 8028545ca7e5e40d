"""Every (layer, slot) of every step exactly once, in the one order that both sides walk."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fastdecode_hpc.schedule.pipeline import pipeline

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 5))


@given(SIZES)
def test_each_step_visits_each_layer_of_each_slot_once(sizes: tuple[int, int]) -> None:
    num_layers, num_slots = sizes
    per_step = num_layers * num_slots
    stages = list(itertools.islice(pipeline(num_layers, num_slots), 3 * per_step))
    for step in range(3):
        part = stages[step * per_step : (step + 1) * per_step]
        assert {stage.step for stage in part} == {step}
        visits = {(stage.layer, stage.slot) for stage in part}
        assert visits == set(itertools.product(range(num_layers), range(num_slots)))
        assert len(part) == per_step


@given(SIZES)
def test_layers_of_a_slot_come_in_order_and_slots_alternate(sizes: tuple[int, int]) -> None:
    num_layers, num_slots = sizes
    stages = list(itertools.islice(pipeline(num_layers, num_slots), 2 * num_layers * num_slots))
    for slot in range(num_slots):
        mine = [(stage.step, stage.layer) for stage in stages if stage.slot == slot]
        assert mine == sorted(mine)
    assert [stage.slot for stage in stages] == [i % num_slots for i in range(len(stages))]
