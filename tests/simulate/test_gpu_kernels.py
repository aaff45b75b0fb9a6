"""The tape of a GPU contains the kernels of CUDA, although a dry run uses CPU tensors."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import dry
from fullshard.tape.tape import HOST, Operation, Waited

SHAPE = (2, 4, 64, 32)


def heads(**options: Any) -> Tensor:
    return torch.empty(SHAPE, **{"dtype": torch.bfloat16, "requires_grad": True, **options})


def attended(**options: Any) -> Tensor:
    return F.scaled_dot_product_attention(heads(), heads(), heads(), **options)


def under_autocast() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch without CUDA warns that it disables this
        autocast = torch.autocast("cuda", torch.bfloat16)
    with autocast:
        return F.layer_norm(F.linear(heads(dtype=torch.float32), torch.empty(32, 32, requires_grad=True)), (32,))


def tape_of(call: Callable[[], Any], **how: Any) -> list[Operation]:
    with dry.taped(**how) as tape:
        call()
    others = ("aten.sum", "aten.ones_like", "aten.zeros", "aten.copy_")  # of the call's surroundings
    return [operation for operation in tape.of(Operation) if operation.name not in others]


def names(call: Callable[[], Tensor], **how: Any) -> list[str]:
    return [item.name.removeprefix("aten.") for item in tape_of(lambda: call().sum().backward(), **how)]


EFFICIENT = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]
FUSED: dict[str, tuple[Callable[[], Tensor], list[str]]] = {
    "dropout": (lambda: F.dropout(heads(), 0.1), ["native_dropout", "native_dropout_backward"]),
    "attention with dropout": (partial(attended, is_causal=True, dropout_p=0.1), EFFICIENT),
    "attention with a trained bias": (
        lambda: attended(attn_mask=torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)),
        EFFICIENT,
    ),
    "softmax that widens": (
        lambda: F.softmax(heads(dtype=torch.float16), dim=-1, dtype=torch.float32),
        ["_softmax", "_softmax_backward_data"],
    ),
    "rms norm": (lambda: F.rms_norm(heads(), (32,)), ["_fused_rms_norm", "_fused_rms_norm_backward"]),
    "autocast": (
        under_autocast,
        [
            *("_to_copy", "_to_copy", "mm", "_to_copy", "native_layer_norm"),
            *("native_layer_norm_backward", "_to_copy", "mm", "mm", "_to_copy", "_to_copy"),
        ],
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_cuda_fused_kernel_is_one_operation_without_side_effects(case):
    call, expected = FUSED[case]
    assert names(call) == expected
    of_cpu = names(call, streams="cpu")
    assert of_cpu != expected
    assert names(call, streams="cpu") == of_cpu
    with torch.autocast("cpu", torch.bfloat16):  # autocast on CPUs leaves the dtype unchanged
        assert F.layer_norm(torch.ones(2, 8, dtype=torch.bfloat16), (8,)).dtype == torch.bfloat16


def test_attention_flops_and_output_bytes_are_independent_of_dropout():
    (one, *_), (other, *_) = (tape_of(partial(attended, is_causal=True, dropout_p=p)) for p in (0.1, 0.0))
    assert (one.flops, one.skipped_flops, one.writes[0].nbytes) == (
        other.flops,
        other.skipped_flops,
        other.writes[0].nbytes,
    )
    assert "efficient" in one.name and "flash" in other.name


def test_dropout_mask_has_one_byte_per_element():
    (dropout,) = tape_of(lambda: F.dropout(heads(), 0.1))
    numel = heads().numel()
    assert sorted(write.nbytes for write in dropout.writes) == [numel, 2 * numel]
    assert not tape_of(lambda: F.dropout(heads(), 0.1, training=False))


def test_optimizers_use_foreach_with_step_counters_on_the_host():
    def step() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.empty(2, 8)).sum().backward()
        optimizer.step()

    with dry.taped() as tape:
        step()
    streams = [(operation.name.removeprefix("aten._"), operation.stream) for operation in tape.of(Operation)]
    assert ("foreach_add_", HOST) in streams and ("local_scalar_dense", HOST) in streams
    assert ("foreach_addcmul_", "compute") in streams and ("local_scalar_dense", "compute") not in streams
    assert not list(tape.of(Waited))  # a step counter in GPU memory would cause a wait
    assert "aten._foreach_addcmul_" not in [item.name for item in tape_of(step, streams="cpu")]
