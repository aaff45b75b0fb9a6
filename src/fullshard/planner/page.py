"""A page about a plan."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.planner.report import WhatIf
from fullshard.planner.search import Plan


def page(plan: Plan, changes: Sequence[WhatIf]) -> str:
    return ""
