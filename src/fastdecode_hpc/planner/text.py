"""Plans and simulated runs as text for people and as plain values."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.plan import Choice, Plan, Planner, Wish
from fastdecode_hpc.planner.profile import MEASURED, Profile
from fastdecode_hpc.planner.shapes import SHAPES
from fastdecode_hpc.planner.simulate import SimulatedRun, Simulation
from fastdecode_hpc.schedule.shares import MAX_TOLD
from fastdecode_hpc.schedule.step_figures import step_latencies, step_loads


def format_plan(planner: Planner, plan: Plan, model: str, own_profile: str = "") -> str:
    """The proposal, the table it comes from, and what to type.

    Parameters
    ----------
    own_profile : str
        The profile's file, for runs to begin with; empty: it is a published one.
    """
    profile, best = planner.profile, plan.best
    lines = [
        describe_profile(profile, planner.model, plan.choices[-1].num_workers),
        f"model {model}, {planner.population.describe()}, KV cache {planner.config.kv_dtype}",
        "",
        *_table(planner, plan),
        "",
        f"proposed: {best.num_workers} R-worker{'s'[: best.num_workers != 1]}, batch {best.batch_size}: "
        f"{best.tokens_per_s:,.0f} tokens/s, {best.step.step_s * 1e3:.1f} ms a step, "
        f"schedule {planner.config.schedule}; limited by {best.limited_by}",
        *_rows_measured(planner, plan),
        *_shares(planner, plan),
        f"{_lifetime(planner, best)}; the longest step takes {best.peak_step_s * 1e3:.1f} ms",
        *_load(planner, plan),
        *_pays(plan),
        f"both parts take equally long at this batch with {plan.balance_workers:.1f} R-workers",
        f"a token's attention reads {plan.transfer_ratio:,.1f} times the bytes that its q, k, v and o take on the wire",
        *_gpu_only(planner, plan),
        "",
        *command_lines(planner, plan, model, own_profile),
    ]
    return "\n".join(lines)


def describe_profile(profile: Profile, model: ModelConfig, num_workers: int, changed: Ordered[str] = ()) -> str:
    """Whose figures these are, and how far they are stretched.

    Parameters
    ----------
    changed : sequence of str
        Options that replace figures of the profile.
    """
    lines = [f"profile {profile.name}: {profile.source} figures"]
    if profile.source != MEASURED:
        lines += [f"  {note}" for note in profile.notes]
    if profile.s_part_options != {name: getattr(RunConfig(), name) for name in profile.s_part_options}:
        options = ", ".join(f"{name} {value}" for name, value in profile.s_part_options.items())
        lines.append(f"  of an S-Part with {options}")
    if dataclasses.replace(model, num_layers=1) != dataclasses.replace(profile.model, num_layers=1):
        lines.append(
            "  of another model: scaled by the weights of a layer and of the head, and the bytes attention reads"
        )
    elif model.num_layers != profile.model.num_layers:
        lines.append(f"  of {profile.model.num_layers} layers; this model has {model.num_layers}")
    if num_workers > len(profile.r_parts):
        lines.append(f"  R-workers after rank {len(profile.r_parts)} are taken to be like those before, in turn")
    lines += [f"  replaced: {option}" for option in changed]
    return "\n".join(lines)


def simulation_figures(simulation: Simulation, result: SimulatedRun) -> dict[str, float]:
    """Totals and means of a simulated run; seconds, tokens, shares."""
    loads, latencies = step_loads(result.steps), step_latencies(result.steps)
    s_part, r_part = (sum(getattr(step, name) for step in result.steps) for name in ("t_s_part", "t_r_part"))
    prefill = sum(step.t_prefill for step in result.steps)
    wall = max(result.wall_s, 1e-12)
    return {
        "num_sequences": result.num_sequences,
        "output_tokens": result.output_tokens,
        "wall_s": result.wall_s,
        "tokens_per_s": result.tokens_per_s,
        "num_steps": len(loads),
        "step_s_median": float(np.median(latencies)) if len(latencies) else 0.0,
        "step_s_peak": float(latencies.max(initial=0.0)),
        "s_part_share": s_part / wall,
        "r_part_share": r_part / wall,
        "prefill_share": prefill / wall,
        "wait_share": simulation.clock.t_wait / wall,
        "peak_load_tokens": int(loads.max(initial=0)),
    }


def format_simulation(figures: dict[str, float]) -> str:
    """The figures of a simulated run with their units, and where rank 0's time went.

    Parameters
    ----------
    figures : dict
        As `simulation_figures` gives them.
    """
    rows = [
        ("sequences", f"{figures['num_sequences']:,}"),
        ("output", f"{figures['output_tokens']:,} tokens"),
        ("time", f"{figures['wall_s']:,.3f} s"),
        ("speed", f"{figures['tokens_per_s']:,.0f} tokens/s, prompts and the job's beginning and end counted"),
        ("steps", f"{figures['num_steps']:,}"),
        ("a step, median", f"{figures['step_s_median'] * 1e3:,.2f} ms"),
        ("a step, longest", f"{figures['step_s_peak'] * 1e3:,.2f} ms"),
        ("load, largest", f"{figures['peak_load_tokens']:,} tokens of each layer's KV cache read in a step"),
    ]
    own = {name: figures[f"{key}_share"] for name, key in (("S-Part", "s_part"), ("prompts", "prefill"))}
    own["waiting for R-workers"] = figures["wait_share"]
    own["other"] = max(0.0, 1 - sum(own.values()))
    rows.append(("rank 0's time", ", ".join(f"{name} {share:.1%}" for name, share in own.items())))
    rows.append(("R-workers", f"the slowest attends for {figures['r_part_share']:.1%} of the time"))
    return "\n".join(f"{name:16} {text}" for name, text in rows)


def _table(planner: Planner, plan: Plan) -> list[str]:
    has_price = plan.best.cost_per_million is not None
    head = f"{'R-workers':>9} {'batch':>7} {'tokens/s':>10} {'step ms':>9} {'peak ms':>9} {'S busy':>7} {'R busy':>7}"
    lines = [head + f" {'link':>6} {'one more':>9}" + (f" {'per 1M':>8}" if has_price else "") + "  limited by"]
    before: Choice | None = None
    for choice in plan.choices:
        gain = "" if before is None else f"{choice.tokens_per_s / before.tokens_per_s - 1:+.1%}"
        step = choice.step
        busy = [min(1.0, part / step.step_s) for part in (step.s_part, step.r_part, step.network)]
        price = f" {choice.cost_per_million:8.3g}" if has_price else ""
        mark = " <" if choice is plan.best else ""
        lines.append(
            f"{choice.num_workers:9} {choice.batch_size:7} {choice.tokens_per_s:10,.0f} {step.step_s * 1e3:9.1f} "
            f"{choice.peak_step_s * 1e3:9.1f} {busy[0]:7.0%} {busy[1]:7.0%} {busy[2]:6.0%} {gain:>9}{price}  "
            f"{choice.limited_by}{mark}"
        )
        before = choice
    return lines


def _rows_measured(planner: Planner, plan: Plan) -> list[str]:
    if plan.best.limited_by != "rows measured":
        return []
    rows = int(planner.profile.s_part.layer.x[-1])
    return [f"larger batches would give more: the profile has up to {rows} rows; calibrate with larger --batch-sizes"]


def _lifetime(planner: Planner, best: Choice) -> str:
    """How long sequences decode."""
    population, step_s = planner.population, best.step.step_s
    text = f"a sequence decodes for {step_s * population.mean_steps:,.1f} s"
    return (
        text if population.is_even else f"{text} on average, the longest for {step_s * population.longest_steps:,.1f} s"
    )


def _load(planner: Planner, plan: Plan) -> list[str]:
    """What the R-workers read, and under the load-stabilizing schedule what they read at most."""
    text = f"a step reads {plan.mean_load:,.0f} tokens of each layer's KV cache on average"
    if planner.config.schedule == "load-stabilizing":
        text += f", {plan.load_limit:,} at most, with a start every {plan.start_interval} steps"
    return [text]


def _shares(planner: Planner, plan: Plan) -> list[str]:
    """Where R-workers are unlike: shares follow, as far as memory allows."""
    best = plan.best
    shares, room = planner.shares(best), planner.room.of_each(best.num_workers)
    text = shares.describe()
    wanted = {rank: int(share * best.batch_size + 1e-6) for rank, share in shares.ideal().items()}
    full = [
        f"rank {rank} holds {room[rank - 1]} of {count}" for rank, count in wanted.items() if room[rank - 1] < count
    ]
    more = f" and {len(full) - MAX_TOLD} more" if full[MAX_TOLD:] else ""
    return [
        *([f"shares of the load: {text}"] if text else []),
        *([f"memory for fewer sequences than its share: {', '.join(full[:MAX_TOLD])}{more}"] if full else []),
    ]


def _pays(plan: Plan) -> list[str]:
    """From where on one more socket is wasted, or worse."""
    if len(plan.choices) < 2:
        return []
    if not plan.stops_paying_at:
        return ["every socket in the table adds 5 % tokens/s or more"]
    lines = [f"socket {plan.stops_paying_at} adds less than 5 % tokens/s"]
    if plan.hurts_at:
        lines.append(f"from socket {plan.hurts_at} on there are fewer tokens/s")
    return lines


def _gpu_only(planner: Planner, plan: Plan) -> list[str]:
    alone, best, device = plan.gpu_only, plan.best, planner.profile.s_part.name
    if alone is None:
        return [
            "no comparison with a GPU-only engine: the profile does not say how much memory the S-Part's device has "
            "and how fast it reads it"
        ]
    if not alone.batch_size:
        return [f"a GPU-only engine is no choice: not one sequence fits on the {device} beside the weights"]
    price, is_better = "", alone.tokens_per_s > best.tokens_per_s
    if alone.cost_per_million is not None and best.cost_per_million is not None:
        price, is_better = f", {alone.cost_per_million:.3g} per 1M", alone.cost_per_million < best.cost_per_million
    line = (
        f"a GPU-only engine on the {device} would reach {alone.tokens_per_s:,.0f} tokens/s at best, with batch "
        f"{alone.batch_size}{price}"
    )
    return [line + (": take one" if is_better else "")]


def command_lines(planner: Planner, plan: Plan, model: str, own_profile: str = "") -> list[str]:
    """What to type under Slurm for the proposal."""
    config, profile, best = planner.config, planner.profile, plan.best
    threads = profile.r_part(0).threads
    where = f"FOLDER_OF_{model}" if model in SHAPES else model  # of a well-known shape there is nothing to load
    program = ["fastdecode", "generate", "--model", where, "--max-batch-size", str(best.batch_size)]
    defaults = RunConfig()
    for name in (
        "s_part",
        "trust_remote_code",
        "weight_dtype",
        "kv_dtype",
        "wire_dtype",
        "num_slots",
        "max_prefill_tokens",
        "prefill_chunk_tokens",
    ):
        if getattr(config, name) != getattr(defaults, name):
            value = getattr(config, name)
            program += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if config.schedule == "load-stabilizing":
        program += ["--schedule", config.schedule, "--start-interval", str(plan.start_interval)]
    if own_profile and len(profile.r_parts) == best.num_workers:  # a run takes one of its own R-workers alone
        program += ["--profile", own_profile]
    program += ["--input", "prompts.jsonl", "--output", "completions.jsonl", "--report", "report.h5"]
    cpus = f" --cpus-per-task={threads}" if threads else ""
    return [
        f"srun --mpi=pmi2 --ntasks={best.num_workers + 1}{cpus} --kill-on-bad-exit=1 \\",
        f"  {shlex.join(program)}",
    ]


def plan_as_dict(planner: Planner, plan: Plan, model: str, own_profile: str = "") -> dict[str, Any]:
    """The plan as JSON has it; times in seconds. See `format_plan`."""
    profile = planner.profile
    return {
        "profile": {
            "name": profile.name,
            "source": profile.source,
            **profile.s_part_options,
            "notes": list(profile.notes),
        },
        "model": model,
        "wish": _wish(planner),
        "schedule": planner.config.schedule,
        **dataclasses.asdict(plan),
        "shares": planner.shares(plan.best).ideal(),
        "sequences": planner.sequences(plan.best),
        "command": "\n".join(command_lines(planner, plan, model, own_profile)),
    }


def _wish(planner: Planner) -> dict[str, Any]:
    population = planner.population
    given = {spec.name: getattr(planner.wish, spec.name) for spec in dataclasses.fields(Wish) if spec.name != "lengths"}
    return {
        "num_lengths": len(population.lengths),
        "mean_prompt_len": sum(entry.prompt_len for entry in population.lengths) / len(population.lengths),
        "mean_output_len": sum(entry.output_len for entry in population.lengths) / len(population.lengths),
        "longest": max(entry.longest for entry in population.lengths),
        "mean_context": population.mean_context,
        **{name: value for name, value in given.items() if value is not None},
    }
