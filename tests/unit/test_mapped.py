"""Libraries and huge pages of a process, from made-up files of /proc/self and from this one's."""

from __future__ import annotations

import ctypes
from pathlib import Path

from fastdecode_hpc.mapped import huge_page_share, huge_page_use, libraries

START = 0x7F0000400000


def mapping(first: int, last: int, touched: int, huge: int) -> str:
    return (
        f"{first:08x}-{last:08x} rw-p 00000000 00:00 0 \nSize: 9 kB\nRss:    {touched} kB\n"
        f"AnonHugePages:  {huge} kB\nShmemPmdMapped: 0 kB\nVmFlags: rd wr nr hg\n"
    )


def test_the_share_is_of_the_mappings_that_the_spans_lie_in(tmp_path: Path) -> None:
    others = mapping(START - 8192, START, 1000, 1000) + mapping(START + 4096, START + 8192, 1000, 1000)
    (tmp_path / "smaps").write_text(others + mapping(START, START + 4096, 4000, 3000))
    assert huge_page_share([(START, START + 4096)], tmp_path) == 0.75
    assert huge_page_share([(START + 100, START + 200), (START + 300, START + 301)], tmp_path) == 0.75
    (tmp_path / "smaps").write_text(others)
    assert huge_page_share([(START, START + 4096)], tmp_path) is None
    assert huge_page_share([], tmp_path) is None
    assert huge_page_share([(START, START + 4096)], tmp_path / "missing") is None


def test_what_is_in_use_is_read_from_the_sum_of_all_mappings(tmp_path: Path) -> None:
    assert huge_page_use(tmp_path) == (0, 0)
    (tmp_path / "smaps_rollup").write_text("00-ff ---p [rollup]\nAnonymous:  2048 kB\nAnonHugePages:  1024 kB\n")
    assert huge_page_use(tmp_path) == (2 << 20, 1 << 20)


def test_libraries_are_files_each_once_and_by_name(tmp_path: Path) -> None:
    lines = [
        "7f0-7f1 r-xp 0000 08:01 99 /opt/my lib/libgomp.so.1.0.0",
        "7f1-7f2 r--p 0000 08:01 99 /opt/my lib/libgomp.so.1.0.0",
        "7f2-7f3 r--p 0000 08:01 98 /usr/lib/libiomp5.so",
        "7f3-7f4 r--p 0000 08:01 97 /usr/libgomp/other.so",
        "7f4-7f5 rw-p 0000 00:00 0",
        "7f5-7f6 rw-p 0000 00:00 0 [heap]",
    ]
    (tmp_path / "maps").write_text("\n".join(lines) + "\n")
    assert libraries("lib(gomp|iomp)", tmp_path) == ("/opt/my lib/libgomp.so.1.0.0", "/usr/lib/libiomp5.so")
    assert libraries("libmpi", tmp_path) == ()
    assert libraries("libgomp", tmp_path / "missing") == ()


def test_this_process_has_its_c_library() -> None:
    ctypes.CDLL(None)
    assert len(libraries(r"(libc[.-]|ld-musl)")) == 1
    assert huge_page_use()[0] > 0
