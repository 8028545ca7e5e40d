"""Where threads are bound, when they are not, and what a rank is told about its place."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from fastdecode_hpc import startup
from fastdecode_hpc.advice import placement_advice, placement_faults
from fastdecode_hpc.affinity import binding_asked, is_pinned, num_usable_cores, pin_plan
from fastdecode_hpc.setup import Setup
from placed_ranks import S_WORKER, rank

FOUR = tuple((core,) for core in range(4))
SMT = ((0, 4), (1, 5), (2, 6), (3, 7))
EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    "threads, own, siblings, options, expected",
    [
        (4, (0, 1, 2, 3), FOUR, {}, (0, 1, 2, 3)),
        (2, (0, 1, 2, 3), FOUR, {}, (0, 2)),  # spread
        (3, (8, 9, 10, 11, 12, 13), (), {}, (8, 10, 12)),  # siblings unknown
        (1, (5,), ((5,),), {}, (5,)),
        (4, EIGHT, SMT, {}, (0, 1, 2, 3)),  # one on each physical core
        (6, EIGHT, SMT, {}, (0, 1, 2, 3, 4, 6)),
        (8, EIGHT, SMT, {}, EIGHT),
        (2, (2, 5, 6), SMT, {}, (2, 5)),  # the first hardware thread belongs to another rank
        (5, (0, 1, 2, 3), FOUR, {}, ()),  # more threads than cores
        (1, (), FOUR, {}, ()),  # all cores are shared
        (5, (0, 1, 2, 3), FOUR, {"wanted": True}, ()),
        (4, (0, 1, 2, 3), FOUR, {"wanted": False}, ()),
        (4, (0, 1, 2, 3), FOUR, {"binding": "OMP_PROC_BIND=close"}, ()),
        (4, (0, 1, 2, 3), FOUR, {"binding": "OMP_PROC_BIND=false"}, ()),
        (4, (0, 1, 2, 3), FOUR, {"binding": "OMP_PROC_BIND=false", "wanted": True}, (0, 1, 2, 3)),
    ],
)
def test_plan(threads: int, own, siblings, options: dict, expected) -> None:
    assert pin_plan(threads, own, siblings, **options) == expected


def test_openmp_settings_are_respected() -> None:
    assert binding_asked({"OMP_NUM_THREADS": "4", "OMP_PLACES": ""}) == ""
    assert binding_asked({"OMP_PLACES": "cores", "OMP_PROC_BIND": "true"}) == "OMP_PROC_BIND=true OMP_PLACES=cores"
    for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        assert binding_asked({name: "0-3"}) == f"{name}=0-3"


@pytest.mark.parametrize(
    "cores, usable, pinned",
    [
        ([(0, 1), (0, 1)], 2, False),
        ([(0,), (1,)], 2, True),
        ([(0,), (0,)], 1, False),
        ([(0,), (0,), (1, 2), (1, 2)], 3, False),
        ([(0,), (0,), (0, 1, 2, 3), (0, 1, 2, 3)], 3, False),
        ([(0, 1)] * 4, 2, False),
        ([(3,)], 1, True),
        ([], 0, False),
    ],
)
def test_threads_that_can_run_at_once(cores, usable: int, pinned: bool) -> None:
    assert (num_usable_cores(cores), is_pinned(cores)) == (usable, pinned)


def test_a_rank_that_is_placed_well_is_told_nothing() -> None:
    apart = [S_WORKER, rank(1, cores=(4, 5, 6, 7))]
    assert placement_faults(apart, wants_gpu=True) == []
    assert placement_advice(apart, [(), FOUR]) == []
    assert placement_advice([rank(1, numa_nodes=(), huge_pages="")], [((0, 1, 2, 3),) * 4]) == []


def test_ranks_over_several_nodes_are_told_once_with_the_flags() -> None:
    ranks = [rank(number, numa_nodes=(0, 1) if number < 65 else (0,), host=f"n{number}") for number in range(1, 66)]
    text = only(placement_faults([S_WORKER, *ranks]))
    assert text.startswith("ranks 1-64 may run on several NUMA nodes (rank 1 on n1: nodes 0-1)")
    for flag in (
        "--cpu-bind=ldoms",
        "--ntasks-per-socket=1",
        "--cpu-bind=sockets",
        "--mem-bind=local",
        "--map-by numa --bind-to numa",
    ):
        assert flag in text


def test_one_process_may_use_the_whole_node() -> None:
    assert placement_faults([rank(0, role="both", numa_nodes=(0, 1))]) == []


def test_ranks_on_the_same_cores_are_told_once_with_the_numbers() -> None:
    ranks = [rank(0, role="S-worker", num_blocks=()), *(rank(number, threads=2) for number in (1, 2))]
    text = only(placement_faults([*ranks, rank(3, host="n1")]))
    assert text.startswith("ranks 0-2 were started on the same cores (on n0: ranks 0-2 with 8 threads on cores 0-3)")
    for flag in ("--cpus-per-task=N --cpu-bind=cores", "--map-by slot:PE=N --bind-to core", "--threads"):
        assert flag in text
    # a mask may be wide: what counts is whether there is a core for each thread
    wide = [rank(number, threads=2, cores=tuple(range(8))) for number in range(4)]
    assert placement_faults(wide) == []
    assert len(placement_faults([*wide, rank(4, threads=1, cores=(7,))])) == 1


def test_a_gpu_that_rank_0_does_not_see_is_told_where_one_is_wanted() -> None:
    ranks = [S_WORKER, rank(1, host="n1", gpus=4), rank(2, host="n2", gpus=4)]
    text = only(placement_faults(ranks, wants_gpu=True))
    assert text.startswith("rank 0 on n0 sees no GPU, and rank 1 on n1 sees 4:")
    assert "srun A : B" in text
    assert placement_faults(ranks) == []
    assert placement_faults([dataclasses.replace(S_WORKER, gpus=1), *ranks[1:]], wants_gpu=True) == []


def test_threads_without_cores_of_their_own_are_told_why() -> None:
    few = [rank(0, role="S-worker", cores=(0,), num_blocks=()), rank(1, cores=(1,))]
    text = only(placement_faults(few))
    assert placement_advice(few, [(), ((1,),) * 4]) == []  # said once
    assert "ranks 0-1 started with fewer cores than threads (rank 0 on n0: 4 threads, 1 core)" in text
    assert "--cpus-per-task" in text
    text = only(placement_advice([rank(1), rank(2)], [FOUR, ((0,), (0,), (1,), (1,))]))
    assert (
        "rank 2 lost cores after the start (rank 2 on n0: 4 threads can use 2 cores of the 4 it started with)" in text
    )
    assert "OMP_PROC_BIND=false" in text
    text = only(placement_advice([rank(1)], [FOUR[:2]]))  # OMP_THREAD_LIMIT=2
    assert "4 threads can use 2 cores" in text


def test_small_pages_are_told_for_all_hosts_at_once() -> None:
    ranks = [rank(number, host=f"n{number}", huge_pages="never") for number in range(1, 4)]
    text = only(placement_advice(ranks, [FOUR] * 3))
    assert "off (never) on n1 and 2 more" in text


def test_the_line_of_a_rank() -> None:
    assert rank(3, pinned=True).line == (
        "rank 3   n0  R-worker  threads 4  cores 0-3  numa 0  pinned  isa avx2  kv 1.0 GiB"
    )
    assert rank(0, role="S-worker", num_blocks=(), isa=None, kv_bytes=0, numa_nodes=(0, 2)).line == (
        "rank 0   n0  S-worker  threads 4  cores 0-3  numa 0,2"
    )
    assert "numa" not in rank(1, numa_nodes=()).line


def test_late_threads_get_the_cores_that_are_left() -> None:
    assert rank(1, pin_cores=(0, 2)).spare_cores == (1, 3)
    assert rank(1, pin_cores=(0, 1, 2, 3)).spare_cores == (0, 1, 2, 3)
    assert rank(1).spare_cores == (0, 1, 2, 3)


def only(advice) -> str:
    (one,) = advice
    return str(one)


class GatheringWorld:
    """Rank 0's view of a world whose ranks tell these cores, or another rank's (None)."""

    def __init__(self, told) -> None:
        self.told = told

    def gather(self, value, what):
        return self.told


def test_rank_0_prints_what_the_ranks_found_and_one_warning(caplog, monkeypatch) -> None:
    monkeypatch.setattr(startup, "logger", logging.getLogger("apart"))  # the package's own may be set up already
    caplog.set_level(logging.INFO, "apart")
    setup = Setup(None, None, 100, (S_WORKER, *(rank(number) for number in (1, 2, 3))))
    three = ((0,), (1,), (2,), (2,))
    after = startup.tell_placement(GatheringWorld([(), three, three, FOUR]), setup, ())
    assert [found.pinned for found in after.ranks] == [False, False, False, True]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines == [found.line for found in after.ranks]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("ranks 1-2 lost cores after the start (rank 1 on n0: 4 threads can use 3 cores of the 4")
    caplog.clear()
    assert startup.tell_placement(GatheringWorld(None), setup, FOUR) is setup
    assert not caplog.records
