"""Checks that need several GPUs, over NCCL: the checks of `test_gpu.py` with two ranks, and with one per GPU.

All ranks have the same batch. With two ranks the mean is exact in whichever order NCCL adds, so plain PyTorch on each
rank is the reference. With more ranks, sums may differ in their last bits.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import ONE_AXIS, leave
from test_gpu import agree_in_a_graph, agree_on_a_gpu, learn, steps_without_waiting
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard
from fullshard.testing import assert_same, run_ranks

DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")]


def test_nccl_training_on_two_ranks_matches_plain_pytorch_bitwise():
    run_ranks(2, agree_on_a_gpu, backend="nccl")


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_training_step_on_two_ranks_does_not_synchronize_host(strategy):
    run_ranks(2, steps_without_waiting, strategy, backend="nccl")


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_cuda_graph_of_step_on_two_ranks_matches_eager_step_bitwise(strategy):
    run_ranks(2, agree_in_a_graph, strategy, backend="nccl")


@on_new_ranks(2, backend="nccl")
def test_hsdp_with_two_replicas_matches_plain_pytorch_bitwise():
    expected = learn(leave)
    for strategy in ("hsdp", "hsdp_zero2"):
        mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("replicate", "shard"))
        assert_same(learn(partial(fully_shard, strategy=strategy, mesh=mesh)), expected, name=strategy)


def learn_everywhere() -> tuple[list[Any], list[list[Any]]]:
    assert dist.get_world_size() == DEVICES
    return learn(leave), [learn(partial(fully_shard, strategy=strategy)) for strategy in ONE_AXIS]


def test_training_on_all_gpus_matches_plain_pytorch_losses():
    for expected, found in run_ranks(DEVICES, learn_everywhere, backend="nccl"):
        for each in found:
            torch.testing.assert_close(each[0], expected[0], rtol=1e-4, atol=1e-5)
