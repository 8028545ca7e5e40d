"""Decode and prefill of this program and of what users run instead, on one machine, from the same weights.

python benchmarks/peers/compare.py --install [--peers NAME,...]        makes an environment for each peer
python benchmarks/peers/compare.py --json FILE [--model llama-110m|smollm2] [--cells 128:1,8;1024:32] [--rounds 3]

Every peer loads the model once and answers cells in turn: ours, a peer, the next, ours, ... Cells that are in FILE
already are not run again. After a run longer than --limit seconds a peer's cell is not repeated, and its larger ones
are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import MODELS, make_model
from protocol import Cell

from fastdecode_hpc.bench.machine import program_figures
from fastdecode_hpc.files import write_json

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CELLS = "128:1,8,32,128,256;1024:1,8,32;4096:1,8,32"
OURS = "ours"


@dataclass(frozen=True)
class Peer:
    """A program, the file of what it needs, and its settings.

    Attributes
    ----------
    program : str
    needs : str
        Requirements, and the environment made from them; empty: our own.
    settings : tuple of (str, str)
        Environment variables.
    with_ours : bool
        Its program imports ours too.
    """

    program: str
    needs: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    with_ours: bool = False

    @property
    def python(self) -> Path:
        return ROOT / f".venv-peer-{self.needs}" / "bin" / "python" if self.needs else Path(sys.executable)


PEERS = {
    OURS: Peer("ours.py"),
    "ours-bf16": Peer("ours.py", settings=(("OURS_DTYPE", "bf16"),)),
    "llamacpp": Peer("with_llamacpp.py", "llamacpp", with_ours=True),
    "openvino": Peer("with_openvino.py", "openvino"),
    "transformers": Peer("with_transformers.py", settings=(("PEER_DTYPE", "float32"),)),
    "transformers-bf16": Peer("with_transformers.py", settings=(("PEER_DTYPE", "bfloat16"),)),
    "vllm": Peer("with_vllm.py", "vllm", settings=(("PEER_DTYPE", "float32"),)),
    "vllm-bf16": Peer("with_vllm.py", "vllm", settings=(("PEER_DTYPE", "bfloat16"),)),
}
NOT_NEEDED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}  # of another torch than vLLM's CPU build


def install(names: Iterable[str]) -> None:
    """Make the environments of peers."""
    for needs in dict.fromkeys(PEERS[name].needs for name in names if PEERS[name].needs):
        folder = ROOT / f".venv-peer-{needs}"
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        venv.create(folder, with_pip=True, symlinks=True)
        subprocess.run([*pip, "install", "--quiet", "-r", str(HERE / "requirements" / f"{needs}.txt")], check=True)
        if needs in NOT_NEEDED:
            subprocess.run([*pip, "uninstall", "--quiet", "-y", *NOT_NEEDED[needs]], check=True)
        if any(peer.needs == needs and peer.with_ours for peer in PEERS.values()):
            packages = next((folder / "lib").glob("python*")) / "site-packages"
            ours = next(path for path in sys.path if path.endswith("site-packages"))
            (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")


class Process:
    """A peer that has loaded a model."""

    def __init__(self, name: str, model: dict[str, str], threads: int) -> None:
        peer = PEERS[name]
        settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **dict(peer.settings)}
        self._process = subprocess.Popen(
            [peer.python, HERE / peer.program, json.dumps(model), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(ROOT / "out" / f"peer-{name}.log").open("w"),
            text=True, env=settings, cwd=ROOT,
        )  # fmt: skip
        self.is_ready = self._process.stdout.readline() == "ready\n"

    def run(self, cell: Cell) -> dict[str, Any]:
        """Its answer, or what went wrong."""
        began = time.perf_counter()
        try:
            self._process.stdin.write(json.dumps(cell) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended with code {self._process.wait()}"}
        return {**answer, "seconds": time.perf_counter() - began}

    def close(self) -> None:
        """Let it go."""
        self._process.communicate()


def parse_cells(text: str, new_tokens: int) -> list[Cell]:
    """Cells of ``context:batch,...;...``."""
    pairs = [part.split(":") for part in text.split(";")]
    return [Cell(int(batch), int(context), new_tokens) for context, batches in pairs for batch in batches.split(",")]


def measure(args: argparse.Namespace, names: Sequence[str], results: list[dict[str, Any]]) -> None:
    """All that `results` does not have yet, round by round."""
    model = make_model(args.model, args.folder)
    processes = {name: Process(name, model, args.threads) for name in names}
    for name, process in processes.items():
        if not process.is_ready:
            print(f"{name} did not start: see out/peer-{name}.log", file=sys.stderr)
    too_long: dict[str, Cell] = {}
    for cell in parse_cells(args.cells, args.new_tokens):
        for number in range(args.rounds + 1):  # the first warms up, and counts where there is no other
            for name, process in processes.items():
                key = {"model": args.model, "peer": name, "batch": cell.batch, "context": cell.context, "round": number}
                found = [row for row in results if key.items() <= row.items()]
                if found or not process.is_ready or _is_left_out(too_long.get(name), cell, number):
                    continue
                answer = process.run(cell._replace(seed=number))
                if answer["seconds"] > args.limit or "error" in answer:
                    too_long[name] = cell
                results.append({**key, **answer})
                save(args.json, results)
                print(f"{name:18} batch {cell.batch:4} context {cell.context:5} round {number}: "
                      + (answer.get("error") or f"{answer['decode_tokens_per_s']:8.1f} tokens/s"),
                      file=sys.stderr, flush=True)  # fmt: skip
    for process in processes.values():
        process.close()


def _is_left_out(slow: Cell | None, cell: Cell, number: int) -> bool:
    """After a cell that took too long: no more rounds of it, and no larger one."""
    if slow is None:
        return False
    if slow == cell:
        return number > 0
    return cell.batch >= slow.batch and cell.context >= slow.context


def save(path: Path, results: list[dict[str, Any]]) -> None:
    """Write what has been measured."""
    write_json(path, {"machine": program_figures(), "runs": results})


def rates(results: Sequence[dict[str, Any]], name: str) -> dict[tuple[str, int, int], dict[str, tuple[float, int]]]:
    """By model, context and batch: each peer's median of a rate, and of how many rounds."""
    found: dict[tuple[str, int, int], dict[str, list[tuple[int, float]]]] = {}
    for row in results:
        if name in row:
            cell = found.setdefault((row["model"], row["context"], row["batch"]), {})
            cell.setdefault(row["peer"], []).append((row["round"], row[name]))
    medians: dict[tuple[str, int, int], dict[str, tuple[float, int]]] = {}
    for key, peers in found.items():
        for peer, values in peers.items():
            kept = [rate for number, rate in values if number] or [rate for _, rate in values]
            medians.setdefault(key, {})[peer] = statistics.median(kept), len(kept)
    return medians


def format_results(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: decode tokens/s of each cell, single runs marked, and our best over the best of the others."""
    names = [name for name in PEERS if any(row["peer"] == name for row in results)]
    lines = []
    for rate in ("decode_tokens_per_s", "prefill_tokens_per_s"):
        lines += ["", f"{rate.split('_')[0]} tokens/s; * is a single run", ""]
        lines += [
            f"| model | context | batch | {' | '.join(names)} | ours / best peer |",
            "|---" * (4 + len(names)) + "|",
        ]
        for (model, context, batch), peers in sorted(rates(results, rate).items()):
            cells = [f"{peers[name][0]:.0f}{'*' * (peers[name][1] == 1)}" if name in peers else "–" for name in names]
            lines.append(f"| {model} | {context} | {batch} | {' | '.join(cells)} | {_ratio(peers)} |")
    return "\n".join(lines)


def _ratio(peers: dict[str, tuple[float, int]]) -> str:
    ours = [rate for name, (rate, _) in peers.items() if name.startswith(OURS)]
    others = [rate for name, (rate, _) in peers.items() if not name.startswith(OURS)]
    return f"{max(ours) / max(others):.2f}" if ours and others else "–"


def format_agreement(results: Sequence[dict[str, Any]]) -> str:
    """In how many runs a peer's tokens were all those of ours."""
    own = {_prompt_of(row): row["tokens"] for row in results if row["peer"] == OURS and "tokens" in row}
    equal: dict[str, list[bool]] = {}
    for row in results:
        if row["peer"] != OURS and row.get("tokens") and _prompt_of(row) in own:
            equal.setdefault(row["peer"], []).append(row["tokens"] == own[_prompt_of(row)])
    return "\n".join(f"{name}: the tokens of {sum(runs)} of {len(runs)} runs are ours" for name, runs in equal.items())


def _prompt_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["context"], row["batch"], row["round"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the peers' environments, and end")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="NAME,...", help="(default: %(default)s)")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "peers", help="for models (default: out/peers)")
    parser.add_argument("--cells", default=CELLS, metavar="CONTEXT:BATCH,...;...", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="a sequence (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="after one that warms up (default: 3)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of a run (default: 300)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of every peer (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; what it has is not measured again")
    args = parser.parse_args()
    names = args.peers.split(",")
    if unknown := set(names) - set(PEERS):
        parser.error(f"--peers has {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    if args.install:
        install(names)
        return 0
    if args.json is None:
        parser.error("give --json")
    results = json.loads(args.json.read_text())["runs"] if args.json.is_file() else []
    (ROOT / "out").mkdir(exist_ok=True)
    measure(args, names, results)
    print(format_results(results), format_agreement(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
