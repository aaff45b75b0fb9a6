"""Log messages and operations, collected for tests."""

import logging
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Logged(logging.Handler):
    """A handler that keeps all messages; as a context manager, those of the package from `level` on."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("fullshard").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fullshard").removeHandler(self)


class Operations(TorchDispatchMode):
    """The names of the operations that are dispatched, of those for which `keeps(operation, types)` is True."""

    def __init__(self, keeps: Callable[[Any, Any], bool] = lambda func, types: True) -> None:
        super().__init__()
        self.keeps = keeps
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.keeps(func, types):
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))
