"""The HDF5 report: complete or absent, columns with units, readable by plain h5py."""

from __future__ import annotations

import json
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


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        format_report(tmp_path / "missing.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(ConfigError, match="cannot be read"):
        format_report(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w"):
        pass
    with pytest.raises(ConfigError, match="no report of this program"):
        format_report(tmp_path / "other.h5")
    with pytest.raises(ConfigError, match="cannot be written"):
        ReportWriter(tmp_path / "nowhere" / "run.h5", {}, ())
