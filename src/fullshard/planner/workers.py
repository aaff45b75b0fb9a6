"""Worker processes that create sketches, one per core, up to eight."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from fullshard.planner.candidates import Program
from fullshard.planner.found import answer
from fullshard.planner.question import Question
from fullshard.planner.sketch import Sketch


class Workers:
    """A pool of forked processes that create sketches, one per core, up to eight. They share the subject.

    If a forked process cannot run backward, this process makes the sketches sequentially. A fork lacks the autograd
    threads for devices. These start with the first backward if there is a GPU, or after the use of fake tensors with a
    CUDA build of torch.
    """

    def __init__(self, question: Question, on_progress: Callable[[str], None] = lambda element: None) -> None:
        self._question = question
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: list[tuple[Question, Program, Future[Any]]] = []
        self.on_progress = on_progress
        self.at_once = 1

    def __enter__(self) -> Workers:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if sys.platform == "linux" and cores > 1 and not self._question.subject.values:
            context = multiprocessing.get_context("fork")
            _REQUESTED.append(self._question)
            self.at_once = min(cores, 8)
            # garbage collection skips existing objects, whose memory it would otherwise copy in each process
            self._pool = ProcessPoolExecutor(self.at_once, mp_context=context, initializer=gc.freeze)
            if self._pool.submit(_run_backward).exception() is not None:
                self._end()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end()

    def _end(self) -> None:
        """End all processes. This process creates the remaining sketches."""
        pool, self._pool, self.at_once = self._pool, None, 1
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            _REQUESTED.pop()

    def __call__(self, question: Question, program: Program) -> Future[Any]:
        """Start to create a sketch, with all derived values that a search needs."""
        if self._pool is not None:
            ready = (future for requested, what, future in self._ahead if requested == question and what == program)
            return next(ready, None) or self._submit(self._pool, question, program)
        future: Future[Any] = Future()
        try:
            future.set_result(question.requested(program))
        except BaseException as error:
            future.set_exception(error)
        return future

    def ask_ahead(self, question: Question, program: Program) -> None:
        """Start to create a sketch that will probably be needed, if there are processes."""
        if self._pool is not None:
            self._ahead.append((question, program, self(question, program)))

    def _submit(self, pool: ProcessPoolExecutor, question: Any, program: Program) -> Future[Any]:
        sent = replace(question, subject=None, make_optimizer=None)  # the user's functions cannot be pickled
        return pool.submit(_sketched, sent, program)

    def sketch(self, future: Future[Any]) -> Sketch:
        """Wait for a call and return its sketch."""
        made = future.result()
        return made if isinstance(made, Sketch) else Sketch.unpacked(self._question.subject, made)


_REQUESTED: list[Question] = []  # set by this process for those that it forks


def _run_backward() -> None:
    """Run backward in a forked process. It raises an error if this is not possible."""
    torch.ones((), requires_grad=True).backward()


def _sketched(sent: Question, program: Program) -> Mapping[str, Any]:
    """Create a sketch in a forked process and return it in a form that can be sent to the parent."""
    forked = _REQUESTED[-1]
    question = replace(sent, subject=forked.subject, make_optimizer=forked.make_optimizer)
    made = question.requested(program)
    answer(question, made)
    return made.packed()
