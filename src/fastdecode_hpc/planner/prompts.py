"""What the prompts of a batch that is always full take, by the step: time of the S-Part, bytes on the wire."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Ordered

import numpy as np

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.planner.costs import Costs
from fastdecode_hpc.planner.population import Population

PROMPTS_TIMED = 256  # of all, to know what a prompt takes


class PromptWork:
    """Prompts of the sequences that start in a step.

    Parameters
    ----------
    costs : Costs
    config : RunConfig
        How many tokens of prompts are computed together counts.
    population : Population
    """

    def __init__(self, costs: Costs, config: RunConfig, population: Population) -> None:
        self._costs, self._config, self._population = costs, config, population
        # In layers with a window the end of a prompt alone is sent.
        self._sent_bytes = float(costs.layout.loads(population.prompt_lens).mean()) * costs.kv_bytes(1)
        self._times: dict[int, float] = {}  # of a prompt, by prompts that are computed together

    def step_s(self, batch_size: int, together: int) -> float:
        """Seconds of prompts in a step; at least `together` of them are there at a time."""
        starts = batch_size * self._population.starts_a_row
        return starts * self._prompt_s(max(together, round(starts / self._config.num_slots), 1))

    def step_bytes(self, batch_size: int) -> float:
        """Bytes of K and V of prompts that are sent in a step."""
        return batch_size / self._population.mean_steps * self._sent_bytes

    def _prompt_s(self, together: int) -> float:
        """Mean seconds of a prompt, where so many are computed together if they may be."""
        if together not in self._times:
            lengths = self._population.lengths
            places = np.unique(np.linspace(0, len(lengths) - 1, PROMPTS_TIMED).astype(int))
            count = max(len(places), min(together, PROMPTS_TIMED))
            prompts = list(itertools.islice(itertools.cycle([lengths[place].prompt_len for place in places]), count))
            chunk_tokens = self._config.prefill_chunk_tokens
            total = sum(self._costs.prompts_s(pack, chunk_tokens) for pack in self._packs(prompts, together))
            self._times[together] = total / len(prompts)
        return self._times[together]

    def _packs(self, prompts: Ordered[int], together: int) -> Iterator[list[int]]:
        """Prompts as they come to be computed, batch by batch."""
        pack: list[int] = []
        for length in prompts:
            pack.append(length)
            if len(pack) == together or sum(pack) >= self._config.max_prefill_tokens:
                yield pack
                pack = []
        if pack:
            yield pack
