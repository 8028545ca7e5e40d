"""Rank-aware logging: rank 0 speaks, the others only on warnings, every line says who."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import struct
import sys
import termios
import time
from contextlib import suppress

LAST_WORDS_S = 2.0  # the longest a dying rank waits for its launcher to read what it said


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


def wait_until_read(limit_s: float = LAST_WORDS_S) -> None:
    """Flush stdout and stderr and wait until whoever collects them has read all, for `limit_s` at most.

    A launcher that is told to end a job may do so before it reads the rank's last words: MPICH's lost a traceback
    in 1 of 15 aborts on a busy machine.
    """
    end = time.monotonic() + limit_s
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or no such question can be asked of it (a file)
            stream.flush()
            while _unread_bytes(stream.fileno()) and time.monotonic() < end:
                time.sleep(0.005)


def _unread_bytes(fd: int) -> int:
    """Bytes written to the pipe, socket or terminal `fd` that the other end has not read."""
    question = termios.FIONREAD if stat.S_ISFIFO(os.fstat(fd).st_mode) else termios.TIOCOUTQ  # SIOCOUTQ of sockets
    (count,) = struct.unpack("i", fcntl.ioctl(fd, question, struct.pack("i", 0)))
    return int(count)
