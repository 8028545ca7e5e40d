"""The last words of a rank: nothing ends before they are read."""

import io
import os
import pty
import socket
import sys
import threading
import time

import pytest

from fastdecode_hpc.log import wait_until_read


def pipe():
    read, write = os.pipe()
    return read, write


def sockets():
    ours, theirs = socket.socketpair()
    return theirs.detach(), ours.detach()


@pytest.fixture
def stderr_to(monkeypatch):
    """Replace sys.stderr by a stream on a descriptor; stdout by one that is closed."""
    closed = io.StringIO()
    closed.close()

    def replace(fd: int) -> None:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", os.fdopen(fd, "w"))

    return replace


@pytest.mark.parametrize("channel", [pipe, sockets])
def test_it_waits_until_the_other_end_has_read(channel, stderr_to) -> None:
    read, write = channel()
    stderr_to(write)
    sys.stderr.write("last words")
    waiting = threading.Thread(target=wait_until_read, args=(60,))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert os.read(read, 100) == b"last words"
    waiting.join(30)
    assert not waiting.is_alive()
    os.close(read)


def test_it_gives_up_after_the_limit(stderr_to) -> None:
    read, write = pipe()
    stderr_to(write)
    sys.stderr.write("nobody reads this")
    begin = time.monotonic()
    wait_until_read(0.2)
    assert 0.2 <= time.monotonic() - begin < 30
    os.close(read)


def test_a_file_a_terminal_and_a_reader_who_is_gone_do_not_hold_it(stderr_to, tmp_path) -> None:
    master, terminal = pty.openpty()
    read, write = pipe()
    os.close(read)
    for fd in (os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), terminal, write):
        stderr_to(fd)
        sys.stderr.write("words\n")
        wait_until_read(3600)
    assert (tmp_path / "log").read_text() == "words\n"
    os.close(master)
