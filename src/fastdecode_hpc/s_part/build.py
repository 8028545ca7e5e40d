"""Builds rank 0's native S-Part, and chooses device and types for every kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.host import format_bytes, keep_freed_memory, return_freed_memory
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.products import pack_part
from fastdecode_hpc.s_part.weights import checkpoint_dtype, dummy_weights, load_weights
from fastdecode_hpc.s_part.wire import TORCH_DTYPES

logger = logging.getLogger(__name__)

TELL_EVERY_S = 10.0


def choose_device(name: str) -> torch.device:
    """The S-Part's device; ``auto`` takes a GPU where there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device is 'cuda' but torch sees no GPU; check CUDA_VISIBLE_DEVICES or use --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def device_memory(device: torch.device) -> tuple[str, int]:
    """Name and bytes of memory of a GPU."""
    found = torch.cuda.get_device_properties(device)
    return found.name, found.total_memory


def describe_gpu() -> tuple[str, int, str]:
    """Name and bytes of memory of the GPU that the S-Part would take (empty and 0 without one), torch's version."""
    name, num_bytes = device_memory(torch.device("cuda")) if torch.cuda.is_available() else ("", 0)
    return name, num_bytes, torch.__version__


def choose_dtype(name: str, device: torch.device, path: Path | None) -> str:
    """The S-Part's type; ``auto``: fp32 on a CPU, the checkpoint's own on a GPU (without one: bf16)."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "fp32"
    return "bf16" if path is None else checkpoint_dtype(path)


def build_native(
    run: RunConfig,
    model: ModelConfig,
    path: Path,
    *,
    threads: int,
    max_context_len: int,
    progress: Callable[[int, int], None] | None = None,
) -> SPart:
    """Load the weights and make the S-Part ready to run."""
    torch.set_num_threads(threads)
    device = choose_device(run.device)
    dtype = TORCH_DTYPES[choose_dtype(run.dtype, device, None if run.load_format == "dummy" else path)]
    finish = partial(pack_part, weight_dtype=run.weight_dtype)  # layer by layer: one is in memory twice at a time
    with load_timed(progress) as tell:
        if run.load_format == "dummy":
            weights = dummy_weights(model, dtype=dtype, device=device, seed=run.seed, finish=finish)
        else:
            first = run.num_layers is not None
            weights = load_weights(
                path, model, dtype=dtype, device=device, first_layers=first, progress=tell, finish=finish
            )
    invariant = device.type == "cpu" if run.batch_invariant is None else run.batch_invariant
    return SPart(model, weights, device=device, dtype=dtype, batch_invariant=invariant, max_positions=max_context_len)


@contextmanager
def load_timed(progress: Callable[[int, int], None] | None) -> Iterator[Callable[[int, int], None]]:
    """Around the loading of weights: says how long it took, and what is freed meanwhile is given back at once.

    Gives what is to be called with bytes in place and their total: it passes them on, and says now and then how far it
    is.
    """
    started = told = time.perf_counter()
    return_freed_memory()  # the weights as they were read

    def tell(done: int, total: int) -> None:
        nonlocal told
        if progress is not None:
            progress(done, total)
        if time.perf_counter() - told >= TELL_EVERY_S:
            told = time.perf_counter()
            logger.info("weights: %s of %s are in place", format_bytes(done), format_bytes(total))

    try:
        yield tell
    finally:
        keep_freed_memory()
    logger.info("weights ready in %.1f s", time.perf_counter() - started)
