"""The device seam: stages through it, copies that take their time, stages that are recorded."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from emulated_device import EmulatedDevice
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.device import CpuDevice, as_rows
from fastdecode_hpc.s_part.graphs import Recorder, padded_rows
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.stages import SlotStages
from fastdecode_hpc.s_part.weights import dummy_weights
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.transport.base import Segment
from fastdecode_hpc.transport.local import make_local

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_context_len=128, attention_bias=True, mlp_bias=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def s_part() -> SPart:
    weights = dummy_weights(MODEL, dtype=torch.float32, device=CPU)
    for layer in weights.layers:
        layer.attention_norm *= 3e4  # large enough for some q, k, v to exceed fp16
        layer.qkv_bias.uniform_(-1, 1)
    return SPart(MODEL, weights, device=CPU, dtype=torch.float32, batch_invariant=True)


def until(ready) -> None:
    for _ in range(100):
        if ready():
            return
    raise AssertionError("a copy never ends")


def pass_layers(stages: SlotStages) -> Iterator[None]:
    """Run the stages of a step; yields when q, k, v of each are at the host."""
    for layer in range(MODEL.num_layers):
        if layer:
            stages.receive()
        for body in stages.bodies(layer):
            body()
        until(stages.send())
        yield


@torch.inference_mode()
def run_steps(s_part: SPart, device, batches: list[int], wire_dtype: str) -> list[np.ndarray]:
    """q, k, v of every stage and hidden states of every step; attention is a stand-in that mixes q and v."""
    stages = SlotStages(s_part, WireCast(wire_dtype, CPU), device, max(batches))
    results = []
    for step, num_rows in enumerate(batches):
        stages.begin([(7 * step + row) % 100 for row in range(num_rows)], np.arange(num_rows) + step)
        for _ in pass_layers(stages):
            results.append(stages.qkv.rows[:num_rows].copy())
            stages.out.rows[:num_rows] = stages.qkv.rows[:num_rows, : MODEL.q_size]
        stages.receive()
        results.append(stages.end().clone().numpy())
        device.fetch(torch.zeros(1), lambda: None)
    return results


@pytest.mark.parametrize("wire_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_stages_give_the_same_bits_on_an_asynchronous_device(s_part, wire_dtype: str, use_graphs: bool) -> None:
    batches = [5, 5, 5, 8, 3, 7, 70, 66, 70, 1, 1, 5]
    device = EmulatedDevice(use_graphs=use_graphs)
    for got, want in zip(
        run_steps(s_part, device, batches, wire_dtype),
        run_steps(s_part, CpuDevice(), batches, wire_dtype),
        strict=True,
    ):
        assert got.tobytes() == want.tobytes()
    assert device.num_copies == MODEL.num_layers * len(batches)
    # 5, 8 and 7 rows are 8; 3 are 4; 70 and 66 are at most the slot's 70.
    assert device.num_recorded == (MODEL.num_layers * 3 if use_graphs else 0)
    assert device.num_replays == (MODEL.num_layers * (4 + 1) if use_graphs else 0)


def test_rows_of_padding_do_not_count_as_saturated(s_part) -> None:
    def num_saturated(device) -> int:
        """After a step of 8 rows and one of 5, all with values that no fp16 holds."""
        cast = WireCast("fp16", CPU)
        stages = SlotStages(s_part, cast, device, 8)
        stages.out.rows[:] = 6e4
        for num_rows in (8, 5):
            stages.begin([1] * num_rows, np.arange(num_rows))
            for _ in pass_layers(stages):
                pass
            device.fetch(torch.zeros(1), lambda: None)
        return cast.num_saturated

    want = num_saturated(CpuDevice())
    assert want > 0
    assert num_saturated(EmulatedDevice()) == want


@torch.inference_mode()
@pytest.mark.parametrize("works", [True, False])
def test_buffers_go_with_their_slot(s_part, works: bool) -> None:
    """They are a GPU's memory: that of the last run must not wait for the garbage collector."""
    device = EmulatedDevice()
    device._recorder.works = works
    gc.disable()
    try:
        stages = SlotStages(s_part, WireCast("fp32", CPU), device, 8)
        stages.begin([1] * 8, np.arange(8))
        for _ in range(3):
            for layer in range(MODEL.num_layers):
                for body in stages.bodies(layer):
                    body()
        buffers = [weakref.ref(buffer) for buffer in (stages._pass.hidden, stages.qkv.device)]
        del stages, body
        assert [buffer() for buffer in buffers] == [None, None]
    finally:
        gc.enable()


def test_the_emulated_device_finds_who_is_too_early() -> None:
    device = EmulatedDevice()
    twin = device.make_twin(4, 8, torch.float32)
    ready = device.to_host(twin, 3)
    assert not ready()
    assert np.isnan(twin.rows[:3]).all()
    assert not twin.rows[3].any()
    with pytest.raises(AssertionError, match="another is under way"):
        device.to_host(twin, 1)
    until(ready)
    assert not twin.rows.any()

    ready = device.to_host(twin, 3)
    twin.device[1] = 5.0
    with pytest.raises(AssertionError, match="device rows were overwritten"):
        until(ready)

    device = EmulatedDevice()
    device.to_device(twin, 2)
    _, ready = device.download(torch.zeros(2))
    twin.rows[0] = 1.0
    with pytest.raises(AssertionError, match="host rows were overwritten"):
        until(ready)


def test_a_local_run_takes_rows_and_prompt_kv_only_when_they_are_ready() -> None:
    s_end, r_end = make_local(1)
    taken: list[list[Segment]] = []
    r_end.bind(lambda segments, rows: taken.append(segments))
    segments = [Segment(unit, 1, 0, 0, 0, 2) for unit in (1, 2, 3)]
    late = itertools.count()
    s_end.send_kv(segments[:1], np.zeros((2, 4), np.float32), lambda: next(late) >= 3)
    s_end.send_kv(segments[1:2], np.zeros((2, 4), np.float32), lambda: True)
    s_end.send_kv(segments[2:], np.zeros((2, 4), np.float32), lambda: False)
    r_end.expect(segments[:2])
    r_end.poke()
    assert not taken  # the second one is ready, but comes after the first
    r_end.wait_prefill()
    assert taken == [segments[:1], segments[1:2]]
    assert next(late) > 3


def test_bf16_rows_are_seen_as_their_bits_and_share_memory() -> None:
    tensor = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    rows = as_rows(tensor)
    assert rows.dtype == np.uint16
    tensor[0, 0] = 0
    assert rows.tolist() == [[0, 0xC000]]


@pytest.mark.parametrize(
    ("num_rows", "padded"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 80), (129, 160), (257, 320), (2048, 2048), (2049, 2049)],
)
def test_row_counts_of_recorded_stages(num_rows: int, padded: int) -> None:
    assert padded_rows(num_rows) == padded


def test_row_counts_are_few_and_padding_is_bounded() -> None:
    counts = {padded_rows(num_rows) for num_rows in range(1, 2049)}
    assert len(counts) == 27
    assert len([count for count in counts if count <= 256]) == 15
    assert all(num_rows <= padded_rows(num_rows) <= num_rows * 5 / 4 for num_rows in range(65, 2049))


def test_a_stage_is_recorded_when_it_is_met_again() -> None:
    log: list[str] = []

    def capture(body):
        log.append("capture")
        return lambda: log.append("replay")

    stage = Recorder(capture).stage([lambda: log.append("first"), lambda: log.append("second")])
    for _ in range(3):
        stage()
    assert log == ["first", "second", "capture", "replay", "replay"]


def test_stages_go_on_without_graphs_when_one_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def capture(body):
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = Recorder(capture)
    stages = [recorder.stage([lambda number=number: calls.append(number)]) for number in (0, 1)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for stage in stages:
                stage()
    assert calls == [0, 1] * 3
    assert not recorder.works
    assert len(caplog.records) == 1
    assert "not permitted" in caplog.text
