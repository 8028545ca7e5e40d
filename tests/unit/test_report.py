"""The HDF5 report: complete or absent, columns with units, readable by plain h5py."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import h5py
import pytest

from fastdecode_hpc import report
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.report import ReportWriter, format_report
from fastdecode_hpc.timing import RankTimes, StepTimes


def step(number: int) -> StepTimes:
    times = StepTimes(number, number % 2, float(number), num_rows=3, load_tokens=100 + number, prefill_tokens=0)
    times.t_s_part, times.t_end = 0.5, number + 1.0
    times.ranks = {1: RankTimes(0.1, 0.2, 0.0, 50, 40), 2: RankTimes(0.3, 0.0, 0.0, 60, 60)}
    return times


def test_columns_grow_over_flushes_and_keep_their_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "FLUSH_ROWS", 16)
    with ReportWriter(tmp_path / "run.h5", {"config": {"a": 1}, "program_version": "9"}, (1, 2)) as writer:
        for number in range(100):
            writer.add_step(step(number))
        assert not (tmp_path / "run.h5").exists()
        writer.finish({"decode_tokens_per_s": (12.5, "tokens/s")})
    with h5py.File(tmp_path / "run.h5") as file:
        assert file["steps/step"][:].tolist() == list(range(100))
        assert file["steps/load_tokens"].dtype.kind == "i"
        assert set(file["steps/t_r_part"][:]) == {0.3}  # the slowest R-worker's
        assert file["ranks/2/free_blocks"][:].tolist() == [60] * 100
        assert file["summary/decode_tokens_per_s"][()] == 12.5
        assert file["summary/decode_tokens_per_s"].attrs["units"] == "tokens/s"
        assert json.loads(file.attrs["config"]) == {"a": 1}
    text = format_report(tmp_path / "run.h5")
    assert "decode_tokens_per_s" in text and "100 with rows" in text
    assert [path.name for path in tmp_path.iterdir()] == ["run.h5"]


def test_a_run_that_fails_leaves_no_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ReportWriter(tmp_path / "run.h5", {}, (1, 2)) as writer:
        writer.add_step(step(0))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        format_report(tmp_path / "missing.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(ConfigError, match="cannot be read"):
        format_report(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w"):
        pass
    with pytest.raises(ConfigError, match="no report of this program"):
        format_report(tmp_path / "other.h5")


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings of the report."""
    monkeypatch.setattr(report, "logger", logging.getLogger("apart"))  # the package's own may be set up already
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def write(path: Path, num_steps: int = 3) -> None:
    with ReportWriter(path, {"config": {"a": 1}, "program_version": "9"}, (1, 2)) as writer:
        for number in range(num_steps):
            writer.add_step(step(number))
        writer.add_request(dict.fromkeys(report.REQUEST_UNITS, 1))
        writer.finish({"run_time": (12.5, "s")}, {1: 0.5})


def check_fallback(path: Path) -> None:
    assert [found.name for found in path.parent.iterdir()] == [f"{path.name}.json"]
    told = json.loads(path.with_name(f"{path.name}.json").read_text())
    assert told["summary"] == {"run_time": {"value": 12.5, "units": "s"}}
    assert told["attributes"] == {"schema_version": 1, "config": {"a": 1}, "program_version": "9"}


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

    monkeypatch.setattr(report._Table, failing, fail)
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
        if kwargs:
            raise AttributeError("'h5py.h5p.PropFAID' object has no attribute 'set_file_locking'")
        return real(*args)

    monkeypatch.setattr(h5py, "File", old_library)
    write(tmp_path / "run.h5")
    assert asked == ["best-effort", None]
    assert (tmp_path / "run.h5").exists()
