"""Keeps clocks of hosts aligned during a run: rank 0 asks for them now and then, beside the pipeline's messages.

Nobody waits for an answer. It says when the question came and when the answer left, on the clock of the rank that gives
it: how long that rank was busy in between does not matter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.transport.clocks import Clocks
from fastdecode_hpc.transport.mpi import MPI, S_RANK
from fastdecode_hpc.transport.mpi_progress import Pending, Progress

ASK_S = 1.0  # between two questions to a rank
ASK, END = 1, 0  # words of rank 0
WORD_TAG, ANSWER_TAG = 1, 2


@dataclass(slots=True)
class _Question:
    t_sent: float
    answer: npt.NDArray[np.float64]  # when the question came, when the answer left
    coming: Pending


class ClockAsker:
    """Rank 0's side.

    Parameters
    ----------
    comm : Intracomm
        On which no other messages are sent from one rank to another.
    progress : Progress
    clocks : Clocks
        Changed as answers come. Ranks with rank 0's own clock are not asked.
    """

    def __init__(self, comm: MPI.Intracomm, progress: Progress, clocks: Clocks) -> None:
        self._comm, self._progress, self._clocks = comm, progress, clocks
        self._others = range(1, comm.size)
        self._asked: dict[int, _Question] = {}
        self._due_s = 0.0

    def poke(self) -> None:
        """Take the answers that have come, and ask when it is time."""
        for rank in [rank for rank, question in self._asked.items() if question.coming.t_done is not None]:
            self._take(rank, self._asked.pop(rank))
        now = time.perf_counter()
        if now >= self._due_s:
            self._due_s = now + ASK_S
            for rank in self._others:
                if rank not in self._asked and self._clocks.drifts(rank):
                    self._ask(rank)

    def close(self) -> None:
        """Take what is still to come, and say that this was all."""
        for rank, question in self._asked.items():
            self._progress.wait(question.coming, f"the clock of rank {rank}")
            self._take(rank, question)
        self._asked.clear()
        for pending in [self._send(rank, END) for rank in self._others]:
            self._progress.wait(pending, "the last questions to leave")

    def _ask(self, rank: int) -> None:
        answer = np.empty(2)
        coming = self._progress.post(lambda: self._comm.Irecv(answer, source=rank, tag=ANSWER_TAG), answer)
        self._asked[rank] = _Question(time.perf_counter(), answer, coming)
        self._send(rank, ASK)

    def _send(self, rank: int, word: int) -> Pending:
        message = np.array([word], np.int64)
        return self._progress.post(lambda: self._comm.Isend(message, dest=rank, tag=WORD_TAG), message)

    def _take(self, rank: int, question: _Question) -> None:
        assert question.coming.t_done is not None
        came, left = question.answer.tolist()
        self._clocks.answered(rank, question.t_sent, came, left, question.coming.t_done)


class ClockAnswerer:
    """The side of every other rank.

    Parameters
    ----------
    comm : Intracomm
    progress : Progress
    """

    def __init__(self, comm: MPI.Intracomm, progress: Progress) -> None:
        self._comm, self._progress = comm, progress
        self._word = np.empty(1, np.int64)
        self._question = self._listen()
        self.has_ended = False

    def poke(self) -> None:
        """Answer a question that has come."""
        came = self._question.t_done
        if came is None or self.has_ended:
            return
        if self._word[0] == END:
            self.has_ended = True
            return
        answer = np.array([came, time.perf_counter()])
        self._progress.post(lambda: self._comm.Isend(answer, dest=S_RANK, tag=ANSWER_TAG), answer)
        self._question = self._listen()

    def _listen(self) -> Pending:
        return self._progress.post(lambda: self._comm.Irecv(self._word, source=S_RANK, tag=WORD_TAG), self._word)
