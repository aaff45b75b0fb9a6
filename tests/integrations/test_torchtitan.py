"""torchtitan's own trainer with its imports swapped: the smallest case of the command that compares it with FSDP2."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fullshard.testing import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]


def trained(library: str, folder: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import torchtitan_client

    torchtitan_client.STEPS = 2
    return torchtitan_client.train(library, False, ["dp"], folder)["dp"]


def test_torchtitan_losses_and_norms_match_fsdp2_bitwise(tmp_path):
    """They are bitwise equal if FSDP2 adds gradients in rank order."""
    peer, own = (run_ranks(2, trained, name, str(tmp_path / name)) for name in ("fsdp2", "fullshard"))
    assert own == peer
    assert len(own[0]) == 2
