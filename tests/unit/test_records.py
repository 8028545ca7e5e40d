"""Writing records and reading them back: valid JSON lines whatever is in them, and nothing lost or destroyed."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_hpc.batch.records import Recorded, RecordWriter, load_recorded
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.sequence import Request, TokenLogprob


def ids_in(path):
    return {index: recorded.custom_id for index, recorded in load_recorded(path).items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def complete(writer, index, custom_id=None, text="text", return_token_ids=False, **fields):
    request = Request(index, custom_id, "prompt", return_token_ids=return_token_ids)
    fields = {"token_ids": [5, 6], "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 2} | fields
    writer.write_completion(request, text=text, **fields)


def write_some(path, indices, **options):
    with RecordWriter(path, **options) as writer:
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
    with RecordWriter(path) as writer:
        complete(writer, 0, "a")
        complete(writer, 1, return_token_ids=True, logprobs=logprobs, notes=["clamped"])
        writer.write_error(2, "c", "bad", "why")
        assert (writer.num_written, writer.num_errors) == (3, 1)
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    assert read_lines(path) == [
        {"index": 0, "custom_id": "a", "text": "text", "finish_reason": "stop", "usage": usage},
        {"index": 1, "custom_id": None, "text": "text", "finish_reason": "stop", "usage": usage, "token_ids": [5, 6],
         "logprobs": [{"token": 5, "logprob": -0.5, "top": [[5, -0.5], [7, -1.5]]}], "notes": ["clamped"]},
        {"index": 2, "custom_id": "c", "error": {"code": "bad", "message": "why"}},
    ]  # fmt: skip


def test_each_record_is_in_the_file_when_it_was_written(path):
    with RecordWriter(path) as writer:
        for index in range(3):
            complete(writer, index)
            assert len(read_lines(path)) == index + 1


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_numbers_that_json_lacks_become_null(path, value):
    with RecordWriter(path) as writer:
        complete(writer, 0, logprobs=[TokenLogprob(5, value, ((5, value),))])
    assert read_lines(path)[0]["logprobs"] == [{"token": 5, "logprob": None, "top": [[5, None]]}]


def test_half_surrogate_pairs_are_replaced(path):
    with RecordWriter(path) as writer:
        complete(writer, 0, "id\udc00", text="a\ud83d!\U0001f600")
        writer.write_error(1, None, "bad", "saw \ud800")
    first, second = read_lines(path)
    assert (first["custom_id"], first["text"]) == ("id\ufffd", "a\ufffd!\U0001f600")
    assert second["error"]["message"] == "saw \ufffd"


def test_text_is_written_readably(path):
    with RecordWriter(path) as writer:
        complete(writer, 0, text="naïve 日本")
    assert "naïve 日本" in path.read_text(encoding="utf-8")


def test_results_are_not_overwritten_by_accident(path):
    write_some(path, [0])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="not empty"):
        RecordWriter(path)
    assert path.read_bytes() == before


def test_an_empty_output_may_be_used(path):
    path.touch()
    write_some(path, [0])
    assert ids_in(path) == {0: "id0"}


def test_overwrite_starts_anew(path):
    write_some(path, [0, 1])
    write_some(path, [5], overwrite=True)
    assert ids_in(path) == {5: "id5"}


def test_resume_appends(path):
    write_some(path, [0, 1], resume=True)  # a first run may be started like a resumed one
    write_some(path, [2], resume=True)
    assert ids_in(path) == {0: "id0", 1: "id1", 2: "id2"}
    with pytest.raises(ConfigError, match="contradict"):
        RecordWriter(path, resume=True, overwrite=True)


def test_output_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordWriter(tmp_path / "missing" / "out.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordWriter(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recorded(tmp_path)


def test_nothing_is_recorded_in_a_missing_or_empty_file(path):
    assert ids_in(path) == {}
    path.touch()
    assert ids_in(path) == {}


def test_error_records_count_as_recorded(path):
    with RecordWriter(path) as writer:
        writer.write_error(4, None, "bad", "why")
    assert ids_in(path) == {4: None}


def test_a_file_cut_at_any_byte_can_be_resumed(path):
    write_some(path, [0, 1])
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert ids_in(path) == ({0: "id0"} if size >= first else {})
        assert path.stat().st_size == (first if size >= first else 0)
    write_some(path, [1], resume=True)
    assert path.read_bytes() == data


@pytest.mark.parametrize("tail", [b'{"index": 1, "te\n', b"\0" * 50, b'{"index": 1, "tex\0\0\0\0\n', b"\n"])
def test_other_torn_ends_are_cut_off(path, tail):
    write_some(path, [0])
    data = path.read_bytes()
    path.write_bytes(data + tail)
    assert ids_in(path) == {0: "id0"}
    assert path.read_bytes() == data


def test_writer_does_not_glue_a_record_to_a_torn_one(path):
    write_some(path, [0])
    path.write_bytes(path.read_bytes() + b'{"index": 1')
    with pytest.raises(ConfigError, match="middle of a line"):
        RecordWriter(path, resume=True)


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
    with RecordWriter(path) as writer:
        for index, custom_id in enumerate(ids):
            complete(writer, index, custom_id, text=text, logprobs=[TokenLogprob(1, value)])
    records = read_lines(path)
    assert ids_in(path) == {record["index"]: record["custom_id"] for record in records}
    for record, custom_id in zip(records, ids, strict=True):
        assert (record["custom_id"] is None) == (custom_id is None)
        assert record["text"] == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_failures_are_known_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with RecordWriter(path) as writer:
        writer.write_error(3, "a", "code", "message")
        writer.write_completion(
            Request(4, None, "x"), text="", token_ids=[], finish_reason="stop", prompt_tokens=1, output_tokens=1
        )
    assert load_recorded(path) == {3: Recorded("a", True), 4: Recorded(None, False)}
