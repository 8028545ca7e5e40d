"""Coverage-guided fuzzing of one target with atheris: ``run.py TARGET FOLDER [libFuzzer's options]``.

See ``scripts/fuzz.sh``. FOLDER is for files that live as long as the run; an input that fails is left where libFuzzer's
``-artifact_prefix`` says.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

with atheris.instrument_imports(include=["fastdecode_hpc", "json"]):
    from targets import TARGETS, run_target


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    corpus = folder / f"corpus-{name}"
    corpus.mkdir()
    (corpus / "valid").write_bytes(TARGETS[name].seed)
    atheris.Setup([sys.argv[0], *sys.argv[3:], str(corpus)], lambda data: run_target(name, data, folder))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
