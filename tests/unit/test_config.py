"""Types of the KV cache as a user writes them."""

from __future__ import annotations

import pytest

from fastdecode_hpc.config import ConfigError, RunConfig, parse_kv_dtype, split_kv_dtypes

GOOD = {
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "k=int8,v=int4": ("int8", "int4"),
    "v=int4,k=int8": ("int8", "int4"),
    "k=fp32,v=bf16": ("fp32", "bf16"),
    "k=int8,v=int8": ("int8", "int8"),
}
BAD = [
    "",
    "int2",
    "INT8",
    " int8",
    "int8,int4",
    "k=int8",
    "v=int8",
    "k=int8,v=",
    "k=int8,v=int2",
    "k=int8,v=int4,",
    "k=int8,v=int4,k=int4",
    "k=int8,v=int4,w=int4",
    "k=int8,int4",
    "k=k=int8,v=int4",
    "k=int8 v=int4",
    "k:int8,v:int4",
]


@pytest.mark.parametrize("text", GOOD)
def test_types_of_k_and_v(text: str) -> None:
    assert parse_kv_dtype(text) == GOOD[text]
    assert RunConfig(kv_dtype=text).kv_dtype == text


@pytest.mark.parametrize("text", BAD)
def test_other_texts_are_refused_with_the_way_out(text: str) -> None:
    for use in (parse_kv_dtype, lambda text: RunConfig(kv_dtype=text)):
        with pytest.raises(ConfigError, match="must be one of fp32, fp16, bf16, int8, int4, or name both") as error:
            use(text)
        assert repr(text) in str(error.value)


@pytest.mark.parametrize("dtype", ["int8", "int4", "k=fp16,v=fp16"])
def test_the_wire_has_floats_of_one_type(dtype: str) -> None:
    with pytest.raises(ConfigError, match="wire_dtype is"):
        RunConfig(wire_dtype=dtype)


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("fp16", ["fp16"]),
        ("fp16,int8", ["fp16", "int8"]),
        ("k=int8,v=int4", ["k=int8,v=int4"]),
        ("fp16,k=int8,v=int4,int4,v=fp16,k=fp32", ["fp16", "k=int8,v=int4", "int4", "v=fp16,k=fp32"]),
    ],
)
def test_lists_of_cache_types_keep_pairs_together(text: str, types: list[str]) -> None:
    assert split_kv_dtypes(text) == types


@pytest.mark.parametrize("text", ["", "fp16,", "k=int8", "k=int8,int4", "fp17"])
def test_lists_of_cache_types_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_dtype"):
        split_kv_dtypes(text)
