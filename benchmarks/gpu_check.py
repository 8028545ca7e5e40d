"""Tests and measures the S-Part on a GPU; scripts/gpu_check.sh builds what this needs and starts it.

Parts, each with a time limit, each run whatever became of the others: the tests that need a GPU; TFLOP/s of the stages
of decode beside plain matrix products of the same shapes; the share of a decode step in which the GPU works. Figures
go to gpu_check.json, in the folder that OUT names or here. Exit code 1 if a part failed, 2 without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (64, 128, 256, 512, 1024, 2048)  # rows of one mini-batch
NUM_LAYERS = 8
ROUNDS, STEPS = 5, 20
DECODE_BATCHES = (64, 256, 1024)  # over both mini-batches
DECODE_PROMPT, DECODE_TOKENS = 16, 32
SHAPE = {  # of Llama 2 7B, with fewer layers
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def parts(folder: Path) -> dict[str, tuple[list[str], int]]:
    """Name of each part |-> its command and its limit in seconds."""
    me = str(Path(__file__).resolve())
    own = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(own) if own.exists() else shutil.which("mpiexec") or "mpiexec"
    pytest = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    return {
        "tests": (pytest, 150),
        "stages": ([sys.executable, me, "stages", str(folder)], 80),
        "decode": ([mpiexec, "-n", "3", sys.executable, me, "decode", str(folder)], 100),
    }


def run_part(command: list[str], limit_s: int) -> dict[str, Any]:
    """Run to the end or the limit; nothing of it is left."""
    started = time.perf_counter()
    if shutil.which(command[0]) is None:
        print(f"gpu_check: there is no {command[0]}")
        return {"exit_code": 127, "seconds": 0.0, "limit_s": limit_s}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = 124
    return {"exit_code": code, "seconds": time.perf_counter() - started, "limit_s": limit_s}


def measure_stages(folder: Path) -> None:
    """``stages``: what graphs and launches make of the matrix products' speed."""
    import torch

    from fastdecode_hpc.config import RunConfig
    from fastdecode_hpc.s_part.build import build_native
    from fastdecode_hpc.s_part.checkpoint import read_model_config

    run = RunConfig(load_format="dummy", dtype="bf16", device="cuda")
    s_part = build_native(run, read_model_config(folder), folder, threads=4, max_context_len=4096)
    rows = []
    with torch.inference_mode():
        for batch in BATCHES:
            row = _stage_figures(s_part, batch)
            rows.append(row)
            print(
                f"{batch:5d} rows: plain {row['plain_tflops']:.0f} TFLOP/s, graphs {row['graphs_tflops']:.0f} "
                f"({row['graphs_over_plain']:.2f}), without {row['eager_tflops']:.0f} ({row['eager_over_plain']:.2f}); "
                f"host {row['graphs_host_s'] * 1e3:.1f} and {row['eager_host_s'] * 1e3:.1f} ms a step; "
                f"{row['graph_bytes'] / 2**20:.2f} MB a graph",
                flush=True,
            )
    figures = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "num_layers": NUM_LAYERS, "cases": rows}
    (folder / "stages.json").write_text(json.dumps(figures))


def _stage_figures(s_part: Any, batch: int) -> dict[str, Any]:
    """Medians over rounds in which the three are measured in turn; seconds are of one step of all layers."""
    import torch

    steps = {"plain": _plain_products(s_part, batch), "eager": _decode_step(s_part, batch, use_graphs=False)}
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    steps["graphs"] = _decode_step(s_part, batch, use_graphs=True)
    for _ in range(2):  # warm-up, then recording
        steps["graphs"]()
    torch.cuda.synchronize()
    # What the driver took for itself, not torch for tensors.
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        for name, step in steps.items():
            measured = _time(step)
            times[name] += [measured] if number else []
    layers = s_part.weights.layers
    products = (layers[0].qkv, layers[0].output, layers[0].gate_up, layers[0].down)
    flop = 2 * batch * len(layers) * sum(weight.numel() for weight in products)
    row: dict[str, Any] = {"batch": batch, "graph_bytes": taken / len(layers)}
    for name, measured in times.items():
        row[f"{name}_s"] = median(device_s for device_s, _ in measured)
        row[f"{name}_host_s"] = median(host_s for _, host_s in measured)
        row[f"{name}_tflops"] = flop / row[f"{name}_s"] * 1e-12
    for name in ("graphs", "eager"):
        ratios = [plain[0] / own[0] for plain, own in zip(times["plain"], times[name], strict=True)]
        row[f"{name}_over_plain"] = median(ratios)
    return row


def _plain_products(s_part: Any, batch: int) -> Any:
    """The four products of each layer, one after another, on rows of the right sizes."""
    import torch
    import torch.nn.functional as F

    config, weights = s_part.config, s_part.weights.layers
    sizes = (config.hidden_size, config.q_size, config.hidden_size, config.intermediate_size)
    x = [torch.randn(batch, size, dtype=s_part.dtype, device=s_part.device) for size in sizes]

    def step() -> None:
        for layer in weights:
            for rows, weight in zip(x, (layer.qkv, layer.output, layer.gate_up, layer.down), strict=True):
                F.linear(rows, weight)

    return step


def _decode_step(s_part: Any, batch: int, *, use_graphs: bool) -> Any:
    """All stages of one decode step of one slot as the S-worker runs them, without attention and copies."""
    import numpy as np

    from fastdecode_hpc.s_part.cuda import CudaDevice
    from fastdecode_hpc.s_part.stages import SlotStages
    from fastdecode_hpc.s_part.wire import WireCast

    device = CudaDevice(s_part.device, use_graphs=use_graphs)
    stages = SlotStages(s_part, WireCast("fp16", s_part.device), device, batch)
    stages.begin([1] * batch, np.arange(batch))

    def step() -> None:
        for layer in range(s_part.config.num_layers):
            for body in stages.bodies(layer):
                body()
        stages.end()

    return step


def _time(step: Any) -> tuple[float, float]:
    """Seconds of one step on the device, and until the host had enqueued it."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    start.record()
    for _ in range(STEPS):
        step()
    stop.record()
    host_s = time.perf_counter() - started
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3 / STEPS, host_s / STEPS


def measure_decode(folder: Path) -> None:
    """``decode``, on three ranks: the GPU's share of a step, on given KV."""
    from fastdecode_hpc.config import RunConfig
    from fastdecode_hpc.engine import Engine, connect
    from fastdecode_hpc.results import Hooks
    from fastdecode_hpc.sequence import Request, SamplingParams
    from fastdecode_hpc.timing import StepTimes

    options = {"model": str(folder), "load_format": "dummy", "dtype": "bf16", "device": "cuda", "max_context_len": 128}
    world = connect(RunConfig(**options))
    rows: list[dict[str, Any]] = []
    for batch in DECODE_BATCHES:
        for cuda_graphs in ("auto", "off"):
            run = RunConfig(**options, max_batch_size=batch, cuda_graphs=cuda_graphs)
            engine = Engine(run, world=world, given_kv=True)
            steps: list[StepTimes] = []
            params = SamplingParams(max_new_tokens=DECODE_TOKENS, ignore_eos=True)
            requests = (Request(index, None, [1] * DECODE_PROMPT, params=params) for index in range(batch))
            stats = engine.run(requests, Hooks(lambda completion: None, on_step=steps.append))
            if stats is None:  # an R-worker
                continue
            if stats.num_errors:
                raise RuntimeError(f"{stats.num_errors} of {batch} sequences can't be run")
            row = {"batch": batch, "cuda_graphs": cuda_graphs, **_decode_figures(steps, batch)}
            rows.append(row)
            print(
                f"{batch:5d} sequences, graphs {cuda_graphs}: step {row['step_s'] * 1e3:.1f} ms; GPU busy "
                f"{row['gpu_busy']:.2f} of it, R-workers {row['r_part_busy']:.2f}, rank 0 waiting {row['wait']:.2f}",
                flush=True,
            )
    if rows:
        (folder / "decode.json").write_text(json.dumps({"num_layers": NUM_LAYERS, "cases": rows}))
    if world is not None:
        world.finalize()


def _decode_figures(steps: list[Any], batch: int) -> dict[str, float]:
    """Shares of wall time of the later half of the steps with full slots (all graphs are recorded by then)."""
    from fastdecode_hpc.bench.schedule_figures import Window, full_steps

    first, last = full_steps(steps, batch)
    window = Window.of(steps, (first + last) // 2, last, num_layers=NUM_LAYERS, num_slots=2)
    return {
        "step_s": window.step_s,
        "gpu_busy": window.t_s_part / window.wall_s,
        "r_part_busy": window.t_r_part / window.wall_s,
        "wait": sum(step.t_wait for step in window.steps) / window.wall_s,
        "tokens_per_s": window.tokens_per_s,
    }


def main() -> int:
    """Run one part, or all."""
    sys.path.insert(0, str(ROOT / "src"))
    if len(sys.argv) == 3:
        {"stages": measure_stages, "decode": measure_decode}[sys.argv[1]](Path(sys.argv[2]))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU; run this on a machine with one, and check CUDA_VISIBLE_DEVICES")
        return 2
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        for part, (command, limit_s) in parts(folder).items():
            print(f"== {part}", flush=True)
            report[part] = run_part(command, limit_s)
            file = folder / f"{part}.json"
            report[part] |= json.loads(file.read_text()) if file.exists() else {}
    path = Path(os.environ.get("OUT", ".")) / "gpu_check.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"== figures in {path}")
    for part, result in report.items():
        outcome = {0: "ok", 124: "ran past its limit"}.get(result["exit_code"], f"failed ({result['exit_code']})")
        print(f"{part:8s} {outcome}, {result['seconds']:.0f} s of {result['limit_s']}")
    return int(any(result["exit_code"] for result in report.values()))


if __name__ == "__main__":
    raise SystemExit(main())
