"""Shares that follow the links, over whole simulated runs: the schedule's own decisions on a profile's clock."""

import dataclasses
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.cli import run_command
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.costs import Costs
from fastdecode_hpc.planner.curve import Curve
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.planner.plan import Planner, Wish
from fastdecode_hpc.planner.profile import KVRates, Profile, RPartProfile, SPartProfile, save_profile
from fastdecode_hpc.planner.simulate import SimulatedRun, Simulation
from fastdecode_hpc.planner.start import start_costs
from fastdecode_hpc.planner.text import format_plan

MODEL = ModelConfig(100, 64, 128, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=16, max_context_len=4096)
BATCH, ROW_BYTES = 48, 2 * (3 * 64 + 64)
FAST = ROW_BYTES * BATCH / 2 / 3 / 1e-3  # bytes/s with which q, k, v and o of an equal share take 1 ms
LENGTHS = [Lengths(32, 64 + index % 7) for index in range(6 * BATCH)]


def make_profile(*rates: float, latencies=(0.0, 0.0, 0.0), readers=(1e9, 1e9, 1e9)) -> Profile:
    """Stages of 1 ms on rank 0, attention that hardly takes time, links of these rates."""
    parts = [
        RPartProfile("cpu", {"fp16": KVRates(reader)}, link_bytes_per_s=rate, latency_s=latency, memory_bytes=1e9)
        for rate, latency, reader in zip(rates, latencies, readers, strict=True)
    ]
    return Profile("test", "measured", MODEL, SPartProfile("dev", Curve((1.0, 4096.0), (1e-3, 1e-3))), tuple(parts))


def run(profile: Profile, weights: str, *, knows_profile: bool = True, **options) -> tuple[SimulatedRun, Simulation]:
    config = RunConfig(max_batch_size=BATCH, r_worker_weights=weights, **options)
    workers = len(profile.r_parts)
    simulation = Simulation(
        profile, MODEL, config, num_workers=workers, given_kv=True, knows_profile=knows_profile
    )  # fmt: skip
    return simulation.run(LENGTHS), simulation


def row_shares(steps) -> dict[int, float]:
    rows: Counter[int] = Counter()
    for step in steps:
        rows.update(step.rank_rows)
    return {rank: rows[rank] / rows.total() for rank in sorted(rows)}


def rate_from(result: SimulatedRun, begin: float) -> float:
    """Tokens/s after a part of the steps."""
    steps = result.steps[int(begin * len(result.steps)) :]
    return sum(step.num_rows for step in steps) / (steps[-1].t_end - steps[0].t_start)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_with_one_link_of_three_five_times_slower_there_are_half_as_many_tokens_again(num_slots: int) -> None:
    slow = make_profile(FAST, FAST, FAST / 5)
    equal, _ = run(slow, "equal", num_slots=num_slots)
    aware, simulation = run(slow, "auto", num_slots=num_slots)
    assert aware.output_tokens == equal.output_tokens
    assert aware.tokens_per_s >= 1.5 * equal.tokens_per_s
    assert row_shares(equal.steps) == pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}, abs=0.02)
    assert row_shares(aware.steps)[3] < 0.2
    assert "rank 3" in simulation.shares.describe() and "(link " in simulation.shares.describe()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_run_that_knows_no_profile_finds_the_slow_link_by_itself(num_slots: int) -> None:
    slow = make_profile(FAST, FAST, FAST / 5)
    equal, _ = run(slow, "equal", num_slots=num_slots)
    found, simulation = run(slow, "auto", knows_profile=False, num_slots=num_slots)
    assert rate_from(found, 0.4) >= 1.5 * rate_from(equal, 0.4)
    assert simulation.shares.source == "measured"
    known = Costs(slow, MODEL, RunConfig(), num_workers=3).worker_costs()
    for rank, cost in enumerate(known, start=1):
        assert simulation.shares.costs[rank].row_s == pytest.approx(cost.row_s, rel=0.35), rank


def test_shares_settle_and_stay() -> None:
    """Of every sixth of a long run the slow one has the same part, as soon as the first sequences have ended."""
    found, _ = run(make_profile(FAST, FAST, FAST / 5), "auto", knows_profile=False)
    size = len(found.steps) // 6
    shares = [row_shares(found.steps[part * size : (part + 1) * size]).get(3, 0.0) for part in range(2, 6)]
    assert max(shares) < 0.2 and max(shares) - min(shares) < 0.08


@pytest.mark.parametrize("rates", [(FAST, FAST, FAST), (FAST, 0.8 * FAST, FAST), (1e15, 1e15, 1e15)])
def test_links_that_are_alike_leave_every_step_as_it_is_without(rates) -> None:
    """What each step of each slot holds is what it holds with equal shares."""
    profile = make_profile(*rates)
    steps = {
        weights: [(step.step, step.slot, step.rank_rows, step.rank_loads) for step in run(profile, weights)[0].steps]
        for weights in ("equal", "auto")
    }
    assert steps["auto"] == steps["equal"]


def test_latency_and_a_slow_socket_count_too() -> None:
    late, _ = run(make_profile(FAST, FAST, FAST, latencies=(0.0, 0.0, 5e-4)), "auto")
    assert row_shares(late.steps)[3] < 0.25
    socket, _ = run(make_profile(1e15, 1e15, 1e15, readers=(1e7, 1e7, 2.5e6)), "auto")
    assert row_shares(socket.steps)[3] == pytest.approx(1 / 9, abs=0.03)


@given(st.lists(st.floats(1e5, 1e9), min_size=2, max_size=4), st.integers(1, 3), st.integers(200_000, 10**6))
@settings(max_examples=10, deadline=None)
def test_every_sequence_runs_to_its_end_whatever_the_links(rates, num_slots: int, memory: int) -> None:
    """Also where the cache is tight: what memory allows comes before what links would like."""
    profile = make_profile(FAST, FAST, FAST)
    parts = tuple(dataclasses.replace(profile.r_parts[0], link_bytes_per_s=rate) for rate in rates)
    config = RunConfig(max_batch_size=BATCH, num_slots=num_slots, kv_memory_bytes=memory)
    simulation = Simulation(
        dataclasses.replace(profile, r_parts=parts), MODEL, config, num_workers=len(parts), given_kv=True,
        knows_profile=False,
    )  # fmt: skip
    lengths = LENGTHS[: 2 * BATCH]
    simulation.check_fit(lengths)
    result = simulation.run(lengths)
    assert result.num_sequences == len(lengths)
    assert result.output_tokens == sum(entry.output_len for entry in lengths)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_prompt_kv_on_its_way_is_no_slow_link(num_slots: int) -> None:
    """What is seen is what q, k, v take by themselves, though far more bytes of prompts pass the link."""
    config = RunConfig(max_batch_size=BATCH, r_worker_weights="auto", num_slots=num_slots)
    simulation = Simulation(make_profile(FAST, FAST, FAST / 5), MODEL, config, num_workers=3, knows_profile=False)
    steps = simulation.run([Lengths(400, 32 + index % 7) for index in range(3 * BATCH)]).steps
    rates = {1: FAST, 2: FAST, 3: FAST / 5}
    seen = [
        (one.t_link, 2 * 3 * 64 * one.num_rows / rates[rank], step.prefill_tokens)
        for step in steps
        for rank, one in step.ranks.items()
        if one.t_link == one.t_link
    ]
    assert sum(tokens > 0 for *_, tokens in seen) > 50
    for found, wanted, _ in seen:
        assert found == pytest.approx(wanted, rel=1e-6)


# ---- where it is shown


def test_a_plan_deals_rows_out_by_shares_and_says_so() -> None:
    slow = make_profile(FAST / 5, FAST, FAST)
    aware, equal = (
        Planner(slow, MODEL, RunConfig(r_worker_weights=weights), Wish((Lengths(1, 255),)))
        for weights in ("auto", "equal")
    )
    rates = {planner: planner._evaluate(3, BATCH).tokens_per_s for planner in (aware, equal)}
    assert rates[aware] > 1.5 * rates[equal]
    text = format_plan(aware, aware.plan(3), "test")
    assert "shares of the load: profile: rank 1" in text
    alike = Planner(make_profile(FAST, FAST, FAST), MODEL, RunConfig(), Wish((Lengths(1, 255),)))
    assert "shares of the load" not in format_plan(alike, alike.plan(3), "test")


def test_simulate_takes_a_link_for_each_worker(tmp_path, capsys) -> None:
    command = ["simulate", "--model", "llama-2-7b", "--profile", "h100-epyc7452", "--length", "40", "--r-workers", "3"]
    command += ["--max-batch-size", "48", "--given-kv", "--json", str(tmp_path / "out.json")]
    rates = {}
    for weights in ("equal", "auto"):
        links = ["--link-bandwidth", "1G,1G,200M", "--r-worker-weights", weights]
        assert run_command([*command, *links]) == 0
        rates[weights] = json.loads((tmp_path / "out.json").read_text())["figures"]["tokens_per_s"]
    said = capsys.readouterr().out
    assert "replaced: --link-bandwidth 1.07, 1.07, 0.21 GB/s" in said
    assert "shares of the load: " in said
    assert rates["auto"] >= 1.5 * rates["equal"]
    assert run_command([*command, "--latency", "1e-6,2e-6"]) == 2
    assert "one for each R-worker: 3" in capsys.readouterr().err


def test_a_profile_of_other_workers_is_refused(tmp_path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, make_profile(FAST, FAST, FAST / 5))
    config = RunConfig(profile=str(path))
    costs = start_costs(config, MODEL, (1, 2, 3))
    assert costs[3].row_s == pytest.approx(5 * costs[1].row_s)
    assert costs[1].row_s == pytest.approx(MODEL.num_layers * ROW_BYTES / FAST)
    with pytest.raises(ConfigError, match="3 R-workers, and this job has 2"):
        start_costs(config, MODEL, (1, 2))
