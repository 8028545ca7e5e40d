"""Figures of ``fastdecode bench schedule`` as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode_hpc.bench.figures import Figures


def format_rows(rows: Sequence[Figures]) -> str:
    """A line a case."""
    return "\n".join(_format_row(row) for row in rows)


def _format_row(row: Figures) -> str:
    if "stage_s" in row:
        low, high = row["loop_s_quartiles"]
        return (
            f"{row['name']}: the loop takes {row['loop_s'] * 1e6:.0f} us a stage ({low * 1e6:.0f}-{high * 1e6:.0f}) of "
            f"both parts, {row['stage_s'] * 1e6:.0f} with what is left in the bodies"
        )
    if "speedup_over_equal" in row:
        return (
            f"{row['name']}: {row['batch']} at once, link of R-worker {row['num_workers']} {row['slower']} times slower"
            f": equal shares {row['tokens_per_s_equal']:.0f} tokens/s, shares that follow links "
            f"{row['tokens_per_s_auto']:.0f} (that one has {row['share_of_slow']:.1%} of the rows), "
            f"{_spread(row, 'speedup_over_equal')} times as many"
        )
    if "latency_over_allowed" in row:
        return _format_prefill(row)
    return _format_lives(row) if "schedule" in row else _format_overlap(row)


def _format_overlap(row: Figures) -> str:
    text = (
        f"{row['name']}: {row['batch']} x {row['context']}, {row['num_slots']} slots: {_times(row)}; "
        f"pipeline_efficiency {_spread(row, 'pipeline_efficiency')}, bound {row['bound']:.3f}, "
        f"of the bound {row['efficiency_over_bound']:.3f}; exposed_transport {row['exposed_transport']:.3f}"
    )
    if "speedup_over_one_mini_batch" in row:
        text += f"; over one mini-batch {_spread(row, 'speedup_over_one_mini_batch')}"
    return text


def _format_lives(row: Figures) -> str:
    text = (
        f"{row['name']}: {row['batch']} at once, {row['mean_new_tokens']} tokens each: {_times(row)}, "
        f"peak {row['peak_step_s'] * 1e3:.1f} ms; load {row['mean_load']:.0f}, peak {row['peak_load']}"
    )
    if "load_bound" in row:
        text += f", bound {row['load_bound']:.0f}"
    text += f"; imbalance {row['imbalance']:.3f}; {row['tokens_per_s']:.0f} tokens/s"
    if "speedup_over_greedy" in row:
        text += (
            f"; against greedy: peak {row['peak_step_over_greedy']:.3f}, "
            f"tokens/s {_spread(row, 'speedup_over_greedy')}, "
            f"cold start counted in {_spread(row, 'speedup_over_greedy_with_cold_start')}"
        )
    return text


def _format_prefill(row: Figures) -> str:
    return (
        f"{row['name']}: a prompt of {row['prompt_len']} beside {row['batch'] - 1} in decode: step "
        f"{row['step_s'] * 1e3:.1f} ms, beside prefill {row['step_beside_prefill_s'] * 1e3:.1f} ms; "
        f"{row['max_prefill_tokens']} tokens alone {row['prefill_alone_s'] * 1e3:.1f} ms; "
        f"of what is allowed {_spread(row, 'latency_over_allowed')}"
    )


def _times(row: Figures) -> str:
    return f"S {row['t_s_part'] * 1e3:.1f} ms, R {row['t_r_part'] * 1e3:.1f} ms, step {row['step_s'] * 1e3:.1f} ms"


def _spread(row: Figures, name: str) -> str:
    low, high = row[f"{name}_quartiles"]
    return f"{row[name]:.3f} ({low:.3f}-{high:.3f})"
