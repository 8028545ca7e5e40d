"""`fastdecode report`: what is shown, compared, exported and rebuilt, and what is said of files that are no reports."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastdecode_hpc.cli import run_command
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.report.figures import Bins, busiest_group, rank_loads, rank_shares, whole_steps
from fastdecode_hpc.report.reader import open_report
from fastdecode_hpc.report.text import format_report
from fastdecode_hpc.report.writer import ReportWriter
from report_files import MadeUpRun, as_version_1, request_row


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    notes = {"weights": "random (--load-format dummy)"}
    return MadeUpRun(num_steps=12).write(folder / "run.h5", predicts=True, notes=notes)


def test_show_tells_where_time_went(path: Path) -> None:
    shown = format_report(path)
    assert "note: weights: random (--load-format dummy)" in shown
    assert "did not end" not in shown
    run, steps = MadeUpRun(num_steps=12), list(MadeUpRun(num_steps=12).steps())
    wall = steps[-1].t_end - steps[0].t_start
    rows = {}
    for line in shown.splitlines():
        if match := re.fullmatch(r"  (\d+) +([\d. ]+)", line):
            rows[int(match[1])] = [float(text) for text in match[2].split()]
    assert sorted(rows) == [0, 1, 2]
    for row in rows.values():
        assert sum(row[:-1]) == pytest.approx(100, abs=0.6)
    assert rows[0][0] == pytest.approx(100 * sum(times.t_s_part for times in steps) / wall, abs=0.1)
    assert rows[0][3] + rows[0][4] == pytest.approx(100 * sum(times.t_wait for times in steps) / wall, abs=0.1)
    for rank in run.owners:
        assert rows[rank][2] == pytest.approx(100 * sum(t.ranks[rank].t_r_part for t in steps) / wall, abs=0.1)
    told = dict(re.findall(r"  (t_\w+) +\S+ +\S+ +(0\.\d+)$", shown, re.MULTILINE))
    assert told["t_s_part"] == told["t_r_part"] == "0.800" and "t_step" in told


def test_show_of_many_ranks_is_short(tmp_path: Path) -> None:
    shown = format_report(MadeUpRun(num_ranks=65, num_steps=3).write(tmp_path / "run.h5"))
    assert "of 64 R-workers" in shown
    assert len(re.findall(r"^  \d+ +[\d. ]+$", shown, re.MULTILINE)) < 14


def test_show_lists_settings_in_lines_that_fit_a_page(tmp_path: Path) -> None:
    class Wordy(MadeUpRun):
        def attributes(self) -> dict:
            given = super().attributes()
            ranks = [{**one, "cores": list(range(64)), "isa": "avx2", "gpus": 0} for one in given["ranks"]]
            options = {f"option_{number}": number / 3 for number in range(40)}
            nothing = {"profile": None, "stop": []}
            return {**given, "ranks": ranks, "config": {**options, **nothing, "pinned": False}, "slurm": {}}

    shown = format_report(Wordy(num_ranks=20, num_steps=3).write(tmp_path / "run.h5"))
    head = shown[: shown.index("\n\n")].splitlines()
    assert max(map(len, head)) <= 118
    assert "ranks              rank 0, threads 4, cores 0-63, isa avx2, gpus 0" in head
    assert " " * 19 + "and 8 more" in head
    words = " ".join(line[19:] for line in head)
    assert all(f"option_{number} {number / 3:g}, " in words for number in range(40)) and "pinned no" in words
    assert not any(name in words for name in ("profile", "stop"))
    assert not any(line.startswith("slurm") for line in head)


def test_an_older_report_is_read_and_says_what_it_lacks(path: Path, tmp_path: Path) -> None:
    old = as_version_1(path, tmp_path / "old.h5")
    assert "where time went" in format_report(old)
    with open_report(old) as report:
        assert report.is_complete and busiest_group(report, whole_steps(report)) is None
        with pytest.raises(ConfigError, match="no table /load: its schema_version is 1"):
            report.columns("load")
        with pytest.raises(ConfigError, match=r"no owner in /requests"):
            report.columns("requests", ["owner"])
    assert run_command(["report", "export", str(old), str(tmp_path / "csv")]) == 0


def wrong_files(path: Path, folder: Path) -> dict[str, Path]:
    """Files that are no reports, by what is said of them."""
    found = {text: folder / f"{number}.h5" for number, text in enumerate((
        "there is no file", "is no HDF5 file", "no report of this program", "no schema_version of", "reads up to 2",
        "cannot be read: ", "has no table /steps", "has no t_wait in /steps", "is damaged",
    ))}  # fmt: skip
    files = iter(found.values())
    next(files)
    next(files).write_text("no HDF5")
    with h5py.File(next(files), "w") as file:
        file["data"] = [1, 2]
    with h5py.File(next(files), "w") as file:
        file.attrs.update({"schema_version": 1, "program": "other"})
    changed = list(files)
    for out in changed:
        out.write_bytes(path.read_bytes())
    newer, truncated, bare, columnless, damaged = changed
    with h5py.File(newer, "r+") as file:
        file.attrs["schema_version"] = 3
    truncated.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with h5py.File(bare, "r+") as file:
        del file["steps"]
    with h5py.File(columnless, "r+") as file:
        del file["steps/t_wait"]
    with h5py.File(damaged, "r+") as file:
        place = file["steps/t_start"].id.get_chunk_info(0)
    with damaged.open("r+b") as file:
        file.seek(place.byte_offset)
        file.write(b"\xff" * place.size)
    return found


@pytest.mark.parametrize("command", ["show", "plot", "compare", "export"])
def test_every_wrong_file_gets_one_line_and_code_2(path: Path, tmp_path: Path, capsys, command: str) -> None:
    for text, wrong in wrong_files(path, tmp_path).items():
        files = [str(path), str(wrong)] if command == "compare" else [str(wrong)]
        more = {"plot": ["-o", str(tmp_path / "out.png")], "export": [str(tmp_path / "csv")]}.get(command, [])
        code = run_command(["report", command, *files, *more])
        said = capsys.readouterr().err
        needs_steps = "/steps" in text or text == "is damaged"
        if needs_steps and (command == "compare" or (text != "is damaged" and command in ("show", "export"))):
            if command == "show" and "t_wait" in text:
                assert code == 2
            continue  # what is missing isn't needed
        assert code == 2, (text, said)
        assert said.count("\n") == 1 and said.startswith("fastdecode: ") and text in said, (text, said)


def test_reading_reports_imports_neither_torch_nor_mpi(path: Path, tmp_path: Path) -> None:
    for argv in (["--help"], ["show", str(path)], ["plot", str(path), "-o", str(tmp_path / "a.png")],
                 ["compare", str(path), str(path)], ["export", str(path), str(tmp_path)]):  # fmt: skip
        code = (
            "import sys\nfrom fastdecode_hpc.cli import run_command\n"
            "try:\n    run_command(sys.argv[1:])\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'mpi4py', 'transformers', 'h5py', 'numpy'} & set(sys.modules)\n"
            "print(sorted(heavy), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code, "report", *argv], capture_output=True, text=True, check=True)
        assert done.stderr.splitlines()[-1] == ("[]" if argv == ["--help"] else "['h5py', 'numpy']")


def test_steps_are_added_over_slots(path: Path) -> None:
    run = MadeUpRun(num_steps=12)
    made = list(run.steps())
    with open_report(path) as report:
        steps = whole_steps(report)
        shares = rank_shares(report, steps)
        group = busiest_group(report, steps)
    assert steps.step.tolist() == list(range(12))
    assert steps.sums["num_rows"].tolist() == [run.rows * run.num_slots] * 12
    starts = [min(times.t_start for times in made if times.step == step) for step in range(12)]
    assert steps.edges[:-1] == pytest.approx(starts) and steps.edges[-1] == pytest.approx(made[-1].t_end)
    assert [one.rank for one in shares] == [0, 1, 2]
    assert group is not None and group.steps[1] - group.steps[0] == 3
    assert min(columns["t_start"].min() for columns in group.by_rank.values()) == 0.0


def test_shares_are_shown_with_what_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "shares.h5"
    run = MadeUpRun(num_steps=4, num_ranks=4)
    told = {
        rank: {"wanted_share": share, "shares_from": "measured", "token_s": 1e-6, "row_s": row_s, "step_s": 0.0}
        for rank, share, row_s in ((1, 0.45, 1e-4), (2, 0.45, 1e-4), (3, 0.1, 5e-4))
    }
    with ReportWriter(path, run.attributes(), run.owners) as writer:
        loads: Counter[int] = Counter()
        for times in run.steps():
            times.ranks = {rank: dataclasses.replace(one, num_rows=4 - rank) for rank, one in times.ranks.items()}
            loads.update({rank: one.load_tokens for rank, one in times.ranks.items()})
            writer.add_step(times)
        writer.finish({}, told)
    with open_report(path) as report:
        found = rank_loads(report)
    assert [one.load for one in found] == pytest.approx([loads[rank] / loads.total() for rank in run.owners])
    assert [one.rows for one in found] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    assert [(one.wanted, one.attention, one.link) for one in found] == [
        (0.45, 1.0, 1.0), (0.45, 1.0, 1.0), (0.1, 1.0, pytest.approx(5.0))
    ]  # fmt: skip
    shown = format_report(path)
    assert "shares of the R-workers (%; wanted: measured; attention, link: times the fastest's)" in shown
    (_, line) = [line.split() for line in shown.splitlines() if line.startswith("  3  ")]  # the other: where time went
    assert line[-3:] == ["10.0", "1.0", "5.0"]


def test_shares_of_a_report_that_does_not_tell_them_are_left_open(path: Path) -> None:
    with open_report(path) as report:
        found = rank_loads(report)
    assert sum(one.load for one in found) == pytest.approx(1)
    assert all(math.isnan(one.wanted) and math.isnan(one.link) for one in found)


def test_empty_reports_can_be_read(tmp_path: Path) -> None:
    empty = MadeUpRun(num_steps=0).write(tmp_path / "empty.h5")
    assert "0 with rows, of 0" in format_report(empty)
    assert run_command(["report", "plot", str(empty)]) == 0
    assert (tmp_path / "empty.png").stat().st_size > 1000


@pytest.mark.parametrize(("num_steps", "num_bins"), [(1, 1), (10, 10), (149, 149), (151, 150), (10**6, 150)])
def test_bins_hold_every_step_once(num_steps: int, num_bins: int) -> None:
    bins = Bins.of(num_steps)
    assert len(bins.firsts) == num_bins and bins.counts.min() >= 1 and bins.counts.sum() == num_steps
    values = np.random.default_rng(0).random(num_steps)
    assert bins.sum(values).sum() == pytest.approx(values.sum())
    assert (bins.mean(values) * bins.counts).sum() == pytest.approx(values.sum())
    low, high = bins.extremes(values)
    assert low.min() == values.min() and high.max() == values.max()


def test_compare_gives_ratios_and_what_differs(tmp_path: Path, capsys) -> None:
    paths = [
        MadeUpRun(num_steps=steps, rows=rows).write(tmp_path / f"{name}.h5")
        for name, steps, rows in (("a", 10, 4), ("b", 20, 4), ("c", 10, 8))
    ]
    told = tmp_path / "told.json"
    assert run_command(["report", "compare", *map(str, paths), "--json", str(told)]) == 0
    shown = capsys.readouterr().out
    assert "max_batch_size" in shown and "kv_dtype" not in shown
    value = json.loads(told.read_text())
    assert value["settings"]["max_batch_size"] == [8, 8, 16]
    figures = value["figures"]["output_tokens"]
    assert (figures["values"], figures["ratios"], figures["units"]) == ([80, 160, 160], [1, 2, 2], "tokens")
    assert "x2.000" in shown


def test_compare_takes_reports_that_lack_figures_and_shares_no_names(tmp_path: Path, capsys) -> None:
    (tmp_path / "x").mkdir(), (tmp_path / "y").mkdir()
    first, second = (MadeUpRun(num_steps=3).write(tmp_path / name / "run.h5") for name in "xy")
    with h5py.File(second, "r+") as file:
        del file["summary/run_time"]
    assert run_command(["report", "compare", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "x/run" in shown and "y/run" in shown and "no setting differs" in shown
    assert run_command(["report", "compare", str(first)]) == 2
    assert "at least 2" in capsys.readouterr().err


def test_compare_refuses_a_run_that_did_not_end(path: Path, tmp_path: Path, capsys) -> None:
    partial = tmp_path / "run.h5.partial"
    partial.write_bytes(path.read_bytes())
    with h5py.File(partial, "r+") as file:
        for name in list(file["summary"]):
            del file["summary"][name]
        file.attrs["state"] = "running"
    assert run_command(["report", "compare", str(path), str(tmp_path / "run.h5")]) == 2
    assert "no summary: its run did not end" in capsys.readouterr().err


def test_export_writes_every_table_as_it_is(path: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "new" / "folder"
    assert run_command(["report", "export", str(path), str(folder)]) == 0
    listed = capsys.readouterr().out.split()
    assert set(listed) == {str(found) for found in folder.iterdir()}
    tables = {
        "steps",
        "load",
        "requests",
        *(f"ranks-{rank}" for rank in (1, 2)),
        *(f"ranks-{r}-spans" for r in range(3)),
    }
    assert {Path(name).stem for name in listed} == {*tables, "summary", "attributes"}
    with h5py.File(path) as file:
        for table in tables:
            with (folder / f"{table}.csv").open(newline="") as text:
                rows = list(csv.reader(text))
            for place, head in enumerate(rows[0]):
                name, _, unit = head.partition(" ")
                data = file[f"{table.replace('-', '/')}/{name}"]
                assert data.attrs["units"] == (unit.strip("()") or "1")
                values = data[:].tolist()
                names = list(data.attrs.get("names", ()))
                for row, value in zip(rows[1:], values, strict=True):
                    expected = names[value] if names else "" if math.isnan(value) else value
                    assert (row[place] if isinstance(expected, str) else type(value)(row[place])) == expected
    assert json.loads((folder / "attributes.json").read_text())["config"]["max_batch_size"] == 8


RECORDS = [
    {"index": 1, "custom_id": "a", "text": "x", "finish_reason": "stop",
     "usage": {"prompt_tokens": 5, "completion_tokens": 7}, "content_hash": "0"},
    {"index": 0, "custom_id": None, "error": {"code": "prompt_too_long", "message": "…"}, "content_hash": "1"},
    {"index": 3, "custom_id": "b", "choices": [{"text": "", "finish_reason": "stop"}, {"text": "", "finish_reason":
     "length"}], "usage": {"prompt_tokens": 2, "completion_tokens": 9}, "content_hash": "2"},
    {"index": 2, "id": "batch_req_2", "custom_id": "c", "response": {"status_code": 200, "body": {
     "choices": [{"index": 0, "finish_reason": "length"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}},
     "error": None, "content_hash": "3"},
    {"index": 4, "custom_id": "d", "response": None, "error": {"code": "x", "message": "y"}, "content_hash": "4"},
]  # fmt: skip


def test_rebuild_takes_what_records_hold(tmp_path: Path, capsys) -> None:
    output, path = tmp_path / "out.jsonl", tmp_path / "new.h5"
    output.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + '{"index": 5, "cut o')
    assert run_command(["report", "rebuild", str(output), "-o", str(path)]) == 0
    assert "5 requests, 2 of them with an error, 18 output tokens" in capsys.readouterr().out
    with open_report(path) as report:
        requests = report.columns("requests")
        words = report.names("requests", "finish_reason")
        assert report.state == "rebuilt"
        assert report.summary["output_tokens"] == (18, "tokens")
    assert requests["index"].tolist() == [1, 0, 3, 2, 4]
    assert requests["output_tokens"].tolist() == [7, 0, 9, 2, 0]
    assert [words[code] for code in requests["finish_reason"]] == ["stop", "error", "mixed", "length", "error"]
    assert requests["failed"].tolist() == [0, 1, 0, 0, 1]
    assert np.isnan(requests["t_finished"]).all()
    shown = format_report(path)
    assert "rebuilt from records" in shown and "they hold no times" in shown
    assert sorted(found.name for found in tmp_path.iterdir()) == ["new.h5", "out.jsonl"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        ("some text\n", "holds no record of this program: 'some text"),
        (json.dumps(RECORDS[0]) + '\n{"a": 1}\n' + json.dumps(RECORDS[1]) + "\n", "line 2 of"),
        ('{"index": 0, "text": "x", "content_hash": "1"}\n', "the record of index 0"),
    ],
)
def test_rebuild_refuses_what_is_no_output(tmp_path: Path, capsys, content: str | None, text: str) -> None:
    output = tmp_path / "out.jsonl"
    if content is not None:
        output.write_text(content)
    assert run_command(["report", "rebuild", str(output), "-o", str(tmp_path / "new.h5")]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
    assert not (tmp_path / "new.h5").exists() and not list(tmp_path.glob("*.partial"))


def test_rebuild_does_not_overwrite_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(json.dumps(RECORDS[0]) + "\n")
    assert run_command(["report", "rebuild", str(output), "-o", str(output)]) == 2
    assert json.loads(output.read_text()) == RECORDS[0]


def test_a_new_report_beside_an_unfinished_one_says_so(path: Path, tmp_path: Path) -> None:
    (tmp_path / "run.h5").write_bytes(path.read_bytes())
    (tmp_path / "run.h5.partial").write_bytes(path.read_bytes())
    assert "is of another run that has not ended" in format_report(tmp_path / "run.h5")


def test_rows_of_requests_say_how_they_ended() -> None:
    from fastdecode_hpc.report.rows import completion_row, failed_row
    from fastdecode_hpc.report.schema import FINISH_REASONS, REQUEST_UNITS
    from fastdecode_hpc.results import Completion
    from fastdecode_hpc.sequence import Choice, Request

    def row(*reasons: str | None, **fields) -> dict[str, float]:
        choices = [Choice("", [1, 2], reason) for reason in reasons]
        return completion_row(Completion(Request(7, None, "x"), choices, **fields))

    ended = {"owner": 2, "t_read_s": 1.0, "t_admitted_s": 1.5, "t_first_token_s": 2.0, "t_finished_s": 3.0}
    for reasons, word in ((("stop",), "stop"), (("length", "length"), "length"), (("stop", "length"), "mixed")):
        one = row(*reasons, **ended)
        assert FINISH_REASONS[int(one["finish_reason"])] == word
        assert one["queue_wait"] == 0.5 and one["owner"] == 2 and one["output_tokens"] == 2 * len(reasons)
        assert not one["failed"]
    failed = row(error=("code", "text"))
    assert (
        failed["failed"]
        and FINISH_REASONS[int(failed["finish_reason"])] == "error"
        and math.isnan(failed["t_admitted"])
    )
    assert set(failed) == set(failed_row(3)) == set(REQUEST_UNITS) == set(request_row(0))
