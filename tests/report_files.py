"""Reports of made-up runs whose every time is known: an S-worker and R-workers that take turns without any noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from fastdecode_hpc.report.predict import write_predictions
from fastdecode_hpc.report.schema import PREDICTED_UNITS
from fastdecode_hpc.report.writer import ReportWriter
from fastdecode_hpc.timing import RankTimes, StageTimes, StepTimes

PREFILL_S = 1e-3


@dataclass(frozen=True)
class MadeUpRun:
    """Two parts of fixed stage times, all slots in turn; times in seconds.

    With one rank the R-Part runs on rank 0 in between.
    """

    num_steps: int = 8
    num_slots: int = 2
    num_layers: int = 3
    num_ranks: int = 3
    rows: int = 4  # of a slot
    t_s: float = 2e-3  # a stage of the S-Part
    t_r: float = 3e-3  # a stage of the R-Part
    t_wire: float = 0.1e-3  # one way
    t_head: float = 1e-3
    origin: float = 1000.0  # of the clock
    prefill_steps: int = 2

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(range(1, self.num_ranks)) or (0,)

    def steps(self) -> Iterator[StepTimes]:
        """All steps of all slots, in the order in which they end."""
        rng = np.random.default_rng(0)
        now_s, now_r = self.origin, self.origin
        shape = (self.num_layers,)
        for step in range(self.num_steps):
            posted, asked, back = ({slot: np.zeros(shape) for slot in range(self.num_slots)} for _ in range(3))
            r_asked, arrived, r_posted = ({slot: np.zeros(shape) for slot in range(self.num_slots)} for _ in range(3))
            starts = {}
            for layer in range(self.num_layers):
                for slot in range(self.num_slots):
                    if layer:
                        asked[slot][layer - 1] = now_s
                        now_s = max(now_s, back[slot][layer - 1])
                    else:
                        now_s += PREFILL_S if step < self.prefill_steps else 0.0
                        starts[slot] = now_s
                    now_s += self.t_s
                    posted[slot][layer] = now_s
                    r_asked[slot][layer] = now_r if self.num_ranks > 1 else now_s + self.t_wire
                    arrived[slot][layer] = now_s + self.t_wire
                    now_r = max(now_r, now_s + self.t_wire) + self.t_r
                    r_posted[slot][layer] = now_r
                    back[slot][layer] = now_r + self.t_wire
                    if self.num_ranks == 1:
                        now_s = now_r + self.t_wire
            for slot in range(self.num_slots):
                asked[slot][-1] = now_s
                now_s = max(now_s, back[slot][-1]) + self.t_head
                yield self._times(rng, step, slot, starts[slot], now_s, (posted[slot], asked[slot], back[slot]),
                                  (r_asked[slot], arrived[slot], r_posted[slot]))  # fmt: skip

    def _times(self, rng, step, slot, start, end, own, of_rank) -> StepTimes:
        prefill = (start - PREFILL_S, start) if step < self.prefill_steps else ()
        load = self.rows * (100 + step)
        times = StepTimes(
            step, slot, start - self.origin, num_rows=self.rows, load_tokens=load,
            prefill_tokens=50 if prefill else 0, t_s_part=self.num_layers * self.t_s + self.t_head, t_head=self.t_head,
            t_prefill=PREFILL_S if prefill else 0.0, t_transport=2 * self.num_layers * self.t_wire,
            t_end=end - self.origin,
        )  # fmt: skip
        _, asked, back = own
        if self.num_ranks > 1:
            times.t_wait = float(np.maximum(back - asked, 0).sum())
            times.t_exposed = min(times.t_wait, self.num_layers * self.t_wire)
        loads = np.diff(np.sort(rng.integers(0, load, len(self.owners) - 1)), prepend=0, append=load)
        ranks = {}
        for rank, read in zip(self.owners, loads.tolist(), strict=True):
            begun = np.maximum(of_rank[0], of_rank[1])
            done = begun + self.t_r * min(1.0, 0.5 + read * len(self.owners) / load / 4)
            waited = float(np.maximum(of_rank[1] - of_rank[0], 0).sum())
            times.ranks[rank] = RankTimes(float((done - begun).sum()), waited, 0.0, 50 - step % 7, max(1, read))
            ranks[rank] = of_rank[0], of_rank[1], done
        times.stages = StageTimes(self.origin, *map(list, own), ranks, prefill)
        return times

    def attributes(self) -> dict:
        """As a run has them."""
        ranks = [{"rank": rank, "threads": 4} for rank in range(self.num_ranks)]
        config = {"max_batch_size": self.rows * self.num_slots, "kv_dtype": "fp16", "schedule": "greedy"}
        return {"config": config, "ranks": ranks, "program_version": "9", "model_path": "/models/made-up",
                "date": "2026-01-01T00:00:00+0000"}  # fmt: skip

    def write(self, path: Path, *, predicts: bool = False, **options) -> Path:
        """A whole report."""
        with ReportWriter(path, self.attributes(), self.owners, **options) as writer:
            times, predictions = None, []
            for times in self.steps():
                writer.add_step(times)
                predictions.append(self.predicted(times))
            output = self.num_steps * self.num_slots * self.rows
            writer.add_request(request_row(0, prompt_tokens=7, output_tokens=output))
            run_s = times.t_end if times is not None else 0.0
            summary = {
                "run_time": (run_s, "s"),
                "output_tokens": (output, "tokens"),
                "decode_tokens_per_s": (output / max(run_s, 1e-9), "tokens/s"),
            }
            writer.finish(summary, {self.owners[0]: {"kv_huge_pages": 0.5}})
        if predicts:
            columns = {name: np.array([row[name] for row in predictions]) for name in PREDICTED_UNITS}
            write_predictions(path, columns, "nobody")
        return path

    @staticmethod
    def predicted(times: StepTimes) -> dict[str, float]:
        """A fifth too little."""
        return {
            "predicted_t_s_part": 0.8 * times.t_s_part,
            "predicted_t_r_part": 0.8 * times.t_r_part,
            "predicted_t_step": 0.8 * (times.t_end - times.t_start),
        }


def request_row(index: int, **values: float) -> dict[str, float]:
    """A row of ``/requests``."""
    row = {"index": index, "prompt_tokens": 3, "output_tokens": 5, "finish_reason": 2, "failed": 0, "owner": 1}
    return {**row, "queue_wait": 0.1, "t_admitted": 0.2, "t_first_token": 0.3, "t_finished": 0.4, **values}


def as_version_1(path: Path, out: Path) -> Path:
    """The report as the first version of this program wrote it."""
    out.write_bytes(path.read_bytes())
    with h5py.File(out, "r+") as file:
        for name in ("program", "state"):
            del file.attrs[name]
        file.attrs["schema_version"] = 1
        del file["load"]
        for rank in file["ranks"].values():
            rank.pop("spans", None)
        for name in ("finish_reason", "failed", "owner", "queue_wait"):
            del file["requests"][name]
    return out
