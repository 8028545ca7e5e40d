"""From measured runs to a profile: what was put in comes out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.bench.rank_speeds import fit_link
from fastdecode_hpc.bench.schedule_figures import Window
from fastdecode_hpc.calibrate.fit import (
    NO_BYTES_RATE,
    PromptPoint,
    fit_curve,
    fit_prompts,
    fit_rates,
    nonnegative_fit,
)
from fastdecode_hpc.calibrate.profile_maker import doubts
from fastdecode_hpc.calibrate.samples import DecodePoint, DecodeSample, WorkerSample, median_sample, sample_of
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.curve import Curve
from fastdecode_hpc.planner.profile import KVRates, RPartProfile
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.schedule.row_tiles import TileSizes
from fastdecode_hpc.timing import RankTimes, StageTimes, StepTimes

MODEL = ModelConfig(100, 64, 128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32, max_context_len=4096)


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_coefficients_that_made_the_values_are_found(wanted, seed):
    columns = np.random.default_rng(seed).uniform(0.1, 2.0, (12, 3))
    values = columns @ np.array(wanted)
    if values.min() < 1e-3:
        return
    found = nonnegative_fit(columns, values)
    assert columns @ found == pytest.approx(values, rel=1e-4)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_no_coefficient_is_negative_and_no_grid_point_is_better(seed):
    rng = np.random.default_rng(seed)
    columns, values = rng.uniform(0.1, 2.0, (6, 2)), rng.uniform(0.5, 3.0, 6)
    found = nonnegative_fit(columns, values)
    assert (found >= 0).all()

    def error(coefficients):
        return (((columns @ coefficients) / values - 1) ** 2).sum()

    grid = np.linspace(0, 5, 41)
    assert error(found) <= min(error(np.array([a, b])) for a in grid for b in grid) + 1e-9


def make_sample(rows, context, **times):
    worker = WorkerSample(rows / 2, times.pop("r_layer_s", 1e-3), 1e-4, 1e-5)
    return DecodeSample(rows, context, 0.1, times.pop("layer_s", 1e-3), 1e-3, 1e-4, 1e-5, [worker])


def test_rates_of_each_type_are_found_from_contexts_and_rows():
    samples, true = {}, {"fp16": (2e-4, 3e-7, 8e9), "int8": (1e-4, 5e-7, 5e9)}
    layouts = {t: make_layout(MODEL, block_size=32, kv_dtype=t) for t in true}
    for kv_dtype, (call_s, pair_s, rate) in true.items():
        for rows in (8, 32):
            for context in (128, 777, 2000):
                group = layouts[kv_dtype].main_groups[0]
                r_layer = call_s + rows / 2 * 2 * pair_s + rows / 2 * group.row_bytes(context) / rate
                samples[DecodePoint(kv_dtype, 2 * rows, context)] = make_sample(rows, context, r_layer_s=r_layer)
    for kv_dtype, rates in fit_rates(samples, 0, layouts).items():
        assert (rates.call_s, rates.pair_s, rates.bytes_per_s) == pytest.approx(true[kv_dtype], rel=1e-3)


def test_a_rate_that_the_contexts_do_not_show_is_doubted():
    layouts = {"fp16": make_layout(MODEL, block_size=32, kv_dtype="fp16")}
    samples = {
        DecodePoint("fp16", 2 * rows, context): make_sample(rows, context, r_layer_s=1e-3)
        for rows in (8, 32) for context in (128, 777)
    }  # fmt: skip
    rates = fit_rates(samples, 0, layouts)
    assert rates["fp16"].bytes_per_s == NO_BYTES_RATE
    (note,) = doubts([RPartProfile("cpu", rates)])
    assert "R-worker 0, fp16" in note
    assert "--contexts" in note
    assert not doubts([RPartProfile("cpu", {"fp16": KVRates(1e10)})])


def test_curves_take_the_median_of_points_with_as_many_rows():
    samples = {
        DecodePoint("fp16", 16, context): make_sample(8, context, layer_s=seconds)
        for context, seconds in ((1, 1.0), (2, 2.0), (3, 9.0))
    }
    samples[DecodePoint("fp16", 64, 1)] = make_sample(32, 1, layer_s=5.0)
    assert fit_curve(samples, "layer_s") == Curve((8.0, 32.0), (2.0, 5.0))


def test_curves_are_over_the_rows_that_are_computed():
    samples = {DecodePoint("fp16", 2 * rows, 1): make_sample(rows, 1, layer_s=float(rows)) for rows in (5, 12, 20, 40)}
    tiles = TileSizes((8, 16, 32))
    assert fit_curve(samples, "layer_s", tiles) == Curve((8.0, 16.0, 32.0, 40.0), (5.0, 12.0, 20.0, 40.0))


def test_what_prompts_take_is_found_and_their_logits_taken_off():
    true, num_layers, head = np.array([1e-3, 2e-4, 1e-5, 1e-8]), 6, Curve((1.0, 8.0), (5e-3, 2e-2))
    points = [PromptPoint(*p) for p in ((1, 64), (1, 256), (2, 256), (1, 1024), (8, 16), (3, 300))]
    samples = {}
    for point in points:
        chunks, last = divmod(point.prompt_len, 256)
        pieces = [256] * chunks + ([last] if last else [])
        if point.prompt_len <= 128:  # all fit one chunk
            count, chunk_count, ended = point.num_prompts, 1, [point.num_prompts]
        else:
            count = len(pieces) * point.num_prompts
            chunk_count, ended = count, [1] * point.num_prompts
        if point.prompt_len == 300:  # the rest of one prompt shares no chunk with the next one's first 256
            chunk_count = count
        tokens = point.num_prompts * point.prompt_len
        pairs = point.num_prompts * (point.prompt_len * (point.prompt_len + 1) // 2)
        seconds = num_layers * float(true @ np.array([chunk_count, count, tokens, pairs]))
        samples[point] = seconds + sum(map(head, ended))
    found = fit_prompts(samples, head, num_layers=num_layers, chunk_tokens=256)
    assert found == pytest.approx(true, rel=0.05)


def test_a_link_is_latency_and_rate():
    assert fit_link([(8, 1e-5), (10**6, 1e-5 + 1e-3), (10**7, 1e-5 + 1e-2)]) == pytest.approx((1e-5, 1e9), rel=1e-3)


def test_a_window_becomes_seconds_of_layers_steps_and_stages():
    steps = []
    for step in range(6):
        for slot in range(2):
            times = StepTimes(step, slot, 2.0 * step + slot, num_rows=4, load_tokens=400, prefill_tokens=0)
            times.t_s_part, times.t_head, times.t_turn, times.t_wait = 0.5, 0.2, 0.1, 0.16
            times.ranks = {1: RankTimes(0.36, 0.4, 0.0, 5, 300, t_turn=0.06), 2: RankTimes(0.2, 0.56, 0.0, 5, 100)}
            steps.append(times)
    steps.append(StepTimes(6, 0, 12.0, 4, 400, 0))
    window = Window.of(steps, 0, 6, num_layers=3, num_slots=2)
    sample = sample_of(window, one_process=False)
    assert (sample.rows, sample.context, sample.step_s) == (4, 100, 2.0)
    assert (sample.layer_s, sample.head_s, sample.turn_s) == pytest.approx((0.1, 0.2, 0.1))
    assert sample.stage_s == pytest.approx((2.0 - 2 * (0.5 + 0.1 + 0.16)) / 6)
    first, second = sample.workers
    assert (first.rows, first.layer_s, first.turn_s) == pytest.approx((3, 0.1, 0.06))
    assert first.stage_s == pytest.approx((2.0 - 2 * 0.76) / 6)
    assert second.rows == 1
    for times in steps[:-1]:  # a first layer that takes longer than the others, 0.08 + stage_s each
        stage_s = sample.stage_s
        times.stages = StageTimes(0.0, [0.1, 1.1 + stage_s, 2.08 + stage_s], [], [1.0, 2.0, 3.0], {}, [])
    parts = sample_of(window, one_process=False)
    assert (parts.layer_s, parts.turn_s) == pytest.approx((0.09, 0.1 + 0.03))
    assert parts.stage_s == pytest.approx(sample.stage_s)
    slower = dataclasses.replace(sample, step_s=5.0, layer_s=0.7)
    assert median_sample([sample, slower, sample]) == sample
