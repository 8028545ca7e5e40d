"""Plans and simulated runs as text for people and as plain values."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.planner.plan import Choice, Plan, Planner, Wish
from fastdecode_hpc.planner.profile import MEASURED, Profile


def format_plan(planner: Planner, plan: Plan, model: str) -> str:
    """The proposal, the table it comes from, and what to type."""
    profile, wish, best = planner.profile, planner.wish, plan.best
    lines = [
        describe_profile(profile),
        f"model {model}, {wish.prompt_len} + {wish.output_len} tokens a sequence, KV cache {planner.config.kv_dtype}",
        "",
        *_table(planner, plan),
        "",
        f"proposed: {best.num_workers} R-workers, batch {best.batch_size}: {best.tokens_per_s:,.0f} tokens/s, "
        f"{best.step.step_s * 1e3:.1f} ms a step; limited by {best.limited_by}",
        f"a sequence decodes for {best.step.step_s * wish.output_len:,.1f} s; the longest step takes "
        f"{best.peak_step_s * 1e3:.1f} ms",
        *_pays(plan),
        f"both parts take equally long at this batch with {plan.balance_workers:.1f} R-workers",
        f"a token's attention reads {plan.transfer_ratio:,.1f} times the bytes that its q, k, v and o take on the wire",
        *_gpu_only(planner, plan),
        "",
        *command_lines(planner.config, plan, model, profile.r_part(0).threads),
    ]
    return "\n".join(lines)


def describe_profile(profile: Profile) -> str:
    """Whose figures these are."""
    lines = [f"profile {profile.name}: {profile.source} figures"]
    if profile.source != MEASURED:
        lines += [f"  {note}" for note in profile.notes]
    return "\n".join(lines)


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


def _pays(plan: Plan) -> list[str]:
    """From where on one more socket is wasted, or worse."""
    if not plan.stops_paying_at:
        return ["every socket in the table pays"]
    lines = [f"socket {plan.stops_paying_at} adds less than 5 % tokens/s"]
    if plan.hurts_at:
        lines.append(f"from socket {plan.hurts_at} on there are fewer tokens/s")
    return lines


def _gpu_only(planner: Planner, plan: Plan) -> list[str]:
    alone, device = plan.gpu_only, planner.profile.s_part.name
    if alone is None:
        return []
    if not alone.batch_size:
        return [f"without R-workers: not one sequence fits on the {device} beside the weights"]
    better = alone.tokens_per_s > plan.best.tokens_per_s or (
        alone.cost_per_million is not None
        and plan.best.cost_per_million is not None
        and alone.cost_per_million < plan.best.cost_per_million
    )
    price = "" if alone.cost_per_million is None else f", {alone.cost_per_million:.3g} per 1M tokens"
    line = (
        f"a GPU-only engine on the {device} would reach {alone.tokens_per_s:,.0f} tokens/s at best, with batch "
        f"{alone.batch_size}{price}"
    )
    return [line + (": take one" if better else "")]


def command_lines(config: RunConfig, plan: Plan, model: str, threads: int) -> list[str]:
    """What to type under Slurm for the proposal."""
    best = plan.best
    program = ["fastdecode", "generate", "--model", model, "--max-batch-size", str(best.batch_size)]
    defaults = RunConfig()
    for name in ("kv_dtype", "wire_dtype", "num_slots", "max_prefill_tokens", "prefill_chunk_tokens"):
        if getattr(config, name) != getattr(defaults, name):
            program += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    if config.schedule == "load-stabilizing":
        program += ["--schedule", config.schedule, "--start-interval", str(plan.start_interval)]
    program += ["--input", "prompts.jsonl", "--output", "completions.jsonl", "--report", "report.h5"]
    cpus = f" --cpus-per-task={threads}" if threads else ""
    return [
        f"srun --mpi=pmi2 --ntasks={best.num_workers + 1}{cpus} --kill-on-bad-exit=1 \\",
        f"  {shlex.join(program)}",
    ]


def plan_as_dict(planner: Planner, plan: Plan, model: str) -> dict[str, Any]:
    """The plan as JSON has it; times in seconds."""
    profile = planner.profile
    return {
        "profile": {"name": profile.name, "source": profile.source, "notes": list(profile.notes)},
        "model": model,
        "wish": _wish(planner.wish),
        **dataclasses.asdict(plan),
        "command": "\n".join(command_lines(planner.config, plan, model, profile.r_part(0).threads)),
    }


def _wish(wish: Wish) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(wish).items() if value is not None}
