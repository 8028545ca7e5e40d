"""What ragged lengths make of a full batch: against counting, and against the schedule itself."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.planner.plan import Planner, Wish
from fastdecode_hpc.planner.population import Population
from fastdecode_hpc.planner.profile import load_profile
from fastdecode_hpc.planner.shapes import SHAPES
from fastdecode_hpc.planner.simulate import Simulation
from fastdecode_hpc.schedule.step_figures import step_loads

PAPER = load_profile("a10-epyc7452")
MODEL = dataclasses.replace(SHAPES["llama-2-7b"], num_layers=2)
ANY_LENGTHS = st.lists(
    st.builds(Lengths, st.integers(1, 40), st.integers(2, 30), st.integers(0, 50)), min_size=1, max_size=20
)


def log_normal(count):
    rng = np.random.default_rng(1)
    outputs = rng.lognormal(4.6, 0.9, count).round().clip(2, 700).astype(int).tolist()
    prompts = rng.lognormal(4.0, 0.8, count).round().clip(1, 500).astype(int).tolist()
    return tuple(map(Lengths, prompts, outputs))


def full_steps(result, batch_size):
    """Mean load, rows and tokens/s of the steps of a run in which the batch is full and has settled."""
    rows = np.bincount([step.step for step in result.steps], [step.num_rows for step in result.steps])
    ends = np.zeros(len(rows))
    for step in result.steps:
        ends[step.step] = max(ends[step.step], step.t_end)
    first, last = np.flatnonzero(rows >= 0.98 * batch_size)[[0, -1]]
    first += (last - first) // 3
    seconds = ends[last - 1] - ends[first - 1]
    return step_loads(result.steps)[first:last].mean(), rows[first:last].sum() / seconds


@given(ANY_LENGTHS, st.integers(1, 60))
def test_rows_are_found_as_often_as_their_sequences_run(lengths, window):
    seen = [min(e.prompt_len + age, window) for e in lengths for age in range(1, e.output_len)]
    population = Population(lengths)
    table = np.arange(population.longest + 1).clip(max=window)
    assert population.mean_of_rows(table) == pytest.approx(np.mean(seen))
    assert population.tokens_a_row == pytest.approx(sum(e.output_len for e in lengths) / len(seen))


@given(st.integers(1, 50), st.integers(2, 300), st.integers(1, 64), st.integers(1, 8))
def test_equal_lengths_give_the_papers_equation(prompt_len, output_len, batch, interval):
    population, steps = Population([Lengths(prompt_len, output_len)] * 3), output_len - 1
    table = np.arange(population.longest + 1.0)
    limit = population.load_limit(table, batch, interval)
    wanted = batch * (prompt_len + (steps + 1 + interval) / 2) + batch * interval / steps
    assert limit == pytest.approx(wanted, abs=2)
    phases = population.phases([table], starts_together=True)
    assert sum(phase.weight for phase in phases) == pytest.approx(1)
    assert phases[-1].reads[0] == prompt_len + steps  # all are at their end together


@pytest.mark.parametrize("schedule", ["greedy", "load-stabilizing"])
def test_a_plan_of_ragged_lengths_is_what_the_schedule_does(schedule):
    lengths, config = log_normal(1500), RunConfig(max_batch_size=256, schedule=schedule)
    result = Simulation(PAPER, MODEL, config, num_workers=1).run(lengths)
    load, rate = full_steps(result, 256)

    def planned(lengths):
        planner = Planner(PAPER, MODEL, config, Wish(lengths))
        mean_load = 256 * planner.population.mean_of_rows(planner._loads)
        return mean_load, planner._evaluate(1, 256).tokens_per_s / planner.population.tokens_a_row

    own_load, own_rate = planned(lengths)
    assert own_load == pytest.approx(load, rel=0.06)
    assert own_rate == pytest.approx(rate, rel=0.07)
    means = Lengths(*(round(np.mean([getattr(e, name) for e in lengths])) for name in ("prompt_len", "output_len")))
    mean_load, mean_rate = planned((means,))
    assert mean_load < 0.75 * load
    assert mean_rate > 1.15 * rate
    limit = Population(lengths).load_limit(np.arange(2000.0), 256, 1)
    assert load < limit < 1.3 * load
    assert step_loads(result.steps).max() < limit


def test_memory_holds_as_many_rows_as_the_plan_says():
    lengths = log_normal(1200)
    planner = Planner(PAPER, MODEL, RunConfig(), Wish(lengths, r_memory_bytes=1e9))
    fits = planner.room.of_all(2)
    config = RunConfig(max_batch_size=10 * fits, kv_memory_bytes=int(0.85e9))
    result = Simulation(PAPER, MODEL, config, num_workers=2, given_kv=True).run(lengths)
    rows = np.bincount([step.step for step in result.steps], [step.num_rows for step in result.steps])
    middle = rows[len(rows) // 4 : len(rows) // 2]
    assert fits == pytest.approx(middle.mean(), rel=0.1)


def test_a_longest_sequence_that_fits_nowhere_is_refused():
    lengths = (Lengths(10, 50),) * 99 + (Lengths(1000, 1000),)
    with pytest.raises(ConfigError, match="one sequence of 2000 tokens"):
        Planner(PAPER, MODEL, RunConfig(), Wish(lengths, r_memory_bytes=50e6)).plan(2)
    with pytest.raises(ConfigError, match="sequence 2 may have 5000 tokens"):
        Planner(PAPER, MODEL, RunConfig(), Wish((Lengths(1, 5), Lengths(10, 20, 4990))))
    with pytest.raises(ConfigError, match="nothing decodes"):
        Population([Lengths(5, 1)])


def test_a_latency_target_is_that_of_the_longest():
    lengths = log_normal(100)
    longest = max(entry.output_len - 1 for entry in lengths)
    plan = Planner(PAPER, MODEL, RunConfig(), Wish(lengths, latency_target_s=4.0)).plan(2)
    assert plan.best.step.step_s * longest <= 4.0


def test_layers_with_and_without_a_window_read_what_they_see():
    model = dataclasses.replace(SHAPES["mistral-7b"], sliding_window=100, full_layers=tuple(range(0, 32, 4)))
    planner = Planner(PAPER, model, RunConfig(), Wish((Lengths(1, 999),)))
    contexts = np.arange(2, 1000)
    row = (8 * contexts.mean() + 24 * contexts.clip(max=100).mean()) * 2 * 2 * model.kv_size
    choice = planner._evaluate(2, 64)
    calls = 2 * 32 * PAPER.r_part(0).rates["fp16"].call_s
    reads = 64 * row / 2 / PAPER.r_part(0).rates["fp16"].bytes_per_s
    assert choice.step.r_part == pytest.approx(reads + calls + choice.step.network, rel=0.02)
    # Blocks are shared by layers as the model's longest sequence needs them: the window's are soon all taken.
    blocks = planner.layout.split_budget(int(0.85 * 128e9), model.max_context_len, 1)
    need = planner.layout.worst_case(1001)
    assert planner.room.of_all(1) == math.floor(min(np.array(blocks) / need))
