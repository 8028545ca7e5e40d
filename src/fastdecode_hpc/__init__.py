"""FastDecode over MPI: high-throughput LLM decoding with the KV cache on CPU sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdecode_hpc import host as _host  # noqa: F401  reads this process's cores before torch can narrow them

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastdecode_hpc.config import RunConfig
    from fastdecode_hpc.engine import Engine
    from fastdecode_hpc.sequence import SamplingParams

_HOMES = {
    "Engine": "fastdecode_hpc.engine",
    "RunConfig": "fastdecode_hpc.config",
    "SamplingParams": "fastdecode_hpc.sequence",
}

__all__ = ["Engine", "RunConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
