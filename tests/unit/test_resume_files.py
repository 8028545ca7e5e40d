"""The files beside an output: how it was made, and what has been generated in part."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastdecode_hpc
from fastdecode_hpc.batch import fingerprint as fingerprint_module
from fastdecode_hpc.batch.fingerprint import RESULT_OPTIONS, check_fingerprint, save_fingerprint, take_fingerprint
from fastdecode_hpc.batch.parked import Parked, load_parked, save_parked
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.sequence import SamplingParams

DOCS = Path(fastdecode_hpc.__file__).parents[2] / "docs"
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


OLD_BUILDS = [  # options of a fingerprint, by the build that wrote it
    RESULT_OPTIONS,
    [name for name in RESULT_OPTIONS if name not in ("s_part", "weight_dtype", "trust_remote_code")],
    ["dtype", "wire_dtype", "kv_dtype", "max_context_len", "overlong", "seed"],
    [],
]


@pytest.mark.parametrize("known", OLD_BUILDS, ids=len)
def test_a_field_that_an_older_build_did_not_have_is_its_default(tmp_path, model, known):
    path, saved = tmp_path / "out.jsonl.job.json", take(model)
    saved["options"] = {name: saved["options"][name] for name in known}
    saved["sampling"] = {name: value for name, value in saved["sampling"].items() if name in ("stop", "logit_bias")}
    save_fingerprint(path, saved)
    check_fingerprint(path, take(model), tmp_path)
    changed = take(model, num_layers=3, weight_dtype="int8", defaults=dataclasses.replace(DEFAULTS, top_k=5))
    with pytest.raises(ConfigError) as caught:
        check_fingerprint(path, changed, tmp_path)
    for said in ("num_layers was None, now it is 3", "weight_dtype was 'auto', now it is 'int8'", "top_k was 0, now"):
        assert said in str(caught.value)


@pytest.mark.parametrize("part", ["options", "sampling"])
@pytest.mark.parametrize("value", [1, None, "x"])
def test_a_field_that_only_the_file_has_is_told(tmp_path, model, part, value):
    path, saved = tmp_path / "out.jsonl.job.json", take(model)
    saved[part]["lost_option"] = value
    save_fingerprint(path, saved)
    with pytest.raises(ConfigError, match=f"lost_option was {value!r}, this version of the program does not have it"):
        check_fingerprint(path, take(model), tmp_path)


def test_a_models_code_counts_where_it_is_run(tmp_path, model):
    path, code = tmp_path / "out.jsonl.job.json", model / "modeling_own.py"
    code.write_text("x = 1")
    plain, trusting = {"s_part": "transformers"}, {"s_part": "transformers", "trust_remote_code": True}
    older = take(model, **plain)
    older["model"]["modeling_own.py"] = "5 bytes, of a build that kept it whether it was run or not"
    save_fingerprint(path, older)
    check_fingerprint(path, take(model, **plain), tmp_path)
    assert "modeling_own.py" not in take(model)["model"]
    with pytest.raises(ConfigError, match=r"trust_remote_code was False, now it is True"):
        check_fingerprint(path, take(model, **trusting), tmp_path)
    save_fingerprint(path, take(model, **trusting))
    check_fingerprint(path, take(model, **trusting), tmp_path)
    code.write_text("x = 2")
    with pytest.raises(ConfigError, match=r"the model's modeling_own\.py has changed"):
        check_fingerprint(path, take(model, **trusting), tmp_path)
    code.unlink()
    with pytest.raises(ConfigError, match=r"the model's modeling_own\.py is gone"):
        check_fingerprint(path, take(model, **trusting), tmp_path)


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


def test_every_option_is_one_of_the_run_and_in_the_docs():
    assert set(RESULT_OPTIONS) <= {spec.name for spec in dataclasses.fields(RunConfig)}
    named = re.findall(
        r"`(\w+)`", (DOCS / "batch.md").read_text().partition("the options")[2].partition("sampling flags")[0]
    )
    assert named == [*RESULT_OPTIONS, "auto_id"]


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
