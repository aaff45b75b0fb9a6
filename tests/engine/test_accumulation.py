"""Gradient accumulation: gradients of microbatches are summed in the right dtype and reduced only when configured."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, Chain, Layer, chain, inputs, leave, sgd, whole_grads, wholes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, dry, fully_shard, recording
from fullshard.engine.registry import units_in
from fullshard.tape.recorder import Recorder
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

MICROBATCHES = 3
REDUCTIONS = ("reduce_scatter", "all_reduce")
UNITS = 5


def batch(number: int) -> Tensor:
    return inputs(100 * number + dist.get_rank())


def by_switch(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    return nullcontext()


def by_context(model: Any, last: bool) -> Any:
    return nullcontext() if last else model.no_sync()


def always(model: Any, last: bool) -> Any:
    return nullcontext()


def inner(model: Any) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def learn(model: Any, quiet: Any, steps: int = 3) -> list[Any]:
    """Train `steps` steps of several microbatches each and return the results."""
    optimizer, left = sgd(model), []
    for step in range(steps):
        for i in range(MICROBATCHES):
            with quiet(model, i == MICROBATCHES - 1):
                loss = model(batch(step * MICROBATCHES + i)).square().mean()
                loss.backward()
            left.append(loss.detach())
        left.append(whole_grads(inner(model)))
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(inner(model))]


@pytest.mark.parametrize(
    "strategy", ["zero1", "zero3", *(pytest.param(item, marks=pytest.mark.slow) for item in ("ddp", "zero2"))]
)
@on_ranks(1)
def test_accumulation_on_one_rank_matches_plain_pytorch_bitwise(strategy):
    expected = learn(chain(leave), always)
    for quiet in (by_switch, by_context, always):
        assert_same(learn(chain(partial(fully_shard, strategy=strategy)), quiet), expected, name=strategy)


@pytest.mark.slow
@on_ranks(2)
def test_accumulation_on_two_ranks_matches_ddp_bitwise():
    expected = learn(DistributedDataParallel(chain(leave)), by_context)
    for strategy in ONE_AXIS:
        for quiet in (by_switch, by_context):
            assert_same(learn(chain(partial(fully_shard, strategy=strategy)), quiet), expected, name=strategy)


def grad_of(model: Any, loss: Tensor, x: Tensor) -> None:
    torch.autograd.grad(loss, x, retain_graph=True)


def grad_of_another_forward(model: Any, loss: Tensor, x: Tensor) -> None:
    torch.autograd.grad(inner(model)(x).sum(), x)


def backward_of_inputs(model: Any, loss: Tensor, x: Tensor) -> None:
    loss.backward(inputs=[x], retain_graph=True)


def backward_of_one_input(model: Any, loss: Tensor, x: Tensor) -> None:
    loss.backward(inputs=x, retain_graph=True)


def learn_with_grads_of_inputs(model: Any, take: Any) -> list[Any]:
    for unused in (False, True):
        if unused and not isinstance(model, DistributedDataParallel):
            model.set_reduce_scatter_unused_params(True)
        optimizer = sgd(model)
        for i in range(2 * MICROBATCHES):
            is_last = i % MICROBATCHES == MICROBATCHES - 1
            x = batch(i).requires_grad_()
            with by_context(model, is_last):
                loss = model(x).square().mean() * 0.01
                take(model, loss, x)
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return wholes(inner(model))


@pytest.mark.slow
@on_ranks(2)
def test_input_gradient_passes_do_not_reduce_deferred_gradients():
    for take in (grad_of, grad_of_another_forward, backward_of_inputs, backward_of_one_input):
        expected = learn_with_grads_of_inputs(DistributedDataParallel(chain(leave)), take)
        for strategy in ONE_AXIS:
            model = chain(partial(fully_shard, strategy=strategy))
            assert_same(learn_with_grads_of_inputs(model, take), expected, name=f"{take.__name__}, {strategy}")


@pytest.mark.slow
@on_ranks(3)
def test_accumulation_on_three_ranks_matches_across_strategies_bitwise():
    for quiet in (by_switch, always):
        expected = learn(chain(partial(fully_shard, strategy="ddp")), quiet)
        for strategy in ONE_AXIS[1:]:
            assert_same(learn(chain(partial(fully_shard, strategy=strategy)), quiet), expected, name=strategy)


@on_ranks(2)
def test_wrapper_no_sync_matches_set_requires_gradient_sync():
    model = FullyShardedDataParallel(chain(leave), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    expected = learn(chain(fully_shard), by_switch)
    assert_same(learn(model, by_context)[:-1], expected[:-1])


def within_one_autocast(shard: Any) -> list[Any]:
    """Train with one context around all microbatches of a step, which caches the casts of weights."""
    model = chain(shard)
    optimizer, visited = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            for number in range(3):
                loss = model(inputs(number)).float().square().mean()
                loss.backward()
                visited.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*visited, wholes(model)]


@on_ranks(2)
def test_accumulation_in_one_autocast_context_matches_plain_bitwise():
    expected = within_one_autocast(leave)
    for strategy in ("zero3", "zero2"):
        assert_same(within_one_autocast(partial(fully_shard, strategy=strategy)), expected)


class CastsEarly(torch.nn.Module):
    """autocast casts the weights of a layer in a forward without gradients, and a forward with gradients uses them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.how = torch.nn.ModuleList([Layer(), Layer()]), how

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        if self.how == "target":
            with torch.no_grad():
                x = x + second(x)
            return second(first(x))
        x = checkpoint(second, first(x), use_reentrant=True)
        return checkpoint(second, first(x), use_reentrant=True) if self.how == "shared" else x


def casts_early(how: str, strategy: str) -> list[Tensor]:
    model = CastsEarly(how)
    for layer in model.layers:
        fully_shard(layer, strategy=strategy)
    fully_shard(model, strategy=strategy)
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs(dist.get_rank())).float().square().mean().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("how", ["target", "checkpoint", "shared"])
def test_autocast_casts_of_no_grad_forwards_are_not_reused(how):
    expected = casts_early(how, "ddp")
    for strategy in ("zero3", "zero2"):
        assert_same(casts_early(how, strategy), expected, name=strategy)


# -- communication ----------------------------------------------------------------------------------------------------


def record_each(model: Any, switch: str | None, before_last: bool) -> list[Recorder]:
    records = []
    for i in range(MICROBATCHES):
        if switch is not None:
            getattr(model, switch)(before_last or i == MICROBATCHES - 1)
        with recording() as record:
            model(batch(i)).square().mean().backward()
        records.append(record)
    return records


@pytest.mark.parametrize(
    "strategy", ["zero1", "zero3", *(pytest.param(item, marks=pytest.mark.slow) for item in ("ddp", "zero2"))]
)
@on_ranks(2)
def test_unit_is_reduced_once_per_synced_microbatch(strategy):
    counts = []
    for before_last in (True, False):
        model = chain(partial(fully_shard, strategy=strategy))
        records = record_each(model, "set_requires_gradient_sync", before_last)
        counts.append([sum(len(record.collectives(name)) for name in REDUCTIONS) for record in records])
    assert counts == [[UNITS] * 3, [0, 0, UNITS]]


class Alternating(torch.nn.Module):
    """Layers called in a given order, some of them several times. With `recomputes`, all are recomputed together."""

    def __init__(self, order: Sequence[int], *, recomputes: bool = False) -> None:
        super().__init__()
        self.order = order
        self.recomputes = recomputes
        self.layers = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x.requires_grad_(), use_reentrant=True) if self.recomputes else self.run(x)


SHARED_UNITS = [[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 2, 3]], [[0], [1, 3]]]
CALL_ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3, 0), (1, 0, 1, 3, 2)]


def count_in_shared_units() -> list[tuple[Any, list[int], list[int]]]:
    """Count the reductions of microbatches without and with sync, if several modules share a unit."""
    counts = []
    for units, order, recomputes in product(SHARED_UNITS, CALL_ORDERS, (False, True)):
        model = Alternating(order, recomputes=recomputes)
        in_units = {i for unit in units for i in unit}
        for unit in units:
            fully_shard([model.layers[i] for i in unit])
        expected = len(units) + (len(in_units) < len(model.layers))
        model = fully_shard(model)
        records = record_each(model, "set_requires_gradient_sync", False)
        found = [sum(len(record.collectives(name)) for name in REDUCTIONS) for record in records]
        counts.append(((units, order, recomputes), found, [0, 0, expected]))
    return counts


@pytest.mark.slow
def test_unit_of_several_modules_is_reduced_once_per_synced_microbatch():
    for program, found, expected in run_ranks(2, count_in_shared_units)[0]:
        assert found == expected, program


@pytest.mark.parametrize("strategy", ["hsdp", "hsdp_zero2"])
@on_ranks(4)
def test_hybrid_strategies_reduce_over_replicas_once_per_step_if_configured(strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = chain(partial(fully_shard, strategy=strategy, mesh=mesh))
    records = record_each(model, "set_requires_all_reduce", False)
    counts = {n: [(len(r.collectives(n)), r.sent_bytes(n)) for r in records] for n in REDUCTIONS}
    scattered = counts["reduce_scatter"]
    assert [calls for calls, _ in scattered] == [UNITS] * 3
    assert len({nbytes for _, nbytes in scattered}) == 1
    assert counts["all_reduce"][:2] == [(0, 0)] * 2
    calls, nbytes = counts["all_reduce"][2]
    assert calls == UNITS
    # With two replicas, a rank sends half of its shards to be summed and returns the sum of the other half.
    assert nbytes == scattered[0][1]


@on_ranks(4)
def test_deferred_all_reduce_matches_per_microbatch_all_reduce_closely():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    left = []
    for before_last in (True, False):
        model = chain(partial(fully_shard, strategy="hsdp", mesh=mesh))
        record_each(model, "set_requires_all_reduce", before_last)
        left.append(whole_grads(model))
    for name, grad in left[0].items():
        torch.testing.assert_close(left[1][name], grad, rtol=1e-5, atol=1e-5)


# -- the end of a step -------------------------------------------------------------------------------------------------


class ByData:
    """A custom optimizer. It updates `param.data`, which does not change the version counter."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def step(self) -> None:
        for param in self.params:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.data.zero_()


class InPlace(ByData):
    """Like `ByData`, but with operations that change the version counter."""

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "fused": partial(torch.optim.AdamW, fused=True),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "by data": ByData,
    "in place": InPlace,
}


def make_optimizers(model: torch.nn.Module, kinds: Sequence[str]) -> list[Any]:
    """Return one optimizer of each kind. Each has some parameters of every unit."""
    params = list(model.parameters())
    return [OPTIMIZERS[kind](params[i :: len(kinds)]) for i, kind in enumerate(kinds)]


def run_program(seed: int, shard: Any) -> list[Any]:
    """Run gradient accumulation, evaluation, optimizer steps and both kinds of `zero_grad` in random order."""
    chance = random.Random(seed)
    model = chain(shard, Chain([Layer() for _ in range(2)]))
    kinds = chance.choices(list(OPTIMIZERS), k=chance.choice((1, 1, 2)))
    optimizers, left = make_optimizers(model, kinds), []
    in_backward = chance.random() < 0.2

    def step_in_backward(param: Tensor) -> None:
        for optimizer, its in zip(optimizers, held, strict=True):
            if param in its:
                optimizer.step()
                optimizer.zero_grad(set_to_none=seed % 2 == 0)

    if in_backward:
        params = list(model.parameters())
        optimizers = [OPTIMIZERS[kinds[0]]([param]) for param in params]
        held = [{param} for param in params]
        for param in params:
            param.register_post_accumulate_grad_hook(step_in_backward)
    for number in range(4):
        count, quiet = chance.choice((1, 2, 3)), chance.random() < 0.7 and not in_backward
        for i in range(count):
            model.set_requires_gradient_sync(i == count - 1 or not quiet)
            loss = model(inputs(10 * number + i)).square().mean()
            loss.backward()
            left.append(loss.detach())
        for operation in ("evaluate", "step", "evaluate", "step", "write", "zero", "evaluate"):
            optimizer = chance.choice(optimizers)
            if chance.random() < 0.3 or (operation == "write" and chance.random() < 0.7):
                continue
            if operation == "evaluate":
                with torch.no_grad():
                    left.append(model(inputs(number)))
            elif operation == "step":
                optimizer.step()
            elif operation == "write":
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
            else:
                optimizer.zero_grad(set_to_none=chance.random() < 0.3)
    return left


def run_programs(seeds: range) -> None:
    for seed in seeds:
        expected = run_program(seed, partial(fully_shard, strategy="zero3"))  # keeps no unsharded parameters
        for strategy in ("zero1", "zero2"):
            assert_same(
                run_program(seed, partial(fully_shard, strategy=strategy)), expected, name=f"{strategy}, {seed}"
            )


@pytest.mark.slow
def test_kept_unsharded_parameters_are_updated_by_every_optimizer():
    run_ranks(2, run_programs, range(8))


@pytest.mark.slow
def test_kept_unsharded_parameters_are_updated_in_more_random_programs():
    run_ranks(2, run_programs, range(8, 40))


def numbers_and_gathers(kind: str, *, set_to_none: bool, skips: bool) -> list[list[tuple[int, int]]]:
    """Return, for each microbatch of three steps, its number and its count of all-gathers."""
    model = chain(partial(fully_shard, strategy="zero1"), Chain([Layer()]))
    [optimizer], steps = make_optimizers(model, [kind]), []
    for step in range(3):
        counted = []
        for i in range(MICROBATCHES):
            model.set_requires_gradient_sync(i == MICROBATCHES - 1)
            with recording() as record:
                model(batch(i)).square().mean().backward()
            counted.append((units_in(model)[0].microbatch, len(record.collectives("all_gather"))))
        if not (skips and step == 1):  # as a gradient scaler does when it finds an inf
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        steps.append(counted)
    return steps


def count_numbers_and_gathers() -> None:
    first, again = (1, 2), [(2, 0), (3, 0)]  # two units
    for kind, set_to_none in product(("AdamW", "fused", "in place"), (True, False)):
        steps = numbers_and_gathers(kind, set_to_none=set_to_none, skips=False)
        assert steps == [[first, *again]] * 3, (kind, set_to_none)
    for set_to_none in (True, False):
        steps = numbers_and_gathers("AdamW", set_to_none=set_to_none, skips=True)
        assert [[number for number, _ in step] for step in steps] == [[1, 2, 3]] * 3, set_to_none


@pytest.mark.slow
def test_zero1_all_gathers_once_per_step_with_every_kind_of_zero_grad():
    with dry.world(2):
        count_numbers_and_gathers()


def train_at_random(seed: int, shard: bool, options: dict[str, Any]) -> list[Any]:
    """Train microbatches with and without sync, and zero gradients between some of them in several ways."""
    choose = random.Random(seed)
    model = chain(partial(fully_shard, **options)) if shard else chain(leave)
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params[::2], lr=1e-3), torch.optim.SGD(params[1::2], lr=1e-3, momentum=0.9)]
    visited: list[Any] = []
    syncs_all = False
    for number in range(12):
        is_last = number % 3 == 2
        syncs_all = choose.random() < 0.25 if number % 3 == 0 else syncs_all
        if shard:
            model.set_requires_gradient_sync(is_last or syncs_all)
        model(inputs(number)).square().mean().backward()
        zeroed = choose.choice(["nothing", "model", "all", "one", "layer"])
        set_to_none = choose.random() < 0.5
        if is_last:
            grads: list[Any] = [param.grad for param in params]
            visited += [grad.full_tensor().clone() if shard else grad.clone() for grad in grads]
            for optimizer in optimizers:
                optimizer.step()
        if is_last or zeroed == "all":
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none)
        elif zeroed == "one":
            optimizers[0].zero_grad(set_to_none)
        elif zeroed == "model":
            model.zero_grad(set_to_none)
        elif zeroed == "layer":
            model.layers[0].zero_grad(set_to_none)
    return [*visited, wholes(model)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@on_ranks(2)
def test_zero_grad_clears_unreduced_gradients(seed):
    """Both ranks use the same batches, so the means over ranks equal the plain gradients."""
    expected = train_at_random(seed, False, {})
    for strategy in ONE_AXIS:
        assert_same(train_at_random(seed, True, {"strategy": strategy}), expected, name=strategy)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # accumulates in float64, so sums are rounded later
    torch.testing.assert_close(train_at_random(seed, True, {"mp_policy": policy}), expected, rtol=1e-4, atol=1e-4)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def low_precision_reference(reduce_dtype: torch.dtype) -> dict[str, Tensor]:
    """Accumulate bf16 gradients of microbatches in `reduce_dtype`, sum them in rank order and divide once."""
    plain = chain(leave)
    masters = {name: param.detach().clone() for name, param in plain.named_parameters()}
    plain.to(torch.bfloat16)
    total: dict[str, Tensor] = {}
    for i in range(MICROBATCHES):
        plain(batch(i).bfloat16()).square().mean().backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            grad = param.grad.to(reduce_dtype)
            total[name] = total[name].add_(grad) if name in total else grad
            param.grad = None
    reduced = {}
    for name, local in total.items():
        terms = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(terms, local)
        reduced[name] = ((terms[0] + terms[1]) / 2).to(masters[name].dtype)
    return reduced


@on_ranks(2)
def test_low_precision_gradients_accumulate_in_reduce_dtype():
    """bfloat16 has 8 bits of precision, so sums in bfloat16 would lose small terms."""
    quiet = by_switch
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = low_precision_reference(torch.float32)
    for strategy in ONE_AXIS:
        model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy))
        for i in range(MICROBATCHES):
            with quiet(model, i == MICROBATCHES - 1):
                model(batch(i)).square().mean().backward()
        assert_same(whole_grads(model), expected, name=strategy)


# -- ranks that use different parameters ------------------------------------------------------------------------------


class Selecting(torch.nn.Module):
    """Layers of several sizes in one unit, of which each call uses some. All gradients are integers below 256."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, rows) for rows in (6, 2**13, 6, 3, 2**13))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        outs = [self.layers[i](x) * (torch.arange(self.layers[i].out_features) % 7 + i) for i in chosen]
        return torch.stack([out.float().sum() for out in outs]).sum()


@pytest.mark.parametrize("strategy", ONE_AXIS)
@on_ranks(2)
def test_gradients_accumulate_if_ranks_use_different_parameters(strategy):
    """Draw the layers that each rank uses per microbatch. Without zeros for unused ones, each rank uses all layers."""
    options = (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for seed, policy, zeros in product(range(3), options, (False, True)):
        draw = random.Random(seed)
        calls = [[draw.sample(range(5), draw.randint(1, 4)) for _ in range(2)] for _ in range(2)]  # by rank
        for own in calls:
            own.append(draw.sample(range(5), 5) if draw.random() < 0.3 else [i for i in range(5) if i not in own[0]])
        if not zeros:
            calls = [[own[0], own[2]] for own in calls]
        model, plain = Selecting(), Selecting()
        fully_shard(model, strategy=strategy, mp_policy=policy or MixedPrecisionPolicy())
        model.set_reduce_scatter_unused_params(zeros)
        for number in range(len(calls[0])):
            batches = [torch.randint(3, (2, 4), generator=torch.Generator().manual_seed(r)).float() for r in range(2)]
            for each, own in zip(batches, calls, strict=True):
                plain(each, own[number]).div(2).backward()
            with by_context(model, number == len(calls[0]) - 1):
                model(batches[dist.get_rank()], calls[dist.get_rank()][number]).backward()
        assert_same(whole_grads(model), whole_grads(plain), name=f"seed {seed}, {zeros}")


# -- after a failure --------------------------------------------------------------------------------------------------


def whole_grads_of(model: Any, numbers: list[int]) -> dict[str, Tensor | None]:
    with model.no_sync():
        model(batch(numbers[0])).square().mean().backward()
    model(batch(numbers[1])).square().mean().backward()
    return whole_grads(model)


@on_ranks(2)
def test_exception_in_no_sync_exits_it_and_keeps_next_step_correct():
    expected = whole_grads_of(chain(fully_shard), [0, 1])
    model = chain(fully_shard)
    with model.no_sync(), pytest.raises(RuntimeError, match="size"):
        model(torch.zeros(6, 47))
    assert_same(whole_grads_of(model, [0, 1]), expected)


@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
@on_ranks(2)
def test_gradients_are_divided_by_gradient_divide_factor(factor):
    usual, model = chain(fully_shard), chain(fully_shard)
    for layer in (*model.layers, model):
        layer.set_gradient_divide_factor(factor)
    usual(batch(0)).sum().backward()
    model(batch(0)).sum().backward()
    for name, grad in whole_grads(usual).items():
        torch.testing.assert_close(whole_grads(model)[name], grad * 2 / factor)
