"""The command line: one flag a field, documented; progress for logs."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import fastdecode_hpc
from fastdecode_hpc import progress
from fastdecode_hpc.cli import build_parser
from fastdecode_hpc.config import RunConfig

ROOT = Path(fastdecode_hpc.__file__).parents[2]


def generate_options() -> list[str]:
    parser = build_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    actions = commands.choices["generate"]._actions
    return [option for action in actions for option in action.option_strings if option.startswith("--")]


def test_every_flag_is_in_the_readme_and_every_option_is_a_flag() -> None:
    readme = (ROOT / "README.md").read_text()
    options = generate_options()
    for option in options:
        if option != "--help" and not option.startswith("--no-"):
            assert f"`{option}`" in readme, f"README.md does not name {option}"
    for field in dataclasses.fields(RunConfig):
        assert f"--{field.name.replace('_', '-')}" in options


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (("calibrate",), "planning.md"),
        (("doctor",), "cluster.md"),
        (("plan",), "planning.md"),
        (("simulate",), "planning.md"),
        (("bench", "throughput"), "benchmarks.md"),
    ],
)
def test_every_flag_beside_those_of_a_run_is_in_its_page(words: tuple[str, ...], page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    parser = build_parser()
    for word in words:
        commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = commands.choices[word]
    of_a_run = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(RunConfig)}
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--") and option not in {"--help", "--model", *of_a_run} and "--no-" not in option:
                assert option in text, f"docs/{page} does not name {option}"


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = [sys.executable, "-m", "fastdecode_hpc", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()  # as `head` leaves it
        assert (run.wait(60), run.stderr.read()) == (141, "")


def test_defaults_of_flags_are_those_of_the_configuration() -> None:
    args = build_parser().parse_args(["generate", "--input", "a", "--output", "b"])
    for field in dataclasses.fields(RunConfig):
        assert getattr(args, field.name) == field.default


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_progress_off_a_terminal_is_a_plain_line_every_ten_seconds(monkeypatch, capsys) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    line = progress.ProgressLine(total=20, done=2)
    for second in range(1, 26):
        clock.now = float(second)
        line.token()
        if second % 5 == 0:
            line.request(failed=second == 5)
        line.tick()
    line.close()
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "4/20 requests, 1.0 tok/s, ETA 01:20, 1 errors",
        "6/20 requests, 1.0 tok/s, ETA 01:10, 1 errors",
    ]


@pytest.mark.parametrize("argv", [[], ["generate"], ["generate", "--input", "a"], ["report"], ["nonsense"]])
def test_incomplete_commands_are_usage_errors(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args(argv)
    assert end.value.code == 2
    assert "usage: fastdecode" in capsys.readouterr().err
