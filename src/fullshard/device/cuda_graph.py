"""The work of a step as a CUDA graph."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from fullshard.errors import ConfigError


class CudaGraph:
    """A CUDA graph of the current device. See `fullshard.graphs.Graph`."""

    backends = frozenset({"nccl"})

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def check(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("capture() needs a CUDA device, but torch does not find one. Call the step itself.")

    @contextmanager
    def queueing_warm_up(self) -> Iterator[None]:
        # Autograd and cuBLAS remember the stream of their first use, and the default stream cannot be captured.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def host_random_state(self) -> Any:
        return random.getstate(), torch.get_rng_state().numpy().tobytes()

    @contextmanager
    def noting_waits(self, note: Callable[[FrameType], object]) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            show, thread = warnings.showwarning, threading.get_ident()

            def note_or_show(message: Any, *args: Any, **kwargs: Any) -> None:
                if "synchronizing CUDA operation" not in str(message):
                    show(message, *args, **kwargs)
                elif threading.get_ident() == thread:  # other threads, such as a data loader's, may wait
                    note(sys._getframe(1))

            warnings.showwarning = note_or_show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def record(self, call: Callable[[], Any]) -> Any:
        graph, result, raised = torch.cuda.CUDAGraph(), None, None
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    result = call()
                except Exception as error:  # the capture must end first, which may raise a less helpful error
                    raised = error
        except Exception as error:
            raised = raised or error
        if raised is not None:
            raise raised
        self._graph = graph
        return result

    def replay(self) -> None:
        assert self._graph is not None, "a step was recorded"
        self._graph.replay()

    def drop(self) -> None:
        self._graph = None
