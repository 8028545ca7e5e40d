"""When the parts of a pipeline begin and end, given what their stages and messages take. Times in seconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.planner.profile import OWN_CORES, WITH_RANK_0, Profile, RPartProfile

Floats = npt.NDArray[np.float64]


class _Pipe:
    """What carries messages one after the other at a rate; infinite: never in the way."""

    def __init__(self, bytes_per_s: float) -> None:
        self.seconds_a_byte = 1.0 / bytes_per_s
        self.free = 0.0

    def send(self, start: float, num_bytes: float) -> float:
        """When a message that is there at `start` has passed."""
        self.free = max(self.free, start) + num_bytes * self.seconds_a_byte
        return self.free

    def send_each(self, starts: Floats, num_bytes: Floats) -> float:
        """When messages that are there at `starts`, increasing, have all passed."""
        each = num_bytes * self.seconds_a_byte
        rest = np.cumsum(each[::-1])[::-1]  # of this message and all behind it
        self.free = max(self.free + float(rest[0]), float((starts + rest).max()))
        return self.free


class PipelineClock:
    """One S-worker, its R-workers, the links between them.

    Parameters
    ----------
    profile : Profile
    num_workers, num_slots : int
    jitter : float
        Spread of what a message takes: the sigma of a log-normal factor.
    seed : int

    Notes
    -----
    Whoever walks the pipeline calls `wait`, `work` and `post` in its order. A part begins a stage when it is free and
    what it needs has arrived. All messages of a scatter share rank 0's adapter, those of a gather pass it in the order
    in which they are sent. R-workers that share cores take turns, also with the S-worker.
    """

    def __init__(
        self, profile: Profile, *, num_workers: int, num_slots: int, jitter: float = 0.0, seed: int = 0
    ) -> None:
        parts = [profile.r_part(worker) for worker in range(num_workers)]
        self.num_workers = num_workers
        self.is_blocking = profile.network.is_blocking
        self.s_free = 0.0
        self.r_free = np.zeros(num_workers)
        self.t_wait = 0.0
        self._back = [0.0] * num_slots
        self._latency = np.array([part.latency_s for part in parts])
        self._link_s = 1.0 / np.array([part.link_bytes_per_s for part in parts])  # seconds a byte
        self._link_free = np.zeros(num_workers)
        self._out, self._in = (_Pipe(profile.network.s_bytes_per_s) for _ in range(2))
        self._switch = _Pipe(profile.network.switch_bytes_per_s)
        self._shared_s = max(self._out.seconds_a_byte, self._switch.seconds_a_byte)  # a byte
        self._turns = _core_groups(parts)
        self._jitter, self._random = jitter, np.random.default_rng(seed)
        self._ones = np.ones(num_workers)
        self._returning: list[tuple[float, float, float, int]] = []  # sent at, bytes, at least there at, slot
        self._held: dict[int, Floats] = {}  # slot |-> output that waits at the R-workers, where messages block

    def wait(self, slot: int) -> None:
        """The S-worker goes on when the slot's output is there."""
        self._pass_returned(-np.inf, slot)
        if slot in self._held:
            self._exchange(self._block(self._held.pop(slot)))
            self._back[slot] = self.s_free
        self.t_wait += max(0.0, self._back[slot] - self.s_free)
        self.s_free = max(self.s_free, self._back[slot])

    def work(self, seconds: float) -> None:
        """The S-worker is busy."""
        self.s_free += seconds

    def store(self, worker: int, num_bytes: float, seconds: float) -> float:
        """K and V of prompts leave now for an R-worker, which puts them away in `seconds`; when they are there."""
        own = float(self._latency[worker]) + num_bytes * float(self._link_s[worker])
        if self.is_blocking:  # the sender is busy; a receiver that attends takes them up afterwards
            self.s_free += max(own, num_bytes * self._shared_s)
            self.r_free[worker] = max(float(self.r_free[worker]), self.s_free) + seconds
            return self.s_free
        self._pass_returned(self.s_free)
        shared = max(pipe.send(self.s_free, num_bytes) for pipe in (self._out, self._switch))
        start = max(self.s_free, float(self._link_free[worker]))
        self._link_free[worker] = start + num_bytes * float(self._link_s[worker])
        arrived = max(start + own, shared + float(self._latency[worker]))
        self.r_free[worker] = max(float(self.r_free[worker]), arrived) + seconds
        return arrived

    def post(self, slot: int, qkv_bytes: Floats, r_part: Floats, out_bytes: Floats) -> Floats:
        """The S-worker sends q, k, v; R-workers attend and send their output.

        Parameters
        ----------
        qkv_bytes, r_part, out_bytes : float arrays
            ``[num_workers]``; a worker without bytes has no rows.

        Returns
        -------
        float array
            When q, k, v are at each R-worker.
        """
        arrived = self._arrivals(qkv_bytes)
        active = qkv_bytes > 0
        ended = self._attend(arrived, r_part, active)
        self._back[slot] = self._returns(slot, ended, out_bytes, active)
        return arrived

    def _arrivals(self, qkv_bytes: Floats) -> Floats:
        if self.is_blocking:
            for slot, out_bytes in self._held.items():  # what has been attended is fetched at the same time
                self._exchange(self._block(out_bytes))
                self._back[slot] = self.s_free
            self._held.clear()
            self._exchange(self._block(qkv_bytes))
            return np.full(self.num_workers, self.s_free)
        total = float(qkv_bytes.sum())
        self._pass_returned(self.s_free)
        shared = max(pipe.send(self.s_free, total) for pipe in (self._out, self._switch))
        start = np.maximum(self._link_free, self.s_free)
        own = (self._latency + qkv_bytes * self._link_s) * self._factors()
        self._link_free = start + qkv_bytes * self._link_s
        return np.maximum(start + own, shared + self._latency)

    def _attend(self, arrived: Floats, r_part: Floats, active: npt.NDArray[np.bool_]) -> Floats:
        begun = np.maximum(arrived, self.r_free)
        for group, workers in self._turns.items():
            self._take_turns(group == WITH_RANK_0, workers, begun, r_part, active)
        ended = begun + r_part
        self.r_free = np.where(active, np.maximum(self.r_free, ended), self.r_free)
        return ended

    def _take_turns(
        self, with_s: bool, workers: list[int], begun: Floats, r_part: Floats, active: npt.NDArray[np.bool_]
    ) -> None:
        free = max([float(self.r_free[worker]) for worker in workers] + ([self.s_free] if with_s else []))
        for worker in workers:
            if active[worker]:
                begun[worker] = max(free, float(begun[worker]))
                free = float(begun[worker] + r_part[worker])
        if with_s:
            self.s_free = max(self.s_free, free)

    def _returns(self, slot: int, ended: Floats, out_bytes: Floats, active: npt.NDArray[np.bool_]) -> float:
        """When all output is at the S-worker; 0 where that is not known before it is waited for."""
        if not active.any():
            return self.s_free
        if self.is_blocking:
            self._held[slot] = out_bytes
            return 0.0
        own = ended + (self._latency + out_bytes * self._link_s) * self._factors()
        order = np.argsort(np.where(active, ended, -np.inf))[-int(active.sum()) :]
        if self._switch.seconds_a_byte:  # later messages of the S-worker may pass before some of these
            self._returning.extend((float(ended[w]), float(out_bytes[w]), float(own[w]), slot) for w in order)
            return 0.0
        shared = self._in.send_each(ended[order], out_bytes[order]) + float(self._latency[order[-1]])
        return max(float(own[order].max()), shared)

    def _pass_returned(self, until: float, slot: int | None = None) -> None:
        """Let output pass the switch that is sent before `until`, or that all of `slot` has to wait for."""
        self._returning.sort()
        while self._returning and (
            self._returning[0][0] <= until or any(message[-1] == slot for message in self._returning)
        ):
            ended, num_bytes, own, of_slot = self._returning.pop(0)
            shared = max(pipe.send(ended, num_bytes) for pipe in (self._in, self._switch))
            self._back[of_slot] = max(self._back[of_slot], own, shared)

    def _exchange(self, seconds: float) -> None:
        """Both ends wait for each other and are busy with messages."""
        start = max(self.s_free, float(self.r_free.max()))
        self.t_wait += start - self.s_free
        self.s_free = start + seconds
        self.r_free[:] = self.s_free

    def _block(self, num_bytes: Floats) -> float:
        """What messages take that keep both ends busy."""
        own = (self._latency + num_bytes * self._link_s) * self._factors()
        return max(float(own.max()), float(num_bytes.sum()) * self._shared_s)

    def _factors(self) -> Floats:
        if not self._jitter:
            return self._ones
        return self._random.lognormal(0.0, self._jitter, self.num_workers)


def _core_groups(parts: list[RPartProfile]) -> dict[int, list[int]]:
    """The workers of each core group that more than one rank is in."""
    groups: dict[int, list[int]] = {}
    for worker, part in enumerate(parts):
        groups.setdefault(part.core_group, []).append(worker)
    groups.pop(OWN_CORES, None)
    return {group: workers for group, workers in groups.items() if group == WITH_RANK_0 or len(workers) > 1}
