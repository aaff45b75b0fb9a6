"""What does it cost in loss to send fewer bits? The main job, once per encoding, compared with full precision.

    python benchmarks/less_on_the_wire.py --steps 400

Each run is `fullshard train` with the same seed and text and another `--gather-wire` or `--reduce-wire`; one more in
full precision has a different seed, which says how much two runs differ for no reason. The losses of all steps and the
validation at the end go to benchmarks/results/less_on_the_wire.json, the curves to a picture next to it, and a table to
the screen. How long a step takes then is for benchmarks/two_hosts.py to say.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
FULL, OTHER_SEED = "float32", "float32, another seed"
RUNS: dict[str, list[str]] = {
    FULL: [],
    OTHER_SEED: ["--seed", "1"],
    "gather int8": ["--gather-wire", "int8"],
    "gather fp8": ["--gather-wire", "fp8"],
    "reduce bf16": ["--reduce-wire", "bf16"],
    "reduce int8": ["--reduce-wire", "int8"],
    "reduce int4": ["--reduce-wire", "int4"],
    "gather int8, reduce int4": ["--gather-wire", "int8", "--reduce-wire", "int4"],
}
AVERAGED = 20  # steps, in the table and in the picture's lower half


def main() -> None:
    """Train all runs, and write and print the results."""
    options = arguments()
    RESULTS.mkdir(exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name in options.runs:
        print(f"less_on_the_wire: {name} ...", file=sys.stderr)
        found[name] = train(name, options)
    about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(), **vars(options)}
    (RESULTS / "less_on_the_wire.json").write_text(json.dumps({"about": about, "runs": found}) + "\n")
    draw(found, RESULTS / "less_on_the_wire.png")
    show(found)


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of one run, and its validation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        sizes = ("size", "ranks", "steps", "batch", "seq", "strategy")
        reported = [item for option in sizes for item in (f"--{option}", str(getattr(options, option)))]
        quiet = ["--log-every", "1", "--validate-every", "0", "--sample-every", "0", "--sample-bytes", "1"]
        argv = [
            sys.executable,
            "-m",
            "fullshard.cli",
            "train",
            "--no-predict",
            *reported,
            *quiet,
            "--out",
            str(out),
            *RUNS[name],
        ]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [round(line["loss"], 5) for line in lines if line["kind"] == "step"],
        "validation_bits_per_byte": next(line["bits_per_byte"] for line in lines if line["kind"] == "validation"),
    }


def averaged(losses: list[float]) -> list[float]:
    """Return the mean over the last `AVERAGED` steps, at each step from there on."""
    return [sum(losses[i - AVERAGED : i]) / AVERAGED for i in range(AVERAGED, len(losses) + 1)]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """The curves, and below them by how much they differ from the first."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (curves, differences) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True, layout="constrained")
    first = averaged(next(iter(found.values()))["losses"])
    for name, run in found.items():
        losses = averaged(run["losses"])
        steps = range(AVERAGED, AVERAGED + len(losses))
        style = {"color": "black"} if name == FULL else {"color": "gray", "ls": ":"} if name == OTHER_SEED else {}
        curves.plot(steps, losses, label=name, lw=1, **style)
        differences.plot(steps, [a - b for a, b in zip(losses, first, strict=True)], lw=1, **style)
    curves.set_ylabel(f"loss, mean of {AVERAGED} steps")
    curves.set_yscale("log")
    curves.legend()
    differences.set_ylabel("less that of full precision")
    differences.set_xlabel("step")
    differences.set_ylim(-0.06, 0.06)
    figure.savefig(path, dpi=110)


def show(found: dict[str, dict[str, Any]]) -> None:
    """The table, as Markdown."""
    first = averaged(next(iter(found.values()))["losses"])
    print("| | loss at the end | largest difference | validation, bits a byte |")
    print("|---|---|---|---|")
    for name, run in found.items():
        losses = averaged(run["losses"])
        separate = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        print(f"| {name} | {losses[-1]:.3f} | {separate:.3f} | {run['validation_bits_per_byte']:.3f} |")


def arguments() -> argparse.Namespace:
    """Parse the runs and their options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"ranks": 2, "steps": 400, "batch": 8, "seq": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--size", default="small")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
