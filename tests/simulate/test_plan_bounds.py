"""Pruning does not change the result of a search: with any memory, it equals the result of the full search."""

from __future__ import annotations

from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.plan.hardware import hardware
from fullshard.planner.bounds import NO_MATTER
from fullshard.planner.candidates import Cluster, Program
from fullshard.planner.question import Question
from fullshard.planner.search import _searched
from fullshard.planner.sketch import Sketch, SketchFigures
from fullshard.planner.subject import gpt_subject
from fullshard.planner.workers import Workers
from fullshard.train.settings import ModelSettings

TWO_HOSTS = Cluster(hardware=hardware("h100-80"), hosts=2, per_host=4)
QUESTION = Question(
    subject=gpt_subject(ModelSettings(size="nano", layers=12), seq=64),
    cluster=TWO_HOSTS,
    global_batch=32,
    strategies=("ddp", "zero1", "zero2", "zero3", "hsdp"),
    checkpointing=("none", "every-1"),
    most=0,
)


@cache
def sketches() -> dict[Program, Sketch]:
    with Workers(QUESTION) as ask:
        futures = {program: ask(QUESTION, program) for program in QUESTION.programs()}
        return {program: ask.sketch(future) for program, future in futures.items()}


@cache
def figures() -> dict[Program, list[SketchFigures]]:
    return {item: [made.figures(*shape) for shape in QUESTION.shapes_of(item)] for item, made in sketches().items()}


class Ready(Workers):
    """Workers that return existing sketches, since questions differ only in memory."""

    def __init__(self, at_once: int) -> None:
        super().__init__(QUESTION)
        self.at_once = at_once

    def __call__(self, question: Question, program: Program) -> Future[Any]:
        made = copy(sketches()[program])
        made.cluster = question.cluster
        future: Future[Any] = Future()
        future.set_result(made)
        return future


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    place=st.floats(0, 1),
    times=st.floats(0.99, 1.2),
    kept=st.sets(st.sampled_from(QUESTION.checkpointing), min_size=1),
    chosen=st.sets(st.sampled_from([("ddp",), ("zero1", "zero2"), ("zero3",), ("hsdp",)]), min_size=1),
    at_once=st.integers(1, 4),
)
def test_pruned_search_matches_full_search(place, times, kept, chosen, at_once):
    """Best step times agree within NO_MATTER, with a memory margin if one exists. Programs left out do not fit."""
    needed = sorted(item.needed_bytes for each in figures().values() for item in each)
    usable = needed[int(place * (len(needed) - 1))] * times
    machine = replace(TWO_HOSTS.hardware, memory_bytes=usable, host_memory_bytes=0.0)
    cluster = replace(TWO_HOSTS, hardware=machine, share=1.0)
    question = replace(QUESTION, cluster=cluster, checkpointing=sorted(kept), strategies=sorted(chain(*chosen)))
    of_all = {program: figures()[program] for program in question.programs()}
    every = [item for each in of_all.values() for item in each if item.needed_bytes <= usable]
    with_margin = [item for item in every if item.needed_bytes <= cluster.safe_bytes]
    if not every:
        return
    best_s = min(item.step_s for item in with_margin or every)
    plan = _searched(question, question.programs(), Ready(at_once))
    assert plan.best is not None
    for found in plan.found:
        needs = [item.needed_bytes for item in of_all[found.sketch.program]]
        assert found.has_margin == (min(needs) <= cluster.safe_bytes)
    assert plan.best.has_margin == bool(with_margin)
    assert NO_MATTER * (plan.with_margin or plan.fitting)[0].figures.step_s <= best_s
    too_large = sum(min(item.needed_bytes for item in each) > usable for each in of_all.values())
    assert sum(count for reason, count in plan.left_out.items() if "fit" in reason) <= too_large
    assert len(plan.found) + sum(plan.left_out.values()) == len(of_all)
