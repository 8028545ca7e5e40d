"""From measured points to a profile, and how well it gives them back. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.calibrate.samples import DecodePoint, DecodeSample
from fastdecode_hpc.planner.costs import chunk_counts, make_prompts, row_bytes
from fastdecode_hpc.planner.curve import Curve
from fastdecode_hpc.planner.profile import KVRates
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.schedule.prompts import cut_chunks
from fastdecode_hpc.schedule.row_tiles import TileSizes

NO_BYTES_RATE = 1e15  # bytes/s of a fit in which bytes take no time

Floats = npt.NDArray[np.float64]
Samples = Mapping[DecodePoint, DecodeSample]


@dataclass(frozen=True, slots=True)
class PromptPoint:
    """Prompts to measure: so many of one length, computed together."""

    num_prompts: int
    prompt_len: int

    def __str__(self) -> str:
        return f"{self.num_prompts} prompts of {self.prompt_len}"


def nonnegative_fit(columns: Floats, values: Floats) -> Floats:
    """Coefficients, none negative, of the least relative squares.

    Parameters
    ----------
    columns : float array
        ``[num_points, num_coefficients]``, few coefficients: all subsets are tried.
    values : float array
        ``[num_points]`` above 0.
    """
    relative, ones = columns / values[:, None], np.ones(len(values))
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), count):
            part = relative[:, chosen]
            found = np.linalg.lstsq(part, ones, rcond=None)[0]
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error * (1 - 1e-6):
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(chosen)] = found
    return best


def fit_curve(samples: Samples, name: str, tiles: TileSizes | None = None) -> Curve:
    """A curve over the rows of a mini-batch; points with as many rows count as one, by their median.

    Parameters
    ----------
    tiles : TileSizes, optional
        That rows are padded to: the curve is over the rows that were computed.
    """
    tiles = tiles or TileSizes()
    return _curve([(tiles.padded(round(sample.rows)), getattr(sample, name)) for sample in samples.values()])


def fit_worker_curve(samples: Samples, worker: int, name: str) -> Curve:
    """The same of an R-worker, over its own rows."""
    found = [sample.workers[worker] for sample in samples.values()]
    return _curve([(one.rows, getattr(one, name)) for one in found])


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    groups: dict[int, list[float]] = {}
    for rows, seconds in points:
        groups.setdefault(max(1, round(rows)), []).append(seconds)
    places = sorted(groups)
    return Curve(tuple(map(float, places)), tuple(statistics.median(groups[place]) for place in places))


def fit_rates(samples: Samples, worker: int, layouts: Mapping[str, KVLayout]) -> dict[str, KVRates]:
    """What attention takes on an R-worker, for each type of the cache."""
    rates = {}
    for kv_dtype, layout in layouts.items():
        mine = [
            sample
            for point, sample in samples.items()
            if point.kv_dtype == kv_dtype and sample.workers[worker].layer_s > 0
        ]
        columns = np.array([_attention_columns(sample, worker, layout) for sample in mine])
        call_s, pair_s, byte_s = nonnegative_fit(columns, np.array([s.workers[worker].layer_s for s in mine]))
        rates[kv_dtype] = KVRates(min(1.0 / max(byte_s, 1e-30), NO_BYTES_RATE), float(call_s), float(pair_s))
    return rates


def _attention_columns(sample: DecodeSample, worker: int, layout: KVLayout) -> tuple[float, float, float]:
    """Calls, pairs and bytes of one layer, the mean over layers."""
    rows, context = sample.workers[worker].rows, np.array([round(sample.context)])
    pairs = sum(len(group.layers) * rows * group.num_kv_heads for group in layout.main_groups)
    read = sum(len(group.layers) * rows * float(row_bytes(group, context)[0]) for group in layout.main_groups)
    return 1.0, pairs / layout.num_layers, read / layout.num_layers


def fit_prompts(
    samples: Mapping[PromptPoint, float], head_s: Callable[[int], float], *, num_layers: int, chunk_tokens: int
) -> tuple[float, float, float, float]:
    """Seconds for a chunk, a prompt in it, a token, a pair, in one layer.

    Parameters
    ----------
    samples : mapping of PromptPoint to float
        Seconds that computing all of its prompts took, first tokens included.
    head_s : callable
        What of this the logits of so many prompts took.
    """
    columns, values = [], []
    for point, seconds in samples.items():
        chunks = cut_chunks(make_prompts([point.prompt_len] * point.num_prompts), chunk_tokens)
        counts = np.array([chunk_counts(chunk) for chunk in chunks], float).sum(axis=0)
        ended = [sum(piece.stop == point.prompt_len for piece in chunk) for chunk in chunks]
        heads = sum(head_s(count) for count in ended if count)
        columns.append(counts * num_layers)
        values.append(max(seconds - heads, 0.1 * seconds))
    found = nonnegative_fit(np.array(columns), np.array(values))
    chunk_s, piece_s, token_s, pair_s = found.tolist()
    return chunk_s, piece_s, token_s, pair_s
