"""The part of a model with peft adapters that a checkpoint stores: trained parameters without the frozen base."""

from __future__ import annotations

from torch import nn


def trained_part(model: nn.Module) -> nn.Module:
    """Return `model`, or for a model with peft adapters, a module with only its trained parameters and its buffers.

    They are the same objects under the same names, so values loaded into this module are also loaded into `model`.
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
    """Return the module below `root` for a parameter or buffer, created if needed, and the last component of `name`."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, last
