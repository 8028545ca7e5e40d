"""Rank-aware logging: rank 0 speaks, the others only on warnings, every line says who."""

from __future__ import annotations

import logging
import socket
import sys


def set_up_logging(rank: int) -> None:
    """Send log lines to stderr, with rank and host in front where there is more than one rank's to expect."""
    root = logging.getLogger("fastdecode_hpc")
    root.setLevel(logging.WARNING if rank else logging.INFO)
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    where = f"[rank {rank}/{socket.gethostname()}] " if rank else ""
    handler.setFormatter(logging.Formatter(f"{where}%(message)s"))
    root.addHandler(handler)
    root.propagate = False
