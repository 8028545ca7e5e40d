"""Figures as text for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdecode_hpc.bench.figures import Figures
from fastdecode_hpc.host import format_bytes, format_cores

GB = 1e9


def format_table(rows: Sequence[Figures]) -> str:
    """A line a case; columns that no case has are left out."""
    columns = [(title, cell) for title, name, cell in _COLUMNS if any(name in row for row in rows)]
    lines = [[title for title, _ in columns]] + [[cell(row) for _, cell in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join(left + right).rstrip()


def _figure(name: str, digits: int, scale: float = 1.0, *, spread: bool = False) -> Callable[[Figures], str]:
    def cell(row: Figures) -> str:
        if name not in row:
            return "-"
        text = f"{row[name] * scale:.{digits}f}"
        if spread:
            low, high = row[f"{name}_quartiles"]
            text += f" ({low * scale:.{digits}f}-{high * scale:.{digits}f})"
        return text

    return cell


def _speedup(other: str) -> tuple[str, str, Callable[[Figures], str]]:
    name = f"speedup_over_{other}"
    return (f"over {other}", name, _figure(name, 2, spread=True))


_COLUMNS: tuple[tuple[str, str, Callable[[Figures], str]], ...] = (
    ("case", "name", lambda row: str(row["name"])),
    ("shape", "shape", lambda row: str(row["shape"])),
    ("KV read", "kv_bytes", lambda row: format_bytes(row["kv_bytes"])),
    ("append ms", "t_append", _figure("t_append", 2, 1e3)),
    ("attend ms", "t_attend", _figure("t_attend", 2, 1e3, spread=True)),
    ("both ms", "t_r_part", _figure("t_r_part", 2, 1e3)),
    ("GB/s", "kv_bandwidth", _figure("kv_bandwidth", 1, 1 / GB)),
    ("read_bandwidth", "read_bandwidth", _figure("read_bandwidth", 1, 1 / GB)),
    ("kernel_efficiency", "kernel_efficiency", _figure("kernel_efficiency", 2, spread=True)),
    ("tokens/s", "tokens_per_s", _figure("tokens_per_s", 0)),
    _speedup("fp16"),
    _speedup("torch"),
)


def format_decode(row: Figures) -> str:
    """The line on the decode of a whole model."""
    own, peer = (_figure(name, 1, spread=True)(row) for name in ("tokens_per_s", "llamacpp_tokens_per_s"))
    speedup = _figure("speedup_over_llamacpp", 2, spread=True)(row)
    return (
        f"decode of {row['model']}, {row['batch']} sequences of {row['context']} tokens: {own} tokens/s; llama.cpp "
        f"({row['llamacpp_variant']}) {peer} tokens/s; speedup_over_llamacpp {speedup}"
    )


def format_machine(machine: Figures) -> str:
    """The line on the machine."""
    cache = format_bytes(machine["cache_bytes"]) + ("" if machine["cache_is_read"] else " assumed")
    return (
        f"machine: {machine['host']}, {machine['processor']}, {len(machine['cores'])} cores "
        f"({format_cores(tuple(machine['cores']))}), {machine['threads']} threads, isa {machine['isa']}, "
        f"last-level cache {cache}, huge pages {format_bytes(machine['huge_page_bytes'])} of "
        f"{format_bytes(machine['memory_bytes'])}"
    )
