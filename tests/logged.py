"""Log messages, collected for tests."""

import logging


class Logged(logging.Handler):
    """A handler that keeps all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
