"""Counts of the operations of a call, and operations whose time cannot be derived from a trace.

An operation with a formula for its FLOPs takes the time of its FLOPs or of its bytes. Most others compute little per
byte: elementwise operations and reductions, which torch tags, and those in `_OF_MEMORY`. All others are *unknown*.
They are timed by their bytes too, which underestimates compute-heavy operations, such as decompositions of matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

import torch

from fullshard.dry.flops import has_formula
from fullshard.dry.run import taped
from fullshard.plan.timeline import Placed
from fullshard.tape.tape import Operation

_OF_LIBRARIES = (
    "prim",
    "prims",
    "fsdp",
    "fullshard",
    "inductor",
    "profiler",
)  # namespaces whose operations copy, query, or are fused
_OF_MEMORY = re.compile(
    "|".join(
        (
            *("copy", "clone", "cat$", "stack", "repeat", "roll", "flip", "tri[lu]", "split", "unbind", "fold", "diag"),
            *(
                "zero",
                "ones",
                "fill",
                "full",
                "arange",
                "linspace",
                "scalar_tensor",
                "eye",
                "rand",
                "resize",
                "one_hot",
            ),
            *(
                "normal_?$",
                "uniform_?$",
                "exponential_?$",
                "bernoulli",
                "dropout",
                "multinomial",
                "_to_cpu",
                "complex$",
            ),
            *("index", "gather", "scatter", "embedding", "select", "slice", "masked_", "take", "put_?$", "_chunk_cat"),
            *("sort", "topk", "kthvalue", "median", "cum(sum|prod|max|min)", "unique", "hist", "bincount", "bucketize"),
            *("softmax", "softplus", "elu", "shrink", "sigmoid", "swish", "mish", "hardtanh", "glu", "floor_divide"),
            *("norm(_backward|_stats.*|_elemt|_reduce)?$", "batch_norm", "weight_norm", "renorm", "fake_quantize"),
            *(
                "(?<!ctc_)loss",
                "cross_entropy",
                "pool",
                "pad",
                "upsample",
                "im2col",
                "col2im",
                "shuffle",
                "grid_sampler",
            ),
            *(
                "^_fused_",
                "_amp_",
                "_local_scalar_dense",
                "equal$",
                "_thnn_fused",
                "isin$",
                "aminmax$",
                "addr",
                "trace",
            ),
        )
    )
)
"""Parts of the names of operations without these tags whose bytes determine their time."""


def counted(call: Callable[[], object]) -> list[Operation]:
    """Return the operations of `call` on real tensors."""
    with taped(streams="cpu", values=True) as tape:
        call()
    return list(tape.of(Operation))


def is_unknown(name: str) -> bool:
    """Return True if the bytes of an operation may not determine its time, and there is no formula for its FLOPs."""
    namespace, _, operator = name.partition(".")
    packet = getattr(torch.ops.aten, operator, None)
    if packet is None or namespace != "aten":
        return namespace not in _OF_LIBRARIES
    if _is_of_memory(operator) or has_formula(packet):
        return False
    bare = operator.removeprefix("_foreach_").removesuffix("_")
    return bare == operator or is_unknown(f"aten.{bare}")


@cache
def _is_of_memory(operator: str) -> bool:
    """Return True if the bytes of an operation of torch determine its time, by its tags or its name."""
    packet = getattr(torch.ops.aten, operator)
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return bool(tags & {torch.Tag.pointwise, torch.Tag.reduction}) or _OF_MEMORY.search(operator) is not None


def unknown_seconds(placed: Iterable[Placed]) -> dict[str, float]:
    """Return the seconds of unknown operations, by name."""
    found: dict[str, float] = {}
    for item in placed:
        entry = item.entry
        if isinstance(entry, Operation) and not entry.flops and is_unknown(entry.name):
            found[entry.name] = found.get(entry.name, 0.0) + item.end - item.start
    return found
