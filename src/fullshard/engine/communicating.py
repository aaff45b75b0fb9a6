"""The context within which the engine queues communication of a unit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch

from fullshard._compat import set_grad_enabled
from fullshard.device.streams import Stream
from fullshard.tape.recorder import Origin, acting_for


class Communicating:
    """Context manager that queues work of `origin` on `stream`, without autograd. It records allocations as messages.

    It combines `torch.no_grad`, `Stream.queueing` and `acting_for` in one object for speed: each unit enters it several
    times per microbatch.
    """

    __slots__ = ("_acting", "_queueing", "_was_enabled")

    def __init__(self, origin: Origin, stream: Stream, *, is_recorded: bool) -> None:
        self._queueing: AbstractContextManager[object] | None = stream.queueing() if stream.is_stream else None
        self._acting = acting_for(origin, "messages") if is_recorded else None

    def __enter__(self) -> None:
        if self._acting is not None:
            self._acting.__enter__()
        self._was_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        if self._queueing is not None:
            try:
                self._queueing.__enter__()
            except BaseException as error:
                if isinstance(error, Exception):  # a KeyboardInterrupt comes after the stream was entered
                    self._queueing = None
                self.__exit__(type(error), error, error.__traceback__)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_grad_enabled(self._was_enabled)
        if self._queueing is not None:
            self._queueing.__exit__(kind, error, trace)
        if self._acting is not None:
            self._acting.__exit__(kind, error, trace)
