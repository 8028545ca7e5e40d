"""The cases of `bench kernel`: names, bytes, groups, and how they are cut to fit the memory."""

from __future__ import annotations

import pytest

from fastdecode_hpc.bench import cases
from fastdecode_hpc.bench.cases import CASES, Case, choose_cases, custom_case, fit_group, group_cases, halved
from fastdecode_hpc.config import ConfigError

MIB, GIB = 1 << 20, 1 << 30
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    "name,num_bytes",
    [
        ("fp16-mha", 32 * 2048 * 2 * 32 * 128 * 2),
        ("bf16-mha", 32 * 2048 * 2 * 32 * 128 * 2),
        ("fp16-gqa4", 32 * 2048 * 2 * 8 * 128 * 2),
        ("fp16-gqa8", 32 * 2048 * 2 * 4 * 128 * 2),
        ("fp16-gqa3", 32 * 2048 * 2 * 3 * 64 * 2),
        ("fp16-short", 256 * 128 * 2 * 32 * 128 * 2),
        ("fp16-long", 131072 * 2 * 8 * 128 * 2),
        ("fp16-ragged", (30000 + 200 * 50) * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_a_call_are_k_and_v_of_all_tokens_once(name: str, num_bytes: int) -> None:
    assert BY_NAME[name].call_bytes == num_bytes


def test_every_case_can_be_laid_out_and_is_named_once() -> None:
    assert len(BY_NAME) == len(CASES)
    for case in choose_cases():
        assert case.num_heads % case.num_kv_heads == 0
        assert case.memory_bytes >= case.call_bytes


def test_only_cases_of_known_types_are_offered(monkeypatch) -> None:
    monkeypatch.setattr(cases, "is_known", lambda kv_dtype: kv_dtype in ("fp16", "int8"))
    assert {case.kv_dtype for case in choose_cases()} == {"fp16", "int8"}
    assert [case.name for case in choose_cases(["int8-mha", "fp16-mha"])] == ["fp16-mha", "int8-mha"]
    with pytest.raises(ConfigError, match="no case 'bf16-mha'; there are fp16-mha"):
        choose_cases(["bf16-mha"])


def test_cases_of_a_shape_are_measured_together_with_fp16_first() -> None:
    groups = group_cases([BY_NAME["int8-mha"], BY_NAME["fp16-gqa8"], BY_NAME["bf16-mha"]])
    assert [[case.name for case in group] for group in groups] == [["fp16-mha", "int8-mha", "bf16-mha"], ["fp16-gqa8"]]


def test_a_case_of_ones_own_gets_an_fp16_case_beside_it() -> None:
    case = custom_case(kv_dtype="bf16", num_heads=8, num_kv_heads=None, head_dim=64, batch=3, context=100)
    assert (case.name, case.num_kv_heads, case.lengths) == ("custom", 8, [100, 100, 100])
    assert [(other.name, other.kv_dtype) for other in group_cases([case])[0]] == [
        ("custom-fp16", "fp16"),
        ("custom", "bf16"),
    ]


@pytest.mark.parametrize(
    "changed,message",
    [
        ({"kv_dtype": "fp7"}, "kv_dtype is 'fp7'"),
        ({"num_heads": 9}, "9 heads and 2 KV heads"),
        ({"head_dim": 20}, "head_dim is 20"),
        ({"batch": 0}, "batch is 0; it must be a whole number of at least 1"),
        ({"context": 1}, "context is 1; it must be a whole number of at least 2"),
    ],
)
def test_impossible_cases_are_refused(changed: dict, message: str) -> None:
    shape = {"kv_dtype": "fp16", "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "batch": 2, "context": 64}
    with pytest.raises(ConfigError, match=message):
        custom_case(**(shape | changed))


def test_small_cases_cycle_over_layers_until_no_cache_holds_them() -> None:
    gqa4, gqa3 = (
        fit_group([BY_NAME[name]], cache_bytes=32 * MIB, memory_bytes=16 * GIB)[0]
        for name in ("fp16-gqa4", "fp16-gqa3")
    )
    assert (gqa4.num_layers, gqa4.num_bytes) == (1, 256 * MIB)
    assert (gqa3.num_layers, gqa3.num_bytes) == (6, 288 * MIB)
    assert gqa4.notes == gqa3.notes == ()


def test_a_case_too_large_for_the_memory_is_cut_and_says_so() -> None:
    group = [BY_NAME["fp16-mha"], BY_NAME["bf16-mha"]]
    sized = fit_group(group, cache_bytes=MIB, memory_bytes=GIB)
    assert [one.case.contexts for one in sized] == [((16, 2048),)] * 2
    assert sized[0].num_bytes == GIB // 2
    assert sized[0].notes == (
        "fp16-mha was cut to fit the memory: 32x2048, 32/32 heads x 128 asked, 16x2048, 32/32 heads x 128 measured",
    )
    with_copies = fit_group(group, cache_bytes=MIB, memory_bytes=GIB, num_copies=2)
    assert with_copies[0].case.contexts == ((8, 2048),)


def test_less_kv_than_the_cache_asks_for_is_said() -> None:
    sized = fit_group([BY_NAME["fp16-gqa4"]], cache_bytes=32 * MIB, memory_bytes=100 * MIB)[0]
    assert sized.num_bytes == 64 * MIB
    assert any("less than 8 times the last-level cache (32.0 MiB)" in note for note in sized.notes)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16-long does not fit the 4\.0 KiB of memory"):
        fit_group([BY_NAME["fp16-long"]], cache_bytes=MIB, memory_bytes=4096)


@pytest.mark.parametrize(
    "contexts,expected",
    [
        (((32, 2048),), ((16, 2048),)),
        (((1, 30000), (200, 50)), ((1, 30000), (100, 50))),
        (((1, 30000), (1, 51)), ((1, 15000), (1, 25))),
    ],
)
def test_halving_keeps_the_lengths_as_long_as_there_are_sequences(contexts, expected) -> None:
    assert halved(contexts) == expected


def test_the_shape_for_people() -> None:
    case = Case("x", "fp16", 9, 3, 64, ((1, 30000), (200, 50)))
    assert case.shape == "1x30000 + 200x50, 9/3 heads x 64"
    assert (case.num_sequences, case.num_tokens) == (201, 40000)
