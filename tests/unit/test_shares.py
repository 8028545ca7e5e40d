"""Shares of R-workers: from what they cost, and what these costs are found to be."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.schedule.shares import EVERY, MEASURED, PROFILE, TOLD, Shares
from fastdecode_hpc.schedule.speeds import (
    MEMORY,
    MIN_SECONDS,
    MIN_STEPS,
    LinkSpeeds,
    Turns,
    WorkerSpeeds,
    _shares_of_turn,
    link_s,
)
from fastdecode_hpc.schedule.worker_costs import WorkerCost, deal_rows, ideal_shares, told_costs
from fastdecode_hpc.timing import RankTimes, StepTimes
from fastdecode_hpc.transport.base import StepReport
from fastdecode_hpc.transport.clocks import CLOCK_DRIFT, Clocks
from fastdecode_hpc.transport.link_times import link_times

NUM_LAYERS, BACK = 4, 0.5
costs_of_one = st.builds(WorkerCost, st.floats(1e-6, 1e-4), st.floats(0, 1e-3), st.floats(0, 1e-2))


def seconds(cost: WorkerCost, rows: float, context: float) -> float:
    return cost.link_s(rows) + rows * context * cost.token_s if rows else 0.0


# ---- dealing rows


@given(st.lists(costs_of_one, min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 50))
@settings(max_examples=80)
def test_rows_are_dealt_out_as_well_as_by_trying_all_ways(costs, num_rows: int, context: int) -> None:
    rows = deal_rows(costs, num_rows, context)
    assert rows.sum() == num_rows and rows.min() >= 0
    best = min(
        max(seconds(cost, count, context) for cost, count in zip(costs, way, strict=True))
        for way in itertools.product(range(num_rows + 1), repeat=len(costs))
        if sum(way) == num_rows
    )
    mine = max(seconds(cost, count, context) for cost, count in zip(costs, rows.tolist(), strict=True))
    one_row = max(cost.row_s + context * cost.token_s for cost in costs)
    assert best <= mine * (1 + 1e-9) and mine <= best + one_row * (1 + 1e-9)  # rows are whole


@given(st.lists(st.tuples(costs_of_one, st.integers(0, 8)), min_size=1, max_size=3), st.data(), st.integers(1, 50))
@settings(max_examples=150)
def test_rows_that_memory_allows_are_dealt_out_as_well_as_by_trying_all_ways(workers, data, context: int) -> None:
    costs, most = [cost for cost, _ in workers], [count for _, count in workers]
    num_rows = data.draw(st.integers(0, sum(most)))
    rows = deal_rows(costs, num_rows, context, np.array(most))
    assert rows.sum() == num_rows and (rows >= 0).all() and (rows <= most).all()
    best = min(
        max(seconds(cost, count, context) for cost, count in zip(costs, way, strict=True))
        for way in itertools.product(*(range(count + 1) for count in most))
        if sum(way) == num_rows
    )
    mine = max(seconds(cost, count, context) for cost, count in zip(costs, rows.tolist(), strict=True))
    one_row = max(cost.row_s + context * cost.token_s for cost in costs)
    assert best <= mine * (1 + 1e-9) and mine <= best + one_row * (1 + 1e-9)


@given(st.integers(0, 40), st.integers(1, 7), costs_of_one)
def test_equal_workers_get_rows_in_turn(num_rows: int, num_workers: int, cost: WorkerCost) -> None:
    counts = np.bincount(np.arange(num_rows) % num_workers, minlength=num_workers)
    assert deal_rows([cost] * num_workers, num_rows, 100).tolist() == counts.tolist()


def test_all_that_have_rows_take_equally_long() -> None:
    costs = {1: WorkerCost(1e-6, 1e-4, 1e-3), 2: WorkerCost(2e-6, 5e-4, 0.0), 3: WorkerCost(1e-6, 1e-4, 1.0)}
    shares = ideal_shares(costs, 60, 100)
    assert shares[3] == 0  # its latency alone is longer than what the others take
    assert shares[1] + shares[2] == pytest.approx(1)
    assert seconds(costs[1], 60 * shares[1], 100) == pytest.approx(seconds(costs[2], 60 * shares[2], 100))


def test_a_link_five_times_slower_gets_a_fifth_where_only_links_matter() -> None:
    costs = {1: WorkerCost(1e-12, 1.0), 2: WorkerCost(1e-12, 1.0), 3: WorkerCost(1e-12, 5.0)}
    assert ideal_shares(costs, 1000, 10)[3] == pytest.approx(1 / 11, rel=1e-6)


def test_shares_in_numbers_are_costs_the_other_way_round() -> None:
    assert told_costs("auto", (1, 2)) == told_costs("equal", (1, 2)) == {}
    assert ideal_shares(told_costs("1,1,2", (1, 2, 3)), 40, 7) == pytest.approx({1: 0.25, 2: 0.25, 3: 0.5})
    with pytest.raises(ConfigError, match="a number for each R-worker: 3"):
        told_costs("1,2", (1, 2, 3))


def test_a_profile_goes_with_shares_that_are_measured() -> None:
    with pytest.raises(ConfigError, match="leave one of the two out"):
        RunConfig(profile="p.json", r_worker_weights="1,2")


# ---- what is seen of a link


def seen(posted, asked, arrived, before=0.0, latency=0.0) -> float:
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, float)) for x in (posted, asked, arrived, before)))
    return float(link_s(*columns, latency))


def test_a_worker_that_waits_sees_when_a_message_comes() -> None:
    assert seen(10.0, 9.0, 12.0) == pytest.approx(2)
    assert seen(10.0, 11.0, 12.0) == pytest.approx(2)  # it began to wait on the way
    assert seen([10.0, 20.0, 30.0], [9.0, 19.0, 29.0], [12.0, 25.0, 33.0]) == pytest.approx(3)


def test_a_worker_that_was_busy_sees_nothing() -> None:
    assert math.isnan(seen(10.0, 15.0, 15.001))
    assert seen([10.0, 20.0], [15.0, 19.0], [15.0, 21.0]) == pytest.approx(1)  # of the other layer


def test_a_message_that_waited_for_the_one_before_took_no_longer() -> None:
    assert seen(10.0, 15.2, 20.0, before=15.0) == pytest.approx(5)
    # Two on the way at a time, on a link that is late by 5: the second one took no less.
    assert seen(12.5, 15.0, 17.5, before=15.0, latency=5.0) == pytest.approx(5)


def test_columns_of_many_workers_are_seen_at_once() -> None:
    posted, asked = np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([[0.0, 5.0], [0.0, 5.0]])
    found = link_s(posted, asked, np.array([[2.0, 5.0], [3.0, 5.0]]), np.zeros((2, 2)), 0.0)
    assert found[0] == pytest.approx(1) and math.isnan(found[1])


def report(delay: float) -> StepReport:
    times = np.arange(1.0, 4.0)
    return StepReport(0.0, 0.0, 0.0, 0, False, times - 0.5, times + delay, times + delay + 0.1, times - 0.6)


CLEAR: list[set[int]] = [set()] * 3  # of each layer: no prompt K/V under way


def test_layers_whose_rows_shared_the_link_with_prompt_kv_are_left_out() -> None:
    reports, posted = {1: report(1e-3), 2: report(20e-3)}, np.arange(1.0, 4.0)
    reports[2].t_arrived[:2] += 0.1
    latencies = doubts = dict.fromkeys(reports, 1e-5)
    assert link_times(posted, reports, CLEAR, latencies, doubts)[2] == pytest.approx(0.12)
    found = link_times(posted, reports, [{2}, {2}, set()], latencies, doubts)
    assert found == pytest.approx({1: 1e-3, 2: 20e-3})
    assert link_times(posted, reports, [{1, 2}, {1, 2}, {1}], latencies, doubts) == pytest.approx({2: 20e-3})


def test_links_are_told_as_far_as_clocks_can_tell() -> None:
    reports, posted = {1: report(1e-3), 2: report(20e-3)}, np.arange(1.0, 4.0)
    latencies = dict.fromkeys(reports, 1e-5)
    assert link_times(posted, reports, CLEAR, latencies, {1: 1e-5, 2: 1e-5}) == pytest.approx({1: 1e-3, 2: 20e-3})
    # A fifth of the longest is 4 ms: the clock of rank 1 can't say any more.
    assert link_times(posted, reports, CLEAR, latencies, {1: 5e-3, 2: 1e-5}) == pytest.approx({2: 20e-3})
    assert link_times(posted, {}, CLEAR, {}, {}) == {}


def test_clocks_of_one_host_stay_as_they_are_and_others_drift() -> None:
    clocks = Clocks([(0.0, 0.0), (3e-6, 20e-6), (5000.0, 20e-6)], 100.0)
    assert [clocks.drifts(rank) for rank in range(3)] == [False, False, True]
    assert clocks.doubt(1, 3700.0) == 20e-6
    assert clocks.doubt(2, 200.0) == pytest.approx(20e-6 + 100 * CLOCK_DRIFT)


@given(st.floats(-CLOCK_DRIFT, CLOCK_DRIFT), st.floats(10, 1e6), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_clocks_that_drift_for_hours_stay_within_their_doubt(drift: float, offset: float, seed: int) -> None:
    """A question a minute; one in ten is answered at once, the others wait for up to 20 ms, each way."""
    random, away = np.random.default_rng(seed), lambda now: offset + drift * now
    clocks = Clocks([(0.0, 0.0), (away(0.0) + 1e-4, 2e-4)], 0.0)
    for minute in range(1, 12 * 60):
        now = 60.0 * minute
        there, back = (20e-6 + 20e-3 * random.uniform() * (random.uniform() > 0.1) for _ in range(2))
        clocks.take(1, away(now) + (there - back) / 2, (there + back) / 2, now)
        assert abs(clocks.offsets_s[1] - away(now)) <= clocks.doubt(1, now) + 1e-8
    assert clocks.doubt(1, now) < 50e-3  # after 12 hours; without new questions more than 2 s
    assert clocks.latencies_s[1] <= 2e-4


@given(st.floats(-CLOCK_DRIFT, CLOCK_DRIFT), st.floats(0, 30), st.floats(0, 1e-4), st.floats(0, 1e-4))
def test_an_answer_that_was_held_tells_no_more_than_the_clocks_allow(
    drift: float, held: float, there: float, way_back: float
) -> None:
    """While a rank is busy for long its clock may run ahead by more than a message takes."""
    offset = 5000.0
    clocks, away = Clocks([(0.0, 0.0), (offset, 1.0)], 0.0), lambda now: offset + (1 + drift) * now
    clocks.answered(1, 0.0, away(there), away(there + held), there + held + way_back)
    assert clocks.latencies_s[1] >= 0
    assert clocks.errors_s[1] >= 0
    middle = (there + held + way_back) / 2
    assert abs(clocks.offsets_s[1] - (away(middle) - middle)) <= clocks.errors_s[1] + 1e-8


def test_a_link_that_is_well_again_gets_its_share_back() -> None:
    """However long it was slow, where its times go on to be seen."""
    shares = make_shares()
    for slow, least, most in ((5e-4, 0.0, 0.15), (1e-4, 0.32, 0.34)):
        for _ in range(4000):
            rows = [max(1, round(share * 60)) for share in shares.ideal().values()]
            links = (1e-4, 1e-4, slow)
            shares.observe(step(*((10 * n, n, 1e-5 * n, n * row_s) for n, row_s in zip(rows, links, strict=True))))
        assert least <= shares.ideal()[3] <= most


# ---- speeds


def test_speeds_need_enough_of_every_worker_and_outlast_steps_without_rows() -> None:
    speeds = WorkerSpeeds(2)
    for _ in range(10):
        speeds.add(np.array([[1000.0, 0.0]]), np.array([[0.1, 0.0]]))
    assert speeds.token_s() == []
    for _ in range(10):
        speeds.add(np.array([[0.0, 1000.0]]), np.array([[0.0, 0.2]]))
    before = speeds.token_s()
    assert before == pytest.approx([1e-4, 2e-4])
    for _ in range(5000):  # one without rows for long is not forgotten: its share would come and go
        speeds.add(np.array([[1000.0, 0.0]]), np.array([[0.1, 1e-6]]))
    assert speeds.token_s()[1] == pytest.approx(before[1])


def add_link(links: LinkSpeeds, rows: list[float], seconds: list[float]) -> None:
    links.add(np.array([rows], float), np.array([seconds]))


@given(st.floats(0, 1e-3), st.floats(1e-6, 1e-3), st.integers(10, 100))
@settings(max_examples=40)
def test_latency_and_rate_are_told_apart_where_rows_differ(latency: float, row_s: float, rows: int) -> None:
    links = LinkSpeeds([0.0])
    for step in range(2 * MIN_STEPS):
        count = rows if step % 2 else 3 * rows
        add_link(links, [count], [latency + count * row_s])
    assert links.known()[0] == pytest.approx((latency, row_s), rel=1e-3, abs=1e-8)


def test_without_differing_rows_the_latency_is_the_one_that_is_known() -> None:
    links = LinkSpeeds([1e-3, 0.0])
    for _ in range(MIN_STEPS):
        add_link(links, [10, 10], [3e-3, math.nan])
    assert links.known() == {0: pytest.approx((1e-3, 2e-4))}  # nothing was seen of the other


def test_a_late_link_that_is_not_slow_keeps_its_rows() -> None:
    """Its messages take 5 ms whatever is in them; the fewer rows it got, the slower it would look by the row."""
    links, rows, latencies = LinkSpeeds([0.0, 0.0]), [20.0, 20.0], (0.0, 5e-3)
    for _ in range(3000):
        add_link(links, rows, [late + count * 1e-4 for late, count in zip(latencies, rows, strict=True)])
        known = links.known()
        if len(known) == 2:
            costs = {place: WorkerCost(1e-6, row_s, late) for place, (late, row_s) in known.items()}
            wanted = ideal_shares(costs, 120, 100)
            # Sequences end slowly.
            rows = [count + 0.02 * (120 * wanted[place] - count) for place, count in enumerate(rows)]
    late = (120 * 2e-4 - 5e-3) / 2 / 2e-4 / 120  # where 5 ms + rows * 0.2 ms equal the other's rows * 0.2 ms
    assert rows[1] / 120 == pytest.approx(late, abs=0.06)


def plain_mean(figures: list[float]) -> float:
    total = 0.0
    for figure in figures:
        total = total * MEMORY + figure
    return total


figures_of_one = st.tuples(st.integers(0, 50), st.one_of(st.just(math.nan), st.floats(1e-6, 1.0)))


@given(st.lists(st.tuples(figures_of_one, figures_of_one), min_size=MIN_STEPS, max_size=80), st.data())
@settings(max_examples=60, deadline=None)
def test_steps_taken_together_tell_what_they_tell_one_by_one(steps, data) -> None:
    """Of attention and of links, whatever was seen in each step, however the steps are bundled."""
    rows, seconds = np.moveaxis(np.array(steps, float), 2, 0)
    speeds, links, start = WorkerSpeeds(2), LinkSpeeds([0.0, 0.0]), 0
    while start < len(steps):
        stop = start + data.draw(st.integers(1, 40))
        speeds.add(rows[start:stop], np.nan_to_num(seconds[start:stop], nan=0.25))
        links.add(rows[start:stop], seconds[start:stop])
        start = stop
    worked = [[(n, 0.25 if math.isnan(t) else t) for n, t in (step[place] for step in steps) if n] for place in (0, 1)]
    means = [
        (plain_mean([t for _, t in own]), plain_mean([n for n, _ in own]), sum(t for _, t in own)) for own in worked
    ]
    wanted = [t / n for t, n, _ in means] if min(total for *_, total in means) >= MIN_SECONDS else []
    assert speeds.token_s() == pytest.approx(wanted)
    known = links.known()
    for place in (0, 1):
        own = [(n, t) for n, t in (step[place] for step in steps) if n and not math.isnan(t)]
        assert (place in known) == (len(own) >= MIN_STEPS)
        if place in known:
            weight, mean = plain_mean([1.0] * len(own)), plain_mean([t for _, t in own])
            late, row_s = known[place]
            assert late + row_s * plain_mean([n for n, _ in own]) / weight == pytest.approx(mean / weight)
            assert late >= 0 and row_s >= 0


def plain_ratio(rows: list[float], seconds: list[float]) -> float:
    seen = [(n, sum(rows[:place]), t) for place, (n, t) in enumerate(zip(rows, seconds, strict=True)) if n and t == t]
    row_s = min((t / n for n, _, t in seen), default=0.0)
    ratios = sorted(t / (row_s * (before + n)) for n, before, t in seen if before)
    return ratios[(len(ratios) - 1) // 2] if ratios and len(seen) > 1 else math.inf


def test_steps_that_do_not_tell_of_turns_are_not_kept() -> None:
    """A run with a single R-worker may go on for days."""
    turns = Turns()
    for _ in range(100):
        assert turns.take(np.full((32, 1), 8.0), np.full((32, 1), 1e-3)) == []
    assert turns._kept == []


@given(st.lists(st.tuples(figures_of_one, figures_of_one, figures_of_one), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_how_messages_take_turns_is_told_of_all_steps_at_once(steps) -> None:
    rows, seconds = np.moveaxis(np.array(steps, float), 2, 0)
    wanted = [plain_ratio(n, t) for n, t in zip(rows.tolist(), seconds.tolist(), strict=True)]
    assert _shares_of_turn(rows, seconds).tolist() == pytest.approx(wanted)


# ---- shares


def step(*ranks: tuple[float, float, float, float]) -> StepTimes:
    """Tokens, rows, seconds of attention and of q, k, v of a layer on their way, for ranks 1, 2, ..."""
    times = StepTimes(0, 0, 0.0, num_rows=round(sum(rank[1] for rank in ranks)), load_tokens=0, prefill_tokens=0)
    times.ranks = {
        number: RankTimes(t_r_part, 0.0, 0.0, 0, round(tokens), num_rows=round(rows), t_link=t_link)
        for number, (tokens, rows, t_r_part, t_link) in enumerate(ranks, start=1)
    }
    return times


def make_shares(text: str = "auto", owners: tuple[int, ...] = (1, 2, 3), **options) -> Shares:
    return Shares(text, owners, num_layers=NUM_LAYERS, back_ratio=BACK, **options)


def test_links_that_are_alike_change_nothing() -> None:
    """As without links: a share follows attention alone."""
    with_links, without = make_shares(), make_shares()
    for count in range(100):
        noise = 1 + 0.2 * (count % 2)
        rows = [(1000, 10, t_r_part, 1e-2 * noise) for t_r_part in (0.1, 0.1, 0.2)]
        with_links.observe(step(*rows))
        without.observe(step(*((*row[:3], math.nan) for row in rows)))
    assert with_links.costs == without.costs
    assert with_links.costs[1].row_s == 0
    assert with_links.ideal() == pytest.approx({1: 0.4, 2: 0.4, 3: 0.2}, rel=1e-6)
    assert with_links.source == MEASURED
    assert "rank 3 20.0% (attention 2.0 times as long as the fastest)" in with_links.describe()


def test_equal_workers_say_nothing() -> None:
    shares = make_shares()
    assert shares.describe() == ""
    for _ in range(100):
        shares.observe(step(*[(1000, 10, 0.1, 1e-3)] * 3))
    assert shares.describe() == ""


def test_a_slow_link_costs_its_rows_both_ways_in_all_layers() -> None:
    shares = make_shares()
    for _ in range(MIN_STEPS):
        shares.observe(step((1000, 10, 0.1, 1e-3), (1000, 10, 0.1, 1e-3), (1000, 10, 0.1, 5e-3)))
    assert {rank: cost.row_s for rank, cost in shares.costs.items()} == pytest.approx(
        {1: NUM_LAYERS * 1e-4 * 1.5, 2: NUM_LAYERS * 1e-4 * 1.5, 3: NUM_LAYERS * 5e-4 * 1.5}
    )
    assert shares.costs[1].token_s == pytest.approx(1e-4)
    assert "rank 3 " in shares.describe() and "(link 5.0 times as long as the fastest)" in shares.describe()
    assert shares.ideal()[3] < 0.32 < shares.ideal()[1]


def test_a_link_that_was_not_seen_counts_as_the_fastest() -> None:
    shares = make_shares()
    for _ in range(MIN_STEPS):
        shares.observe(step((1000, 10, 0.1, 1e-3), (1000, 10, 0.1, math.nan), (1000, 10, 0.1, 5e-3)))
    assert shares.costs[1].row_s == shares.costs[2].row_s < shares.costs[3].row_s
    shares = make_shares()
    for _ in range(MIN_STEPS):  # one alone can't be compared
        shares.observe(step((1000, 10, 0.1, math.nan), (1000, 10, 0.1, math.nan), (1000, 10, 0.1, 5e-3)))
    assert not any(cost.row_s for cost in shares.costs.values())


def test_an_unseen_link_is_what_the_profile_says() -> None:
    shares = make_shares(start={1: WorkerCost(1e-4, 1e-3), 2: WorkerCost(1e-4, 1e-3), 3: WorkerCost(1e-4, 1e-3, 1.0)})
    assert shares.ideal()[3] == 0
    for _ in range(MIN_STEPS):
        shares.observe(step((1000, 10, 0.1, 1e-3), (1000, 10, 0.1, 1e-3), (0, 0, 0.0, math.nan)))
    assert shares.costs[3].step_s == 1.0 and shares.ideal()[3] == 0


@pytest.mark.parametrize("num_workers", [2, 3, 8, 64])
def test_links_alike_behind_one_adapter_stay_alike(num_workers: int) -> None:
    """Messages leave one after the other, so the last is there last; the shares must not follow that."""
    random, ranks = np.random.default_rng(0), range(1, num_workers + 1)
    shares = make_shares(owners=tuple(ranks))
    for _ in range(2000):
        rows = [max(1, round(share * 20 * num_workers)) for share in shares.ideal().values()]
        arrived = 2e-6 + 1e-5 * np.cumsum(rows) * random.lognormal(0, 0.05, num_workers)
        shares.observe(step(*((100 * n, n, 1e-3 * n, t) for n, t in zip(rows, arrived.tolist(), strict=True))))
    assert list(shares.ideal().values()) == pytest.approx([1 / num_workers] * num_workers, rel=0.1)


@pytest.mark.parametrize("slow", [2, 5, 8])
def test_a_slow_link_is_seen_among_those_behind_one_adapter(slow: int) -> None:
    shares = make_shares(owners=tuple(range(1, 9)))
    for _ in range(2000):
        rows = [max(1, round(share * 160)) for share in shares.ideal().values()]
        own = [1e-4 * n * (20 if rank == slow else 0) for rank, n in enumerate(rows, start=1)]
        arrived = (1e-4 * np.cumsum(rows) + own).tolist()
        shares.observe(step(*((10 * n, n, 1e-5 * n, t) for n, t in zip(rows, arrived, strict=True))))
    found = shares.ideal()
    assert found[slow] < 0.5 / 8 and all(share > 0.9 / 8 for rank, share in found.items() if rank != slow)


def test_what_has_been_measured_stays_known_where_steps_become_short() -> None:
    shares = make_shares()
    for _ in range(1000):
        shares.observe(step(*[(1000, 10, 2e-3, math.nan)] * 2, (1000, 10, 4e-3, math.nan)))
    assert shares.source == MEASURED and shares.has_seconds
    for _ in range(5000):
        shares.observe(step(*[(10, 1, 2e-5, math.nan)] * 2, (10, 1, 4e-5, math.nan)))
        assert set(shares.costs) == {1, 2, 3}
    assert shares.costs[3].token_s == pytest.approx(2 * shares.costs[1].token_s)


def test_attention_too_short_to_be_compared_counts_the_same_everywhere() -> None:
    shares = make_shares()
    for count in range(MIN_STEPS):
        shares.observe(step((10, 10, 1e-6 * (count % 3), 1e-3), (10, 10, 1e-6, 1e-3), (10, 10, 1e-6, 5e-3)))
    assert len({cost.token_s for cost in shares.costs.values()}) == 1
    assert shares.ideal()[3] == pytest.approx(1 / 11, rel=0.02)


def test_links_near_the_border_do_not_go_back_and_forth() -> None:
    shares, states = make_shares(), []
    for count in range(4000):  # swings of more than its mean between 1.4 and 1.6 times
        slow = (1.42, 1.6)[count // 1000 % 2] * 1e-3
        shares.observe(step((1000, 10, 0.1, 1e-3), (1000, 10, 0.1, 1e-3), (1000, 10, 0.1, slow)))
        states.append(any(cost.row_s for cost in shares.costs.values()))
    assert sum(a != b for a, b in itertools.pairwise(states)) == 1


def test_a_profile_counts_until_something_is_measured() -> None:
    start = {1: WorkerCost(1e-4, 1e-3), 2: WorkerCost(1e-4, 1e-3), 3: WorkerCost(1e-4, 5e-3)}
    shares = make_shares(start=start)
    assert shares.source == PROFILE and shares.costs == start
    for _ in range(MIN_STEPS):  # in truth the first one is slow
        shares.observe(step((1000, 10, 0.1, 5e-3), (1000, 10, 0.1, 1e-3), (1000, 10, 0.1, 1e-3)))
    assert shares.source == MEASURED
    assert shares.costs[1].row_s > 2 * shares.costs[3].row_s


def test_a_profile_of_like_links_is_about_attention_alone() -> None:
    shares = make_shares(start={rank: WorkerCost(1e-4 * rank, 1e-3) for rank in (1, 2, 3)})
    assert shares.costs == {rank: WorkerCost(1e-4 * rank) for rank in (1, 2, 3)}


@pytest.mark.parametrize("text", ["equal", "1,1,2"])
def test_what_was_told_is_not_measured(text: str) -> None:
    shares = make_shares(text, start={rank: WorkerCost(1.0 * rank) for rank in (1, 2, 3)})
    before = dict(shares.costs)
    for _ in range(100):
        shares.observe(step((1000, 10, 0.1, 1e-3), (1000, 10, 0.5, 1e-3), (1000, 10, 0.1, 5e-3)))
    assert shares.costs == before
    assert (shares.source == TOLD) == (text != "equal")
    assert "(" not in shares.describe()


def test_what_was_observed_last_counts_when_shares_are_asked_for() -> None:
    """Also in a run that ends between two looks at what steps told."""
    shares = make_shares()
    for _ in range(EVERY + 5):
        shares.observe(step((1000, 10, 0.1, math.nan), (1000, 10, 0.1, math.nan), (1000, 10, 0.1, math.nan)))
    before = shares.costs
    assert len({round(cost.token_s, 9) for cost in before.values()}) == 1
    for _ in range(5):
        shares.observe(step((1000, 10, 0.1, math.nan), (1000, 10, 0.1, math.nan), (1000, 10, 9.0, math.nan)))
    assert shares.costs is before
    assert shares.ideal()[3] < 0.2 and shares.costs is not before


@pytest.mark.parametrize("num_steps", [1, 2, 4, 8, 16])
def test_the_first_steps_count_soon(num_steps: int) -> None:
    """Those of a large batch take a second each, and sequences start all the while."""
    shares = make_shares()
    for _ in range(num_steps):
        shares.observe(step((1000, 10, 1.0, math.nan), (1000, 10, 1.0, math.nan), (1000, 10, 2.0, math.nan)))
    assert shares.costs[3].token_s == pytest.approx(2 * shares.costs[1].token_s)
