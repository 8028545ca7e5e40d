"""Which instruction set the native kernels of this process use."""

from __future__ import annotations

import os

from fastdecode_hpc import _kernels
from fastdecode_hpc.config import ConfigError

ISA_VARIABLE = "FASTDECODE_ISA"
_is_chosen = False


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this build has and this processor can run, slowest first."""
    return _kernels.available_isas()


def active_isa() -> str:
    """The instruction set in use: the selected one, else ``FASTDECODE_ISA``, else the best available."""
    choose_isa()
    return _kernels.active_isa()


def select_isa(name: str) -> None:
    """Use the named instruction set from now on.

    Raises
    ------
    ConfigError
        If this build or this processor does not have it.
    """
    global _is_chosen
    if name not in available_isas():
        raise ConfigError(f"instruction set {name!r} is not available; here are: {', '.join(available_isas())}")
    _kernels.select_isa(name)
    _is_chosen = True


def choose_isa() -> None:
    """Honour the environment on the first use of a kernel."""
    global _is_chosen
    wanted = None if _is_chosen else os.environ.get(ISA_VARIABLE)
    if wanted:
        try:
            select_isa(wanted)
        except ConfigError as error:
            raise ConfigError(f"{ISA_VARIABLE}: {error}") from None
    _is_chosen = True
