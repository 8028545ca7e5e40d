"""How ranks agree: what rank 0 refuses, what it only warns of."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from fastdecode_hpc import startup
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.setup import Hello, RankSetup, Setup
from fastdecode_hpc.startup import check_alike
from placed_ranks import S_WORKER, hello, rank


def setup_of(*ranks: RankSetup) -> Setup:
    return Setup(None, None, 100, ranks)


CROWDED = setup_of(S_WORKER, rank(1))  # both on cores 0-3, with four threads each
APART = setup_of(S_WORKER, rank(1, cores=(4, 5, 6, 7)))


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(startup, "logger", logging.getLogger("apart"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return caplog


def test_bad_places_are_refused_in_a_batch_job_with_every_ranks_place(monkeypatch, warnings) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with pytest.raises(ConfigError) as refused:
        startup.accept_places(RunConfig(), CROWDED)
    lines = str(refused.value).splitlines()
    assert lines[0] == "the ranks of this Slurm job are placed badly:"
    assert lines[1:3] == [place.where for place in CROWDED.ranks]
    assert lines[3].startswith("ranks 0-1 were started on the same cores")
    assert lines[4].endswith("--allow-oversubscribe")
    startup.accept_places(RunConfig(), APART)
    assert not warnings.messages


def test_elsewhere_bad_places_are_a_warning(warnings) -> None:
    startup.accept_places(RunConfig(), CROWDED)
    (text,) = warnings.messages
    assert text.startswith("ranks 0-1 were started on the same cores")


@pytest.mark.parametrize("job", [None, "9"])
def test_who_allows_it_is_told_nothing(monkeypatch, warnings, job) -> None:
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    startup.accept_places(RunConfig(allow_oversubscribe=True), CROWDED)
    assert not warnings.messages


def with_rank(number: int, **changes: str) -> list[Hello]:
    """Four ranks on hosts of their own, those from `number` on changed."""
    ranks = [dataclasses.replace(hello(rank, name=f"n{rank}"), library="MPICH 5") for rank in range(4)]
    return [dataclasses.replace(rank, **changes) if rank.rank >= number else rank for rank in ranks]


def test_all_ranks_have_one_program_and_one_library() -> None:
    check_alike(with_rank(4))
    with pytest.raises(ConfigError, match=r"ranks 2-3 \(n2, n3\) have 0\.0\.9\. Install one version"):
        check_alike(with_rank(2, version="0.0.9"))
    with pytest.raises(ConfigError, match=r"the MPI library .* on n0 has MPICH 5, rank 3 \(n3\) has Open MPI\. Use"):
        check_alike(with_rank(3, library="Open MPI"))
