"""The settings of `fullshard plan`, and the question that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fullshard.command_line import MaybeFloat, MaybeInt, MaybePath, MaybeStr
from fullshard.disk.speed import TYPICAL, measure
from fullshard.errors import ConfigError
from fullshard.plan.hardware import HERE, hardware
from fullshard.planner.candidates import CHECKPOINTING, PRECISIONS, STRATEGIES, Cluster, usual_precision
from fullshard.planner.question import Question
from fullshard.planner.steps import MakeOptimizer
from fullshard.planner.subject import Subject, gpt_subject, named_subject, transformers_subject
from fullshard.policy.arguments import mismatch
from fullshard.policy.precision import GATHER_ENCODINGS, REDUCE_ENCODINGS
from fullshard.testing.parity.named import function_named
from fullshard.train.settings import ModelSettings

_DEFAULT_SEQ = 1024
_MEASURING_S = 3.0  # of a disk
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SubjectSettings:
    """The model and its data: functions, named as package.module:function or file.py:function, or a description."""

    model: MaybeStr = None
    """A function without arguments that returns the plain model. It is called on the meta device, so that size does not
    matter. One that returns a model which it has sharded is planned as it is sharded."""
    batch: MaybeStr = None
    """A function of the number of rows that returns one microbatch. One without arguments returns one row."""
    loss: MaybeStr = None
    """A function loss(model, batch). Left out: the model's output, its .loss, or the mean of what it returns."""
    config: MaybePath = None
    """Instead of a function: the config.json of a model of the transformers library."""
    size: MaybeStr = None
    """Instead of a function: a size of the trainer's GPT, as in fullshard train --size."""
    layers: MaybeInt = None
    """Blocks of the trainer's GPT, if not those of its size; likewise --heads, --width and --mlp-ratio."""
    heads: MaybeInt = None
    """Attention heads in a block of the trainer's GPT."""
    width: MaybeInt = None
    """Numbers that describe one byte between blocks of the trainer's GPT."""
    mlp_ratio: MaybeInt = None
    """Width of an MLP of the trainer's GPT as a multiple of the width."""
    seq: MaybeInt = None
    """Tokens in a row, for --config and --size. Left out: what the configuration allows, at most 4096; 1024."""
    measure: bool = False
    """Take the steps on real tensors on this machine's CPU, for a model whose operations depend on values."""
    optimizer: MaybeStr = None
    """A function that makes the optimizer of a list of parameters. Left out: fused AdamW."""
    clip: float = 1.0
    """Largest norm of the full gradient; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """The machines."""

    hardware: str = HERE
    """A known kind (a wrong name is answered by the list of them), here for this machine as fullshard calibrate has
    measured it, or the path of a TOML file."""
    hosts: int = 1
    """How many hosts there are."""
    per_host: MaybeInt = None
    """Ranks on each. Left out: as many as the hardware has."""
    gpu_memory: MaybeFloat = None
    """Share of an accelerator's memory that may be used. Left out: all but 2 GB, which CUDA's context, NCCL's buffers
    and cuBLAS's workspaces take."""
    disk: MaybePath = None
    """A folder on a disk like that of each host, which is measured for three seconds. Left out: an SSD that reads and
    writes 2 GB/s at once in all, and has room."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The search space."""

    global_batch: MaybeInt = None
    """Rows that a step learns from, on all ranks. Left out: whatever is fastest for a row, in one microbatch."""
    strategies: str = "all"
    """Names of strategies, such as zero2,zero3,hpz,hfsdp."""
    checkpointing: str = "all"
    """Names among none, selective, every-2, every-1."""
    precision: MaybeStr = None
    """Names among bf16 (gradients summed in fp32), bf16-reduce (in bf16), fp16 (scaled losses) and fp32. They change
    numbers, so only one is considered if left out: on accelerators bf16, or fp16 if that is faster; fp32 on CPUs."""
    offload: bool = False
    """Consider part of the optimizer's state on the CPU or on a disk, and shards on the CPU, even where something fits
    without."""
    gather_wire: MaybeStr = None
    """Encoding of gathered parameters: int8 or fp8. It changes numbers, so it is never chosen unasked."""
    reduce_wire: MaybeStr = None
    """Encoding of gradients: bf16, int8 or int4. Likewise."""
    compile: bool = False
    """Compile each block with torch.compile. Memory is predicted as without, which is more."""
    most: int = 8
    """Programs that are simulated at most, the likeliest first; 0 for all that may be the fastest."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """Other questions, and output."""

    fits_on: bool = False
    """Say on how few ranks the model fits."""
    largest_batch: bool = False
    """Say the most rows of a microbatch that fit, for every strategy."""
    why: MaybeStr = None
    """The name of a strategy: show by how much it exceeds the limit, the unit and phase, and the largest tensors."""
    against: MaybePath = None
    """The folder of a run of `fullshard train`: show only its prediction next to its measurement."""
    json: MaybeStr = None
    """A file for the answer as JSON; - for the standard output, instead of all else."""
    html: MaybePath = None
    """A file for a page with the timeline and the memory of the recommended plan."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """All settings of one plan."""

    subject: SubjectSettings = field(default_factory=SubjectSettings)
    machines: MachineSettings = field(default_factory=MachineSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    answer: AnswerSettings = field(default_factory=AnswerSettings)

    def check(self) -> None:
        """Raise `ConfigError` for options that have no effect in combination with others."""
        answer = self.answer
        requested = [name for name in ("fits_on", "largest_batch", "why", "against") if getattr(answer, name)]
        if len(requested) > 1:
            raise ConfigError(f"{_options(requested)} cannot be combined. Use one at a time.")
        if requested and requested[0] in ("fits_on", "largest_batch") and self.search.global_batch is not None:
            raise ConfigError(
                f"--global-batch {self.search.global_batch}: {_options(requested)} searches for the number of rows of "
                "one microbatch. Leave --global-batch out."
            )
        if requested and requested[0] in ("why", "against") and answer.html is not None:
            raise ConfigError(f"--html: {_options(requested)} has no step to draw. Leave --html out.")
        model = next((name for name in _OF_MODEL if getattr(self.subject, name) is not None), None)
        if requested == ["against"] and model is not None:
            raise ConfigError(
                f"--{model}: --against describes a finished run, including its model. Leave --{model} out."
            )
        strange = [
            name
            for name in dict.fromkeys(name for names in _OF_MODEL.values() for name in names)
            if model is not None and getattr(self.subject, name) is not None and name not in _OF_MODEL[model]
        ]
        if strange:
            known = " or ".join(f"--{item}" for item, names in _OF_MODEL.items() if strange[0] in names)
            raise ConfigError(f"{_options(strange)}: not supported with --{model}. Leave it out, or use {known}.")
        for name, number in (("clip", self.subject.clip), ("most", self.search.most)):
            if number < 0:
                raise ConfigError(f"--{name} {number:g}: must be 0 or more.")

    def question(self) -> Question:
        """Return the question. Import the user's functions and create the model."""
        search, cluster = self.search, self.cluster()
        chosen = search.precision or usual_precision(cluster.hardware)
        for name, encoding, known in (
            ("gather-wire", search.gather_wire, GATHER_ENCODINGS),
            ("reduce-wire", search.reduce_wire, REDUCE_ENCODINGS),
        ):
            if encoding is not None and encoding not in known:
                raise ConfigError(f"--{name} {encoding}: unknown. Choose one of {', '.join(known)}.")
        subject = self.made_subject()
        if self.subject.optimizer is not None:
            subject = subject.with_optimizer(self.subject.optimizer)
        if subject.make_sharded is not None:
            self._check_leaves_sharding()
        question = Question(
            subject=subject,
            cluster=cluster,
            global_batch=search.global_batch,
            strategies=_words("strategies", search.strategies, STRATEGIES),
            checkpointing=_words("checkpointing", search.checkpointing, CHECKPOINTING),
            precisions=_words("precision", chosen, tuple(PRECISIONS)),
            offload=search.offload,
            encodings=(search.gather_wire, search.reduce_wire),
            compiled=search.compile,
            max_norm=self.subject.clip or None,
            make_optimizer=self._optimizer(),
            most=search.most,
        )
        question.shapes()
        return question

    def cluster(self) -> Cluster:
        """Return the machines."""
        requested = self.machines
        machine = hardware(requested.hardware)
        per_host = machine.ranks_per_host if requested.per_host is None else requested.per_host
        for name, number in (("hosts", requested.hosts), ("per-host", per_host)):
            if number < 1:
                raise ConfigError(f"--{name} {number}: must be at least 1.")
        if requested.hosts * per_host > _MOST_RANKS:
            raise ConfigError(
                f"--hosts {requested.hosts}: must be at most {_MOST_RANKS // per_host}, with {per_host} ranks per host."
            )
        if requested.gpu_memory is not None and not 0 < requested.gpu_memory <= 1:
            raise ConfigError(f"--gpu-memory {requested.gpu_memory:g}: must be a fraction, such as 0.95.")
        if requested.disk is not None and not requested.disk.is_dir():
            raise ConfigError(
                f"--disk {requested.disk}: the folder does not exist. Pass a folder on a disk like those of the hosts."
            )
        if per_host > machine.ranks_per_host and machine.kind == "gpu":
            raise ConfigError(
                f"--per-host {per_host}: a host of {machine.name} has {machine.ranks_per_host}. Use that number, or "
                f'describe other hosts in a TOML file: like = "{machine.name}", ranks_per_host = {per_host}'
            )
        return Cluster(
            hardware=machine.with_hosts_of(per_host) if machine.kind == "gpu" else machine,
            hosts=requested.hosts,
            per_host=per_host,
            share=requested.gpu_memory,
            disk=TYPICAL if requested.disk is None else measure(requested.disk, seconds=_MEASURING_S),
        )

    def made_subject(self) -> Subject:
        """Return the model and its data."""
        requested = self.subject
        named = [name for name in ("model", "config", "size") if getattr(requested, name) is not None]
        if len(named) != 1:
            found = " and ".join(f"--{name}" for name in named) or "none of them"
            raise ConfigError(
                f"--model, --config and --size each define a model; found {found}. Pass one, such as --model "
                "my:make_model --batch my:make_batch, or --size large."
            )
        if requested.seq is not None and requested.seq < 1:
            raise ConfigError(f"--seq {requested.seq}: must be at least 1.")
        if requested.model is not None:
            return named_subject(requested.model, requested.batch, requested.loss, measure=requested.measure)
        if requested.measure:
            raise ConfigError(
                "--measure: only supported with --model. Leave it out, since this model does not need values."
            )
        if requested.config is not None:
            return transformers_subject(requested.config, requested.seq)
        assert requested.size is not None
        size = ModelSettings(
            size=requested.size,
            layers=requested.layers,
            heads=requested.heads,
            width=requested.width,
            mlp_ratio=requested.mlp_ratio,
        )
        return gpt_subject(size, requested.seq or _DEFAULT_SEQ)

    def _check_leaves_sharding(self) -> None:
        """Raise an error for options about sharding if the user's function shards the model itself."""
        plain = SearchSettings()
        names = ("strategies", "checkpointing", "precision", "offload", "gather_wire", "reduce_wire", "compile")
        given = [name for name in names if getattr(self.search, name) != getattr(plain, name)]
        if given:
            raise ConfigError(
                f"{_options(given)}: --model {self.subject.model} already shards its model, and this sharding is "
                "used. Leave the option out, or pass a function that returns the plain model."
            )

    def _optimizer(self) -> MakeOptimizer | None:
        if self.subject.optimizer is None:
            return None
        make: MakeOptimizer = function_named(self.subject.optimizer, "--optimizer")
        if (why := mismatch(make, ([],), {})) is not None:
            raise ConfigError(f"--optimizer {self.subject.optimizer}: {why}. It is called with a list of parameters.")
        return make


_OF_MODEL = {
    "model": ("batch", "loss"),
    "config": ("seq",),
    "size": ("seq", "layers", "heads", "width", "mlp_ratio"),
}
"""The options that each way to name a model supports."""


def _options(names: Sequence[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def _words(option: str, listed: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if listed == "all":
        return known
    words = tuple(word.strip() for word in listed.split(",") if word.strip())
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        found = unknown[0] if unknown else "nothing"
        raise ConfigError(f"--{option} {listed}: {found} is unknown. Choose from {', '.join(known)}, or all.")
    return words
