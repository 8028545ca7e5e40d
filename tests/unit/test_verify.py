"""Which requests are recomputed, and what is said of the outcome; how far a choice is from a near-tie."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.s_part.margins import choice_margin
from fastdecode_hpc.s_part.sampler import choose, random_numbers
from fastdecode_hpc.sequence import SamplingParams, Sequence
from fastdecode_hpc.verify import (
    TOLERANCE_NATS,
    Comparison,
    Difference,
    Reservoir,
    Verdict,
    Verification,
    tolerance_nats,
)

VOCAB = 40


def sample(indices: list[int], size: int, seed: int) -> list[int]:
    reservoir: Reservoir[int] = Reservoir(size, seed)
    for index in indices:
        reservoir.offer(index, index)
    return reservoir.items


def test_the_sample_is_uniform_and_does_not_depend_on_the_order() -> None:
    count, size, rounds = 40, 8, 3000
    hits = np.zeros(count)
    for seed in range(rounds):
        chosen = sample(list(range(count)), size, seed)
        assert len(set(chosen)) == size and chosen == sorted(chosen)
        hits[chosen] += 1
    share = size / count
    # 5 standard deviations of a binomial count: early and late ones are as likely as each other
    assert (np.abs(hits / rounds - share) < 5 * math.sqrt(share * (1 - share) / rounds)).all()
    shuffled = random.Random(1).sample(range(count), count)
    assert sample(shuffled, size, 7) == sample(list(range(count)), size, 7) != sample(shuffled, size, 8)


def test_the_sample_holds_what_there_is_and_never_more_than_asked() -> None:
    assert sample([5, 2, 9], 10, 0) == [2, 5, 9]
    assert sample([5, 2, 9], 0, 0) == []
    reservoir: Reservoir[str] = Reservoir(3, 2**64 - 1)
    for index in range(1000):
        reservoir.offer(index, "completion")
        assert len(reservoir.items) <= 3


def difference(position: int, margin: float) -> Difference:
    return Difference(position, 11, 12, -2.5, -0.5, margin)


def verdict(index: int, *margins: float, logprob_error: float | None = None, choice: int = 0) -> Verdict:
    found = Comparison(64, logprob_error=logprob_error)
    for position, margin in enumerate(margins, start=3):
        found.add(difference(position, margin))
    return Verdict(index, f"r{index}", choice, found)


def test_a_comparison_keeps_the_first_and_the_largest_difference() -> None:
    found = verdict(0, 1e-4, 2.0, 0.5).comparison
    assert (found.num_differing, found.margin) == (3, 2.0)
    assert found.first == difference(3, 1e-4) and found.largest == difference(4, 2.0)
    assert verdict(0).comparison.margin == 0 and verdict(0).is_exact
    for error in (1e-4, 3e-3, 2e-3):
        found.add_logprob_error(error)
    assert found.logprob_error == 3e-3


def test_what_is_said_where_all_agree() -> None:
    found = Verification(1e-3, [verdict(3), verdict(8, choice=0), verdict(8, choice=1)])
    assert list(found.lines()) == [(False, "verify: 2 requests, 192 tokens: all agree")]
    assert found.as_dict() == {
        "requests": 2, "tokens": 192, "tolerance": 1e-3, "wrong_requests": 0, "differing_tokens": 0,
        "largest_margin": 0.0, "logprob_error": None, "differences": [],
    }  # fmt: skip
    assert list(Verification(1e-3).lines()) == [(False, "verify: no request was recomputed")]


def test_near_ties_are_told_but_no_warning() -> None:
    (line, summary) = Verification(1e-3, [verdict(3), verdict(8, 1e-4, 4e-4, logprob_error=2e-4)]).lines()
    assert line[0] is summary[0] is False
    assert line[1] == (
        "verify: request 8 (choice 0, custom_id 'r8'): 2 of 64 tokens differ, the first at position 3: token 11, "
        "reference 12 (log-probabilities -2.5000 and -0.5000), margin 0.0001 nats; the largest margin at position 4: "
        "token 11, reference 12 (log-probabilities -2.5000 and -0.5000), margin 0.0004 nats; recorded "
        "log-probabilities are off by up to 0.0002 nats"
    )
    assert "all agree, but for 2 near-ties (largest margin 0.0004 nats; rounding explains up to 0.001)" in summary[1]


def test_corruption_is_a_warning_and_survives_json() -> None:
    found = Verification(1e-3, [verdict(3), verdict(4, 3.0), verdict(5, math.inf), verdict(6, logprob_error=0.2)])
    *lines, summary = found.lines()
    assert [is_warning for is_warning, _ in lines] == [True] * 3
    assert summary[0] and "WARNING: 3 of 4 requests differ by more than rounding explains (0.001 nats)" in summary[1]
    status = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (status["wrong_requests"], status["largest_margin"], status["logprob_error"]) == (3, None, 0.2)
    assert [entry["index"] for entry in status["differences"]] == [4, 5, 6]
    assert status["differences"][0]["first"]["position"] == 3
    assert status["differences"][0]["first"]["margin"] == 3.0


def test_the_tolerance_is_that_of_the_coarsest_type() -> None:
    assert tolerance_nats(["fp32", "fp32", "fp32"]) == 1e-3
    assert tolerance_nats(["fp32", "fp16", "int8", "int4"]) == TOLERANCE_NATS["int4"]
    assert sorted(TOLERANCE_NATS, key=TOLERANCE_NATS.__getitem__)[:2] == ["fp32", "fp16"]


# ---- margins -----------------------------------------------------------------------------------------

SAMPLED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 4, VOCAB, 1000]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def chosen(logits: torch.Tensor, params: SamplingParams, seed: int = 0) -> int:
    seq = Sequence(0, 0, [1], params, 4, seed=seed)
    return int(choose(logits[None].clone(), [seq], lambda x: x).rows[0, 0])


def number(seed: int) -> float:
    """What the first token of a row with this seed is drawn with."""
    return float(random_numbers([Sequence(0, 0, [1], SamplingParams(), 1, seed=seed)])[0])


def margin(logits: torch.Tensor, params: SamplingParams, token: int, seed: int = 0, at_least: float = 0.0) -> float:
    return choice_margin(logits, params, number(seed), token, at_least=at_least)


def test_the_margin_of_a_greedy_row_is_the_distance_to_the_best() -> None:
    logits = torch.tensor([1.0, 4.0, 3.5, -2.0])
    assert [margin(logits, SamplingParams(), token) for token in range(4)] == [3.0, 0.0, 0.5, 6.0]


@given(SAMPLED, st.integers(0, 10_000), st.sampled_from([1e-4, 0.01, 0.3, 2.0]))
@settings(max_examples=150, deadline=None)
def test_what_an_error_of_the_logits_makes_the_sampler_choose_has_no_larger_margin(
    params: SamplingParams, seed: int, error: float
) -> None:
    logits = logits_of(seed)
    assert margin(logits, params, chosen(logits, params, seed), seed) < 1e-4
    generator = torch.Generator().manual_seed(seed)
    even = torch.rand(VOCAB, generator=generator) - 0.5
    for noise in (even, even.sign() / 2):
        token = chosen(logits + error * noise, params, seed)  # differences of two logits are off by up to `error`
        assert margin(logits, params, token, seed) <= 1.01 * error + 1e-4


@given(st.integers(0, 10_000), st.integers(0, VOCAB - 1), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=60, deadline=None)
def test_without_filters_the_margin_is_exact(seed: int, token: int, temperature: float) -> None:
    logits, params = logits_of(seed), SamplingParams(temperature=temperature)
    found, place = margin(logits, params, token, seed), torch.arange(VOCAB)
    if chosen(logits, params, seed) == token:
        assert found < 1e-4
        return
    is_below = token < chosen(logits, params, seed)  # so the sum up to it must grow, or that before it shrink
    shape = torch.where(place <= token if is_below else place >= token, 0.5, -0.5)
    short, enough = (chosen(logits + factor * found * shape, params, seed) for factor in (0.98, 1.02))
    assert (short > token >= enough) if is_below else (short < token <= enough)


def test_what_only_a_filter_keeps_out_is_a_near_tie_at_its_edge() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    seed = next(seed for seed in range(1000) if number(seed) > 0.95)
    inside, outside = (SamplingParams(temperature=1.0, top_p=top_p) for top_p in (0.9001, 0.8999))
    assert chosen(logits, inside, seed) == 2 and chosen(logits, outside, seed) == 1
    assert margin(logits, outside, 2, seed) < 2e-3  # its log-probability is 1.1 below the chosen one's
    assert margin(logits, inside, 1, seed) < 2e-3
    assert margin(logits, SamplingParams(temperature=1.0, top_p=0.5), 2, seed) > 1


@pytest.mark.parametrize("params", [SamplingParams(temperature=1e-4), SamplingParams(temperature=1.0, top_k=1)])
def test_sampling_that_always_takes_the_best_has_greedy_margins(params: SamplingParams) -> None:
    logits = torch.tensor([1.0, 4.0, 3.5, -2.0])
    for token in range(4):
        assert margin(logits, params, token) == pytest.approx(
            margin(logits, SamplingParams(), token), rel=0.01, abs=2e-3
        )


def test_a_margin_below_the_one_asked_for_is_not_searched() -> None:
    logits, params = logits_of(1), SamplingParams(temperature=1.0)
    found = margin(logits, params, 5)
    assert margin(logits, params, 5, at_least=2 * found) == 2 * found
    assert margin(logits, params, 5, at_least=found / 3) == pytest.approx(found, rel=0.01)
