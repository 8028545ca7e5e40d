"""Rank 0's decisions: threads, waiting, instruction set, KV budget; and what it refuses."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fastdecode_hpc import host
from fastdecode_hpc.advice import lowered_isa, placement_advice
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.model_shape import Experts, ModelConfig
from fastdecode_hpc.setup import Hello, decide_setup, kv_budget, passing_on_host, weights_on_host
from placed_ranks import GIB, X86, hello

MODEL = ModelConfig(1000, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_context_len=512)


def decide(hellos: list[Hello], weights_bytes: int = 0, **options):
    return decide_setup(RunConfig(**options), MODEL, hellos, weights_bytes=weights_bytes)


def test_ranks_with_cores_of_their_own_use_them_all_and_spin() -> None:
    setup = decide([hello(0, cores=range(8)), hello(1, cores=range(8, 16)), hello(2, name="n1", cores=range(32))])
    assert [rank.threads for rank in setup.ranks] == [8, 8, 32]
    assert [rank.role for rank in setup.ranks] == ["S-worker", "R-worker", "R-worker"]
    assert {rank.wait for rank in setup.ranks} == {"spin"}
    assert setup.owners == (1, 2)


def test_ranks_on_the_same_cores_share_them_and_sleep_while_they_wait() -> None:
    setup = decide([hello(rank, cores=(0, 1)) for rank in range(3)])
    assert [rank.threads for rank in setup.ranks] == [1, 1, 1]
    assert {rank.wait for rank in setup.ranks} == {"sleep"}
    assert not any(rank.use_progress_thread for rank in setup.ranks)


def test_waiting_follows_the_cores_unless_it_is_told() -> None:
    exact, tight = [hello(rank, cores=(0, 1), threads=1) for rank in range(2)], [hello(0), hello(1, threads=4)]
    assert {rank.wait for rank in decide(exact).ranks} == {"spin"}
    assert {rank.wait for rank in decide(tight).ranks} == {"sleep"}
    assert {rank.wait for rank in decide(exact, wait="sleep").ranks} == {"sleep"}
    assert {rank.wait for rank in decide(tight, wait="spin").ranks} == {"spin"}


def test_a_progress_thread_needs_a_core_that_no_thread_uses() -> None:
    asked = decide([hello(rank, cores=range(4), threads=1) for rank in range(2)])
    assert all(rank.use_progress_thread for rank in asked.ranks)
    full = decide([hello(rank, cores=range(4)) for rank in range(2)])
    assert not any(rank.use_progress_thread for rank in full.ranks)


def test_r_workers_bind_threads_to_cores_that_they_have_for_themselves() -> None:
    ranks = [hello(0, cores=range(8)), hello(1, cores=range(4, 12)), hello(2, cores=range(12, 16))]
    ranks += [hello(3, name="n1", threads=2)]
    assert [rank.pin_cores for rank in decide(ranks).ranks] == [(), (8, 9, 10, 11), (12, 13, 14, 15), (0, 2)]
    assert not any(rank.pin_cores for rank in decide(ranks, pin_threads=False).ranks)
    ranks[2] = dataclasses.replace(ranks[2], binding="OMP_PROC_BIND=false")
    assert decide(ranks).ranks[2].pin_cores == ()
    assert decide(ranks, pin_threads=True).ranks[2].pin_cores == (12, 13, 14, 15)


def test_binding_that_cannot_be_is_refused_only_where_it_was_asked_for() -> None:
    ranks = [hello(0), hello(1, threads=2)]
    assert not any(rank.pin_cores for rank in decide(ranks).ranks)
    with pytest.raises(ConfigError, match=r"rank 1 on n0 cannot bind 2 threads: of its cores 0-3 it has 0 for itself"):
        decide(ranks, pin_threads=True)
    with pytest.raises(ConfigError, match="this is one process"):
        decide([hello(0)], pin_threads=True)


def test_one_process_is_both_parts() -> None:
    (rank,) = decide([hello(0)]).ranks
    assert (rank.role, rank.isa, rank.wait) == ("both", "avx2", "spin")
    assert rank.num_blocks[0] > 0
    assert rank.pin_cores == ()


def isas_of(hellos: list[Hello], device: str = "cpu", **options) -> list[str | None]:
    setup = decide_setup(RunConfig(**options), MODEL, hellos, weights_bytes=0, device=device)
    return [rank.isa for rank in setup.ranks]


WIDE = (*X86, "avx512")


@pytest.mark.parametrize("old", [0, 1, 2, None])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_that_attend_use_the_best_instruction_set_that_all_of_them_have(old: int | None, device: str) -> None:
    """Rank 0 is one of them where it attends prompts: on a CPU."""
    hellos = [hello(rank, name=f"n{rank}", isas=X86 if rank == old else WIDE) for rank in range(3)]
    attending = [hello.isas for hello in hellos if device == "cpu" or hello.rank]
    common = "avx2" if X86 in attending else "avx512"
    own = [None if device != "cpu" and not hello.rank else hello.isas[-1] for hello in hellos]
    assert isas_of(hellos, device) == [isa and common for isa in own]
    assert isas_of(hellos, device, isa_per_rank=True) == own
    assert isas_of(hellos, device, isa="scalar") == isas_of(hellos, device, isa="scalar", isa_per_rank=True)
    assert set(isas_of(hellos, device, isa="scalar")) - {None} == {"scalar"}
    if X86 in attending:
        with pytest.raises(ConfigError, match=f"rank {old} on n{old} has no avx512; it has scalar, avx2: name one"):
            isas_of(hellos, device, isa="avx512")
    else:
        assert isas_of(hellos, device, isa="avx512") == own


def test_ranks_without_a_common_instruction_set_are_refused_with_what_each_offers() -> None:
    """As where FASTDECODE_ISA is another on each."""
    forced = [hello(0, isas=("scalar",)), hello(1, isas=("avx2",)), hello(2, isas=("avx2",))]
    with pytest.raises(
        ConfigError, match=r"in common \(rank 0: scalar; rank 1: avx2; rank 2: avx2\); set FASTDECODE_ISA"
    ):
        isas_of(forced)
    assert isas_of(forced, "cuda") == [None, "avx2", "avx2"]
    assert isas_of(forced, isa_per_rank=True) == ["scalar", "avx2", "avx2"]


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_instruction_set_that_is_not_there_is_a_mistake_where_kernels_attend(wrong: int) -> None:
    hellos = [hello(0), hello(1)]
    hellos[wrong] = dataclasses.replace(
        hellos[wrong], isas=(), isa_error=f"rank {wrong} on n0: FASTDECODE_ISA: no neon"
    )
    for options in ({}, {"isa": "scalar"}, {"isa_per_rank": True}):
        with pytest.raises(ConfigError, match=f"rank {wrong} on n0: FASTDECODE_ISA: no neon"):
            isas_of(hellos, **options)
    if wrong == 0:
        assert isas_of(hellos, "cuda") == [None, "avx2"]


@pytest.mark.parametrize(
    ("isas", "said"),
    [
        ((WIDE, WIDE, WIDE), None),
        ((X86, WIDE, WIDE), "with avx2, .*alone could use ranks 1-2 \\(rank 1 on n1\\) avx512"),
        ((WIDE, X86, WIDE), "with avx2, .*alone could use ranks 0,2 \\(rank 0 on n0\\) avx512"),
        ((("scalar", "neon"), X86, WIDE), "with scalar, .*rank 1 .* avx2, rank 2 .* avx512, rank 0 .* neon"),
    ],
)
def test_ranks_that_could_do_better_alone_are_told(isas: tuple[tuple[str, ...], ...], said: str | None) -> None:
    hellos = [hello(rank, name=f"n{rank}", isas=own) for rank, own in enumerate(isas)]
    told = lowered_isa(decide(hellos).ranks, hellos)
    assert len(told) == (said is not None)
    assert said is None or (re.search(said, told[0].fault) and "--isa-per-rank" in told[0].fix)
    assert lowered_isa(decide(hellos, isa_per_rank=True).ranks, hellos) == []


def test_kv_is_a_share_of_what_its_host_has_left() -> None:
    hellos = [hello(0), hello(1), hello(2), hello(3, name="n1", memory=100 * GIB)]
    here = kv_budget(RunConfig(), hellos[1], hellos, weights_bytes=2 * GIB)
    assert here == kv_budget(RunConfig(), hellos[2], hellos, weights_bytes=2 * GIB)
    assert 2 * here < 10 * GIB - 3 * GIB  # both workers, beside weights and rank 0's own needs
    alone = kv_budget(RunConfig(), hellos[3], hellos, weights_bytes=2 * GIB)
    assert 80 * GIB < alone < 100 * GIB
    assert kv_budget(RunConfig(kv_memory_bytes=77), hellos[1], hellos, weights_bytes=0) == 77
    with pytest.raises(ConfigError, match=r"5.0 GiB for each of 2 R-workers on n0, which has 9.0 GiB left"):
        kv_budget(RunConfig(kv_memory_bytes=5 * GIB), hellos[1], hellos, weights_bytes=0)


def test_kv_stays_on_the_numa_nodes_of_its_rank() -> None:
    def on_node(rank: int, node: int, local: int):
        told = hello(rank, cores=(node,), memory=100 * GIB)
        return dataclasses.replace(
            told, host=dataclasses.replace(told.host, numa_nodes=(node,), numa_memory_bytes=local)
        )

    hellos = [on_node(0, 0, 40 * GIB), on_node(1, 0, 40 * GIB), on_node(2, 1, 10 * GIB), on_node(3, 1, 10 * GIB)]
    first, second, third = (kv_budget(RunConfig(), one, hellos, weights_bytes=9 * GIB) for one in hellos[1:])
    assert first == int(30 * GIB * 0.85)  # of the host's 90 GiB a third, and all of its node's 40 - 10
    assert second == third == int(5 * GIB * 0.85)
    setup = decide(hellos, kv_memory_bytes=12 * GIB)
    said = placement_advice(setup.ranks, [()] * 4)
    assert any("ranks 2-3 may hold more KV" in text and "10.0 GiB free on nodes 1" in text for text in map(str, said))


def test_a_host_without_room_for_one_block_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 on n0 may use 100 B for KV, and one block of 32 tokens takes"):
        decide([hello(0), hello(1)], kv_memory_bytes=100)
    with pytest.raises(ConfigError, match="may use 0 B for KV"):
        decide([hello(0, memory=GIB), hello(1, memory=GIB)], weights_bytes=GIB // 2)


def test_what_a_quantised_cache_needs_at_least_is_what_the_message_says() -> None:
    least = 32 * 2 * 2 * (2 * (16 + 4) + 3 * 2 * 16 * 2)  # tokens, layers, KV heads; a block of int8, three of fp16
    with pytest.raises(ConfigError, match=r"with a copy of one sequence's recent tokens, takes 29\.0 KiB"):
        decide([hello(0), hello(1)], kv_dtype="int8", kv_memory_bytes=least - 1)
    assert decide([hello(0), hello(1)], kv_dtype="int8", kv_memory_bytes=least).ranks[1].num_blocks == (1, 3)


def test_ranks_and_context_must_fit() -> None:
    with pytest.raises(ConfigError, match="--ranks is 4 but 2 were started"):
        decide([hello(0), hello(1)], ranks=4)
    with pytest.raises(ConfigError, match="at most 512"):
        decide([hello(0), hello(1)], max_context_len=513)
    assert decide([hello(0), hello(1)], max_context_len=100).max_context_len == 100
    assert decide([hello(0), hello(1)]).max_context_len == 512


def test_weights_are_counted_where_they_lie() -> None:
    per_layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96
    assert MODEL.num_weights == 2 * per_layer + 2 * 1000 * 64
    assert weights_on_host(RunConfig(), MODEL, "cpu") == 4 * MODEL.num_weights
    assert weights_on_host(RunConfig(dtype="bf16"), MODEL, "cpu") == 2 * MODEL.num_weights
    assert weights_on_host(RunConfig(), MODEL, "cuda") == 0


def test_what_weights_need_while_they_are_loaded_or_verified() -> None:
    head, attention, mlp = 1000 * 64, 64 * (2 * 64 + 2 * 32), 3 * 64 * 96
    half, mixture = RunConfig(dtype="bf16"), dataclasses.replace(MODEL, experts=Experts(8, 2))
    assert passing_on_host(RunConfig(), MODEL, "cpu") == 4 * head
    assert passing_on_host(half, MODEL, "cpu") == 2 * head
    assert passing_on_host(half, mixture, "cpu") == 2 * (attention + 8 * (mlp + 64))
    assert passing_on_host(half, mixture, "cpu", verifies=True) == 4 * (head + attention + mlp)
    assert passing_on_host(half, MODEL, "cpu", known=1, verifies=True) == 2 * head
    hellos = [hello(0), hello(1)]
    less = decide_setup(RunConfig(), MODEL, hellos, weights_bytes=GIB, passing_bytes=GIB)
    assert less.ranks[1].kv_bytes == decide(hellos, weights_bytes=2 * GIB).ranks[1].kv_bytes


def test_threads_come_from_the_flag_then_openmp_then_slurm() -> None:
    env, here = {"OMP_NUM_THREADS": "6,2", "SLURM_CPUS_PER_TASK": "9"}, hello(0).host
    assert host.asked_threads(3, here, env) == 3
    assert host.asked_threads(None, here, env) == 6
    assert host.asked_threads(None, here, {"SLURM_CPUS_PER_TASK": "9"}) == 9
    assert host.asked_threads(None, here, {}) is None
    for bad in ("0", "-1", "four", "1.5"):
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            host.asked_threads(None, here, {"OMP_NUM_THREADS": bad})


def with_two_threads_a_core(told: Hello) -> Hello:
    """The same rank, its upper half of the cores being second hardware threads of the lower half."""
    half = len(told.host.cores) // 2
    pairs = tuple(zip(told.host.cores[:half], told.host.cores[half:], strict=True))
    return dataclasses.replace(told, host=dataclasses.replace(told.host, siblings=pairs))


def test_hardware_threads_of_one_core_count_once() -> None:
    """A second thread on a core adds nothing to reading memory, and Slurm's CPUs are hardware threads."""
    own, wide = with_two_threads_a_core(hello(0, cores=range(16))), with_two_threads_a_core(hello(1, cores=range(16)))
    assert [rank.threads for rank in decide([own, dataclasses.replace(wide, rank=1)]).ranks] == [4, 4]
    assert decide([own, with_two_threads_a_core(hello(1, name="n1", cores=range(8)))]).ranks[1].threads == 4
    assert host.asked_threads(None, own.host, {"SLURM_CPUS_PER_TASK": "16"}) == 8
    assert host.asked_threads(None, own.host, {"SLURM_CPUS_PER_TASK": "8"}) == 8  # --hint=nomultithread
    assert host.asked_threads(None, own.host, {"SLURM_CPUS_PER_TASK": "1"}) == 1
    assert host.asked_threads(None, own.host, {"SLURM_CPUS_PER_TASK": "32"}) == 32  # and is told as a fault
    assert host.asked_threads(None, own.host, {"OMP_NUM_THREADS": "16"}) == 16
    assert host.asked_threads(16, own.host, {}) == 16


@pytest.mark.parametrize(
    "devices, env, count",
    [
        ((), {}, 0),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), {}, 2),
        (("nvidia0", "nvidia1"), {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (("nvidia0", "nvidia1"), {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 1),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (("nvidia3",), {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,GPU-1"}, 1),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, 0),
    ],
)
def test_gpus_are_those_that_may_be_used(tmp_path, devices, env, count) -> None:
    for name in devices:
        (tmp_path / name).touch()
    assert host.visible_gpus(env, tmp_path) == count


def test_sizes_are_read_and_written() -> None:
    assert [host.parse_bytes(text) for text in ("17", "40G", "1.5 GiB", "512mb", "2T")] == [
        17, 40 * GIB, 3 * GIB // 2, 512 << 20, 2 << 40,
    ]  # fmt: skip
    for bad in ("", "G", "-1G", "1X", "1e9"):
        with pytest.raises(ConfigError):
            host.parse_bytes(bad)
    assert [host.format_bytes(n) for n in (0, 1023, 1024, 3 * GIB // 2, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB",
    ]  # fmt: skip
    assert host.format_cores((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


def test_memory_is_bounded_by_the_job() -> None:
    free = host.available_memory({})
    assert 0 < free < 1 << 50
    assert host.available_memory({"SLURM_MEM_PER_NODE": "64"}) == min(free, 64 << 20)


@pytest.mark.parametrize("ranks,weights", [(3, "1"), (3, "1,1,0.5"), (1, "1,1"), (2, "2,1")])
def test_as_many_weights_as_r_workers_are_needed(ranks: int, weights: str) -> None:
    text = f"'{weights}'; it must have a number for each R-worker: {max(1, ranks - 1)}"
    with pytest.raises(ConfigError, match=text):
        decide([hello(rank) for rank in range(ranks)], r_worker_weights=weights)


@pytest.mark.parametrize("ranks,weights", [(3, "1,0.5"), (1, "3"), (2, "0.1"), (3, "auto"), (3, "equal")])
def test_fitting_weights_are_taken(ranks: int, weights: str) -> None:
    assert len(decide([hello(rank) for rank in range(ranks)], r_worker_weights=weights).ranks) == ranks


@pytest.mark.parametrize("text", ["", "1,,2", "0,1", "-1", "inf", "nan", "fast"])
def test_weights_that_are_no_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="auto or equal, or positive numbers"):
        RunConfig(r_worker_weights=text)


def test_a_model_that_rank_0_cannot_hold_is_refused() -> None:
    """Its sizes may come from a file that lies; torch would say no more than that an allocation failed."""
    ranks = [hello(0), hello(1, name="n1")]
    assert decide(ranks, weights_bytes=9 * GIB).ranks[0].role == "S-worker"
    with pytest.raises(ConfigError, match=r"weights take 11\.0 GiB .* n0 has 10\.0 GiB; take a host with more memory"):
        decide(ranks, weights_bytes=11 * GIB)
    with pytest.raises(ConfigError, match=r"take 9\.0 GiB, while they are loaded or verified 2\.0 GiB more, and"):
        decide_setup(RunConfig(), MODEL, ranks, weights_bytes=9 * GIB, passing_bytes=2 * GIB)
    long = dataclasses.replace(MODEL, head_dim=256, max_context_len=2**24)
    with pytest.raises(ConfigError, match=r"table of 16777216 positions 48\.0 GiB, .*--max-context-len"):
        decide_setup(RunConfig(), long, ranks, weights_bytes=0)
    assert decide_setup(RunConfig(max_context_len=4096), long, ranks, weights_bytes=0).max_context_len == 4096
