"""Draw the pictures of the documentation from the engine's arithmetic and dry runs: `make pictures`.

Each SVG has a light background, so it is legible on dark pages, too.
"""

from __future__ import annotations

import sys
from functools import partial
from html import escape
from pathlib import Path

import torch
from torch import nn

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.layout.group_layout import lay_out
from fullshard.layout.shard_spec import choose_spec
from fullshard.plan.hardware import hardware
from fullshard.plan.memory import State
from fullshard.plan.prediction import Prediction, predict
from fullshard.tape.recorder import Phase

FOLDER = Path(__file__).parent / "pictures"
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#999933", "#bbbbbb")
WIDTH, BLOCKS, RANKS = 2048, 6, 8


class Drawing:
    """An SVG of rectangles and text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="13" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
        edge = ' stroke="#ffffff" stroke-width="0.5"'
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"{edge}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, anchor="middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#111111">{escape(text)}</text>')

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>"]) + "\n"


class Block(nn.Module):
    """Two matrices with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(self.up(inputs).relu())


def count(rows: range) -> str:
    return "1 row" if len(rows) == 1 else f"{len(rows)} rows"


def make_model(strategy: str) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, strategy=strategy, mp_policy=policy)
    return fully_shard(model, strategy=strategy, mp_policy=policy)


def predicted(strategy: str) -> Prediction:
    batch = partial(torch.empty, 4096, WIDTH)
    return predict(partial(make_model, strategy), batch, hardware=hardware("h100-80"), world=RANKS)


def sharding() -> Drawing:
    """How a parameter is sharded and gathered."""
    rows, world, row = 10, 4, 16
    spec = choose_spec((rows, 512), world)
    drawing = Drawing(720, 240, f"A parameter of {rows} rows, sharded over {world} ranks and gathered")
    for x, heading in ((20, "between steps"), (285, "in forward and backward"), (550, "gradient, reduced")):
        drawing.text(x, 24, heading)
    for x, label in ((180, "all-gather →"), (425, "reduce-scatter →")):
        drawing.text(x, 120, label)
    for rank in range(world):
        span = spec.span(rank)
        for x in (20, 550):
            drawing.box(x, 40 + rank * 48, 130, len(span) * row - 1, COLOURS[rank], f"rank {rank}: {count(span)}")
        if span:
            drawing.box(
                285, 50 + span.start * row, 120, len(span) * row, COLOURS[rank], f"{count(span)} from {span.start} on"
            )
    drawing.text(285, 50 + rows * row + 20, f"{rows} rows on every rank")
    return drawing


def strategies() -> Drawing:
    """The peak memory of each strategy by state."""
    peaks = {name: predicted(name).peak for name in ("ddp", "zero1", "zero2", "zero3")}
    used = [state for state in State if any(peak.by_state[state] for peak in peaks.values())]
    scale = 480 / max(peak.nbytes for peak in peaks.values())
    parameters = sum(param.numel() for param in Block().parameters()) * BLOCKS / 1e6
    title = f"Peak memory per rank: {parameters:.0f}M parameters, AdamW, bfloat16 compute, {RANKS} ranks"
    drawing = Drawing(720, 60 + 44 * len(peaks) + 22 * ((len(used) + 1) // 2), title)
    drawing.text(20, 24, title)
    for i, (name, peak) in enumerate(peaks.items()):
        x, y = 80.0, 40 + 44 * i
        drawing.text(20, y + 22, name)
        for state in used:
            width = peak.by_state[state] * scale
            drawing.box(x, y, width, 32, COLOURS[list(State).index(state)])
            x += width
        drawing.text(x + 8, y + 22, f"{peak.nbytes / 1e9:.2f} GB")
    for i, state in enumerate(used):
        x, y = 20 + 340 * (i % 2), 48 + 44 * len(peaks) + 22 * (i // 2)
        drawing.box(x, y, 14, 14, COLOURS[list(State).index(state)])
        drawing.text(x + 22, y + 12, state.value)
    return drawing


def timeline() -> Drawing:
    """The streams of a step."""
    placed = predicted("zero3").step.placed
    end = max(item.end for item in placed)
    streams = list(dict.fromkeys(item.entry.stream for item in placed))
    phases = list(dict.fromkeys(item.entry.origin.phase for item in placed))
    title = f"One step of zero3 on {RANKS} H100, predicted: {end * 1e3:.1f} ms"
    drawing = Drawing(720, 70 + 40 * len(streams) + 22 * ((len(phases) + 3) // 4), title)
    drawing.text(20, 24, title)
    for i, stream in enumerate(streams):
        drawing.text(20, 62 + 40 * i, stream)
    spans: dict[tuple[str, str, Phase], list[float]] = {}
    for number, item in enumerate(placed):  # a collective is one box, and compute one for each unit and phase
        origin, stream = item.entry.origin, item.entry.stream
        unit = origin.unit if stream == streams[0] else f"{origin.unit}{number}"
        span = spans.setdefault((stream, unit, origin.phase), [item.start, item.end])
        span[1] = max(span[1], item.end)
    for (stream, _, phase), (start, stop) in spans.items():
        x, width = 140 + 560 * start / end, 560 * (stop - start) / end
        drawing.box(x, 42 + 40 * streams.index(stream), width, 30, COLOURS[phases.index(phase) % len(COLOURS)])
    for i, phase in enumerate(phases):
        x, y = 20 + 170 * (i % 4), 56 + 40 * len(streams) + 22 * (i // 4)
        drawing.box(x, y, 14, 14, COLOURS[i % len(COLOURS)])
        drawing.text(x + 22, y + 12, phase.value)
    return drawing


def layout() -> Drawing:
    """The buffers of a parameter group."""
    shapes = {"A": (33, 1024), "B": (16, 1024), "w": (7000,), "b": (8000,)}
    group = lay_out(list(shapes.values()), 2, 4)
    scale = 600 / group.unsharded_numel
    drawing = Drawing(720, 250, "The unsharded buffer of a parameter group, and the shard buffers of two ranks")
    drawing.text(20, 24, f"unsharded buffer, read by compute: {group.unsharded_numel:,} elements")
    for rank in range(2):
        drawing.text(20, 104 + 70 * rank, f"shard buffer of rank {rank}: {group.shard_numel:,} elements")
    for name, param, colour in zip(shapes, group.params, COLOURS, strict=False):
        region = param.region
        drawing.box(20 + region.start * scale, 34, (region.stop - region.start) * scale, 36, "#dddddd")
        drawing.box(20 + region.start * scale, 34, param.spec.numel * scale, 36, colour, name)
        for rank in range(2):
            x, y = 20 + param.part.start * scale, 114 + 70 * rank
            drawing.box(x, y, (param.part.stop - param.part.start) * scale, 36, "#dddddd")
            drawing.box(x, y, param.spec.shard_numel(rank) * scale, 36, colour, f"{name}{rank}")
    drawing.text(20, 240, "A (33 rows) and B (16 rows) are in place; w and b form the pack. Grey: padding.")
    return drawing


PICTURES = {"sharding": sharding, "strategies": strategies, "timeline": timeline, "layout": layout}


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
