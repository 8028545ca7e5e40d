"""What the native module refuses, and which instruction set it uses."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import Rows, Shape, attend, fill, make_partition

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.isa import available_isas, select_isa
from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork

SHAPE = Shape(4, 2, 16, wire="fp16", cache="fp16")


@pytest.fixture
def call():
    """attend(qkv, out, piece) over two rows."""
    rows = Rows.random(SHAPE, [5, 40])
    partition = make_partition(SHAPE, rows.lengths)
    fill(partition, rows)
    work = StepWork(partition, [0, 1], np.array(rows.lengths), num_threads=1)
    attention = DecodeAttention(partition, num_heads=4, wire_dtype="fp16", num_threads=1)

    def run(qkv=rows.qkv, out=None, piece=0, layer=1, lse=None):
        out = np.empty((2, 64), np.float16) if out is None else out
        attention.append(layer, work, qkv)
        attention.attend(layer, work, qkv, out, piece, lse)

    run.qkv = rows.qkv
    return run


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda qkv: {"qkv": qkv.astype(np.float32)}, "items 'f'; they must be 'e'"),
        (lambda qkv: {"qkv": np.concatenate([qkv, qkv])}, r"shape \(4, 128\); it must be \[2, any\]"),
        (lambda qkv: {"qkv": qkv[:, :-8].copy()}, r"have 120 columns; \[k\|v\] needs 64 from 64 on"),
        (lambda qkv: {"qkv": np.asfortranarray(qkv)}, "must be contiguous"),
        (lambda qkv: {"out": np.empty((2, 56), np.float16)}, r"out has shape \(2, 56\); it must be \[2, 64\]"),
        (lambda qkv: {"out": np.empty((2, 64), np.uint16)}, "out has items 'H'; they must be 'e'"),
        (lambda qkv: {"lse": np.empty((2, 3), np.float32)}, r"lse has shape \(2, 3\); it must be \[2, 4\]"),
    ],
)
def test_wrong_arrays_are_refused(call, change, message):
    with pytest.raises(ValueError, match=message):
        call(**change(call.qkv))


def test_wrong_places_are_refused(call):
    with pytest.raises(IndexError, match="piece 1 of 1"):
        call(piece=1)
    with pytest.raises(KeyError):
        call(layer=2)
    frozen = np.empty((2, 64), np.float16)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        call(out=frozen)


def test_wrong_shapes_are_refused():
    partition = make_partition(SHAPE, [])
    with pytest.raises(ValueError, match="3 heads cannot share 2 KV heads"):
        DecodeAttention(partition, num_heads=3, wire_dtype="fp16", num_threads=1)
    for name, value in (("scale", 0.0), ("softcap", -1.0)):
        other = make_partition(replace(SHAPE, **{name: value}), [])
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            DecodeAttention(other, num_heads=2, wire_dtype="fp16", num_threads=1)
    with pytest.raises(ValueError, match="head_dim is 12"):
        make_partition(Shape(head_dim=12), [])
    with pytest.raises(ValueError, match="block_size is 12"):
        make_partition(Shape(block_size=12), [])


def run_python(code, isa):
    environment = {**os.environ, "FASTDECODE_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_environment_chooses_the_isa():
    code = "from fastdecode_hpc.isa import active_isa; print(active_isa())"
    for isa in available_isas():
        assert run_python(code, isa).stdout.strip() == isa
    assert run_python(code, "").stdout.strip() == available_isas()[-1]


@pytest.mark.parametrize("isa", ["pentium", "SCALAR", "neon,avx2"])
def test_unknown_isa_is_an_error(isa):
    code = """
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup
try:
    KVPartition(KVLayout(8, (LayerGroup((0,), 1, 8, "fp16", "fp16"),)), (1,), num_threads=1)
except ConfigError as error:
    print(error)
"""
    text = run_python(code, isa).stdout
    assert "FASTDECODE_ISA" in text
    assert isa in text
    assert all(name in text for name in available_isas())


def test_select_isa():
    with pytest.raises(ConfigError, match="here are: scalar"):
        select_isa("mmx")


@pytest.mark.parametrize("cache", ["fp16", "int8", "int4"])
def test_isas_agree(cache):
    rows = Rows.random(Shape(6, 2, 80, cache=cache), [700, 33])
    results = []
    for isa in available_isas():
        select_isa(isa)
        partition = make_partition(rows.shape, rows.lengths)
        fill(partition, rows)
        results.append(attend(partition, rows)[0])
    for result in results:
        assert np.abs(result - results[0]).max() < 4e-6
