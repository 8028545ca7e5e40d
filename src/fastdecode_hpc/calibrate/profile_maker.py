"""A profile from what was measured, and how far it is off at the measured points. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode_hpc.bench.rank_speeds import fit_link
from fastdecode_hpc.calibrate.fit import NO_BYTES_RATE, fit_curve, fit_prompts, fit_rates, fit_worker_curve
from fastdecode_hpc.calibrate.measure import Measured
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.profile import (
    MEASURED,
    OWN_CORES,
    WITH_RANK_0,
    NetworkProfile,
    Profile,
    RPartProfile,
    SPartProfile,
)
from fastdecode_hpc.planner.steady import steady_step
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.schedule.row_tiles import TileSizes
from fastdecode_hpc.setup import KV_SHARE, Setup


def make_profile(
    name: str,
    run: RunConfig,
    setup: Setup,
    measured: Measured,
    *,
    device: tuple[str, int],
    row_tiles: tuple[TileSizes, TileSizes],
    machine: Mapping[str, Any],
) -> Profile:
    """Fit everything.

    Parameters
    ----------
    device : (str, int)
        What the S-Part runs on, and the bytes of its own memory, 0 for none.
    row_tiles : (TileSizes, TileSizes)
        Row counts that layers run in, and logits.
    """
    model, samples = setup.model, measured.decode
    layer_tiles, head_tiles = row_tiles
    head = fit_curve(samples, "head_s", head_tiles)
    chunk_s, piece_s, token_s, pair_s = fit_prompts(
        measured.prompts,
        lambda rows: head(head_tiles.padded(rows)),
        num_layers=model.num_layers,
        chunk_tokens=run.prefill_chunk_tokens,
    )
    kv_dtypes = dict.fromkeys(point.kv_dtype for point in samples)
    layouts = {t: make_layout(model, block_size=run.block_size, kv_dtype=t) for t in kv_dtypes}
    parts = []
    for worker, owner in enumerate(setup.owners):
        rank = setup.ranks[owner]
        latency, rate = fit_link(measured.links[owner]) if owner in measured.links else (0.0, float("inf"))
        parts.append(
            RPartProfile(
                name=rank.host,
                rates=fit_rates(samples, worker, layouts),
                turn=fit_worker_curve(samples, worker, "turn_s"),
                stage=fit_worker_curve(samples, worker, "stage_s"),
                latency_s=latency,
                link_bytes_per_s=rate,
                memory_bytes=0.0 if run.kv_memory_bytes else rank.kv_bytes / KV_SHARE,
                read_bandwidth=measured.read_bandwidth.get(owner, 0.0),
                threads=rank.threads,
                core_group=OWN_CORES if measured.links else WITH_RANK_0,
            )
        )
    profile = Profile(
        name=name,
        source=MEASURED,
        model=model,
        s_part=SPartProfile(
            name=device[0],
            kind=run.s_part,
            weight_dtype=run.weight_dtype,
            memory_bytes=device[1],
            layer=fit_curve(samples, "layer_s", layer_tiles),
            head=head,
            layer_tiles=layer_tiles.sizes,
            head_tiles=head_tiles.sizes,
            turn=fit_curve(samples, "turn_s"),
            stage=fit_curve(samples, "stage_s"),
            chunk_s=chunk_s,
            chunk_piece_s=piece_s,
            chunk_token_s=token_s,
            chunk_pair_s=pair_s,
        ),
        r_parts=tuple(parts),
        network=NetworkProfile(s_bytes_per_s=max(part.link_bytes_per_s for part in parts)),
        notes=doubts(parts),
        machine=machine,
    )
    return _with_residuals(profile, run, measured)


def doubts(parts: Sequence[RPartProfile]) -> tuple[str, ...]:
    """What the fit could not tell."""
    return tuple(
        f"R-worker {worker}, {kv_dtype}: attention took no longer for more KV, so that its rate is unknown; calibrate "
        "with longer --contexts"
        for worker, part in enumerate(parts)
        for kv_dtype, rates in part.rates.items()
        if rates.bytes_per_s >= NO_BYTES_RATE
    )


def _with_residuals(profile: Profile, run: RunConfig, measured: Measured) -> Profile:
    steps = []
    for point, sample in measured.decode.items():
        predicted = predict_step(profile, profile.model, run, point.kv_dtype, point.batch, sample.context)
        steps.append(
            {"point": str(point), "measured_s": sample.step_s, "predicted_s": predicted,
             "relative_error": predicted / sample.step_s - 1, "spread": measured.spreads.get(point, 0.0)}
        )  # fmt: skip
    return dataclasses.replace(profile, residuals={"steps": steps})


def predict_step(
    profile: Profile, model: ModelConfig, run: RunConfig, kv_dtype: str, batch: int, context: float
) -> float:
    """Seconds of a step of a settled batch."""
    config = dataclasses.replace(run, kv_dtype=kv_dtype)
    return steady_step(
        profile, model, config, num_workers=len(profile.r_parts), batch_size=batch, context_len=context
    ).step_s
