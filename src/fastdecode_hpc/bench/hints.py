"""What measured and read figures say about faults in the set-up of a node or a job. Pure."""

from __future__ import annotations

from fastdecode_hpc.bench.machine import Machine
from fastdecode_hpc.host import format_bytes, format_cores

HUGE_SHARE = 0.5  # of the memory in huge pages; less is a fault
SAME_SPEED = 0.9  # one thread that reads this part of what all read together
MIN_BYTES = 64 << 20
BUSY_SHARE = 0.25  # of the cores, at work for others before the measurement


def find_hints(
    machine: Machine, *, num_threads: int, memory_bytes: int, huge_bytes: int, one_thread: float | None
) -> list[str]:
    """A sentence for each fault that shows.

    Parameters
    ----------
    memory_bytes, huge_bytes : int
        This process's own memory while it measured, and what of it was in huge pages.
    one_thread : float, optional
        Bytes/s of one thread over those of all.
    """
    hints = []
    is_busy = machine.load_average > BUSY_SHARE * len(machine.cores)
    if is_busy:
        hints.append(
            f"busy: the load average was {machine.load_average} before anything was measured, and this process may use "
            f"{len(machine.cores)} cores; on a busy node all figures are too low and spread"
        )
    if memory_bytes >= MIN_BYTES and huge_bytes < HUGE_SHARE * memory_bytes:
        mode = f" ([{machine.huge_page_mode}] in /sys/kernel/mm/transparent_hugepage/enabled)"
        hints.append(
            f"huge pages: {format_bytes(huge_bytes)} of {format_bytes(memory_bytes)} are in huge pages"
            f"{mode if machine.huge_page_mode else ''}; set it to madvise or always"
        )
    num_cores = len(machine.cores)
    if num_threads > num_cores:
        hints.append(
            f"threads: {num_threads} threads on {num_cores} cores (mask {format_cores(machine.cores)}) take turns; "
            f"use --threads {num_cores}, or a wider mask (srun --cpus-per-task, mpirun --bind-to none)"
        )
    elif num_threads > machine.num_physical_cores:
        hints.append(
            f"threads: {num_threads} threads on {machine.num_physical_cores} physical cores; "
            f"--threads {machine.num_physical_cores} (one a physical core) is often as fast"
        )
    if one_thread is not None and one_thread >= SAME_SPEED and not is_busy:  # others' threads may be the cause
        hints.append(
            f"bandwidth: one thread reads {one_thread:.0%} of what {num_threads} threads read; either they are bound "
            "to one core (OMP_PROC_BIND, OMP_PLACES, the launcher's binding), or this machine gives no more to several"
        )
    if len(machine.numa_nodes) > 1:
        hints.append(
            f"NUMA: the mask spans nodes {format_cores(machine.numa_nodes)}; start one R-worker a node, bound to it "
            "(srun --cpu-bind=ldoms, mpirun --map-by numa --bind-to numa)"
        )
    return hints
