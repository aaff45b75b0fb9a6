"""Wrap policies, which select the submodules of a model that become units.

A unit is gathered and freed as one. So the choice of units determines peak memory and how well communication overlaps
with compute. Usually each transformer block is one unit. A policy makes this choice for an entire model:

    from fullshard.wrap import ModuleWrapPolicy

    fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

There are two kinds of policies, as in torch. A *policy object* decides once about each module. A *callable* `(module,
recurse, nonwrapped_numel) -> bool` is called twice. On the way down, with `recurse=True`, it returns whether the
children may become units at all. On the way up, with `recurse=False`, it returns whether the module itself becomes a
unit. In both calls, `nonwrapped_numel` is the number of elements that are not in a unit below. Further parameters are
bound with `functools.partial`:

    partial(size_based_auto_wrap_policy, min_num_params=20_000)

To select units manually while a model is being built, call `wrap(module)` inside of `enable_wrap(wrapper_cls=...)`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.engine.registry import has_forward
from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_callable

__all__ = [
    "AutoWrapPolicy",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "WrapPolicy",
    "always_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
    "wrapped_modules",
]


# ---------------------------------------------------------------------------------------------------- policy objects


class WrapPolicy(ABC):
    """A rule that decides for each submodule whether it becomes a unit, and with which arguments."""

    def descends(self, module: nn.Module, numel: int) -> bool:
        """Return True if modules below `module` may become units; `numel` elements in it are not in a unit yet.

        If False, `module` does not become a unit either, and belongs to the unit above.

        Args:
            module: The module to decide about.
            numel: The number of elements in `module` that are not in a unit yet.
        """
        return True

    @abstractmethod
    def overrides(self, module: nn.Module, numel: int) -> dict[str, Any] | None:
        """Return the arguments for `module` as a unit that differ from the root's; None if it does not become a unit.


        Args:
            module: The module to decide about.
            numel: The number of elements in `module` that are not in a unit yet.

        Raises:
            ConfigError: The function of a `CustomPolicy` returned neither a bool nor a dict.
        """


class ModuleWrapPolicy(WrapPolicy):
    """A policy that makes every instance of the given classes, including subclasses, a unit.

    It can also be called like a policy of the callable kind, for use in `or_policy`.

    Args:
        module_classes: The classes of the modules that become units.

    Raises:
        ConfigError: `module_classes` is not a collection of classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = _classes("ModuleWrapPolicy: module_classes", module_classes)

    def overrides(self, module: nn.Module, numel: int) -> dict[str, Any] | None:
        return {} if isinstance(module, self.module_classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(cls.__name__ for cls in self.module_classes)}}})"


class CustomPolicy(WrapPolicy):
    """A policy whose `lambda_fn(module)` returns False, True, or a dict of arguments that replace the root's.

    An empty dict means False, as in torch.

        def by_role(module):
            if isinstance(module, Head):
                return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
            return isinstance(module, Block)

        FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(by_role))

    Args:
        lambda_fn: The function of a module.

    Raises:
        ConfigError: `lambda_fn` returns anything else.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        check_callable("lambda_fn", lambda_fn, "a function of one module")
        self.lambda_fn = lambda_fn

    def overrides(self, module: nn.Module, numel: int) -> dict[str, Any] | None:
        answer = self.lambda_fn(module)
        if not isinstance(answer, bool | dict):
            raise ConfigError(
                f"CustomPolicy: the function returned {answer!r} for a {type(module).__name__}. Return False (no "
                "unit), True (a unit) or a dict of the arguments that differ for this unit."
            )
        if not answer:
            return None
        return dict(answer) if isinstance(answer, dict) else {}

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self.lambda_fn, '__qualname__', self.lambda_fn)})"


# --------------------------------------------------------------------------------------------------- callable policies


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True: every submodule is a unit.

    Args:
        *args: Ignored.
        **kwargs: Ignored.
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Return True for modules that `lambda_fn` returns True for, at any depth.

    Args:
        module: The module that the policy decides about.
        recurse: If True, return whether to visit the children of `module`; otherwise, whether `module` becomes a unit.
        nonwrapped_numel: The number of elements of parameters in `module` that are not in a unit yet.
        lambda_fn: Returns True for modules that become units.
    """
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Return True for every instance of `transformer_layer_cls`: the blocks of a transformer.

    Modules outside of the blocks (embeddings, the last norm and the head, including tied weights) stay in the root's
    unit.

    Args:
        module: The module that the policy decides about.
        recurse: If True, return whether to visit the children of `module`; otherwise, whether `module` becomes a unit.
        nonwrapped_numel: The number of elements of parameters in `module` that are not in a unit yet.
        transformer_layer_cls: The classes of the blocks.
    """
    return recurse or isinstance(
        module, _classes("transformer_auto_wrap_policy: transformer_layer_cls", transformer_layer_cls)
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Return True for the smallest modules of `min_num_params` elements or more, not counting the elements of units
    below.

    Args:
        module: The module that the policy decides about.
        recurse: If True, return whether to visit the children of `module`; otherwise, whether `module` becomes a unit.
        nonwrapped_numel: The number of elements of parameters in `module` that are not in a unit yet.
        min_num_params: The minimum size of a unit, in elements.
        force_leaf_modules: Classes of modules that are not divided, and belong to the unit above. By default this is
            `nn.MultiheadAttention`, which reads the weights of its children without calling their forward.
        exclude_wrap_modules: Classes of modules that do not become units, although modules in them may. By default
            these are `nn.ModuleList` and `nn.ModuleDict`, which have no forward that could gather a unit.
    """
    if nonwrapped_numel < min_num_params:
        return False
    if recurse:
        leaves = _FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return not isinstance(module, tuple(leaves))
    excluded = _EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(excluded))


_FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}
_EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}
# Scripts read these defaults from the function's attributes, to add a class to them.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = _FORCE_LEAF_MODULES  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = _EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]

default_auto_wrap_policy = size_based_auto_wrap_policy  # its name in early versions of torch's FSDP


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Return True if at least one of `policies`, which are callables, returns True.

    Args:
        module: The module that the policy decides about.
        recurse: If True, return whether to visit the children of `module`; otherwise, whether `module` becomes a unit.
        nonwrapped_numel: The number of elements of parameters in `module` that are not in a unit yet.
        policies: The policies.
    """
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


_or_policy = or_policy  # its name in torch, which scripts import although it is private


AutoWrapPolicy = WrapPolicy | Callable[..., bool]


@dataclass(frozen=True)
class _Callable(WrapPolicy):
    """A policy object that wraps a policy of the callable kind."""

    function: Callable[..., bool]

    def descends(self, module: nn.Module, numel: int) -> bool:
        return bool(self.function(module=module, recurse=True, nonwrapped_numel=numel))

    def overrides(self, module: nn.Module, numel: int) -> dict[str, Any] | None:
        return {} if self.function(module=module, recurse=False, nonwrapped_numel=numel) else None


# ------------------------------------------------------------------------------------------------ applying a policy


def wrapped_modules(
    root: nn.Module,
    policy: AutoWrapPolicy,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    separate: Mapping[type[nn.Module], Mapping[str, Any]] | None = None,
) -> dict[nn.Module, dict[str, Any]]:
    """Return the submodules of `root` that become units, children before parents, each with its arguments.

    `fully_shard` and `FullyShardedDataParallel` use this function. The result does not include the root, which is
    always a unit. A module with several parents appears once, at its first position. A container without a forward
    (`nn.ModuleList`) that a policy selects is left out, since it would never be gathered, provided that units below
    hold all its parameters.

    Args:
        root: The module whose submodules are considered. It is not changed.
        policy: A policy object, or a callable `(module, recurse, nonwrapped_numel) -> bool`.
        ignored_modules: Modules that do not become units, nor do their submodules.
        ignored_params: Parameters that do not count towards the size of a module.
        separate: Classes whose instances become units independently of the policy, with additional arguments.

    Raises:
        ConfigError: `policy` is not a policy, or it selects a container without a forward that holds parameters itself.
    """
    skipped = {inner for module in ignored_modules for inner in module.modules()}
    held = {*ignored_params, *(param for module in skipped for param in module.parameters(recurse=False))}
    walk = _Walk(_as_policy(policy), dict(separate or {}), {root, *skipped}, held)
    walk.visit_children(root, "", requested=walk.policy.descends(root, walk.free_numel(root)))
    return walk.units


def _as_policy(policy: AutoWrapPolicy) -> WrapPolicy:
    """Validate `policy`, and return it as a policy object."""
    if isinstance(policy, WrapPolicy):
        return policy
    if not callable(policy) or isinstance(policy, type):
        raise ConfigError(
            f"auto_wrap_policy: {policy!r} is not a wrap policy. To make all instances of a class units, pass "
            "ModuleWrapPolicy({TheClass}); other policies are in fullshard.wrap."
        )
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise ConfigError(
            f"auto_wrap_policy: {policy!r} cannot be called with module, recurse and nonwrapped_numel ({error}). "
            f"Bind its other parameters first: functools.partial(policy, name=value)."
        ) from error
    except ValueError:  # a builtin may have no signature to look at
        pass
    return _Callable(policy)


@dataclass
class _Walk:
    """One walk over a tree of modules, children before parents."""

    policy: WrapPolicy
    separate: Mapping[type[nn.Module], Mapping[str, Any]]
    done: set[nn.Module]  # ignored, or visited at another place
    held: set[nn.Parameter]  # ignored, or in a unit that has been found
    units: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    def visit_children(self, module: nn.Module, prefix: str, requested: bool) -> None:
        """Find the units below `module`. If not `requested`, only instances of the `separate` classes become units."""
        if not requested and not self.separate:
            return
        for name, child in module.named_children():
            if child not in self.done:
                self.done.add(child)
                self.visit(child, f"{prefix}{name}", requested)

    def visit(self, module: nn.Module, fqn: str, requested: bool) -> None:
        requested = requested and self.policy.descends(module, self.free_numel(module))
        self.visit_children(module, f"{fqn}.", requested)
        overrides = self.overrides(module, requested)
        if overrides is not None and self.can_be_unit(module, fqn):
            self.units[module] = overrides
            self.held.update(module.parameters())

    def overrides(self, module: nn.Module, requested: bool) -> dict[str, Any] | None:
        chosen = self.policy.overrides(module, self.free_numel(module)) if requested else None
        for cls, arguments in self.separate.items():
            if isinstance(module, cls):
                chosen = {**(chosen or {}), **arguments}
        return chosen

    def can_be_unit(self, module: nn.Module, fqn: str) -> bool:
        """Return True if `module` has a forward. If not, raise an error if it has parameters outside of units below."""
        if has_forward(module):
            return True
        if isinstance(module, nn.ParameterList | nn.ParameterDict) or self.free_numel(module) == 0:
            return False
        raise ConfigError(
            f"auto_wrap_policy: selects {fqn}, a {type(module).__name__}, which has no forward, so its "
            f"{self.free_numel(module):,} parameters would never be gathered. Let the policy select the modules in it, "
            "or define a forward."
        )

    def free_numel(self, module: nn.Module) -> int:
        """Return the number of elements of `module` that are not in a unit so far. Shared parameters count once."""
        return sum(param.numel() for param in module.parameters() if param not in self.held)


def _classes(
    argument: str, classes: Collection[type[nn.Module]] | Iterable[type[nn.Module]]
) -> tuple[type[nn.Module], ...]:
    found = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    if isinstance(classes, type) or not all(isinstance(cls, type) for cls in found):
        raise ConfigError(
            f"{argument} is {classes!r}. Pass a set of module classes, such as {{nn.TransformerEncoderLayer}}."
        )
    return found


# ----------------------------------------------------------------------------------------------------------- manually


@dataclass(frozen=True)
class _Wrapping:
    """The wrapper and its arguments within `enable_wrap`."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: dict[str, Any]


_wrapping: ContextVar[_Wrapping | None] = ContextVar("fullshard_wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Context manager that makes `wrap(module)` call `wrapper_cls(module, **wrapper_kwargs)`.

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_mesh=mesh):
            self.first = wrap(nn.Linear(5, 5))
            self.second = wrap(nn.Linear(5, 5), forward_prefetch=True)

    `wrapper_cls` may also be a function that takes a module, such as `fully_shard`. A nested context replaces the outer
    one until it ends. Each thread has a separate context.

    Args:
        wrapper_cls: A class or a function that wraps a module.
        **wrapper_kwargs: Its arguments. `wrap` can replace them.

    Raises:
        ConfigError: `wrapper_cls` cannot be called.
    """
    if not callable(wrapper_cls):
        raise ConfigError(
            f"enable_wrap: wrapper_cls is {wrapper_cls!r}. Pass FullyShardedDataParallel, fully_shard, or another "
            f"callable that takes a module and returns one."
        )
    token = _wrapping.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` according to the enclosing `enable_wrap`, or return it unchanged if there is none.

    So a model can mark its units where it creates them, and can still be created without sharding.

    Args:
        module: The module to wrap.
        wrap_overrides: Arguments of the wrapper that replace those given to `enable_wrap`.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.kwargs, **wrap_overrides})
