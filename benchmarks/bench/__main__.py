"""Run the benchmark: `python -m benchmarks.bench`, from the root of a clone."""

import sys
from collections.abc import Sequence

from benchmarks.bench.command import run
from fullshard.cli import exit_code_of


def main(argv: Sequence[str]) -> int:
    """Run the benchmark with the options `argv` and return its exit code."""
    return exit_code_of(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
