"""Every public function rejects an argument of a wrong type by its name, before any communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from shared_ranks import on_ranks, same_on_all_ranks
from small_models import chain, inputs, leave, sgd
from torch import nn

import fullshard
from fullshard import FSDPModule, FullyShardedDataParallel, Placement, fully_shard, recording
from fullshard.optim import Muon, step_shards
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy

WRONG: tuple[Any, ...] = (42, -1, float("nan"), None, "x", [], {}, object(), True)
SHARDED = Placement.SHARDED

Call = tuple[Callable[..., Any], dict[str, Any]]  # a public function and valid arguments for it


def calls() -> Iterator[Call]:
    model = chain(fully_shard)
    optimizer = sgd(model)
    whole = FullyShardedDataParallel
    yield whole, {"module": None}
    yield fully_shard, {"module": None}
    yield fullshard.replicate, {"module": None}
    yield fullshard.clip_grad_norm_, {"parameters": list(model.parameters()), "max_norm": 1.0}
    yield fullshard.summon_full_params, {"module": model}
    yield fullshard.stream_weights, {"model": model}
    yield fullshard.register_fsdp_forward_method, {"module": model, "method_name": "forward"}
    yield fullshard.take_part, {"module": model}
    yield fullshard.share_comm_ctx, {"modules": [model]}
    yield fullshard.explain, {"model": model}
    for policy in (fullshard.MixedPrecision, fullshard.MixedPrecisionPolicy, fullshard.CPUOffload):
        yield policy, {}
    yield fullshard.CPUOffloadPolicy, {}
    yield fullshard.Offload, {}
    names = ("parameters", "parameters_in_step", "gradients", "optimizer")
    yield fullshard.Placements, dict.fromkeys(names, SHARDED)
    yield fullshard.DataParallelMeshDims, {"shard": "dp"}
    yield fullshard.set_collective_timeout, {"seconds": 1.0}
    yield ModuleWrapPolicy, {"module_classes": {nn.Linear}}
    yield CustomPolicy, {"lambda_fn": lambda module: False}
    yield step_shards, {"optimizer": optimizer}
    yield Muon, {"params": [param for param in model.parameters() if param.ndim == 2]}
    yield whole.set_state_dict_type, {"module": model, "state_dict_type": fullshard.StateDictType.FULL_STATE_DICT}
    yield whole.optim_state_dict, {"model": model, "optim": optimizer}
    yield whole.optim_state_dict_to_load, {"model": model, "optim": optimizer, "optim_state_dict": {}}
    for name, method in vars(FSDPModule).items():
        if name.startswith("set_"):
            required = {
                item: True for item, parameter in parameters(method).items() if parameter.default is parameter.empty
            }
            yield getattr(model, name), required


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: item for name, item in found.items() if item.kind in named and name != "self"}


def outcome(function: Callable[..., Any], arguments: dict[str, Any], name: str, wrong: object) -> str:
    """Describe an incorrect rejection of `wrong`; empty if the rejection is correct or the value is accepted."""
    given = {key: chain(leave) if value is None and key == "module" else value for key, value in arguments.items()}
    try:
        made = function(**{**given, name: wrong})
        if isinstance(made, AbstractContextManager):
            with made:
                pass
        elif inspect.isgenerator(made):
            list(made)
    except (fullshard.FullshardError, TypeError, ValueError) as error:
        own = isinstance(error, fullshard.FullshardError)
        named = name in str(error) or "empty parameter list" in str(error)  # the latter message is from torch
        return "" if own or named else f"{type(error).__name__} that does not name it: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@on_ranks(1)
def test_arguments_of_wrong_type_are_rejected_by_name():
    found = []
    for function, arguments in calls():
        for name in parameters(function):
            for wrong in WRONG:
                stated = outcome(function, arguments, name, wrong)
                if stated:
                    found.append(f"{getattr(function, '__name__', function)}({name}={wrong!r}): {stated}")
    assert found == []


@on_ranks(2)
def test_arguments_of_wrong_type_are_rejected_before_communication():
    """All ranks pass the same wrong argument."""
    model = chain(fully_shard)
    model(inputs()).sum().backward()
    stated: list[str] = []
    with recording() as record:
        for function, arguments, name in (
            (fully_shard, {"module": chain(leave)}, "mp_policy"),
            (FullyShardedDataParallel, {"module": chain(leave), "sync_module_states": True}, "param_init_fn"),
            (fullshard.clip_grad_norm_, {"parameters": model.parameters()}, "max_norm"),
            (fullshard.summon_full_params, {}, "module"),
            (FullyShardedDataParallel.optim_state_dict, {"model": model}, "optim"),
        ):
            try:
                made = function(**arguments, **{name: "wrong"})
                if isinstance(made, AbstractContextManager):
                    made.__enter__()
            except fullshard.ConfigError as error:
                stated.append(str(error))
    assert record.sent_bytes() == 0
    assert torch.is_grad_enabled()
    first = same_on_all_ranks([tuple(stated)])
    assert len(first[0]) == 5
