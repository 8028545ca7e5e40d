"""From known times to figures: efficiencies, speed-ups, quartiles, windows, hints, text."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from fastdecode_hpc.bench import measure
from fastdecode_hpc.bench.cases import CASES, SizedCase
from fastdecode_hpc.bench.decode_windows import WINDOW_STEPS, DecodeWindows, least_context, num_new_tokens
from fastdecode_hpc.bench.figures import group_figures
from fastdecode_hpc.bench.hints import find_hints
from fastdecode_hpc.bench.machine import Machine
from fastdecode_hpc.bench.measure import Spread, interleave, ratios
from fastdecode_hpc.bench.table import format_decode, format_machine, format_table

FP16, BF16 = (next(case for case in CASES if case.name == name) for name in ("fp16-mha", "bf16-mha"))
MACHINE = Machine(
    processor="Test CPU",
    cores=(0, 1, 2, 3),
    num_physical_cores=4,
    numa_nodes=(0,),
    cache_bytes=32 << 20,
    cache_is_read=True,
    huge_page_mode="madvise",
    load_average=0.0,
)
GOOD = {"num_threads": 4, "memory_bytes": 1 << 30, "huge_bytes": 1 << 30, "one_thread": 0.4}


def test_contenders_take_turns_and_the_first_round_only_warms_up(monkeypatch) -> None:
    monkeypatch.setattr(measure, "SETTLE_S", 0.5)
    order, slept = [], []

    def contender(name: str):
        def run():
            order.append(name)
            return {"part": float(len(order))}

        return run

    samples = interleave({"a": contender("a"), "b": contender("b")}, rounds=2, sleep=slept.append)
    assert order == ["a", "b"] * 3
    assert slept == [0.5] * 6
    assert samples == {"a": {"part": [3.0, 5.0]}, "b": {"part": [4.0, 6.0]}}


def test_a_spread_is_a_median_between_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == Spread(3.0, 2.5, 3.5)


def measured() -> list[dict]:
    """Reading at 100 GB/s and 50 GB/s; the kernels in proportion, so that the efficiency is the same in each round."""
    fast_s = FP16.call_bytes / 80e9
    samples = {
        "fp16-mha": {"append": [1e-3, 2e-3], "attend": [fast_s, 2 * fast_s]},
        "bf16-mha": {"append": [1e-3, 2e-3], "attend": [fast_s / 2, fast_s]},
    }
    group = [SizedCase(FP16, 1), SizedCase(BF16, 1, ("a note",))]
    return group_figures(group, samples, read_loop="4 sums", read_rates=[100e9, 50e9])


def test_efficiency_is_kv_read_once_over_time_and_read_bandwidth() -> None:
    fp16, bf16 = measured()
    assert fp16["kernel_efficiency"] == pytest.approx(0.8)
    assert fp16["kernel_efficiency_quartiles"] == pytest.approx([0.8, 0.8])
    assert fp16["read_bandwidth"] == pytest.approx(75e9)
    assert fp16["kv_bandwidth"] == pytest.approx(60e9)
    assert fp16["t_r_part"] == pytest.approx(fp16["t_append"] + fp16["t_attend"])
    assert fp16["kv_bytes"] == FP16.call_bytes == 1 << 30
    assert fp16["tokens_per_s"] == pytest.approx(32 * (80e9 + 40e9) / 2 / FP16.call_bytes)
    assert "speedup_over_fp16" not in fp16
    assert bf16["kernel_efficiency"] == pytest.approx(1.6)
    assert bf16["speedup_over_fp16"] == pytest.approx(2.0)
    assert bf16["notes"] == ["a note"]


def test_the_table_shows_what_was_measured_and_no_empty_columns() -> None:
    lines = format_table(measured()).splitlines()
    assert [line.split()[0] for line in lines] == ["case", "fp16-mha", "bf16-mha"]
    assert "over fp16" in lines[0] and "over torch" not in lines[0]
    assert "0.80 (0.80-0.80)" in lines[1] and "60.0" in lines[1] and "75.0" in lines[1] and "1.0 GiB" in lines[1]
    assert "2.00 (2.00-2.00)" in lines[2]


def test_the_lines_on_machine_and_decode() -> None:
    figures = dataclasses.asdict(MACHINE) | {"host": "n1", "threads": 4, "isa": "avx2", "memory_bytes": 2 << 30,
                                             "huge_page_bytes": 1 << 30}  # fmt: skip
    line = format_machine(figures)
    for part in ("Test CPU", "4 cores (0-3)", "4 threads", "isa avx2", "cache 32.0 MiB", "huge pages 1.0 GiB of 2.0"):
        assert part in line
    assert "cache 32.0 MiB assumed" in format_machine(figures | {"cache_is_read": False})
    row = {"model": "m.gguf", "batch": 4, "context": 4096, "llamacpp_variant": "flash attention"}
    for name, value in (("tokens_per_s", 30.0), ("llamacpp_tokens_per_s", 20.0), ("speedup_over_llamacpp", 1.5)):
        row |= {name: value, f"{name}_quartiles": [value, value]}
    assert "4 sequences of 4096 tokens: 30.0" in format_decode(row)
    assert "speedup_over_llamacpp 1.50" in format_decode(row)


def test_a_good_machine_gets_no_hints() -> None:
    assert find_hints(MACHINE, **GOOD) == []


@pytest.mark.parametrize(
    "machine,figures,hint",
    [
        ({"huge_page_mode": "never"}, {"huge_bytes": 0}, "huge pages: 0 B of 1.0 GiB are in huge pages ([never]"),
        ({}, {"num_threads": 8}, "threads: 8 threads on 4 cores (mask 0-3)"),
        ({"num_physical_cores": 2}, {}, "threads: 4 threads on 2 physical cores"),
        ({}, {"one_thread": 0.95}, "bandwidth: one thread reads 95% of what 4 threads read"),
        ({"numa_nodes": (0, 1)}, {}, "NUMA: the mask spans nodes 0-1"),
        ({"load_average": 3.0}, {}, "busy: the load average was 3.0"),
        ({"load_average": 3.0}, {"one_thread": 0.95}, "busy: the load average was 3.0"),
    ],
)
def test_each_fault_has_its_hint(machine: dict, figures: dict, hint: str) -> None:
    hints = find_hints(dataclasses.replace(MACHINE, **machine), **(GOOD | figures))
    assert len(hints) == 1
    assert hints[0].startswith(hint)


def test_little_memory_and_one_thread_say_nothing() -> None:
    assert find_hints(MACHINE, num_threads=1, memory_bytes=1 << 20, huge_bytes=0, one_thread=None) == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_windows_time_full_decode_steps_and_leave_the_pauses_out() -> None:
    clock, pauses = Clock(), []

    def pause() -> None:
        pauses.append(clock.now)
        clock.now += 100.0

    windows = DecodeWindows(4, pause, clock=clock)

    def step(seconds: float, num_rows: int = 4, prefill_tokens: int = 0, t_prefill: float = 0.0) -> None:
        clock.now += seconds
        windows.on_step(SimpleNamespace(num_rows=num_rows, prefill_tokens=prefill_tokens, t_prefill=t_prefill))

    step(7.0, num_rows=3)
    step(7.0, prefill_tokens=16)
    step(7.0, t_prefill=1.0)
    for _ in range(WINDOW_STEPS):
        step(0.5)
    for _ in range(WINDOW_STEPS - 1):
        step(0.25)
    assert windows.rates == [8.0]
    step(0.25)
    assert windows.rates == [8.0, 16.0]
    assert len(pauses) == 2


def test_the_tokens_of_a_comparison_hold_a_warm_up_and_all_rounds() -> None:
    assert num_new_tokens(7) > 8 * WINDOW_STEPS
    assert least_context(7) == num_new_tokens(7) + 2
