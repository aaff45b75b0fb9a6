"""The settings of a training run, as groups of frozen dataclasses. `TrainSettings` contains all groups."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from fullshard.command_line import MaybeFloat, MaybeInt, MaybePath, MaybeStr


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The text that the model learns to continue, byte by byte."""

    text: MaybePath = None
    """A file, or a folder whose text files are read in sorted order. Default: the Python sources of the standard
    library of this interpreter."""
    seq: int = 128
    """Bytes in one sequence: the context length of the model."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The GPT. A size sets all its dimensions; explicitly given dimensions take precedence."""

    size: str = "small"
    """One of the named sizes: nano, small, medium, large, xl."""
    layers: MaybeInt = None
    """Transformer blocks. Each is one unit of sharding."""
    heads: MaybeInt = None
    """Attention heads in a block. They divide the width into even parts."""
    width: MaybeInt = None
    """Size of the hidden state per byte."""
    mlp_ratio: MaybeInt = None
    """Width of a block's MLP as a multiple of the width."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The ranks, and their strategy for parameters, gradients and optimizer state."""

    strategy: str = "zero3"
    """One of ddp, zero1, zero2, zero3, hsdp, hsdp_zero2. They give the same numbers, and differ in memory and time."""
    ranks: MaybeInt = None
    """Processes to start on this machine. Default: one per GPU, or per core without GPUs. Under torchrun, its count
    applies."""
    on: MaybeStr = None
    """ray: the ranks are workers of a Ray cluster, a core or a GPU each. With --checkpoint-every, lost ones are
    restarted, at most three times, from the newest checkpoint. Default: processes of this machine."""
    ray_address: MaybeStr = None
    """The Ray cluster for --on ray. Default: that of RAY_ADDRESS, or a new one on this machine."""
    replicas: MaybeInt = None
    """For hsdp and hsdp_zero2: the number of replicas of the sharded model. It divides the ranks. Default: one for
    each machine; on a single machine two, or one if its ranks cannot form two."""


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """The optimization: AdamW, linear warm-up, cosine decay."""

    batch: MaybeInt = None
    """Sequences in one microbatch, over all ranks together; a multiple of the ranks. Default: 16, or the next number
    that the ranks can share."""
    accumulate: int = 1
    """Microbatches per step. Gradients are reduced once per step, after the last of them."""
    sequences: MaybeInt = None
    """Training sequences per step, if they do not fill the last microbatch. Default: batch times accumulate."""
    steps: int = 1000
    """Optimizer steps."""
    lr: MaybeFloat = None
    """Peak learning rate. Default: that of the size."""
    min_lr: float = 0.05
    """The final learning rate of the cosine, as a fraction of the peak."""
    warmup: int = 50
    """Warm-up steps of the learning rate."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors such as norm weights have none."""
    clip: float = 1.0
    """Maximum norm of the full gradient; 0 disables clipping."""
    capture: bool = False
    """Run each step as one CUDA graph, see fullshard.capture: for GPUs that wait for the host. Not with offload; no
    report is recorded."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Precision, encodings, recomputation and offload."""

    dtype: MaybeStr = None
    """Dtype of compute: float32 or bfloat16. Stored parameters and optimizer state stay float32. Default: bfloat16 on
    GPUs, float32 on CPUs."""
    reduce_dtype: str = "float32"
    """Dtype of gradient sums: float32 or bfloat16."""
    gather_wire: MaybeStr = None
    """Encoding of gathered parameters: int8 or fp8, a quarter of float32's bytes, for slow links. Results then differ
    from those of full precision. Default: none, the dtype of compute."""
    reduce_wire: MaybeStr = None
    """Encoding of gradients: bf16, int8 or int4, summed in float32. The quantization error of int8 and int4 is added to
    the next message. Default: none, the dtype of gradient sums."""
    activation_checkpointing: bool = False
    """Keep only the inputs of a block, and recompute the block in backward: less memory, about a third more time."""
    offload_optimizer: float = 0.0
    """Fraction of the optimizer's state on a disk between steps, from 0 to 1. fullshard disk predicts the cost."""
    offload_parameters: float = 0.0
    """Fraction of the parameters, from 0 to 1, on a disk between uses, with their gradients and optimizer state. Not
    for strategies that keep parameters unsharded."""
    offload_optimizer_cpu: float = 0.0
    """Fraction of the optimizer's state, from 0 to 1, on the CPU, which steps it. It has no effect if the CPU
    computes."""
    offload_parameters_cpu: float = 0.0
    """Fraction of the parameters, from 0 to 1, on the CPU, with their optimizer state."""
    offload_activations: float = 0.0
    """Fraction of the blocks, from 0 to 1, whose activations are on a disk between forward and backward."""
    offload_activations_cpu: float = 0.0
    """The same in the CPU's memory. It has no effect if the CPU computes."""
    offload_budget: MaybeStr = None
    """Memory limit of a rank's tensors on the device that computes, such as 20GB. As little as possible is offloaded,
    to --offload-folder. Replaces all of these fractions."""
    offload_folder: MaybePath = None
    """Folder on a disk of this machine for offloaded data; each rank has separate scratch files there."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints, and how a run starts or resumes."""

    checkpoint_every: int = 0
    """Steps between two checkpoints in OUT/checkpoints; the last step has one too, and SIGTERM saves one before the
    run ends with exit code 75. 0 for none."""
    keep: int = 2
    """Checkpoints to keep: older ones are deleted after a newer one is complete."""
    safety_copy_every: int = 0
    """Steps between two copies of the run in the memory of its hosts. Each host also keeps a copy of another host's
    part. After a loss of ranks or of a host the run resumes from there, if that is newer than the newest checkpoint.
    This needs torchrun --max-restarts and --resume auto. 0 for none."""
    resume: MaybeStr = None
    """auto: resume from the newest intact checkpoint of the run in --out, or start it if there is none. Or a path:
    start a new run from that checkpoint. Default: start from the beginning."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Output of the run."""

    seed: int = 0
    """Seed of the initial weights, the order of the text and the samples."""
    out: MaybePath = None
    """Folder of this run; it must not contain a different run. Default: the next free name under runs/."""
    log_every: int = 10
    """Steps between two lines of loss in metrics.jsonl; 0 for none."""
    validate_every: int = 250
    """Steps between two validations; the end always validates. 0 for the end only."""
    validate_bytes: int = 131072
    """Bytes of validation text that one validation reads, spread evenly over the text."""
    sample_every: int = 150
    """Steps between two samples; the end always samples. 0 for the end only."""
    sample_bytes: int = 192
    """Bytes in one sample."""
    temperature: float = 0.7
    """Temperature of samples: near 0 the most likely byte, 1 the distribution of the model."""
    predict: bool = True
    """Predict, before the first step, the memory and the time of a step by a dry run in a separate process, and show
    them next to the measurement after the third step. Times need a description of this machine: fullshard calibrate."""
    report: bool = True
    """Record the use of time and memory, with an overhead below 1 % of a step, and write a report at the end."""
    log_to: MaybeStr = None
    """Additional destination of the report's numbers: tensorboard, wandb or mlflow."""
    prompt: MaybeStr = None
    """Text that samples continue. Default: a line break."""
    config: MaybePath = None
    """A YAML or TOML file with options: names without leading dashes, and values. The command line takes precedence."""


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
        """Return the values of all options that are set, by option name, as in a `--config` file."""
        groups = (getattr(self, group.name) for group in fields(self))
        values = ((option.name, getattr(group, option.name)) for group in groups for option in fields(group))
        return {
            name.replace("_", "-"): str(value) if isinstance(value, Path) else value
            for name, value in values
            if value is not None
        }
