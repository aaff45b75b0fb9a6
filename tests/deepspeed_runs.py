"""One small training by DeepSpeed's interface, whichever library offers it; and the recording of DeepSpeed's own runs.

    PYTHONPATH=. DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/deepspeed_runs.py tests/data/deepspeed

needs DeepSpeed, and writes what tests compare with: `recorded.json`, and a checkpoint folder for each ZeRO stage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

RECORDED = Path(__file__).parent / "data" / "deepspeed"
WORDS, WIDTH, MICROBATCH, MICROBATCHES, STEPS, SAVED_AT = 11, 6, 2, 2, 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Tied embeddings, frozen weights, a buffer, and two layers. It returns its loss, as scripts for DeepSpeed do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        x = x + 0.1 * self.frozen(x)
        logits = self.head(x) * self.scale.to(x.dtype)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def small() -> Small:
    """Return a new model, with the same weights on every call."""
    torch.manual_seed(0)
    return Small()


def groups_of(model: Small) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]


def tokens_of(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(WORDS, (MICROBATCH, 6), generator=generator)


def config(stage: int, **options: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICROBATCH,
        "gradient_accumulation_steps": MICROBATCHES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.9, 0.99], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 3}},
        **options,
    }


CASES = {
    **{f"stage{stage}": config(stage) for stage in (0, 1, 2, 3)},
    **{f"stage{stage}_bf16": config(stage, bf16={"enabled": True}) for stage in (1, 2, 3)},
    "stage1_bf16_fp32sums": config(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}),
    "unclipped": config(2, gradient_clipping=0.0),
    "clipped_hard": config(2, gradient_clipping=0.1),
}


def train(engine: Any, steps: range) -> Iterator[dict[str, float]]:
    """Loss, norm of gradients and learning rate of each step."""
    for step in steps:
        losses = []
        for microbatch in range(MICROBATCHES):
            loss = engine(tokens_of(step, microbatch, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        yield {
            "loss": sum(losses) / len(losses),
            "norm": 0.0 if norm is None else float(norm),
            "rate": float(engine.get_lr()[0]),
        }


def start(library: Any, config: dict[str, Any]) -> Any:
    model = small()
    return library.initialize(model=model, model_parameters=groups_of(model), config=config)[0]


SCHEDULES = {
    "WarmupLR log": ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": [0.1, 0.2]}),
    "WarmupLR linear": ("WarmupLR", {"warmup_num_steps": 4, "warmup_min_lr": 0.01, "warmup_type": "linear"}),
    "WarmupDecayLR": ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_max_lr": 0.3}),
    "WarmupCosineLR": ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}),
    "LRRangeTest": ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3}),
    "LRRangeTest stairs": ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    "OneCycle": (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 6,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
        },
    ),
    "OneCycle stairs": (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6, "cycle_first_stair_count": 3},
    ),
}


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int = 20) -> list[list[float]]:
    """Rate of each group and first beta of the first, before each step."""
    found = []
    for _ in range(steps):
        found.append([*(group["lr"] for group in optimizer.param_groups), optimizer.param_groups[0]["betas"][0]])
        scheduler.step()
    return found


def adam_of_two_groups() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.2)]
    return torch.optim.Adam(groups)


def scales(scale: Any, pattern: str) -> list[float]:
    """Return the loss scale after each step; `x` in the pattern is one that overflows."""
    found = []
    for letter in pattern:
        scale(letter == "x")
        found.append(scale())
    return found


PATTERN = "..x.x...x....x.xx......"
SCALES = {
    "default": {"scale": 2.0**10, "window": 3, "hysteresis": 2, "restores": False},
    "patient": {"scale": 2.0**10, "window": 2, "hysteresis": 3, "restores": True},
    "impatient": {"scale": 2.0**10, "window": 3, "hysteresis": 1, "restores": False},
}


def record(folder: Path) -> None:
    """Run DeepSpeed, and write what it did."""
    import deepspeed
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    deepspeed.init_distributed("gloo")
    numbers: dict[str, Any] = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "runs": {}}
    for name, its in CASES.items():
        engine = start(deepspeed, its)
        trace = list(train(engine, range(SAVED_AT)))
        if name.startswith("stage") and its["zero_optimization"]["stage"]:
            engine.save_checkpoint(str(folder), tag=name, client_state={"epoch": 7}, save_latest=False)
        numbers["runs"][name] = [*trace, *train(engine, range(SAVED_AT, STEPS))]
    numbers["rates"] = {}
    for name, (cls, arguments) in SCHEDULES.items():
        optimizer = adam_of_two_groups()
        numbers["rates"][name] = rates(getattr(lr_schedules, cls)(optimizer, **arguments), optimizer)
    numbers["scales"] = {}
    for name, scale in SCALES.items():
        scaler = DynamicLossScaler(scale["scale"], scale["window"], 1.0, scale["hysteresis"], scale["restores"])

        def update(overflowed: bool | None = None, scaler: Any = scaler) -> float:
            if overflowed is not None:
                scaler.update_scale(overflowed)
            return scaler.cur_scale

        numbers["scales"][name] = scales(update, PATTERN)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, numbers["runs"])
    if dist.get_rank() == 0:
        numbers["runs"] = {name: [rank[name] for rank in every] for name in CASES}
        (folder / "recorded.json").write_text(json.dumps(numbers) + "\n")
        for left in [*folder.glob("*.py"), *folder.glob("*/*.py")]:
            left.unlink()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    record(Path(sys.argv[1]))
