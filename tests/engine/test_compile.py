"""`torch.compile` of sharded models: graphs and results match those of unsharded models."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from shared_ranks import on_new_ranks
from small_models import (
    ONE_AXIS,
    Chain,
    Layer,
    Shard,
    agree_with_plain,
    chain,
    initialize,
    inputs,
    leave,
    memory_is_shared,
    poison_freed,
    sgd,
    whole_grads,
    wholes,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fullshard import ConfigError, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.testing import assert_same, run_ranks
from fullshard.wrap import ModuleWrapPolicy

# The compiler itself reads the gradients of its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS = 5  # the last three must find everything compiled


def blocks_by_method(shard: Shard, **options: Any) -> Any:
    """Each block compiled in place, then sharded."""
    model = Chain()
    for layer in model.layers:
        layer.compile(**options)
    return chain(shard, model)


def blocks_by_function(shard: Shard, **options: Any) -> Any:
    """Each block wrapped in the module that `torch.compile` returns, then sharded."""
    return chain(shard, Chain([torch.compile(layer, **options) for layer in Chain().layers]))


def blocks_afterwards(shard: Shard, **options: Any) -> Any:
    """Each block compiled in place once it is sharded."""
    model = chain(shard)
    for layer in model.layers:
        layer.compile(**options)
    return model


def checkpointed_blocks(shard: Shard, **options: Any) -> Any:
    """Each block checkpointed, compiled and sharded, in this order."""
    return chain(shard, Chain([torch.compile(checkpoint_wrapper(layer), **options) for layer in Chain().layers]))


BLOCKS = [blocks_by_method, blocks_by_function, blocks_afterwards, checkpointed_blocks]


class Steps(Chain):
    """Calls its layers without a loop, because the compiler skips functions with a graph break within a loop."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x + 1)
        x = self.layers[1](x * 0.5)
        x = self.layers[2](x * 0.5)
        return self.head(self.layers[3](x * 0.5))


def whole_model(shard: Shard, **options: Any) -> Any:
    model = Steps()
    initialize(model)
    return torch.compile(shard(model, auto_wrap_policy=ModuleWrapPolicy({Layer})), **options)


def whole_loop(shard: Shard, **options: Any) -> Any:
    return torch.compile(chain(shard), **options)


def learn(model: Any) -> list[Any]:
    """Train, and evaluate in between. After two steps nothing may be compiled again."""
    optimizer, left = sgd(model), []
    for step in range(STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            loss = model(inputs(step)).square().mean()
            loss.backward()
            left += [loss.detach(), list(whole_grads(model).values())]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                left.append(model(inputs(20)))
    return [*left, list(wholes(model).values())]


def compiled(build: Callable[..., Any], options: dict[str, Any], shard: Shard) -> list[Any]:
    torch._dynamo.reset()
    return learn(build(shard, **options))


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [BLOCKS[0], *(pytest.param(block, marks=pytest.mark.slow) for block in (*BLOCKS[1:], whole_model))]
)
def test_compiled_sharded_model_matches_compiled_plain_model_bitwise(build):
    """Each block is one graph: `fullgraph` allows no graph break."""
    options = {"backend": "aot_eager", "fullgraph": build in BLOCKS}
    strategies = ONE_AXIS if build is blocks_by_method else ("zero3",)
    run_ranks(2, agree_with_plain, partial(compiled, build, options), *strategies)


@on_new_ranks(2)
def test_compiled_optimizer_step_raises():
    """Dynamo cannot trace a `DTensor` whose local tensor is a view of a buffer."""
    for name, steps in itertools.product(("SGD", "AdamW"), (0, 2)):
        model = chain(fully_shard)
        optimizer = getattr(torch.optim, name)(model.parameters())
        for _ in range(steps):
            model(inputs(0)).square().mean().backward()
            optimizer.step()
        model(inputs(0)).square().mean().backward()
        with pytest.raises(ConfigError, match=r"Call optimizer.step\(\) outside of the compiled function"):
            torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager")()
        optimizer.step()


@pytest.mark.slow
@on_new_ranks(2)
def test_compiled_wrapper_matches_compiled_plain_model_bitwise():
    in_wrapper, plain = (compiled(whole_model, {"backend": "eager"}, way) for way in (FullyShardedDataParallel, leave))
    assert_same(in_wrapper, plain)


@pytest.mark.slow
@on_new_ranks(2)
def test_compiled_model_matches_eager_under_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mp_policy=policy)
    torch.testing.assert_close(compiled(blocks_by_method, {"backend": "aot_eager"}, shard), learn(chain(shard)))


@pytest.mark.slow
@on_new_ranks(2)
def test_compiled_backward_reads_no_freed_memory():
    """A graph saves views of unsharded parameters for its backward, or copies of results computed from them."""
    left = []
    for poisons in (False, True):
        torch._dynamo.reset()
        model = blocks_by_method(fully_shard, backend="aot_eager")
        for step in range(STEPS):
            loss = model(inputs(step)).square().mean()
            if poisons:
                poison_freed(model)
            loss.backward()
            left.append(whole_grads(model))
            model.zero_grad()
        assert memory_is_shared(model)
    assert_same(left[STEPS:], left[:STEPS])


def learn_by_inductor() -> None:
    """Compile only one program: all blocks are identical if their inputs need gradients and there is no evaluation."""
    torch._dynamo.reset()
    found = []
    for model in (blocks_by_function(fully_shard, fullgraph=True), chain(leave)):
        optimizer, left = sgd(model), []
        for step in range(STEPS):
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                loss = model(inputs(step).requires_grad_()).square().mean()
                loss.backward()
            left += [loss.detach(), list(whole_grads(model).values())]
            optimizer.step()
            optimizer.zero_grad()
        found.append([*left, list(wholes(model).values())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)  # compiling C++ takes minutes on a busy machine
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # raised by an import within torch
def test_inductor_matches_eager_plain_model_within_tolerance(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # skip the test program per instruction set
    run_ranks(2, learn_by_inductor, timeout=560)


# -- graphs -----------------------------------------------------------------------------------------------------------


def count_graphs() -> dict[str, tuple[int, int]]:
    """Return graphs and graph breaks of a training step by build function, for the plain and then the sharded model."""
    counts = {}
    for build in (*BLOCKS, whole_model, whole_loop):
        for shard in (leave, fully_shard):
            torch._dynamo.reset()
            counters.clear()
            model = build(shard, backend="eager")
            for step in range(STEPS):
                model(inputs(step)).square().mean().backward()
                model.zero_grad()
            found = (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
            counts[build.__name__] = (*counts.get(build.__name__, ()), found)
    return counts


@pytest.mark.slow
def test_graph_breaks_occur_only_at_units():
    """A compiled block is one graph, and the first block has another one, because its input needs no gradient. A
    compiled model has one graph break per unit. If the breaks are within a loop, the compiler compiles only the blocks.
    """
    blocks = {build.__name__: ((2, 0), (2, 0)) for build in BLOCKS}
    expected = {**blocks, "whole_model": ((1, 0), (7, 4)), "whole_loop": ((1, 0), (2, 0))}
    assert run_ranks(2, count_graphs) == [expected, expected]
