"""Sampling against plain NumPy restatements, and its independence of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.s_part.sampler import Sampled, _filter, choose, pack, uniform, unpack
from fastdecode_hpc.sequence import SamplingParams, Sequence

VOCAB = 50


def put(values: torch.Tensor) -> torch.Tensor:
    return values


def sample(logits: torch.Tensor, seqs: list[Sequence]) -> list[Sampled]:
    """All rows in two blocks, as the worker does with many rows."""
    half = len(seqs) // 2
    blocks = [choose(logits[rows], seqs[rows], put) for rows in (slice(0, half), slice(half, None)) if seqs[rows]]
    return unpack(pack(blocks).tolist(), seqs)


def make_seq(seq_id: int = 0, *, seed: int = 0, output: tuple[int, ...] = (), **settings_) -> Sequence:
    return Sequence(seq_id, seq_id, [3, 4], SamplingParams(**settings_), 10, seed=seed, output_ids=list(output))


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def expected_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The filters one after another, as their definitions say, in float64."""
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    total, kept = 0.0, np.zeros_like(p)
    for token in order:
        if total >= params.top_p:
            break
        kept[token] = p[token]
        total += p[token]
    kept[kept < params.min_p * kept.max()] = 0
    return kept / kept.sum()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 10, VOCAB, 1000]),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21]),
)


@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_filters_match_their_definitions(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(len(params), seed)
    seqs = [Sequence(i, i, [1], p, 4) for i, p in enumerate(params)]
    temperature = torch.tensor([[p.temperature] for p in params])
    got = _filter((logits - logits.amax(-1, keepdim=True)) / temperature, seqs, put)
    got = got / got.sum(-1, keepdim=True)
    for row, p in enumerate(params):
        np.testing.assert_allclose(got[row].numpy(), expected_probs(logits[row].numpy(), p), atol=2e-5)


def test_frequencies_follow_the_distribution() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=1.3, top_p=0.9)
    count = 4000
    seqs = [Sequence(i, i, [1], params, 4) for i in range(count)]
    tokens = [s.token for s in sample(logits.repeat(count, 1), seqs)]
    got = np.bincount(tokens, minlength=VOCAB) / count
    want = expected_probs(logits[0].numpy(), params)
    # 5 standard deviations of a binomial count
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / count) + 1e-9).all()
    assert (got[want == 0] == 0).all()


def test_a_row_does_not_depend_on_its_neighbours_or_its_place() -> None:
    logits = random_logits(12, seed=5)
    seqs = [
        make_seq(i, seed=7, temperature=[0.0, 0.7, 1.5][i % 3], top_k=[0, 5][i % 2], repetition_penalty=1.0 + i % 4 / 4)
        for i in range(12)
    ]
    together = sample(logits.clone(), seqs)
    alone = [sample(logits[i : i + 1].clone(), [seqs[i]])[0] for i in range(12)]
    backwards = sample(logits.flip(0).clone(), seqs[::-1])[::-1]
    assert together == alone == backwards


def test_random_numbers_are_keyed_by_everything_that_names_a_token() -> None:
    base = uniform(1, 2, 3, 4)
    others = {uniform(9, 2, 3, 4), uniform(1, 9, 3, 4), uniform(1, 2, 9, 4), uniform(1, 2, 3, 9)}
    assert base not in others
    assert len(others) == 4
    assert base == uniform(1, 2, 3, 4)
    assert all(0 <= uniform(2**64 - 1, i, 0, i) < 1 for i in range(100))


@torch.inference_mode()
def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 7], logits[0, 9] = 4.0, 3.0, -1.0
    seq = make_seq(repetition_penalty=2.0, output=(9,))
    # As the S-Part gives them: tensors that may be changed in place inside inference mode only.
    assert sample(logits, [seq])[0].token == 7  # 3 was in the prompt: 4 / 2 < 3
    assert logits[0, 9] == -2.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_non_finite_logit_is_marked_and_the_others_go_on(bad: float) -> None:
    logits = random_logits(3)
    want = logits.argmax(-1).tolist()
    logits[1, 5] = bad
    results = sample(logits, [make_seq(0), make_seq(1, temperature=1.0), make_seq(2)])
    assert [r.is_finite for r in results] == [True, False, True]
    assert (results[0].token, results[2].token) == (want[0], want[2])


def test_logprobs_are_those_of_the_plain_distribution() -> None:
    logits = random_logits(1)
    result = sample(logits.clone(), [make_seq(temperature=0.5, logprobs=3)])[0]
    want = torch.log_softmax(logits[0], -1)
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(float(want[result.token]), abs=1e-6)
    assert [token for token, _ in result.logprob.top] == want.topk(3).indices.tolist()


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(1) * 100
    for temperature in (1e-6, 1e-46, 5e-324):
        assert sample(logits.clone(), [make_seq(temperature=temperature)])[0].token == int(logits.argmax())
