"""`run_ranks` for modules whose calls may share processes: a law a call, and one start of the ranks for all of them.

`on_ranks` makes a whole test run there. A test that holds a law about a process's beginning or end, or that looks at
what a whole process has done so far, takes `fullshard.testing.run_ranks` or `on_new_ranks` instead. What one call
changes for the next is not left to chance: ranks that are not as they were found are replaced, and so are those of a
call that failed.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard import testing
from fullshard.comm.collectives import Collectives
from fullshard.policy.switches import switches
from fullshard.testing.ranks import RankPool

T = TypeVar("T")

_open: dict[tuple[int, float, str], RankPool] = {}


def run_ranks(
    world: int, function: Callable[..., T], *args: Any, timeout: float = 300.0, backend: str = "gloo"
) -> list[T]:
    """What `fullshard.testing.run_ranks` says, but for "fresh processes"."""
    key = (world, timeout, backend)
    ranks = _open.setdefault(key, RankPool(world, timeout=timeout, backend=backend))
    answers = ranks.run(as_if_alone, function, args)
    if any(changed for _, changed in answers):
        ranks.end()
    return [value for value, _ in answers]


def on_ranks(world: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run on shared ranks, each with the same arguments.

    Args:
        world: The number of ranks, or the name of the argument that contains it.
        options: See `run_ranks`.
    """
    return _running_on(run_ranks, world, options)


def on_new_ranks(world: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run on new ranks, see `on_ranks` and `fullshard.testing.run_ranks`."""
    return _running_on(testing.run_ranks, world, options)


def _running_on(run: Callable[..., Any], world: int | str, options: dict[str, Any]) -> Callable[..., Any]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(**arguments: Any) -> None:
            ranks = arguments[world] if isinstance(world, str) else world
            run(ranks, _call_undecorated, test, arguments, **options)

        return test

    return decorate


def _call_undecorated(test: Any, arguments: dict[str, Any]) -> None:
    """Run the body of a decorated test. Its name is what ranks are sent, so they find the decorated test."""
    test.__wrapped__(**arguments)


def same_on_all_ranks(value: T) -> T:
    """Return `value`, if it is equal on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values
    return value


def in_fake_world(world: int) -> None:
    """Make this process rank 0 of a default process group of `world` ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def end_shared_ranks() -> None:
    """Stop them all; the next call starts new ones."""
    for ranks in _open.values():
        ranks.end()
    _open.clear()


atexit.register(end_shared_ranks)  # multiprocessing waits for its processes at the end of this one


# -- on a rank --------------------------------------------------------------------------------------------------------

_generator: list[torch.Tensor] = []  # its state in the first call
# Counters that every model increments. The package compares them only with their own earlier values.
_COUNTERS = frozenset({"fullshard.engine.late_params._registrations"})


def as_if_alone(function: Callable[..., T], args: Sequence[Any]) -> tuple[T, list[str]]:
    """What `function` returns, and what else it leaves changed behind."""
    if not _generator:
        _generator.append(torch.get_rng_state())
    torch.set_rng_state(_generator[0])
    found = surroundings()
    value = function(*args)
    gc.collect()  # models in cycles
    now = surroundings()
    # Values that were None may have become permanent objects, such as the watchdog of the process group.
    return value, [name for name, was in found.items() if now.get(name) != was and name not in _COUNTERS]


def surroundings() -> dict[str, object]:
    """Return state of the process, not of a model: settings of torch, switches of the package, and all of its code."""
    found: dict[str, object] = {
        "switches": repr(switches),
        "group": dist.is_initialized(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks": len(torch.nn.modules.module._global_forward_hooks),
        "step": id(torch.optim.Optimizer.step),
        "folder": os.getcwd(),
        "broken": any(collectives.broken is not None for collectives in kept_collectives()),
        "signals": [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)],
    }
    for module in [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "fullshard"]:
        for name, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                found[f"{module.__name__}.{name}"] = value
            elif callable(value) or is_frozen(value):
                found[f"{module.__name__}.{name}"] = id(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {
                    f"{module.__name__}.{name}.{item}": id(own) for item, own in vars(value).items() if callable(own)
                }
    return found


def kept_collectives() -> list[Collectives]:
    """Return the collectives of this process. They refuse all calls after the ranks have disagreed."""
    routes = sys.modules.get("fullshard.comm.routes")
    return [] if routes is None else list(routes._of_group._values.values())


def is_frozen(value: object) -> bool:
    """Return True for immutable values, which are replaced when they change."""
    made = getattr(type(value), "__dataclass_params__", None)
    return made is not None and bool(made.frozen)
