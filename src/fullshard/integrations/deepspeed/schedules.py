"""Learning rate schedules with the names, arguments and values of DeepSpeed's schedulers.

Each schedule computes a factor or a rate from a step number, and `Schedule` sets it in the optimizer. The only state is
`last_batch_iteration`, which counts the calls of `step`, starting at -1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fullshard.errors import ConfigError

Rate = float | Sequence[float]


class Schedule(ABC):
    """The base class of all schedules: a step number, and rates that are set in the groups of an optimizer."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the rate of each group after `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """Return the current rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to the given step number, and set the rates of this step in the optimizer."""
        advanced = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = advanced
        self._put(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from another step. The optimizer already has its rates."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _put(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each_group(self, value: Rate, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise ConfigError(
                f"{type(self).__name__}({name}={value!r}): the optimizer has {groups} parameter groups. Pass one "
                "number, or one for each group."
            )
        return list(value)


def _positive(schedule: Schedule, **steps: Any) -> None:
    for name, count in steps.items():
        if type(count) is not int or count < 1:
            raise ConfigError(f"{type(schedule).__name__}({name}={count!r}): expected an integer number of steps.")


class _Warmup(Schedule):
    """The common base class of the three schedules with a warm-up."""

    def __init__(
        self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _positive(self, warmup_num_steps=warmup_num_steps)
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f"{type(self).__name__}(warmup_type={warmup_type!r}): choose log or linear.")
        self._warm_steps = max(2, warmup_num_steps)
        self._grows_by_log = warmup_type == "log"

    def _warmed(self) -> float | None:
        """Return the progress of the warm-up, from 0 to 1; None after it has ended."""
        done = self.last_batch_iteration
        if done >= self._warm_steps:
            return None
        return math.log(done + 1) / math.log(self._warm_steps) if self._grows_by_log else done / self._warm_steps


class WarmupLR(_Warmup):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr` (None: the rate of each group), then a constant rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        highest = self.get_last_lr() if warmup_max_lr is None else warmup_max_lr
        self._lowest = self._each_group(warmup_min_lr, "warmup_min_lr")
        self._highest = self._each_group(highest, "warmup_max_lr")
        if last_batch_iteration == -1:
            self._put(self.get_lr())

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self._lowest
        warmed = self._warmed()
        factor = self._after() if warmed is None else warmed
        return [low + (high - low) * factor for low, high in zip(self._lowest, self._highest, strict=True)]

    def _after(self) -> float:
        """Return the position between the lowest and the highest rate after the warm-up, from 0 to 1."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A `WarmupLR` schedule, followed by a linear decay to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        left = self._total_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self._total_steps - self._warm_steps))


class WarmupCosineLR(_Warmup):
    """Factors of each group's rate: from `warmup_min_ratio` to 1, then along half a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self._total_steps = total_num_steps
        self._first_ratio = warmup_min_ratio
        self._last_ratio = cos_min_ratio
        self._own = self.get_last_lr()
        if last_batch_iteration == -1:
            self._put(self.get_lr())

    def get_lr(self) -> list[float]:
        ratio = 0.0 if self.last_batch_iteration < 0 else self._ratio()
        return [rate * ratio for rate in self._own]

    def _ratio(self) -> float:
        warmed = self._warmed()
        if warmed is not None:
            return self._first_ratio + warmed * (1 - self._first_ratio)
        done = self.last_batch_iteration - self._warm_steps + 1
        progress = min(1.0, done / max(1, self._total_steps - self._warm_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._last_ratio + (1 - self._last_ratio) * cosine)


class LRRangeTest(Schedule):
    """A schedule that increases the learning rate linearly, to search for its upper limit.

    It starts at `lr_range_test_min_lr`, and adds `lr_range_test_step_rate` times this rate every
    `lr_range_test_step_size` steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _positive(self, lr_range_test_step_size=lr_range_test_step_size)
        self._lowest = self._each_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self._interval = lr_range_test_step_size
        self._rate = lr_range_test_step_rate
        self._in_stairs = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._put(self._lowest)

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self._interval
        if self._in_stairs:
            intervals = math.floor(intervals)
        return [rate * (1 + self._rate * intervals) for rate in self._lowest]


class OneCycle(Schedule):
    """A cycle from `cycle_min_lr` up to `cycle_max_lr` and down again, followed by a decay.

    Momentum moves in the opposite direction. It is the first value of the optimizer's `betas`; the second becomes 0.99.
    The momentum of an optimizer without `betas` does not change.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _positive(self, cycle_first_step_size=cycle_first_step_size)
        self._up = cycle_first_step_size
        self._down = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._stairs_up = cycle_first_stair_count
        self._stairs_down = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._decay_interval = decay_step_size
        self._decay_lr, self._decay_momentum = decay_lr_rate, decay_mom_rate
        self._lowest = self._each_group(cycle_min_lr, "cycle_min_lr")
        self._highest = self._each_group(cycle_max_lr, "cycle_max_lr")
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        self._least = self._each_group(cycle_min_mom, "cycle_min_mom")
        self._most = self._each_group(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._put(self._lowest)
            self._put_momentum(self._least)

    def get_lr(self) -> list[float]:
        decayed = self._decayed()
        if decayed is None:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self._lowest, self._highest, strict=True)]
        return [low / (1 + self._decay_lr * decayed) for low in self._lowest]

    def get_mom(self) -> list[float] | None:
        """Return the momentum of each group after `last_batch_iteration`; None if it is not cycled."""
        if not self._cycles_momentum:
            return None
        decayed = self._decayed()
        if decayed is None:
            height = self._height()
            return [most - (most - least) * height for least, most in zip(self._least, self._most, strict=True)]
        return [most * (1 + self._decay_momentum * decayed) for most in self._most]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        self._put_momentum(self.get_mom())

    def _put_momentum(self, momentums: Sequence[float] | None) -> None:
        if momentums is None or not self._cycles_momentum:
            return
        for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
            group["betas"] = (momentum, 0.99)

    def _decayed(self) -> float | None:
        """Return the decay intervals since the end of the cycle, as a fraction; None within the cycle."""
        after = self.last_batch_iteration - (self._up + self._down)
        if after < 0:
            return None
        return (after + 1) / self._decay_interval if self._decay_interval else 0.0

    def _height(self) -> float:
        """Return the position of the cycle between the lowest and the highest rate, from 0 to 1."""
        position = (self.last_batch_iteration + 1) % (self._up + self._down)
        if position <= self._up:
            climbed, way, stairs = position, self._up, self._stairs_up
        else:
            climbed, way, stairs = self._up + self._down - position, self._down, self._stairs_down
        return math.floor(climbed * stairs / way) / stairs if stairs else climbed / way


SCHEDULES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
