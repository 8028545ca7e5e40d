"""Signs of life between ranks, over a stand-in for MPI: whom a wait was for, and that nobody is ended who is alive."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

import pytest

from fastdecode_hpc.transport import control
from fastdecode_hpc.transport.control import RootControl, WatchdogError, WorkerControl

WATCHDOG_S = 100.0
pytestmark = pytest.mark.timeout(60)


class Sent:
    def Test(self) -> bool:
        return True


class Comm:
    """One rank's view of what all have sent to each other, with the three calls of MPI."""

    def __init__(self, boxes: dict[tuple[int, int, int], deque], rank: int) -> None:
        self.boxes, self.rank = boxes, rank

    def Isend(self, buf, dest: int, tag: int) -> Sent:
        self.boxes[self.rank, dest, tag].append(buf.copy())
        return Sent()

    def Iprobe(self, source: int, tag: int) -> bool:
        return bool(self.boxes[source, self.rank, tag])

    def Recv(self, buf, source: int, tag: int) -> None:
        buf[:] = self.boxes[source, self.rank, tag].popleft()


class Ranks:
    """A rank 0 and two others on one clock, which a wait moves on by half a second each time it looks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.boxes: dict[tuple[int, int, int], deque] = defaultdict(deque)  # from, to, tag
        options = {"watchdog_s": WATCHDOG_S, "lock": threading.RLock(), "clock": lambda: self.now, "has_beats": False}
        self.root = RootControl(Comm(self.boxes, 0), size=3, **options)
        options["has_beats"] = True
        self.worker = WorkerControl(Comm(self.boxes, 1), **options)
        self.blind_worker = WorkerControl(Comm(self.boxes, 2), **options | {"has_beats": False})

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds

    def until(self, end_s: float, do: Callable[[], object] = lambda: None) -> Callable[[], bool]:
        """What a wait is to ask: it is over at `end_s`; before, something happens each time."""

        def done() -> bool:
            self.tick()
            do()
            return self.now >= end_s

        return done


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_a_worker_waits_as_long_as_rank_0_lives(ranks: Ranks) -> None:
    ranks.worker.wait(ranks.until(9 * WATCHDOG_S, ranks.root.beat), "weights")


def test_a_worker_gives_a_rank_0_up_that_says_nothing(ranks: Ranks) -> None:
    ranks.worker.describe = lambda: "step 3"
    with pytest.raises(WatchdogError, match=r"waited 100 s for a plan without a sign of life from rank 0.*step 3"):
        ranks.worker.wait(ranks.until(9 * WATCHDOG_S), "a plan")
    assert WATCHDOG_S <= ranks.now <= WATCHDOG_S + control.SPIN_POLLS


def test_where_there_are_no_beats_rank_0_may_be_away_as_long(ranks: Ranks) -> None:
    ranks.blind_worker.wait(ranks.until(9 * WATCHDOG_S), "weights")
    with pytest.raises(WatchdogError):
        ranks.blind_worker.wait(ranks.until(99 * WATCHDOG_S), "weights")


def test_a_rank_0_that_hangs_inside_mpi_gives_no_sign() -> None:
    lock, boxes = threading.RLock(), defaultdict(deque)
    root = RootControl(Comm(boxes, 0), WATCHDOG_S, lock, size=2, has_beats=False)
    thread = threading.Thread(target=root.beat)
    with lock:  # held by the main thread
        thread.start()
        thread.join(0.1)
        assert not boxes[0, 1, control.WORD_TAG]
    thread.join()
    assert boxes[0, 1, control.WORD_TAG]


def test_rank_0_tells_what_all_do_and_who_gives_no_answer(ranks: Ranks, monkeypatch) -> None:
    ranks.root.describe = lambda: "step 12; 3 decoding"
    ranks.worker.describe = lambda: "step 12, slot 1"
    waits = ranks.worker.patience()

    def sleep(seconds: float) -> None:  # while rank 0 waits for answers the first worker goes on with its own wait
        ranks.tick(seconds)
        ranks.worker.check(waits, "q, k, v of slot 1")

    monkeypatch.setattr(control.time, "sleep", sleep)
    with pytest.raises(WatchdogError) as caught:
        ranks.root.wait(ranks.until(9 * WATCHDOG_S), "output of slot 0 from ranks 1, 2")
    first, own, one, two, hint = str(caught.value).split("\n  ")
    assert first == "waited 100 s for output of slot 0 from ranks 1, 2"
    assert own == "rank 0: step 12; 3 decoding"
    assert one == "rank 1: waits for q, k, v of slot 1; step 12, slot 1"
    assert two.startswith("rank 2: gives no answer")
    assert "--watchdog-s" in hint


def stay_away(ranks: Ranks, seconds: float, do: Callable[[], None] = lambda: None) -> None:
    """Rank 0's main thread is elsewhere while its other thread sends beats."""
    for _ in range(round(seconds)):
        ranks.tick(1)
        do()
        ranks.root.beat()


def test_a_rank_0_that_stays_away_ends_with_its_stack(ranks: Ranks) -> None:
    limit = control.AWAY_LIMITS * WATCHDOG_S
    stay_away(ranks, limit - 1)
    with pytest.raises(WatchdogError, match=r"(?s)1000 s, 10 times --watchdog-s.*stay_away\(ranks, 2\)"):
        stay_away(ranks, 2)


def test_a_rank_0_that_gets_on_may_take_longer(ranks: Ranks) -> None:
    stay_away(ranks, 3 * control.AWAY_LIMITS * WATCHDOG_S, ranks.root.alive)  # loads weights


def test_a_job_that_was_suspended_goes_on(ranks: Ranks) -> None:
    stay_away(ranks, WATCHDOG_S)
    ranks.tick(1e6)
    ranks.root.beat()
    waits = ranks.blind_worker.patience()
    ranks.tick(1e6)
    ranks.blind_worker.check(waits, "a plan")


def test_beats_come_from_a_thread_that_ends(ranks: Ranks) -> None:
    boxes = defaultdict(deque)
    root = RootControl(Comm(boxes, 0), 0.04, threading.RLock(), size=2, has_beats=True)
    while not boxes[0, 1, control.WORD_TAG]:
        threading.Event().wait(0.001)
    root.stop()
    assert "signs-of-life" not in [thread.name for thread in threading.enumerate()]


def test_the_end_leaves_no_message_behind(ranks: Ranks) -> None:
    for _ in range(5):
        ranks.root.beat()  # nobody listens
    ranks.root.close()
    ranks.worker.close()
    ranks.blind_worker.close()
    assert not any(ranks.boxes.values())
