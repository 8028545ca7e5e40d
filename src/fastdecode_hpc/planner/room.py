"""How many sequences of a job the KV caches of R-workers hold, as admission counts them."""

from __future__ import annotations

import bisect

import numpy as np

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.population import Population
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.setup import KV_SHARE


class Room:
    """What R-workers have memory for: every sequence reserves its whole length.

    Parameters
    ----------
    profile : Profile
    model : ModelConfig
    layout : KVLayout
    population : Population
    memory_bytes : float, optional
        Memory of a socket, if other than the profile's.
    """

    def __init__(
        self,
        profile: Profile,
        model: ModelConfig,
        layout: KVLayout,
        population: Population,
        memory_bytes: float | None = None,
    ) -> None:
        self._profile, self._model, self._layout = profile, model, layout
        self._memory_bytes = memory_bytes
        self._longest_need = max(entry.longest for entry in population.lengths) + 1  # tokens: a spare one, too
        self._row_blocks = population.mean_blocks(layout)
        self._found: dict[int, list[int]] = {}  # by R-workers

    def of_all(self, num_workers: int) -> int:
        """Rows whose reservations the R-workers can hold; 0 if the longest fits nowhere."""
        workers = range(num_workers)
        longest = self._layout.worst_case(self._longest_need)
        if not any(all(a >= b for a, b in zip(self._blocks(w, 1), longest, strict=True)) for w in workers):
            return 0
        sizes = [group.block_bytes(self._layout.block_size) for group in self._layout.groups]
        most = sum(int(self._kv_bytes(worker) // (self._row_blocks @ sizes)) for worker in workers)
        return bisect.bisect_left(  # copies of recent tokens are made for so many: with more of them less is left
            range(1, most + 1), True, key=lambda count: sum(self._rows_of(w, count) for w in workers) < count
        )

    def of_each(self, num_workers: int) -> list[int]:
        """Rows whose reservations each R-worker can hold, where all hold as many as they can."""
        if num_workers not in self._found:
            most = self.of_all(num_workers)
            self._found[num_workers] = [self._rows_of(worker, most) if most else 0 for worker in range(num_workers)]
        return self._found[num_workers]

    def refusal(self) -> str:
        """What to say where not even the longest sequence fits."""
        need, length = self._smallest_budget(), self._longest_need - 1
        return (
            f"one sequence of {length} tokens needs {need / 1e9:.3g} GB of KV cache, and an R-worker has "
            f"{self._kv_bytes(0) / 1e9:.3g} GB for it; take a smaller --kv-dtype, or more memory (--r-memory)"
        )

    def _rows_of(self, worker: int, max_sequences: int) -> int:
        return int((np.array(self._blocks(worker, max_sequences)) / self._row_blocks + 1e-9).min())

    def _blocks(self, worker: int, max_sequences: int) -> tuple[int, ...]:
        """KV blocks of an R-worker for each group, as a run has them."""
        return self._layout.split_budget(int(self._kv_bytes(worker)), self._model.max_context_len, max_sequences)

    def _kv_bytes(self, worker: int) -> float:
        given = self._memory_bytes
        memory = self._profile.r_part(worker).memory_bytes if given is None else given
        if not memory:
            raise ConfigError(
                f"profile {self._profile.name} does not say how much memory an R-worker has; give it (--r-memory SIZE)"
            )
        return memory * KV_SHARE

    def _smallest_budget(self) -> float:
        """Bytes of KV in which the longest sequence fits, shared by layer groups as the model's longest needs them."""
        layout, most = self._layout, self._model.max_context_len
        groups, size = layout.main_groups, layout.block_size
        part = max(layout.blocks_for(self._longest_need, group) / layout.blocks_for(most, group) for group in groups)
        shared = part * sum(layout.blocks_for(most, group) * group.block_bytes(size) for group in groups)
        copies = (group for group in layout.groups if group.is_recent)
        return shared + sum(layout.blocks_for(most, group) * group.block_bytes(size) for group in copies)
