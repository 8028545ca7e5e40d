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


def measure_load_peak(path: Path) -> float:
    """Peak memory of loading as float32, over the weights' own size."""
    run = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, check=False)
    if "clear_refs" in run.stderr:
        pytest.skip("this system can't reset the peak of a process's memory")
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


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
