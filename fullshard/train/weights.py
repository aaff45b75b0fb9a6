"""Trained weights as a safetensors file, written and read without the whole model in memory.

The format (https://github.com/huggingface/safetensors) is a little-endian 64-bit length, a JSON header of that length
with dtype, shape and byte range of each tensor, then the tensors' bytes one after another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_weights(
    state: Mapping[str, Tensor], path: Path, *, writes: bool, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `state`, sharded or not, to `path`: one tensor is made whole at a time.

    Args:
        state: tensors by FQN, the same names in the same order on every rank.
        path: file to write; it appears only when it is complete.
        writes: whether this rank writes. All ranks call, since making a tensor whole is a collective.
        metadata: words to keep in the file's header.
    """
    wholes = (_whole(tensor) for tensor in state.values())
    if not writes:
        for _ in wholes:
            pass
        return
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        _write_header(file, state, metadata or {})
        for whole in wholes:
            file.write(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    unfinished.replace(path)


def _whole(tensor: Tensor) -> Tensor:
    full_tensor = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if full_tensor is None else full_tensor()
    return whole


def _write_header(file: BinaryIO, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    header |= dict(_entries(state))
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start on an 8-byte boundary
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)


def _entries(state: Mapping[str, Tensor]) -> Iterator[tuple[str, object]]:
    start = 0
    for name, tensor in state.items():
        end = start + tensor.numel() * tensor.element_size()
        yield name, {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
