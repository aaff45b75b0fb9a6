"""Ranks whose models have different values are reported immediately and once."""

import copy
import pickle
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from logged import Logged
from shared_ranks import on_ranks, run_ranks
from small_models import chain, inputs, take_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, RankMismatchError, StateError, fully_shard
from fullshard.comm.collectives import Collectives
from fullshard.testing import assert_same


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 16), nn.LayerNorm(16), nn.Linear(16, 48))


def forwards(remedy: str) -> list[str]:
    rank = dist.get_rank()
    model = build(0 if remedy == "seed" else rank)
    if remedy == "broadcast":
        model = FullyShardedDataParallel(model, sync_module_states=True)
    else:
        fully_shard(model[0])
        fully_shard(model)
    if remedy == "load":
        model.load_state_dict(build(0).state_dict())
    if remedy == "write":
        for param in model.parameters():
            nn.init.ones_(param)
    with Logged() as texts:
        for _ in range(3):
            model(torch.ones(2, 48))
    return texts


@pytest.mark.parametrize("remedy", ["none", "seed", "broadcast", "load", "write"])
def test_different_initial_values_on_ranks_are_logged_once(remedy):
    first, second = run_ranks(2, forwards, remedy)
    assert second == []
    assert len(first) == (remedy == "none")
    if first:
        assert "4 parameters, such as 2.weight on rank 0 and rank 1" in first[0]
        assert "torch.manual_seed" in first[0]


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
@on_ranks(2)
def test_different_initial_values_of_replicated_parameters_raise(strategy):
    options = {"strategy": strategy}
    if options["strategy"] == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(build(dist.get_rank()), **options)
    with pytest.raises(RankMismatchError, match=r"such as 0.weight on rank 0 and rank 1.*sync_module_states"):
        model(torch.ones(2, 48))


def train_with_a_head(care: str) -> list[str]:
    """Train the sharded model with a head on top. Its gradients are not averaged, unless `care` handles them."""
    model, head = chain(fully_shard), nn.Linear(5, 1)
    nn.init.ones_(head.weight)
    nn.init.zeros_(head.bias)
    if care == "thawed":
        head.requires_grad_(False)
    if care == "sharded":
        fully_shard(head)
    if care == "ignored":
        fully_shard(nn.Sequential(head, nn.Linear(2, 2)), ignored_params=head.parameters())
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 1))  # 0 in the first step
    with Logged() as texts:
        for step in range(9):
            (head(model(inputs(step))).square().mean() * (1 + dist.get_rank())).backward()
            if care == "averaged":
                for param in head.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            if care == "thawed":
                head.requires_grad_(True)
            if care == "replaced" and not step:
                head = copy.deepcopy(head)
                optimizer.param_groups[0]["params"][-2:] = head.parameters()
    return texts


UNCARED = {"none": (2, 3), "thawed": (2, 1), "replaced": (4, 1)}  # the number of parameters, and of steps until then


@pytest.mark.parametrize("care", [*UNCARED, "sharded", "ignored", "averaged"])
def test_diverging_parameters_outside_units_are_logged_once(care):
    first, second = run_ranks(2, train_with_a_head, care)
    assert second == []
    assert len(first) == (care in UNCARED)
    if first:
        count, steps = UNCARED[care]
        assert f"{count} parameters do not belong to any unit (the first has shape (1, 5))" in first[0]
        assert "outermost module" in first[0]
        assert f"after {steps} steps" in first[0]


def mesh_of_replicas() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def one_of_four_differs(what: str) -> str:
    """Let one rank of two replicas differ. The ranks of the other replica share no other axis with it."""
    is_odd = dist.get_rank() == 3
    model = build(int(is_odd and what == "values"))
    if is_odd and what == "model":
        model[1] = nn.LayerNorm(16, elementwise_affine=False)
    fully_shard(model, strategy="hsdp", mesh=mesh_of_replicas())
    with pytest.raises(RankMismatchError) as raised:
        model(torch.ones(2, 48))
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "stated"),
    [
        ("model", "Unit 0 is the root (0.weight (16, 48)"),
        (
            "values",
            "values: 4 parameters, such as 0.weight on rank 1 and rank 3. Each rank would train its own",
        ),
    ],
)
def test_one_differing_rank_raises_same_error_on_all_replicas(what, stated):
    messages = run_ranks(4, one_of_four_differs, what)
    assert len(set(messages)) == 1
    assert stated in messages[0]
    assert "rank 3" in messages[0]


def one_of_four_has_another_head() -> list[str]:
    model = chain(partial(fully_shard, strategy="hsdp", mesh=mesh_of_replicas()))
    head = nn.Linear(5, 1)
    nn.init.constant_(head.weight, dist.get_rank() == 3)
    optimizer = torch.optim.SGD([*model.parameters(), head.weight], lr=0.1)
    with Logged() as texts:
        for step in range(3):
            take_step(optimizer, model(inputs(step)).square().mean())
    return texts


def test_one_differing_parameter_outside_units_does_not_block_replicas():
    stated = run_ranks(4, one_of_four_has_another_head)
    assert [len(texts) for texts in stated] == [1, 0, 1, 0]  # one per replica


def compared_nbytes(layers: int) -> dict[str, list[int]]:
    """Return the bytes that this rank sends to compare a model and its heads, by names of comparisons."""
    sent: dict[str, list[int]] = {}
    gather_objects = Collectives.gather_objects

    def count(self: Collectives, own: Any, *, name: str, **kwargs: Any) -> list[Any]:
        sent.setdefault(name, []).append(len(pickle.dumps(own)))
        return gather_objects(self, own, name=name, **kwargs)

    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]))
    heads = [nn.Linear(8, 1, bias=False) for _ in range(layers)]
    optimizer = torch.optim.SGD([*model.parameters(), *(head.weight for head in heads)], lr=0.0)
    with patch.object(Collectives, "gather_objects", count):
        for _ in range(3):
            take_step(optimizer, model(torch.ones(2, 8)).sum())
    return sent


def test_comparison_of_equal_ranks_sends_bytes_independent_of_model_size():
    (small, _), (large, _) = (run_ranks(2, compared_nbytes, layers) for layers in (1, 20))
    assert small == large
    assert set(small) == {"comparison of models", "comparison of parameters in no unit"}
    assert len(small["comparison of models"]) == 1
    assert max(map(max, small.values())) < 128


# -- parameters that are added after sharding -------------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer and a low-rank adapter next to it, as peft builds them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(48, 2, bias=False), nn.Linear(2, 192, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def add_adapter(model: nn.Module) -> Any:
    model.layers[0].up = Adapted(model.layers[0].up)
    return model.layers[0].up.a


def add_head(model: nn.Module) -> Any:
    model.add_module("second", nn.Linear(48, 5))
    model.register_forward_hook(lambda _, args, output: output + model.second(args[0]))
    return model.second


def add_parameter(model: nn.Module) -> Any:
    model.scale = nn.Parameter(torch.ones(5))
    model.register_forward_hook(lambda _, args, output: output * model.scale)


def add_past_registration(model: nn.Module) -> Any:
    model._parameters["scale"] = nn.Parameter(torch.ones(5))
    model.register_forward_hook(lambda _, args, output: output * model._parameters["scale"])


def add_in_forward(model: nn.Module) -> Any:
    def scale(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not hasattr(model, "scale"):
            model.scale = nn.Parameter(torch.ones(5))
        return output * model.scale

    model.register_forward_hook(scale)


def add_frozen_and_unfreeze(model: nn.Module) -> Any:
    add_parameter(model)
    model.scale.requires_grad_(False)
    model(inputs())
    model.scale.requires_grad_(True)


ADD = [add_adapter, add_head, add_parameter, add_past_registration, add_in_forward, add_frozen_and_unfreeze]


def step_plainly(model: nn.Module) -> Any:
    """Return an optimizer that torch knows nothing of."""

    def step() -> None:
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad

    return step


def sgd_of_late(model: nn.Module) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad and not hasattr(p, "placements")]).step


OPTIMIZERS = {"late": sgd_of_late, "all": lambda model: torch.optim.AdamW(model.parameters()).step, "own": step_plainly}


def added_after_sharding(add: Any, optimizer: str, frozen: bool, started: bool) -> str:
    """Return the error of the first step after `add`, or nothing."""
    model = chain(fully_shard)
    if frozen:
        model.requires_grad_(False)
    if started:
        for step in range(3):
            model(inputs(step))
    torch.manual_seed(0)
    try:
        add(model)
        loss = model(inputs() * (1 + dist.get_rank())).square().mean()
        loss.backward()
        OPTIMIZERS[optimizer](model)()
    except StateError as error:
        return str(error)
    return ""


@on_ranks(2)
def test_trained_parameters_added_after_sharding_raise():
    found = {}
    for number, (add, optimizer) in enumerate((add, optimizer) for add in ADD for optimizer in OPTIMIZERS):
        frozen, started = bool(number % 2), bool(number % 3)
        if add is add_past_registration and optimizer == "own":
            continue  # neither of them is notified
        found[f"{add.__name__} {optimizer} {frozen} {started}"] = added_after_sharding(add, optimizer, frozen, started)
    for case, message in found.items():
        assert "was added after fully_shard" in message, case


@on_ranks(2)
def test_optimizer_of_another_model_steps_despite_added_parameters():
    model, other = chain(fully_shard), nn.Linear(4, 4)
    model(inputs()).sum().backward()
    add_head(model)
    optimizer = torch.optim.SGD(other.parameters())
    other(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def taken_care_of() -> list[Any]:
    """Return the results of heads trained identically on all ranks, or not trained, or on one rank only."""
    found = []
    for care in ("sharded", "ignored", "frozen", "unused", "alone"):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "data"))["data"] if care == "alone" else None
        model = chain(partial(fully_shard, mesh=mesh))
        model(inputs()).sum().backward()
        torch.manual_seed(0)
        head = add_head(model)
        if care == "sharded":
            fully_shard(head)
        if care == "ignored":
            fully_shard(head, ignored_params=head.parameters())
        if care == "frozen":
            head.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if care == "unused":
                with torch.no_grad():
                    model(inputs())
                continue
            model(inputs(step) * (1 + dist.get_rank() * (care != "alone"))).square().mean().backward()
            if care == "ignored":
                for param in head.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
        weight = head.weight
        found.append(weight.full_tensor().detach() if care == "sharded" else weight.detach().clone())
    return found


def test_handled_parameters_added_after_sharding_are_accepted():
    first, second = run_ranks(2, taken_care_of)
    assert_same(first, second)


@on_ranks(2)
def test_replaced_ignored_parameters_stay_ignored():
    """Ignored parameters are new objects after `to_empty` and `load_state_dict(assign=True)`."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, ignored_params=model[1].parameters())
    model.to_empty(device="cpu")
    torch.nn.init.ones_(model[0].weight)
    model(torch.ones(2, 4)).sum().backward()
    model[1].load_state_dict({name: torch.ones_like(item) for name, item in model[1].state_dict().items()}, assign=True)
    model[1].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()


def train_adapters_in_hooks(how: str) -> list[str]:
    """Adapters that no module has; their optimizer has nothing else, or is given them late."""
    model = chain(fully_shard).requires_grad_(False)
    if how == "add_param_group":
        model.head.weight.requires_grad_(True)
    torch.manual_seed(dist.get_rank() if how == "drawn" else 0)
    adapter = nn.Linear(48, 48)
    model.layers[1].register_forward_hook(lambda _, args, output: output + adapter(args[0]))
    params = [model.head.weight] if how == "add_param_group" else [*adapter.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    with Logged() as texts:
        for step in range(9):
            model(inputs(step) * (1 + dist.get_rank())).square().mean().backward()
            if how == "averaged":
                for param in adapter.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            if how == "add_param_group" and not step:
                optimizer.add_param_group({"params": [*adapter.parameters()]})
    return texts


@pytest.mark.parametrize("how", ["identical", "drawn", "add_param_group", "averaged"])
def test_diverging_adapters_in_hooks_are_logged_once(how):
    first, second = run_ranks(2, train_adapters_in_hooks, how)
    assert second == []
    assert len(first) == (how != "averaged")
    if first:
        assert "2 parameters do not belong to any unit (the first has shape (48, 48))" in first[0]


def train_with_rates(
    strategy: str, optimizer: str, since: int, place: str, extra: int = 0, skipped: int = -1
) -> list[str]:
    """Train for 34 steps. Return the warnings.

    Args:
        since: The step after which the learning rate of rank 1 is another one.
        extra: The number of steps that rank 1 takes at first without gradients.
        skipped: The step that the optimizer of rank 1 skips.
    """
    model = chain(partial(fully_shard, strategy=strategy))
    made = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[optimizer](model.parameters(), lr=0.001)
    if place == "tensor":
        made.param_groups[0]["lr"] = torch.tensor(0.001)
        made.register_step_post_hook(lambda *_: None)  # with hooks, steps take another path
    for _ in range(extra * dist.get_rank()):
        made.step()
    with Logged() as texts:
        for step in range(34):
            if step == since and dist.get_rank() == 1:
                made.param_groups[0]["lr"] = made.param_groups[0]["lr"] / 10
            loss = model(inputs()).square().mean()
            if step == skipped and dist.get_rank() == 1:
                loss.backward()
                made.zero_grad()
            else:
                take_step(made, loss)
    return texts


@pytest.mark.parametrize(
    ("strategy", "optimizer", "since", "place"),
    [("zero3", "adamw", 0, "group"), ("zero2", "adamw", 17, "tensor"), ("ddp", "adafactor", 17, "group")],
)
def test_different_learning_rates_on_ranks_are_logged(strategy, optimizer, since, place):
    first, second = run_ranks(2, train_with_rates, strategy, optimizer, since, place)
    assert len(first) == sum(step > since for step in (16, 32)) and second == []
    assert all("lr of parameter group 0 is 0.001" in text and "0.0001" in text for text in first)


@pytest.mark.parametrize("extra", [0, 3])
def test_equal_learning_rates_are_not_logged_and_comparison_does_not_block(extra):
    first, second = run_ranks(2, train_with_rates, "zero3", "adamw", 100, "group", extra)
    assert not any("hyperparameters" in text for text in first) and second == []
    assert len(first) == (2 if extra else 0)  # the number of steps


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_optimizer_step_skipped_on_one_rank_logs_a_warning(strategy):
    first, second = run_ranks(2, train_with_rates, strategy, "adamw", 100, "group", 0, 3)
    assert second == []
    assert first  # not twice if rank 0 takes its step 17 before rank 1 takes step 16
    assert all("step 16 followed backward 16 on rank 0, but backward 17 on rank 1" in text for text in first)
