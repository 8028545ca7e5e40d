"""From requests to sequences: lengths, cuts, choices, chats that a template refuses."""

import pytest

from fastdecode_hpc.intake import Intake, RequestFailure, merge_system
from fastdecode_hpc.sequence import Request, SamplingParams

BOS, LONGEST = 1, 20


class FakeTokenizer:
    """A token a character, after BOS; its template knows no system messages."""

    bos_token_id = BOS

    def encode_prompt(self, text):
        return [BOS, *map(ord, text)]

    def encode_messages(self, messages):
        if messages[0]["role"] == "system":
            raise ValueError("the chat template refused the messages: no system role")
        return [BOS, *(ord(character) for message in messages for character in message["content"])]


def make_intake(**options):
    return Intake(FakeTokenizer(), None, vocab_size=256, max_context_len=LONGEST, seed=7, **options)


def accept(prompt, max_new_tokens=4, options=None, **fields):
    params = SamplingParams(max_new_tokens=max_new_tokens, n=fields.pop("n", 1))
    return make_intake(**(options or {})).accept(Request(0, None, prompt, params=params, **fields))


@pytest.mark.parametrize(("length", "room"), [(LONGEST - 2, 2), (LONGEST - 1, 1)])
def test_the_output_is_clamped_to_the_room_that_is_left(length, room):
    accepted = accept([5] * length)
    assert accepted.seqs[0].max_new_tokens == room
    assert accepted.notes == [f"max_new_tokens clamped from 4 to {room}"]


@pytest.mark.parametrize("length", [LONGEST, LONGEST + 1, 10 * LONGEST])
def test_a_prompt_without_room_for_a_token_fails_or_is_cut(length):
    ids = list(range(2, 2 + length))
    ids = [token % 256 for token in ids]
    with pytest.raises(RequestFailure, match=f"has {length} tokens; at most 19"):
        accept(ids)
    left, right = (accept(ids, options={"overlong": f"truncate-{side}"}) for side in ("left", "right"))
    assert left.seqs[0].prompt_ids == ids[-16:]
    assert right.seqs[0].prompt_ids == ids[:16]
    assert left.seqs[0].max_new_tokens == 4
    assert left.notes == [f"prompt cut from {length} to 16 tokens (truncate-left)"]


def test_a_cut_leaves_half_the_context_to_long_outputs_and_keeps_the_first_token():
    (seq,) = accept("x" * 40 + "end", max_new_tokens=1000, options={"overlong": "truncate-left"}).seqs
    assert seq.prompt_ids == [BOS, *map(ord, "xxxxxxend")]
    assert seq.max_new_tokens == 10


def test_every_prompt_has_n_choices_with_tokens_known_from_before():
    accepted = accept(["a", "bc"], n=2, known_ids=((5,), (), (6, 7), ()))
    assert [seq.choice for seq in accepted.seqs] == [0, 1, 2, 3]
    assert [seq.prompt_len for seq in accepted.seqs] == [2, 2, 3, 3]
    assert [seq.forced_ids for seq in accepted.seqs] == [(5,), (), (6, 7), ()]
    assert len({seq.seq_id for seq in accepted.seqs}) == 4
    with pytest.raises(RequestFailure, match="token id 300"):
        accept("a", known_ids=((300,),))


def test_one_prompt_that_cannot_run_fails_the_line():
    with pytest.raises(RequestFailure, match="at most 19"):
        accept(["a", "b" * 50])


def test_a_bias_of_a_token_outside_the_vocabulary_fails():
    request = Request(0, None, "a", params=SamplingParams(logit_bias=((256, 1.0),)))
    with pytest.raises(RequestFailure, match="logit_bias has token id 256"):
        make_intake().accept(request)


def test_system_messages_are_merged_where_the_template_refuses_them():
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    with pytest.raises(RequestFailure, match="no system role"):
        accept(None, messages=chat)
    accepted = accept(None, messages=chat, options={"merge_system": True})
    assert accepted.seqs[0].prompt_ids == [BOS, *map(ord, "be\n\nhi")]
    assert accepted.notes == ["the system message was put before the first message of the user"]
    assert merge_system(chat[1:]) is None
    assert merge_system([chat[0], {"role": "assistant", "content": "x"}]) is None
    with pytest.raises(RequestFailure, match="no system role"):
        accept(None, messages=chat[:1], options={"merge_system": True})


def noise_keys(*requests):
    intake = make_intake()
    return [intake.accept(request).seqs[0].noise_key for request in requests]


def test_a_seed_of_its_own_gives_a_prompt_the_same_numbers_wherever_it_stands():
    seeded = SamplingParams(seed=3)
    first, moved, other = noise_keys(
        Request(0, "a", "x", params=seeded), Request(9, "b", [BOS, ord("x")], params=seeded),
        Request(1, "a", "y", params=seeded),
    )  # fmt: skip
    assert first == moved != other


def test_without_one_equal_prompts_differ_and_an_id_is_kept_when_lines_move():
    a, b, moved, nameless, other = noise_keys(
        Request(0, "a", "x"), Request(1, "b", "x"), Request(9, "a", "x"), Request(2, None, "x"), Request(3, None, "x")
    )
    assert a == moved
    assert len({a, b, nameless, other}) == 4
