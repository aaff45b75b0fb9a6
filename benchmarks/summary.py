"""Print the table of steps in docs/benchmarks.md from the files in `benchmarks/results`.

    python benchmarks/summary.py

`fullshard bench --json` writes the files. The table shows the step time of `zero3` over that of other systems in the
same round (medians), and the peak memory of a rank's process above its start.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COLUMNS = {  # file: heading
    "34m": "34M",
    "wide86m": "wide 86M",
    "34m_batch8_seq256": "34M, batch 8 x 256",
    "124m": "124M, batch 4 x 256",
    "34m_4_ranks": "34M, 4 ranks",
}
FULLSHARD = "fullshard-zero3"
OTHERS = {
    "floor": "the floor",
    "torch-ddp": "DDP",
    "torch-zero1": "ZeRO-1",
    "torch-fsdp1": "FSDP1",
    "torch-fsdp2": "FSDP2",
}


def table() -> str:
    """Return the table in Markdown."""
    found = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in COLUMNS}
    rows = [["", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for name, words in OTHERS.items():
        rows.append(
            [f"step time over {words}", *(_ratio(result["systems"][FULLSHARD], name) for result in found.values())]
        )
    rows.append(
        ["step", *(f"{1e3 * result['systems'][FULLSHARD]['step_s']['median']:.0f} ms" for result in found.values())]
    )
    for name in (FULLSHARD, "torch-ddp", "torch-fsdp2"):
        words = "memory of a process" if name == FULLSHARD else f"the same of {OTHERS[name]}"
        rows.append([words, *(_megabytes(result["systems"].get(name)) for result in found.values())])
    links = [
        f"[numbers](../benchmarks/results/{name}.json), [bars](../benchmarks/results/{name}.png)" for name in COLUMNS
    ]
    rows.append(["all of it", *links])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(system: dict[str, Any], other: str) -> str:
    spread = system["over"].get(other)  # where all did not fit, some were left out
    return "" if spread is None else f"{spread['median']:.2f}"


def _megabytes(system: dict[str, Any] | None) -> str:
    return "" if system is None else f"{system['process_bytes'] / 1e6:.0f} MB"


if __name__ == "__main__":
    print(table())
