"""From the folder of a run to its page."""

from __future__ import annotations

from pathlib import Path

from fullshard.report.reading import read_run

__all__ = ["write_report"]


def write_report(folder: Path) -> Path:
    """Write the page of the run that is recorded in `folder`: its path.

    Raises:
        ConfigError: nothing is recorded there.
    """
    from fullshard.report import causes, page  # late: drawing takes libraries that training does not need

    run = read_run(folder)
    return page.write(run, causes.find_causes(run), folder)
