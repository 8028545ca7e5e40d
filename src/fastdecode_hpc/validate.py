"""``fastdecode validate``: every line of an input that would fail, without running anything."""

from __future__ import annotations

from collections import Counter

from fastdecode_hpc.batch.requests import RequestError, count_requests, read_requests
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.intake import Intake, RequestFailure
from fastdecode_hpc.progress import CountLine
from fastdecode_hpc.sequence import Request, SamplingParams

EXIT_ALL_GOOD, EXIT_SOME_BAD = 0, 3


def make_intake(model: str, run: RunConfig) -> Intake:
    """What checks prompts against a model: its tokenizer, chat template, vocabulary and longest context.

    Raises
    ------
    ConfigError
        If the model cannot be found or read.
    """
    from fastdecode_hpc.engine import load_tokenizer
    from fastdecode_hpc.model_files import resolve_model
    from fastdecode_hpc.s_part.kinds import find_kind
    from fastdecode_hpc.setup import choose_max_context_len

    path = resolve_model(model)
    config = find_kind(run, path).read_model()
    return Intake(
        load_tokenizer(path),
        None,
        vocab_size=config.vocab_size,
        max_context_len=choose_max_context_len(run, config),
        seed=run.seed,
        overlong=run.overlong,
        merge_system=run.merge_system,
    )


def validate(path: str, defaults: SamplingParams, *, auto_id: bool, intake: Intake | None) -> int:
    """Print a line for each input line that would fail, and a summary; the exit code.

    Parameters
    ----------
    path : str
        JSONL file, or ``-``.
    defaults : SamplingParams
        Of lines that bring no settings.
    auto_id : bool
        Whether lines without an id, or with one that was used, are given one.
    intake : Intake or None
        None: only the lines themselves are checked, no tokens are counted.
    """
    total, errors, notes = 0, Counter[str](), Counter[str]()
    progress = CountLine(count_requests(path), "lines")
    for item in read_requests(path, defaults, auto_id=auto_id):
        total += 1
        try:
            notes.update(_kind_of_note(note) for note in _check(item, intake))
        except RequestFailure as failure:
            errors[failure.code] += 1
            print(str(failure), flush=True)
        progress.advance(1)
    progress.close()
    print(_summary(total, errors, notes, intake is not None))
    return EXIT_SOME_BAD if errors else EXIT_ALL_GOOD


def _check(item: Request | RequestError, intake: Intake | None) -> list[str]:
    """Notes on a line that can be run."""
    if isinstance(item, RequestError):
        raise RequestFailure(item.code, item.message)
    if intake is None:
        return list(item.notes)
    try:
        return intake.accept(item).notes
    except RequestFailure as failure:
        raise RequestFailure(failure.code, f"line {item.line}: {failure}") from None


def _kind_of_note(note: str) -> str:
    """A note without its numbers."""
    return " ".join("N" if word.isdigit() else word for word in note.split())


def _summary(total: int, errors: Counter[str], notes: Counter[str], with_model: bool) -> str:
    num_bad = errors.total()
    by_code = f" ({', '.join(f'{code} {count}' for code, count in errors.most_common())})" if errors else ""
    lines = [f"{total} requests: {total - num_bad} can be run, {num_bad} would fail{by_code}"]
    lines += [f"note, {count} times: {note}" for note, count in notes.most_common(10)]
    if not with_model:
        lines.append("tokens and chat templates were not checked: give --model for that")
    return "\n".join(lines)
