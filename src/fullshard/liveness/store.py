"""A process group's store, asked with patience that ends.

A `TCPStore` whose host has fallen silent keeps most callers waiting until the system gives up, which takes a quarter of
an hour: its time-out holds for keys that are missing, not for answers that do not come. So a thread asks, and is left
behind if it gets no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

__all__ = ["PatientStore"]


class PatientStore:
    """The calls of `store` that are used here, each of which returns or raises within `patience_s` seconds.

    Every call raises `RuntimeError`, as torch's errors of the store are, where the store is gone; and at once as long
    as an earlier one has not been answered. For one thread at a time.
    """

    def __init__(self, store: dist.Store, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._asked: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]] | None] = SimpleQueue()
        # Started now, since a process that is about to end, and wants to tell how, cannot start a thread any more.
        Thread(target=self._ask, name="fullshard store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Set `key`."""
        self._answer(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """What `key` was set to."""
        return bytes(self._answer(self._store.get, key))

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` have been set."""
        return bool(self._answer(self._store.check, keys))

    def add(self, key: str, amount: int) -> int:
        """What `key` has come to with `amount` added."""
        return int(self._answer(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """What `key` is, after it was set to `value` if it was as `expected`."""
        return bytes(self._answer(self._store.compare_set, key, expected, value))

    def close(self) -> None:
        """Ask no more."""
        self._asked.put(None)

    def _answer(self, call: Callable[..., Any], *args: Any) -> Any:
        if not self._last.done():
            raise RuntimeError("the store of the process group has not answered yet")
        self._last = Future()
        self._asked.put((call, args, self._last))
        try:
            return self._last.result(self._patience_s)
        except TimeoutError as error:
            raise RuntimeError(f"the store of the process group did not answer in {self._patience_s:g} s") from error

    def _ask(self) -> None:
        while asked := self._asked.get():
            call, args, answer = asked
            try:
                answer.set_result(call(*args))
            except Exception as error:
                answer.set_exception(error)
