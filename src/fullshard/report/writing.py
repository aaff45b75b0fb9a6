"""Creation of the page of a run from its folder."""

from __future__ import annotations

from pathlib import Path

from fullshard.report.reading import read_run


def write_report(folder: Path) -> Path:
    """Write the page of the run that is recorded in `folder`, and return its path.

    Raises:
        ConfigError: No run is recorded there.
    """
    from fullshard.report import causes, page  # late: drawing needs libraries that training does not

    run = read_run(folder)
    return page.write(run, causes.find_causes(run), folder)
