"""Measurements on several ranks: processes that run a module's `main`. The first process prints the results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist


def found_by_ranks(module: str, world: int, arguments: Sequence[str], *, patience_s: float) -> dict[str, Any]:
    """Run `python -m module FOLDER WORLD RANK *arguments` for each rank, and return the results of rank 0.

    A rank that fails prints the reason to stderr. After a failure or a timeout of `patience_s`, all ranks are killed.
    """
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, folder, str(world)]
        others = [
            subprocess.Popen([*command, str(rank), *arguments], env=environment, stdout=subprocess.DEVNULL)
            for rank in range(1, world)
        ]
        try:
            ran = subprocess.run(
                [*command, "0", *arguments],
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=patience_s,
            )
        finally:
            for other in others:
                other.kill()
                other.wait()
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def as_rank(backend: str, folder: str, world: int, rank: int, measure: Callable[[], dict[str, Any]]) -> None:
    """Run `measure` as one rank and print its result as JSON. Exit immediately: other ranks may still be running."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    found = measure()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
