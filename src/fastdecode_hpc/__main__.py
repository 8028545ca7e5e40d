"""``python -m fastdecode_hpc`` and the command ``fastdecode``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the return value is the exit code."""
    from fastdecode_hpc.cli import run_command

    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
