"""One run on rank 0: requests in, completions out, around an `SWorker`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.intake import Accepted, Intake, RequestFailure
from fastdecode_hpc.results import Completion, Hooks, RunStats
from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.device import Device, make_device
from fastdecode_hpc.s_part.prefill import GivenKV, Prefill
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.s_part.worker import SWorker
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.schedule.prompts import GivenPrompts, PromptQueue
from fastdecode_hpc.schedule.scheduler import make_scheduler
from fastdecode_hpc.schedule.shares import EQUAL, Shares
from fastdecode_hpc.schedule.worker_costs import WorkerCost
from fastdecode_hpc.sequence import Choice, Request, Sequence
from fastdecode_hpc.setup import Setup
from fastdecode_hpc.timing import StepTimes
from fastdecode_hpc.tokenizer import TextStream, Tokenizer
from fastdecode_hpc.transport.base import SEnd

logger = logging.getLogger(__name__)

TELL_STEPS = 64  # between two looks at whether there is something to be told of the shares


class Run:
    """Feeds an `SWorker` with the sequences of requests, and turns what ends into completions.

    Parameters
    ----------
    setup : Setup
    config : RunConfig
    s_part : BaseSPart
    tokenizer : Tokenizer or None
        None takes prompts of token ids only, and gives no text.
    hooks : Hooks
    stop_requested : callable
        Whether this process has been asked to end early.
    given_kv : bool
        Compute no prompts (`GivenKV`).
    start_costs : mapping of int to WorkerCost, optional
        What R-workers are expected to take, until that has been measured.
    """

    def __init__(
        self,
        setup: Setup,
        config: RunConfig,
        s_part: BaseSPart,
        tokenizer: Tokenizer | None,
        hooks: Hooks,
        stop_requested: Callable[[], bool],
        *,
        given_kv: bool = False,
        start_costs: Mapping[int, WorkerCost] | None = None,
    ) -> None:
        self.given_kv, self._start_costs = given_kv, start_costs
        self.setup, self.config, self.s_part = setup, config, s_part
        self.tokenizer, self.hooks, self.stop_requested = tokenizer, hooks, stop_requested
        self.stats = RunStats()
        self._told_shares = EQUAL  # where the shares that were told came from
        self._accepted: dict[int, Accepted] = {}  # by seq_id, until the sequence has ended
        self._streams: dict[int, TextStream] = {}  # by seq_id, where there are stop strings
        self._placement = Placement(
            setup.layout,
            {rank: setup.ranks[rank].num_blocks for rank in setup.owners},
        )
        self._intake = Intake(
            tokenizer,
            self._placement,
            vocab_size=setup.model.vocab_size,
            max_context_len=setup.max_context_len,
            seed=config.seed,
            overlong=config.overlong,
            merge_system=config.merge_system,
        )

    def run(self, requests: Iterator[Request], transport: SEnd) -> RunStats:
        """Run all requests, over a transport that is closed at the end."""
        started = time.perf_counter()
        self._shares = self._make_shares(transport.latencies)
        self._placement.costs = self._shares.costs
        graphs = self.config.cuda_graphs if self.s_part.can_be_recorded else "off"
        device = make_device(self.s_part.device, cuda_graphs=graphs)
        cast = WireCast(self.config.wire_dtype, self.s_part.device)
        worker = self._make_worker(requests, device, transport, cast)
        worker.run()
        self._park()
        self.stats.t_run_s = time.perf_counter() - started
        self.stats.num_saturated = cast.num_saturated
        self.stats.stopped = worker.stopping
        self.stats.shares = self._shares
        return self.stats

    def _make_shares(self, latencies: Mapping[int, float]) -> Shares:
        model = self.setup.model
        return Shares(
            self.config.r_worker_weights,
            self.setup.owners,
            num_layers=model.num_layers,
            back_ratio=model.q_size / model.qkv_size,
            start=self._start_costs,
            latencies=latencies,
            num_rows=self.config.max_batch_size / self.config.num_slots,
        )

    def _make_worker(self, requests: Iterator[Request], device: Device, transport: SEnd, cast: WireCast) -> SWorker:
        prefill = self._make_prefill(device, transport, cast)
        eos = () if self.tokenizer is None else self.tokenizer.eos_token_ids
        return SWorker(
            self.s_part,
            device,
            transport,
            make_scheduler(self.config, self._placement, self._sequences(requests), prefill.prompts),
            prefill,
            cast,
            eos_token_ids={*self.setup.model.eos_token_ids, *eos},
            on_token=self._on_token,
            on_finished=self._on_finished,
            on_step=self._on_step,
            stop_requested=lambda: self.stop_requested() or self.hooks.stop_requested(),
            stall_s=self.config.watchdog_s,
        )

    def _make_prefill(self, device: Device, transport: SEnd, cast: WireCast) -> Prefill | GivenKV:
        if self.given_kv:
            return GivenKV(self.s_part, GivenPrompts())
        prompts = PromptQueue(
            self.setup.layout,
            chunk_tokens=self.config.prefill_chunk_tokens,
            max_batch_tokens=self.config.max_prefill_tokens,
        )
        return Prefill(self.s_part, device, transport, prompts, cast)

    def _sequences(self, requests: Iterator[Request]) -> Iterator[Sequence]:
        """Sequences of the requests that can run; the others are completed with their error at once."""
        run_started = time.perf_counter()  # the S-worker asks for the first sequence as soon as it starts
        for request in requests:
            self.stats.num_requests += 1
            started = time.perf_counter()
            try:
                accepted = self._intake.accept(request)
            except RequestFailure as failure:
                self._complete(Completion(request, error=(failure.code, str(failure))))
                continue
            finally:
                self.stats.t_tokenise_s += time.perf_counter() - started
            accepted.t_read_s = started - run_started
            for seq in accepted.seqs:
                self._accepted[seq.seq_id] = accepted
                if request.params.stop and self.tokenizer is not None:
                    self._streams[seq.seq_id] = self.tokenizer.stream(request.params.stop)
            yield from accepted.seqs

    def _on_token(self, seq: Sequence, token: int) -> bool:
        if len(seq.output_ids) > len(seq.forced_ids):  # others were generated, and counted, by an earlier run
            self.stats.output_tokens += 1
            self.stats.decode_tokens += len(seq.output_ids) > 1
            self.hooks.on_token()
        stream = self._streams.get(seq.seq_id)
        return stream is not None and stream.push(token)

    def _on_finished(self, seq: Sequence) -> None:
        self.stats.prompt_tokens += seq.prompt_len
        accepted = self._accepted.pop(seq.seq_id)
        accepted.num_ended += 1
        if accepted.num_ended == len(accepted.seqs):
            self._complete(self._completion(accepted))

    def _completion(self, accepted: Accepted) -> Completion:
        """The answer to a request whose sequences have all ended."""
        request, seqs = accepted.request, accepted.seqs
        choices = [self._choice(seq) for seq in seqs]
        return Completion(
            request,
            choices,
            prompt_tokens=sum(seq.prompt_len for seq in seqs[:: request.params.n]),
            notes=accepted.notes,
            error=next((("non_finite_logits", seq.error) for seq in seqs if seq.error is not None), None),
            owner=seqs[0].owner if len({seq.owner for seq in seqs}) == 1 else -1,
            t_read_s=accepted.t_read_s,
            t_admitted_s=min(seq.t_admitted_s for seq in seqs),
            t_first_token_s=min(seq.t_first_token_s for seq in seqs),
            t_finished_s=max(seq.t_finished_s for seq in seqs),
        )

    def _park(self) -> None:
        """Hand on what a stopped run has generated of requests that are not answered."""
        for accepted in {id(entry): entry for entry in self._accepted.values()}.values():
            # A sequence that has not caught up with an earlier run's tokens yet keeps those.
            choices = [max(seq.output_ids, seq.forced_ids, key=len) for seq in accepted.seqs]
            if any(choices):
                self.hooks.on_parked(accepted.request, choices)

    def _choice(self, seq: Sequence) -> Choice:
        return Choice(
            self._text_of(seq, self._streams.pop(seq.seq_id, None)),
            seq.output_ids,
            seq.finish_reason,
            seq.logprobs if seq.params.logprobs is not None else None,
            seq.prompt_ids,
        )

    def _text_of(self, seq: Sequence, stream: TextStream | None) -> str:
        if stream is not None:
            return stream.text
        return self.tokenizer.decode(seq.output_ids) if self.tokenizer is not None else ""

    def _complete(self, completion: Completion) -> None:
        self.stats.num_errors += completion.error is not None
        self.hooks.on_completion(completion)

    def _on_step(self, times: StepTimes) -> None:
        self.stats.t_prefill_s += times.t_prefill
        self._shares.observe(times)
        self._placement.costs = self._shares.costs
        self._tell_shares(times.step)
        self.hooks.on_step(times)

    def _tell_shares(self, step: int) -> None:
        """Say that R-workers will get unequal shares: once as a profile has them, once as they were measured."""
        if step == 0 or step % TELL_STEPS or self._shares.source == self._told_shares:
            return
        if text := self._shares.describe():
            self._told_shares = self._shares.source
            logger.info("shares of the load: %s", text)
