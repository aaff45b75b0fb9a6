"""Predicted beside published: step times of models that others have trained on GPUs, and what this engine's tape says.

    python benchmarks/published.py

Four parts:

mpt       115 rows that MosaicML published: MPT models from 125M to 70B parameters, trained by PyTorch's FSDP1.
          `benchmarks/data/README.md` has their source.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, dry, fully_shard
from fullshard.plan.allocator import allocator_use
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.hardware import Attention, Fitted, Hardware, hardware
from fullshard.plan.memory import memory_peak
from fullshard.plan.prediction import steps_of
from fullshard.plan.timeline import lay_out
from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation, Tape

DATA = Path(__file__).parent / "data"


# -- what was trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT, and what one rank trains it on.

    Args:
        width: of the residual stream.
        heads: of attention.
        vocab: rows of the embedding, which is the output's too.
        seq: tokens of a sequence.
        batch: sequences of a microbatch, on one rank.
        checkpointing: whether blocks compute their forward again in backward.
        has_metrics: whether each microbatch has its loss computed twice more without gradients, in float32.
    """

    width: int
    heads: int
    vocab: int
    seq: int
    batch: int
    checkpointing: bool
    has_metrics: bool = True


class Block(nn.Module):
    """Attention, then an MLP of four times the width, each added to its input; biases everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Tokens in, the loss of the next token out."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokens, self.places = nn.Embedding(shape.vocab, shape.width), nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(blocks))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.checkpointing else block(x)
        scores = F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
        if self.shape.has_metrics:
            with torch.no_grad():
                for _ in range(2):
                    F.cross_entropy(scores.float(), tokens.flatten())
        return FusedLoss.apply(scores, tokens.flatten())


class FusedLoss(torch.autograd.Function):
    """Cross entropy in one kernel each way: forward reads the scores, backward writes their gradient over them."""

    @staticmethod
    def forward(context: Any, scores: Tensor, targets: Tensor) -> Tensor:
        context.save_for_backward(scores)
        return torch.logsumexp(scores, dim=-1).sum()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = context.saved_tensors
        return scores.mul_(grad), None


class DecoupledAdamW(torch.optim.Optimizer):
    """AdamW as Composer has it: one kernel for each arithmetic operation, over the parameters of a unit of FSDP1."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [it for group in self.param_groups for it in group["params"] if it.grad is not None]
        for start in range(0, len(params), OF_A_BLOCK):
            some = params[start : start + OF_A_BLOCK]
            for param in some:
                if not self.state[param]:
                    self.state[param] = {name: torch.zeros_like(param) for name in ("first", "second")}
            values, grads = [_local(it) for it in some], [_local(it.grad) for it in some]
            first, second = ([_local(self.state[it][name]) for it in some] for name in ("first", "second"))
            torch._foreach_mul_(first, 0.9)
            torch._foreach_add_(first, grads, alpha=0.1)
            torch._foreach_mul_(second, 0.95)
            torch._foreach_addcmul_(second, grads, grads, value=0.05)
            roots = torch._foreach_sqrt(second)
            torch._foreach_add_(roots, 1e-8)
            torch._foreach_mul_(values, 0.99)
            torch._foreach_addcdiv_(values, first, roots, value=-1e-4)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# -- tapes of it ------------------------------------------------------------------------------------------------------

DEPTHS = 3, 5
OF_A_BLOCK = 12  # parameters


@dataclass(frozen=True, kw_only=True)
class Task:
    """A shape, and how it is trained."""

    shape: Shape
    world: int
    reduce_dtype: torch.dtype = torch.float32


def tape_of(task: Task, blocks: int, microbatches: int) -> Tape:
    """Two steps of `task`, the first of one microbatch, the second of `microbatches`; each reduces its gradients."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=task.reduce_dtype)
    shape = task.shape
    with dry.world(task.world), dry.taped() as tape:
        model = Gpt(shape, blocks)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = DecoupledAdamW(model.parameters())
        for number in range(2):
            for _ in range(microbatches if number else 1):
                model(torch.zeros(shape.batch, shape.seq, dtype=torch.long)).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    return tape


def as_fsdp1(entries: Iterable[Entry], task: Task) -> Iterator[Entry]:
    """`entries` with what FSDP1 does beyond this engine's: its parameters are views of one flat parameter a unit.

    So backward writes the gradients of a unit one behind the other into the flat one's, and divides that before it is
    sent (`_post_backward_hook` of torch/distributed/fsdp/_runtime_utils.py). This engine divides what it has received.
    """
    for entry in entries:
        if isinstance(entry, Collective) and "reduce_scatter" in entry.name:
            sent = sum(entry.sizes)
            computed = sent * 2 // task.reduce_dtype.itemsize
            for name, nbytes in (("flatten", computed), ("divide", sent)):
                flat = (Access(0, 0, nbytes),)
                yield Operation(f"fsdp1.{name}", "compute", entry.origin, flat, flat)
        yield entry


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of any number of blocks and microbatches, as two of few blocks tell.

    Blocks are alike and so are microbatches: whatever one more takes, the next one takes too. `tests/test_published.py`
    holds that to whole tapes.
    """

    parts: tuple[tuple[list[Entry], ...], ...]  # of either depth: before, in, and after the second microbatch
    tensor_bytes: tuple[int, ...]  # at the peak, of either depth
    reserved_bytes: tuple[int, ...]  # by the allocator

    @classmethod
    def of(cls, task: Task) -> Step:
        """That of `task`."""
        tapes = [tape_of(task, blocks, 2) for blocks in DEPTHS]
        places = [steps_of(it.entries) for it in tapes]
        uses = [allocator_use(tape, since=begins[0]) for tape, begins in zip(tapes, places, strict=True)]
        return cls(
            parts=tuple(
                _parts([it for it in as_fsdp1(tape.entries[begins[1] :], task) if not isinstance(it, Allocation | Free)])
                for tape, begins in zip(tapes, places, strict=True)
            ),
            tensor_bytes=tuple(it.tensors for it in uses),
            reserved_bytes=tuple(it.reserved for it in uses),
        )

    def seconds(self, costs: Costs, blocks: int, microbatches: int) -> float:
        """How long it takes."""
        few, more = (self._of_depth(parts, costs, microbatches) for parts in self.parts)
        return _at(few, more, blocks)

    def _of_depth(self, parts: tuple[list[Entry], ...], costs: Costs, microbatches: int) -> float:
        before, again, after = parts
        one = lay_out([*before, *after], costs).end
        if microbatches == 1:
            return one
        return one + (microbatches - 1) * (lay_out([*before, *again, *after], costs).end - one)


def _at(few: float, more: float, blocks: int) -> float:
    """What grows by as much with each block, of `blocks`, given that of either depth."""
    return few + (blocks - DEPTHS[0]) * (more - few) / (DEPTHS[1] - DEPTHS[0])


def _parts(entries: list[Entry]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    places = [place for place, it in enumerate(entries) if it.origin.microbatch == 2]
    first, last = places[0], places[-1] + 1
    return entries[:first], entries[first:last], entries[last:]


# -- MPT rows ---------------------------------------------------------------------------------------------------------

GPUS = {"a100_80gb": "a100-80", "h100_80gb": "h100-80"}
REDUCE_DTYPES = {"a100_80_2023a": torch.bfloat16, "a100_80_2023b": torch.float32, "h100_2023": torch.float32}
"""PURE reduced gradients in bf16. What DEFAULT did in October 2023 was not published: `--reduce` tries the other."""

KERNELS_OF_2023 = {
    "a100-80": Attention(forward=0.40, backward=0.30),
    "h100-80": Attention(forward=0.175, backward=0.175),
}
"""Shares of the peak of the first FlashAttention (in Triton), which the rows were trained with.

A100: the paper of FlashAttention-2 (Dao, 2023) says 30 to 50 % forward and 25 to 35 % backward. H100: half of the 35 %
that the paper of FlashAttention-3 (Shah et al., 2024) gives for FlashAttention-2, which is twice as fast as the first.
"""

CALIBRATED_ON = "8 GPUs, sequences of 2048 tokens"
FAR = 0.08  # relative error from which on a row is listed
CONTEXT_BYTES = 1.5e9  # of a GPU's memory, that CUDA, its libraries and NCCL take


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was published of one run, and its task."""

    name: str
    set: str
    gpu: str
    blocks: int
    microbatches: int
    task: Task
    measured: float  # tokens a second and GPU

    @property
    def calibrates(self) -> bool:
        """True if the constants may be fitted on it."""
        return self.task.world == 8 and self.task.shape.seq == 2048

    @property
    def tokens(self) -> int:
        """Of one rank in a step."""
        return self.task.shape.batch * self.task.shape.seq * self.microbatches


def mpt_rows(reduce_dtypes: Mapping[str, torch.dtype]) -> list[Row]:
    """The rows as published."""
    with (DATA / "mosaicml_rows.csv").open() as file:
        return [_mpt_row(it, reduce_dtypes[it["Set"]]) for it in csv.DictReader(file)]


def _mpt_row(it: Mapping[str, str], reduce_dtype: torch.dtype) -> Row:
    shape = Shape(
        width=int(it["d_model"]),
        heads=int(it["n_heads"]),
        vocab=int(it["vocab"]),
        seq=int(it["SeqLen"]),
        batch=int(it["MicroBatchSize"]),
        checkpointing=it["ActCkpt"] == "True",
    )
    return Row(
        name=f"{it['Model']}, sequences of {it['SeqLen']}, {it['GPUs']} GPUs, microbatch {it['MicroBatchSize']}",
        set=it["Set"],
        gpu=GPUS[it["GPU"]],
        blocks=int(it["n_layers"]),
        microbatches=int(it["GradAccum"]),
        task=Task(shape=shape, world=int(it["GPUs"]), reduce_dtype=reduce_dtype),
        measured=float(it["TokensPerSecPerGPU"]),
    )


class Steps:
    """The step of each task, run dry once."""

    def __init__(self) -> None:
        self._found: dict[Task, Step] = {}

    def of(self, task: Task) -> Step:
        if task not in self._found:
            self._found[task] = Step.of(task)
        return self._found[task]


def predicted(row: Row, steps: Steps, machine: Hardware) -> float:
    """Tokens a second and GPU."""
    return row.tokens / steps.of(row.task).seconds(costs_of(machine), row.blocks, row.microbatches)


def as_in_2023(gpu: str, matmul_share: float | None = None, memory_share: float | None = None) -> Hardware:
    """A GPU with the kernels of attention of 2023, and other constants than are shipped, if given."""
    machine = replace(hardware(gpu), attention=KERNELS_OF_2023[gpu])
    if matmul_share is None or memory_share is None:
        return machine
    return replace(machine, fitted=replace(machine.fitted, matmul_share=matmul_share, memory_share=memory_share))


def calibrated(gpu: str, rows: Sequence[Row], steps: Steps) -> Fitted:
    """The constants with the least mean error on the rows of `gpu` that calibrate: two, on a grid of hundredths."""

    def error(shares: tuple[float, float]) -> float:
        machine = as_in_2023(gpu, *shares)
        return sum(abs(math.log(predicted(row, steps, machine) / row.measured)) for row in rows)

    best = 0.7, 0.8
    for step in (0.1, 0.04, 0.02, 0.01):
        near = [
            (best[0] + i * step, best[1] + j * step)
            for i in range(-2, 3)
            for j in range(-2, 3)
            if best[0] + i * step < 1 and best[1] + j * step < 1
        ]
        best = min(near, key=error)
    return replace(hardware(gpu).fitted, matmul_share=round(best[0], 2), memory_share=round(best[1], 2))


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A row, and what was predicted of it."""

    row: Row
    predicted: float
    reserved_bytes: float  # that the allocator would hold, were there memory enough
    tensor_bytes: float
    limit_bytes: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.measured - 1

    @property
    def is_over(self) -> bool:
        """True if the allocator wants more than there is, so that it has to give memory back and ask for it again."""
        return self.reserved_bytes > self.limit_bytes

    @property
    def reason(self) -> str:
        """Of a large error, as far as it is known."""
        if self.is_over:
            return (
                f"the allocator wants {self.reserved_bytes / 1e9:.0f} GB (tensors {self.tensor_bytes / 1e9:.0f}) of "
                f"{self.limit_bytes / 1e9:.0f}: it frees and asks again, which no cost here has"
            )
        return "not known"


def beside(row: Row, steps: Steps, machine: Hardware) -> Beside:
    step = steps.of(row.task)
    tensors, reserved = (_at(*it, row.blocks) for it in (step.tensor_bytes, step.reserved_bytes))
    return Beside(
        row=row,
        predicted=predicted(row, steps, machine),
        reserved_bytes=reserved,
        tensor_bytes=tensors,
        limit_bytes=machine.memory_bytes - CONTEXT_BYTES,
    )


def summary(found: Sequence[Beside]) -> dict[str, float]:
    """Errors in per cent, and the rank correlation."""
    errors = sorted(abs(it.error) for it in found)
    return {
        "rows": len(found),
        "mean": 100 * statistics.fmean(errors),
        "p95": 100 * statistics.quantiles(errors, n=20, method="inclusive")[-1],
        "rank": statistics.correlation(
            [it.predicted for it in found], [it.row.measured for it in found], method="ranked"
        ),
    }


def mpt(reduce_dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """All rows, predicted by constants from the few that calibrate."""
    rows, steps = mpt_rows(reduce_dtypes), Steps()
    found: list[Beside] = []
    constants = {}
    for gpu in KERNELS_OF_2023:
        of_gpu = [row for row in rows if row.gpu == gpu]
        fitted = calibrated(gpu, [row for row in of_gpu if row.calibrates], steps)
        constants[gpu] = {"matmul_share": fitted.matmul_share, "memory_share": fitted.memory_share}
        found += [beside(row, steps, replace(as_in_2023(gpu), fitted=fitted)) for row in of_gpu]
    others = [it for it in found if not it.row.calibrates]
    parts = {"calibrated on": [it for it in found if it.row.calibrates]}
    parts |= {name: [it for it in others if it.row.set == name] for name in sorted({row.set for row in rows})}
    parts |= {"all others": others, "of which memory suffices": [it for it in others if not it.is_over]}
    parts["of which it does not"] = [it for it in others if it.is_over]
    told = {name: summary(those) for name, those in parts.items() if len(those) > 1}
    for gpu, it in constants.items():
        print(f"{gpu}: fitted on {CALIBRATED_ON}: {it}; host_s {hardware(gpu).fitted.host_s} is not fitted")
    print(f"{'':26} rows  mean error  95th percentile  rank correlation")
    for name, it in told.items():
        print(f"{name:26} {it['rows']:4}  {it['mean']:8.1f} %  {it['p95']:13.1f} %  {it['rank']:16.4f}")
    print(f"rows that are more than {FAR:.0%} off:")
    for it in sorted(found, key=lambda it: -abs(it.error)):
        if abs(it.error) > FAR:
            print(f"  {it.error:+6.1%}  {it.row.set}: {it.row.name}: {it.reason}")
    return {
        "fitted": constants,
        "reduce_dtypes": {name: str(dtype) for name, dtype in reduce_dtypes.items()},
        "summary": told,
        "rows": [
            {
                "set": it.row.set,
                "row": it.row.name,
                "calibrates": it.row.calibrates,
                "measured": it.row.measured,
                "predicted": round(it.predicted, 1),
                "error": round(it.error, 4),
                "reserved_gb": round(it.reserved_bytes / 1e9, 1),
                "is_over": it.is_over,
            }
            for it in found
        ],
    }
