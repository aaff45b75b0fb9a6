"""Without some Linux features, ranks communicate over gloo and unknown measurements are None. Results are equal."""

from __future__ import annotations

import builtins
import errno
import io
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import chain, inputs, take_step
from torch.distributed.device_mesh import DeviceMesh

from fullshard import fully_shard
from fullshard.checkpoint.keeper import keeps_folders
from fullshard.device.host_memory import host_room
from fullshard.disk.folder import mount_of
from fullshard.plan.memory_used import process_bytes
from fullshard.report.usage import UsageMeter
from fullshard.testing import run_ranks

FEATURES = ("memfd_create", "/proc", "/dev/shm")
SUBSETS = [subset for size in range(len(FEATURES) + 1) for subset in combinations(FEATURES, size)]


@contextmanager
def missing(features: tuple[str, ...]) -> Iterator[None]:
    """Simulate a system without the function and the folders named in `features`."""
    folders = tuple(name for name in features if name.startswith("/"))

    def without(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path).startswith(folders):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return call(path, *args, **kwargs)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "readlink")):
            patch.setattr(module, name, without(getattr(module, name)))
        if "memfd_create" in features:
            patch.delattr(os, "memfd_create")
        yield


def learn(features: tuple[str, ...]) -> tuple[list[torch.Tensor], list[str]]:
    """Return the parameters after two steps, and the lines that were logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fullshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with missing(features):
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # a new group, whose ranks have not communicated yet
        model = chain(lambda module: fully_shard(module, mesh=mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            take_step(optimizer, model(inputs(step)).square().mean())
        known = [host_room(), process_bytes(), mount_of(Path()), UsageMeter(torch.device("cpu"))().starved_s]
        assert all((value is None) == ("/proc" in features) for value in known), known
        assert keeps_folders(os.getppid()) == {"/proc", "/dev/shm"}.isdisjoint(features)
    logger.removeHandler(handler)
    return [param.full_tensor().detach() for param in model.parameters()], lines


@on_new_ranks(2)
def test_results_match_without_linux_features_and_fallback_is_logged_once():
    results = [learn(features) for features in SUBSETS]
    expected, lines = results[0]
    assert lines == []
    for features, (values, lines) in zip(SUBSETS[1:], results[1:], strict=True):
        assert all(map(torch.equal, values, expected)), features
        shares = {"memfd_create", "/proc"}.isdisjoint(features)
        assert [line.partition(":")[0] for line in lines] == (
            [] if shares else ["ranks (0, 1) communicate over gloo without shared memory"]
        ), features


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.slow
def test_ranks_start_without_a_fork_server(monkeypatch, caplog):
    get_context = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: {"spawn": get_context("spawn")}[method])
    with caplog.at_level(logging.INFO, "fullshard"):
        assert run_ranks(2, rank_and_world) == [(0, 2), (1, 2)]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["this system has no fork server"]
