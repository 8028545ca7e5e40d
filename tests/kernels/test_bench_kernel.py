"""`bench kernel` on tiny cases: the right attention, every instruction set, the figures it writes, torch beside it."""

import dataclasses
import json

import numpy as np
import pytest

from fastdecode_hpc.bench import kernel_session, measure
from fastdecode_hpc.bench.attention_run import NUM_ROWS, AttentionRun, Tokens
from fastdecode_hpc.bench.cases import Case, SizedCase
from fastdecode_hpc.bench.machine import look_at_machine
from fastdecode_hpc.cli import run_command
from fastdecode_hpc.r_part.attention import reference_attention

GQA = Case("gqa", "fp16", 6, 2, 16, ((2, 40), (1, 700), (3, 9)))
MHA = Case("mha", "fp16", 3, 3, 32, ((4, 33),))
SPREADS = ("t_append", "t_attend", "t_r_part", "kv_bandwidth", "read_bandwidth", "kernel_efficiency", "tokens_per_s")


@pytest.fixture
def small_machine(monkeypatch):
    """A machine with a cache of 32 KiB, on which nothing has to settle."""
    monkeypatch.setattr(measure, "SETTLE_S", 0.0)

    def look(cores):
        return dataclasses.replace(look_at_machine(cores), cache_bytes=32 << 10)

    monkeypatch.setattr(kernel_session, "look_at_machine", look)


def reference_output(case, tokens):
    """[num_sequences, num_heads * head_dim] by the specification, from the tokens alone."""
    rows = []
    for i, length in enumerate(case.lengths):
        kv = np.concatenate([tokens.kv_rows(i, start, min(NUM_ROWS, length - start))
                             for start in range(0, length, NUM_ROWS)])  # fmt: skip
        k, v = np.moveaxis(kv.reshape(length, 2, case.num_kv_heads, case.head_dim), 1, 0)
        q = tokens.qkv[i, : tokens.q_size].reshape(case.num_heads, case.head_dim)
        rows.append(reference_attention(q, k, v, length - 1)[0].ravel())
    return np.array(rows)


@pytest.mark.parametrize("case", [GQA, MHA], ids=["gqa", "mha"])
def test_what_is_timed_is_the_attention_of_all_sequences(isa, case):
    tokens = Tokens(case, seed=1)
    run = AttentionRun(SizedCase(case, 2), tokens, 2)
    times = run()
    assert set(times) == {"append", "attend"} and min(times.values()) > 0
    np.testing.assert_allclose(run.out, reference_output(case, tokens), atol=2e-3)


def test_data_depends_on_the_seed_and_differs_between_sequences():
    one, same, other = Tokens(GQA, 0), Tokens(GQA, 0), Tokens(GQA, 1)
    np.testing.assert_array_equal(one.qkv, same.qkv)
    assert (one.qkv != other.qkv).any()
    assert (one.kv_rows(0, 0, 5) != one.kv_rows(1, 0, 5)).any()
    assert len(one.kv_rows(3, NUM_ROWS - 1, NUM_ROWS)) == NUM_ROWS


def test_tiny_cases_run_end_to_end(isa, small_machine, tmp_path, capsys):
    path = tmp_path / "figures.json"
    shape = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--batch", "3", "--context", "40"]
    flags = ["--kv-dtype", "bf16", "--rounds", "5", "--threads", "2", "--isa", isa, "--json", str(path)]
    assert run_command(["bench", "kernel", *shape, *flags]) == 0
    told = capsys.readouterr()
    assert "custom-fp16" in told.out and "kernel_efficiency" in told.out and f"isa {isa}" in told.out
    written = json.loads(path.read_text())
    assert written["machine"]["isa"] == isa
    assert written["machine"]["threads"] == 2
    assert written["machine"]["read_buffer_bytes"] == 256 << 10
    assert [case["name"] for case in written["cases"]] == ["custom-fp16", "custom"]
    for case in written["cases"]:
        assert case["kv_bytes"] == 3 * 40 * 2 * 2 * 16 * 2
        assert case["num_layers"] * case["kv_bytes"] >= 256 << 10
        for name in SPREADS:
            low, high = case[f"{name}_quartiles"]
            assert 0 < low <= case[name] <= high
    assert "speedup_over_fp16" in written["cases"][1] and "speedup_over_fp16" not in written["cases"][0]


def test_torch_runs_beside_and_computes_the_same(small_machine, tmp_path, capsys):
    path = tmp_path / "figures.json"
    shape = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--batch", "3", "--context", "40"]
    flags = ["--rounds", "5", "--threads", "2", "--compare", "torch", "--json", str(path)]
    assert run_command(["bench", "kernel", *shape, *flags]) == 0
    assert "over torch" in capsys.readouterr().out
    (case,) = json.loads(path.read_text())["cases"]
    assert case["speedup_over_torch"] > 0
    assert case["torch_variant"].split(", ")[0] in ("fp32", "bf16", "fp16")
    assert case["difference_from_torch"] < 0.03


@pytest.mark.parametrize("dtype,tolerance", [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
@pytest.mark.parametrize("case", [GQA, MHA], ids=["gqa", "mha"])
def test_every_way_of_torch_is_the_same_attention(case, dtype, tolerance):
    from fastdecode_hpc.bench.peers_torch import WAYS, attend, make_batches

    tokens = Tokens(case, seed=2)
    expected = reference_output(case, tokens)
    for way in WAYS.values():
        np.testing.assert_allclose(attend(make_batches(case, tokens, dtype), way), expected, atol=tolerance)


def test_a_result_that_is_not_torchs_ends_the_comparison():
    from fastdecode_hpc.bench.peers_torch import TorchPeer

    tokens = Tokens(MHA, seed=3)
    sized = SizedCase(MHA, 1)
    peer = TorchPeer(sized, tokens, num_threads=2, cache_bytes=1 << 20)
    run = AttentionRun(sized, tokens, 2)
    run()
    assert peer.check(run) < 0.01
    run.out[1] += 0.2
    with pytest.raises(RuntimeError, match="differs from torch's by"):
        peer.check(run)
