"""Decode of a whole model by this program and by llama.cpp, from the same file and at the same context.

The only xllamacpp import (llama.cpp's server as a Python module).
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

from fastdecode_hpc.bench.decode_windows import WINDOW_STEPS, DecodeWindows, num_new_tokens
from fastdecode_hpc.bench.figures import Figures, add_spread
from fastdecode_hpc.bench.measure import SETTLE_S, Spread, ratios
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.results import Completion, Hooks
from fastdecode_hpc.sequence import Request, SamplingParams

FLASH = xllamacpp.llama_flash_attn_type
VARIANTS = {
    "flash attention": FLASH.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "no flash attention": FLASH.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """What is decoded: `batch` sequences whose context grows to at most `context` tokens."""

    model: str
    batch: int
    context: int
    rounds: int
    num_threads: int
    isa: str
    seed: int

    @property
    def prompt_len(self) -> int:
        return self.context - num_new_tokens(self.rounds)


class LlamaServer:
    """llama.cpp with a prompt in the cache of each of its slots, where a slot is a sequence.

    Parameters
    ----------
    model_path : Path
    prompt : list of int
        Computed once and copied to the other slots.
    num_slots, num_threads : int
    variant : str
        Of `VARIANTS`.
    num_steps : int
        Of each window.

    Attributes
    ----------
    prefill_tokens_per_s : float
        Of the prompt that was computed.
    """

    def __init__(
        self,
        model_path: Path,
        prompt: list[int],
        *,
        num_slots: int,
        num_threads: int,
        variant: str,
        num_steps: int = WINDOW_STEPS,
    ) -> None:
        self._saved = tempfile.TemporaryDirectory()
        params = xllamacpp.CommonParams()
        params.model.path = str(model_path)
        params.n_parallel = num_slots
        params.n_ctx = num_slots * (len(prompt) + 2 * num_steps)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        params.flash_attn_type = VARIANTS[variant]
        params.n_gpu_layers = 0
        params.fit_params = False
        params.verbosity = 0
        params.endpoint_slots = True
        params.slot_save_path = self._saved.name + "/"
        self._server = xllamacpp.Server(params)
        self._prompt, self._num_slots, self._num_steps = prompt, num_slots, num_steps
        self._pool = ThreadPoolExecutor(num_slots)
        self.prefill_tokens_per_s = float(self._complete(0, 1)["prompt_per_second"])
        self._do(0, "save")
        for slot in range(1, num_slots):
            self._do(slot, "restore")
        self._complete_all(1)

    def _do(self, slot: int, action: str) -> None:
        """Save the first slot's cache to a file, or restore another slot's from it."""
        url = f"{self._server.listening_address}/slots/{slot}?action={action}"
        body = json.dumps({"filename": "prompt.bin"}).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answer.read()

    def decode(self) -> float:
        """Tokens/s of one window: all sequences decoded together from the end of their prompts.

        Each slot says how long its tokens took after the first one; what is left of the prompt then, its last
        token, is not in it. Slots start at most some steps apart.
        """
        timings = self._complete_all(self._num_steps + 1)
        return float(sum((timing["predicted_n"] - 1) / timing["predicted_ms"] * 1e3 for timing in timings))

    def _complete_all(self, num_tokens: int) -> list[dict[str, Any]]:
        return list(self._pool.map(lambda slot: self._complete(slot, num_tokens), range(self._num_slots)))

    def _complete(self, slot: int, num_tokens: int) -> dict[str, Any]:
        answer = self._server.handle_completions(
            {
                "prompt": self._prompt,
                "id_slot": slot,
                "n_predict": num_tokens,
                "cache_prompt": True,
                "ignore_eos": True,
                "temperature": 0,
            }
        )
        if "timings" not in answer:
            raise ConfigError(f"llama.cpp refused the prompt: {answer}")
        return dict(answer["timings"])


def compare_decode(case: DecodeCase) -> Figures:
    """Decode with both in turn, window by window.

    Raises
    ------
    ConfigError
        If the model, batch or context can't be run.
    """
    run = RunConfig(
        model=case.model,
        ranks=1,
        device="cpu",
        num_slots=1,
        max_batch_size=case.batch,
        threads=case.num_threads,
        isa=case.isa,
        seed=case.seed,
    )
    with Engine(run, given_kv=True) as engine:
        assert engine.model_path is not None
        rng = np.random.default_rng(case.seed)
        prompt = rng.integers(0, engine.setup.model.vocab_size, case.prompt_len).tolist()
        servers = {
            variant: LlamaServer(
                engine.model_path, prompt, num_slots=case.batch, num_threads=case.num_threads, variant=variant
            )
            for variant in VARIANTS
        }
        own, peers = _decode_in_turn(engine, case, prompt, servers)
        return _figures(case, engine.model_path, own, peers)


def _decode_in_turn(
    engine: Engine, case: DecodeCase, prompt: list[int], servers: dict[str, LlamaServer]
) -> tuple[list[float], dict[str, list[float]]]:
    """Tokens/s of each round: ours, and by variant llama.cpp's."""
    peers: dict[str, list[float]] = {variant: [] for variant in servers}

    def pause() -> None:
        for variant, server in servers.items():
            time.sleep(SETTLE_S)
            peers[variant].append(server.decode())
        time.sleep(SETTLE_S)

    windows = DecodeWindows(case.batch, pause)
    params = SamplingParams(max_new_tokens=num_new_tokens(case.rounds), ignore_eos=True)
    requests = (Request(index, None, prompt, params=params) for index in range(case.batch))
    engine.run(requests, Hooks(_refuse_errors, on_step=windows.on_step))
    if len(windows.rates) <= case.rounds:
        raise RuntimeError(f"{len(windows.rates)} of {case.rounds + 1} windows had all {case.batch} sequences")
    used = slice(1, case.rounds + 1)  # the first window warms up
    return windows.rates[used], {variant: rates[used] for variant, rates in peers.items()}


def _refuse_errors(completion: Completion) -> None:
    if completion.error is not None:
        raise ConfigError(f"a prompt cannot be run: {completion.error[1]}")


def _figures(case: DecodeCase, model_path: Path, own: list[float], peers: dict[str, list[float]]) -> Figures:
    variant = max(peers, key=lambda name: Spread.of(peers[name]).median)
    figures: Figures = {
        "name": "decode-llamacpp",
        "model": model_path.name,
        "batch": case.batch,
        "context": case.context,
        "llamacpp_version": xllamacpp.__version__,
        "llamacpp_variant": variant,
    }
    add_spread(figures, "tokens_per_s", Spread.of(own))
    add_spread(figures, "llamacpp_tokens_per_s", Spread.of(peers[variant]))
    figures["llamacpp_tokens_per_s_by_variant"] = {name: Spread.of(rates).median for name, rates in peers.items()}
    add_spread(figures, "speedup_over_llamacpp", ratios(own, peers[variant]))
    return figures
