"""One run of ``fastdecode bench kernel``: measures groups of cases and keeps their figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fastdecode_hpc.bench.attention_run import AttentionRun, Tokens
from fastdecode_hpc.bench.cases import CACHE_MULTIPLE, Case, SizedCase, fit_group
from fastdecode_hpc.bench.figures import Figures, add_speedup, group_figures
from fastdecode_hpc.bench.hints import find_hints
from fastdecode_hpc.bench.machine import look_at_machine, program_figures
from fastdecode_hpc.bench.measure import MIN_ROUNDS, interleave
from fastdecode_hpc.bench.read_bandwidth import ReadLoops
from fastdecode_hpc.host import available_memory, format_bytes, look
from fastdecode_hpc.mapped import huge_page_use

if TYPE_CHECKING:
    from fastdecode_hpc.bench.kernel import Settings
    from fastdecode_hpc.bench.peers_torch import TorchPeer

MEMORY_SHARE = 0.6  # of what this process may still take
TORCH_COPIES = 3.0  # what torch takes in parts of the fp16 KV: as much as fp32, and temporaries


class KernelSession:
    """Measures groups of cases on this machine.

    Parameters
    ----------
    settings : Settings

    Attributes
    ----------
    rows : list of dict
        Figures of the cases measured so far.
    notes : list of str
        What was not measured as asked.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.machine = look_at_machine(look().cores)
        self.rows: list[Figures] = []
        self.notes: list[str] = []
        self._memory = (0, 0)  # bytes of this process at its largest, and in huge pages then
        self._loops = self._make_loops()
        self._best_loop = ""

    def _make_loops(self) -> ReadLoops:
        wanted = CACHE_MULTIPLE * self.machine.cache_bytes
        num_bytes = min(wanted, _memory_to_use() // 4)
        if num_bytes < wanted:
            self.notes.append(
                f"the read loops read {format_bytes(num_bytes)}, less than {CACHE_MULTIPLE} times the last-level "
                "cache, as there is no more memory: read_bandwidth is partly that of the cache"
            )
        return ReadLoops(num_bytes, self.settings.num_threads)

    def measure(self, group: Sequence[Case]) -> None:
        """Measure cases of one shape, the read loops and torch in one interleaved run."""
        sized = self._fit(group)
        tokens = Tokens(sized[0].case, self.settings.seed)
        runs = {one.case.name: AttentionRun(one, tokens, self.settings.num_threads) for one in sized}
        self._memory = max(self._memory, huge_page_use())
        peers = self._make_peers(sized[0], tokens)
        samples = interleave({**self._loops.contenders, **runs, **peers}, rounds=self.settings.rounds)
        self._best_loop, rates = self._loops.best(samples)
        rows = group_figures(sized, samples, read_loop=self._best_loop, read_rates=rates)
        for name, peer in peers.items():
            for row in rows:
                add_speedup(row, name, samples[name]["attend"], samples[row["name"]]["attend"])
                row |= {f"{name}_variant": peer.variant, f"difference_from_{name}": peer.check(runs[row["name"]])}
        self.rows += rows

    def _fit(self, group: Sequence[Case]) -> list[SizedCase]:
        copies = TORCH_COPIES if "torch" in self.settings.peers else 0.0
        sized = fit_group(group, cache_bytes=self.machine.cache_bytes, memory_bytes=_memory_to_use(), num_copies=copies)
        self.notes += [note for one in sized for note in one.notes]
        names, size = ", ".join(one.case.name for one in sized), sum(one.num_bytes for one in sized)
        print(f"bench: {names}: {format_bytes(size)} of KV", file=sys.stderr, flush=True)
        return sized

    def _make_peers(self, sized: SizedCase, tokens: Tokens) -> dict[str, TorchPeer]:
        if "torch" not in self.settings.peers:
            return {}
        from fastdecode_hpc.bench.peers_torch import TorchPeer

        threads, cache_bytes = self.settings.num_threads, self.machine.cache_bytes
        return {"torch": TorchPeer(sized, tokens, num_threads=threads, cache_bytes=cache_bytes)}

    def compare_decode(self, model: str, batch: int, context: int) -> None:
        """Decode a whole model with this program and with llama.cpp in turn."""
        from fastdecode_hpc.bench.peers_llamacpp import DecodeCase, compare_decode

        settings = self.settings
        print(f"bench: {model} by llama.cpp: {batch} sequences of {context} tokens", file=sys.stderr, flush=True)
        case = DecodeCase(
            model, batch, context, settings.rounds, settings.num_threads, settings.isa, settings.seed
        )  # fmt: skip
        self.rows.append(compare_decode(case))

    def machine_figures(self) -> Figures:
        """Where and with what the figures were taken."""
        memory_bytes, huge_bytes = self._memory
        return {
            **program_figures(),
            **asdict(self.machine),
            "threads": self.settings.num_threads,
            "isa": self.settings.isa,
            "rounds": self.settings.rounds,
            "read_buffer_bytes": self._loops.buffer.nbytes,
            "memory_bytes": memory_bytes,
            "huge_page_bytes": huge_bytes,
        }

    def hints(self) -> list[str]:
        """Faults of the set-up that show in the figures; measures how fast one thread reads."""
        num_threads = self.settings.num_threads
        alone = self._loops.one_thread(self._best_loop, MIN_ROUNDS).median if num_threads > 1 else None
        memory_bytes, huge_bytes = self._memory
        return find_hints(
            self.machine, num_threads=num_threads, memory_bytes=memory_bytes, huge_bytes=huge_bytes, one_thread=alone
        )


def _memory_to_use() -> int:
    return int(MEMORY_SHARE * available_memory())
