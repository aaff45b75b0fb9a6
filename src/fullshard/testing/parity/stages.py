"""A pipeline of a user's model: the parameters of each stage, and stages that call the model itself.

The stages divide a list of blocks that are called in sequence, each with the output of the previous one. Any other
parameter belongs to the stage where it has gradients. To find it, the model is trained once with the graph cut before
each stage's first block. A stage then calls the full model: blocks of earlier stages return their input, its own first
block gets the received tensors, and the first block of the next stage ends the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard.testing.parity.recipe import Recipe

Units = Mapping[nn.Module, Mapping[str, Any]]  # modules with their options


@dataclass(frozen=True)
class Cut:
    """The division of a model into stages."""

    firsts: list[int]  # the first block of each stage
    stage_of: dict[str, int]  # by FQN of the parameter
    received: list[Tensor | None]  # the input of each stage, on the meta device
    returns_tuples: bool  # whether blocks return a tuple

    def norm(self, grads: Mapping[str, Tensor | None], norm_of: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the total gradient norm, computed by `norm_of` for each stage, and then over stages."""
        norms = []
        for stage in range(len(self.firsts)):
            own = [grad for name, grad in grads.items() if grad is not None and self.stage_of[name] == stage]
            norms.append(norm_of(own))
        return norms[0] if len(norms) == 1 else norm_of_all(norms)


def norm_of_all(norms: Sequence[Tensor]) -> Tensor:
    """Return the total norm from the norms of the stages."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


@torch.no_grad()
def clip(grads: Sequence[Tensor], norm: Tensor, largest: float) -> None:
    """Scale `grads`, whose total norm is `norm`, so that it is at most `largest`. 0 disables clipping."""
    coefficient = torch.clamp((largest or math.inf) / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(coefficient)


def find_cut(recipe: Recipe, model: nn.Module) -> Cut:
    """Return the division of `model` into pipeline stages, if any. `model` must not be used afterwards."""
    names = [name for name, _ in model.named_parameters()]
    if recipe.parallelism.pp == 1:
        return Cut([0], dict.fromkeys(names, 0), [None], returns_tuples=False)
    count = recipe.parallelism.stages
    blocks = _blocks_of(model, recipe)
    trial = _Trial(recipe.computing(model), blocks, firsts := [stage * len(blocks) // count for stage in range(count)])
    used = trial.run(recipe)
    stage_of = {}
    for name in names:
        stages = used[name] or {_stage_by_name(name, model, recipe.parallelism.blocks or "", firsts)}
        if len(stages) > 1:
            listed = " and ".join(str(stage) for stage in sorted(stages))
            raise ConfigError(
                f"pp: {name} is needed in stages {listed} of {count}, but a parameter can be in one stage only. Untie "
                "it (tie_word_embeddings=False in transformers). If it computes a tensor that bypasses the blocks, "
                "the model is not supported: leave pp out."
            )
        stage_of[name] = stages.pop()
    return Cut(firsts, stage_of, trial.received, trial.returns_tuples)


def _blocks_of(model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    name, count = recipe.parallelism.blocks or "", recipe.parallelism.stages
    try:
        found = model.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, nn.ModuleList | nn.Sequential):
        lists = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        ]
        raise ConfigError(
            f"pp: {name} of {type(model).__name__} is "
            f"{'missing' if found is None else 'a ' + type(found).__name__}. Pass the nn.ModuleList or "
            f"nn.Sequential of its blocks: {', '.join(lists) or 'it has none with several modules'}."
        )
    if len(found) < count:
        raise ConfigError(
            f"pp: {len(found)} blocks in {name} are too few for {count} stages. Use fewer ranks, or a schedule with "
            "one stage per rank."
        )
    return list(found)


def _stage_by_name(name: str, model: nn.Module, blocks: str, firsts: Sequence[int]) -> int:
    """Return the stage of a parameter that has no gradient: the stage of its block, or else the first stage."""
    if not name.startswith(f"{blocks}."):
        return 0
    number = list(model.get_submodule(blocks)._modules).index(name.removeprefix(f"{blocks}.").split(".")[0])
    return max(stage for stage, first in enumerate(firsts) if first <= number)


class _Trial:
    """One microbatch of the full model, with the graph cut before each stage except the first."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], firsts: Sequence[int]) -> None:
        self._model = model
        self._cuts: dict[int, tuple[Tensor, Tensor]] = {}  # by stage: the output of the previous stage, and the input
        self.received: list[Tensor | None] = [None for _ in firsts]
        self.returns_tuples = False
        for stage, first in enumerate(firsts):
            if stage:
                blocks[first].register_forward_pre_hook(self._cut_before(stage), prepend=True)
        blocks[0].register_forward_hook(self._note_result)

    def _cut_before(self, stage: int) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        def cut(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if not args or type(args[0]) not in (Tensor, nn.Parameter):
                given = f"a {type(args[0]).__name__}" if args else "nothing"
                raise ConfigError(
                    f"pp: the first block of stage {stage} gets {given} as its first positional argument. It must be "
                    "the tensor that the previous block returned."
                )
            if stage in self._cuts:
                raise ConfigError(f"pp: the first block of stage {stage} is called twice in a forward. Leave pp out.")
            leaf = args[0].detach().requires_grad_()
            self._cuts[stage] = args[0], leaf
            self.received[stage] = torch.empty_like(leaf, device="meta")
            return (leaf, *args[1:])

        return cut

    def _note_result(self, module: nn.Module, args: Any, result: Any) -> None:
        self.returns_tuples = isinstance(result, tuple)

    def run(self, recipe: Recipe) -> dict[str, set[int]]:
        """Return the stages in which each parameter has a gradient. Frozen parameters get gradients here."""
        params = dict(self._model.named_parameters())
        for param in params.values():
            param.requires_grad_(param.is_floating_point())
        used: dict[str, set[int]] = {name: set() for name in params}
        recipe.backward(self._model, 0)
        for stage in reversed(range(len(self.received))):
            for name, param in params.items():
                if param.grad is not None:
                    used[name].add(stage)
                    param.grad = None
            if stage:
                if stage not in self._cuts:
                    raise ConfigError(f"pp: the first block of stage {stage} was never called. Leave pp out.")
                made, leaf = self._cuts[stage]
                if made.requires_grad and leaf.grad is not None:
                    made.backward(leaf.grad)
        return used


class Stopped(Exception):  # noqa: N818  # not an error
    """The signal that the forward of a stage has ended."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class Stage(nn.Module):
    """The part of `model` in a stage, called with the received tensors and the number of a microbatch."""

    def __init__(self, recipe: Recipe, model: nn.Module, cut: Cut, number: int, units: Units) -> None:
        super().__init__()
        blocks = _blocks_of(model, recipe)
        ends = [*cut.firsts[1:], len(blocks)]
        self.own = blocks[cut.firsts[number] : ends[number]]
        self._is_first, self.is_last = number == 0, number == len(cut.firsts) - 1
        self.losses: dict[int, Tensor] = {}
        self._recipe, self._received = recipe, Tensor()
        for block in blocks:
            if block not in self.own:
                _strip(block, _stop if block in blocks[ends[number] :] else _tuple if cut.returns_tuples else _identity)
        _detach_parameters(model, [name for name, stage in cut.stage_of.items() if stage != number])
        around = [
            module
            for module in model.modules()
            if module not in self.own and any(block in module.modules() for block in blocks)
        ]
        self.units = {  # except those that the exception at the end of a stage's forward passes through
            item: options
            for item, options in units.items()
            if item not in around and any(True for _ in item.parameters())
        }
        self.model = model
        recipe.cast_inputs(model)

    def begin_with_received(self) -> None:
        """Pass the received tensors to the first block. Call this after that block has become a unit, so that this
        hook runs first.
        """

        def replace(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return (self._received, *args[1:])

        if not self._is_first:
            self.own[0].register_forward_pre_hook(replace, prepend=True)

    def forward(self, received: Tensor, *, number: Tensor) -> Tensor:
        """Return the input of the next stage, or the loss."""
        self._received = received
        try:
            loss = self._recipe.loss_of(self.model, int(number))
        except Stopped as stopped:
            return stopped.output
        finally:
            self._received = Tensor()
        self.losses[int(number)] = loss.detach()
        return loss.view(1)


def _strip(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Remove hooks, submodules, parameters and buffers, but not attributes, from a block of another stage."""
    for of_hooks in (block._forward_hooks, block._forward_pre_hooks):
        of_hooks.clear()
    for content in (block._modules, block._parameters, block._buffers):
        content.clear()
    block.forward = forward


def _stop(given: Tensor, *_: Any, **__: Any) -> Any:
    raise Stopped(given)


def _identity(given: Tensor, *_: Any, **__: Any) -> Tensor:
    return given


def _tuple(given: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    return (given,)


def _detach_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Replace parameters of other stages by their initial values. Modules before its own blocks use these."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue  # a part of a stripped block
        value = owner._parameters.pop(attribute, None)
        if value is not None:
            vars(owner)[attribute] = value.detach()
