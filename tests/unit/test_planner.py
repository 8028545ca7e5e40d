"""Profiles, costs, plans and the pipeline's clock, against formulas and brute force."""

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.cli import run_command
from fastdecode_hpc.config import ConfigError, RunConfig, kv_token_bytes
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.clock import PipelineClock
from fastdecode_hpc.planner.costs import Costs, transfer_ratio
from fastdecode_hpc.planner.curve import Curve
from fastdecode_hpc.planner.lengths import Lengths, read_lengths
from fastdecode_hpc.planner.plan import Plan, Planner, Wish
from fastdecode_hpc.planner.profile import (
    PROFILES,
    WITH_RANK_0,
    KVRates,
    NetworkProfile,
    Profile,
    RPartProfile,
    SPartProfile,
    load_profile,
    save_profile,
)
from fastdecode_hpc.planner.replay import StepLoad, replay
from fastdecode_hpc.planner.shapes import SHAPES
from fastdecode_hpc.planner.simulate import Simulation
from fastdecode_hpc.planner.start import start_costs
from fastdecode_hpc.planner.steady import steady_step
from fastdecode_hpc.planner.text import format_plan, plan_as_dict
from fastdecode_hpc.schedule.bound import StageTimes, best_step_time
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.schedule.pipeline import pipeline
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.sequence import SamplingParams, Sequence

MODEL = ModelConfig(100, 64, 128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16, max_context_len=4096)
PAPER = load_profile("a10-epyc7452")


def make_profile(layer_s=1e-3, bytes_per_s=1e9, turn_s=0.0, groups=(0,), **network):
    """A machine whose stages take what is said, whatever the rows."""
    flat = Curve((1.0,), (layer_s,))
    parts = [
        RPartProfile("cpu", {"fp16": KVRates(bytes_per_s)}, core_group=group, memory_bytes=1e9) for group in groups
    ]
    return Profile(
        "test", "measured", MODEL, SPartProfile("dev", flat, turn=Curve((1.0,), (turn_s,))), tuple(parts),
        NetworkProfile(**network),
    )  # fmt: skip


# ---- curves and profiles


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.floats(0.5, 1e4))
def test_a_curve_goes_through_its_points_and_never_falls_at_the_end(seconds, x):
    places = [float(2**i) for i in range(len(seconds))]
    curve = Curve(tuple(places), tuple(seconds))
    assert [curve(place) for place in places] == pytest.approx(seconds)
    low, high = min(seconds), max(seconds)
    assert curve(x) >= low * (1 - 1e-9)
    assert x > places[-1] or curve(x) <= high * (1 + 1e-9)


@pytest.mark.parametrize("x, seconds", [((), ()), ((1.0,), (1.0, 2.0)), ((2.0, 1.0), (1.0, 1.0)), ((0.0,), (1.0,))])
def test_a_curve_needs_increasing_places(x, seconds):
    with pytest.raises(ConfigError):
        Curve(x, seconds)


def test_a_profile_reads_back_as_it_was_written(tmp_path):
    profile = dataclasses.replace(
        make_profile(groups=(0, 2, 2), s_bytes_per_s=1e9), notes=("a note",), residuals={"r_part": [0.1]}
    )
    profile = dataclasses.replace(profile, s_part=dataclasses.replace(profile.s_part, layer_tiles=(8, 64)))
    save_profile(tmp_path / "p.json", profile)
    assert load_profile(str(tmp_path / "p.json")) == profile


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_published_profiles_say_that_they_are(path):
    profile = load_profile(path.stem)
    assert profile.source == "published"
    assert len(profile.notes) > 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99}, "this version reads 1"),
        ({"source": "guessed"}, "measured or published"),
        ({"r_parts": []}, "no R-workers"),
        ({"r_parts": [{"name": "x"}]}, "no rates"),
        ({"r_parts": [{"name": "x", "rates": {"fp16": {"bytes_per_s": -1}}}]}, "above 0"),
        ({"r_parts": 3}, "list of objects"),
        ({"model": {}}, "incomplete"),
        ({"notes": 3}, "list of strings"),
        ({"model": {"rope_scaling": {"kind": "linear"}}}, "incomplete"),
        ({"s_part": {"name": "x", "layer": {"x": [2, 1], "seconds": [1, 1]}}}, "must increase"),
        ({"s_part": {"name": "x", "layer": {"x": "ab", "seconds": [1, 1]}}}, "list of numbers"),
        ({"s_part": {"name": "x", "layer": {"x": [1], "seconds": [1]}, "launch_s": -1}}, "negative"),
    ],
)
def test_a_damaged_profile_is_refused_by_name(tmp_path, change, said):
    values = json.loads((PROFILES / "a10-epyc7452.json").read_text())
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**values, **change}))
    with pytest.raises(ConfigError, match=said) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(ConfigError, match="a10-epyc7452"):
        load_profile("nothing")


# ---- costs


@given(
    st.sampled_from(["fp32", "fp16", "int8", "int4"]), st.sampled_from([1, 2, 4]), st.integers(1, 3000),
    st.sampled_from([None, 100]),
)  # fmt: skip
def test_transfer_ratio_counts_every_byte(kv_dtype, num_kv_heads, context, window):
    model = dataclasses.replace(MODEL, num_kv_heads=num_kv_heads, head_dim=32, sliding_window=window)
    layout = make_layout(model, block_size=32, kv_dtype=kv_dtype)
    seen = min(context, window or context)
    if kv_dtype in ("fp32", "fp16"):
        token = 2 * num_kv_heads * 32 * (4 if kv_dtype == "fp32" else 2)
        read = seen * token
    else:  # the newest 32 to 63 tokens are read as they came
        packed = kv_token_bytes(kv_dtype, 32)
        border = max(0, (seen - 1 - 32) // 32 * 32)
        read = 2 * num_kv_heads * (border * packed + (seen - border) * 64)
    wire = 2 * (2 * 4 * 32 + 2 * num_kv_heads * 32)
    assert transfer_ratio(model, layout, "fp16", context) == pytest.approx(read / wire)


def test_transfer_ratio_is_half_the_context_for_plain_heads():
    model = SHAPES["llama-2-7b"]  # the paper's Table 3: 4.29 GB of KV for 33.5 MB of q, k, v, o at 256 tokens
    assert transfer_ratio(model, make_layout(model, block_size=32, kv_dtype="fp16"), "fp16", 256) == 128


def test_the_published_profile_gives_the_papers_tables():
    costs = Costs(PAPER, SHAPES["llama-2-7b"], RunConfig(), num_workers=4)
    times = costs.even_slot_times(costs.deal_rows(1024, 256), 256)
    assert times.s_layer == pytest.approx(7.08e-3)  # Table 2
    assert times.r_layers[0] == pytest.approx([8.12e-3] * 4, rel=0.01)
    assert times.qkv_bytes.sum() + times.out_bytes.sum() == pytest.approx(33.5e6, rel=0.01)  # Table 3
    one = costs.even_slot_times(costs.deal_rows(1, 256), 256)
    assert one.s_layer == pytest.approx(1.46e-3)
    assert one.r_layers[0].max() == pytest.approx(0.287e-3, rel=0.1)


@pytest.mark.parametrize("full_layers", [(), (0,), (0, 2, 4)])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_layers_with_a_window_cost_what_they_read_of_a_long_context(full_layers, kv_dtype):
    """A slow link beside a slow socket: which of them counts for more depends on what attention reads."""
    model = dataclasses.replace(MODEL, sliding_window=256, full_layers=full_layers)
    rates = [{kv_dtype: KVRates(speed)} for speed in (1e9, 2.5e8)]
    links = [{"link_bytes_per_s": 1e8}, {"link_bytes_per_s": 1e9}]
    parts = [RPartProfile("cpu", rate, **link) for rate, link in zip(rates, links, strict=True)]
    profile = dataclasses.replace(make_profile(), r_parts=tuple(parts))
    costs = Costs(profile, model, RunConfig(kv_dtype=kv_dtype), num_workers=2)
    assert costs.read_len(4096) == ((6 - len(full_layers)) * 256 + len(full_layers) * 4096) / 6

    def seconds(rows: list[int]) -> float:
        times = costs.even_slot_times(np.array(rows), 4096)
        attention = sum(
            len(group.layers) * own for group, own in zip(costs.layout.main_groups, times.r_layers, strict=True)
        )
        link = np.array([own["link_bytes_per_s"] for own in links])
        return float((attention + model.num_layers * (times.qkv_bytes + times.out_bytes) / link).max())

    best = min(range(101), key=lambda first: seconds([first, 100 - first]))
    assert abs(costs.deal_rows(100, 4096)[0] - best) <= 1
    assert costs.shares(100, 4096).ideal()[1] == pytest.approx(best / 100, abs=0.01)
    one = sum(cost.row_s + costs.read_len(4096) * cost.token_s for cost in costs.worker_costs()[:1])
    assert one == pytest.approx(seconds([1, 0]))


def test_a_long_context_of_windows_is_dealt_out_as_a_short_one():
    profile = unlike_profile((1e9, 1e9), (2.5e8, 1e9))
    slow = dataclasses.replace(profile.r_parts[0], link_bytes_per_s=1e8)
    profile = dataclasses.replace(profile, r_parts=(slow, profile.r_parts[1]))
    windowed = Costs(profile, dataclasses.replace(MODEL, sliding_window=256), RunConfig(), num_workers=2)
    plain = Costs(profile, MODEL, RunConfig(), num_workers=2)
    assert windowed.worker_costs() == plain.worker_costs()
    assert windowed.deal_rows(100, 4096).tolist() == plain.deal_rows(100, 256).tolist()
    assert windowed.deal_rows(100, 4096).tolist() != plain.deal_rows(100, 4096).tolist()


def test_a_cache_type_that_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match=r"int8.*it has fp16"):
        Costs(PAPER, MODEL, RunConfig(kv_dtype="int8"), num_workers=1)


# ---- the clock


def test_rows_that_are_padded_take_as_long_as_those_they_are_padded_to():
    s_part = SPartProfile(
        "gpu", Curve((8.0, 64.0), (1e-3, 8e-3)), head=Curve((8.0, 64.0), (1e-4, 8e-4)),
        layer_tiles=(8, 16, 32), head_tiles=(8,),
    )  # fmt: skip
    profile = dataclasses.replace(make_profile(), s_part=s_part)
    costs = Costs(profile, profile.model, RunConfig(), num_workers=1)
    assert [costs.s_layer(rows) for rows in (1, 8, 17, 32, 33)] == pytest.approx([1e-3, 1e-3, 4e-3, 4e-3, 5e-3])
    assert [costs.head_s(rows) for rows in (1, 9, 17, 24)] == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])


@pytest.mark.parametrize("tiles", [(0,), (16, 8), (8, 8)])
def test_row_counts_of_a_profile_increase(tmp_path, tiles):
    profile = make_profile()
    save_profile(
        tmp_path / "p.json",
        dataclasses.replace(profile, s_part=dataclasses.replace(profile.s_part, layer_tiles=tiles)),
    )
    with pytest.raises(ConfigError, match=r"layer_tiles is .*must increase"):
        load_profile(str(tmp_path / "p.json"))


def walk_steps(clock, num_layers, num_slots, s_layer, s_turn, r_layer, steps):
    begun = []
    for stage in pipeline(num_layers, num_slots):
        clock.wait(stage.slot)
        if stage.layer == 0 and stage.slot == 0:
            begun.append(clock.s_free)
            if len(begun) > steps:
                break
        clock.work(s_layer[stage.slot] + (s_turn[stage.slot] if stage.layer == 0 else 0.0))
        some = np.ones(clock.num_workers)
        clock.post(stage.slot, some, r_layer[stage.slot] * some, some)
    return begun


@given(
    st.integers(1, 3), st.integers(1, 8), st.integers(1, 5),
    st.lists(st.tuples(*[st.floats(1e-4, 1e-2)] * 3), min_size=3, max_size=3),
)  # fmt: skip
@settings(max_examples=60)
def test_without_messages_a_step_takes_what_the_bound_says(num_slots, num_layers, num_workers, times):
    times = times[:num_slots]
    clock = PipelineClock(make_profile(), num_workers=num_workers, num_slots=num_slots)
    s_layer, s_turn, r_layer = zip(*times, strict=True)
    begun = walk_steps(clock, num_layers, num_slots, s_layer, s_turn, r_layer, steps=32)
    want = best_step_time([StageTimes(*entry) for entry in times], num_layers)
    assert (begun[32] - begun[16]) / 16 == pytest.approx(want, rel=0.02)


@given(st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2), st.floats(0, 1e-2), st.integers(1, 4))
def test_blocking_messages_are_added_to_the_longer_part(s_layer, r_layer, message_s, num_workers):
    """The paper's implementation: a stage takes max(S, R) and its transfers."""
    profile = make_profile(is_blocking=True, s_bytes_per_s=num_workers / max(message_s, 1e-12))
    clock = PipelineClock(profile, num_workers=num_workers, num_slots=2)
    begun = walk_steps(clock, 4, 2, [s_layer] * 2, [0.0] * 2, [r_layer] * 2, steps=12)
    stage = max(s_layer, r_layer) + 2 * message_s
    assert (begun[12] - begun[6]) / 6 == pytest.approx(4 * 2 * stage, rel=1e-6)


def back_after(clock, qkv_bytes, r_part, out_bytes):
    """When the output of one stage is back."""
    clock.post(0, np.array(qkv_bytes), np.array(r_part), np.array(out_bytes))
    clock.wait(0)
    return clock.s_free


def test_workers_that_share_cores_take_turns():
    alone = PipelineClock(make_profile(groups=(0, 0, 0)), num_workers=3, num_slots=1)
    shared = PipelineClock(make_profile(groups=(0, 2, 2)), num_workers=3, num_slots=1)
    ones = np.ones(3)
    assert back_after(alone, ones, [1.0, 2.0, 3.0], ones) == pytest.approx(3.0)
    assert back_after(shared, ones, [1.0, 2.0, 3.0], ones) == pytest.approx(5.0)
    with_s = PipelineClock(make_profile(groups=(WITH_RANK_0,)), num_workers=1, num_slots=2)
    with_s.post(0, ones[:1], np.array([2.0]), ones[:1])
    assert with_s.s_free == pytest.approx(2.0)  # nothing overlaps in one process


def test_a_shared_adapter_is_passed_one_by_one():
    clock = PipelineClock(make_profile(s_bytes_per_s=10.0), num_workers=2, num_slots=1)
    arrived = clock.post(0, np.array([10.0, 10.0]), np.array([5.0, 5.5]), np.array([10.0, 10.0]))
    assert arrived == pytest.approx([2.0, 2.0])
    clock.wait(0)
    assert clock.s_free == pytest.approx(9.0)  # ended at 7 and 7.5, a second each
    half = PipelineClock(make_profile(switch_bytes_per_s=5.0), num_workers=2, num_slots=1)
    assert half.post(0, np.array([10.0, 10.0]), np.zeros(2), np.zeros(2)) == pytest.approx([4.0, 4.0])


def test_output_that_comes_later_does_not_hold_up_what_is_sent_before_it():
    """A switch that is hardly used costs what its messages take, not an order of them."""
    walls = []
    for network in ({}, {"switch_bytes_per_s": 1e4}):
        clock = PipelineClock(make_profile(**network), num_workers=2, num_slots=2)
        walls.append(walk_steps(clock, 4, 2, [1e-3] * 2, [0.0] * 2, [10e-3] * 2, steps=10)[-1])
    assert walls[1] < 1.03 * walls[0]  # of 10 ms a stage, 4 messages of 0.1 ms, which the other slot's attention covers


def test_a_full_switch_is_the_limit():
    clock = PipelineClock(make_profile(switch_bytes_per_s=100.0), num_workers=2, num_slots=2)
    begun = walk_steps(clock, 4, 2, [1e-3] * 2, [0.0] * 2, [1e-3] * 2, steps=10)
    assert (begun[10] - begun[5]) / 5 == pytest.approx(4 * 2 * 4 / 100.0, rel=0.05)  # 4 messages of a byte a stage


@pytest.mark.parametrize("slow", [{"link": 1e6}, {"switch_bytes_per_s": 1e6}, {"s_bytes_per_s": 1e6}])
@pytest.mark.parametrize("is_blocking", [False, True])
def test_prompts_take_as_long_as_their_kv_takes_on_the_way(slow, is_blocking):
    network = {name: value for name, value in slow.items() if name != "link"}
    profile = make_profile(is_blocking=is_blocking, **network)
    if "link" in slow:
        part = dataclasses.replace(profile.r_parts[0], link_bytes_per_s=slow["link"])
        profile = dataclasses.replace(profile, r_parts=(part,))
    run = Simulation(profile, MODEL, RunConfig(max_batch_size=2), num_workers=1)
    sent = 2 * 1000 * MODEL.num_layers * 2 * 2 * MODEL.kv_size
    assert run.run([Lengths(1000, 3)] * 2).wall_s > sent / 1e6


def test_an_end_after_some_steps_is_one_of_whole_steps():
    run = Simulation(make_profile(), MODEL, RunConfig(max_batch_size=4), num_workers=1, given_kv=True, max_steps=10)
    steps = {step.step for step in run.run([Lengths(1, 100)] * 4).steps}
    assert steps == set(range(10))


def test_jitter_is_reproducible_and_costs_time():
    def wall(jitter, seed):
        profile = dataclasses.replace(
            make_profile(), r_parts=(RPartProfile("cpu", {"fp16": KVRates(1e9)}, latency_s=1e-3),)
        )
        run = Simulation(profile, MODEL, RunConfig(max_batch_size=4), num_workers=4, jitter=jitter, seed=seed)
        return run.run([Lengths(8, 20)] * 8).wall_s

    assert wall(1.0, 1) == wall(1.0, 1) != wall(1.0, 2)
    assert wall(1.0, 1) > wall(0.0, 1)


# ---- simulation


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=40),
    st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.sampled_from(["greedy", "load-stabilizing"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_token_is_simulated_once_and_no_part_works_twice_at_a_time(lengths, workers, batch, slots, schedule):
    entries = [Lengths(*entry) for entry in lengths]
    config = RunConfig(max_batch_size=batch, num_slots=slots, schedule=schedule, prefill_chunk_tokens=16)
    run = Simulation(make_profile(turn_s=1e-4), MODEL, config, num_workers=workers)
    result = run.run(entries)
    assert result.num_sequences == len(entries)
    assert result.output_tokens == sum(entry.output_len for entry in entries)
    assert sum(step.prefill_tokens for step in result.steps) <= sum(entry.prompt_len for entry in entries)
    for rank in range(1, workers + 1):
        busy = sum(step.ranks[rank].t_r_part for step in result.steps)
        assert busy <= result.wall_s * (1 + 1e-9)
    s_busy = sum(step.t_s_part + step.t_prefill for step in result.steps)
    assert s_busy <= result.wall_s * (1 + 1e-9)


@given(
    st.integers(1, 60), st.integers(8, 40), st.integers(1, 20), st.integers(1, 2),
    st.sampled_from(["greedy", "load-stabilizing"]),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_a_replay_of_a_simulated_run_takes_as_long(prompt_len, output_len, count, workers, schedule):
    profile = make_profile(turn_s=1e-4, bytes_per_s=1e8)
    config = RunConfig(max_batch_size=8, schedule=schedule)
    result = Simulation(profile, MODEL, config, num_workers=workers).run([Lengths(prompt_len, output_len)] * count)
    loads = [StepLoad(s.step, s.slot, s.num_rows, s.prefill_tokens, s.rank_loads) for s in result.steps]
    replayed = replay(profile, MODEL, config, loads)
    assert [(s.step, s.slot) for s in replayed] == [(s.step, s.slot) for s in result.steps]
    for name in ("t_s_part", "t_r_part"):
        mine, theirs = (sum(getattr(s, name) for s in steps) for steps in (replayed, result.steps))
        assert mine == pytest.approx(theirs, rel=0.01)
    # A report does not say where within a step its prompts are computed.
    assert replayed[-1].t_end == pytest.approx(result.steps[-1].t_end, rel=0.25)


# ---- plans


def test_time_of_a_mixture_is_that_of_the_experts_that_rows_pass() -> None:
    dense = Costs(PAPER, SHAPES["mistral-7b"], RunConfig(), num_workers=1)
    mixture = Costs(PAPER, SHAPES["mixtral-8x7b"], RunConfig(), num_workers=1)
    launch = PAPER.s_part.launch_s
    model, profiled = SHAPES["mixtral-8x7b"], PAPER.model.layer_weights

    def growing(rows: float) -> float:
        return max(0.0, PAPER.s_part.layer(rows) - launch)

    # 1024 rows pass 2 of 8 experts each: 256 an expert, one after the other.
    expected = growing(1024) * model.attention_weights + 8 * growing(256) * model.mlp_weights
    assert mixture.s_layer(1024) - launch == pytest.approx(expected / profiled)
    assert dense.s_layer(1024) < mixture.s_layer(1024)
    same = dataclasses.replace(PAPER, model=model)
    assert Costs(same, model, RunConfig(), num_workers=1).s_layer(64) == pytest.approx(PAPER.s_part.layer(64))


def plan_of(model="llama-2-13b", profile=PAPER, length=128, config=None, max_workers=8, **wish):
    planner = Planner(profile, SHAPES[model], config or RunConfig(), Wish((Lengths(1, length - 1),), **wish))
    return planner, planner.plan(max_workers)


def test_short_sequences_of_a_13b_model_gain_nothing_from_more_than_four_sockets():
    """The paper's Figure 13: at length 128 the S-Part is the limit, and 8 sockets are no better than 4."""
    _, plan = plan_of()
    rates = {choice.num_workers: choice.tokens_per_s for choice in plan.choices}
    assert rates[8] < 1.02 * rates[4]
    assert plan.best.num_workers <= 4
    assert next(choice for choice in plan.choices if choice.num_workers == 8).limited_by == "S-Part"


def test_long_sequences_of_a_7b_model_want_the_papers_eight_sockets():
    planner, plan = plan_of("llama-2-7b", length=1024, config=RunConfig(schedule="load-stabilizing"), max_workers=12,
                            r_memory_bytes=512e9)  # fmt: skip
    assert 7 <= plan.best.num_workers <= 9
    # Equation 11, P = S R E(B) / 2, with this batch's own times.
    costs = Costs(PAPER, SHAPES["llama-2-7b"], planner.config, num_workers=1)
    half = plan.best.batch_size // 2
    t_b = 2 * costs.s_layer(half)
    per_token = 2 * 4096 * 2 / 136.9e9
    wanted = 0.5 * 1024 * per_token * plan.best.batch_size / t_b
    assert plan.balance_workers == pytest.approx(wanted, rel=0.2)


def test_memory_caps_the_batch_as_admission_counts_it():
    planner, plan = plan_of("llama-2-7b", length=1024, max_workers=3, r_memory_bytes=32e9)
    layout = planner.layout
    for choice in plan.choices:
        fits = 0.85 * 32e9 // layout.bytes_for(1025) * choice.num_workers
        assert 0.85 * fits < choice.batch_size <= fits
    assert plan.choices[0].limited_by == "KV memory"


def unlike_profile(*workers: tuple[float, float]) -> Profile:
    """R-workers of so many bytes a second of attention, and of memory."""
    profile = make_profile(layer_s=1e-5)
    parts = tuple(
        RPartProfile("cpu", {"fp16": KVRates(speed)}, memory_bytes=memory, threads=8) for speed, memory in workers
    )
    return dataclasses.replace(profile, r_parts=parts)


def sequences_placed(profile: Profile, config: RunConfig, lengths: Lengths, batch_size: int) -> dict[int, int]:
    """How many each R-worker gets where a run places them, one after the other, in the memory that each has."""
    count = len(profile.r_parts)
    costs = Costs(profile, MODEL, config, num_workers=count)
    blocks = [
        costs.layout.split_budget(int(part.memory_bytes * 0.85), MODEL.max_context_len, batch_size)
        for part in profile.r_parts
    ]
    placement = Placement(
        costs.layout, dict(zip(costs.owners, blocks, strict=True)), costs.shares(batch_size / config.num_slots).costs
    )
    owners = [
        placement.place(Sequence(i, i, range(lengths.prompt_len), SamplingParams(), lengths.output_len), 0)
        for i in range(batch_size)
    ]
    assert None not in owners
    return {owner: owners.count(owner) for owner in costs.owners}


@given(
    st.lists(st.tuples(st.sampled_from([1e8, 2e8, 5e8]), st.floats(2e6, 3e7)), min_size=2, max_size=4),
    st.integers(1, 3), st.sampled_from([Lengths(1, 63), Lengths(100, 200)]), st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_batch_is_dealt_out_as_a_run_places_it_in_the_memory_of_each_worker(workers, slots, lengths, data):
    profile, config = unlike_profile(*workers), RunConfig(num_slots=slots)
    planner = Planner(profile, MODEL, config, Wish((lengths,)))
    room = planner.room.of_each(len(workers))
    batch_size = data.draw(st.integers(1, sum(room)))
    choice = planner._evaluate(len(workers), batch_size)
    dealt = planner.sequences(choice)
    placed = sequences_placed(profile, config, lengths, batch_size)
    assert sum(dealt.values()) == batch_size
    assert all(dealt[rank] <= have for rank, have in enumerate(room, start=1))
    assert all(abs(dealt[rank] - placed[rank]) <= slots for rank in placed)  # rows are whole in each slot
    # The busiest worker decides: it reads its own sequences in every step.
    context_len = planner.population.mean_context
    reads = 2 * 2 * MODEL.kv_size * MODEL.num_layers * round(context_len)
    busiest = max(dealt[rank] * reads / speed for rank, (speed, _) in enumerate(workers, start=1))
    step = steady_step(
        profile, MODEL, config, num_workers=len(workers), batch_size=batch_size, context_len=context_len, room=room
    )
    assert step.r_part == pytest.approx(busiest)


def test_a_worker_with_a_fraction_of_the_memory_gets_what_it_can_hold_and_is_named():
    profile = unlike_profile((1e9, 4e7), (1e9, 4e7), (1e9, 4e6))
    planner = Planner(profile, MODEL, RunConfig(), Wish((Lengths(1, 255),)))
    plan = Plan(planner._evaluate(3, 90), [planner._evaluate(3, 90)], None, None, 1.0, 1, 1, 1.0, 1.0, None)
    held = planner.room.of_each(3)[2]
    assert held == int(4e6 * 0.85) // planner.layout.bytes_for(257) < 30
    rest = (90 - held) / 2
    assert planner.sequences(plan.best) == {1: pytest.approx(rest, abs=1), 2: pytest.approx(rest, abs=1), 3: held}
    text = format_plan(planner, plan, "test")
    assert f"memory for fewer sequences than its share: rank 3 holds {held} of 30\n" in text
    assert "memory for" not in format_plan(planner, dataclasses.replace(plan, best=planner._evaluate(3, 9)), "test")
    assert plan_as_dict(planner, plan, "test")["sequences"] == planner.sequences(plan.best)
    even = Planner(unlike_profile(*[(1e9, 4e7)] * 3), MODEL, RunConfig(), Wish((Lengths(1, 255),)))._evaluate(3, 90)
    busiest = max(planner.sequences(plan.best).values())
    assert plan.best.step.r_part == pytest.approx(even.step.r_part * busiest / 30, rel=0.01)  # prompts are stored, too


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_command_line_takes_a_profile_that_the_run_would_take(tmp_path, capsys, num_workers):
    """Of as many R-workers as are proposed, in a file of one's own."""
    path = tmp_path / "my node.json"
    profile = unlike_profile((1e7, 1e9), (5e6, 1e9))
    s_part = SPartProfile("dev", Curve((1.0, 64.0), (1e-5, 1e-5)))
    save_profile(path, dataclasses.replace(profile, model=SHAPES["llama-2-7b"], s_part=s_part))
    command = ["plan", "--model", "llama-2-7b", "--length", "64", "--max-r-workers", str(num_workers)]
    assert run_command([*command, "--profile", str(path), "--r-memory", "4G"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fastdecode generate" in line]
    options = shlex.split(line)
    assert ("--profile" in options) == (num_workers == 2)
    if num_workers == 2:
        config = RunConfig(profile=options[options.index("--profile") + 1])
        first, second = start_costs(config, SHAPES["llama-2-7b"], (1, 2)).values()
        assert second.token_s == 2 * first.token_s
    assert run_command([*command, "--profile", "a10-epyc7452"]) == 0
    assert "--profile" not in capsys.readouterr().out


def test_a_latency_target_is_kept_and_an_impossible_one_refused():
    _, plan = plan_of("llama-2-7b", length=512, latency_target_s=90.0, max_workers=4)
    for choice in plan.choices:
        assert choice.step.step_s * 510 <= 90.0
    free = plan_of("llama-2-7b", length=512, max_workers=4)[1]
    assert free.best.tokens_per_s > plan.best.tokens_per_s
    with pytest.raises(ConfigError, match="latency target"):
        plan_of("llama-2-7b", length=512, latency_target_s=1.0)


def test_where_more_rows_give_less_the_best_batch_is_found():
    """Profile h100-epyc7452 is at its best at 512 rows of a mini-batch."""
    planner, plan = plan_of("llama-2-70b", load_profile("h100-epyc7452"), length=256)
    for choice in plan.choices:
        sizes = [size for size in (256, 512, 1024, 1536, 2048) if size <= sum(planner.room.of_each(choice.num_workers))]
        rates = [planner._evaluate(choice.num_workers, size).tokens_per_s for size in sizes]
        assert choice.tokens_per_s >= 0.96 * max(rates)


def test_too_few_measured_rows_are_named_as_the_limit():
    few = dataclasses.replace(PAPER.s_part, layer=Curve((1.0, 64.0), (1.46e-3, 1.8e-3)))
    _, plan = plan_of("llama-2-7b", dataclasses.replace(PAPER, s_part=few), length=256, max_workers=4)
    assert plan.best.batch_size == 128
    assert plan.best.limited_by == "rows measured"


def test_a_profile_of_one_process_is_not_planned_with():
    with pytest.raises(ConfigError, match="one process"):
        Planner(make_profile(groups=(WITH_RANK_0,)), MODEL, RunConfig(), Wish((Lengths(1, 63),)))


def test_nothing_fits_is_said_with_numbers():
    with pytest.raises(ConfigError, match=r"one sequence of 1024 tokens needs 0\.5"):
        plan_of("llama-2-7b", length=1024, r_memory_bytes=0.5e9)


def test_prices_choose_the_cheapest_and_a_gpu_engine_where_it_is_better():
    _, plan = plan_of("llama-2-7b", length=1024, price_s=1.0, price_r=0.5, max_workers=10)
    prices = [choice.cost_per_million for choice in plan.choices]
    assert plan.best.cost_per_million == min(prices)
    best = plan.best
    assert best.cost_per_million == pytest.approx((1.0 + 0.5 * best.num_workers) / best.tokens_per_s / 3600 * 1e6)
    _, short = plan_of("llama-3-8b", load_profile("h100-epyc7452"), length=128, max_workers=4)
    assert short.gpu_only.tokens_per_s > short.best.tokens_per_s  # few heads, short sequences, 80 GB: no need for us


def test_gpu_only_batch_is_what_fits_beside_the_weights():
    _, plan = plan_of("llama-2-7b", length=1024, max_workers=1)
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096)
    room = 0.85 * 24e9 - weights
    assert plan.gpu_only.batch_size == math.floor(room / (524288 * (1 + 1023 / 2)))


# ---- lengths and commands


def test_lengths_are_read_from_wishes_and_from_records(tmp_path):
    path = tmp_path / "lengths.jsonl"
    body = {"usage": {"prompt_tokens": 7, "completion_tokens": 8}}
    lines = [
        {"prompt_len": 3, "output_len": 4, "max_new_tokens": 9},
        {"index": 0, "text": "", "usage": {"prompt_tokens": 5, "completion_tokens": 6}},
        {"index": 1, "error": {"code": "x"}},
        {"index": 2, "response": {"status_code": 200, "body": body}, "error": None},
    ]
    four = {"choices": [{}] * 4, "usage": {"prompt_tokens": 5, "completion_tokens": 400}}
    path.write_text("\n".join(map(json.dumps, [*lines, four])) + "\n\n")
    assert read_lengths(path) == [Lengths(3, 4, 9), Lengths(5, 6), Lengths(7, 8), *[Lengths(5, 100)] * 4]


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt_len": 0, "output_len": 1}', '{"prompt_len": true}', "NaN"])
def test_a_bad_line_of_lengths_is_named(tmp_path, line):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_len": 1, "output_len": 1}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_lengths(path)


def test_prompts_given_as_lengths_are_told_from_them(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(ConfigError, match=r"line 1 .* no prompt_len and no output_len; .* output"):
        read_lengths(path)


COMMON = ["--model", "llama-2-7b", "--profile", "a10-epyc7452"]


def fastdecode_plainly(*args):
    """The command in a process in which neither torch nor mpi4py can be imported."""
    code = (
        "import sys; sys.modules.update({'torch': None, 'mpi4py': None, 'h5py': None})\n"
        "from fastdecode_hpc.cli import run_command; sys.exit(run_command(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_plan_prints_a_table_a_proposal_and_a_command_line(tmp_path):
    out = tmp_path / "plan.json"
    done = fastdecode_plainly("plan", *COMMON, "--length", "512", "--max-r-workers", "3", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "published figures" in done.stdout
    assert "srun --mpi=pmi2 --ntasks=4" in done.stdout
    plan = json.loads(out.read_text())
    assert [choice["num_workers"] for choice in plan["choices"]] == [1, 2, 3]
    assert plan["profile"]["source"] == "published"
    assert f"{plan['best']['tokens_per_s']:,.0f}" in done.stdout


def test_plans_are_for_the_s_part_that_was_measured(tmp_path):
    path, out = tmp_path / "int8.json", tmp_path / "plan.json"
    s_part = dataclasses.replace(PAPER.s_part, weight_dtype="int8")
    save_profile(path, dataclasses.replace(PAPER, name="small", s_part=s_part))
    options = ["plan", "--model", "llama-2-7b", "--length", "512", "--max-r-workers", "2"]
    done = fastdecode_plainly(*options, "--profile", str(path), "--weight-dtype", "int8", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "of an S-Part with s_part native, weight_dtype int8" in done.stdout
    assert "--weight-dtype int8" in done.stdout.splitlines()[-1]
    told = json.loads(out.read_text())["profile"]
    assert (told["s_part"], told["weight_dtype"]) == ("native", "int8")
    done = fastdecode_plainly(*options, "--profile", str(path), "--weight-dtype", "auto")
    assert done.returncode == 2
    assert "--weight-dtype is auto, and profile small was measured with int8" in done.stderr
    done = fastdecode_plainly(*options, "--profile", "a10-epyc7452", "--s-part", "transformers")
    assert done.returncode == 2
    assert "take a profile of fastdecode calibrate --s-part transformers" in done.stderr


def test_simulate_prints_what_a_job_would_take(tmp_path):
    out = tmp_path / "sim.json"
    done = fastdecode_plainly(
        "simulate", *COMMON, "--length", "24", "--prompt-len", "8", "--r-workers", "2", "--max-batch-size", "4",
        "--num-sequences", "9", "--schedule", "load-stabilizing", "--switch-bandwidth", "1G", "--jitter", "0.1",
        "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert figures["output_tokens"] == 9 * 16
    assert figures["tokens_per_s"] == pytest.approx(9 * 16 / figures["wall_s"])
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("output", "time")))
    assert told == {"output": "144 tokens", "time": f"{figures['wall_s']:.3f} s"}
    own = next(line for line in done.stdout.splitlines() if line.startswith("rank 0's time"))
    assert sum(float(part) for part in re.findall(r"([\d.]+)%", own)) == pytest.approx(100, abs=0.3)
    assert "replaced: --switch-bandwidth 1.07 GB/s" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plan", *COMMON], "--length"),
        (["plan", *COMMON, "--length", "9999"], "at most 4096"),
        (["plan", *COMMON, "--length", "64", "--kv-dtype", "int8"], "no rates"),
        (["plan", "--model", "nothing", "--profile", "a10-epyc7452", "--length", "64"], "no model"),
        (["simulate", *COMMON, "--length", "64", "--r-workers", "2000"], "at most 1024"),
        (["simulate", *COMMON, "--length", "64", "--r-workers", "1", "--jitter", "-1"], "negative"),
        (["simulate", *COMMON, "--length", "64", "--r-workers", "1", "--kv-memory-bytes", "1M"], "sequence 1"),
    ],
)
def test_mistakes_are_2_and_said(args, said):
    done = fastdecode_plainly(*args)
    assert done.returncode == 2
    assert said in done.stderr
