"""The GPU's side of the seam on stand-ins for streams, events and graphs: no buffer is touched out of turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fake_cuda import FakeCuda, Stream
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.r_part.worker import RWorker
from fastdecode_hpc.results import Hooks
from fastdecode_hpc.s_part.cuda import CudaDevice
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes
from fastdecode_hpc.transport.local import LocalREnd
from tiny_models import make_checkpoint, random_prompt


class WatchedDevice(CudaDevice):
    """Tells of what tensors' operations don't show."""

    cuda: FakeCuda

    def make_twin(self, num_rows, row_size, dtype):
        twin = super().make_twin(num_rows, row_size, dtype)
        self.cuda.watch(twin.device)
        return twin

    def fetch(self, values, poke):
        host = super().fetch(values, poke)
        self.cuda.access(self.cuda.host, host.data_ptr(), is_write=False)
        return host


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Runs in one process have a fake GPU, whose host memory is watched where the R-worker uses it."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(WatchedDevice, "cuda", fake, raising=False)

    def wrap(kind: type, name: str, place) -> None:
        method = getattr(kind, name)

        def wrapped(self, *args):
            result = method(self, *args)
            rows, is_write = place(self, args, result)
            fake.access(fake.host, rows.ctypes.data, is_write=is_write)
            return result

        monkeypatch.setattr(kind, name, wrapped)

    wrap(LocalREnd, "wait_qkv", lambda end, args, rows: (rows, False))
    wrap(LocalREnd, "send_out", lambda end, args, _: (end._box.out[args[0]], True))
    wrap(RWorker, "store_prefill", lambda worker, args, _: (args[1], False))
    return fake


def generate(model: Path, **options) -> tuple[dict[int, list[int]], list[StepTimes]]:
    """Tokens of prompts of unequal lengths, greedy and sampled, in several chunks; and the steps."""
    run = RunConfig(
        model=str(model), device="cpu", kv_memory_bytes=4 << 20, threads=1, max_batch_size=7, prefill_chunk_tokens=16,
        **options,
    )  # fmt: skip
    params = [SamplingParams(max_new_tokens=3 + 2 * i, temperature=0.5 * (i % 2), logprobs=2) for i in range(9)]
    requests = [Request(i, None, random_prompt(5 + 9 * i, seed=i), params=params[i]) for i in range(9)]
    tokens: dict[int, list[int]] = {}
    steps: list[StepTimes] = []
    with Engine(run) as engine:
        done = lambda completion: tokens.__setitem__(completion.request.index, completion.token_ids)  # noqa: E731
        engine.run(iter(requests), Hooks(done, on_step=steps.append))
    return tokens, steps


def use_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fastdecode_hpc.run.make_device",
        lambda device, *, cuda_graphs: WatchedDevice(device, use_graphs=cuda_graphs != "off"),
    )


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
def test_no_buffer_is_touched_out_of_turn_and_tokens_stay(
    model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, num_slots: int, cuda_graphs: str
) -> None:
    expected, _ = generate(model)
    use_fake_gpu(monkeypatch)
    with cuda:
        tokens, steps = generate(model, num_slots=num_slots, cuda_graphs=cuda_graphs)
    assert tokens == expected
    assert (cuda.num_replays > 20) == (cuda_graphs == "auto")
    assert min(cuda.num_accesses.values()) > 20
    assert len(cuda.num_accesses) == 4  # host, computing, and a stream for copies each way
    # A step's four blocks, or five with the halves of a stage apart, took the millisecond that the fake's events say.
    blocks = 4 if cuda_graphs == "auto" else 5
    assert {round(step.t_s_part * 1e3) for step in steps if step.num_rows} == {blocks}
    assert {round(step.t_head * 1e3) for step in steps if step.num_rows} == {1}
    assert sum(step.t_prefill for step in steps) > 0


def breaks(model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_gpu(monkeypatch)
    with cuda, pytest.raises(AssertionError, match="race"):
        generate(model)


def test_streams_that_do_not_wait_are_found(model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    breaks(model, cuda, monkeypatch)


def test_incoming_rows_that_nobody_waits_for_are_found(
    model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Stream.wait_stream
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None if self is cuda.compute else wait(self, other))
    breaks(model, cuda, monkeypatch)


def test_rows_that_leave_before_they_are_ready_are_found(
    model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out = CudaDevice._copy_out

    def at_once(self, host: torch.Tensor, values: torch.Tensor):
        copy_out(self, host, values)
        return lambda: True

    monkeypatch.setattr(CudaDevice, "_copy_out", at_once)
    breaks(model, cuda, monkeypatch)
