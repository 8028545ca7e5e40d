"""Writing the HDF5 report: complete, or left readable; columns with units, readable by plain h5py."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.report import schema, tables, writer
from fastdecode_hpc.report.predict import write_predictions
from fastdecode_hpc.report.text import format_report
from fastdecode_hpc.report.writer import ReportWriter
from fastdecode_hpc.timing import RankTimes, StepTimes
from report_files import MadeUpRun, request_row


def step(number: int) -> StepTimes:
    times = StepTimes(number, number % 2, float(number), num_rows=3, load_tokens=100 + number, prefill_tokens=0)
    times.t_s_part, times.t_end = 0.5, number + 1.0
    times.ranks = {1: RankTimes(0.1, 0.2, 0.0, 50, 40), 2: RankTimes(0.3, 0.0, 0.0, 60, 60)}
    return times


def test_columns_grow_over_flushes_and_keep_their_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "FLUSH_ROWS", 16)
    with ReportWriter(tmp_path / "run.h5", {"config": {"a": 1}, "program_version": "9"}, (1, 2)) as report:
        for number in range(100):
            report.add_step(step(number))
        assert not (tmp_path / "run.h5").exists()
        report.finish({"decode_tokens_per_s": (12.5, "tokens/s")})
    with h5py.File(tmp_path / "run.h5") as file:
        assert file["steps/step"][:].tolist() == list(range(100))
        assert file["steps/load_tokens"].dtype.kind == "i"
        assert set(file["steps/t_r_part"][:]) == {0.3}  # the slowest R-worker's
        assert file["ranks/2/free_blocks"][:].tolist() == [60] * 100
        assert file["summary/decode_tokens_per_s"][()] == 12.5
        assert file["summary/decode_tokens_per_s"].attrs["units"] == "tokens/s"
        assert json.loads(file.attrs["config"]) == {"a": 1}
        assert (file.attrs["schema_version"], file.attrs["state"]) == (2, "complete")
    text = format_report(tmp_path / "run.h5")
    assert "decode_tokens_per_s" in text and "100 with rows" in text
    assert [path.name for path in tmp_path.iterdir()] == ["run.h5"]


def test_every_dataset_has_units_and_codes_have_names(tmp_path: Path) -> None:
    path = MadeUpRun().write(tmp_path / "run.h5", predicts=True)

    def check(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            assert item.attrs["units"], name
            if item.dtype == np.int8:
                assert item[:].max(initial=0) < len(item.attrs["names"]), name
            if item.ndim:
                assert item.chunks and item.compression == "gzip", name

    with h5py.File(path) as file:
        file.visititems(check)
        assert set(file["steps"]) == {*schema.STEP_UNITS, *schema.PREDICTED_UNITS}
        assert list(file["ranks/1/spans/kind"].attrs["names"]) == list(schema.SPAN_KINDS)
        assert file["ranks"].attrs["spans_group_steps"] == 4


def test_predictions_are_added_to_a_report_or_to_a_copy_and_replaced(tmp_path: Path) -> None:
    path = MadeUpRun(num_steps=3).write(tmp_path / "run.h5")
    with h5py.File(path) as file:
        assert set(file["steps"]) == set(schema.STEP_UNITS)
        count = len(file["steps/step"])
    before = path.read_bytes()
    write_predictions(path, {"predicted_t_s_part": np.ones(count)}, "one", tmp_path / "copy.h5")
    assert path.read_bytes() == before
    write_predictions(tmp_path / "copy.h5", {"predicted_t_s_part": np.full(count, 2.0)}, "two")
    with h5py.File(tmp_path / "copy.h5") as file:
        assert file["steps/predicted_t_s_part"][:].tolist() == [2.0] * count
        assert file.attrs["predicted_by"] == "two"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["copy.h5", "run.h5"]


def test_load_is_of_whole_steps(tmp_path: Path) -> None:
    run = MadeUpRun(num_steps=5, num_slots=3, num_ranks=4)
    steps = list(run.steps())
    path = run.write(tmp_path / "run.h5", load_limit=5000.0)
    with h5py.File(path) as file:
        load = {name: data[:] for name, data in file["load"].items()}
    assert load["step"].tolist() == list(range(5))
    for row, number in enumerate(load["step"]):
        of_step = [times for times in steps if times.step == number]
        by_rank = [sum(times.ranks[rank].load_tokens for times in of_step) for rank in run.owners]
        assert load["load_tokens"][row] == sum(times.load_tokens for times in of_step)
        assert load["rank_load_max"][row] == max(by_rank)
        assert load["rank_load_mean"][row] == pytest.approx(sum(by_rank) / 3)
    assert (load["load_limit"] == 5000).all()
    with h5py.File(run.write(tmp_path / "unlimited.h5")) as file:
        assert np.isnan(file["load/load_limit"][:]).all()


_COLUMNS = {"step": "1", "t_start": "s", "load_tokens": "tokens", "kind": "1", "load_limit": "tokens"}
_ROWS = st.lists(
    st.tuples(
        st.integers(0, 2**53), st.floats(), st.integers(0, 2**40), st.integers(0, 5), st.floats()
    ),
    max_size=60,
)  # fmt: skip


@given(rows=_ROWS, split=st.integers(0, 60), flush_rows=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_tables_hold_what_they_were_given(tmp_path_factory, rows, split: int, flush_rows: int) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.h5"
    before, tables.FLUSH_ROWS = tables.FLUSH_ROWS, flush_rows
    try:
        with h5py.File(path, "w") as file:
            table = tables.Table(file, "some/table", _COLUMNS)
            for row in rows[:split]:
                table.append(dict(zip(_COLUMNS, row, strict=True)))
            rest = {name: np.array([row[place] for row in rows[split:]]) for place, name in enumerate(_COLUMNS)}
            table.extend(rest)
            table.flush()
    finally:
        tables.FLUSH_ROWS = before
    with h5py.File(path) as file:
        for place, name in enumerate(_COLUMNS):
            np.testing.assert_array_equal(file[f"some/table/{name}"][:], [row[place] for row in rows])


def test_a_run_that_fails_before_its_first_step_leaves_no_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ReportWriter(tmp_path / "run.h5", {}, (1, 2)):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_its_steps_as_a_partial_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ReportWriter(tmp_path / "run.h5", {}, (1, 2)) as report:
        report.add_step(step(0))
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["run.h5.partial"]
    assert "did not end" in format_report(tmp_path / "run.h5")
    write(tmp_path / "run.h5")  # the next run of the job
    assert [path.name for path in tmp_path.iterdir()] == ["run.h5"]


# Writes as fast as it can, far more often than a run does, so that a kill hits the middle of a write.
_WRITING = """
import sys
from fastdecode_hpc.report import tables, writer
from report_files import MadeUpRun, request_row
tables.FLUSH_ROWS, writer.FLUSH_SHARE, writer.FLUSH_S, writer.LEAST_FLUSH_S = 64, 0, 0.0, 0.0
run = MadeUpRun(num_steps=10**6)
with writer.ReportWriter(sys.argv[1], run.attributes(), run.owners) as report:
    for number, times in enumerate(run.steps()):
        report.add_step(times)
        report.add_request(request_row(number))
        if number == 4:
            print("up", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.11, 0.23, 0.41])
def test_a_killed_run_leaves_a_file_that_can_be_read(tmp_path: Path, delay_s: float) -> None:
    path = tmp_path / "run.h5"
    process = subprocess.Popen([sys.executable, "-c", _WRITING, path], stdout=subprocess.PIPE, env=_env())
    assert process.stdout.readline() == b"up\n"
    time.sleep(delay_s)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert [found.name for found in tmp_path.iterdir()] == ["run.h5.partial"]
    with h5py.File(tmp_path / "run.h5.partial", swmr=True) as file:
        steps, numbers = file["steps/step"][:], file["requests/index"][:]
        spans = file["ranks/1/spans/t_end"][:] - file["ranks/1/spans/t_start"][:]
    assert len(steps) >= 4 and steps.tolist() == [number // 2 for number in range(len(steps))]
    assert numbers.tolist() == list(range(len(numbers)))
    assert (spans >= 0).all()
    for name in ("run.h5", "run.h5.partial"):
        shown = format_report(tmp_path / name)
        assert "did not end" in shown and "where time went" in shown


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_running_report_can_be_read(tmp_path: Path) -> None:
    with ReportWriter(tmp_path / "run.h5", {}, (1, 2)) as report:
        for number in range(10):
            report.add_step(step(number))
        report.flush()
        code = "import sys; from fastdecode_hpc.report.text import format_report; print(format_report(sys.argv[1]))"
        command = [sys.executable, "-c", code, tmp_path / "run.h5"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env=_env()).stdout
        report.add_step(step(10))
        report.finish({})
    assert "did not end" in shown and "10 with rows" in shown
    with h5py.File(tmp_path / "run.h5") as file:
        assert len(file["steps/step"]) == 11


def test_rows_reach_the_file_from_time_to_time(tmp_path: Path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    with ReportWriter(tmp_path / "run.h5", {}, (1, 2)) as report:
        lengths = []
        for number in range(6):
            now[0] += 0.75
            report.add_step(step(number))
            lengths.append(report._file["steps/step"].shape[0])
        assert lengths == [0, 2, 2, 2, 5, 5]  # early on the next flush comes when as much time has passed again
        for number in range(6, 60):
            now[0] += 0.75
            report.add_step(step(number))
            assert number < 20 or number + 1 - report._file["steps/step"].shape[0] <= 14  # 10 s


def test_another_job_with_the_same_report_spoils_neither_file(tmp_path: Path, said) -> None:
    path = tmp_path / "run.h5"
    with ReportWriter(path, {"who": "first"}, (1, 2)) as first:
        first.add_step(step(0))
        with ReportWriter(path, {"who": "second"}, (1, 2)) as second:
            second.add_step(step(0))
            first.finish({})
            second.finish({})
    assert "replaced by another job" in said()[0]
    with h5py.File(path) as file:
        assert file.attrs["who"] == "second"
    assert {found.name for found in tmp_path.iterdir()} == {"run.h5", "run.h5.json"}


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings of the report."""
    monkeypatch.setattr(writer, "logger", logging.getLogger("apart"))  # the package's own may be set up already
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def write(path: Path, num_steps: int = 3) -> None:
    notes = {"weights": "random"}
    with ReportWriter(path, {"config": {"a": 1}, "program_version": "9"}, (1, 2), notes=notes) as report:
        for number in range(num_steps):
            report.add_step(step(number))
        report.add_request(request_row(0))
        report.finish({"run_time": (12.5, "s")}, {1: {"kv_huge_pages": 0.5}})


def check_fallback(path: Path) -> None:
    assert [found.name for found in path.parent.iterdir()] == [f"{path.name}.json"]
    told = json.loads(path.with_name(f"{path.name}.json").read_text())
    assert told["summary"] == {"run_time": {"value": 12.5, "units": "s"}}
    assert told["notes"] == {"weights": "random"}
    of_writer = {"program": "fastdecode_hpc", "schema_version": 2, "state": "complete"}
    assert told["attributes"] == {**of_writer, "config": {"a": 1}, "program_version": "9"}


def test_a_file_system_that_refuses_hdf5_leaves_the_summary(tmp_path: Path, monkeypatch, said) -> None:
    def refuse(*args, **kwargs):
        raise OSError("unable to lock file, errno = 37, error message = 'No locks available'")

    monkeypatch.setattr(h5py, "File", refuse)
    write(tmp_path / "run.h5")
    check_fallback(tmp_path / "run.h5")
    (warning,) = said()
    assert "HDF5_USE_FILE_LOCKING=FALSE" in warning and "No locks available" in warning and "run.h5.json" in warning


@pytest.mark.parametrize("failing", ["append", "flush"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("Can't decrement id ref count")]
)
def test_a_disk_that_fills_up_leaves_the_summary(tmp_path: Path, monkeypatch, said, failing: str, error) -> None:
    def fail(*args):
        raise error

    monkeypatch.setattr(tables.Table, failing, fail)
    write(tmp_path / "run.h5")
    check_fallback(tmp_path / "run.h5")
    assert len(said()) == 1


def test_a_report_that_has_no_place_at_all_is_a_warning(tmp_path: Path, said) -> None:
    write(tmp_path / "nowhere" / "run.h5")
    assert len(said()) == 2


def test_locks_are_asked_for_where_there_are_any(tmp_path: Path, monkeypatch) -> None:
    asked, real = [], h5py.File

    def old_library(*args, **kwargs):
        asked.append(kwargs.get("locking"))
        if "locking" in kwargs:
            raise AttributeError("'h5py.h5p.PropFAID' object has no attribute 'set_file_locking'")
        return real(*args, **kwargs)

    monkeypatch.setattr(h5py, "File", old_library)
    write(tmp_path / "run.h5")
    assert asked == ["best-effort", None, False, None]
    assert (tmp_path / "run.h5").exists()
