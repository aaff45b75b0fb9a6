"""The runtime of one root: its units, and the drivers of their steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, cast

from torch import nn

from fullshard.device.accelerator import is_capturing
from fullshard.engine.comparison import check_ranks_agree
from fullshard.engine.hook_driver import HookDriver
from fullshard.engine.managed import number_parameters
from fullshard.engine.manual_driver import ManualDriver
from fullshard.engine.nested import keepers_among
from fullshard.engine.placements import placements_of
from fullshard.engine.registry import name_units, own_modules
from fullshard.engine.residency import INACTIVE
from fullshard.engine.root_state import RootState
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit import Unit
from fullshard.errors import RankMismatchError, StateError
from fullshard.liveness.watchdog import watch
from fullshard.tape.context import drop_if_stale
from fullshard.tape.recorder import Origin, Phase

_log = logging.getLogger(__name__)


class Driver(Protocol):
    """The interface that hooks of modules and parameters call in a step."""

    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Unshard `unit`, and return the inputs for its forward."""

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """Return the output of `module` for the caller."""

    def on_grad(self, unit: Unit, param: ShardedParam) -> None:
        """Record that autograd has accumulated the unsharded gradient of `param`."""


class Runtime:
    """The units below one root, and the drivers of their steps.

    Args:
        root: the outermost sharded module.
        units: its units, in the order of `root.modules()`.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit]) -> None:
        self.units = list(units)
        for unit in units:
            unit.is_root = root in unit.modules
        for unit, destination in placements_of(units).items():
            unit.shards.move_to(destination)
        name_units(root, units)
        for unit in units:
            if unit.residency.state in INACTIVE:
                unit.check_replacements()
        number_parameters(root)
        drop_if_stale()  # drops state of an earlier default process group
        watch()
        check_ranks_agree(units)
        for unit in units:
            for param_group in unit.param_groups:
                param_group.transports.reserve_tags()
        data_ranks = units[0].axes.ranks
        for number, unit in enumerate(units):
            unit.number, unit.runtime = number, self
            unit.data_ranks = data_ranks
            unit.keepers = keepers_among(module for _, module in own_modules(unit.modules))
        _warn_of_divisors(units, data_ranks)
        self.state = RootState(self.units)
        self.expected = self.state.expected
        self.scheduler = self.state.scheduler
        self.microbatches = self.state.microbatches
        self.activations = self.state.activations
        self.hook_driver = HookDriver(self.state, self.recover)
        self.manual_driver = ManualDriver(self.state)
        self.driver: Driver = self.hook_driver
        self._direct_gradients()

    def __del__(self) -> None:
        """Synchronize the streams if a step is unfinished, because its memory may be reused immediately."""
        with suppress(Exception):  # the interpreter may be ending
            state = self.state
            if (state.phase is not Phase.IDLE or self.manual_driver.is_open) and not is_capturing(state.device):
                state.streams.join()

    @property
    def phase(self) -> Phase:
        """The current phase of the root."""
        return self.state.phase

    @property
    def finalizes_manually(self) -> bool:
        """True if steps are finalized manually, see [Note: steps that are finalized manually]."""
        return self.driver is self.manual_driver

    def finalize_manually(self, enabled: bool, *, had_backward: bool = True) -> None:
        """Set whether steps are finalized manually or by hooks.

        The gradients of a step that was not finalized are dropped if it `had_backward`.
        """
        if self.manual_driver.is_open:
            self.state.phase = Phase.BACKWARD if had_backward else Phase.FORWARD
        if self.state.is_interrupted:
            self.recover()
        self.driver = self.manual_driver if enabled else self.hook_driver
        self._direct_gradients()

    def _direct_gradients(self) -> None:
        """Make the gradient hooks of parameters call the current driver."""
        for unit in self.units:
            on_grad = partial(self.driver.on_grad, unit)
            for param in unit.params:
                param.on_grad = on_grad

    def finalize_backward(self) -> None:
        """Finalize a step that is finalized manually."""
        if not self.finalizes_manually:
            raise StateError(
                f"finalize_backward of {type(self.units[0].module).__name__}: backward finalizes itself, because "
                "manual finalization is disabled. Call set_manual_backward_finalization(True) before the first "
                "forward of the step."
            )
        self.manual_driver.finalize_backward()

    def start_unshard(self, unit: Unit) -> None:
        """Start to gather `unit` for the user. Between steps, make later writes to its shards wait for the gather."""
        self.scheduler.start_unshard(unit, Phase.IDLE)
        unit.residency.is_used_without_forward = True
        unit.residency.is_unsharded_manually = True
        if self.state.phase is Phase.IDLE and not self.manual_driver.is_open:
            self.scheduler.order_writes_after(unit)

    def recover(self) -> None:
        """Reset to idle after an exception in a forward or backward. Its gradients are dropped."""
        state = self.state
        state.activations.recover()
        state.disks.forget()
        state.stack.clear()
        self.hook_driver.reset()
        state.scheduler.forget_deferred_frees()
        state.reductions.abandon()
        self.manual_driver.reset()
        state.expected.open.clear()
        for unit in self.units:
            unit.residency.users = 0
            unit.gradients.arrived.clear()
            unit.finished_modules.clear()
            if state.phase is Phase.BACKWARD:
                unit.gradients.drop()
            state.scheduler.reshard(unit, Phase.IDLE)
        state.phase = Phase.IDLE

    def forget(self) -> None:
        """Reset to idle and drop all gradients, because the computation so far was only a trial."""
        self.recover()
        for unit in self.units:
            unit.gradients.abandon()

    def abandon(self) -> None:
        """Undo the current step. This is a collective: every rank calls it.

        Communication that all ranks have started is completed. If ranks have started different operations, the
        collectives are renewed.
        """
        collectives = dict.fromkeys(item for unit in self.units for of in unit.collectives.values() for item in of.each)
        with suppress(RankMismatchError):
            self.recover()
        for collective in collectives:
            if collective.broken is None:
                with suppress(RankMismatchError):
                    collective.barrier("abandon_step", origin=Origin("", Phase.IDLE))
        broken = [collective for collective in collectives if collective.broken is not None]
        if broken:
            for unit in self.units:
                unit.residency.forget_gather()
            for item in broken:
                item.renew()
            self.recover()
        for unit in self.units:
            unit.gradients.abandon()
        self.microbatches.begin_again()


def runtime_or_none(unit: Unit) -> Runtime | None:
    """Return the runtime that drives `unit`; None before the first forward of its root."""
    return cast("Runtime | None", unit.runtime)


def _warn_of_divisors(units: Sequence[Unit], data_ranks: frozenset[int]) -> None:
    """Log a warning if the user has not set a gradient divisor and may expect a different one."""
    found = [
        (unit, group)
        for unit in units
        if unit.settings.gradient_divisor is None
        for group in unit.param_groups
        if group.may_be_averaged_over_own_ranks(data_ranks)
    ]
    if not found:
        return
    unit, group = found[0]
    fqn = f"{unit.name}.{group.params[0].fqn}".removeprefix(".")
    others = sum(len(group.params) for _, group in found) - 1
    own, all_ranks = group.plan.axes.world, len(data_ranks)
    _log.warning(_FEWER_RANKS_THAN_ROOT, fqn, others, own, all_ranks, all_ranks, own, unit.name or "the root", own)


_FEWER_RANKS_THAN_ROOT = (
    "%s (and %d parameters like it) is sharded over %d ranks, and the root over %d. The sum of its gradients is "
    "divided by %d. This is right if these ranks exchange tokens, as experts do. torch's FSDP divides by %d. Call "
    "set_gradient_divide_factor on %s to choose a divisor, which stops this warning: %d for the numbers of torch."
)
