"""Sharding of a plain model for all integrations: one unit at a time, with identical values on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.routes import collectives_of
from fullshard.device.current import current_device, usual_device_type
from fullshard.engine.materialize import initialize
from fullshard.engine.registry import has_forward, is_unit, own_modules
from fullshard.fsdp_module import fully_shard
from fullshard.tape.recorder import Origin, Phase
from fullshard.wrap import AutoWrapPolicy, CustomPolicy, wrapped_modules

_ORIGIN = Origin("starting values", Phase.IDLE)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def shard_model(
    model: nn.Module,
    *,
    device: torch.device,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    root: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Shard `model` in place, one unit at a time.

    Tensors of a unit on the meta device are initialized first, by `reset_parameters` of its modules. Then every rank
    receives the first rank's values. So no rank holds more than its shards and one unsharded unit.

    Args:
        model: A plain model, or a model with existing units, which are kept.
        device: The device for tensors that are on the meta device.
        auto_wrap_policy: Selects the submodules that become units. If None, `repeated_layers(model)` unless there are
            units already.
        root: Options of the root's unit only.
        options: Options of `fully_shard`.
    """
    there = [child for child in model.modules() if is_unit(child)]
    if model in there:
        return
    policy = auto_wrap_policy or (None if there else repeated_layers(model))
    chosen = {} if policy is None else wrapped_modules(model, policy, ignored_modules=there)
    for unit, overrides in [*chosen.items(), (model, root or {})]:
        initialize((unit,), device, (), None)
        take_from_first(unit)
        fully_shard(unit, **{**options, **overrides})


def repeated_layers(model: nn.Module) -> AutoWrapPolicy:
    """Return a policy that makes units of a model's layers: modules in a container with several modules of their class.

    Containers are `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential`. Layers within a layer are part of its unit. If
    a model names its layers like models of the transformers library (`_no_split_modules`), those are units.
    """
    layers = _layers(model)
    return CustomPolicy(lambda module: module in layers)


def layers_and_children(model: nn.Module) -> AutoWrapPolicy:
    """Return a policy that makes units of the layers of `model`, and of each of its direct child modules.

    It is for models that call their children but are not called themselves: each child is unsharded when it is called.
    """
    layers = set(chain.from_iterable(map(_layers, model.children())))
    children = {child for child in model.children() if not isinstance(child, _WITHOUT_FORWARD)}
    children = {child for child in children if any(True for _ in child.parameters())}
    return CustomPolicy(lambda module: module in layers or module in children)


def _layers(model: nn.Module) -> set[nn.Module]:
    named = set(getattr(model, "_no_split_modules", None) or ())
    layers = {child for child in model.modules() if type(child).__name__ in named and has_forward(child)}
    return layers or set(_repeated(model))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    often: set[type[nn.Module]] = set()
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        counts = Counter(map(type, children))
        often = {
            cls for cls, count in counts.items() if count > 1 and getattr(cls, "forward", None) is not nn.Module.forward
        }
    for child in children:
        if type(child) in often:
            yield child
        else:
            yield from _repeated(child)


def take_from_first(unit: nn.Module) -> None:
    """Broadcast the first rank's values of the tensors of `unit` that do not belong to a unit yet, one at a time."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    transport = current_device(usual_device_type())
    tensors = {
        id(tensor): tensor
        for _, module in own_modules((unit,))
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and not isinstance(tensor, DTensor)
    }
    with torch.no_grad():
        for tensor in tensors.values():
            staged = tensor.detach().to(transport).contiguous()
            as_bytes = staged.reshape(-1).view(torch.uint8)  # gloo sends bytes, whatever the dtype is
            collectives_of(dist.distributed_c10d._get_default_group()).broadcast([as_bytes], 0, origin=_ORIGIN)
            if staged.data_ptr() != tensor.data_ptr():
                tensor.copy_(staged)
