"""On which cores the kernels' threads shall run. Pure; the binding itself is in the native module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Cores = tuple[int, ...]
# With OMP_DYNAMIC the runtime ends threads and starts them anew, and new ones would all get the main thread's core.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_DYNAMIC")


def binding_asked(env: Mapping[str, str]) -> str:
    """What the user has told OpenMP that bears on binding, as ``NAME=value``; empty if nothing is set."""
    return " ".join(f"{name}={env[name]}" for name in BINDING_VARIABLES if env.get(name))


def pin_plan(
    threads: int, own_cores: Cores, siblings: Sequence[Cores], *, wanted: bool | None = None, binding: str = ""
) -> Cores:
    """The core of each thread, or nothing to leave the threads to the kernel.

    Parameters
    ----------
    threads : int
        Threads of the rank.
    own_cores : tuple of int
        Cores that no other rank may use, ascending.
    siblings : sequence of tuple of int
        The rank's cores, grouped by physical core.
    wanted : bool, optional
        What the user said; None decides alone.
    binding : str
        OpenMP's own settings (`binding_asked`), which stand unless `wanted`.

    Returns
    -------
    tuple of int
        [threads], all different; or empty.

    Notes
    -----
    Each physical core gets one thread before any gets two. Where there are more cores than threads, the threads
    are spread evenly: neighbouring cores share caches and paths to memory.
    """
    if wanted is False or (wanted is None and binding) or threads > len(own_cores):
        return ()
    first, others = _by_physical_core(own_cores, siblings)
    if threads <= len(first):
        return _spread(first, threads)
    return first + _spread(others, threads - len(first))


def num_usable_cores(thread_cores: Sequence[Cores]) -> int:
    """Upper bound of the threads that can run at once, given the cores that each may run on.

    Threads bound to the same single core count once.
    """
    bound = [cores for cores in thread_cores if len(cores) == 1]
    everywhere = {core for cores in thread_cores for core in cores}
    return min(len(everywhere), len(thread_cores) - len(bound) + len(set(bound)))


def is_pinned(thread_cores: Sequence[Cores]) -> bool:
    """Whether every thread has one core, and no other thread has it."""
    bound = {cores for cores in thread_cores if len(cores) == 1}
    return 0 < len(thread_cores) == len(bound)


def _by_physical_core(own_cores: Cores, siblings: Sequence[Cores]) -> tuple[Cores, Cores]:
    """One core of each physical core, and the others; both ascend."""
    own = set(own_cores)
    groups = [mine for group in siblings if (mine := [core for core in group if core in own])]
    unknown = own.difference(*groups)
    first = sorted([group[0] for group in groups] + list(unknown))
    return tuple(first), tuple(sorted(own.difference(first)))


def _spread(cores: Cores, count: int) -> Cores:
    return tuple(cores[index * len(cores) // count] for index in range(count))
