"""Answers to OpenAI batch lines read back with that API's own types."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from fastdecode_hpc.batch.openai_records import Responses
from fastdecode_hpc.batch.records import RecordWriter
from fastdecode_hpc.batch.requests import RequestError
from fastdecode_hpc.batch.resume import load_recorded
from fastdecode_hpc.sequence import Choice, Request, TokenLogprob

TOKENS = {1: b"a", 2: b"\xe2\x82", 3: b"\xac"}
LOGPROBS = [TokenLogprob(1, -0.25, ((1, -0.25), (2, float("-inf")))), TokenLogprob(2, -1.0), TokenLogprob(3, -2.0)]
CHOICES = [Choice("a\u20ac", [1, 2, 3], "stop", LOGPROBS), Choice("b", [4], "length")]


def write(tmp_path, endpoint, responses, **fields):
    path = tmp_path / "out.jsonl"
    request = Request(3, "mine", "p", endpoint=endpoint, content_hash="00ff", **fields)
    with RecordWriter(path, responses) as writer:
        writer.write_completion(request, CHOICES, prompt_tokens=5, notes=["ignored: user"])
    assert load_recorded(path).hashes == {3: 0xFF}
    assert load_recorded(path).num_failed == 0
    record = json.loads(path.read_text())
    assert (record["custom_id"], record["error"], record["notes"]) == ("mine", None, ["ignored: user"])
    assert record["response"]["status_code"] == 200
    return record["response"]["body"]


def test_chat(tmp_path):
    body = write(tmp_path, "/v1/chat/completions", Responses("my/model", TOKENS.__getitem__), model="asked")
    answer = ChatCompletion.model_validate(body, strict=True)
    assert answer.to_dict() == body  # nothing is unknown to the type
    assert (answer.object, answer.model, answer.usage.total_tokens) == ("chat.completion", "asked", 9)
    first, second = answer.choices
    assert (first.index, first.message.role, first.message.content, first.finish_reason) == (
        0, "assistant", "a\u20ac", "stop")  # fmt: skip
    assert (second.index, second.message.content, second.finish_reason, second.logprobs) == (1, "b", "length", None)
    content = first.logprobs.content
    assert [(item.token, item.bytes, item.logprob) for item in content] == [
        ("a", [97], -0.25), ("\ufffd", [0xE2, 0x82], -1.0), ("\ufffd", [0xAC], -2.0)]  # fmt: skip
    assert b"".join(bytes(item.bytes) for item in content).decode() == first.message.content
    assert [(item.token, item.logprob) for item in content[0].top_logprobs] == [("a", -0.25), ("\ufffd", -9999.0)]


def test_completions(tmp_path):
    body = write(tmp_path, "/v1/completions", Responses("model", TOKENS.__getitem__))
    answer = Completion.model_validate(body, strict=True)
    assert (answer.object, answer.model, answer.usage.completion_tokens) == ("text_completion", "model", 4)
    first, second = answer.choices
    assert (first.text, first.finish_reason, second.text, second.logprobs) == ("a\u20ac", "stop", "b", None)
    assert first.logprobs.tokens == ["a", "\ufffd", "\ufffd"]
    assert first.logprobs.token_logprobs == [-0.25, -1.0, -2.0]
    assert first.logprobs.top_logprobs[0] == {"a": -0.25, "\ufffd": -9999.0}
    assert first.logprobs.text_offset == [0, 1, 2]


def test_without_a_tokenizer_tokens_are_ids(tmp_path):
    body = write(tmp_path, "/v1/chat/completions", Responses("model", None), return_token_ids=True)
    content = ChatCompletion.model_validate(body, strict=True).choices[0].logprobs.content
    assert (content[0].token, content[0].bytes) == ("token_id:1", None)
    assert body["choices"][0]["token_ids"] == [1, 2, 3]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", None])
def test_failures(tmp_path, endpoint):
    path = tmp_path / "out.jsonl"
    with RecordWriter(path, Responses("model", None)) as writer:
        writer.write_error(Request(0, "a", "p", endpoint=endpoint), "bad", "why")
        writer.write_error(RequestError(1, 2, None, "bad", "why", is_batch_line=endpoint is not None), "bad", "why")
    for record in map(json.loads, path.read_text().splitlines()):
        assert record["error"] == {"code": "bad", "message": "why"}
        assert ("response" in record) == (endpoint is not None)
        assert record.get("response") is None
    assert load_recorded(path).num_failed == 2
