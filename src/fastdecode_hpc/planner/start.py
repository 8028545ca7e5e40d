"""What a run expects of its R-workers before it has measured them: what ``--profile`` says."""

from __future__ import annotations

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.costs import Costs
from fastdecode_hpc.planner.profile import load_profile
from fastdecode_hpc.schedule.worker_costs import WorkerCost


def start_costs(config: RunConfig, model: ModelConfig, owners: tuple[int, ...]) -> dict[int, WorkerCost]:
    """Costs of the R-workers, by rank; the profile has them in the same order.

    Raises
    ------
    ConfigError
        If the profile can't be read, is of another number of R-workers, or has no rates for the cache's type.
    """
    assert config.profile is not None
    profile = load_profile(config.profile)
    if len(profile.r_parts) != len(owners):
        raise ConfigError(
            f"profile {profile.name} is of {len(profile.r_parts)} R-workers, and this job has {len(owners)}; calibrate "
            "with as many ranks, on the same nodes, or leave --profile out"
        )
    costs = Costs(profile, model, config, num_workers=len(owners)).worker_costs()
    return dict(zip(owners, costs, strict=True))
