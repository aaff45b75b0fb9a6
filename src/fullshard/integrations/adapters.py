"""The part of a model with peft's adapters that a checkpoint holds: trained parameters, and not the frozen base."""

from __future__ import annotations

from torch import nn

__all__ = ["trained_part"]


def trained_part(model: nn.Module) -> nn.Module:
    """`model`, or if peft has put adapters into it, a module that has only its trained parameters and its buffers.

    They are the same objects under the same names, so values that are loaded into the one are in the other.
    """
    if not hasattr(model, "peft_config"):
        return model
    part = nn.Module()
    for name, param in model.named_parameters():
        if param.requires_grad:
            owner, last = _owner(part, name)
            owner.register_parameter(last, param)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            owner, last = _owner(part, name)
            owner.register_buffer(last, buffer)
    return part


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module below `root` for the parameter or buffer `name`, made if there is none, and its name there."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, last
