"""Reading input lines: every kind of bad line is one error, no good line is lost, nothing raises."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastdecode_hpc.batch import requests as requests_module
from fastdecode_hpc.batch.requests import RequestError, count_requests, read_requests
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.sequence import Request, SamplingParams

DEFAULTS = SamplingParams(max_new_tokens=7, temperature=0.5)
CHAT = [{"role": "user", "content": "hi"}]


def read_bytes(tmp_path, data, defaults=DEFAULTS):
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    items = list(read_requests(path, defaults))
    assert count_requests(path) == len(items)
    assert [item.index for item in items] == list(range(len(items)))
    return items


def read_one(tmp_path, line):
    data = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    good = b'{"prompt": "good"}'
    before, item, after = read_bytes(tmp_path, b"\n".join([good, data, good]))
    assert isinstance(before, Request) and isinstance(after, Request)
    assert item.line == 2
    return item


def accepted(tmp_path, line):
    item = read_one(tmp_path, line)
    assert isinstance(item, Request), item
    return item


def refused(tmp_path, line, code, *words):
    item = read_one(tmp_path, line)
    assert isinstance(item, RequestError), item
    assert item.code == code, item
    for word in ("line 2:", *words):
        assert word in item.message, (word, item.message)
    return item


def batch_line(url="/v1/chat/completions", **body):
    body = {"messages": CHAT} | body if "chat" in url else {"prompt": "hi"} | body
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def nested(depth):
    return "[" * depth + "]" * depth


# -- what is accepted


def test_own_line_brings_its_settings_and_takes_the_rest_from_the_defaults(tmp_path):
    line = {"prompt": "p", "custom_id": "a", "max_new_tokens": 3, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 9,
            "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"7": -100},
            "n": 2, "stop": ["x", "y"], "ignore_eos": True, "logprobs": 2, "return_token_ids": True}  # fmt: skip
    request = accepted(tmp_path, line)
    assert request.params == SamplingParams(
        max_new_tokens=3, temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, seed=9, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-1, logit_bias=((7, -100),), n=2, stop=("x", "y"), ignore_eos=True,
        logprobs=2,
    )  # fmt: skip
    assert (request.index, request.line, request.custom_id, request.prompt) == (1, 2, "a", "p")
    assert request.return_token_ids and request.messages is None


def test_rows_keep_their_own_settings(tmp_path):
    data = b'{"prompt":"a","temperature":0}\n{"prompt":"b"}\n{"prompt":"c","stop":"."}'
    items = read_bytes(tmp_path, data)
    assert [(item.params.temperature, item.params.stop) for item in items] == [(0, ()), (0.5, ()), (0.5, (".",))]


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_names_of_the_output_limit(tmp_path, name):
    assert accepted(tmp_path, {"prompt": "p", name: 5}).params.max_new_tokens == 5
    refused(tmp_path, {"prompt": "p", name: 0}, "invalid_field", f"{name} is 0")


def test_two_names_of_the_output_limit_must_agree(tmp_path):
    assert accepted(tmp_path, {"prompt": "p", "max_tokens": 5, "max_new_tokens": 5}).params.max_new_tokens == 5
    line = {"prompt": "p", "max_tokens": 5, "max_new_tokens": 6}
    refused(tmp_path, line, "invalid_field", "max_new_tokens is 6", "max_tokens is 5")


def test_null_is_the_same_as_leaving_a_field_out(tmp_path):
    line = {"prompt": "p", "id": None, "messages": None, "seed": None, "stop": None, "max_tokens": None, "top_p": None}
    assert accepted(tmp_path, line).params == DEFAULTS


def test_prompt_of_token_ids(tmp_path):
    assert accepted(tmp_path, {"prompt": [0, 5, 7]}).prompt == [0, 5, 7]


@pytest.mark.parametrize("text", ["", " ", "a\x00b", "\u2028\x85", "<|endoftext|>", "x" * 200_000])
def test_any_text_may_be_a_prompt(tmp_path, text):
    assert accepted(tmp_path, {"prompt": text}).prompt == text


def test_messages_keep_role_name_and_text(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "foo", "name": "n", "content": "", "tool_calls": []}]
    request = accepted(tmp_path, {"messages": messages})
    assert request.messages == [{"role": "system", "content": "ab"}, {"role": "foo", "name": "n", "content": ""}]
    assert request.prompt is None


@pytest.mark.parametrize(("prompt", "prompts"), [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]),
                                                 ([[1], [2, 3]], [[1], [2, 3]]), (["a", [1]], ["a", [1]])])  # fmt: skip
def test_a_line_may_have_several_prompts(tmp_path, prompt, prompts):
    assert accepted(tmp_path, {"prompt": prompt}).prompts == prompts


def test_chat_batch_line(tmp_path):
    body = {"model": "m", "max_completion_tokens": 4, "n": 1, "stream": False, "presence_penalty": 0.0, "user": "u",
            "metadata": {"k": "v"}, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
            "logprobs": True, "top_logprobs": 3, "temperature": 0}  # fmt: skip
    request = accepted(tmp_path, batch_line(**body))
    assert (request.endpoint, request.model) == ("/v1/chat/completions", "m")
    assert request.notes == ("ignored: user, metadata",)
    assert request.custom_id == "a" and request.messages == CHAT
    assert request.params == SamplingParams(max_new_tokens=4, temperature=0, logprobs=3)


def test_completions_batch_line(tmp_path):
    line = batch_line("/v1/completions", max_tokens=4, logprobs=2, echo=False, best_of=1, suffix="")
    request = accepted(tmp_path, line)
    assert request.prompt == "hi" and request.params.logprobs == 2


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)])
def test_chat_logprobs_are_a_flag(tmp_path, given, expected):
    assert accepted(tmp_path, batch_line(**given)).params.logprobs == expected


def test_batch_line_without_url_is_told_by_its_body(tmp_path):
    assert accepted(tmp_path, {"custom_id": "a", "body": {"messages": CHAT}}).messages == CHAT
    assert accepted(tmp_path, {"custom_id": "a", "body": {"prompt": "p"}}).prompt == "p"


# -- lines that are no requests


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ('{"custom_id":"c","body":{', "invalid_json", "column"),
        ("{'prompt': 'x'}", "invalid_json", "column"),
        ('{"prompt": "x"} {"prompt": "y"}', "invalid_json", "Extra data"),
        ('{"prompt": "tab\there"}', "invalid_json", "control character"),
        ('{"prompt": "x", "seed": %s}' % ("9" * 5000), "invalid_json", "digits"),
        ('{"prompt": ' + nested(100_000) + "}", "invalid_json", "nested too deeply"),
        ('{"prompt": "x", "temperature": NaN}', "invalid_json", "NaN"),
        ('{"prompt": "x", "temperature": -Infinity}', "invalid_json", "-Infinity"),
        ('{"prompt": "x", "temperature": 1e999}', "invalid_field", "temperature is inf"),
        ('{"prompt": "x", "temperature": 1%s}' % ("0" * 400), "invalid_field", "at most 100"),
        ('{"prompt": "x", "prompt": "y"}', "duplicate_key", "'prompt'"),
        ('{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "duplicate_key", "'role'"),
        ("null", "not_an_object", "null"),
        ("[1, 2]", "not_an_object", "a list"),
        ('"hi"', "not_an_object", "a string"),
        ("true", "not_an_object", "a boolean"),
        ("3.5", "not_an_object", "a number"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8", "0xff"),
        (b'{"prompt": "\xed\xa0\xbd"}', "invalid_utf8", "0xed"),
        (r'{"prompt": "\ud83d"}', "lone_surrogate", "prompt"),
        (
            r'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}]}',
            "lone_surrogate",
            "mess",
        ),
        (r'{"prompt": "x", "\ud800": 1}', "lone_surrogate", r"\ud800"),
        (b"\xef\xbb\xbf{}", "invalid_json", "BOM"),  # only the first line of a file may start with one
        ("{}", "missing_field", "no prompt"),
    ],
)
def test_malformed_lines(tmp_path, line, code, word):
    refused(tmp_path, line, code, word)


def test_every_depth_of_nesting_is_an_error_and_not_a_crash(tmp_path):
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 20):
        item = read_one(tmp_path, '{"prompt": ' + nested(depth) + "}")
        assert item.code in ("invalid_field", "invalid_json")


def test_surrogate_pairs_are_characters(tmp_path):
    assert accepted(tmp_path, r'{"prompt": "\ud83d\ude00"}').prompt == "\U0001f600"


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ({"prompt": 5}, "invalid_field", "prompt is 5"),
        ({"prompt": {"text": "x"}}, "invalid_field", "string, a list of token ids"),
        ({"prompt": []}, "empty_prompt", "empty list"),
        ({"prompt": [1, True]}, "invalid_field", "prompt[1] is true"),
        ({"prompt": [1, -1]}, "invalid_field", "prompt[1] is -1"),
        ({"prompt": [1.5]}, "invalid_field", "prompt[0] is 1.5"),
        ({"prompt": "x", "messages": CHAT}, "invalid_field", "both prompt and messages"),
        ({"messages": []}, "empty_prompt", "empty list"),
        ({"messages": "hi"}, "invalid_field", "messages is 'hi'"),
        ({"messages": ["hi"]}, "invalid_field", "messages[0] is 'hi'"),
        ({"messages": [{"content": "x"}]}, "invalid_field", "messages[0].role is null"),
        ({"messages": [{"role": 3, "content": "x"}]}, "invalid_field", "messages[0].role is 3"),
        ({"messages": [{"role": "", "content": "x"}]}, "invalid_field", "messages[0].role is ''"),
        ({"messages": [{"role": "user"}]}, "invalid_field", "messages[0].content is null"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_field", "messages[0].content is null"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_field", "messages[0].content is 1"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "unsupported_field", "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_field", "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "invalid_field", "text is 1"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "unsupported_field", "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "contnet": 1}]}, "unknown_field", "'contnet'"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "invalid_field", "messages[0].name is 1"),
        ({"prompt": "x", "custom_id": 7}, "invalid_field", "custom_id is 7"),
        ({"prompt": "x", "custom_id": ""}, "invalid_field", "non-empty"),
        ({"prompt": "x", "custom_id": "a", "id": "b"}, "invalid_field", "both"),
        ({"prompt": "x", "temprature": 1}, "unknown_field", "'temprature'; known are prompt, messages, custom_id"),
        ({"prompt": "x", "n": 0}, "invalid_field", "n is 0"),
        ({"prompt": "x", "n": 1000}, "invalid_field", "at most 128"),
        ({"prompt": "x", "n": True}, "invalid_field", "n is True"),
        ({"prompt": "x", "presence_penalty": 3}, "invalid_field", "presence_penalty is 3"),
        ({"prompt": "x", "frequency_penalty": False}, "invalid_field", "frequency_penalty is False"),
        ({"prompt": "x", "logit_bias": [1]}, "invalid_field", "logit_bias is [1]"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "invalid_field", "keys must be token ids"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "invalid_field", "keys must be token ids"),
        ({"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, "invalid_field", "keys must be token ids"),
        ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "invalid_field", "keys must be token ids"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "invalid_field", "logit_bias of token 5 is 101"),
        ({"prompt": "x", "logit_bias": {"5": None}}, "invalid_field", "logit_bias of token 5 is None"),
        ({"prompt": ["a", 1]}, "invalid_field", "prompt[1] is 1"),
        ({"prompt": [[1], []]}, "empty_prompt", "prompt[1] is an empty list"),
        ({"prompt": [[1], ["a"]]}, "invalid_field", "prompt[1][0] is 'a'"),
        ({"prompt": ["a"] * 2000}, "invalid_field", "at most 1024"),
        ({"prompt": "x", "max_tokens": "5"}, "invalid_field", "max_tokens is '5'"),
        ({"prompt": "x", "max_tokens": True}, "invalid_field", "max_tokens is True"),
        ({"prompt": "x", "max_tokens": 2.0}, "invalid_field", "max_tokens is 2.0"),
        ({"prompt": "x", "temperature": "hot"}, "invalid_field", "temperature is 'hot'"),
        ({"prompt": "x", "temperature": -1}, "invalid_field", "temperature is -1", ),
        ({"prompt": "x", "top_p": 0}, "invalid_field", "top_p is 0"),
        ({"prompt": "x", "top_k": [1]}, "invalid_field", "top_k is [1]"),
        ({"prompt": "x", "min_p": 2}, "invalid_field", "min_p is 2"),
        ({"prompt": "x", "repetition_penalty": 0}, "invalid_field", "repetition_penalty is 0"),
        ({"prompt": "x", "seed": -1}, "invalid_field", "seed is -1"),
        ({"prompt": "x", "seed": 2**64}, "invalid_field", "seed is"),
        ({"prompt": "x", "stop": 5}, "invalid_field", "stop is 5"),
        ({"prompt": "x", "stop": ""}, "invalid_field", "non-empty"),
        ({"prompt": "x", "stop": ["a", 1]}, "invalid_field", "stop is ['a', 1]"),
        ({"prompt": "x", "ignore_eos": 1}, "invalid_field", "ignore_eos is 1"),
        ({"prompt": "x", "logprobs": True}, "invalid_field", "logprobs is True"),
        ({"prompt": "x", "logprobs": 21}, "invalid_field", "logprobs is 21"),
        ({"prompt": "x", "return_token_ids": "yes"}, "invalid_field", "return_token_ids is 'yes'"),
        ({"custom_id": "a", "body": "text"}, "invalid_field", "body is 'text'; it must be an object"),
        ({"custom_id": "a", "body": {"messages": "hi"}}, "invalid_field", "messages is 'hi'"),
        ({"custom_id": "a", "url": "/v1/completions"}, "invalid_field", "body is null"),
        ({"body": {"prompt": "x"}}, "missing_field", "custom_id"),
        ({"custom_id": "a", "body": {"prompt": "x"}, "prompt": "y"}, "unknown_field", "'prompt'"),
        ({"custom_id": "a", "method": "GET", "body": {"prompt": "x"}}, "invalid_field", "method is 'GET'"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "unsupported_field", "/v1/embeddings"),
        ({"custom_id": "a", "url": [], "body": {}}, "unsupported_field", "url is []"),
    ],
)  # fmt: skip
def test_wrong_fields(tmp_path, line, code, word):
    refused(tmp_path, line, code, word)


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", 3), ("best_of", True), ("stream", True), ("echo", True), ("suffix", "x"),
     ("tools", [{}]), ("tool_choice", "required"),
     ("response_format", {"type": "json_object"}), ("reasoning_effort", "high")],
)  # fmt: skip
def test_body_fields_that_would_change_the_result_are_refused(tmp_path, name, value):
    refused(tmp_path, batch_line(**{name: value}), "unsupported_field", f"{name} is ", "null")


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({"prompt": "x"}, "unknown_field", "'prompt'"),
        ({"frobnicate": 1}, "unknown_field", "'frobnicate'"),
        ({"logprobs": 3}, "invalid_field", "logprobs is 3"),
        ({"top_logprobs": 3}, "invalid_field", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 30}, "invalid_field", "logprobs is 30"),
    ],
)
def test_wrong_chat_bodies(tmp_path, body, code, word):
    refused(tmp_path, batch_line(**body), code, word)


def test_error_keeps_the_id_and_a_short_message(tmp_path):
    item = refused(tmp_path, {"custom_id": "mine", "prompt": "x", "temperature": "y" * 100_000}, "invalid_field")
    assert item.custom_id == "mine"
    assert len(item.message) <= requests_module.MAX_MESSAGE_CHARS


# -- whole files


def test_torn_lines_are_errors_with_their_line_number(tmp_path):
    data = b'{"prompt":"a"}\n\n{"custom_id":"c","body":{\n{"prompt":"b"}\n{"prompt":"cut o'
    items = read_bytes(tmp_path, data)
    assert [item.line for item in items] == [1, 3, 4, 5]
    assert [isinstance(item, Request) for item in items] == [True, False, True, False]


def test_bom_crlf_blank_lines_and_other_separators(tmp_path):
    prompt = "one\u2028two\x85three\x0cfour"
    lines = ["", json.dumps({"prompt": prompt}, ensure_ascii=False), "  \t", '{"prompt": "b"}', ""]
    items = read_bytes(tmp_path, b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [item.prompt for item in items] == [prompt, "b"]
    assert [item.line for item in items] == [2, 4]


def test_bom_before_the_first_object(tmp_path):
    assert read_bytes(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}')[0].prompt == "a"


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_empty_files_have_no_requests(tmp_path, data):
    assert read_bytes(tmp_path, data) == []


def test_second_use_of_an_id_is_an_error(tmp_path):
    rows = [{"prompt": "p", "custom_id": "a"}, {"prompt": "p"}, {"prompt": "p"}, {"prompt": "q", "id": "a"},
            {"prompt": "p", "custom_id": "b"}, {"prompt": 1, "custom_id": "c"},
            {"prompt": "p", "custom_id": "c"}]  # fmt: skip
    items = read_bytes(tmp_path, "\n".join(map(json.dumps, rows)).encode())
    assert [getattr(item, "code", None) for item in items] == [
        None, None, None, "duplicate_custom_id", None, "invalid_field", "duplicate_custom_id",
    ]  # fmt: skip
    assert items[3].custom_id == "a" and "line 4" in items[3].message


def test_ids_are_told_apart_however_many_there_are(tmp_path):
    path = tmp_path / "in.jsonl"
    names = [f"id-{number % 5000}" for number in range(5003)]  # the last three are used again
    path.write_text("".join(json.dumps({"prompt": "p", "custom_id": name}) + "\n" for name in names))
    codes = [getattr(item, "code", None) for item in read_requests(path, DEFAULTS)]
    assert codes == [None] * 5000 + ["duplicate_custom_id"] * 3


def test_auto_id_gives_every_line_an_id_of_its_own(tmp_path):
    rows = [{"prompt": "p", "custom_id": "row-1"}, {"prompt": "p"}, {"prompt": "q", "custom_id": "row-1"},
            {"custom_id": "row-1", "prompt": 1}, {"body": {"prompt": "x"}}]  # fmt: skip
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):  # a resumed run finds the same ones
        items = list(read_requests(path, DEFAULTS, auto_id=True))
        assert [item.custom_id for item in items] == ["row-1", "row-1+", "row-1-2", "row-1", "row-4"]
        assert [isinstance(item, Request) for item in items] == [True, True, True, False, True]
    assert items[2].notes == ("custom_id 'row-1' was used by an earlier line; this one became 'row-1-2'",)


def test_the_hash_is_of_the_line_alone(tmp_path):
    line = b'{"prompt": "p"}'
    one, two, other = read_bytes(tmp_path, line + b"\r\n  " + line + b'\n{"prompt": "q"}')
    assert one.content_hash == two.content_hash != other.content_hash


def test_a_line_over_the_limit_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(requests_module, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(requests_module, "_COUNT_BYTES", 64)
    longest = b'{"prompt": "%s"}' % (b"x" * 86)
    assert len(longest) == 100
    items = read_bytes(tmp_path, b"\n".join([longest, longest + b" ", b"y" * 1000, longest]))
    assert [getattr(item, "code", None) for item in items] == [None, "line_too_long", "line_too_long", None]
    assert [item.line for item in items] == [1, 2, 3, 4]


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{"prompt": "a"}\n\n{"prompt": "b"}')))
    assert count_requests("-") is None
    assert [item.prompt for item in read_requests("-", DEFAULTS)] == ["a", "b"]


def test_reading_is_streaming(monkeypatch):
    class Endless(io.BytesIO):
        def readline(self, size=-1):
            return b'{"prompt": "a"}\n'

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Endless()))
    reader = read_requests("-", DEFAULTS)
    assert [next(reader).index for _ in range(1000)] == list(range(1000))


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            list(read_requests(path, DEFAULTS))
        with pytest.raises(ConfigError, match="cannot be read"):
            count_requests(path)


def test_the_example_input_is_good():
    items = list(read_requests(Path(__file__).parents[2] / "examples" / "prompts.jsonl", DEFAULTS))
    assert len(items) == 24
    assert all(isinstance(item, Request) and 16 <= item.params.max_new_tokens <= 48 for item in items)


# -- properties

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    ["prompt", "messages", "custom_id", "id", "body", "url", "method", "max_tokens", "temperature", "stop", "seed",
     "logprobs", "top_logprobs", "n", "ignore_eos", "role", "content"]
)  # fmt: skip
json_objects = st.dictionaries(field_names, json_values, max_size=5)
bodies = st.builds(lambda obj, body: {**obj, "body": body}, json_objects, json_objects)
conversations = st.builds(lambda obj, messages: {**obj, "messages": messages}, json_objects, st.lists(json_objects))
raw_lines = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" "))
json_lines = st.one_of(json_objects, bodies, conversations, json_values).map(lambda value: json.dumps(value).encode())


@given(st.lists(raw_lines | json_lines, max_size=12))
@example([b"\x0b", b"\x00", b"\x85", b"\xef\xbb\xbf"])
def test_no_line_raises_and_each_gives_one_item(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("requests") / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    items = list(read_requests(path, DEFAULTS))
    expected = [
        n for n, line in enumerate(lines, 1) if (line.removeprefix(b"\xef\xbb\xbf") if n == 1 else line).strip()
    ]
    assert [item.line for item in items] == expected
    assert [item.index for item in items] == list(range(len(expected)))
    assert all(isinstance(item, Request) or item.message.startswith(f"line {item.line}: ") for item in items)
