"""Prediction of the next events: pending backward passes, and the order of units as in an earlier microbatch.

[Note: forwards that wait for their backward]
A loss that is computed in chunks calls the head many times outside of the model's forward, each time followed by a
backward. The backward of the model comes last. So a backward that reaches some outermost forwards does not end the
others: their saved tensors remain, and their units are expected next. A forward stops waiting when a backward reaches
any of its calls. It also stops when its backward was skipped, that is, if the forward of the root or another forward
of the same unit begins after another backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.call import OpenForward
from fullshard.engine.order import OrderTracker
from fullshard.engine.unit import Unit

_MOST_OPEN = 256  # forwards that wait for a backward: enough for any loss in chunks
_MOST_ORDERS = 16  # backward orders that are remembered


class ExpectedOrder:
    """Open forwards of a root, which wait for their backward, and the expected order of units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.open: list[OpenForward] = []  # oldest first
        self.forward = OrderTracker()
        self.backward = OrderTracker()
        self.forward_order: Sequence[int] = ()  # the numbers of units in the order of the last forward
        self.backward_order: tuple[int, ...] = ()
        self._orders: dict[int, tuple[int, ...]] = {}  # the forward order by the number of the outermost unit
        self._backward_orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # by the units of open forwards
        self._left: tuple[int, ...] = ()  # the units of open forwards when the current backward began

    def close_skipped(self, top: Unit, serial: int) -> None:
        """Stop expecting the backward of forwards that a backward has skipped, when `top` begins another forward.

        `serial` is the number of the last backward.
        """
        self.open = [item for item in self.open if item.serial == serial or not (top.is_root or top is item.top)]

    def begin_forward(self, top: Unit, serial: int) -> None:
        """Record that the outermost forward of `top` begins, after the backward with number `serial`."""
        self.forward = OrderTracker(self._orders.get(top.number, ()))
        self.open = [*self.open[1 - _MOST_OPEN :], OpenForward(top, serial)]

    def end_forward(self, top: Unit) -> None:
        """Record that the outermost forward of `top` is over."""
        if not self.open[-1].left:  # no unit needs a backward
            self.open.pop()
        self.forward_order = tuple(self.forward.visited)
        self._orders[top.number] = self.forward_order

    def begin_backward(self) -> None:
        """Record that a backward begins."""
        self._left = tuple(unit.number for forward in self.open for unit in forward.left if unit.param_groups)
        self.backward = OrderTracker(self._backward_orders.get(self._left, self._left[::-1]))

    def end_backward(self) -> None:
        """Record that the backward is over."""
        self.backward_order = tuple(self.backward.visited)
        if self._left not in self._backward_orders and len(self._backward_orders) == _MOST_ORDERS:
            del self._backward_orders[next(iter(self._backward_orders))]
        self._backward_orders[self._left] = self.backward_order

    def arrive_at(self, forward: OpenForward | None) -> None:
        """Record that the current backward has reached a call of `forward`."""
        if forward in self.open:
            self.open.remove(forward)

    def awaits_backward_of(self, unit: Unit) -> bool:
        """Return True if a pending backward needs `unit`."""
        return any(left.uses(unit) for forward in self.open for left in forward.left)

    def to_read_ahead(self, unit: Unit, order: OrderTracker, chosen: list[Unit] | None) -> list[Unit]:
        """Return the units after those that `to_prefetch` returns. Their shards can already be read from the disk."""
        depth = unit.options.prefetch_depth
        return [] if chosen is not None else [self._units[number] for number in order.following(depth + 1)[depth:]]

    def to_prefetch(self, unit: Unit, order: OrderTracker, chosen: list[Unit] | None) -> list[Unit]:
        """Record `unit` in `order`, and return the units to prefetch: those `chosen` by the user, or the next ones."""
        if unit.param_groups:  # a unit without parameters is not gathered, and may be called on some ranks only
            order.record(unit.number)
        if chosen is not None:
            return chosen
        return [*map(self._units.__getitem__, order.following(unit.options.prefetch_depth))]
