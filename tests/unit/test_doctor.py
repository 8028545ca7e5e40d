"""The doctor's verdicts: one function a thing, from made-up facts."""

from __future__ import annotations

import dataclasses

import pytest

from fastdecode_hpc.doctor import checks, compare
from fastdecode_hpc.doctor.checks import OK, PROBLEM, WARNING, Finding, examine
from fastdecode_hpc.doctor.compare import Speed, examine_all, judge_speeds, speeds_of
from fastdecode_hpc.doctor.facts import Facts, Gpu, Mpi, Slurm, default_plugin, parse_plugins
from fastdecode_hpc.doctor.text import format_findings
from fastdecode_hpc.launch import Launch
from fastdecode_hpc.setup import place_of
from placed_ranks import GIB, hello

MPICH = Mpi("MPICH Version: 5.0.2", "/opt/lib/libmpi.so.12", "SERIALIZED", 0, "/opt/bin/mpiexec")
OPEN_MPI = dataclasses.replace(MPICH, library="Open MPI v5.0.11")


def facts(rank: int = 0, **changes) -> Facts:
    """A rank of which nothing is wrong: one process, or one of those that srun started on hosts of their own."""
    well = Facts(
        hello=hello(rank, name=f"n{rank}"), holds_kv=True, launch=Launch("none"),
        python="3.11.7", executable="/v/bin/python", mpi=MPICH, slurm=Slurm(),
        isa="avx2", openmp=("/usr/lib/libgomp.so.1",), huge_share=1.0, memory_limits={"the host": 99 * GIB},
        memlock_bytes=-1, has_fast_network=True, shm_bytes=GIB, can_read_peers=True, gpu=Gpu(torch="2.9"),
        folder="/out", write_error="", lock_error="",
    )  # fmt: skip
    return dataclasses.replace(well, **changes)


def with_host(one: Facts, **changes) -> Facts:
    told = dataclasses.replace(one.hello, host=dataclasses.replace(one.hello.host, **changes))
    return dataclasses.replace(one, hello=told)


def test_where_nothing_is_wrong_every_check_has_its_line_and_says_so() -> None:
    found = examine(facts(slurm=Slurm(offered=("pmi2",), default="pmi2")))
    assert {one.verdict for one in found} == {OK}
    assert not any(one.fix for one in found)
    silent = {"single copy"}  # which has a line only where it is forbidden
    assert len(found) == len(checks.CHECKS) - len(silent)


STEP = Launch("srun", 0, 3)
MADVISE = with_host(facts(), huge_pages="madvise").hello
FAULTS = {
    # check, verdict, words of the text, words of the fix, facts
    "no MPI library": ("MPI library", PROBLEM, "cannot load", "", {"mpi": Mpi(errors=("cannot load it",))}),
    "no mpiexec": ("launcher", WARNING, "none beside", "",
                   {"mpi": dataclasses.replace(MPICH, mpiexec="", errors=("none beside it",))}),
    "srun was forgotten": ("launcher", PROBLEM, "not started by srun", "", {"slurm": Slurm(tasks=3)}),
    "N singletons": ("launcher", PROBLEM, "world of 1: each process runs alone", "",
                     {"launch": STEP, "mpi": dataclasses.replace(OPEN_MPI, world_size=1), "slurm": Slurm("pmi2")}),
    "wrong plugin of the step": ("Slurm plugin", PROBLEM, "srun --mpi=pmi2 started", "srun --mpi=pmix",
                                 {"launch": STEP, "mpi": dataclasses.replace(OPEN_MPI, world_size=1),
                                  "slurm": Slurm("pmi2")}),
    "wrong default": ("Slurm plugin", WARNING, "uses --mpi=none unless told", "srun --mpi=pmi2",
                      {"slurm": Slurm(offered=("none", "pmi2"), default="none")}),
    "plugin missing": ("Slurm plugin", PROBLEM, "offers none, pmi2; Open MPI needs pmix", "mpiexec",
                       {"mpi": OPEN_MPI, "slurm": Slurm(offered=("none", "pmi2"), default="pmi2")}),
    "thread level": ("thread level", WARNING, "FUNNELED", "thread support",
                     {"mpi": dataclasses.replace(MPICH, thread_level="FUNNELED")}),
    "MPI does not start here": ("thread level", WARNING, "aborted", "login nodes",
                                {"mpi": dataclasses.replace(MPICH, thread_level="", errors=("aborted",))}),
    "forced isa": ("kernels", WARNING, "slower", "FASTDECODE_ISA", {"isa": "scalar"}),
    "unknown isa": ("kernels", PROBLEM, "not here", "FASTDECODE_ISA", {"isa": ""}),
    "two runtimes": ("OpenMP", WARNING, "2 runtimes", "OMP_WAIT_POLICY", {"openmp": ("libgomp.so.1", "libiomp5.so")}),
    "small pages": ("huge pages", WARNING, "10% of memory", "fragmented", {"huge_share": 0.1, "hello": MADVISE}),
    "little memory": ("memory", WARNING, "1.0 GiB may still be taken, bound by the cgroup", "--mem",
                      {"memory_limits": {"the host": 99 * GIB, "the cgroup": GIB}}),
    "limited memlock": ("locked memory", WARNING, "64.0 KiB may be locked", "memlock", {"memlock_bytes": 65536}),
    "little shm": ("shared memory", WARNING, "64.0 MiB free in /dev/shm", "--shm-size", {"shm_bytes": 64 << 20}),
    "no reading of peers": ("single copy", WARNING, "process_vm_readv", "OMPI_MCA_smsc=^cma",
                            {"can_read_peers": False}),
    "no torch": ("GPU", PROBLEM, "No module named", "Install torch", {"gpu": Gpu(error="No module named 'torch'")}),
    "no output": ("output folder", PROBLEM, "written in /out: Read-only", "--folder", {"write_error": "Read-only"}),
    "no locks": ("output folder", WARNING, "cannot be locked: errno = 11", "HDF5_USE_FILE_LOCKING=FALSE",
                 {"lock_error": "errno = 11"}),
}  # fmt: skip


@pytest.mark.parametrize(("check", "verdict", "text", "fix", "changes"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_told_with_its_way_out(check: str, verdict: str, text: str, fix: str, changes: dict) -> None:
    (found,) = [one for one in examine(facts(**changes)) if one.check == check]
    assert found.verdict == verdict
    assert text in found.text
    assert fix in found.fix


def test_what_is_not_there_is_not_judged() -> None:
    """No MPI asked for, no kernels at work on this rank, no fast network, torch not looked at again."""
    without = {"mpi": None, "gpu": None, "huge_share": None, "write_error": None, "lock_error": None}
    bare = facts(**without, has_fast_network=False, memlock_bytes=0, shm_bytes=0)
    left = ["program", "kernels", "OpenMP", "cores", "NUMA", "memory"]
    assert [one.check for one in examine(bare)] == left


def test_a_gpu_that_torch_does_not_see_is_no_gpu() -> None:
    shown = with_host(facts(), gpus=2)
    assert checks.gpu(shown).verdict == WARNING
    assert "2 GPUs, but torch 2.9 sees none" in checks.gpu(shown).text
    assert checks.gpu(facts(gpu=Gpu("H200", 141 * GIB, "2.9"))).text == "H200, 141.0 GiB, torch 2.9"


def test_hardware_threads_and_nodes_are_told() -> None:
    smt = with_host(facts(), cores=tuple(range(8)), siblings=tuple((core, core + 4) for core in range(4)))
    assert checks.cores(smt).text == "8 (0-7) of 4 physical ones"
    many = dataclasses.replace(smt, hello=dataclasses.replace(smt.hello, threads=8))
    assert (checks.cores(many).verdict, checks.cores(many).fix) == (
        WARNING,
        "Use --threads 4, or srun --hint=nomultithread",
    )
    wide = with_host(facts(), numa_nodes=(0, 1))
    assert "mpirun -n 3 --map-by numa" in checks.numa(wide).fix
    assert checks.numa(dataclasses.replace(wide, launch=STEP)).verdict == OK  # judged with its role


def test_user_errors_are_problems() -> None:
    told = dataclasses.replace(facts().hello, error="OMP_NUM_THREADS is 'four'; it must be a whole number")
    assert checks.program(facts(hello=told)).verdict == PROBLEM


def test_the_plugins_of_slurm_are_read() -> None:
    listed = "MPI plugin types are...\n\tcray_shasta\n\tpmi2\n\tnone\n\tpmix\n"
    listed += "specific pmix plugin versions available: pmix_v4\n"
    assert parse_plugins(listed) == ("cray_shasta", "pmi2", "none", "pmix")
    assert parse_plugins("srun: MPI types are...\nsrun: none\nsrun: pmix_v3\n") == ("none", "pmix_v3")
    assert parse_plugins("") == ()
    assert default_plugin("Foo = 1\nMpiDefault              = pmix_v4\n") == "pmix_v4"
    assert default_plugin("") == ""
    offered = Slurm(offered=("none", "pmix_v4"), default="pmix_v4")
    assert checks.slurm_plugin(facts(mpi=OPEN_MPI, slurm=offered)).verdict == OK


def ranks(count: int) -> list[Facts]:
    """As srun starts them on hosts of their own; the first one holds no KV."""
    mpi, step = dataclasses.replace(MPICH, world_size=count), Slurm("pmi2")
    everyone = [facts(rank, launch=Launch("srun", rank, count), mpi=mpi, slurm=step) for rank in range(count)]
    return [dataclasses.replace(everyone[0], holds_kv=False, huge_share=None), *everyone[1:]]


def test_many_ranks_that_are_well_have_one_line_a_check() -> None:
    found = examine_all(ranks(65))
    assert len({one.check for one in found}) == len(found)
    assert {one.verdict for one in found} == {OK}
    assert not any(one.ranks for one in found)


def test_only_those_that_are_not_well_are_told_with_one_as_example() -> None:
    everyone = ranks(5)
    for rank, share in ((2, 0.25), (4, 0.5)):
        everyone[rank] = dataclasses.replace(everyone[rank], huge_share=share)
    (found,) = [one for one in examine_all(everyone) if one.check == "huge pages"]
    assert (found.verdict, found.ranks) == (WARNING, (2, 4))
    assert "25% of memory" in found.text and "(rank 2 on n2)" in found.text


def judge(everyone: list[Facts], *, in_batch: bool = False) -> list[Finding]:
    hellos = [one.hello for one in everyone]
    return compare.compare(everyone, [place_of(one, hellos) for one in hellos], [()] * len(everyone), in_batch=in_batch)


def test_ranks_that_are_alike_and_apart_are_well() -> None:
    assert [(one.check, one.verdict) for one in judge(ranks(3))] == [("ranks", OK), ("placement", OK)]


def test_ranks_that_differ_are_told_what_and_where() -> None:
    everyone = ranks(4)
    everyone[3] = dataclasses.replace(
        everyone[3], python="3.12.1", hello=dataclasses.replace(everyone[3].hello, version="0.0.9", isas=("scalar",))
    )
    verdicts = {one.verdict for one in judge(everyone)}
    texts = " ".join(one.text for one in judge(everyone))
    assert verdicts == {OK, WARNING, PROBLEM}
    for words in (
        "rank 3 (n3) has 0.0.9",
        "rank 3 (n3) has 3.12.1",
        "rank 0 on n0 has scalar avx2, rank 3 (n3) has scalar",
    ):
        assert words in texts


@pytest.mark.parametrize(("gpu", "is_told"), [(Gpu(torch="2.9"), True), (Gpu("H200", 141 * GIB, "2.9"), False)])
def test_kernels_of_an_s_worker_count_where_they_attend_prompts(gpu: Gpu, is_told: bool) -> None:
    """On a GPU it may have an older processor, or FASTDECODE_ISA be one for the R-workers alone."""
    first, *others = ranks(3)
    old = dataclasses.replace(first, gpu=gpu, isa="", hello=dataclasses.replace(first.hello, isas=("scalar",)))
    assert (checks.kernels(old) is not None) == is_told
    told = [one.text for one in judge([old, *others]) if one.verdict == WARNING]
    assert bool(told) == is_told
    assert not is_told or "rank 0 on n0 has scalar, ranks 1-2 (n1, n2) have scalar avx2" in told[0]


def test_bad_places_are_a_problem_where_a_job_would_be_refused() -> None:
    everyone = [with_host(one, host="n0") for one in ranks(3)]
    everyone = [dataclasses.replace(one, hello=dataclasses.replace(one.hello, threads=4)) for one in everyone]
    assert [one.verdict for one in judge(everyone) if one.check == "placement"] == [WARNING]
    assert [one.verdict for one in judge(everyone, in_batch=True) if one.check == "placement"] == [PROBLEM]


def speed(rank: int, read: float = 100e9, latency: float = 2e-6, rate: float = 20e9, near: bool = False) -> Speed:
    return Speed(rank, f"n{rank}", read, latency, rate, near)


def test_the_slow_rank_is_flagged_against_the_best_of_its_kind() -> None:
    well = [speed(1), speed(2, read=90e9), speed(3, rate=15e9)]
    assert {one.verdict for one in judge_speeds(well)} == {OK}
    reading, _ = judge_speeds([*well, speed(4, read=50e9)])
    assert (reading.verdict, reading.ranks) == (WARNING, (4,))
    assert "reads 50.0 GB/s (rank 4 on n4), and the best reads 100.0" in reading.text
    _, links = judge_speeds([*well, speed(4, rate=4e9), speed(5, latency=90e-6)])
    assert (links.verdict, links.ranks) == (WARNING, (4, 5))
    # a link on the node is another kind than one to another node
    kinds = judge_speeds([speed(1, near=True, rate=3e9), *well[1:]])
    assert {one.verdict for one in kinds} == {OK}
    assert judge_speeds([]) == []
    alone = judge_speeds([Speed(0, "n0", 30e9)])
    assert [(one.check, one.text) for one in alone] == [("reading", "30.0 GB/s an R-worker")]


def test_speeds_are_by_rank() -> None:
    everyone = [ranks(3)[0], with_host(ranks(3)[1], host="n0"), ranks(3)[2]]
    first, second = speeds_of(everyone, {1: 5e9, 2: 6e9}, {1: (1e-6, 1e9), 2: (2e-6, 2e9)})
    assert (first.rank, first.is_near, first.read_bytes_per_s) == (1, True, 5e9)
    assert (second.rank, second.is_near, second.latency_s, second.link_bytes_per_s) == (2, False, 2e-6, 2e9)


def test_the_text_has_places_findings_and_the_count() -> None:
    everyone = ranks(2)
    hellos = [one.hello for one in everyone]
    found = [Finding("memory", WARNING, "little", "Ask for more", (1,)), Finding("GPU", PROBLEM, "none")]
    text = format_findings([place_of(one, hellos) for one in hellos], [speed(1)], found).splitlines()
    assert text[1].endswith("reads 100.0 GB/s  link 2.0 us, 20.00 GB/s")
    assert text[2:] == [
        "warning  memory  rank 1: little",
        "                 -> Ask for more",
        "problem  GPU     none",
        "1 problem, 1 warning",
    ]
