"""Bias and penalties against transformers' processors and a plain restatement."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from fastdecode_hpc.s_part.penalties import adjust
from fastdecode_hpc.sequence import SamplingParams, Sequence

VOCAB = 50
TOKENS = st.integers(0, VOCAB - 1)


def put(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def make_seq(prompt: list[int], output: list[int], **settings) -> Sequence:
    return Sequence(0, 0, prompt, SamplingParams(**settings), 100, output_ids=list(output))


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    logits = logits.clone()
    adjust(logits, seqs, put)
    return logits


@given(st.lists(TOKENS, min_size=1, max_size=20), st.lists(TOKENS, max_size=20), st.floats(0.1, 10.0))
def test_repetition_penalty_is_that_of_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = random_logits(1, seed=len(prompt))
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    assert torch.equal(adjusted(logits, [make_seq(prompt, output, repetition_penalty=penalty)]), want)


@given(st.dictionaries(TOKENS, st.floats(-100, 100, width=32), min_size=1, max_size=10))
def test_bias_is_that_of_transformers(bias: dict[int, float]) -> None:
    logits = random_logits(1)
    want = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(
        torch.tensor([[1]]), logits.clone()
    )
    assert torch.equal(adjusted(logits, [make_seq([1], [2], logit_bias=tuple(bias.items()))]), want)


def test_frequency_and_presence_count_the_output_only() -> None:
    seqs = [
        make_seq([3, 3, 4], [5, 3, 5, 5], frequency_penalty=0.5),
        make_seq([3, 3, 4], [5, 3, 5, 5], presence_penalty=0.25),
        make_seq([3, 3, 4], [5, 3, 5, 5], presence_penalty=-0.25, frequency_penalty=-2.0),
        make_seq([3, 3, 4], [], presence_penalty=2.0, frequency_penalty=2.0),
    ]
    changes = (adjusted(torch.zeros(4, VOCAB), seqs)).numpy()
    assert [{int(token): float(row[token]) for token in row.nonzero()[0]} for row in changes] == [
        {5: -1.5, 3: -0.5}, {5: -0.25, 3: -0.25}, {5: 6.25, 3: 2.25}, {},
    ]  # fmt: skip


def test_bias_comes_before_repetition_and_repetition_before_the_other_penalties() -> None:
    seq = make_seq([3], [4], logit_bias=((3, 5.0), (4, -6.0)), repetition_penalty=2.0, presence_penalty=1.5)
    logits = torch.full((1, VOCAB), -1.0)
    assert adjusted(logits, [seq])[0, 3:5].tolist() == [(-1 + 5) / 2, (-1 - 6) * 2 - 1.5]


@given(st.lists(TOKENS, min_size=1, max_size=10), st.lists(TOKENS, max_size=40), st.sampled_from([1.0, 1.7]))
def test_counts_that_have_grown_equal_those_of_the_whole(prompt: list[int], output: list[int], repetition: float):
    settings = {"repetition_penalty": repetition, "presence_penalty": 0.3, "frequency_penalty": 0.7}
    seq = make_seq(prompt, [], **settings)
    for token in output:
        seq.count_tokens()
        seq.output_ids.append(token)
    grown, count = seq.count_tokens(), Counter(output)
    want = {token: count[token] for token in output + (prompt if repetition != 1.0 else [])}
    assert dict(zip(grown.ids, grown.num_generated, strict=True)) == want
    assert len(grown.ids) == len(want)
    logits = random_logits(1)
    assert torch.equal(adjusted(logits, [seq]), adjusted(logits, [make_seq(prompt, output, **settings)]))


def test_rows_that_ask_for_nothing_stay_as_they_are() -> None:
    logits = random_logits(3)
    seqs = [make_seq([1], [2]), make_seq([1], [2], repetition_penalty=3.0, logit_bias=((7, 1.0),)), make_seq([1], [2])]
    changed = adjusted(logits, seqs) != logits
    assert {tuple(place) for place in changed.nonzero().tolist()} == {(1, 1), (1, 2), (1, 7)}
