"""Puts what a profile predicts beside what a run's report has measured."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.files import check_writable, partial_name, put_in_place
from fastdecode_hpc.planner.profile import Profile, model_of
from fastdecode_hpc.planner.replay import StepLoad, replay
from fastdecode_hpc.report.reader import Report, open_report
from fastdecode_hpc.report.schema import PREDICTED_UNITS, RUNNING
from fastdecode_hpc.timing import StepTimes
from fastdecode_hpc.typed_values import TypedValues

Floats = npt.NDArray[np.float64]
_LOADS = ("step", "slot", "num_rows", "prefill_tokens")


def predict(path: Path, profile: Profile, out: Path | None = None) -> None:
    """Add the predicted columns to a report, or to a copy of it; earlier predictions are replaced.

    Raises
    ------
    ConfigError
        If the report is not that of an ended run, or the profile knows nothing about its cache.
    """
    with open_report(path) as report:
        if report.state == RUNNING:
            raise ConfigError(f"{report.path} is not complete: predictions are for runs that have ended")
        columns = predicted_columns(report, profile)
    write_predictions(path, columns, f"{profile.name} ({profile.source})", out)


def write_predictions(path: Path, columns: Mapping[str, Floats], by: str, out: Path | None = None) -> None:
    """Add columns to ``/steps`` of a complete report, or of a copy of it, in one step.

    Parameters
    ----------
    by : str
        Who predicts; a root attribute.
    """
    out = path if out is None else out
    check_writable(out)
    partial = partial_name(out)
    try:
        shutil.copyfile(path, partial)
        with h5py.File(partial, "r+") as file:
            _write(file, columns, by)
        put_in_place(partial, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def predicted_columns(report: Report, profile: Profile) -> dict[str, Floats]:
    """`PREDICTED_UNITS` for every row of ``/steps``."""
    told = TypedValues(report.path, report.attributes)
    model, config = model_of(told.inner("model_config")), _config(told.inner("config"))
    profile.check_s_part({name: getattr(config, name) for name in profile.s_part_options})
    steps = replay(profile, model, config, _loads(report))
    return {
        "predicted_t_s_part": np.array([step.t_s_part for step in steps]),
        "predicted_t_r_part": np.array([step.t_r_part for step in steps]),
        "predicted_t_step": _whole_steps(steps),
    }


def _loads(report: Report) -> list[StepLoad]:
    columns = report.columns("steps", _LOADS)
    by_rank = {rank: report.columns(f"ranks/{rank}", ["load_tokens"])["load_tokens"] for rank in report.ranks}
    if any(len(loads) != len(columns["step"]) for loads in by_rank.values()) or not by_rank:
        raise ConfigError(f"{report.path} does not have the load of every R-worker in every step")
    values = {name: columns[name].tolist() for name in _LOADS}
    return [
        StepLoad(
            **{name: values[name][place] for name in _LOADS},
            rank_loads={rank: int(loads[place]) for rank, loads in by_rank.items()},
        )
        for place in range(len(columns["step"]))
    ]


def _whole_steps(steps: list[StepTimes]) -> Floats:
    """From the start of each step to the next one's, the same for all slots; the last one ends with its last slot."""
    starts: dict[int, float] = {}
    for step in steps:
        starts.setdefault(step.step, step.t_start)
    numbers = list(starts)
    edges = [*starts.values(), max((step.t_end for step in steps), default=0.0)]
    lasts = {number: edges[place + 1] - edges[place] for place, number in enumerate(numbers)}
    return np.array([lasts[step.step] for step in steps])


def _config(values: TypedValues) -> RunConfig:
    names = {spec.name for spec in dataclasses.fields(RunConfig)}
    return RunConfig(**{name: value for name, value in values.items() if name in names})


def _write(file: h5py.File, columns: Mapping[str, Floats], by: str) -> None:
    for name, values in columns.items():
        place = f"steps/{name}"
        if place in file:
            del file[place]
        data = file.create_dataset(place, data=values, compression="gzip", chunks=True, maxshape=(None,))
        data.attrs["units"] = PREDICTED_UNITS[name]
    file.attrs["predicted_by"] = by
