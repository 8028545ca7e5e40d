"""From measured times to the figures of a case, under the names that the JSON file has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode_hpc.bench.cases import REFERENCE_DTYPE, SizedCase
from fastdecode_hpc.bench.measure import Samples, Spread, ratios

Figures = dict[str, Any]


def case_figures(sized: SizedCase, samples: Samples, *, read_loop: str, read_rates: Sequence[float]) -> Figures:
    """What was measured of one case.

    Parameters
    ----------
    samples : dict
        ``append`` and ``attend``, seconds of one layer in each round.
    read_loop : str
        The fastest read loop.
    read_rates : sequence of float
        Its bytes/s in each round.
    """
    case, attend_s = sized.case, samples["attend"]
    rates = [case.call_bytes / seconds for seconds in attend_s]
    figures: Figures = {
        "name": case.name,
        "kv_dtype": case.kv_dtype,
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "contexts": [list(part) for part in case.contexts],
        "num_layers": sized.num_layers,
        "shape": case.shape,
        "kv_bytes": case.call_bytes,
        "read_loop": read_loop,
        "notes": list(sized.notes),
    }
    add_spread(figures, "t_append", Spread.of(samples["append"]))
    add_spread(figures, "t_attend", Spread.of(attend_s))
    add_spread(figures, "t_r_part", Spread.of([a + b for a, b in zip(samples["append"], attend_s, strict=True)]))
    add_spread(figures, "kv_bandwidth", Spread.of(rates))
    add_spread(figures, "read_bandwidth", Spread.of(read_rates))
    add_spread(figures, "kernel_efficiency", ratios(rates, read_rates))
    add_spread(figures, "tokens_per_s", Spread.of([case.num_sequences / seconds for seconds in attend_s]))
    return figures


def add_spread(figures: Figures, name: str, spread: Spread) -> None:
    """The median under `name`, the quartiles beside it."""
    figures[name] = spread.median
    figures[f"{name}_quartiles"] = [spread.low, spread.high]


def add_speedup(figures: Figures, other: str, other_s: Sequence[float], own_s: Sequence[float]) -> None:
    """How many times the tokens/s of another way to the same result, round by round."""
    add_spread(figures, f"speedup_over_{other}", ratios(other_s, own_s))


def group_figures(
    group: Sequence[SizedCase],
    samples: Mapping[str, Samples],
    *,
    read_loop: str,
    read_rates: Sequence[float],
) -> list[Figures]:
    """Figures of cases that were measured in one interleaved run, the fp16 case first."""
    reference_s = samples[group[0].case.name]["attend"]
    results = []
    for sized in group:
        case, attend_s = sized.case, samples[sized.case.name]["attend"]
        figures = case_figures(sized, samples[case.name], read_loop=read_loop, read_rates=read_rates)
        if case.kv_dtype != REFERENCE_DTYPE:
            add_speedup(figures, REFERENCE_DTYPE, reference_s, attend_s)
        results.append(figures)
    return results
