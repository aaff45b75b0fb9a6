"""The parts of a model with peft adapters that are saved: adapters and trained parameters, and prompts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from fullshard.state.summon import summon_full_params


def trained_part(model: nn.Module) -> nn.Module:
    """Return `model`, or for a model with peft adapters, a module without the frozen base.

    It has all parameters of the adapters, including frozen ones, the other trained parameters, and the buffers. They
    are the same objects under the same names, so values loaded into this module are also loaded into `model`.
    """
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        return model
    part = nn.Module()
    for name, param in model.named_parameters():
        if param.requires_grad or not adapters.keys().isdisjoint(name.split(".")):
            owner, last = _owner(part, name)
            owner.register_parameter(last, param)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            owner, last = _owner(part, name)
            owner.register_buffer(last, buffer)
    return part


def computing_prompts(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context within which rank 0 can save the prompts of peft, which are computed from whole parameters.

    Every rank must enter it.
    """
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return nullcontext()
    return summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module below `root` for a parameter or buffer, created if needed, and the last component of `name`."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, last
