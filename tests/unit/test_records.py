"""Writing records and reading them back: valid JSON lines whatever is in them, and nothing lost or destroyed."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_hpc.batch import resume
from fastdecode_hpc.batch.openai_records import Responses
from fastdecode_hpc.batch.records import RecordWriter
from fastdecode_hpc.batch.requests import RequestError
from fastdecode_hpc.batch.resume import check_same_input, load_recorded
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.sequence import Choice, Request, TokenLogprob

RESPONSES = Responses("some/model", lambda token: b"<%d>" % token)


def indices_in(path):
    return sorted(load_recorded(path).hashes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def complete(writer, index, custom_id=None, text="text", notes=(), logprobs=None, **fields):
    request = Request(index, custom_id, "prompt", content_hash=f"{index:016x}", **fields)
    writer.write_completion(request, [Choice(text, [5, 6], "stop", logprobs)], prompt_tokens=3, notes=notes)


def fail(writer, index, custom_id=None, message="why"):
    writer.write_error(Request(index, custom_id, "prompt", content_hash="ab"), "bad", message)


def write_some(path, indices, go_on=True):
    go_on_at = load_recorded(path).num_bytes if go_on else None
    with RecordWriter(path, RESPONSES, go_on_at=go_on_at) as writer:
        for index in indices:
            complete(writer, index, f"id{index}")


def read_lines(path):
    data = path.read_bytes().decode("utf-8")
    assert data == "" or data.endswith("\n")
    lines = data.splitlines()  # not only newlines end a line here, so a record must not hold other separators
    assert len(lines) == data.count("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_records_have_the_documented_fields(path):
    logprobs = [TokenLogprob(5, -0.5, ((5, -0.5), (7, -1.5)))]
    with RecordWriter(path, RESPONSES) as writer:
        complete(writer, 0, "a")
        complete(writer, 1, return_token_ids=True, logprobs=logprobs, notes=["clamped"])
        fail(writer, 2, "c")
        assert (writer.num_written, writer.num_errors) == (3, 1)
        assert writer.errors == {"bad": 1}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    assert read_lines(path) == [
        {"index": 0, "custom_id": "a", "text": "text", "finish_reason": "stop", "usage": usage,
         "content_hash": "0000000000000000"},
        {"index": 1, "custom_id": None, "text": "text", "finish_reason": "stop", "token_ids": [5, 6],
         "logprobs": [{"token": 5, "logprob": -0.5, "top": [[5, -0.5], [7, -1.5]]}], "usage": usage,
         "notes": ["clamped"], "content_hash": "0000000000000001"},
        {"index": 2, "custom_id": "c", "error": {"code": "bad", "message": "why"}, "content_hash": "ab"},
    ]  # fmt: skip


def test_several_choices_stand_in_a_list(path):
    choices = [Choice("a", [1], "stop"), Choice("b", [2, 3], "length")]
    with RecordWriter(path, RESPONSES) as writer:
        writer.write_completion(Request(0, None, ["x", "y"]), choices, prompt_tokens=4)
    (record,) = read_lines(path)
    assert record["choices"] == [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "length"}]
    assert record["usage"] == {"prompt_tokens": 4, "completion_tokens": 3}
    assert indices_in(path) == [0]


def test_each_record_is_in_the_file_when_it_was_written(path):
    with RecordWriter(path, RESPONSES) as writer:
        for index in range(3):
            complete(writer, index)
            assert len(read_lines(path)) == index + 1


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_numbers_that_json_lacks_become_null(path, value):
    with RecordWriter(path, RESPONSES) as writer:
        complete(writer, 0, logprobs=[TokenLogprob(5, value, ((5, value),))])
    assert read_lines(path)[0]["logprobs"] == [{"token": 5, "logprob": None, "top": [[5, None]]}]


def test_half_surrogate_pairs_are_replaced(path):
    with RecordWriter(path, RESPONSES) as writer:
        complete(writer, 0, "id\udc00", text="a\ud83d!\U0001f600")
        fail(writer, 1, message="saw \ud800")
    first, second = read_lines(path)
    assert (first["custom_id"], first["text"]) == ("id\ufffd", "a\ufffd!\U0001f600")
    assert second["error"]["message"] == "saw \ufffd"


def test_text_is_written_readably(path):
    with RecordWriter(path, RESPONSES) as writer:
        complete(writer, 0, text="naïve 日本")
    assert "naïve 日本" in path.read_text(encoding="utf-8")


def test_an_empty_output_may_be_used(path):
    path.touch()
    write_some(path, [0])
    assert indices_in(path) == [0]


def test_records_are_appended_or_replaced(path):
    write_some(path, [0, 1])
    write_some(path, [2])
    assert indices_in(path) == [0, 1, 2]
    write_some(path, [5], go_on=False)
    assert indices_in(path) == [5]


def test_only_one_job_may_write(path):
    with RecordWriter(path, RESPONSES), pytest.raises(ConfigError, match="another job is writing"):
        RecordWriter(path, RESPONSES)
    write_some(path, [0])  # the lock has gone with its owner


def test_a_file_that_grew_since_it_was_read_is_refused(path):
    write_some(path, [0])
    size = load_recorded(path).num_bytes
    write_some(path, [1])
    with pytest.raises(ConfigError, match="changed while this job started"):
        RecordWriter(path, RESPONSES, go_on_at=size)
    assert indices_in(path) == [0, 1]


def test_output_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordWriter(tmp_path / "missing" / "out.jsonl", RESPONSES)
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordWriter(tmp_path, RESPONSES)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recorded(tmp_path)


def test_nothing_is_recorded_in_a_missing_or_empty_file(path):
    assert indices_in(path) == []
    path.touch()
    assert indices_in(path) == []


def test_error_records_count_as_recorded(path):
    with RecordWriter(path, RESPONSES) as writer:
        fail(writer, 4)
    assert indices_in(path) == [4]
    assert load_recorded(path).num_failed == 1


def test_a_file_cut_at_any_byte_can_be_resumed(path):
    write_some(path, [0, 1])
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert indices_in(path) == ([0] if size >= first else [])
        assert path.stat().st_size == (first if size >= first else 0)
    write_some(path, [1])
    assert path.read_bytes() == data


@pytest.mark.parametrize("tail", [b'{"index": 1, "te\n', b"\0" * 50, b'{"index": 1, "tex\0\0\0\0\n', b"\n"])
def test_other_torn_ends_are_cut_off(path, tail):
    write_some(path, [0])
    data = path.read_bytes()
    path.write_bytes(data + tail)
    assert indices_in(path) == [0]
    assert path.read_bytes() == data


def test_writer_does_not_glue_a_record_to_a_torn_one(path):
    write_some(path, [0])
    path.write_bytes(path.read_bytes() + b'{"index": 1')
    with pytest.raises(ConfigError, match="changed"):
        RecordWriter(path, RESPONSES, go_on_at=len(path.read_bytes().splitlines(keepends=True)[0]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b'{"index": 7, "text"\n', "line 2 .* damaged"),
        (b'{"index": 0, "text": ""}\n', "line 2 .* repeats .* index 0"),
        (b'{"prompt": "x"}\n', "line 2 .* no record"),
        (b'{"index": true, "text": ""}\n', "line 2 .* no record"),
        (b"null\n", "line 2 .* no record"),
        (b"hello\n", "line 2 .* no record"),
    ],
)
def test_damage_in_the_middle_is_refused_and_the_file_left_alone(path, damage, message):
    write_some(path, [0, 1])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + second)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message):
        load_recorded(path)
    assert path.read_bytes() == before


def test_no_line_is_read_beyond_the_longest_record(path, monkeypatch):
    monkeypatch.setattr(resume, "_MAX_RECORD_BYTES", 1000)
    write_some(path, [0, 1])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"index": 7, "text": "' + b"x" * 3000 + b'"}\n' + second)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"line 2 .* damaged"):
        load_recorded(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("data", [b'{"prompt": "mine"}', b"notes of mine", b'{"prompt": "mine"}\n', b"a,b\n1,2\n"])
def test_a_foreign_file_is_never_cut(path, data):
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="no record of this program"):
        load_recorded(path)
    assert path.read_bytes() == data


any_text = st.text(st.characters(exclude_categories=[]), max_size=20)
ids = st.lists(st.none() | any_text, max_size=6)


@given(ids=ids, text=any_text, value=st.floats())
def test_what_is_written_reads_back(tmp_path_factory, ids, text, value):
    path = tmp_path_factory.mktemp("records") / "out.jsonl"
    with RecordWriter(path, RESPONSES) as writer:
        for index, custom_id in enumerate(ids):
            complete(writer, index, custom_id, text=text, logprobs=[TokenLogprob(1, value)])
    records = read_lines(path)
    assert indices_in(path) == [record["index"] for record in records]
    for record, custom_id in zip(records, ids, strict=True):
        assert (record["custom_id"] is None) == (custom_id is None)
        assert record["text"] == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_an_output_goes_on_with_its_own_input_only(path):
    write_some(path, [0, 2])
    with RecordWriter(path, RESPONSES, go_on_at=load_recorded(path).num_bytes) as writer:
        fail(writer, 1)
    recorded = load_recorded(path)
    lines = [
        Request(i, None, "p", content_hash=h, line=i + 1) for i, h in enumerate(["0" * 16, "ab", f"{2:016x}", "f"])
    ]
    check_same_input(recorded, lines, path)  # a line was appended to the input
    check_same_input(recorded, lines[:3], path)
    with pytest.raises(ConfigError, match="has 1 records of lines that the input does not have"):
        check_same_input(recorded, lines[:2], path)
    lines[1] = RequestError(1, 2, None, "code", "message", content_hash="ac")
    with pytest.raises(ConfigError, match="line 2 of the input"):
        check_same_input(recorded, lines, path)
