"""The settings of a training run, as frozen values in groups; `TrainSettings` is their sum."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from fullshard.command_line import MaybeFloat, MaybeInt, MaybePath, MaybeStr


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The text that the model learns to continue, byte by byte."""

    text: MaybePath = None
    """A file, or a folder whose text files are read in sorted order. Left out: the Python sources of the standard
    library of this interpreter."""
    seq: int = 128
    """Bytes in one sequence: how far back the model can see."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The GPT. A size names all its dimensions; single dimensions given beside it win."""

    size: str = "small"
    """One of the named sizes: nano, small, medium, large, xl."""
    layers: MaybeInt = None
    """Transformer blocks. Each is one unit of sharding."""
    heads: MaybeInt = None
    """Attention heads in a block. They divide the width into even parts."""
    width: MaybeInt = None
    """Numbers that describe one byte between blocks."""
    mlp_ratio: MaybeInt = None
    """Width of a block's MLP as a multiple of the width."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The ranks, and the strategy by which they share parameters, gradients and optimizer state."""

    strategy: str = "zero3"
    """One of ddp, zero1, zero2, zero3, hsdp, hsdp_zero2. They give the same numbers, and differ in memory and time."""
    ranks: MaybeInt = None
    """Processes to start on this machine. Left out: one for each GPU, or for each core where there is none. Under
    torchrun its own count holds."""
    on: MaybeStr = None
    """ray: the ranks are workers of a Ray cluster, a core or a GPU each. With --checkpoint-every, lost ones are started
    again, three times at most, and go on from the newest checkpoint. Left out: processes of this machine."""
    ray_address: MaybeStr = None
    """The Ray cluster for --on ray. Left out: that of RAY_ADDRESS, or a new one on this machine."""
    replicas: MaybeInt = None
    """For hsdp and hsdp_zero2: the number of replicas of the sharded model. It divides the ranks. Left out: one for
    each machine; on a single machine two, or one if its ranks cannot form two."""


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """The optimization: AdamW, linear warm-up, cosine decay."""

    batch: MaybeInt = None
    """Sequences in one microbatch, over all ranks together; a multiple of the ranks. Left out: 16, or the next number
    that the ranks can share."""
    accumulate: int = 1
    """Microbatches in one step. Gradients travel once a step, after the last of them."""
    sequences: MaybeInt = None
    """Sequences that one step learns from, where they do not fill its last microbatch. Left out: batch times
    accumulate."""
    steps: int = 1000
    """Optimizer steps."""
    lr: MaybeFloat = None
    """Peak learning rate. Left out: the one that suits the size."""
    min_lr: float = 0.05
    """The last learning rate of the cosine, as a part of the peak."""
    warmup: int = 50
    """Steps in which the learning rate climbs to its peak."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors such as norm weights are not decayed."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Precision, encodings, and what is kept, recomputed or on a disk."""

    dtype: MaybeStr = None
    """Dtype of compute: float32 or bfloat16. Parameters at rest and optimizer state stay float32. Left out: bfloat16
    on GPUs, float32 on CPUs."""
    reduce_dtype: str = "float32"
    """Dtype of gradient sums: float32 or bfloat16."""
    gather_wire: MaybeStr = None
    """Encoding of gathered parameters: int8 or fp8, a quarter of float32's bytes, for slow links. Numbers differ then
    from those of full precision. Left out: none, the dtype of compute."""
    reduce_wire: MaybeStr = None
    """Encoding of gradients: bf16, int8 or int4, to be summed in float32. The quantisation error of int8 and int4 is
    added to the next message. Left out: none, the dtype of gradient sums."""
    activation_checkpointing: bool = False
    """Keep only the inputs of a block, and recompute the block in backward: less memory, about a third more time."""
    offload_optimizer: float = 0.0
    """Part of the optimizer's state that rests on a disk between steps, from 0 to 1. fullshard disk says what that
    costs."""
    offload_parameters: float = 0.0
    """Part of the parameters, from 0 to 1, that rests on a disk between uses, with their gradients and their
    optimizer's state. Not for strategies that keep parameters whole."""
    offload_optimizer_cpu: float = 0.0
    """Part of the optimizer's state, from 0 to 1, that is on the CPU, which steps it. On a machine that computes on the
    CPU this changes nothing."""
    offload_parameters_cpu: float = 0.0
    """Part of the parameters, from 0 to 1, that rests on the CPU, with their optimizer's state."""
    offload_activations: float = 0.0
    """Part of the blocks, from 0 to 1, whose activations are on a disk between forward and backward."""
    offload_activations_cpu: float = 0.0
    """The same in the CPU's memory. On a machine that computes on the CPU this changes nothing."""
    offload_budget: MaybeStr = None
    """Memory that the tensors of a rank may take on the device that computes, such as 20GB: the least is away, in
    --offload-folder, with which they fit. Instead of all of these fractions."""
    offload_folder: MaybePath = None
    """Folder on a disk of this machine for what is offloaded; each rank has scratch files of its own there."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints of a run that may be cut off, and the start of a run."""

    checkpoint_every: int = 0
    """Steps between two checkpoints in OUT/checkpoints; the last step has one too, and SIGTERM saves one before the
    run ends with exit code 75. 0 for none."""
    keep: int = 2
    """Checkpoints to keep: older ones are deleted once a newer one is there."""
    safety_copy_every: int = 0
    """Steps between two copies of the run in the memory of its hosts, each host's part on the next one, too: after a
    loss of ranks or a host the run goes on from there, if that is newer than the newest checkpoint. It takes torchrun
    --max-restarts and --resume auto. 0 for none."""
    resume: MaybeStr = None
    """auto: go on from the newest intact checkpoint of the run in --out, or start it where there is none. Or a path:
    begin a run of its own with what a checkpoint holds. Left out: begin again."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Output of the run, and when it comes."""

    seed: int = 0
    """Fixes the first weights, the order of the text and the samples."""
    out: MaybePath = None
    """Folder of this run; it must not hold another one. Left out: the next free name under runs/."""
    log_every: int = 10
    """Steps between two lines of loss in metrics.jsonl; 0 for none."""
    validate_every: int = 250
    """Steps between two validations; the end always validates. 0 for the end only."""
    validate_bytes: int = 131072
    """Bytes of validation text that one validation reads, spread evenly over all there is."""
    sample_every: int = 150
    """Steps between two samples; the end always samples. 0 for the end only."""
    sample_bytes: int = 192
    """Bytes in one sample."""
    temperature: float = 0.7
    """Temperature of samples: near 0 the likeliest byte, 1 as the model believes."""
    predict: bool = True
    """Predict, before the first step, the memory and the time of a step by a dry run in a process of its own, and show
    them after the third beside what was measured. Times need a description of this machine: fullshard calibrate."""
    report: bool = True
    """Record where time and memory go, which costs less than 1 % of a step, and write a page of it in the end."""
    log_to: MaybeStr = None
    """Where the numbers of the report go, too: tensorboard, wandb or mlflow, by that library."""
    prompt: MaybeStr = None
    """Text that samples continue. Left out: a line break."""
    config: MaybePath = None
    """A YAML or TOML file that holds options: names without dashes in front, and values. What stands on the command
    line wins over it."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """All settings of one training run."""

    text: TextSettings = field(default_factory=TextSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    parallelism: ParallelSettings = field(default_factory=ParallelSettings)
    optimization: OptimizationSettings = field(default_factory=OptimizationSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def as_options(self) -> dict[str, int | float | str | bool]:
        """Option names with their values, as a `--config` file may hold them; what was left out is left out."""
        groups = (getattr(self, group.name) for group in fields(self))
        values = ((option.name, getattr(group, option.name)) for group in groups for option in fields(group))
        return {
            name.replace("_", "-"): str(value) if isinstance(value, Path) else value
            for name, value in values
            if value is not None
        }
