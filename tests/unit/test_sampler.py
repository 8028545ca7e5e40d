"""Sampling against a plain float64 restatement of the whole chain, and its independence of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastdecode_hpc.s_part.sampler import Sampled, _filter, choose, pack, unpack
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
    params, outputs = SamplingParams(**settings_), list(output)
    return Sequence(seq_id, seq_id, [3, 4], params, 10, seed=seed, noise_key=seq_id, output_ids=outputs)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def expected_logits(logits: np.ndarray, seq: Sequence) -> np.ndarray:
    """Bias and penalties one after another, as their definitions say, in float64."""
    x, params = logits.astype(np.float64), seq.params
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*seq.prompt_ids, *seq.output_ids}:
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in seq.output_ids:
        x[token] -= params.frequency_penalty
    for token in set(seq.output_ids):
        x[token] -= params.presence_penalty
    return x


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


def expected_number(seq: Sequence) -> float:
    """The row's random number, from a generator of its own."""
    counter = [0, 0, len(seq.output_ids), seq.choice]
    key = np.array([seq.seed, seq.noise_key], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random()


FILTERS = {
    "top_k": st.sampled_from([0, 1, 3, 10, VOCAB, 1000]),
    "top_p": st.sampled_from([0.05, 0.31, 0.77, 0.95, 1.0]),
    "min_p": st.sampled_from([0.0, 0.013, 0.21]),
}
TOKENS = st.integers(0, VOCAB - 1)
BIAS = st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.5, 0.5, 4.0, 100.0]), max_size=4)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.6, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.1, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 0.4, 2.0]),
    logit_bias=st.just(()) | BIAS.map(lambda bias: tuple(bias.items())),
    logprobs=st.sampled_from([None, None, 0, 1, 20]),
    **FILTERS,
)
SEQS = st.lists(
    st.builds(
        Sequence,
        seq_id=st.just(0),
        index=st.just(0),
        noise_key=st.integers(0, 2**64 - 1),
        prompt_ids=st.lists(TOKENS, min_size=1, max_size=8),
        params=PARAMS,
        max_new_tokens=st.just(100),
        choice=st.integers(0, 127),
        seed=st.integers(0, 2**64 - 1),
        forced_ids=st.sampled_from([(), (), (7,) * 5]),
        output_ids=st.lists(TOKENS, max_size=12),
    ),
    min_size=1,
    max_size=6,
)


@given(SEQS, st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_tokens_are_those_of_the_whole_chain_in_float64(seqs: list[Sequence], seed: int) -> None:
    logits = random_logits(len(seqs), seed)
    for row, seq, result in zip(logits.double().numpy(), seqs, sample(logits.clone(), seqs), strict=True):
        x, token = expected_logits(row, seq), result.token
        if seq.forced_id is not None:
            assert token == seq.forced_id
        elif seq.params.is_greedy:
            assert x[token] >= x.max() - 1e-4
        else:
            probs = expected_probs(x, seq.params)
            last = probs.cumsum()[token]
            assert last - probs[token] - 1e-4 <= expected_number(seq) <= last + 1e-4
            assert probs[token] > 0
        if seq.params.logprobs is None:
            assert result.logprob is None
            continue
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()  # of the model: nothing has touched them
        assert result.logprob.logprob == pytest.approx(logprobs[token], abs=1e-5)
        ids, values = [best for best, _ in result.logprob.top], [value for _, value in result.logprob.top]
        assert values == pytest.approx(sorted(logprobs, reverse=True)[: seq.params.logprobs], abs=1e-5)
        assert values == pytest.approx(logprobs[ids], abs=1e-5)
        assert len({*ids}) == seq.params.logprobs


@given(SEQS, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_filters_match_their_definitions(seqs: list[Sequence], seed: int) -> None:
    seqs = [seq for seq in seqs if not seq.params.is_greedy]
    logits = random_logits(len(seqs), seed)
    temperature = torch.tensor([seq.params.temperature for seq in seqs])[:, None]
    got = _filter((logits - logits.amax(-1, keepdim=True)) / temperature, seqs, put) if seqs else logits
    for row, seq in enumerate(seqs):
        want = expected_probs(logits[row].numpy(), seq.params)
        np.testing.assert_allclose(got[row].numpy() / got[row].sum().item(), want, atol=2e-5)


@given(SEQS, st.data())
@settings(max_examples=100, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(seqs: list[Sequence], data: st.DataObject) -> None:
    logits = random_logits(len(seqs), seed=5)
    alone = [sample(logits[i : i + 1].clone(), [seq])[0] for i, seq in enumerate(seqs)]
    order = data.draw(st.permutations(range(len(seqs))))
    together = sample(logits[order], [seqs[i] for i in order])
    assert together == [alone[i] for i in order]  # bit by bit, log-probabilities too


def test_frequencies_follow_the_distribution() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=1.3, top_p=0.9)
    count = 4000
    seqs = [Sequence(i, i, [1], params, 4, noise_key=i) for i in range(count)]
    tokens = [s.token for s in sample(logits.repeat(count, 1), seqs)]
    got = np.bincount(tokens, minlength=VOCAB) / count
    want = expected_probs(logits[0].numpy(), params)
    # 5 standard deviations of a binomial count
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / count) + 1e-9).all()
    assert (got[want == 0] == 0).all()


def test_a_bias_of_100_bans_or_forces_a_token() -> None:
    logits = random_logits(1)
    favourite, other = logits[0].topk(2).indices.tolist()
    for temperature in (0.0, 1.0):
        banned = [make_seq(i, temperature=temperature, logit_bias=((favourite, -100.0),)) for i in range(200)]
        tokens = {s.token for s in sample(logits.repeat(200, 1), banned)}
        assert favourite not in tokens
        assert other in tokens
        forced = [make_seq(i, temperature=temperature, logit_bias=((9, 100.0),)) for i in range(200)]
        assert {s.token for s in sample(logits.repeat(200, 1), forced)} == {9}


@torch.inference_mode()
def test_logits_may_be_tensors_of_inference_mode() -> None:
    """As the S-Part gives them: they may be changed in place there only."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 7] = 4.0, 3.0
    # 3 was in the prompt: 4 / 2 < 3
    assert sample(logits, [make_seq(repetition_penalty=2.0, logit_bias=((5, 1.0),))])[0].token == 7


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_rebuilt_sequence_goes_on_as_if_nothing_had_happened(temperature: float) -> None:
    """Tokens that are known beforehand count for the penalties of those that follow."""
    params = SamplingParams(
        temperature=temperature, repetition_penalty=1.1, presence_penalty=0.6, frequency_penalty=1.2,
        logit_bias=((8, 2.0),), logprobs=2,
    )  # fmt: skip
    logits = random_logits(1) + random_logits(30, seed=1) / 3  # of each step; much alike, so that penalties matter

    def generate(forced_ids: tuple[int, ...]) -> tuple[list[int], list[Sampled]]:
        seq = Sequence(0, 5, [3, 4, 3], params, 30, seed=2, noise_key=5, forced_ids=forced_ids)
        results = []
        for step in range(30):
            results += sample(logits[step : step + 1].clone(), [seq])
            seq.output_ids.append(results[-1].token)
        return seq.output_ids, results

    tokens, results = generate(())
    assert len(set(tokens)) < len(tokens)
    for num_known in (1, 13, 29):
        assert generate(tuple(tokens[:num_known])) == (tokens, results)


class Count(TorchDispatchMode):
    """How many operations a block runs on tensors."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_the_rows() -> None:
    def count(rows: int) -> int:
        seqs = [
            make_seq(
                row, output=(row,) * row, temperature=0.5, top_p=0.9, repetition_penalty=1.1, presence_penalty=1.0,
                logit_bias=((row, 1.0), (0, 2.0)), logprobs=row % 21,
            )
            for row in range(rows)
        ]  # fmt: skip
        with Count() as counted:
            pack([choose(random_logits(rows), seqs, put)])
        return counted.num_calls

    assert 0 < count(40) == count(2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_non_finite_logit_is_marked_and_the_others_go_on(bad: float) -> None:
    logits = random_logits(3)
    want = logits.argmax(-1).tolist()
    logits[1, 5] = bad
    results = sample(logits, [make_seq(0), make_seq(1, temperature=1.0, logprobs=2), make_seq(2)])
    assert [r.is_finite for r in results] == [True, False, True]
    assert (results[0].token, results[2].token) == (want[0], want[2])
    assert results[1].logprob is None


def test_a_vocabulary_may_be_smaller_than_the_log_probabilities_that_are_asked_for() -> None:
    result = sample(torch.tensor([[0.0, 2.0, 1.0]]), [make_seq(logprobs=20)])[0]
    assert result.logprob is not None
    assert [token for token, _ in result.logprob.top] == [1, 2, 0]


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(1) * 100
    for temperature in (1e-6, 1e-46, 5e-324):
        assert sample(logits.clone(), [make_seq(temperature=temperature)])[0].token == int(logits.argmax())
