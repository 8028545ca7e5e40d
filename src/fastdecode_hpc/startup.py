"""How the ranks of a job agree before the first plan.

Every rank tells what it has; rank 0 decides for all (`setup.decide_setup`); a mistake that anybody finds ends
all ranks in order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fastdecode_hpc import __version__, host
from fastdecode_hpc.advice import ThreadCores, lowered_isa, placement_advice, placement_faults, unlike_ranks
from fastdecode_hpc.affinity import binding_asked, is_pinned
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.launch import Launch, batch_scheduler, check_world
from fastdecode_hpc.setup import Hello, Setup

if TYPE_CHECKING:
    from fastdecode_hpc.transport.mpi import World

logger = logging.getLogger(__name__)


class Dismissed(Exception):
    """Rank 0 has ended the run in order; this rank has nothing more to do.

    Parameters
    ----------
    code : int
        The exit code; of rank 0, where its preflight has found that there is nothing to run.
    """

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


def agree(
    run: RunConfig,
    world: World | None,
    launched: Launch,
    *,
    isas: Callable[[], tuple[str, ...]],
    decide: Callable[[list[Hello]], Setup],
) -> Setup:
    """Exchange hellos and take rank 0's decision.

    Parameters
    ----------
    isas : callable
        Instruction sets that this rank's kernels may use.
    decide : callable
        Run on rank 0 only.

    Raises
    ------
    ConfigError
        On rank 0, for whatever any rank found wrong.
    Dismissed
        On the others in that case; on all where `decide` raised it.
    """
    hello = say_hello(run.threads, world, launched, isas)
    if world is None:
        return _decide(run, decide, [hello])
    hellos = world.gather(hello, "greeting")
    answer: Setup | ConfigError | Dismissed | None = None
    if hellos is not None:
        try:
            check_world([entry.launch for entry in hellos], world.size, hello.library)
            check_alike(hellos)
            answer = _decide(run, decide, hellos)
        except (ConfigError, Dismissed) as error:
            answer = error
    return _take(world, world.bcast(answer))


def _take(world: World, answer: Setup | ConfigError | Dismissed) -> Setup:
    if not isinstance(answer, Setup):
        raise answer if world.is_s_rank else Dismissed()
    return answer


def _decide(run: RunConfig, decide: Callable[[list[Hello]], Setup], hellos: list[Hello]) -> Setup:
    setup = decide([_checked(hello) for hello in hellos])
    accept_places(run, setup)
    if run.isa is None:
        for advice in lowered_isa(setup.ranks, hellos):
            logger.warning("%s", advice)
    return setup


def accept_places(run: RunConfig, setup: Setup) -> None:
    """Raise where ranks of a batch job are placed so badly that it would waste what was booked; warn elsewhere.

    Raises
    ------
    ConfigError
        With each rank's place and the launcher's flags.
    """
    faults = [] if run.allow_oversubscribe else placement_faults(setup.ranks, wants_gpu=run.device != "cpu")
    if faults and (scheduler := batch_scheduler()):
        head = f"the ranks of this {scheduler} job are placed badly:"
        lines = [*(rank.where for rank in setup.ranks), *map(str, faults)]
        raise ConfigError("\n".join([head, *lines, "To run it all the same: --allow-oversubscribe"]))
    for fault in faults:
        logger.warning("%s", fault)


def tell_placement(world: World | None, setup: Setup, mine: ThreadCores | ConfigError) -> Setup:
    """Print every rank's line, and what is wrong with its place, at rank 0; collective.

    Parameters
    ----------
    mine : tuple of tuple of int, or ConfigError
        The cores that each of this rank's kernels' threads may run on; empty where no kernels run. Or why it can hold
        no KV.

    Returns
    -------
    Setup
        With what the ranks found; at rank 0 only.

    Raises
    ------
    ConfigError
        On rank 0, if any rank gave one.
    """
    found = [mine] if world is None else world.gather(mine, "KV cache and thread placement")
    if found is None:
        return setup
    everyone = [_checked_cores(entry) for entry in found]
    ranks = tuple(
        replace(rank, pinned=len(cores) == rank.threads and is_pinned(cores))
        for rank, cores in zip(setup.ranks, everyone, strict=True)
    )
    for rank in ranks:
        logger.info("%s", rank.line)
    for advice in placement_advice(ranks, everyone):
        logger.warning("%s", advice)
    return replace(setup, ranks=ranks)


def _checked_cores(entry: ThreadCores | ConfigError) -> ThreadCores:
    if isinstance(entry, ConfigError):
        raise entry
    return entry


def _library(world: World | None) -> str:
    if world is None:
        return ""
    from fastdecode_hpc.transport.mpi import library_version

    return library_version()


def say_hello(
    threads_flag: int | None, world: World | None, launched: Launch, isas: Callable[[], tuple[str, ...]]
) -> Hello:
    """What this rank has; what is wrong with it is in the answer."""
    rank = world.rank if world is not None else 0
    info, threads = host.look(), None
    found: tuple[str, ...] = ()
    error = isa_error = None
    try:
        threads = host.asked_threads(threads_flag, info)
    except ConfigError as problem:
        error = f"rank {rank} on {info.host}: {problem}"
    try:
        found = isas()
    except ConfigError as problem:  # a mistake only where kernels will attend
        isa_error = f"rank {rank} on {info.host}: {problem}"
    return Hello(
        rank, info, launched, threads, found, __version__, error, isa_error, binding_asked(os.environ), _library(world)
    )  # fmt: skip


def check_alike(hellos: list[Hello]) -> None:
    """Raise unless all ranks have one version of the program, and one MPI library.

    Raises
    ------
    ConfigError
        Naming the ranks that have another than rank 0.
    """
    for advice in unlike_ranks(hellos):
        raise ConfigError(str(advice))


def _checked(hello: Hello) -> Hello:
    if hello.error is not None:
        raise ConfigError(hello.error)
    return hello
