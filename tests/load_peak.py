"""How much memory loading a checkpoint takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastdecode_hpc.model_shape import ModelConfig

_MEASURE = """
import sys
from pathlib import Path
import torch
from fastdecode_hpc.s_part.weights import load_weights, read_model_config

def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

path = Path(sys.argv[1])
config = read_model_config(path)
before = status_bytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
weights = load_weights(path, config, dtype=torch.float32, device=torch.device("cpu"))
peak = status_bytes("VmHWM")
assert torch.isfinite(weights.embedding).all()
print((peak - before) / weights.size_bytes)
"""

_BUILD = """
import dataclasses, resource, sys
from pathlib import Path
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.s_part.build import build_native
from fastdecode_hpc.s_part.weights import read_model_config

def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

def build(model, load_format):
    run = RunConfig(
        device="cpu", load_format=load_format, dtype=dtype, weight_dtype=weight_dtype, batch_invariant=False
    )
    return build_native(run, model, path, threads=1, max_context_len=64)

path, dtype, weight_dtype, room = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
config = read_model_config(path)
build(dataclasses.replace(config, num_layers=1, vocab_size=64, intermediate_size=64), "dummy")  # libraries get ready
before = status_bytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
if room:
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + room,) * 2)
s_part = build(config, "auto")
print(status_bytes("VmHWM") - before, s_part.weights.size_bytes)
"""


def measure_load_peak(path: Path) -> float:
    """Peak memory of loading as float32, over the weights' own size."""
    return _numbers(_run(_MEASURE, str(path)))[0]


def measure_build_peak(path: Path, dtype: str, weight_dtype: str) -> tuple[float, float]:
    """Bytes that a process takes at most while it loads and packs weights, and those of the weights."""
    peak, held = _numbers(_run(_BUILD, str(path), dtype, weight_dtype, "0"))
    return peak, held


def can_build_within(num_bytes: int, path: Path, dtype: str, weight_dtype: str) -> bool:
    """Whether a process can load and pack weights if it may reserve so much memory more, touched or not."""
    run = _run(_BUILD, str(path), dtype, weight_dtype, str(num_bytes))
    assert run.returncode == 0 or "llocate" in run.stderr, run.stderr
    return run.returncode == 0


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if "clear_refs" in run.stderr:
        pytest.skip("this system can't reset the peak of a process's memory")
    return run


def _numbers(run: subprocess.CompletedProcess[str]) -> list[float]:
    assert run.returncode == 0, run.stderr
    return [float(word) for word in run.stdout.split()]


def random_state_dict(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random float32 tensors of a model without biases."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (config.q_size, hidden),
            prefix + "self_attn.k_proj.weight": (config.kv_size, hidden),
            prefix + "self_attn.v_proj.weight": (config.kv_size, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, config.q_size),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
    return {name: torch.rand(shape) for name, shape in shapes.items()}
