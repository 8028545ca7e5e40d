"""The files beside an output: how it was made, and what has been generated in part."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.batch import fingerprint as fingerprint_module
from fastdecode_hpc.batch.fingerprint import RESULT_OPTIONS, check_fingerprint, save_fingerprint, take_fingerprint
from fastdecode_hpc.batch.parked import Parked, load_parked, save_parked
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.sequence import SamplingParams

DEFAULTS = SamplingParams(stop=("x",), logit_bias=((3, 1.5),))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(200)))
    (folder / "README.md").write_text("not part of it")
    return folder


def take(model, defaults=DEFAULTS, auto_id=False, **options):
    return take_fingerprint(RunConfig(**options), defaults, model, auto_id=auto_id)


def test_the_same_again_is_accepted(tmp_path, model):
    path = tmp_path / "out.jsonl.job.json"
    save_fingerprint(path, take(model))
    (model / "README.md").write_text("changed")
    check_fingerprint(path, take(model, ranks=7, max_batch_size=3, threads=5, kv_memory_bytes=1 << 30), tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "seed was 0, now it is 1"),
        ({"kv_dtype": "int8"}, "kv_dtype was 'fp16', now it is 'int8'"),
        ({"max_context_len": 99}, "max_context_len was None, now it is 99"),
        ({"overlong": "truncate-left"}, "overlong was 'error'"),
        ({"merge_system": True}, "merge_system was False"),
        ({"auto_id": True}, "auto_id was False, now it is True"),
        ({"defaults": dataclasses.replace(DEFAULTS, top_k=5)}, "top_k was 0, now it is 5"),
        ({"defaults": dataclasses.replace(DEFAULTS, stop=())}, "stop was ['x'], now it is []"),
    ],
)
def test_what_differs_is_said(tmp_path, model, change, said):
    path = tmp_path / "out.jsonl.job.json"
    save_fingerprint(path, take(model))
    with pytest.raises(ConfigError) as caught:
        check_fingerprint(path, take(model, **change), tmp_path / "out.jsonl")
    assert said in str(caught.value)
    assert "--overwrite" in str(caught.value)


def test_another_model_is_refused_wherever_its_files_differ(tmp_path, model, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "SMALL_FILE_BYTES", 100)
    monkeypatch.setattr(fingerprint_module, "END_BYTES", 20)
    path = tmp_path / "out.jsonl.job.json"
    save_fingerprint(path, take(model))
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    for changed in (b"\xff" + data[1:], data[:-1] + b"\xff", data + b"\0"):
        weights.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"the model's model\.safetensors has changed"):
            check_fingerprint(path, take(model), tmp_path)
    weights.write_bytes(data)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the model's tokenizer\.json is new"):
        check_fingerprint(path, take(model), tmp_path)
    assert list(take(model, load_format="dummy")["model"]) == ["config.json"]


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"model": 3}'])
def test_a_damaged_file_is_refused(tmp_path, model, text):
    path = tmp_path / "out.jsonl.job.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        check_fingerprint(path, take(model), tmp_path)


def test_every_option_is_one_of_the_run():
    assert set(RESULT_OPTIONS) <= {spec.name for spec in dataclasses.fields(RunConfig)}


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
entries = st.builds(Parked, st.text("0123456789abcdef", max_size=16), st.lists(tokens, max_size=3).map(tuple))


@settings(deadline=None)  # it waits for the disk
@given(st.dictionaries(st.integers(0, 10**6), entries, max_size=4))
def test_parked_answers_read_back(tmp_path_factory, parked):
    path = tmp_path_factory.mktemp("parked") / "out.jsonl.parked.jsonl"
    save_parked(path, {5: Parked("old", ((1,),))})
    save_parked(path, parked)
    assert load_parked(path) == parked
    assert path.exists() == bool(parked)  # it does not outlive its use


@pytest.mark.parametrize(
    "text",
    ["nonsense", "[1]", "{}", '{"index": 1, "content_hash": "a", "choices": [["x"]]}',
     '{"index": 1, "content_hash": "a", "choices": [[-1]]}', '{"index": 1, "content_hash": "a", "choices": 5}',
     '{"index": "1", "content_hash": "a", "choices": []}', "[" * 100_000],
)  # fmt: skip
def test_damaged_parked_answers_are_refused(tmp_path, text):
    path = tmp_path / "out.jsonl.parked.jsonl"
    path.write_text(json.dumps({"index": 0, "content_hash": "a", "choices": [[1]]}) + "\n" + text + "\n")
    with pytest.raises(ConfigError, match=r"line 2.*remove it"):
        load_parked(path)
