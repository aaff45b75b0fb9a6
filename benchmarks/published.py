"""Predictions compared with published results: step times of models that others have trained on GPUs, by our tape.

    python benchmarks/published.py

Nothing is measured here, and no GPU is needed. Six parts; `benchmarks/data/README.md` has the sources:

mpt       115 rows that MosaicML published: MPT models from 125M to 70B parameters, trained by PyTorch's FSDP1. Two
          constants a GPU type are fitted on the rows of 8 GPUs and sequences of 2048 tokens; the others are predicted.
vtrain    160 rows of GPTs under DDP on 2 and 4 A100. The host's time for an operation is fitted on the rows of 2.
pytorch   runs that PyTorch's team published of GPTs of 175B and 1T parameters, and of a T5 of 11B.
titan     6 rows that torchtitan published of Llama 3.1 8B on 8 and 128 H100: eager, compiled, and with float8.
ibm       8 rows that IBM published of Llama 2 from 7B to 70B on 128 A100 and 96 H100, trained by FSDP1.
large     how long a prediction takes of 70B parameters on 4096 ranks.

What the rows were trained with and this engine does not do is added to its tape, and said: see `as_fsdp1`, `FusedLoss`,
`DecoupledAdamW` and `KERNELS_OF_2023`.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.published_llama`

from benchmarks.published_llama import LlamaShape, llama_tape
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, dry, fully_shard
from fullshard.plan.allocator import TapeAllocator, allocator_use
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.hardware import AttentionRates, Fitted, Hardware, hardware
from fullshard.plan.memory import memory_peak
from fullshard.plan.prediction import read_off, steps_of
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
        has_kernel: whether attention is one kernel; otherwise products, a mask, a softmax and a dropout.
    """

    width: int
    heads: int
    vocab: int
    seq: int
    batch: int
    checkpointing: bool
    has_metrics: bool = True
    has_kernel: bool = True


class Block(nn.Module):
    """Attention, then an MLP of four times the width, each added to its input; biases everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.has_kernel = shape.heads, shape.has_kernel
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.has_kernel else _plain(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as minGPT has it."""
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), 0.1) @ v


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


@dataclass(frozen=True, kw_only=True)
class T5Shape(Shape):
    """A T5, which reads `seq` tokens and writes as many.

    Args:
        head_width: of each head.
        mlp: width of its hidden layer.
    """

    head_width: int
    mlp: int


class T5Attention(nn.Module):
    """Attention whose scores have a bias for each distance, after a norm without a mean, added to its input."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        inner = shape.heads * shape.head_width
        self.heads, self.norm = shape.heads, nn.RMSNorm(shape.width)
        self.q, self.k, self.v = (nn.Linear(shape.width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        queried = self.norm(x)
        read = queried if memory is None else memory
        q, k, v = (
            item.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for item in (self.q(queried), self.k(read), self.v(read))
        )
        scores = q @ k.transpose(-2, -1) + bias
        weights = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.1)
        return x + F.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)), 0.1)


class T5Block(nn.Module):
    """Attention to oneself, attention to what was read if this is a block that writes, and an MLP; no biases."""

    def __init__(self, shape: T5Shape, writes: bool) -> None:
        super().__init__()
        self.attention = T5Attention(shape)
        self.reading = T5Attention(shape) if writes else None
        self.norm = nn.RMSNorm(shape.width)
        self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((shape.width, shape.mlp), (shape.mlp, shape.width))
        )

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.attention(x, bias)
        if self.reading is not None:
            x = self.reading(x, bias, memory)
        return x + F.dropout(self.down(F.dropout(F.relu(self.up(self.norm(x))), 0.1)), 0.1)


class T5(nn.Module):
    """Tokens in, the loss of writing them out; as many blocks write as read. Biases of scores are not trained here."""

    def __init__(self, shape: T5Shape, blocks: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(T5Block(shape, writes) for writes in (False, True) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, memory = self.tokens(tokens), None
        bias = torch.zeros(1, self.shape.heads, self.shape.seq, self.shape.seq, dtype=x.dtype)
        for place, block in enumerate(self.blocks):
            if 2 * place == len(self.blocks):
                x, memory = self.tokens(tokens), self.norms[0](x)
            x = checkpoint(block, x, bias, memory, use_reentrant=False)
        scores = F.linear(self.norms[1](x), self.tokens.weight)
        return F.cross_entropy(scores.float().flatten(0, 1), tokens.flatten(), reduction="sum")


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
        params = [item for group in self.param_groups for item in group["params"] if item.grad is not None]
        for start in range(0, len(params), OF_A_BLOCK):
            some = params[start : start + OF_A_BLOCK]
            for param in some:
                if not self.state[param]:
                    self.state[param] = {name: torch.zeros_like(param) for name in ("first", "second")}
            values, grads = [_local(item) for item in some], [_local(item.grad) for item in some]
            first, second = ([_local(self.state[item][name]) for item in some] for name in ("first", "second"))
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
    """A shape, and how it is trained.

    Args:
        shape: of the model and its microbatches.
        world: how many GPUs there are.
        reduce_dtype: of sums of gradients.
        compute_dtype: of everything else but the optimizer.
        strategy: of `fully_shard`. Under "ddp" only the last microbatch of a step reduces; under others, each does.
        offloads: whether parameters, and with them SGD without momentum, are on the CPU; otherwise AdamW.
        is_fsdp1: whether FSDP1 trained it.
    """

    shape: Shape
    world: int
    reduce_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    strategy: Literal["ddp", "zero3"] = "zero3"
    offloads: bool = False
    is_fsdp1: bool = True


def tape_of(task: Task, blocks: int, microbatches: int) -> Tape:
    """Two steps of `task`, the first of one microbatch, the second of `microbatches`."""
    shape = task.shape
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=task.compute_dtype, reduce_dtype=task.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if task.offloads else None,
        "strategy": task.strategy,
    }
    with dry.world(task.world), dry.taped() as tape:
        model = T5(shape, blocks) if isinstance(shape, T5Shape) else Gpt(shape, blocks)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        make = partial(torch.optim.SGD, lr=0.1, foreach=True) if task.offloads else DecoupledAdamW
        optimizer = make(model.parameters())
        for several in (1, microbatches):
            for number in range(several):
                model.set_requires_gradient_sync(task.strategy != "ddp" or number == several - 1)
                model(torch.zeros(shape.batch, shape.seq, dtype=torch.long)).backward()
            if not task.offloads:
                clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    return tape


def as_fsdp1(entries: Iterable[Entry], compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> Iterator[Entry]:
    """`entries` with what FSDP1 does beyond this engine's: its parameters are views of one flat parameter a unit.

    So backward writes the gradients of a unit one behind the other into the flat one's, and divides that before it is
    sent (`_post_backward_hook` of torch/distributed/fsdp/_runtime_utils.py). This engine divides what it has received.
    """
    for entry in entries:
        if isinstance(entry, Collective) and "reduce_scatter" in entry.name:
            sent = sum(entry.sizes)
            computed = sent * compute_dtype.itemsize // reduce_dtype.itemsize
            for name, nbytes in (("flatten", computed), ("divide", sent)):
                flat = (Access(0, 0, nbytes),)
                yield Operation(f"fsdp1.{name}", "compute", entry.origin, flat, flat)
        yield entry


def second_step(task: Task, blocks: int, microbatches: int) -> list[Entry]:
    """Return the entries of the second step without allocations. All later steps are equal."""
    entries = tape_of(task, blocks, microbatches).entries
    step: Iterable[Entry] = entries[steps_of(entries)[1] :]
    if task.is_fsdp1:
        step = as_fsdp1(step, task.compute_dtype, task.reduce_dtype)
    return [item for item in step if not isinstance(item, Allocation | Free)]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of any number of blocks and microbatches, predicted from two steps of few blocks.

    Blocks are identical and so are microbatches: each additional one takes the same time.
    `tests/simulate/test_published.py` compares this with whole tapes.
    """

    parts: tuple[tuple[list[Entry], ...], ...]  # of either depth: before, in, and after the second microbatch

    @classmethod
    def of(cls, task: Task) -> Step:
        """Build the step of `task`."""
        return cls(parts=tuple(_parts(second_step(task, blocks, 2)) for blocks in DEPTHS))

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
    """Return a value for `blocks` that grows linearly with each block, given the values for both depths."""
    return few + (blocks - DEPTHS[0]) * (more - few) / (DEPTHS[1] - DEPTHS[0])


def _parts(entries: list[Entry]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    places = [place for place, entry in enumerate(entries) if entry.origin.microbatch == 2]
    first, last = places[0], places[-1] + 1
    return entries[:first], entries[first:last], entries[last:]


# -- MPT rows ---------------------------------------------------------------------------------------------------------

GPUS = {"a100_80gb": "a100-80", "h100_80gb": "h100-80"}
REDUCE_DTYPES = {"a100_80_2023a": torch.bfloat16, "a100_80_2023b": torch.bfloat16, "h100_2023": torch.float32}
"""PURE reduced gradients in bf16. What DEFAULT did in October 2023 was not published: `--reduce` tries the other."""

KERNELS_OF_2023 = {
    "a100-80": AttentionRates(forward=0.40, backward=0.30),
    "h100-80": AttentionRates(forward=0.175, backward=0.175),
}
"""Shares of the peak of the first FlashAttention (in Triton), which the rows were trained with.

A100: the paper of FlashAttention-2 (Dao, 2023) says 30 to 50 % forward and 25 to 35 % backward. H100: half of the 35 %
that the paper of FlashAttention-3 (Shah et al., 2024) gives for FlashAttention-2, which is twice as fast as the first.
"""

CALIBRATED_ON = "8 GPUs, sequences of 2048 tokens"
FAR = 0.08  # relative error from which on a row is listed


@dataclass(frozen=True, kw_only=True)
class Row:
    """Published results of one run, and its task."""

    name: str
    set: str
    gpu: str
    blocks: int
    microbatches: int
    task: Task
    measured: float  # tokens per second and GPU

    @property
    def calibrates(self) -> bool:
        """True if the constants may be fitted on it."""
        return self.task.world == 8 and self.task.shape.seq == 2048

    @property
    def tokens(self) -> int:
        """Tokens of one rank per step."""
        return self.task.shape.batch * self.task.shape.seq * self.microbatches


def mpt_rows(reduce_dtypes: Mapping[str, torch.dtype]) -> list[Row]:
    """Return the rows as published."""
    with (DATA / "mosaicml_rows.csv").open() as file:
        return [_mpt_row(item, reduce_dtypes[item["Set"]]) for item in csv.DictReader(file)]


def _mpt_row(item: Mapping[str, str], reduce_dtype: torch.dtype) -> Row:
    shape = Shape(
        width=int(item["d_model"]),
        heads=int(item["n_heads"]),
        vocab=int(item["vocab"]),
        seq=int(item["SeqLen"]),
        batch=int(item["MicroBatchSize"]),
        checkpointing=item["ActCkpt"] == "True",
    )
    return Row(
        name=(
            f"{item['Model']}, sequences of {item['SeqLen']}, {item['GPUs']} GPUs, microbatch {item['MicroBatchSize']}"
        ),
        set=item["Set"],
        gpu=GPUS[item["GPU"]],
        blocks=int(item["n_layers"]),
        microbatches=int(item["GradAccum"]),
        task=Task(shape=shape, world=int(item["GPUs"]), reduce_dtype=reduce_dtype),
        measured=float(item["TokensPerSecPerGPU"]),
    )


class Steps:
    """The step of each task, run dry once."""

    def __init__(self) -> None:
        self._found: dict[Task, Step] = {}

    def of(self, task: Task) -> Step:
        if task not in self._found:
            self._found[task] = Step.of(task)
        return self._found[task]


def predicted(row: Row, steps: Steps, costs: Costs) -> float:
    """Tokens per second and GPU."""
    return row.tokens / steps.of(row.task).seconds(costs, row.blocks, row.microbatches)


def as_in_2023(gpu: str, matmul_share: float | None = None, memory_share: float | None = None) -> Hardware:
    """Return a GPU with the kernels of attention of 2023, and other constants than are shipped, if given."""
    machine = replace(hardware(gpu), attention=KERNELS_OF_2023[gpu])
    if matmul_share is None or memory_share is None:
        return machine
    return replace(machine, fitted=replace(machine.fitted, matmul_share=matmul_share, memory_share=memory_share))


def calibrated(gpu: str, rows: Sequence[Row], steps: Steps) -> Fitted:
    """The constants with the least mean error on the rows of `gpu` that calibrate: two, on a grid of hundredths."""

    def error(shares: tuple[float, float]) -> float:
        costs = costs_of(as_in_2023(gpu, *shares))
        return sum(abs(math.log(predicted(row, steps, costs) / row.measured)) for row in rows)

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
class Comparison:
    """A row, and what was predicted of it."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Relative; more tokens than measured are positive."""
        return self.predicted / self.row.measured - 1


def reason(far: Comparison, found: Sequence[Comparison], machine: Hardware) -> str:
    """Explain a large error by the memory that a whole tape requests, and by the same run in another set."""
    row = far.row
    tape = tape_of(row.task, row.blocks, min(row.microbatches, 2))
    use = allocator_use(tape, since=steps_of(tape.entries)[0])
    reported = [
        f"tensors {use.tensors / 1e9:.0f} GB and segments {use.reserved / 1e9:.0f} of {machine.memory_bytes / 1e9:.0f}"
    ]
    if use.reserved > machine.memory_bytes:
        reported[0] += ", so an allocator must free and ask again, and no cost here has that"
    for item in found:
        same = replace(item.row.task, reduce_dtype=row.task.reduce_dtype) == row.task
        if same and item.row.gpu == row.gpu and item.row.set != row.set:
            ratio = row.measured / item.row.measured - 1
            reported.append(
                f"measured {ratio:+.0%} against the same run of {item.row.set}, which is {item.error:+.0%} off"
            )
    return "; ".join(reported)


def summary(found: Sequence[Comparison]) -> dict[str, float]:
    """Errors in per cent, and the rank correlation."""
    errors = sorted(abs(item.error) for item in found)
    return {
        "rows": len(found),
        "mean": 100 * statistics.fmean(errors),
        "p95": 100 * statistics.quantiles(errors, n=20, method="inclusive")[-1],
        "rank": statistics.correlation(
            _ranks([item.predicted for item in found]), _ranks([item.row.measured for item in found])
        ),
    }


def _ranks(values: Sequence[float]) -> list[int]:
    """Return the place of each in order; of equal ones the first's."""
    order = sorted(values)
    return [order.index(value) for value in values]


def mpt(reduce_dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return all rows, predicted by constants from the few that calibrate."""
    rows, steps = mpt_rows(reduce_dtypes), Steps()
    found: list[Comparison] = []
    machines = {}
    for gpu in KERNELS_OF_2023:
        of_gpu = [row for row in rows if row.gpu == gpu]
        fitted = calibrated(gpu, [row for row in of_gpu if row.calibrates], steps)
        machines[gpu] = replace(as_in_2023(gpu), fitted=fitted)
        shipped = "as shipped" if fitted == hardware(gpu).fitted else f"shipped: {hardware(gpu).fitted}"
        print(f"{gpu}, on rows of {CALIBRATED_ON}: {fitted} ({shipped}); host_s is not fitted")
        costs = costs_of(machines[gpu])
        found += [Comparison(row=row, predicted=predicted(row, steps, costs)) for row in of_gpu]
    others = [item for item in found if not item.row.calibrates]
    parts = {"calibrated on": [item for item in found if item.row.calibrates]}
    parts |= {name: [other for other in others if other.row.set == name] for name in sorted({row.set for row in rows})}
    parts["all others"] = others
    reported = {name: summary(those) for name, those in parts.items()}
    print(f"{'':16} rows  mean error  95th percentile  rank correlation")
    for name, item in reported.items():
        print(f"{name:16} {item['rows']:4}  {item['mean']:8.1f} %  {item['p95']:13.1f} %  {item['rank']:16.4f}")
    print(f"rows that are more than {FAR:.0%} off:")
    reasons = {}
    for element in sorted(found, key=lambda item: -abs(item.error)):
        if abs(element.error) > FAR:
            reasons[element.row] = reason(element, found, machines[element.row.gpu])
            print(f"  {element.error:+6.1%}  {element.row.set}: {element.row.name}: {reasons[element.row]}", flush=True)
    return {
        "fitted": {gpu: asdict(machine.fitted) for gpu, machine in machines.items()},
        "attention": {gpu: asdict(shares) for gpu, shares in KERNELS_OF_2023.items()},
        "reduce_dtypes": {name: str(dtype) for name, dtype in reduce_dtypes.items()},
        "summary": reported,
        "rows": [
            {
                "set": item.row.set,
                "row": item.row.name,
                "calibrates": item.row.calibrates,
                "measured": item.row.measured,
                "predicted": round(item.predicted, 1),
                "error": round(item.error, 4),
                "known": reasons.get(item.row, ""),
            }
            for item in found
        ],
    }


# -- data parallel, as vTrain measured it -----------------------------------------------------------------------------


VTRAIN_DEPTHS = 12, 24
VTRAIN_HOST_S = tuple(6e-6 * times for times in range(4, 11))


@dataclass(frozen=True, kw_only=True)
class VtrainRun:
    """A run of vTrain's: a GPT under DDP."""

    task: Task
    layers: int
    microbatches: int
    measured_s: float
    columns: list[str]  # as published

    def seconds(self, end_of: Callable[[Task, int, int], float]) -> float:
        """How long a step takes, by the ends of steps of few layers (`vtrain_ends`)."""
        few, most = VTRAIN_DEPTHS
        one, two = (
            end_of(self.task, few, count)
            + (self.layers - few) * (end_of(self.task, most, count) - end_of(self.task, few, count)) / (most - few)
            for count in (1, 2)
        )
        return one + (self.microbatches - 1) * (two - one)


_vtrain_step = cache(second_step)


def vtrain_ends(costs: Costs) -> Callable[[Task, int, int], float]:
    """Return the function from a task, layers and microbatches to the seconds of a step. It remembers its results."""
    return cache(lambda task, layers, microbatches: lay_out(_vtrain_step(task, layers, microbatches), costs).end)


def vtrain_runs() -> list[VtrainRun]:
    """Return the runs as published."""
    with (DATA / "vtrain_dp_rows.csv").open() as file:
        table = list(csv.reader(file))[1:]
    runs = []
    for row in table:
        world, global_batch, batch, width, heads, layers, seq, *_ = map(int, row[:-1])
        shape = Shape(
            width=width,
            heads=heads,
            vocab=51200,
            seq=seq,
            batch=batch,
            checkpointing=False,
            has_metrics=False,
            has_kernel=False,
        )
        task = Task(shape=shape, world=world, compute_dtype=torch.float16, strategy="ddp", is_fsdp1=False)
        count = global_batch // world // batch
        run = VtrainRun(task=task, layers=layers, microbatches=count, measured_s=float(row[-1]) / 1e3, columns=row[:-1])
        runs.append(run)
    return runs


def vtrain() -> dict[str, Any]:
    """GPTs under DDP on 2 and 4 A100 of a host, by the constants that are shipped, and with the host's fitted.

    Small microbatches are limited by the host, whose time for an operation is fitted on the rows of 2 GPUs. Those of 4
    GPUs are predicted.

    Assumed: float16, 51200 tokens, attention of several kernels, AdamW, no checkpointing, gradients in float32.
    """
    machine = hardware("a100-80")
    shipped = machine.fitted.host_s
    ends = {
        host_s: vtrain_ends(costs_of(replace(machine, fitted=replace(machine.fitted, host_s=host_s)), dtype="float16"))
        for host_s in (shipped, *VTRAIN_HOST_S)
    }

    rows = []
    for run in vtrain_runs():
        predicted_s = {host_s: run.seconds(end_of) for host_s, end_of in ends.items()}
        rows.append(
            {
                "row": run.columns,
                "world": run.task.world,
                "batch": run.task.shape.batch,
                "measured_s": run.measured_s,
                "predicted_s": predicted_s,
            }
        )

    def errors(world: int, host_s: float, batch: int | None = None) -> list[float]:
        return [
            row["predicted_s"][host_s] / row["measured_s"] - 1
            for row in rows
            if row["world"] == world and batch in (None, row["batch"])
        ]

    def mean(values: Iterable[float]) -> float:
        return 100 * statistics.fmean(map(abs, values))

    fitted = min(VTRAIN_HOST_S, key=lambda host_s: mean(errors(2, host_s)))
    reported = {
        batch: {
            "rows": len(errors(4, fitted, batch)),
            "mean": mean(errors(4, fitted, batch)),
            "bias": 100 * statistics.fmean(errors(4, fitted, batch)),
            "mean as shipped": mean(errors(4, shipped, batch)),
        }
        for batch in sorted({row["batch"] for row in rows})
    }
    print("vTrain's rows, DDP on 4 A100, by sequences of a microbatch (seconds predicted over measured):")
    for batch, item in reported.items():
        print(
            f"  {batch}: {item['rows']} rows, mean error {item['mean']:.0f} %, bias {item['bias']:+.0f} %; "
            f"{item['mean as shipped']:.0f} % with host_s = {shipped * 1e6:.0f} us"
        )
    print(
        f"  host_s = {fitted * 1e6:.0f} us fits the rows of 2 A100 best: {mean(errors(2, fitted)):.0f} %, and "
        f"{mean(errors(2, shipped)):.0f} % as shipped; all of 4: {mean(errors(4, fitted)):.1f} %"
    )
    for row in rows:
        row["predicted_s"] = round(row["predicted_s"][fitted], 6)
    return {"summary": reported, "host_s": fitted, "rows": rows}


# -- PyTorch's own runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run of PyTorch's, the least and the most TFLOP/s a GPU that were published, and what had to be assumed."""

    name: str
    task: Task
    blocks: int
    gpu: str
    network_bytes_per_s: float
    published: tuple[float, float]
    assumed: str


def pytorch_runs() -> list[Published]:
    gpt175 = Shape(
        width=12288,
        heads=96,
        vocab=50000,
        seq=512,
        batch=20,
        checkpointing=True,
        has_metrics=False,
        has_kernel=False,
    )
    gpt1t = replace(gpt175, width=25600, heads=160, seq=2048, batch=4)
    half: dict[str, Any] = {"reduce_dtype": torch.float16, "compute_dtype": torch.float16, "offloads": True}
    blog = "attention of several kernels, FLOPs with what checkpoints compute again"
    paper = "A100-80, 2 Tbit/s a host, bfloat16, AdamW, checkpoints, attention of several kernels"
    sizes = {"width": 1024, "heads": 128, "head_width": 128, "mlp": 65536, "vocab": 32128}
    t5 = {
        seq: T5Shape(**sizes, seq=seq, batch=4096 // seq, checkpointing=True, has_metrics=False, has_kernel=False)
        for seq in (128, 256, 512)
    }
    of_paper: dict[str, Any] = {
        "gpu": "a100-80",
        "network_bytes_per_s": 31e9,
        "published": (0.55 * 312, 0.60 * 312),
    }
    return [
        Published(
            name="GPT 175B, batch 20, 128 GPUs",
            task=Task(shape=gpt175, world=128, **half),
            blocks=96,
            gpu="a100-40",
            network_bytes_per_s=6e9,
            published=(159, 159),
            assumed=blog,
        ),
        Published(
            name="GPT 1T, batch 4, 128 GPUs",
            task=Task(shape=gpt1t, world=128, **half),
            blocks=128,
            gpu="a100-40",
            network_bytes_per_s=6e9,
            published=(84, 84),
            assumed=blog,
        ),
        *(
            Published(
                name=f"GPT 175B, batch {batch}, {world} GPUs",
                task=Task(shape=replace(gpt175, seq=2048, batch=batch), world=world, reduce_dtype=torch.bfloat16),
                blocks=96,
                assumed=f"{paper}, sequences of 2048",
                **of_paper,
            )
            for batch in (1, 2)
            for world in (128, 192, 256, 384, 512)
        ),
        *(
            Published(
                name=f"T5 11B, sequences of {seq}, {world} GPUs",
                task=Task(shape=t5[seq], world=world, reduce_dtype=torch.bfloat16),
                blocks=24,
                assumed=f"{paper}, 4096 tokens read and as many written, FLOPs as the tape has them",
                **of_paper,
            )
            for seq in (128, 256, 512)
            for world in ((8, 128, 512) if seq == 512 else (8, 512))
        ),
    ]


RESERVED_BYTES = 2e9  # of a GPU, for CUDA's context and NCCL's buffers


@dataclass(frozen=True)
class AtTheLimit:
    """A step within the memory that a GPU has.

    Args:
        seconds: it takes, with the waits of `lay_out`'s host where segments must be given back to make room.
        retries: number of retries per block.
        failures: number of retries per block that find no memory: a run would end there.
        alone_s: a step without any overlap, as if the next unit did not fit.
    """

    seconds: float
    retries: float
    failures: float
    alone_s: float


def at_the_limit(run: Published, machine: Hardware, *, keeps_inputs: bool) -> AtTheLimit:
    """Return a step of `run` on `machine`, block by block as all others here.

    Args:
        run: what is run.
        machine: whose memory it has.
        keeps_inputs: whether the GPU keeps what checkpoints keep of each block; otherwise the host does, and what it
            takes to bring that there and back is not counted.
    """
    shape, reported = run.task.shape, []
    kept = shape.batch * shape.seq * shape.width * run.task.compute_dtype.itemsize
    for blocks in DEPTHS:
        entries = tape_of(run.task, blocks, 1).entries
        start = steps_of(entries)[1]
        destinations = kept * (run.blocks - blocks if keeps_inputs else -blocks)
        memory = TapeAllocator(room=machine.memory_bytes - RESERVED_BYTES - destinations)
        for entry in entries[:start]:
            memory.note(entry)
        before = memory.retries, memory.failures
        step = as_fsdp1(entries[start:], run.task.compute_dtype, run.task.reduce_dtype)
        laid = lay_out(step, costs_of(machine), memory)
        alone = sum(placed.end - placed.start for placed in laid.placed)
        counted = (memory.retries - before[0]) / blocks, (memory.failures - before[1]) / blocks
        reported.append((laid.end, *counted, alone))
    (seconds, *_, alone), (more_seconds, retries, failures, more_alone) = reported
    at = _at(seconds, more_seconds, run.blocks), retries, failures, _at(alone, more_alone, run.blocks)
    return AtTheLimit(*at)


def step_flops(run: Published) -> float:
    """FLOPs of a step on one GPU with checkpointing: of a GPT as papers count them, of a T5 as its tape has them."""
    if not isinstance(run.task.shape, T5Shape):
        return megatron_flops(run.task.shape, run.blocks)
    few, more = (
        sum(item.flops for item in second_step(run.task, blocks, 1) if isinstance(item, Operation)) for blocks in DEPTHS
    )
    return _at(few, more, run.blocks)


def megatron_flops(shape: Shape, blocks: int) -> float:
    """FLOPs of a step on one GPU with checkpointing (Narayanan et al., 2021, equation 3)."""
    share = 1 + shape.seq / 6 / shape.width + shape.vocab / 16 / blocks / shape.width
    return 96 * shape.batch * shape.seq * blocks * shape.width**2 * share


def pytorch() -> list[dict[str, Any]]:
    """TFLOP/s a GPU, and what the tape says of memory."""
    reported = []
    for run in pytorch_runs():
        machine = hardware(run.gpu)
        machine = replace(machine, network=replace(machine.network, bytes_per_s=run.network_bytes_per_s))
        seconds = Step.of(run.task).seconds(costs_of(machine), run.blocks, 1)
        rate = step_flops(run) / seconds / 1e12
        low, high = run.published
        error = rate / (low if rate < low else high) - 1 if not low <= rate <= high else 0.0
        peaks = []
        for blocks in DEPTHS:
            tape = tape_of(run.task, blocks, 1)
            peaks.append(memory_peak(tape, since=steps_of(tape.entries)[0]))
        peak = _at(peaks[0].nbytes, peaks[1].nbytes, run.blocks)
        parts = {
            state.value: _at(nbytes, peaks[1].by_state[state], run.blocks)
            for state, nbytes in peaks[0].by_state.items()
        }
        print(
            f"{run.name}: {rate:.0f} TFLOP/s, published {low:.0f} to {high:.0f}: {error:+.0%}. Assumed: {run.assumed}"
        )
        print(f"  {rate * 3 / 4:.0f} without what checkpoints compute again", end="; ")
        print(f"tensors {peak / 1e9:.0f} GB at the peak, of {machine.memory_bytes / 1e9:.0f}: ", end="")
        print(", ".join(f"{name} {nbytes / 1e9:.0f}" for name, nbytes in parts.items() if nbytes > 1e9), flush=True)
        limits = {}
        for keeps, where in ((True, "on the GPU"), (False, "on the host")):
            if peak > machine.memory_bytes - RESERVED_BYTES:
                item = at_the_limit(run, machine, keeps_inputs=keeps)
                limits[where] = {**asdict(item), "predicted": round(step_flops(run) / item.seconds / 1e12, 1)}
                print(f"  what checkpoints keep {where}: {limits[where]['predicted']:.0f} TFLOP/s", end="; ")
                print(f"per block {item.retries:.1f} retries, {item.failures:.1f} without success", end="; ")
                print(f"without overlap {step_flops(run) / item.alone_s / 1e12:.0f} TFLOP/s", flush=True)
        reported.append(
            {
                "run": run.name,
                "at_the_limit": limits,
                "published": run.published,
                "predicted": round(rate, 1),
                "error": round(error, 3),
                "assumed": run.assumed,
                "peak_gb": round(peak / 1e9, 1),
                "memory_gb": round(machine.memory_bytes / 1e9, 1),
                "peak_parts_gb": {name: round(nbytes / 1e9, 1) for name, nbytes in parts.items()},
            }
        )
    return reported


# -- Llama by torchtitan and IBM --------------------------------------------------------------------------------------


LLAMA_3_8B = LlamaShape(
    blocks=32,
    width=4096,
    heads=32,
    kv_heads=8,
    mlp=14336,
    vocabulary=128256,
    seq=8192,
    batch=2,
    checkpoints="op",
    is_of_torchtitan=True,
)
TITAN_ROWS = (  # ranks, how, tokens per second of a GPU, GiB that the allocator reserves
    (8, "eager", 5762, 82.4),
    (8, "compiled", 6667, 77.0),
    (8, "compiled, float8", 8532, 76.8),
    (128, "eager", 5605, 67.0),
    (128, "compiled", 6514, 62.0),
    (128, "compiled, float8", 8380, 61.8),
)


def titan() -> list[dict[str, Any]]:
    """Tokens per second of a GPU, and the memory of eager rows; that of compiled ones is not predicted."""
    found, machine = [], hardware("h100hbm2e-96")
    for world, how, published, gib in TITAN_ROWS:
        tape = llama_tape(LLAMA_3_8B, world, float8="float8" in how)
        prediction = read_off(tape, machine, world, compile_blocks=how != "eager")
        tokens = LLAMA_3_8B.batch * LLAMA_3_8B.seq
        row = _llama_row(f"Llama 3.1 8B, {world} GPUs, {how}", published, tokens / prediction.step_s)
        if how == "eager":
            row |= {"published_gib": gib, "predicted_gib": round(prediction.reserved_bytes / 2**30, 1)}
            print(f"  {row['predicted_gib']} GiB, published {gib}", flush=True)
        found.append(row)
    return found


def _llama_2(blocks: int, width: int, heads: int, kv_heads: int, mlp: int, checkpoints: int | None) -> LlamaShape:
    shape = {"blocks": blocks, "width": width, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    return LlamaShape(**shape, vocabulary=32000, seq=4096, batch=2, checkpoints=checkpoints)


IBM_ROWS = (  # name, shape, strategy, tokens per second of an A100 and of an H100
    ("7B", _llama_2(32, 4096, 32, 32, 11008, None), "hsdp", 3700, 7500),
    ("13B", _llama_2(40, 5120, 40, 40, 13824, 2), "zero3", 1800, 3800),
    ("34B", _llama_2(48, 8192, 64, 8, 22016, 1), "zero3", 700, 1550),
    ("70B", _llama_2(80, 8192, 64, 8, 28672, 1), "zero3", 370, 800),
)
IBM_GPUS = (("a100-80", 128, 6.25e9), ("h100-80", 96, 12.5e9))  # 400 and 800 Gbit/s a host


IBM_DEPTHS = 4, 6


@dataclass(frozen=True, kw_only=True)
class IbmRun:
    """A run of IBM's, and the second step of models of few blocks like it."""

    name: str
    published: float  # tokens per second and GPU
    machine: Hardware
    shape: LlamaShape
    steps: tuple[list[Entry], ...]  # of `IBM_DEPTHS`

    def predicted(self, costs: Costs) -> float:
        """Tokens per second and GPU."""
        few, more = (lay_out(step, costs).end for step in self.steps)
        seconds = few + (more - few) / (IBM_DEPTHS[1] - IBM_DEPTHS[0]) * (self.shape.blocks - IBM_DEPTHS[0])
        return self.shape.batch * self.shape.seq / seconds


def ibm_runs() -> Iterator[IbmRun]:
    """Yield the runs as published."""
    for name, shape, strategy, *published in IBM_ROWS:
        for (gpu, world, network_bytes_per_s), tokens_per_s in zip(IBM_GPUS, published, strict=True):
            machine = hardware(gpu)
            steps = []
            for blocks in IBM_DEPTHS:
                few = replace(shape, blocks=blocks)
                entries = llama_tape(few, world, strategy=strategy, reduce_dtype=torch.bfloat16).entries
                steps.append(list(as_fsdp1(entries[steps_of(entries)[1] :], torch.bfloat16, torch.bfloat16)))
            yield IbmRun(
                name=f"Llama 2 {name}, {world} {gpu}",
                published=tokens_per_s,
                machine=replace(machine, network=replace(machine.network, bytes_per_s=network_bytes_per_s)),
                shape=shape,
                steps=tuple(steps),
            )


def ibm() -> list[dict[str, Any]]:
    """Tokens per second of a GPU, from steps of four and six blocks."""
    return [_llama_row(run.name, run.published, run.predicted(costs_of(run.machine))) for run in ibm_runs()]


def _llama_row(run: str, published: float, predicted: float) -> dict[str, Any]:
    error = predicted / published - 1
    print(f"{run}: {predicted:.0f} tokens/s a GPU, published {published}: {error:+.1%}", flush=True)
    return {"run": run, "published": published, "predicted": round(predicted), "error": round(error, 4)}


# -- 70B parameters on 4096 ranks -------------------------------------------------------------------------------------


def large() -> dict[str, float]:
    """Seconds, and the peak bytes of this process: 80 blocks of width 8192, every one of them on the tape."""
    start = time.perf_counter()
    shape = Shape(width=8192, heads=64, vocab=128256, seq=2048, batch=1, checkpointing=True, has_metrics=False)
    entries = second_step(Task(shape=shape, world=4096, is_fsdp1=False), 80, 1)
    step = lay_out(entries, costs_of(hardware("h100-80"))).end
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time(),
        "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "step_s": step,
    }


def large_alone() -> dict[str, float]:
    """Run `large` in a separate process."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--large"], check=True, capture_output=True, text=True
    )
    item: dict[str, float] = json.loads(ran.stdout)
    print(
        f"70B parameters on 4096 H100: a step of {item['step_s']:.2f} s, told within {item['seconds']:.0f} s", end=" "
    )
    print(f"({item['cpu_seconds']:.0f} s of one core) and {item['bytes'] / 1e9:.2f} GB")
    return item


# -- all of it --------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Predicted over measured tokens, a point a row."""
    from matplotlib.figure import Figure  # late: it is slow to import

    figure = Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.subplots()
    ends = [0.8 * min(row["measured"] for row in rows), 1.25 * max(row["measured"] for row in rows)]
    axes.plot(ends, ends, color="#333333", linewidth=0.8)
    axes.plot(ends, [0.9 * end for end in ends], ends, [1.1 * end for end in ends], color="#a9b4bd", linewidth=0.8)
    for name, color in (("a100_80_2023a", "#a9b4bd"), ("a100_80_2023b", "#2a6f97"), ("h100_2023", "#c1121f")):
        those = [row for row in rows if row["set"] == name]
        for is_filled in (False, True):
            shown = [item for item in those if item["calibrates"] is is_filled]
            axes.scatter(
                [item["measured"] for item in shown],
                [item["predicted"] for item in shown],
                s=22,
                edgecolors=color,
                facecolors=color if is_filled else "none",
                label=f"{name}, calibrated on" if is_filled else name,
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured tokens per second and GPU (MosaicML, 2023)")
    axes.set_ylabel("predicted; thin lines are 10 % off")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="mpt,vtrain,pytorch,titan,ibm,large")
    parser.add_argument(
        "--reduce",
        action="append",
        default=[],
        metavar="SET=DTYPE",
        help="dtype of reduced gradients in a set's runs, as h100_2023=bfloat16",
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large:
        print(json.dumps(large()))
        return
    reduced = REDUCE_DTYPES | {
        name: getattr(torch, dtype) for name, dtype in (item.split("=", 1) for item in args.reduce)
    }
    path = args.results / "published.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    parts = {
        "mpt": lambda: mpt(reduced),
        "vtrain": vtrain,
        "pytorch": pytorch,
        "titan": titan,
        "ibm": ibm,
        "large": large_alone,
    }
    for part in args.parts.split(","):
        start = time.perf_counter()
        found[part] = parts[part]()
        print(f"-- {part}: {time.perf_counter() - start:.0f} s\n", flush=True)
        found["versions"] = {"torch": torch.__version__, "python": sys.version.split()[0]}
        path.write_text(json.dumps(found, indent=1) + "\n")
        if part == "mpt":
            draw(found["mpt"]["rows"], args.results / "published.png")


if __name__ == "__main__":
    main()
