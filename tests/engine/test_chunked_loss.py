"""Chunked loss: the head is called many times outside of the model's forward, but gathered and reduced once."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from shared_ranks import on_ranks
from small_models import Chain, initialize, inputs, leave, sgd, whole_grads, wholes
from torch import Tensor, nn

from fullshard import fully_shard, recording
from fullshard.engine.registry import units_in
from fullshard.testing import assert_same

CHUNKS = 3
STEPS = 3
HEAD = "norm"  # the unit of `norm` and `head` has the name of the first
NAMES = ("all_gather", "reduce_scatter")


class Decoder(Chain):
    """Layers and a norm. The loss calls the head. The scale belongs to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x * self.scale)


def decoder(shard: Callable[..., Any], **of_the_head: Any) -> Any:
    model = Decoder()
    initialize(model)
    for layer in model.layers:
        shard(layer)
    shard([model.norm, model.head], **of_the_head)
    return shard(model)


def in_chunks(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden.chunk(CHUNKS)


def loss_of(logits: Tensor) -> Tensor:
    return logits.square().mean() / CHUNKS


def keep_in_sync(model: Any, syncs: bool) -> None:
    if hasattr(model.head, "set_requires_gradient_sync"):
        model.head.set_requires_gradient_sync(syncs)


def a_backward_each(model: Any, x: Tensor) -> None:
    """Run the loop of docs/composition.md, with one backward per chunk."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    keep_in_sync(model, False)
    for part in in_chunks(leaf):
        loss_of(model.head(part)).backward()
    keep_in_sync(model, True)
    hidden.backward(leaf.grad)


def one_backward(model: Any, x: Tensor) -> None:
    sum(loss_of(model.head(part)) for part in in_chunks(model(x))).backward()


def summed_at_each(model: Any, x: Tensor) -> None:
    """Run `a_backward_each` without changes to the gradients."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    for part in in_chunks(leaf):
        loss_of(model.head(part)).backward()
    hidden.backward(leaf.grad)


def as_fsdp2_is_configured(model: Any, x: Tensor) -> None:
    """Set all options that FSDP2 needs: unshard the head manually, and keep it after each backward."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    parts = in_chunks(leaf)
    if hasattr(model.head, "unshard"):
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
        keep_in_sync(model, False)
        model.head.unshard()
    for part in parts:
        if part is parts[-1]:
            keep_in_sync(model, True)
        loss_of(model.head(part)).backward()
    if hasattr(model.head, "unshard"):
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
    hidden.backward(leaf.grad)


def without_chunks(model: Any, x: Tensor) -> None:
    loss_of(model.head(model(x))).backward()


Sent = Counter[tuple[str, str, int]]  # collectives by name, unit and bytes


def train(loop: Callable[[Any, Tensor], None], strategy: str | None) -> tuple[list[Any], list[Sent]]:
    """Return gradients and parameters of some steps, and the collectives of each step."""
    shard = leave if strategy is None else partial(fully_shard, strategy=strategy)
    model = decoder(shard, reshard_after_forward=False)
    optimizer, left, sent = sgd(model), [], []
    for step in range(STEPS):
        with recording() as record:
            loop(model, inputs(step))
        sent.append(Counter((event.name, event.origin.unit, event.nbytes) for event in record.collectives()))
        left.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)], sent


def of_the_head(sent: Sent) -> dict[str, int]:
    """Return how often the unit of the head was gathered and reduced."""
    return {name: sum(n for (item, unit, _), n in sent.items() if (item, unit) == (name, HEAD)) for name in NAMES}


def of_others(sent: Sent) -> Sent:
    return Counter({what: count for what, count in sent.items() if what[1] != HEAD})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks(2)
def test_chunked_loss_communicates_like_unchunked_loss(strategy):
    """Every loop matches plain PyTorch bitwise, and reshards only the head before the model's own backward. The head is
    gathered and reduced once, also in the first step, whose order is unknown. It is gathered again only after a
    reduction, since an optimizer may have stepped, or after a manual reshard.
    """
    sent = {}
    for loop in (a_backward_each, one_backward, summed_at_each, as_fsdp2_is_configured, without_chunks):
        values, sent[loop.__name__] = train(loop, strategy)
        assert_same(values, train(loop, None)[0], name=f"{loop.__name__} under {strategy}")
    whole = sent.pop("without_chunks")
    for loop, steps in sent.items():
        assert [of_others(step) for step in steps] == [of_others(step) for step in whole], loop
    assert sent["a_backward_each"] == sent["one_backward"] == whole
    assert [of_the_head(step) for step in whole] == [dict(zip(NAMES, (1, 1), strict=True))] * STEPS
    assert [tuple(of_the_head(step).values()) for step in sent["summed_at_each"]] == [(CHUNKS, CHUNKS + 1)] * STEPS
    assert [tuple(of_the_head(step).values()) for step in sent["as_fsdp2_is_configured"]] == [
        (2, 2),
        (3, 2),
        (3, 2),
    ]


@on_ranks(2)
def test_deferred_head_gradients_are_reduced_first_during_backward():
    model = decoder(fully_shard, reshard_after_forward=False)
    with recording() as record:
        a_backward_each(model, inputs())
    assert record.collectives("reduce_scatter")[0].origin.unit == HEAD


@on_ranks(2)
def test_forward_without_backward_keeps_no_memory_in_the_next_step():
    model, kept = decoder(partial(fully_shard, strategy="zero2"), reshard_after_forward=False), []
    for is_of_all in (False, True):
        hidden = model(inputs())
        loss_of(model.head(hidden if is_of_all else hidden.detach())).backward()
        kept.append([unit.residency.memory.is_occupied for unit in units_in(model)])
    assert kept == [[True] * 6, [False] * 6]
