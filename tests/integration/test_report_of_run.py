"""The report of a whole run on two ranks, against what is known from elsewhere and against itself."""

from __future__ import annotations

import dataclasses
import json

import h5py
import numpy as np
import pytest

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.costs import Costs
from fastdecode_hpc.planner.profile import load_profile, save_profile
from fastdecode_hpc.report.schema import FINISH_REASONS, PREDICTED_UNITS, SPAN_KINDS
from launching import fastdecode, read_records, write_requests
from tiny_models import make_checkpoint, random_prompt

LAYERS_SLOTS = "num_layers", "num_slots"
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict[str, dict[str, np.ndarray]], dict, list[dict]]:
    """Tables by path, attributes (summary's figures among them), and records of a run; one line is wrong."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint = make_checkpoint(folder / "model", "llama")
    lines = [{"prompt": random_prompt(5 + 11 * i % 60, seed=i), "max_new_tokens": NEW_TOKENS} for i in range(8)]
    path = write_requests(
        folder / "in.jsonl", [*lines, {"prompt": []}, {"prompt": [1, 2], "n": 2, "max_new_tokens": 4}]
    )
    done = fastdecode(
        "generate", "--ranks", 2, "--model", checkpoint, "--input", path, "--output", folder / "out.jsonl",
        "--report", folder / "run.h5", "--kv-memory-bytes", "4M", "--ignore-eos", "--max-batch-size", 16,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    with h5py.File(folder / "run.h5") as file:
        attributes = {name: file.attrs[name] for name in file.attrs}
        attributes["path"] = folder / "run.h5"
        attributes["summary"] = {name: data[()] for name, data in file["summary"].items()}
        tables = {
            table: {name: data[:] for name, data in file[table].items() if isinstance(data, h5py.Dataset)}
            for table in ("steps", "load", "requests", "ranks/1", "ranks/0/spans", "ranks/1/spans")
        }
    return tables, attributes, read_records(folder / "out.jsonl")


def test_requests_are_those_of_the_records(run) -> None:
    tables, attributes, records = run
    requests = {name: values[np.argsort(tables["requests"]["index"])] for name, values in tables["requests"].items()}
    assert requests["index"].tolist() == [record["index"] for record in records]
    usage = [record.get("usage", {"prompt_tokens": 0, "completion_tokens": 0}) for record in records]
    assert requests["output_tokens"].tolist() == [one["completion_tokens"] for one in usage]
    assert requests["prompt_tokens"].tolist() == [one["prompt_tokens"] for one in usage]
    assert requests["output_tokens"].sum() == attributes["summary"]["output_tokens"]
    assert requests["failed"].sum() == attributes["summary"]["num_errors"] == 1
    words = [FINISH_REASONS[code] for code in requests["finish_reason"]]
    assert words == ["error" if "error" in record else "length" for record in records]
    ran = requests["failed"] == 0
    assert (requests["owner"][ran] == 1).all() and (requests["owner"][~ran] == -1).all()
    for earlier, later in (("t_admitted", "t_first_token"), ("t_first_token", "t_finished")):
        assert (requests[earlier][ran] <= requests[later][ran]).all()
    assert (requests["queue_wait"][ran] >= 0).all() and (requests["queue_wait"] <= requests["t_admitted"])[ran].all()
    assert (requests["t_finished"][ran] <= attributes["summary"]["run_time"]).all()


def test_load_is_that_of_the_steps(run) -> None:
    tables, _, _ = run
    steps, load = tables["steps"], tables["load"]
    assert load["step"].tolist() == sorted(set(steps["step"].tolist()))
    for step, tokens, largest in zip(load["step"], load["load_tokens"], load["rank_load_max"], strict=True):
        assert tokens == steps["load_tokens"][steps["step"] == step].sum() == largest  # one R-worker reads it all
    assert np.isnan(load["load_limit"]).all()


def spans_of(tables, rank: int, kind: str) -> dict[str, np.ndarray]:
    spans = tables[f"ranks/{rank}/spans"]
    mine = spans["kind"] == SPAN_KINDS.index(kind)
    return {name: values[mine] for name, values in spans.items()}


def test_spans_lie_in_the_run_and_do_not_overlap(run) -> None:
    tables, attributes, _ = run
    error = max(json.loads(attributes["clock_errors_s"]))
    for rank in (0, 1):
        for kind in SPAN_KINDS:
            spans = spans_of(tables, rank, kind)
            assert (spans["t_start"] >= -error).all()
            assert (spans["t_end"] <= attributes["summary"]["run_time"] + error).all()
            assert (spans["t_end"] >= spans["t_start"]).all()
            assert (spans["t_start"][1:] >= spans["t_end"][:-1] - 1e-9).all(), (rank, kind)


def test_every_stage_of_the_kept_steps_has_its_span(run) -> None:
    tables, attributes, _ = run
    num_layers, num_slots = (json.loads(attributes[name])[key] for name, key in zip(
        ("model_config", "config"), LAYERS_SLOTS, strict=True))  # fmt: skip
    steps = tables["steps"]
    kept = sorted(set(spans_of(tables, 0, "s_part")["step"].tolist()))
    assert len(kept) >= 4
    rows = {
        (step, slot): count for step, slot, count in zip(steps["step"], steps["slot"], steps["num_rows"], strict=True)
    }
    full = [step for step in kept if all(rows[step, slot] for slot in range(num_slots))]
    assert len(full) >= 4
    for rank, kind in ((0, "s_part"), (1, "r_part")):
        spans = spans_of(tables, rank, kind)
        found = sorted(zip(spans["step"].tolist(), spans["slot"].tolist(), spans["layer"].tolist(), strict=True))
        inside = [place for place in found if place[0] in full]
        assert len(inside) == num_layers * num_slots * len(full)
        assert found == sorted(set(found))
        assert {place[2] for place in found} == set(range(num_layers))


def test_spans_cover_the_time_that_was_measured_apart_from_them(run) -> None:
    """`t_r_part` comes from a stopwatch around the R-Part's work, `t_exposed` from sums over layers.

    All of the former lies inside the spans but the start of a step, for which the worker stands before the span of
    layer 0.
    """
    tables, _, _ = run
    steps, spans = tables["steps"], spans_of(tables, 1, "r_part")
    num_checked = 0
    for step in sorted(set(spans["step"].tolist())):
        measured = tables["ranks/1"]["t_r_part"][steps["step"] == step].sum()
        covered = (spans["t_end"] - spans["t_start"])[spans["step"] == step].sum()
        if step - 1 in spans["step"]:
            assert measured <= covered + time_ahead(spans, step) + 1e-6, step
            num_checked += 1
    assert num_checked >= 3
    exposed = spans_of(tables, 0, "exposed")
    for step in set(exposed["step"].tolist()):
        told = steps["t_exposed"][steps["step"] == step].sum()
        assert (exposed["t_end"] - exposed["t_start"])[exposed["step"] == step].sum() == pytest.approx(told, abs=1e-6)


def time_ahead(spans, step: int) -> float:
    """Seconds between the attention of layer 0 and the one before it on the R-worker, over the slots of a step."""
    first = (spans["step"] == step) & (spans["layer"] == 0)
    starts = spans["t_start"][first]
    return sum(start - spans["t_end"][spans["t_end"] <= start + 1e-12].max() for start in starts)


def test_a_worker_attends_when_it_has_waited(run) -> None:
    tables, _, _ = run
    spans, waits = spans_of(tables, 1, "r_part"), spans_of(tables, 1, "wait")
    starts = {tuple(place): start for *place, start in rows_of(spans, "t_start")}
    assert len(starts)
    for *place, end in rows_of(waits, "t_end"):
        assert starts[tuple(place)] == pytest.approx(end, abs=1e-9)


def rows_of(spans, column: str):
    return zip(*(spans[name].tolist() for name in ("step", "slot", "layer", column)), strict=True)


def test_predictions_of_a_run_are_for_its_own_steps(run, tmp_path) -> None:
    """Each predicted time is the profile's own for the step's rows and load."""
    tables, attributes, _ = run
    profile, path = load_profile("a10-epyc7452"), tmp_path / "copy.h5"
    done = fastdecode("report", "predict", attributes["path"], "--profile", "a10-epyc7452", "--out", path)
    assert done.returncode == 0, done.stderr
    assert "predicted and measured" in done.stdout
    with h5py.File(path) as file:
        predicted = {name: file[f"steps/{name}"][:] for name in PREDICTED_UNITS}
        assert file.attrs["predicted_by"] == "a10-epyc7452 (published)"
    steps, model = tables["steps"], ModelConfig(**_model_values(attributes))
    costs, rates = Costs(profile, model, RunConfig(), num_workers=1), profile.r_parts[0].rates["fp16"]
    for row in range(len(steps["step"])):
        rows, load = int(steps["num_rows"][row]), int(steps["load_tokens"][row])
        s_part = model.num_layers * costs.s_layer(rows) if rows else 0.0
        assert predicted["predicted_t_s_part"][row] == pytest.approx(s_part)
        read = load * 2 * model.kv_size * 2  # K and V, fp16
        r_part = model.num_layers * (rates.call_s + read / rates.bytes_per_s) if rows else 0.0
        assert predicted["predicted_t_r_part"][row] == pytest.approx(r_part)
    assert (predicted["predicted_t_step"] >= predicted["predicted_t_s_part"]).all()
    other = dataclasses.replace(profile, s_part=dataclasses.replace(profile.s_part, weight_dtype="int8"))
    save_profile(tmp_path / "int8.json", other)
    done = fastdecode("report", "predict", attributes["path"], "--profile", tmp_path / "int8.json", "--out", path)
    assert done.returncode == 2
    assert "--weight-dtype is auto, and profile a10-epyc7452 was measured with int8" in done.stderr


def _model_values(attributes) -> dict:
    values = json.loads(attributes["model_config"])
    return {**values, "eos_token_ids": tuple(values["eos_token_ids"])}
