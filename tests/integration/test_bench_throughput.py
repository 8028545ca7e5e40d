"""``bench throughput``: every combination once a round, in one file that an interrupted sweep goes on with."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import h5py
import pytest

from fastdecode_hpc.bench.throughput import KEYS, UNITS, full_stretch, list_cases
from fastdecode_hpc.cli import build_parser, run_command
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.report.sweep import SweepFile, merge_sweeps, read_sweep
from fastdecode_hpc.timing import StepTimes
from launching import fastdecode
from tiny_models import make_checkpoint

SWEEP = ["--batch-sizes", "4,8", "--contexts", "32", "--new-tokens", "16", "--kv-dtypes", "fp16,int8", "--threads", "1",
         "--schedules", "greedy,load-stabilizing", "--kv-memory-bytes", "4M"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def sweep(checkpoint, out, *more):
    return fastdecode("bench", "throughput", "--model", checkpoint, "--output", out, *SWEEP, *more)


def test_a_sweep_is_kept_and_gone_on_with(checkpoint, tmp_path):
    out = tmp_path / "sweep.h5"
    done = sweep(checkpoint, out, "--ranks", "1,2", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    first = read_sweep(out)
    assert len(first) == 2 * 2 * 2 * 2
    assert len({tuple(row[name] for name in KEYS) for row in first}) == len(first)
    assert all(row["decode_tokens_per_s"] > 0 and row["end_to_end_tokens_per_s"] > 0 for row in first)
    assert {row["ranks"] for row in first} == {1, 2}
    more = sweep(checkpoint, out, "--ranks", "2", "--rounds", "2", "--prompts", "given")
    assert more.returncode == 0, more.stderr
    assert read_sweep(out)[: len(first)] == first  # nothing is measured twice
    assert len(read_sweep(out)) == len(first) + 8
    assert more.stdout.count("load-stabilizing") == 8
    with h5py.File(out) as file:
        assert {data.attrs["units"] for data in file["samples"].values()} >= {"s", "tokens", "tokens/s", "1"}
        assert file.attrs["kind"] == "sweep"


def test_prompts_may_be_computed(checkpoint, tmp_path):
    out = tmp_path / "sweep.h5"
    options = ["--batch-sizes", "4", "--schedules", "greedy", "--kv-dtypes", "fp16", "--rounds", "1"]
    assert sweep(checkpoint, out, *options, "--prompts", "computed").returncode == 0
    (row,) = read_sweep(out)
    assert row["t_prefill"] > 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--batch-sizes", "x"], "--batch-sizes is 'x'"),
        pytest.param(["--contexts", "4"], "--contexts has 4", marks=pytest.mark.slow),
        (["--new-tokens", "4"], "at least 8"),
        (["--schedules", "fast"], "--schedules is 'fast'"),
        (["--kv-dtypes", "fp1"], "kv_dtype is 'fp1'"),
        (["--ranks", "0"], "--ranks is 0"),
        pytest.param(["--num-layers", "99"], "this model has", marks=pytest.mark.slow),
        (["--contexts", "99999"], "takes at most"),
        pytest.param(["--batch-sizes", "4096"], "of KV cache", marks=pytest.mark.slow),
        (["--num-layers", "99", "--ranks", "2"], "this model has"),
        (["--batch-sizes", "4096", "--ranks", "2"], "of KV cache"),
    ],
)
def test_mistakes_are_said_before_anything_runs(checkpoint, tmp_path, args, said):
    """And by all ranks: one that stayed would wait for the others."""
    done = sweep(checkpoint, tmp_path / "sweep.h5", *args)
    assert done.returncode == 2
    assert said in done.stderr


def row_of(**values):
    texts = {name: "x" if unit == "text" else 1 for name, unit in UNITS.items()}
    return {**texts, **values}


def open_sweep(path, units=UNITS, **fixed):
    return SweepFile(path, units, KEYS, fixed={"model": "m", **fixed}, attributes={"host": "here"})


def test_figures_of_another_model_are_not_mixed_in(tmp_path):
    open_sweep(tmp_path / "s.h5").add(row_of())
    with pytest.raises(ConfigError, match="model was 'm', now it is 'other'"):
        open_sweep(tmp_path / "s.h5", model="other")
    assert read_sweep(tmp_path / "s.h5") == [row_of()]


@pytest.mark.parametrize("name", [spec.name for spec in dataclasses.fields(RunConfig) if spec.name != "model"])
def test_an_option_that_an_older_sweep_lacks_had_its_default(tmp_path, name):
    default = str(getattr(RunConfig(), name))
    open_sweep(tmp_path / "old.h5").add(row_of())
    assert open_sweep(tmp_path / "old.h5", **{name: default}).rows == [row_of()]
    with pytest.raises(ConfigError, match=f"{name} was {re.escape(repr(default))}, now it is 'another'"):
        open_sweep(tmp_path / "old.h5", **{name: "another"})
    open_sweep(tmp_path / "new.h5", **{name: default}).add(row_of(round=2))
    open_sweep(tmp_path / "other.h5", **{name: "another"}).add(row_of(round=2))
    for parts in (("old", "new"), ("new", "old")):  # whichever comes first
        assert len(merge_sweeps([tmp_path / f"{part}.h5" for part in parts], tmp_path / "all.h5")[0]) == 2
    for parts in (("old", "other"), ("other", "old")):
        with pytest.raises(ConfigError, match=name):
            merge_sweeps([tmp_path / f"{part}.h5" for part in parts], tmp_path / "all.h5")


def test_an_option_that_only_the_file_knows_is_told(tmp_path):
    open_sweep(tmp_path / "s.h5", lost_option="7").add(row_of())
    with pytest.raises(ConfigError, match="lost_option was '7', this version of the program does not have it"):
        open_sweep(tmp_path / "s.h5")


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.h5"
    path.write_text("hello")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_sweep(path)
    assert path.read_text() == "hello"
    with h5py.File(path, "w") as file:
        file.attrs["kind"] = "report"
    with pytest.raises(ConfigError, match="no sweep"):
        open_sweep(path)
    fewer = {name: unit for name, unit in UNITS.items() if name != "step_s"}
    open_sweep(tmp_path / "old.h5", fewer).add({n: v for n, v in row_of().items() if n != "step_s"})
    with pytest.raises(ConfigError, match="step_s"):
        open_sweep(tmp_path / "old.h5")


def test_rows_read_back_as_they_were(tmp_path):
    rows = [row_of(round=i, kv_dtype="k=int8,v=int4", step_s=0.25 * i) for i in range(3)]
    file = open_sweep(tmp_path / "s.h5")
    for row in rows:
        assert row not in file
        file.add(row)
        assert row in file
    assert read_sweep(tmp_path / "s.h5", UNITS) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["s.h5"]


def test_the_full_stretch_leaves_beginning_and_end_out():
    counts = [1, 4, 9, 20, 20, 19, 20, 12, 3]
    steps = [StepTimes(step, slot, 0.0, count // 2 + (count % 2) * slot, 0, 0)
             for step, count in enumerate(counts) for slot in range(2)]  # fmt: skip
    assert full_stretch(steps) == (3, 6)


def test_parts_of_a_sweep_are_merged_into_the_whole(tmp_path, capsys):
    parts = []
    for number in range(3):
        parts.append(tmp_path / f"part-{number}.h5")
        file = open_sweep(parts[-1])
        for batch in range(number, 7, 3):
            file.add(row_of(batch=batch, kv_dtype="fp16", decode_tokens_per_s=float(batch + 1)))
    assert run_command(["report", "merge", *map(str, parts), "-o", str(tmp_path / "all.h5")]) == 0
    assert sorted(row["batch"] for row in read_sweep(tmp_path / "all.h5", UNITS)) == list(range(7))
    assert len(capsys.readouterr().out.splitlines()) == 1 + 7
    with h5py.File(tmp_path / "all.h5") as file:
        assert json.loads(file.attrs["parts"]) == [path.name for path in parts]
        assert {data.attrs["units"] for data in file["samples"].values()} == {"1", "s", "tokens", "tokens/s"}
    open_sweep(tmp_path / "all.h5")  # it is a sweep like any other


def test_parts_that_are_of_different_sweeps_or_overlap_are_refused(tmp_path):
    for name, model in (("a", "m"), ("b", "other"), ("c", "m")):
        open_sweep(tmp_path / f"{name}.h5", model=model).add(row_of())
    with pytest.raises(ConfigError, match=r"b\.h5 is a sweep of something else"):
        merge_sweeps([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "all.h5")
    with pytest.raises(ConfigError, match=r"a\.h5 and .*c\.h5 have the same measurement"):
        merge_sweeps([tmp_path / "a.h5", tmp_path / "c.h5"], tmp_path / "all.h5")
    assert not (tmp_path / "all.h5").exists()


def test_every_combination_is_in_one_part():
    lists = ["--batch-sizes", "1,2,3", "--contexts", "64,128", "--kv-dtypes", "fp16,int8"]

    def cases(*part: str):
        command = ["bench", "throughput", "--output", "s.h5", *lists, *part]
        return list_cases(build_parser().parse_args(command))

    parts = [cases("--part", f"{number}/5") for number in range(5)]
    assert sorted(map(str, itertools.chain(*parts))) == sorted(map(str, cases()))
    assert {len(part) for part in parts} == {2, 3}
    with pytest.raises(ConfigError, match="--part is 12/13, and there are 12 combinations"):
        cases("--part", "12/13")
    for bad in ("4/4", "-1/4", "1", "a/b"):
        with pytest.raises(SystemExit):
            cases("--part", bad)
