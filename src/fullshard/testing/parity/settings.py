"""The settings of `fullshard parity`, and the values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from fullshard.command_line import MaybeFloat, MaybeInt, MaybePath, MaybeStr
from fullshard.errors import ConfigError
from fullshard.testing.parity.cases import Case, cases_of
from fullshard.testing.parity.difference import Tolerance
from fullshard.testing.parity.named import function_named
from fullshard.testing.parity.parallel import Parallelism
from fullshard.testing.parity.recipe import ClassNames, Recipe
from fullshard.wrap import AutoWrapPolicy, size_based_auto_wrap_policy

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ParitySubjectSettings:
    """The model and its data. Functions are named as package.module:function or file.py:function."""

    model: MaybeStr = None
    """A function without arguments that returns the model. Required."""
    batch: MaybeStr = None
    """A function make_batch(rows) that returns one microbatch: a dict or tuple of the model's arguments, or its only
    argument. The same as for fullshard plan. A function of the microbatch's number is accepted too. Required."""
    rows: int = 2
    """Rows of a microbatch, for make_batch(rows)."""
    loss: MaybeStr = None
    """A function loss(model, batch) that returns one number. Left out: the model's output, or its .loss."""
    wrap: MaybeStr = None
    """Submodules that become units: names of classes, such as Block,Head; or the minimum number of parameters of a
    unit; or a wrap policy, named like a function. Default: units with a tenth of the parameters or more."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The ranks and strategies to compare with the plain process."""

    ranks: str = "2,3,4"
    """Numbers of ranks."""
    strategies: str = "all"
    """Names of strategies, such as zero2,zero3; all: those that fit the ranks."""
    replicas: int = 2
    """For hsdp and hsdp_zero2: the number of ranks that hold the same shards."""
    mesh: MaybeStr = None
    """Axes and their sizes, such as pp2,dp2,tp2, instead of --ranks: dp of data, pp of stages, cp of parts of the
    sequence, tp of parts of matrices; ep of parts of the experts, among the ranks of dp and cp."""
    blocks: MaybeStr = None
    """For pp: the list of modules to divide into stages, such as model.layers."""
    schedule: str = "1F1B"
    """For pp: torch's name of the schedule."""
    context: MaybeStr = None
    """For cp: a function of a batch that returns its tensors along the sequence, each with that dim. Default: those of
    two dims or more, with dim 1."""
    experts: MaybeStr = None
    """For ep: a function of the model and the mesh of this axis that converts the experts' parameters to DTensors."""
    tp_plan: MaybeStr = None
    """A function of the model that returns a plan of tensor parallelism, for torch's parallelize_module. Default: the
    plan of a transformers model."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Steps, optimizer and precision."""

    steps: int = 5
    """Optimizer steps."""
    accumulate: MaybeInt = None
    """Microbatches per rank and step. Default: one, or in a pipeline the number of stages."""
    reduce_each: bool = False
    """Reduce gradients after each microbatch, instead of after the last one of a step."""
    optimizer: str = "adamw"
    """adamw, sgd (with momentum), or a function that makes an optimizer of the model."""
    lr: MaybeFloat = None
    """Learning rate of adamw or sgd. Default: depends on the optimizer."""
    clip: float = 1.0
    """Maximum norm of the full gradient; 0 disables clipping."""
    dtype: MaybeStr = None
    """Dtype of compute: float32, bfloat16 or float16. Left out: the dtype of each parameter."""
    reduce_dtype: MaybeStr = None
    """Dtype of gradient sums. Default: float32 with --dtype, else the dtype of each parameter."""
    seed: int = 0
    """Seed of all random numbers: initial weights, batches, dropout."""


@dataclass(frozen=True, kw_only=True)
class VerdictSettings:
    """Tolerance, timeout and output."""

    atol: float = 0.0
    """Absolute tolerance. If both tolerances are 0, all bits must be identical."""
    rtol: float = 0.0
    """Relative tolerance."""
    timeout: float = 600.0
    """Time limit per strategy in seconds."""
    json: MaybePath = None
    """A file for the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ParitySettings:
    """All settings of one comparison."""

    subject: ParitySubjectSettings = field(default_factory=ParitySubjectSettings)
    ranks: RankSettings = field(default_factory=RankSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    verdict: VerdictSettings = field(default_factory=VerdictSettings)

    def recipe(self) -> Recipe:
        """Return the recipe, with the user's functions imported."""
        subject, training = self.subject, self.training
        given = training.optimizer
        return Recipe(
            make_model=function_named(_needed("model", subject.model), "--model"),
            make_batch=function_named(_needed("batch", subject.batch), "--batch"),
            loss=None if subject.loss is None else function_named(subject.loss, "--loss"),
            rows=subject.rows,
            auto_wrap_policy=None if subject.wrap is None else policy_named(subject.wrap),
            steps=training.steps,
            accumulate=training.accumulate,
            reduce_each=training.reduce_each,
            optimizer=function_named(given, "--optimizer") if ":" in given else given,
            lr=training.lr,
            clip=training.clip,
            dtype=_dtype("dtype", training.dtype),
            reduce_dtype=_dtype("reduce-dtype", training.reduce_dtype),
            seed=training.seed,
            parallelism=self.parallelism(),
        )

    def parallelism(self) -> Parallelism:
        """Return the parallelisms other than sharding."""
        given = self.ranks
        sizes = {} if given.mesh is None else sizes_of_mesh(given.mesh)
        return Parallelism(
            **{name: size for name, size in sizes.items() if name != "dp"},
            blocks=given.blocks,
            schedule=given.schedule,
            context=None if given.context is None else function_named(given.context, "--context"),
            experts=None if given.experts is None else function_named(given.experts, "--experts"),
            tp_plan=None if given.tp_plan is None else function_named(given.tp_plan, "--tp-plan"),
        )

    def cases(self) -> list[Case]:
        """Return the strategies and numbers of ranks to compare."""
        strategies = None if self.ranks.strategies == "all" else _words(self.ranks.strategies)
        if self.ranks.mesh is not None:
            sizes = sizes_of_mesh(self.ranks.mesh)
            return cases_of([sizes.get("dp", 1)], strategies, self.ranks.replicas, self.parallelism())
        try:
            ranks = [int(word) for word in _words(self.ranks.ranks)]
        except ValueError:
            raise ConfigError(f"--ranks {self.ranks.ranks}: must be whole numbers, such as 2,3,4.") from None
        return cases_of(ranks, strategies, self.ranks.replicas)

    def tolerance(self) -> Tolerance:
        """Return the allowed difference."""
        return Tolerance(self.verdict.atol, self.verdict.rtol)


_AXES = ("pp", "dp", "cp", "ep", "tp")


def sizes_of_mesh(text: str) -> dict[str, int]:
    """Return the sizes of the axes in `--mesh`."""
    sizes: dict[str, int] = {}
    for word in _words(text):
        name = word.rstrip("0123456789")
        size = word.removeprefix(name)
        if name not in _AXES or not size or name in sizes:
            raise ConfigError(
                f"--mesh {text}: {word} is not an axis with a size, or is a duplicate. Expected a list such as "
                f"pp2,dp2,tp2 of {', '.join(_AXES)}."
            )
        sizes[name] = int(size)
    return sizes


def policy_named(wrap: str) -> AutoWrapPolicy:
    """Return the wrap policy of `--wrap`."""
    if ":" in wrap:
        policy: AutoWrapPolicy = function_named(wrap, "--wrap")
        return policy
    if wrap.isdecimal():
        return partial(size_based_auto_wrap_policy, min_num_params=int(wrap))
    return ClassNames(tuple(_words(wrap)))


def _needed(option: str, spec: str | None) -> str:
    if spec is None:
        raise ConfigError(f"--{option} is missing. Pass a function, such as --{option} my_training:make_{option}.")
    return spec


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    if name is not None and name not in _DTYPES:
        raise ConfigError(f"--{option} {name}: unknown. Choose one of {', '.join(_DTYPES)}.")
    return None if name is None else _DTYPES[name]


def _words(listed: str) -> list[str]:
    return [word.strip() for word in listed.split(",") if word.strip()]
