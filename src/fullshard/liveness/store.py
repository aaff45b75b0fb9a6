"""A process group's store, with a timeout for every call.

If the host of a `TCPStore` does not respond, most calls wait until the system closes the connection after about 15
minutes, because the store's timeout applies only to missing keys. So a separate thread makes the calls, and is
abandoned if it gets no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist


class PatientStore:
    """A few calls of `store`. Each returns or raises within `patience_s` seconds.

    A call raises `RuntimeError`, like torch's own errors of the store, if the store does not respond. It raises
    immediately while an earlier call is pending. Use it from one thread at a time.
    """

    def __init__(self, store: dist.Store, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._requested: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]] | None] = SimpleQueue()
        # Started now, because a process that is exiting cannot start a thread to publish its end.
        Thread(target=self._ask, name="fullshard store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Set the value of `key`."""
        self._answer(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`."""
        return bytes(self._answer(self._store.get, key))

    def check(self, keys: list[str]) -> bool:
        """Return True if all of `keys` have been set."""
        return bool(self._answer(self._store.check, keys))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number stored at `key`, and return the sum."""
        return int(self._answer(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set `key` to `value` if it was `expected`, and return its value afterwards."""
        return bytes(self._answer(self._store.compare_set, key, expected, value))

    def close(self) -> None:
        """End the thread."""
        self._requested.put(None)

    def _answer(self, call: Callable[..., Any], *args: Any) -> Any:
        if not self._last.done():
            raise RuntimeError("the store of the process group has not answered yet")
        self._last = Future()
        self._requested.put((call, args, self._last))
        try:
            return self._last.result(self._patience_s)
        except TimeoutError as error:
            raise RuntimeError(f"the store of the process group did not answer in {self._patience_s:g} s") from error

    def _ask(self) -> None:
        while requested := self._requested.get():
            call, args, answer = requested
            try:
                answer.set_result(call(*args))
            except Exception as error:
                answer.set_exception(error)
