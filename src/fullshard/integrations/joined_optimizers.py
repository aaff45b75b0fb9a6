"""Several optimizers of one model as one, because a checkpoint has one optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from fullshard.errors import ConfigError


def joined(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Return one optimizer that represents all `optimizers`; None if there are none."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    return cast(Optimizer, _Joined(optimizers))


class _Joined:
    """The parts of an optimizer that saving and loading need."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        params = [id(param) for group in self.param_groups for param in group["params"]]
        if len(params) > len(set(params)):
            raise ConfigError(
                "two optimizers update the same parameter, but a checkpoint contains one state per parameter. Pass "
                "each parameter to one optimizer only, or save only weights."
            )

    @property
    def joined_optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, in order."""
        return self._optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers))

    @property
    def state(self) -> dict[Tensor, Any]:
        """The states of all optimizers, by parameter."""
        return {param: values for optimizer in self._optimizers for param, values in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, with consecutively numbered parameters."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for start, optimizer in self._numbered():
            state_dict = optimizer.state_dict()
            state |= {start + number: values for number, values in state_dict["state"].items()}
            groups += [
                {**group, "params": [start + item for item in group["params"]]} for group in state_dict["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a dict from `state_dict`: each optimizer loads its part."""
        groups = iter(state_dict["param_groups"])
        for start, optimizer in self._numbered():
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = {number for group in own for number in group["params"]}
            state = {number - start: item for number, item in state_dict["state"].items() if number in numbers}
            own = [{**group, "params": [item - start for item in group["params"]]} for group in own]
            optimizer.load_state_dict({"state": state, "param_groups": own})

    def _numbered(self) -> Iterator[tuple[int, Optimizer]]:
        start = 0
        for optimizer in self._optimizers:
            yield start, optimizer
            start += sum(len(group["params"]) for group in optimizer.param_groups)
