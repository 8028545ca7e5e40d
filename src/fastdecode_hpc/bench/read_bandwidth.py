"""How fast this machine's memory can be read: plain loops over a buffer far larger than the caches."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from fastdecode_hpc.bench.measure import Contender, Samples, Spread, interleave
from fastdecode_hpc.r_part.attention import READ_LOOPS, read_sums, touch_parts
from fastdecode_hpc.r_part.kv_cache import map_arena

PREFIX = "read: "


class ReadLoops:
    """All read loops over one buffer, each thread reading the part that it touched first.

    Parameters
    ----------
    num_bytes : int
        Of the buffer.
    num_threads : int
    """

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self.num_threads = num_threads
        self.buffer = map_arena(num_bytes // 4 * 4).view(np.float32)
        touch_parts(self.buffer, num_threads)

    @property
    def contenders(self) -> dict[str, Contender]:
        """One for each loop; part ``read``."""
        return {PREFIX + name: self._contender(variant, self.num_threads) for variant, name in enumerate(READ_LOOPS)}

    def _contender(self, variant: int, num_threads: int) -> Contender:
        def run() -> Mapping[str, float]:
            started = time.perf_counter()
            read_sums(self.buffer, variant, num_threads)
            return {"read": time.perf_counter() - started}

        return run

    def best(self, samples: Mapping[str, Samples]) -> tuple[str, list[float]]:
        """The loop of the best median: its name, and its bytes/s in each round."""
        rates = {
            name: [self.buffer.nbytes / seconds for seconds in samples[PREFIX + name]["read"]] for name in READ_LOOPS
        }
        name = max(rates, key=lambda name: Spread.of(rates[name]).median)
        return name, rates[name]

    def one_thread(self, loop: str, rounds: int) -> Spread:
        """Bytes/s of one thread over those of all, by the named loop."""
        variant = READ_LOOPS.index(loop)
        pair = {"one": self._contender(variant, 1), "all": self._contender(variant, self.num_threads)}
        samples = interleave(pair, rounds=rounds)
        return Spread.of(
            [every / one for one, every in zip(samples["one"]["read"], samples["all"]["read"], strict=True)]
        )
