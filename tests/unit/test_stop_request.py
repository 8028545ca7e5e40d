"""When a job is to stop: time budgets and Slurm's limit."""

import signal
import subprocess
import sys
import time

import pytest

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.signals import END_MARGIN_S, Deadline, StopRequest, find_deadline, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("00:01:30", 90), ("30:00:00", 108000),
     ("1-02:03:04", 93784)],
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "s", "1w", "-5s", "0s", "1:2", "1:2:3", "1h30m", "nan s", "\u0661s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError, match="30m, 2h"):
        parse_duration(text)


def test_the_earlier_of_budget_and_slurms_limit_counts():
    now = time.time()
    assert find_deadline(None, 0.0, {}) is None
    assert find_deadline(None, 0.0, {"SLURM_JOB_END_TIME": "Unknown"}) is None
    budget = find_deadline(100.0, 30.0, {})
    assert budget.at_s == pytest.approx(now + 70, abs=5)  # counted from the start of the process
    slurm = {"SLURM_JOB_END_TIME": str(int(now) + 1000)}
    assert find_deadline(None, 0.0, slurm).at_s == int(now) + 1000 - END_MARGIN_S
    assert find_deadline(100.0, 0.0, slurm).name == "--time-budget"
    assert find_deadline(10_000.0, 0.0, slurm).name == "the end of the Slurm job's time"


def test_a_deadline_stops_and_says_why():
    stop = StopRequest(Deadline(time.time() + 1000, "--time-budget"))
    assert not stop() and stop.reason is None
    stop = StopRequest(Deadline(time.time() - 1, "--time-budget"))
    assert stop() and stop.reason == "--time-budget"


WARNED_WHILE_IT_ENDS = """
import os, signal
from fastdecode_hpc.signals import StopRequest

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)  # when Python has given its signals back

late, stop = Late(), StopRequest()
stop.install()
"""


@pytest.mark.parametrize(("last", "code"), [("stop.release()", 0), ("", -signal.SIGUSR1)])
def test_a_warning_to_a_process_that_is_done_changes_nothing(last, code):
    assert subprocess.run([sys.executable, "-c", WARNED_WHILE_IT_ENDS + last]).returncode == code
