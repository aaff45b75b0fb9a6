"""Sketches made by other processes, as far as there are cores."""

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

__all__ = ["Workers"]


class Workers:
    """Sketches made by other processes, as far as there are cores; they are forked, and so know the subject.

    By this one, one after the other, where a fork cannot run backward: threads that autograd has for devices are
    missing in it. They start with the first backward beside a GPU, or after fake tensors of a torch built for CUDA.

    Args:
        question: what is asked; also of other machines, if they are asked so.
        tell: is told what is simulated.
    """

    def __init__(self, question: Question, tell: Callable[[str], None] = lambda element: None) -> None:
        self._question = question
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: list[tuple[Question, Program, Future[Any]]] = []
        self.tell = tell
        self.at_once = 1

    def __enter__(self) -> Workers:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if sys.platform == "linux" and cores > 1 and not self._question.subject.values:
            context = multiprocessing.get_context("fork")
            _ASKED.append(self._question)
            self.at_once = min(cores, 8)
            # what is there already is not looked through for garbage, which would copy it in each process
            self._pool = ProcessPoolExecutor(self.at_once, mp_context=context, initializer=gc.freeze)
            if self._pool.submit(_run_backward).exception() is not None:
                self._end()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end()

    def _end(self) -> None:
        """All processes; what is still asked for is made by this one."""
        pool, self._pool, self.at_once = self._pool, None, 1
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            _ASKED.pop()

    def __call__(self, question: Question, program: Program) -> Future[Any]:
        """What `sketch` makes a sketch of, with all read off it that a search asks for.

        Args:
            question: of the same subject, maybe on other machines.
            program: the one to sketch.
        """
        if self._pool is not None:
            ready = (future for asked, what, future in self._ahead if asked == question and what == program)
            return next(ready, None) or self._submit(self._pool, question, program)
        future: Future[Any] = Future()
        try:
            future.set_result(question.asked(program))
        except BaseException as error:
            future.set_exception(error)
        return future

    def ask_ahead(self, question: Question, program: Program) -> None:
        """Have made what will probably be asked for, if there are processes."""
        if self._pool is not None:
            self._ahead.append((question, program, self(question, program)))

    def _submit(self, pool: ProcessPoolExecutor, question: Any, program: Program) -> Future[Any]:
        sent = replace(question, subject=None, make_optimizer=None)  # whose functions cannot be sent
        return pool.submit(_sketched, sent, program)

    def sketch(self, future: Future[Any]) -> Sketch:
        """The sketch that a call has promised."""
        made = future.result()
        return made if isinstance(made, Sketch) else Sketch.unpacked(self._question.subject, made)


_ASKED: list[Question] = []  # by this process, of those that it forks


def _run_backward() -> None:
    """In a forked process: an error if it cannot."""
    torch.ones((), requires_grad=True).backward()


def _sketched(sent: Question, program: Program) -> Mapping[str, Any]:
    """In a forked process: a sketch that can be sent back."""
    forked = _ASKED[-1]
    question = replace(sent, subject=forked.subject, make_optimizer=forked.make_optimizer)
    made = question.asked(program)
    answer(question, made)
    _ = made.custom_operations
    return made.packed()
