"""Names that DeepSpeed scripts use in addition to `initialize` exist, or raise an error with an alternative."""

import argparse
import importlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import ConfigError, FullshardError, StateError, fully_shard, summon_full_params
from fullshard.integrations import deepspeed
from fullshard.testing import assert_same

CONFIG = {
    "train_batch_size": 8,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}


@on_ranks(2)
def test_deepspeed_tutorial_trains_after_changing_only_its_import():
    get_accelerator = importlib.import_module("fullshard.integrations.deepspeed.accelerator").get_accelerator
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed"])
    deepspeed.init_distributed()
    get_accelerator().set_device(0)
    get_accelerator().manual_seed_all(0)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, enabled=True):
        net = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 28 * 28, 10))
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(images, torch.arange(32) % 10)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=data, config=CONFIG
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None
    losses = []
    for _ in range(3):
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = engine(inputs if dtype is None else inputs.to(dtype))
            loss = nn.functional.cross_entropy(outputs, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    deepspeed.comm.barrier()
    assert deepspeed.comm.get_rank() == dist.get_rank()
    state = engine.module_state_dict()
    assert list(state) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    net[0].bias.requires_grad_(False)
    assert list(engine.module_state_dict(exclude_frozen_parameters=True)) == ["0.weight", "3.weight", "3.bias"]
    assert losses[-1] < losses[0] / 2


@on_ranks(2)
def test_gathered_parameters_unshards_and_keeps_changes_of_modifier_rank():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain = [param.detach().clone() for param in model.parameters()]
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 8)
    model(x).sum().backward()
    grads = [param.grad.full_tensor() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters())
    found = {}
    for name, param in model.named_parameters():  # scripts save stage 3 weights like this, one at a time
        with deepspeed.zero.GatheredParameters([param], enabled=True):
            assert not isinstance(dict(model.named_parameters())[name], DTensor)
            found[name] = param.data.cpu().to_local()
        assert dict(model.named_parameters())[name] is param
    assert_same(list(found.values()), plain)
    with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=1):
        model[0].weight.data.fill_(float(dist.get_rank()))
        with pytest.raises(StateError, match="within summon_full_params"):
            model(x)
    assert_same(model[0].weight.full_tensor(), torch.ones(8, 8))
    with deepspeed.zero.GatheredParameters(model.parameters()):
        nn.init.zeros_(model[1].weight)  # no modifier_rank, so discarded
    assert_same(model[1].weight.full_tensor(), plain[2])
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
        assert isinstance(model[0].weight, DTensor)
    assert_same([param.grad.full_tensor() for param in model.parameters()], grads)
    optimizer.step()
    assert_same(model[0].weight.full_tensor(), 1 - 1e-3 * grads[0])
    assert_same(model(x).shape, torch.Size([2, 8]))
    assert_same(deepspeed.utils.safe_get_full_fp32_param(model[1].bias), model[1].bias.full_tensor())
    assert_same(deepspeed.utils.safe_get_full_grad(model[1].bias), grads[3])
    with pytest.raises(ConfigError, match="fwd_module"), deepspeed.zero.GatheredParameters([], fwd_module=model):
        pass


@on_ranks(4)
def test_modifier_rank_can_be_any_rank_of_any_replica():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=mesh, strategy="hsdp")
    for source in range(4):
        with deepspeed.zero.GatheredParameters(model.weight, modifier_rank=source):
            model.weight.data.fill_(100.0 + dist.get_rank())
            with deepspeed.zero.GatheredParameters([model.weight, model.bias]):
                assert not isinstance(model.bias, DTensor)
                assert model.weight[0, 0] == 100 + dist.get_rank()
            assert isinstance(model.bias, DTensor)
        assert_same(model.weight.full_tensor(), torch.full((8, 8), 100.0 + source))
    wrong = deepspeed.zero.GatheredParameters(model.weight, modifier_rank=4)
    with pytest.raises(ConfigError, match=r"modifier_rank=4.*weight is on ranks \[0, 1, 2, 3\]"), wrong:
        pass
    if dist.get_rank() < 2:  # one replica can gather alone
        with summon_full_params(model):
            model.weight.sum()
    model(torch.ones(2, 8)).sum().backward()


def test_deepspeed_optimizers_create_torch_optimizers():
    params = [nn.Parameter(torch.ones(2))]
    adam = deepspeed.ops.adam
    assert type(adam.FusedAdam(params, weight_decay=0.1)) is torch.optim.AdamW
    assert type(adam.FusedAdam(params, adam_w_mode=False)) is torch.optim.Adam
    assert adam.DeepSpeedCPUAdam(params, lr=0.5).param_groups[0]["lr"] == 0.5
    for refused in ({"bias_correction": False}, {"fp32_optimizer_states": False}):
        with pytest.raises(ConfigError, match="Leave it out"):
            adam.DeepSpeedCPUAdam(params, **refused)


def test_get_accelerator_returns_one_cpu_device(caplog):
    device = deepspeed.get_accelerator()
    assert device is deepspeed.accelerator.get_accelerator()
    assert (device.device_name(), device.device_name(3), device.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (device.device_count(), device.current_device(), device.is_available()) == (1, 0, True)
    assert device.communication_backend_name() == "gloo"
    assert device.memory_allocated() == device.max_memory_allocated() == 0
    assert device.on_accelerator(torch.ones(1))
    assert device.is_bf16_supported()
    assert device.is_fp16_supported()
    assert device.Stream is torch.cpu.Stream
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    assert not hasattr(device, "op_builder_dir")
    with caplog.at_level(logging.INFO), device.device(0):
        deepspeed.utils.log_dist("here", ranks=[0])
        deepspeed.utils.log_dist("elsewhere", ranks=[1])
    assert [record.getMessage() for record in caplog.records] == ["[rank 0] here"]


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (deepspeed, "moe", "Experts on an axis"),
        (deepspeed, "init_inference", "Export the weights"),
        (deepspeed, "no_such_name", "docs/deepspeed.md"),
        (deepspeed.zero, "TiledLinear", "docs/deepspeed.md"),
        (deepspeed.comm, "inference_all_reduce", "docs/deepspeed.md"),
        (deepspeed.checkpointing, "get_cuda_rng_tracker", "docs/deepspeed.md"),
        (deepspeed.ops, "lamb", "docs/deepspeed.md"),
        (deepspeed.utils, "groups", "docs/deepspeed.md"),
    ],
    ids=lambda item: getattr(item, "__name__", item),
)
def test_unsupported_deepspeed_names_raise_with_alternative(module: Any, name: str, instead: str):
    assert not hasattr(module, name)
    with pytest.raises(FullshardError, match=f"{name} has no counterpart .*{instead}"):
        getattr(module, name)


def test_deepspeed_config_has_deepspeed_attributes():
    found = deepspeed.DeepSpeedConfig({**CONFIG, "train_batch_size": 8, "bf16": {"enabled": True}})
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (
        8,
        8,
        1,
    )
    assert (found.zero_optimization_stage, found.zero_enabled) == (3, True)
    assert (found.bfloat16_enabled, found.float16_enabled) == (True, False)
    assert (found.optimizer_name, found.scheduler_name, found.gradient_clipping) == ("adam", "WarmupLR", 1.0)
    assert deepspeed.__version__.split(".")[:2] == ["0", "19"]
    assert deepspeed.DeepSpeedEngine is deepspeed.Engine
    for arguments in ({"config": 42}, {"config": None}, {"config": CONFIG, "mpu": 1}, {"config": {"no_such_key": 1}}):
        with pytest.raises(ConfigError):
            deepspeed.DeepSpeedConfig(**arguments)


def test_on_device_sets_device_and_dtype_of_new_modules():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        weight = nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16)
    with deepspeed.OnDevice(torch.bfloat16, enabled=False):
        weight = nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)
    for arguments in ({"dtype": 42}, {"dtype": torch.int64}, {"dtype": torch.float16, "device": "no device"}):
        with pytest.raises(ConfigError):
            deepspeed.OnDevice(**arguments)


def test_activation_checkpointing_recomputes_in_backward():
    calls: list[int] = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x * x).sin()

    deepspeed.checkpointing.configure(None, partition_activations=False)
    assert deepspeed.checkpointing.is_configured()
    x = torch.ones(3, requires_grad=True)
    deepspeed.checkpointing.checkpoint(twice, x).sum().backward()
    assert len(calls) == 2
    assert_same([x.grad], [2 * torch.ones(3).cos()])
    deepspeed.checkpointing.reset()
    with pytest.raises(ConfigError, match="partition_activations=True"):
        deepspeed.checkpointing.configure(None, partition_activations=True)
