"""Every user mistake that the package checks for: the exception, a message that states what was found and what to do,
and no communication before it.

A mistake is a function. In a generator, the code before `yield` is valid, and the code after it is the mistake.
A new `raise` in the package needs a mistake here, unless ELSEWHERE lists its file.
"""

import ast
import copy
import dataclasses
import functools
import inspect
import os
import pickle
import re
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from logged import Operations
from small_models import Chain, Layer, chain, inputs
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from wrapped_weights import Codes, FlatWeight, LowLinear, OneHook, Weight, encode

import fullshard
from fullshard import (
    CheckpointError,
    ConfigError,
    DataParallelMeshDims,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LayoutError,
    MissingLibraryError,
    MixedPrecision,
    MixedPrecisionPolicy,
    Offload,
    OptimStateKeyType,
    Placement,
    Placements,
    ShardedStateDictConfig,
    ShardPlacementResult,
    StateDictType,
    StateError,
    clip_grad_norm_,
    dry,
    fully_shard,
    recording,
    register_fsdp_forward_method,
    stream_weights,
    summon_full_params,
)
from fullshard._compat import storage_info
from fullshard.checkpoint import container, export_safetensors, load, save
from fullshard.comm import routes
from fullshard.command_line import parse
from fullshard.device.accelerator import pretending_to_capture
from fullshard.engine.hooks import runtime_of
from fullshard.engine.registry import units_in
from fullshard.layout.shard_spec import ShardSpec
from fullshard.optim import Muon, step_shards
from fullshard.plan import calibration, hardware
from fullshard.plan.costs import costs_of
from fullshard.plan.ledger import predict_ledger
from fullshard.report.destinations import DESTINATIONS, check_destination
from fullshard.report.rank_file import path_of
from fullshard.report.reading import read_run
from fullshard.state.block_states import BlockStates
from fullshard.state.names import OWN
from fullshard.state.optim_state import full_optim_state_dict, optim_state_dict, optim_state_dict_to_load
from fullshard.testing import Parallelism, ParityReport, ParityRow, check_parity, run_ranks
from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.command import run as run_parity
from fullshard.testing.parity.context import attention_over, cut_batch
from fullshard.testing.parity.difference import Tolerance
from fullshard.testing.parity.parallel import ParallelAxes
from fullshard.testing.parity.recipe import ClassNames, Recipe
from fullshard.testing.parity.settings import ParitySettings
from fullshard.testing.parity.stages import find_cut
from fullshard.testing.parity.tensor import cut
from fullshard.testing.parity.unsharded import Divided
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, transformer_auto_wrap_policy

Steps = Iterator[None]


@dataclass(frozen=True)
class Mistake:
    steps: Callable[[], Steps | None]
    kind: type[Exception]
    stated: tuple[str, ...]  # patterns: what was found, what to do
    ranks: int  # 0: no process group
    sends: bool  # sends before it raises: within a forward, or to report an error that only one rank can see


MISTAKES: dict[str, Mistake] = {}


def mistake(kind: type[Exception], *stated: str, ranks: int = 2, sends: bool = False) -> Callable[[Any], Any]:
    def register(steps: Callable[[], Steps | None]) -> Callable[[], Steps | None]:
        MISTAKES[steps.__name__] = Mistake(steps, kind, stated, ranks, sends)
        return steps

    return register


def linear() -> nn.Linear:
    return nn.Linear(8, 6)


def sharded(**options: Any) -> Any:
    """Return a chain after ranks have first compared their models."""
    model = chain(partial(fully_shard, **options))
    runtime_of(model)
    return model


def wrapped(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(linear(), **options)


def linear_with(weight: Tensor) -> nn.Sequential:
    """Return a linear layer that has `weight`, and nothing else."""
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    model[0].weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return model


@mistake(ConfigError, "weight of LazyLinear has no shape yet", "Run a forward on every rank before sharding")
def a_lazy_module() -> Steps:
    yield
    fully_shard(nn.LazyLinear(6))


@mistake(ConfigError, "0.weight and 1.weight are different parameters in the same memory", "Make them one parameter")
def parameters_tied_by_their_data() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    fully_shard(model)


@mistake(ConfigError, "0 was created by torch.jit.script, which does not support hooks", "Shard the original module")
def a_scripted_module() -> Steps:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(torch.jit.script(linear()))
    yield
    fully_shard(model)


@mistake(StateError, r"fully_shard was called within torch.inference_mode\(\)", "Shard the model outside of it")
def sharding_in_inference_mode() -> Steps:
    yield
    with torch.inference_mode():
        fully_shard(linear())


@mistake(
    ConfigError,
    "0.weight is a TwoTensor, a tensor subclass without fsdp_pre_all_gather",
    "before converting its parameters",
)
def a_tensor_subclass() -> Steps:
    model = linear_with(TwoTensor(torch.ones(6, 8), torch.ones(6, 8)))
    yield
    fully_shard(model)


@mistake(ConfigError, "0.weight is a TwoTensor, a tensor subclass without", "list it in ignored_params", ranks=4)
def a_tensor_subclass_in_tensor_parallelism() -> Steps:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = TwoTensor(torch.ones(6, 8), torch.ones(6, 8))
    model = linear_with(DTensor.from_local(local, mesh["tp"], [Cut(0)], run_check=False))
    yield
    fully_shard(model, mesh=mesh["dp"])


@mistake(ConfigError, "0.weight is a OneHook, a tensor subclass without", "list it in ignored_params")
def half_of_the_hooks_for_payloads() -> Steps:
    model = linear_with(OneHook(torch.ones(6, 8)))
    yield
    fully_shard(model)


@mistake(ConfigError, r"0.weight is a plain tensor .* axes tp \(2\) is annotated", "spmd_backend partial_", ranks=4)
def a_place_that_is_annotated() -> Steps:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = nn.Parameter(torch.ones(6, 8))
    weight._local_type = {"tp": "R"}  # type: ignore[attr-defined]  # as spmd_types does
    model = linear_with(weight)
    yield
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))


class Params4bit(nn.Parameter):
    """A stand-in for bitsandbytes' class."""

    __module__ = "bitsandbytes.nn.modules"


@mistake(ConfigError, "0.weight is a bitsandbytes.nn.modules.Params4bit without a quant_state", "before fully_shard")
def weights_that_are_to_be_quantized_later() -> Steps:
    model = linear_with(Params4bit(torch.ones(6, 8)))
    yield
    fully_shard(model)


class ScaledParam(nn.Parameter):
    """A parameter with a scale of its size."""


@mistake(
    ConfigError,
    r"0.weight is a \w+.ScaledParam with additional tensors \(scale\)",
    "list it in ignored_params|List it",
)
def a_parameter_that_keeps_other_tensors() -> Steps:
    weight = ScaledParam(torch.ones(6, 8))
    weight.scale = torch.ones(6, 8)
    model = linear_with(weight)
    yield
    fully_shard(model)


class OddHook(Weight):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any: ...


@mistake(ConfigError, "0.weight, a OddHook .* takes 2 arguments", r"Expected \(mesh\)")
def a_hook_for_payloads_of_other_arguments() -> Steps:
    model = linear_with(OddHook(torch.ones(6, 8)))
    yield
    fully_shard(model)


@mistake(
    ConfigError,
    r"0.weight, a Weight .* sharded along dim 1 of its shape \(6, 8\)",
    r"return None or Shard\(0\)",
)
def payloads_along_another_dim() -> Steps:
    model = linear_with(Weight(torch.ones(6, 8)))
    yield
    fully_shard(model, shard_placement_fn=lambda param: Cut(1))


@mistake(ConfigError, "0.weight, a Weight .* cannot be sharded in groups of 2 ranks", "'zero3' or 'hsdp'", ranks=4)
def payloads_kept_in_groups() -> Steps:
    model = linear_with(Weight(torch.ones(6, 8)))
    yield
    fully_shard(model, reshard_after_forward=2)


@mistake(
    ConfigError, r"0.weight is a NotCut of shape \(6, 8\), which cannot be sharded by rows", "that fits its blocks"
)
def payloads_that_cannot_be_cut() -> Steps:
    model = linear_with(NotCut(torch.ones(6, 8)))
    yield
    fully_shard(model)


class NotCut(Weight):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError("it is one block")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Lopsided(Weight):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = super().__torch_dispatch__(func, types, args, kwargs)
        return parts[:1] if func is torch.ops.aten.split.Tensor else parts


@mistake(ConfigError, r"0.weight is a Lopsided .* shards have \[3\] rows instead of \[3, 3\]", "that fits its blocks")
def payloads_that_are_cut_otherwise() -> Steps:
    model = linear_with(Lopsided(torch.ones(6, 8)))
    yield
    fully_shard(model)


@mistake(ConfigError, "param_dtype=torch.bfloat16, but 0.weight, a Weight, is never gathered", "such as 'zero1'")
def payloads_that_are_cast_but_never_gathered() -> Steps:
    model = linear_with(Weight(torch.ones(6, 8)))
    yield
    fully_shard(model, strategy="ddp", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@mistake(
    ConfigError,
    r"weight is a FlatWeight of 5 rows, .* shape \(24,\) for 3 rows",
    "that divides the rows",
    sends=True,
)
def payloads_without_rows_of_an_uneven_shard() -> Steps:
    layer = fully_shard(LowLinear(8, 5, FlatWeight))
    yield
    layer(torch.ones(2, 8))


class OtherForm(Weight):
    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return gathered[1], ()


@mistake(
    ConfigError,
    r"fsdp_post_all_gather of OtherForm returned a Tensor of shape \(6,\)",
    "the full parameter",
    sends=True,
)
def payloads_made_into_another_shape() -> Steps:
    layer = fully_shard(LowLinear(8, 6, OtherForm))
    yield
    layer(torch.ones(2, 8))


@mistake(StateError, "fsdp_pre_all_gather of Moody returned .* before", "must keep their shapes and dtypes", sends=True)
def payloads_that_change() -> Steps:
    layer = fully_shard(LowLinear(8, 6, Moody))
    layer(torch.ones(2, 8))
    layer.reshard()
    yield
    layer(torch.ones(2, 8))


class Moody(Weight):
    times = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        Moody.times += 1
        return tuple(item.double() if Moody.times > 1 else item for item in encode(self.values)), None


@mistake(StateError, "copy.deepcopy of FSDPLowLinear: weight of .* is a Weight", "Copy the module before fully_shard")
def a_copy_of_payloads() -> Steps:
    layer = fully_shard(LowLinear(8, 6))
    yield
    copy.deepcopy(layer)


@mistake(StateError, "stream_weights: 0.weight is a Codes, which encodes its values", "To skip it")
def a_stream_of_codes() -> Steps:
    layer = fully_shard(linear_with(Codes.of(torch.ones(6, 8))))
    yield
    stream_weights(layer)


@mistake(CheckpointError, "0.weight is a Codes, which encodes its values", "such as adapters", sends=True)
def an_export_of_codes() -> Steps:
    layer = fully_shard(linear_with(Codes.of(torch.ones(6, 8))))
    yield
    export_safetensors(layer, tempfile.gettempdir())


@mistake(StateError, "weight, a Codes with encoded values, was changed", "pass writeback=False", sends=True)
def summoned_codes_that_were_changed() -> Steps:
    layer = fully_shard(linear_with(Codes.of(torch.ones(6, 8))))
    yield
    with summon_full_params(layer):
        layer[0].weight = nn.Parameter(torch.ones(6, 8))


@mistake(ConfigError, "weight of Linear is shared by two units", "before any module that")
def blocks_that_share_a_module() -> Steps:
    shared = linear()
    first, second = nn.Sequential(linear(), shared), nn.Sequential(linear(), shared)
    fully_shard(first)
    yield
    fully_shard(second)


@mistake(ConfigError, "weight of Linear belongs to the unit of FSDPSequential around it", "inner modules first")
def the_root_before_its_layers() -> Steps:
    model = fully_shard(nn.Sequential(linear(), nn.ReLU()))
    yield
    fully_shard(model[0])


@mistake(ConfigError, "Linear has no units, so nothing can be reported", "Call fully_shard first")
def a_report_of_a_model_that_is_not_sharded() -> None:
    fullshard.report(linear(), "nowhere")


@mistake(ConfigError, "first_step=0", "step numbers start at 1")
def a_report_from_before_the_first_step() -> Steps:
    model = fully_shard(linear())
    yield
    fullshard.report(model, "nowhere", first_step=0)


@mistake(ConfigError, "log_to='paper': unknown", "Expected one of tensorboard, wandb, mlflow")
def a_report_to_an_unknown_destination() -> Steps:
    model = fully_shard(linear())
    yield
    fullshard.report(model, "nowhere", log_to="paper")


@mistake(MissingLibraryError, "log_to='notes' needs notes", r"pip install 'fullshard\[notes\]'")
def a_report_by_a_library_that_is_missing() -> None:
    with mock.patch.dict(DESTINATIONS, {"notes": DESTINATIONS["mlflow"]}):
        check_destination("notes")


@mistake(ConfigError, "nowhere: no run was recorded there", "before the first step")
def a_report_of_nothing() -> None:
    read_run(Path("nowhere"))


@mistake(ConfigError, r"optimizer=\{'tape': 1\}\): 'tape' is not a tier of optimizer", "Expected one of 'cpu', 'disk'")
def a_tier_that_does_not_exist() -> None:
    Offload(optimizer={"tape": 1}, folder="nowhere")


@mistake(ConfigError, r"Offload\(optimizer=\{'disk': 1.5\}\): each fraction must be", "from 0 to 1")
def more_than_all_on_a_disk() -> None:
    Offload(optimizer={"disk": 1.5}, folder="nowhere")


@mistake(
    ConfigError, r"Offload\(optimizer=0.5\): expected the fraction on each tier", r'optimizer=\{"cpu": 0.5\}', ranks=0
)
def a_fraction_of_no_tier() -> None:
    Offload(optimizer=0.5)  # type: ignore[arg-type]


@mistake(ConfigError, r"activations=\{'disk': '1'\}\): expected the fraction", "from 0 to 1", ranks=0)
def a_fraction_in_words() -> None:
    Offload(activations={"disk": "1"}, folder="nowhere")  # type: ignore[dict-item]


@mistake(
    ConfigError,
    "offload_policy='cpu' is not an offload policy",
    r"Pass fullshard.Offload\(...\) or fullshard.CPUOffloadPolicy\(\)",
)
def a_policy_in_words() -> None:
    fully_shard(linear(), offload_policy="cpu")  # type: ignore[arg-type]


@mistake(ConfigError, r"offload_policy\['0'\]=1.0 is not an offload policy", "or leave it out")
def a_number_for_a_policy() -> None:
    policies: Any = {"0": 1.0}
    fully_shard(nn.Sequential(linear()), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), offload_policy=policies)


@mistake(ConfigError, "budgets of '1GB' and '2GB' for units of one model", "the same policy", sends=True)
def two_budgets() -> Steps:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policies = {"0": Offload(budget="1GB"), "1": Offload(budget="2GB")}
    fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), offload_policy=policies)
    model(torch.ones(2, 8)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    yield
    optimizer.step()


@mistake(ConfigError, "is also on the CPU. This is 0.75 of the state", "at most 0.25 can be on a disk")
def one_state_on_the_cpu_and_on_a_disk() -> None:
    Offload(optimizer={"cpu": 0.5, "disk": 0.5}, parameters={"cpu": 0.75}, folder="nowhere")


@mistake(ConfigError, "no unit name matches 'blocks", "The units are '', '0', '1', where '' is the module itself")
def a_pattern_that_matches_no_unit() -> None:
    model = nn.Sequential(linear(), linear())
    policies = {"blocks.*": Offload(optimizer={"cpu": 1})}
    fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), offload_policy=policies)


@mistake(ConfigError, r"offload_policy names units \(0, 1\)", "pass each unit its policy in its own fully_shard call")
def policies_by_name_for_one_unit() -> None:
    policy = Offload(optimizer={"cpu": 1})
    fully_shard(nn.Sequential(linear(), linear()), offload_policy={"0": policy, "1": policy})


@mistake(ConfigError, "offloads to disk without a folder", 'folder="/nvme/run"')
def a_disk_without_a_folder() -> None:
    Offload(optimizer={"disk": 0.5})


@mistake(ConfigError, r"Offload\(budget=1000, optimizer=\{'disk': 0.5\}", "Leave one of them out")
def a_budget_and_fractions() -> None:
    Offload(budget=1000, optimizer={"disk": 0.5}, folder="nowhere")


@mistake(ConfigError, r"Offload\(budget\)='a lot' is not a size of memory", "such as '500MB'")
def a_budget_in_other_words() -> None:
    Offload(budget="a lot")


@mistake(
    ConfigError,
    r"Offload\(budget=10\): a rank needs at least \d+ bytes with everything offloaded",
    r"Give budget=\d+",
    sends=True,
)
def a_budget_that_nothing_fits_in() -> Steps:
    model = fully_shard(linear(), offload_policy=Offload(budget=10))
    model(torch.ones(2, 8)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    yield
    optimizer.step()


@mistake(
    ConfigError,
    r"need \d+ more bytes of host memory per rank, but 0 are available",
    r"Pass a folder on a disk, so that states can also be stored there, give budget=\d+, free host memory; or shard",
    sends=True,
)
def a_budget_for_which_the_host_has_no_room() -> Steps:
    with dry.taped(values=True, host_bytes=0):
        model = chain(partial(fully_shard, offload_policy=Offload(budget=1_000_000)))
        model(inputs()).square().mean().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        yield
        optimizer.step()


@mistake(
    StateError, "Chain was sharded outside of this context of .*taped", "train a model within one context", sends=True
)
def a_model_that_enters_a_dry_run() -> Steps:
    model = sharded()
    yield
    with dry.taped(values=True):
        model(inputs())


@mistake(
    ConfigError, "the ranks of a DeviceMesh are a tensor, which has no values in a dry run", "Pass a list of ranks"
)
def a_mesh_of_a_tensor_in_a_dry_run() -> None:
    with dry.taped():
        DeviceMesh("cpu", torch.arange(dist.get_world_size()))


@mistake(ConfigError, "this strategy keeps full parameters in memory between steps", "'zero3' or 'hsdp'")
def parameters_on_a_disk_that_stay_whole() -> None:
    policy = Offload(parameters={"disk": 1}, folder=tempfile.gettempdir())
    fully_shard(linear(), strategy="zero1", offload_policy=policy)


@mistake(ConfigError, "with reduce_wire='int8': gradients on a disk", "Leave reduce_wire out")
def encoded_gradients_on_a_disk() -> None:
    policy = Offload(parameters={"disk": 1}, folder=tempfile.gettempdir())
    fully_shard(linear(), mp_policy=MixedPrecisionPolicy(reduce_wire="int8"), offload_policy=policy)


@mistake(ConfigError, "weight is a Weight, a subclass that holds several tensors", "a policy without parameters")
def wrapped_parameters_on_a_disk() -> Steps:
    model = linear_with(Weight(torch.ones(6, 8)))
    yield
    fully_shard(model, offload_policy=Offload(parameters={"disk": 1}, folder=tempfile.gettempdir()))


@mistake(StateError, "parameters offloaded to disk were needed within a CUDA graph", "Leave parameters out of Offload")
def a_graph_of_parameters_on_a_disk() -> Steps:
    model = fully_shard(linear(), offload_policy=Offload(parameters={"disk": 1}, folder=tempfile.gettempdir()))
    model(torch.ones(2, 8))
    with pretending_to_capture():
        yield
        model(torch.ones(2, 8))


@mistake(
    ConfigError,
    "Whole may need all parameters at once, but Offload",
    "step_shards",
    sends=True,
)
def states_on_a_disk_of_an_optimizer_that_is_not_known() -> Steps:
    class Whole(torch.optim.SGD):
        """An optimizer that the package does not know."""

    model = fully_shard(linear(), offload_policy=Offload(optimizer={"disk": 1}, folder=tempfile.gettempdir()))
    model(torch.ones(2, 8)).sum().backward()
    optimizer = Whole(model.parameters(), lr=0.1)
    yield
    optimizer.step()


@mistake(ConfigError, "group of 1 ranks: the model is not sharded over this group", "Leave group out")
def a_group_that_the_model_is_not_sharded_over() -> Steps:
    model = wrapped()
    group = dist.new_subgroups(1)[0]
    yield
    FullyShardedDataParallel.optim_state_dict(model, torch.optim.SGD(model.parameters()), group=group)


@mistake(
    StateError, "Linear was called while its weight .0.weight of the root. is sharded", "register_fsdp_forward_method"
)
def a_layer_called_alongside_its_unit() -> Steps:
    model = fully_shard(nn.Sequential(linear(), nn.ReLU()))
    model(torch.ones(2, 8)).sum().backward()
    yield
    model[0](torch.ones(2, 8))


@mistake(
    StateError, "reached the root, which is trained, but not its parameters", "integrations.pipelining", sends=True
)
def a_backward_of_a_pipeline_s_stage_in_two_parts() -> Steps:
    group = dist.new_subgroups(1)[0]
    stage = PipelineStage(sharded(), 0, 1, torch.device("cpu"), group=group)
    x = inputs().requires_grad_()
    # torch 2.11 compares them with the records of a schedule.
    stage._validate_fwd_input = stage._validate_fwd_outputs = lambda *args: None
    yield
    torch.autograd.grad(stage.forward_one_chunk(0, (x,)).sum(), x)


class Differentiating(Chain):
    """Computes a gradient within its forward, through a layer that is a unit."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.layers[0](x).square().sum(), x, create_graph=True)[0]


@mistake(StateError, "a backward through a unit began within the forward of the root", "torch.func.grad", sends=True)
def a_gradient_within_a_forward() -> Steps:
    model = chain(fully_shard, Differentiating())
    x = inputs().requires_grad_()
    yield
    model(x)


@mistake(StateError, "stage_backward_input was called on FSDPChain, which is sharded", sends=True)
def a_backward_in_two_parts_without_a_stage() -> Steps:
    model, x = sharded(), inputs().requires_grad_()
    yield
    found: BaseException | None = None
    try:
        stage_backward_input([model(x).sum()], None, [x], model.parameters())
    except RuntimeError as error:
        found = error if isinstance(error, StateError) else error.__cause__  # torch 2.11 does not wrap it
    model(inputs()).sum().backward()  # the failed backward leaves no state
    assert all(param.grad is not None for param in model.parameters())
    assert found is not None
    raise found


@mistake(ConfigError, "bucket_bytes=0", "positive number")
def buckets_for_nothing() -> Steps:
    model = sharded()
    yield
    stream_weights(model, bucket_bytes=0)


@mistake(ConfigError, "names are used for several weights", "a unique name")
def weights_of_one_name() -> Steps:
    model = sharded()
    yield
    stream_weights(model, rename=lambda name: "weight")


@mistake(StateError, "finalize_backward of FSDP", r"set_manual_backward_finalization\(True\)")
def a_backward_finalized_by_hand_that_hooks_finalize() -> Steps:
    model = sharded()
    yield
    model.finalize_backward()


@mistake(StateError, r"second.weight of shape \(5, 48\) was added after fully_shard", "before fully_shard")
def a_head_that_is_added_after_sharding() -> Steps:
    model = sharded()
    yield
    model.second = nn.Linear(48, 5)
    model(inputs())


class Pretrained(nn.Sequential):
    """Has methods of transformers' models."""

    def get_input_embeddings(self) -> nn.Module:
        return self[0]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None) -> None:
        assert (new_num_tokens or 8) == 8

    def save_pretrained(self, folder: str, state_dict: Any = None, **kwargs: Any) -> None:
        assert state_dict is not None


def pretrained(shard: Callable[[nn.Module], Any] = fully_shard) -> Any:
    model = shard(Pretrained(nn.Embedding(8, 6)))
    model.resize_token_embeddings(8, pad_to_multiple_of=4)
    model.save_pretrained("folder", state_dict={})
    return model


@mistake(
    StateError, "save_pretrained of FSDPPretrained, which is sharded", "full_state_dict=True", "export_safetensors"
)
def weights_saved_as_if_they_were_whole() -> Steps:
    model = pretrained()
    yield
    model.save_pretrained("folder")


@mistake(StateError, "save_pretrained of Pretrained, which is sharded", "pass it to save_pretrained as state_dict")
def wrapped_weights_saved_as_if_they_were_whole() -> Steps:
    model = pretrained(FullyShardedDataParallel)
    yield
    model.save_pretrained("folder")


@mistake(StateError, "resize_token_embeddings of FSDPPretrained, which is sharded", "before sharding the model")
def embeddings_resized_after_sharding() -> Steps:
    model = pretrained()
    yield
    model.resize_token_embeddings(9)


@mistake(StateError, "DistributedDataParallel around Sequential, whose 0.weight is sharded", "strategy='hsdp'")
def ddp_around_a_unit() -> Steps:
    model = nn.Sequential(linear(), linear())
    fully_shard(model[0])
    yield
    DistributedDataParallel(model)


@mistake(ConfigError, "has no axes", r"DataParallelMeshDims\(shard=", ranks=0)
def a_mesh_by_no_names() -> None:
    DataParallelMeshDims()


@mistake(ConfigError, r"shard='dp'.*but none was given", "Pass mesh=init_device_mesh")
def names_without_a_mesh() -> None:
    fully_shard(linear(), dp_mesh_dims=DataParallelMeshDims(shard="dp"))


@mistake(ConfigError, r"names 'cp', but the axes of the mesh are \('dp', 'tp'\)", "List each axis to shard")
def an_axis_that_the_mesh_lacks() -> Steps:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    yield
    fully_shard(linear(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))


@mistake(ConfigError, "axes to replicate over and none to shard over, but strategy='zero2'", "Leave it out")
def a_strategy_that_shards_over_replicas_only() -> Steps:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    yield
    fully_shard(linear(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"), strategy="zero2")


@mistake(ConfigError, r"weight is already a DTensor .* already sharded over \['dp'\]", r"Place it Replicate\(\) there")
def a_parameter_that_is_cut_on_the_axis_to_shard_over() -> Steps:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = linear()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Cut(0)]))
    yield
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


@mistake(ConfigError, "shard_placement_fn chose the mesh 3 for weight", "HSDPMeshInfo")
def a_mesh_that_is_none() -> None:
    fully_shard(linear(), shard_placement_fn=lambda _: ShardPlacementResult(None, 3))


@mistake(ConfigError, r"chose DeviceMesh.* for weight, but its unit is on DeviceMesh", "same type of device", ranks=4)
def a_mesh_of_another_device() -> Steps:
    other = copy.copy(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))["efsdp"])
    other._device_type = "xpu"
    yield
    fully_shard(linear(), shard_placement_fn=lambda _: ShardPlacementResult(None, other))


@mistake(ConfigError, r"replicate\(dp_mesh_dims=.*shard='dp'", "Pass them as replicate=")
def replicas_over_an_axis_to_shard_over() -> Steps:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    yield
    fullshard.replicate(linear(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


@mistake(ConfigError, r"set_all_reduce_hook\(stream=...\): .* has a replicate axis", "Leave stream out")
def a_stream_for_a_hook_alongside_replicas() -> Steps:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(linear(), mesh=mesh)
    yield
    model.set_all_reduce_hook(print, stream=object())


@mistake(ConfigError, r"set_keep_unsharded_storage\(True\)", r"share_memory_between_units\(True\)")
def keep_addresses_of_unsharded_parameters() -> Steps:
    model = sharded()
    model.set_keep_unsharded_storage(keep=False, recurse=False)
    yield
    model.set_keep_unsharded_storage(True)


@mistake(ConfigError, r"set_custom_all_gather\(object\)", "register_backend")
def a_gather_of_ones_own() -> Steps:
    model = fully_shard(linear())
    yield
    model.set_custom_all_gather(object())


@mistake(ConfigError, r"set_custom_reduce_scatter\(object\)", "register_backend")
def a_reduction_of_ones_own() -> Steps:
    model = fully_shard(linear())
    yield
    model.set_custom_reduce_scatter(object())


@mistake(ConfigError, r"set_reduce_scatter_max_input_buffers\(True\)", "an integer of 1 or more")
def buffers_that_are_no_number() -> Steps:
    model = fully_shard(linear())
    yield
    model.set_reduce_scatter_max_input_buffers(True)


@mistake(StateError, r"take_part\(FSDPLinear\)", r"Call set_reduce_scatter_unused_params\(True\) on it first")
def a_part_in_what_is_reduced_at_its_last_gradient() -> Steps:
    model = fully_shard(linear())
    yield
    fullshard.take_part(model)


@mistake(ConfigError, "keeps states in groups of 2 ranks", "a separate unit", ranks=4)
def a_mesh_for_some_parameters_alongside_groups() -> Steps:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))["efsdp"]
    yield
    fully_shard(linear(), reshard_after_forward=2, shard_placement_fn=lambda _: ShardPlacementResult(None, other))


@mistake(
    ConfigError, "the optimizer state dict has 'other.weight', but SGD has 2 parameters", "the optimizer that was saved"
)
def rekey_the_state_of_another_model() -> Steps:
    model = wrapped()
    state = {"state": {"other.weight": {}}, "param_groups": []}
    yield
    optimizer = torch.optim.SGD(model.parameters())
    FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, optim=optimizer)


def stepped_by(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    model = sharded()
    optimizer = make(model.parameters())
    model(inputs()).sum().backward()
    return model, optimizer


@mistake(ConfigError, "Adafactor computes sums over full parameters, but each rank", "Use AdamW, or Muon")
def step_with_sums_over_rows() -> Steps:
    _, optimizer = stepped_by(torch.optim.Adafactor)
    yield
    optimizer.step()


@mistake(ConfigError, "LBFGS computes sums over full parameters", "Use AdamW, or keep parameters whole")
def step_shards_by_lbfgs() -> Steps:
    _, optimizer = stepped_by(torch.optim.LBFGS)
    yield
    step_shards(optimizer)


@mistake(ConfigError, r"Rprop cannot step DTensors, but \d+ sharded parameters", r"step_shards\(optimizer\)")
def step_with_operations_that_dtensor_lacks() -> Steps:
    _, optimizer = stepped_by(torch.optim.Rprop)
    yield
    optimizer.step()


@mistake(ConfigError, "Rprop cannot step DTensors, but 1 sharded parameters are DTensors", r"step_shards\(optimizer\)")
def step_a_replicated_scalar_by_masks() -> Steps:
    layer = nn.Linear(16, 16)
    layer.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    model = fully_shard(layer, strategy="ddp")
    optimizer = torch.optim.Rprop(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    yield
    optimizer.step()


class Blocks(BlockStates):
    """Block states of an optimizer that encodes all states."""

    def encodes(self, param: nn.Parameter) -> bool:
        return True

    def _describe(self) -> str:
        return "in blocks"


@mistake(
    ConfigError, r"SGD encodes states in blocks of 1000 elements, but shards of .* on 2 ranks", "shard_alignment=1000"
)
def shards_that_are_no_whole_blocks() -> Steps:
    _, optimizer = stepped_by(torch.optim.SGD)
    with mock.patch("fullshard.optim.local_steps.block_states", lambda item: Blocks(item, 1000)):
        yield
        step_shards(optimizer)


@mistake(
    ConfigError,
    r"has the states of .* \(plain in it, in blocks in the optimizer\)",
    "that encodes states in the same way",
)
def a_state_dict_of_states_that_are_encoded_otherwise() -> Steps:
    model, optimizer = stepped_by(partial(torch.optim.SGD, momentum=0.9))
    optimizer.step()
    states = full_optim_state_dict(model, optimizer, rank0_only=False)
    with mock.patch("fullshard.state.optim_state.block_states", lambda item: Blocks(item, 1000)):
        yield
        optim_state_dict_to_load(model, optimizer, states)


@mistake(
    StateError,
    r"'momentum_buffer' of layers\.0\.norm\.weight is a full tensor",
    "Load the result of .*optim_state_dict_to_load",
)
def whole_states_for_an_optimizer_that_encodes_them_in_blocks() -> Steps:
    _, optimizer = stepped_by(partial(torch.optim.SGD, momentum=0.9))
    optimizer.step()
    state_dict = optimizer.state_dict()
    for values in state_dict["state"].values():
        values["momentum_buffer"] = torch.zeros(values["momentum_buffer"].shape)
    with mock.patch("fullshard.state.loaded_states.block_states", lambda item: Blocks(item, 1000)):
        yield
        optimizer.load_state_dict(state_dict)


@mistake(StateError, r"SGD has no state, .* cannot load full states", "Leave out full_state_dict")
def whole_states_for_an_optimizer_without_states() -> Steps:
    model, optimizer = stepped_by(torch.optim.SGD)
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    yield
    set_optimizer_state_dict(model, optimizer, states, options=options)


@mistake(
    ConfigError, r"saved by another class, loaded into AdamW \(its options have .*momentum", "the class that was saved"
)
def a_state_dict_of_another_optimizer() -> Steps:
    model, optimizer = stepped_by(partial(torch.optim.SGD, momentum=0.9))
    optimizer.step()
    states = full_optim_state_dict(model, optimizer, rank0_only=False)
    other = torch.optim.AdamW(model.parameters())
    yield
    optim_state_dict_to_load(model, other, states)


@mistake(ConfigError, "shard_alignment=0: expected a number of elements, 1 or more", "such as 256")
def blocks_of_nothing() -> None:
    sharded(shard_alignment=0)


@mistake(ConfigError, r"weight of shape \(65, 65\), sharded along dim 1 over 2 ranks, .* not a multiple of", "Choose")
def blocks_along_another_dim() -> Steps:
    model = nn.Linear(65, 65, bias=False)
    yield
    fully_shard(model, shard_alignment=256, shard_placement_fn=lambda _: Cut(1))


@mistake(
    StateError, "'scales' of .* in the state of SGD covers only this rank's shard", "Save the model without the optim"
)
def save_the_state_of_a_shard() -> Steps:
    model, optimizer = stepped_by(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    optimizer.step()
    param = next(iter(model.parameters()))
    optimizer.state[param]["scales"] = scales = torch.ones(3)
    setattr(scales, OWN, True)
    yield
    full_optim_state_dict(model, optimizer)


# -- process groups and reports about models -------------------------------------------------------------------------


@mistake(
    ConfigError,
    "backend 'gloo' for cpu tensors is not supported. Supported: nccl",
    "register_backend",
)
def an_unknown_backend() -> Steps:
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_BACKENDS", ("nccl",))
        yield
        routes.collectives_for(group, torch.device("cpu"))


@mistake(ConfigError, "Linear has no units, so there is nothing to explain", r"Call fully_shard first", ranks=0)
def explain_a_plain_model() -> None:
    fullshard.explain(linear())


@mistake(ConfigError, "Linear has no units, so there is nothing to count", r"Call fully_shard first", ranks=0)
def count_the_bytes_of_a_plain_model() -> None:
    predict_ledger(linear())


# -- fully_shard ------------------------------------------------------------------------------------------------------


@mistake(StateError, "no process group is initialized", r"Call torch\.distributed\.init_process_group\(\)", ranks=0)
def no_process_group() -> None:
    fully_shard(linear())


@mistake(StateError, "no process group is initialized", "A single process also works", ranks=0)
def no_process_group_for_the_wrapper() -> None:
    wrapped()


@mistake(ConfigError, r"strategy='zero4' is not a strategy", "Choose one of ddp, zero1, zero2, zero3, hsdp, hsdp_zero2")
def unknown_strategy() -> None:
    fully_shard(linear(), strategy="zero4")


@mistake(ConfigError, r"strategy=3 is not a strategy", "ShardingStrategy")
def strategy_of_another_kind() -> None:
    wrapped(sharding_strategy=3)


@mistake(ConfigError, r"reshard_after_forward='yes'", "expected True, False, None or a number of ranks, 1 or more")
def reshard_after_forward_of_another_kind() -> None:
    fully_shard(linear(), reshard_after_forward="yes")


@mistake(ConfigError, r"reshard_after_forward=0", "a number of ranks, 1 or more")
def reshard_to_no_rank() -> None:
    fully_shard(linear(), reshard_after_forward=0)


@mistake(ConfigError, "reshard_after_forward=2: parameters are whole between steps", "Use strategy='zero3' or 'hsdp'")
def reshard_what_is_whole() -> None:
    fully_shard(linear(), strategy="zero1", reshard_after_forward=2)


@mistake(ConfigError, r"groups of 3 ranks do not divide the shard axis of 4 ranks", "Choose one of 1, 2, 4", ranks=4)
def groups_that_do_not_divide() -> None:
    fully_shard(linear(), reshard_after_forward=3)


@mistake(
    ConfigError,
    r"shard_placement_fn returned Shard\(dim=2\) for weight of shape \(6, 8\)",
    r"Return Shard\(dim\) with one of its 2",
)
def cut_along_a_dim_that_is_not_there() -> None:
    fully_shard(linear(), shard_placement_fn=lambda param: Cut(2))


@mistake(ConfigError, "got an empty list of modules", "Pass a module, or a list with at least one")
def shard_nothing() -> None:
    fully_shard([])


@mistake(ConfigError, "got an empty list of modules", "Pass a module, or a list with at least one")
def shard_nothing_by_a_policy() -> None:
    fully_shard([], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


@mistake(ConfigError, "is a str. Pass an nn.Module, or a list of them")
def shard_a_string() -> None:
    fully_shard("model")


@mistake(ConfigError, "FSDPLinear is already sharded", "Call fully_shard once on each module, inner modules first")
def shard_twice() -> Steps:
    module = fully_shard(linear())
    yield
    fully_shard(module)


@mistake(ConfigError, "Linear is already sharded")
def wrap_what_is_sharded() -> Steps:
    module = fully_shard(linear())
    yield
    FullyShardedDataParallel(module)


@mistake(ConfigError, "ModuleList has no forward, so it would never be gathered", "on each module in it")
def shard_a_container() -> None:
    fully_shard(nn.ModuleList([linear()]))


@mistake(
    StateError,
    "SGD has state for weight of Linear from before sharding",
    "Create the optimizer after",
)
def step_with_state_from_before() -> Steps:
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    fully_shard(module)
    yield
    optimizer.step()


@mistake(
    StateError,
    "SGD has state for weight of the root that was loaded while the parameters were unsharded: momentum_buffer",
    r"call reshard\(\) after unshard\(\)",
)
def step_with_state_loaded_while_unsharded() -> Steps:
    module = fully_shard(linear())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    module.unshard()
    loaded = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loaded.load_state_dict(optimizer.state_dict())
    module(torch.ones(2, 8)).sum().backward()
    yield
    loaded.step()


def distributed(mesh: DeviceMesh, placement: Any) -> nn.Linear:
    module = linear()
    module.weight = nn.Parameter(DTensor.from_local(module.weight.detach(), mesh, [placement], run_check=False))
    return module


@mistake(
    ConfigError,
    r"weight is already a DTensor placed \(Replicate\(\),\) on mesh .*tp=2.*To shard it over DeviceMesh\(\(2,\)",
    r"both must be named axes of one mesh.* fully_shard\(module, mesh=mesh\['dp'\]\), or list it in ignored_params",
)
def shard_over_the_ranks_of_tensor_parallelism() -> Steps:
    module = distributed(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Replicate())
    yield
    fully_shard(module)


@mistake(ConfigError, "already a DTensor placed", "both must be named axes of one mesh")
def shard_over_axes_without_names() -> Steps:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    module = distributed(mesh["tp"], Replicate())
    yield
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


@mistake(
    ConfigError, r"a DTensor placed \(Partial\(sum\),\).*Only parameters placed Shard\(dim\)", "Redistribute it first"
)
def shard_what_is_a_sum() -> Steps:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    module = distributed(mesh["tp"], Partial())
    yield
    fully_shard(module, mesh=mesh["dp"])


@mistake(
    ConfigError,
    "1.weight is on the meta device, but 0.weight in the same unit is not",
    r'under torch\.device\("meta"\)',
)
def shard_half_on_meta() -> None:
    fully_shard(nn.Sequential(linear(), nn.Linear(6, 6, device="meta")))


@mistake(ConfigError, "FSDPLinear has no method 'generate' to unshard parameters for")
def register_a_method_that_is_not_there() -> Steps:
    module = fully_shard(linear())
    yield
    register_fsdp_forward_method(module, "generate")


@mistake(ConfigError, r"set_gradient_divide_factor\(0\)", "expected a positive number")
def divide_by_zero() -> Steps:
    module = fully_shard(linear())
    yield
    module.set_gradient_divide_factor(0)


@mistake(StateError, "Linear is not a unit", r"Call fully_shard\(module\) on it first")
def prefetch_what_is_no_unit() -> Steps:
    model = sharded()
    yield
    model.set_modules_to_forward_prefetch([model.head])


@mistake(LayoutError, r"cannot split a tensor of shape \(3,\) along dim 1", "Choose a dim from 0 to 0", ranks=0)
def cut_where_nothing_is() -> None:
    ShardSpec((3,), 1, 2)


# -- meshes and placements --------------------------------------------------------------------------------------------


@mistake(ConfigError, r"mesh has 3 axes \('a', 'b', 'c'\)", r"Pass the submesh to shard over, such as mesh\[")
def mesh_of_three_axes() -> Steps:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    yield
    fully_shard(linear(), mesh=mesh)


@mistake(ConfigError, "needs a replicate and a shard axis, but mesh has one axis of size 2", r"Pass init_device_mesh\(")
def hybrid_on_one_axis() -> Steps:
    mesh = init_device_mesh("cpu", (2,))
    yield
    fully_shard(linear(), mesh=mesh, strategy="hsdp")


@mistake(
    ConfigError,
    "gradients are grouped, but the mesh also has a replicate axis of size 2",
    "Pass a mesh with one axis",
    ranks=4,
)
def groups_on_two_axes() -> Steps:
    mesh = init_device_mesh("cpu", (2, 2))
    grouped = Placements(
        parameters=Placement.SHARDED,
        parameters_in_step=Placement.GROUPED,
        gradients=Placement.GROUPED,
        optimizer=Placement.SHARDED,
        group=2,
    )
    yield
    fully_shard(linear(), mesh=mesh, strategy=grouped)


@mistake(
    ConfigError,
    "2 ranks do not divide into hosts of 3",
    r"Pass mesh=init_device_mesh\(device, \(replicas, shards\)\)",
    sends=True,
)
def hosts_that_do_not_divide() -> Steps:
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    yield
    try:
        fully_shard(linear(), strategy="hsdp")
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = "2"


def placements(**states: Placement) -> Placements:
    sharded = dict.fromkeys(("parameters", "parameters_in_step", "gradients", "optimizer"), Placement.SHARDED)
    return Placements(**{**sharded, **states})


@mistake(
    ConfigError, "parameters_in_step is sharded but parameters is whole", "Also set parameters to sharded", ranks=0
)
def freed_within_a_step_only() -> None:
    placements(parameters=Placement.WHOLE)


@mistake(
    ConfigError, "optimizer is whole but parameters or gradients are not", "Also set optimizer to sharded", ranks=0
)
def step_what_is_not_there() -> None:
    placements(optimizer=Placement.WHOLE)


@mistake(ConfigError, "optimizer is grouped", "Use strategy='hsdp' with a mesh whose first axis is the groups", ranks=0)
def optimizer_in_groups() -> None:
    placements(optimizer=Placement.GROUPED)


# -- dtypes -----------------------------------------------------------------------------------------------------------


@mistake(ConfigError, r"MixedPrecisionPolicy\(param_dtype=torch.int8\)", r"such as torch\.bfloat16, or None", ranks=0)
def compute_in_integers() -> None:
    MixedPrecisionPolicy(param_dtype=torch.int8)


@mistake(
    ConfigError,
    "param_dtype_override_fn returned torch.float16 for weight",
    r"Return the dtype of the parameter, torch.float32, .* or None to compute in param_dtype=torch.bfloat16",
)
def compute_in_a_third_dtype() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    fully_shard(linear(), mp_policy=policy)


@mistake(ConfigError, "param_dtype_override_fn", "a function of a parameter that returns a torch.dtype", ranks=0)
def a_dtype_in_place_of_a_function() -> None:
    MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=torch.float32)


@mistake(ConfigError, r"MixedPrecision\(reduce_dtype='bf16'\)", r"expected a floating-point torch\.dtype", ranks=0)
def a_dtype_by_name() -> None:
    MixedPrecision(reduce_dtype="bf16")


@mistake(
    ConfigError,
    "keep_low_precision_grads=True is not supported",
    "Leave it False, and set reduce_dtype",
    ranks=0,
)
def low_precision_gradients() -> None:
    MixedPrecision(keep_low_precision_grads=True)


@mistake(ConfigError, r"MixedPrecisionPolicy\(gather_wire='int3'\)", "expected one of 'int8', 'fp8'", ranks=0)
def unknown_transport() -> None:
    MixedPrecisionPolicy(gather_wire="int3")


@mistake(ConfigError, "reduce_wire='int8', reduce_dtype=torch.bfloat16", "Leave out reduce_dtype", ranks=0)
def encoded_and_summed_in_low_precision() -> None:
    MixedPrecisionPolicy(reduce_wire="int8", reduce_dtype=torch.bfloat16)


@mistake(ConfigError, "gather_wire='fp8', but every rank keeps and updates full parameters", "such as 'zero1'")
def encoded_without_a_gather() -> None:
    fully_shard(linear(), strategy="ddp", mp_policy=MixedPrecisionPolicy(gather_wire="fp8"))


@mistake(ConfigError, "group=0: expected a number of ranks, 1 or more", "or None")
def groups_of_no_ranks() -> None:
    names = ("parameters", "parameters_in_step", "gradients", "optimizer")
    Placements(**dict.fromkeys(names, Placement.SHARDED), group=0)


@mistake(ConfigError, r"has no 'param_groups'; it has \['state'\]", r"Pass the result of optim_state_dict\(\)")
def a_state_without_groups() -> Steps:
    model = chain(fully_shard)
    yield
    optim_state_dict_to_load(model, None, {"state": {}})


@mistake(ConfigError, "have no parameter of the model", "or pass optim")
def a_state_with_groups_of_nothing() -> Steps:
    model = chain(fully_shard)
    yield
    optim_state_dict_to_load(model, None, {"state": {}, "param_groups": []})


@mistake(ConfigError, "the state of 'weight' is None instead of a dict", r"Pass the result of optim_state_dict\(\)")
def a_state_of_none() -> Steps:
    model = chain(fully_shard)
    yield
    optim_state_dict_to_load(model, None, {"state": {"weight": None}, "param_groups": []})


@mistake(ConfigError, r"stream_weights\(to_rank='0'\)", "expected the number of a rank, or None")
def a_rank_by_name() -> Steps:
    model = chain(fully_shard)
    yield
    list(stream_weights(model, to_rank="0"))


# -- the wrapper ------------------------------------------------------------------------------------------------------


@mistake(StateError, "share_memory.. of .*, which is sharded", "before sharding the module")
def shared_memory_of_shards() -> Steps:
    model = chain(fully_shard)
    yield
    model.share_memory()


@mistake(ConfigError, "cpu_offload=True is a bool", r"Pass CPUOffload\(")
def offload_that_is_no_policy() -> None:
    wrapped(cpu_offload=True)


@mistake(ConfigError, "param_init_fn=42 cannot be called", "Pass a function of one module")
def init_function_that_is_none() -> None:
    wrapped(param_init_fn=42)


@mistake(ConfigError, "ignored_modules='head' is a str", "Pass a list of modules")
def ignored_modules_by_name() -> None:
    wrapped(ignored_modules="head")


@mistake(ConfigError, "sync_module_states='False' is a str", "Pass True or False")
def flag_that_is_a_string() -> None:
    wrapped(sync_module_states="False")


@mistake(ConfigError, "device_id=1.5 is a float", "Pass a torch.device or a number")
def device_that_is_no_device() -> None:
    wrapped(device_id=1.5)


@mistake(ConfigError, "device_id='gpu' is not a device", "Pass a torch.device or its index")
def device_of_an_unknown_name() -> None:
    wrapped(device_id="gpu")


@mistake(ConfigError, "FSDP_USE_FULL_PREC_IN_EVAL=1 with mixed_precision=", "Unset the variable")
def full_precision_in_evaluation() -> None:
    with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
        wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


@mistake(ConfigError, "register_comm_hook: noop_hook is not supported", "reduce_dtype", "set_all_reduce_hook")
def a_hook_that_torch_calls() -> Steps:
    model = wrapped()
    yield
    model.register_comm_hook(None, noop_hook)


@mistake(ConfigError, r"register_comm_hook\(state=None\): .* hook must have a process group", "Pass DefaultState")
def a_hook_without_its_state() -> Steps:
    model = wrapped()
    yield
    model.register_comm_hook(None, allreduce_hook)


@mistake(
    ConfigError,
    "process group has 1 ranks, but the parameters are sharded over a different group of 2 ranks",
    "Pass the wrap",
)
def a_hook_over_other_ranks() -> Steps:
    model, groups = wrapped(), [dist.new_group([rank]) for rank in range(2)]
    yield
    model.register_comm_hook(DefaultState(groups[dist.get_rank()]), allreduce_hook)


@mistake(ConfigError, "parameter_type=torch.float64 in the state, but gradients", "torch.float32. Pass LowPrecision")
def a_hook_to_another_dtype() -> Steps:
    model = wrapped()
    yield
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD, torch.float64), bf16_compress_hook)


@mistake(StateError, "a hook is already registered", "Register one hook per model")
def two_hooks() -> Steps:
    model, state = wrapped(), LowPrecisionState(dist.group.WORLD)
    model.register_comm_hook(state, bf16_compress_hook)
    yield
    model.register_comm_hook(state, allreduce_hook)


@mistake(StateError, "register_comm_hook: .* already has gradients", "before the first backward, or after zero_grad")
def a_hook_between_two_microbatches() -> Steps:
    model = wrapped()
    model(torch.ones(2, 8)).sum().backward()
    yield
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), bf16_compress_hook)


@mistake(ConfigError, "use_orig_params=False is not supported", "Leave the argument out")
def flattened_parameters() -> None:
    wrapped(use_orig_params=False)


@mistake(ConfigError, "process_group and device_mesh both define the ranks to shard over", "Pass one of them")
def a_group_and_a_mesh() -> Steps:
    mesh = init_device_mesh("cpu", (2,))
    yield
    wrapped(process_group=dist.group.WORLD, device_mesh=mesh)


@mistake(
    ConfigError,
    r"process_group=\(.*expected one process group",
    "For a hybrid strategy, pass device_mesh=init_device_mesh",
)
def a_pair_of_groups() -> None:
    wrapped(process_group=(dist.group.WORLD, dist.group.WORLD), sharding_strategy="hsdp")


@mistake(ConfigError, "ignored_modules and ignored_states are both given", "Pass one of them")
def ignored_twice() -> None:
    wrapped(ignored_modules=[], ignored_states=[])


@mistake(ConfigError, "ignored_states contain", "expected modules or parameters")
def ignored_by_name() -> None:
    wrapped(ignored_states=["weight"])


@mistake(ConfigError, "device_id=7: no such GPU, torch sees 0 here", r'Pass torch\.device\("cpu"\), or leave it out')
def a_gpu_that_is_not_there() -> None:
    wrapped(device_id=7)


@mistake(
    ConfigError,
    r"device_id=device\(type='meta'\) does not match the device type of device_mesh \(cpu\)",
    "or leave device_id out",
)
def a_device_of_another_kind_than_the_mesh() -> Steps:
    mesh = init_device_mesh("cpu", (2,))
    yield
    wrapped(device_id=torch.device("meta"), device_mesh=mesh)


class Mute(nn.Module):
    """A module without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))


@mistake(
    ConfigError,
    r"0 \(Mute\) has parameters on the meta device, such as 'weight', but no reset_parameters",
    "Pass param_init_fn=",
)
def initialize_what_cannot() -> None:
    FullyShardedDataParallel(nn.Sequential(Mute()))


@mistake(ConfigError, "param_init_fn left 'weight' of Linear on the meta device", r"It must call module\.to_empty\(")
def initialize_by_nothing() -> None:
    FullyShardedDataParallel(nn.Linear(4, 4, device="meta"), param_init_fn=lambda module: None)


# -- wrap policies ----------------------------------------------------------------------------------------------------


@mistake(ConfigError, r"auto_wrap_policy: \{.*Layer'>\} is not a wrap policy", r"pass ModuleWrapPolicy\(\{TheClass\}\)")
def classes_instead_of_a_policy() -> None:
    fully_shard(Chain(), auto_wrap_policy={Layer})


@mistake(
    ConfigError,
    "cannot be called with module, recurse and nonwrapped_numel",
    r"functools\.partial\(policy, name=value\)",
)
def a_policy_that_lacks_its_arguments() -> None:
    fully_shard(Chain(), auto_wrap_policy=transformer_auto_wrap_policy)


@mistake(ConfigError, "transformer_layer_cls is <class 'small_models.Layer'>", "Pass a set of module classes")
def a_class_instead_of_a_set() -> None:
    fully_shard(Chain(), auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=Layer))


@mistake(ConfigError, "the function returned 'yes' for a ", r"Return False \(no unit\), True \(a unit\) or a dict")
def a_policy_that_answers_in_words() -> None:
    wrapped_chain(CustomPolicy(lambda module: "yes"))


class Holding(nn.ModuleList):
    """A container that has parameters itself."""

    def __init__(self) -> None:
        super().__init__([linear()])
        self.weight = nn.Parameter(torch.empty(3))


@mistake(
    ConfigError,
    r"selects 0, a Holding, which has no forward, so its \d+ parameters would never be gathered",
    "Let the policy select",
)
def a_policy_that_picks_a_container() -> None:
    fully_shard(nn.Sequential(Holding()), auto_wrap_policy=ModuleWrapPolicy({Holding}))


@mistake(
    ConfigError, "wrapper_cls is 'fsdp'", "Pass FullyShardedDataParallel, fully_shard, or another callable", ranks=0
)
def wrap_by_name() -> None:
    enable_wrap(wrapper_cls="fsdp").__enter__()


def wrapped_chain(policy: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(Chain(), auto_wrap_policy=policy)


# -- calls at the wrong time ------------------------------------------------------------------------------------------


def within_forward(model: Any, use: Callable[[], Any]) -> None:
    """Run a forward that calls `use` while a layer is unsharded."""
    model.layers[1].norm.register_forward_hook(lambda *_: use() and None)
    model(inputs())


def _hidden_product(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a tensor that was computed from a weight of `layers.1`, and that no hook of the engine sees."""
    model, found = sharded(), []
    linear = next(module for module in model.layers[1].modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, args, _: found.append(product(args[0].detach(), module.weight)))
    model(inputs())
    return found[0].square().sum()


@mistake(StateError, "backward reads .*weight of layers.1 while layers.1", r"call unshard\(\) on", sends=True)
def a_hidden_output_of_a_resharded_unit() -> Steps:
    loss = _hidden_product(lambda x, weight: x @ weight.square().t())
    yield
    loss.backward()


@mistake(StateError, "backward reads .*weight of layers.1 while layers.1", r"call unshard\(\) on", sends=True)
def a_hidden_output_whose_backward_reads_no_saved_weight() -> Steps:
    loss = _hidden_product(lambda x, weight: weight.sum())
    yield
    loss.backward()


@mistake(StateError, "state dict within a forward or backward of layers.1", "Save and load between steps", sends=True)
def save_within_forward() -> Steps:
    model = sharded()
    yield
    within_forward(model, model.layers[1].state_dict)


@mistake(StateError, "summon_full_params within a forward or backward of", "Call it between steps", sends=True)
def summon_within_forward() -> Steps:
    model = sharded()
    yield
    within_forward(model, summon_full_params(model).__enter__)


@mistake(StateError, "was to be moved or cast within its forward or backward", "only between steps", sends=True)
def cast_within_forward() -> Steps:
    model = sharded()
    yield
    within_forward(model, model.layers[1].double)


@mistake(
    StateError,
    "abandon_step was called within a forward",
    "Call it after catching the exception",
    sends=True,
)
def abandon_within_forward() -> Steps:
    model = sharded()
    yield
    within_forward(model, model.abandon_step)


@mistake(
    StateError,
    "reset_iter_state was called within a forward",
    "Call it after catching the exception",
    sends=True,
)
def reset_within_forward() -> Steps:
    model = sharded()
    yield
    within_forward(model, model.reset_iter_state)


@mistake(StateError, "the root was used within summon_full_params", "Exit the context first")
def forward_while_summoned() -> Steps:
    model = sharded()
    with summon_full_params(model):
        yield
        model(inputs())


@mistake(
    StateError, "2 parameters are still on the meta device, such as 'weight'", r"Call model\.to_empty\(device=\.\.\.\)"
)
def forward_on_meta() -> Steps:
    model = fully_shard(nn.Linear(48, 48, device="meta"))
    runtime_of(model)
    yield
    model(inputs())


@mistake(
    StateError, r"weight of Linear \(head.weight\) was replaced by another parameter, \(5, 48\)", "before sharding"
)
def replace_after_sharding() -> Steps:
    model = sharded()
    model.head.weight = nn.Parameter(torch.zeros(5, 48))
    yield
    model(inputs())


@mistake(StateError, r"the data of head.weight was assigned \(param.data = ...\)", "Write them in place instead")
def assign_data_after_sharding() -> Steps:
    model = sharded()
    model.head.weight.data = model.head.weight.data * 2
    yield
    model(inputs())


@mistake(StateError, r"the data of head.weight was assigned \(param.data = ...\)", "Write them in place instead")
def assign_data_after_a_move() -> Steps:
    model = sharded()
    model.cpu()
    model.head.weight.data = torch.zeros(model.head.weight.shape)
    yield
    model(inputs())


@mistake(StateError, r"out=weight, .* all values of shape \(\d+, \d+\) to the shard", "within summon_full_params")
def write_to_a_shard_by_an_operation_that_resizes_it() -> Steps:
    layer = fully_shard(linear())
    yield
    nn.init.eye_(layer.weight)


@mistake(StateError, r"out=weight, .* all values of shape \(1, 4\) to the shard", "within summon_full_params")
def write_to_the_shard_of_one_rank_that_is_the_whole_parameter() -> Steps:
    layer = fully_shard(nn.Linear(4, 1))
    yield
    nn.init.eye_(layer.weight)


@mistake(
    StateError, "async_save cannot copy states or parameters that Offload stores", "fullshard.checkpoint.async_save"
)
def stage_parameters_on_disk() -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        layer = fully_shard(linear(), offload_policy=Offload(parameters={"disk": 1.0}, folder=folder))
        yield
        dcp.async_save(layer.state_dict(), checkpoint_id=Path(folder) / "saved")


@mistake(StateError, "called for the gradient of head.weight of the root, a sharded", "without inputs=", sends=True)
def backward_to_sharded_parameters() -> Steps:
    model = sharded()
    yield
    model(inputs()).sum().backward(inputs=[model.head.weight])


@mistake(StateError, "called for the gradient of head.weight of the root, a sharded", "list the parameters", sends=True)
def gradient_of_sharded_parameters() -> Steps:
    model = sharded()
    yield
    torch.autograd.grad(model(inputs()).sum(), list(model.head.parameters()))


@mistake(StateError, "called for the gradient of head.weight of the root, a sharded", "list the parameters", sends=True)
def gradient_of_sharded_parameters_that_may_be_unused() -> Steps:
    model = sharded()
    yield
    torch.autograd.grad(model(inputs()).sum(), list(model.head.parameters()), allow_unused=True)


@mistake(
    ConfigError,
    "up.weight now has dtype torch.float32, but norm.weight has torch.float64",
    "Change the dtype of all of them",
)
def cast_a_part_only() -> Steps:
    model = sharded()
    model.layers[0].norm.double()
    yield
    model.layers[0](inputs())


class Nesting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)
        self.inner: list[nn.Module] = []  # not registered as submodules

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.inner[0](x) if self.inner else x


@mistake(
    StateError,
    "share one buffer because they were never unsharded at the same time before",
    r"Call fullshard\.share_memory_between_units\(False\) before the first forward",
    sends=True,
)
def whole_at_once_without_notice() -> Steps:
    layers = [fully_shard(Nesting()) for _ in range(6)]
    model = fully_shard(nn.Sequential(*layers))
    for _ in range(3):
        model(inputs()).sum().backward()
    slots = [units_in(layer)[0].slot for layer in layers]
    first, second = next((i, j) for i in range(6) for j in range(6) if i < j and slots[i] is slots[j])
    yield
    waiting = layers[second](inputs().requires_grad_())
    layers[first].inner = [layers[second]]
    layers[first](inputs().requires_grad_())
    del waiting


@mistake(
    StateError,
    r"copy.deepcopy of FSDPLinear: .* also has parameters of FSDPReLU, which is outside this module",
    "Copy a module that contains both",
)
def copy_a_part_of_a_unit() -> Steps:
    model = nn.Sequential(linear(), nn.ReLU())
    fully_shard([model[0], model[1]])
    yield
    copy.deepcopy(model[0])


@mistake(StateError, "copy.deepcopy: Linear and Sequential use parameters of each other", "before fully_shard")
def copy_units_that_use_parameters_of_each_other() -> Steps:
    model = fully_shard(nn.Sequential(fully_shard(linear()), linear()))
    yield
    model[0].weight = model[1].weight
    copy.deepcopy(model)


@mistake(StateError, "copy.deepcopy of FSDPLinear: weight was already copied in this call", "Copy the outermost module")
def copy_an_optimizer_before_its_model() -> Steps:
    model = fully_shard(linear())
    optimizer = torch.optim.SGD(model.parameters())
    yield
    copy.deepcopy((optimizer, model))


@mistake(ConfigError, r"AdamW.step\(\) of sharded parameters was called within torch.compile", "Call optimizer.step")
def compile_a_step() -> Steps:
    model = fully_shard(linear())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, model.in_features)).sum().backward()
    yield
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # dispatch modes prevent graph capture
        optimizer.step()


@mistake(StateError, "pickle, torch.save or copy.copy of FSDPChain, which is sharded", r"Save its state_dict\(\)")
def pickle_a_model() -> Steps:
    model = sharded()
    yield
    pickle.dumps(model)


# -- state dicts, full parameters and optimizers ----------------------------------------------------------------------


@mistake(
    ConfigError,
    r"state_dict_type=StateDictType.LOCAL_STATE_DICT",
    "choose StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT",
)
def local_state_dicts() -> Steps:
    model = wrapped()
    yield
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)


@mistake(
    ConfigError,
    "ShardedStateDictConfig does not match StateDictType.FULL_STATE_DICT",
    "Pass a FullStateDictConfig, or leave it out",
)
def a_config_of_another_kind() -> Steps:
    model = wrapped()
    yield
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())


@mistake(
    ConfigError,
    "FullStateDictConfig does not match StateDictType.SHARDED_STATE_DICT",
    "Pass a ShardedOptimStateDictConfig",
)
def an_optimizer_config_of_another_kind() -> Steps:
    model = wrapped()
    yield
    kind = StateDictType.SHARDED_STATE_DICT
    FullyShardedDataParallel.set_state_dict_type(model, kind, None, FullStateDictConfig())


@mistake(
    RuntimeError,
    r"head.weight is of shape \(5, 48\) in the model, but of \(4, 48\)",
    "Build the model as it was when it was saved",
)
def load_another_shape() -> Steps:
    model = sharded()
    yield
    model.load_state_dict({**Chain().state_dict(), "head.weight": torch.zeros(4, 48)})


@mistake(ConfigError, r"rank0_only=True, writeback=True", "Pass writeback=False")
def write_back_from_one_rank() -> Steps:
    model = sharded()
    yield
    summon_full_params(model, rank0_only=True).__enter__()


@mistake(
    StateError,
    r"bias has the shape \(9,\) within summon_full_params, but was sharded with \(6,\)",
    "Change its shape before sharding",
)
def reshape_while_summoned() -> Steps:
    model = fully_shard(linear())
    with summon_full_params(model):
        yield
        model.bias = nn.Parameter(torch.zeros(9))


@mistake(
    StateError,
    r"the shards of weight were modified within summon_full_params",
    "Run the step outside of it, or pass writeback=False",
)
def step_while_summoned() -> Steps:
    model = fully_shard(linear())
    shards = list(model.parameters())
    with summon_full_params(model):
        yield
        with torch.no_grad():
            shards[0].zero_()


@mistake(ConfigError, r"clip_grad_norm_\(max_norm=-1, norm_type=2.0\)", "both must be positive")
def clip_below_zero() -> Steps:
    model = sharded()
    yield
    clip_grad_norm_(model.parameters(), -1)


@mistake(RuntimeError, "the total gradient norm of order 2.0 is nan, so nothing was clipped", ranks=0)
def clip_what_is_no_number() -> Steps:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), torch.nan)
    yield
    clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def stepped(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded() if model is None else model
    optimizer = torch.optim.Adam(model.parameters())
    model(inputs()).sum().backward()
    optimizer.step()
    return model, optimizer


@mistake(ConfigError, r"Adam has a parameter of shape \(6, 8\) that is not in the model", "after sharding the model")
def an_optimizer_made_before_sharding() -> Steps:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    fully_shard(model)
    yield
    optim_state_dict(model, optimizer)


@mistake(
    ConfigError, "the optimizer state dict has no 'state'; it has ", r"set FullOptimStateDictConfig\(rank0_only=True\)"
)
def load_no_optimizer_state() -> Steps:
    model, optimizer = stepped()
    yield
    optim_state_dict_to_load(model, optimizer, {})


@mistake(
    ConfigError,
    r"unknown: 10, such as 0; missing: 10",
    "which uses FQNs",
    ranks=2,
)
def load_numbered_optimizer_state() -> Steps:
    model, optimizer = stepped(fully_shard(nn.Sequential(Layer(), nn.Linear(48, 48), nn.Linear(48, 5))))
    yield
    optim_state_dict_to_load(model, optimizer, optimizer.state_dict())


@mistake(
    ConfigError,
    r"unknown: none; missing: 1, such as 'bias'",
    "Load it into an optimizer of the same parameters",
)
def load_optimizer_state_of_a_part() -> Steps:
    model, optimizer = stepped(fully_shard(nn.Linear(48, 6)))
    part = torch.optim.Adam([model.weight])
    state = full_optim_state_dict(model, part, rank0_only=False)
    yield
    optim_state_dict_to_load(model, optimizer, state)


@mistake(
    ConfigError,
    r"has 'exp_avg' of weight with shape \(7, 48\), but the optimizer has shape \(6, 48\)",
    "Build the model and optimizer as they were when",
)
def load_optimizer_state_of_another_shape() -> Steps:
    model, optimizer = stepped(fully_shard(nn.Linear(48, 6)))
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    state["state"]["weight"]["exp_avg"] = torch.zeros(7, 48)
    yield
    optim_state_dict_to_load(model, optimizer, state)


@mistake(ConfigError, r"optim_state_dict_to_load\(is_named_optimizer=True\)", "Leave the argument out")
def load_into_a_named_optimizer() -> Steps:
    model, optimizer = stepped(FullyShardedDataParallel(nn.Linear(48, 6)))
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    yield
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)


@mistake(
    ConfigError,
    r"Muon: parameter 3, in param group 1, has the shape \(192,\) and the dtype torch.float32",
    "another optimizer for it, such as torch.optim.AdamW",
)
def a_vector_for_muon() -> Steps:
    model = sharded()
    layer = model.layers[0]
    muon = Muon([layer.up.weight, layer.down.weight], lr=torch.tensor([0.1]))
    yield
    muon.add_param_group({"params": [model.head.weight, layer.up.bias]})


@mistake(
    ConfigError,
    r"Muon: 0.norm.weight, in param group 0, has the shape \(48,\)",
    "only real matrices and 3-D stacks",
)
def muon_for_all() -> Steps:
    model = fully_shard(nn.Sequential(Layer()))
    yield
    Muon(model.named_parameters())


@mistake(
    ConfigError,
    r"Muon: parameter 0, in param group 0, is placed \(Partial\(sum\),\)",
    r"supports only Shard\(dim\) and Replicate",
)
def muon_for_terms_of_a_sum() -> Steps:
    terms = DTensor.from_local(torch.zeros(4, 4), init_device_mesh("cpu", (2,)), [Partial()])
    yield
    Muon([nn.Parameter(terms)])


@mistake(ConfigError, r"Muon\(ns_coefficients=\(3.4, 2\)\): expected a tuple of three numbers")
def two_coefficients() -> Steps:
    weight = sharded().head.weight
    yield
    Muon([weight], ns_coefficients=(3.4, 2))


@mistake(ConfigError, r"Muon\(lr=tensor\(\[1., 2.\]\)\): expected one number of 0 or more", ranks=0)
def two_learning_rates() -> None:
    Muon([nn.Parameter(torch.zeros(2, 2))], lr=torch.tensor([1.0, 2.0]))


@mistake(ConfigError, r"Muon: the gradient of parameter 1, \(4, 3\), is sparse", r"nn.Embedding has sparse=False")
def a_sparse_gradient_for_muon() -> Steps:
    model, embedding = sharded(), nn.Embedding(4, 3, sparse=True)
    muon = Muon([model.head.weight, embedding.weight])
    model(inputs()).sum().backward()
    embedding(torch.tensor([1])).sum().backward()
    yield
    muon.step()


# -- comparison with plain training -----------------------------------------------------------------------------------


def batch_of_six(number: int) -> Tensor:
    return inputs(number)


def compare(model: Callable[[], Any] = linear, **options: Any) -> None:
    check_parity(model, batch_of_six, **options)


def recipe(model: Callable[[], Any] = linear, **options: Any) -> Recipe:
    return Recipe(make_model=model, make_batch=batch_of_six, **options)


def loss_of(model: nn.Module, returned: Any) -> None:
    recipe(loss=lambda model, batch: returned).backward(model, 3)


@mistake(ConfigError, "steps=0: must be at least 1", ranks=0)
def train_no_step() -> None:
    compare(steps=0)


@mistake(ConfigError, "clip=-1: must be at least 0", ranks=0)
def clip_parity_below_zero() -> None:
    compare(clip=-1)


@mistake(ConfigError, "optimizer='adam': unknown", "Pass adamw or sgd, or a function", ranks=0)
def an_unknown_optimizer() -> None:
    compare(optimizer="adam")


@mistake(ConfigError, r"lr=0\.1: your function creates the optimizer", "Set the learning rate there", ranks=0)
def a_learning_rate_for_an_optimizer_of_my_own() -> None:
    compare(optimizer=torch.optim.Adam, lr=0.1)


@mistake(ConfigError, "lr=0: must be greater than 0", ranks=0)
def learn_nothing() -> None:
    compare(lr=0)


@mistake(ConfigError, "<lambda> returned None", "It must return the model, an nn.Module", ranks=0)
def a_model_that_is_none() -> None:
    recipe(lambda: None).model()


@mistake(ConfigError, "ReLU returned a model without trained parameters, so nothing can be compared", ranks=0)
def a_model_of_nothing() -> None:
    recipe(nn.ReLU).model()


@mistake(ConfigError, "<lambda> returned a list", r"It must return a torch\.optim\.Optimizer", ranks=0)
def an_optimizer_that_is_a_list() -> None:
    recipe(optimizer=lambda model: [1]).optimizer_of(linear())


@mistake(
    ConfigError,
    "no module below Chain is a Block",
    "Its modules have the classes Layer, LayerNorm, Linear, ModuleList",
    ranks=0,
)
def wrap_a_class_that_is_not_there() -> None:
    recipe(auto_wrap_policy=ClassNames(("Layer", "Block"))).policy(Chain())


@mistake(ConfigError, "microbatch 3 is a dict, but must be a tensor", "Let the model return the loss", ranks=0)
def a_loss_that_is_a_dict() -> None:
    loss_of(linear(), {"loss": torch.ones(())})


@mistake(ConfigError, r"the loss of microbatch 3 is of shape \(6, 5\), but must be one number", ranks=0)
def a_loss_of_many_numbers() -> None:
    loss_of(linear(), torch.ones(6, 5))


@mistake(ConfigError, "the loss of microbatch 3 has no gradient: it does not depend on any trained parameter", ranks=0)
def a_loss_of_nothing() -> None:
    loss_of(linear(), torch.ones(()))


@mistake(ConfigError, "the loss of microbatch 0 is of shape", "Let the model return the loss", ranks=0)
def a_loss_that_plain_training_refuses() -> None:
    compare(Chain, ranks=1)


@mistake(ConfigError, "ranks=2,0: at least one rank is needed", ranks=0)
def compare_no_rank() -> None:
    compare(ranks=(2, 0))


@mistake(ConfigError, "replicas=0: must be at least 1", ranks=0)
def compare_no_replica() -> None:
    compare(replicas=0)


@mistake(ConfigError, "strategies is empty: pass at least one", ranks=0)
def compare_no_strategy() -> None:
    compare(strategies=())


@mistake(
    ConfigError, "strategy hsdp on 3 ranks: they cannot form 2 equal replicas", "leave hsdp or 3 ranks out", ranks=0
)
def replicas_that_do_not_divide() -> None:
    compare(ranks=(2, 3), strategies=["hsdp"])


@mistake(ConfigError, "atol=-1: must be at least 0", ranks=0)
def tolerate_less_than_nothing() -> None:
    compare(atol=-1)


@mistake(AssertionError, "sharded training differs from plain training", "1 of 1 do not agree", ranks=0)
def differ() -> Steps:
    report = ParityReport((ParityRow(strategy="ddp", ranks=2, replicas=1, failure="ValueError: no"),), Tolerance())
    yield
    report.raise_if_different()


def parity(**options: str) -> None:
    named = {"model": "small_models:chain", "batch": "small_models:inputs", **options}
    settings = parse(
        ParitySettings, [f"--{name}={value}" for name, value in named.items()], prog="fullshard parity", description=""
    )
    settings.recipe(), settings.cases()


@mistake(ConfigError, "tp=0: must be at least 1", ranks=0)
def no_rank_of_tensor_parallelism() -> None:
    Parallelism(tp=0)


@mistake(ConfigError, "Linear has no tensor parallel plan", "Pass --tp-plan", ranks=0)
def no_plan_of_tensor_parallelism() -> None:
    cut(linear(), None, mock.Mock())


@mistake(ConfigError, "the tensor parallel plan of Linear is None. It must be a dict", ranks=0)
def a_plan_that_is_none() -> None:
    cut(linear(), lambda model: None, mock.Mock())


@mistake(ConfigError, "tensor parallel plan of Linear has 'moe' for up", "Supported: colwise, rowwise", ranks=0)
def a_style_that_is_not_known() -> None:
    cut(linear(), lambda model: {"up": "moe"}, mock.Mock())


@mistake(ConfigError, "--mesh dp2,dp: dp is not an axis with a size", "Expected a list such as pp2,dp2,tp2", ranks=0)
def an_axis_without_a_size() -> None:
    parity(mesh="dp2,dp")


@mistake(ConfigError, "pp=2: pass the FQN of the list of blocks", "blocks='model.layers'", ranks=0)
def a_mesh_with_a_pipeline_of_nothing() -> None:
    parity(mesh="pp2,dp2")


@mistake(ConfigError, "schedule='2F2B': unknown. Choose one of GPipe, 1F1B", ranks=0)
def an_unknown_schedule() -> None:
    parity(mesh="pp2,dp2", blocks="layers", schedule="2F2B")


@mistake(ConfigError, "a pipeline of 4 stages with accumulate=3: a pipeline", "Leave these options out", ranks=0)
def too_few_microbatches_for_the_stages() -> None:
    parity(mesh="pp4,dp2", blocks="layers", accumulate="3")


@mistake(ConfigError, "ep=2: pass a function of the model and the mesh", "--experts my_model:place", ranks=0)
def experts_without_placement() -> None:
    parity(mesh="dp2,ep2")


@mistake(
    ConfigError,
    "ep=2: does not divide the 1 ranks .* hsdp on 2 data parallel ranks",
    "Choose a size that does",
    ranks=0,
)
def more_ranks_of_experts_than_of_shards() -> None:
    parity(mesh="dp2,ep2", experts="small_models:chain", strategies="hsdp")


@mistake(ConfigError, "ep=2: .* set no parameter of Linear to a DTensor", r"distribute_tensor\(", ranks=0)
def experts_that_stay_whole() -> Steps:
    given = recipe(parallelism=Parallelism(ep=2, experts=lambda model, mesh: None))
    yield
    with mock.patch.object(Divided, "__init__", lambda self, given, case: vars(self).update(_recipe=given, case=case)):
        divided = Divided(given, Case("zero3", 2, 1, ParallelAxes(ep=2)))
    divided.sparse = mock.MagicMock()
    divided.model()


def in_two_stages(model: Callable[[], Any], blocks: str) -> None:
    given = recipe(model, loss=lambda item, batch: item(batch).sum(), parallelism=Parallelism(pp=2, blocks=blocks))
    find_cut(given, given.model())


class Perceptrons(nn.Module):
    """Two perceptrons, called as `how` specifies."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(48))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * (self.scale if self.how == "scaled" else 1)
        if self.how == "named":
            return self.layers[1](input=x)
        x = x if self.how == "left" else self.layers[1](x)
        return self.layers[1](x) if self.how == "twice" else x * self.scale


@mistake(ConfigError, "pp: layer of Perceptrons is missing. Pass the nn.ModuleList or .*: layers", ranks=0)
def stages_of_what_is_not_there() -> None:
    in_two_stages(Perceptrons, "layer")


@mistake(ConfigError, "pp: 2 blocks in layers are too few for 4 stages", "Use fewer ranks", ranks=0)
def more_stages_than_blocks() -> None:
    given = recipe(Perceptrons, parallelism=Parallelism(pp=4, blocks="layers"))
    find_cut(given, given.model())


@mistake(ConfigError, "pp: scale is needed in stages 0 and 1 of 2", "Untie it", ranks=0)
def one_parameter_in_two_stages() -> None:
    in_two_stages(partial(Perceptrons, "scaled"), "layers")


@mistake(ConfigError, "pp: the first block of stage 1 gets nothing", "It must be the tensor", ranks=0)
def a_block_that_is_called_by_keyword() -> None:
    in_two_stages(partial(Perceptrons, "named"), "layers")


@mistake(ConfigError, "pp: the first block of stage 1 is called twice", "Leave pp out", ranks=0)
def a_block_that_is_called_twice() -> None:
    in_two_stages(partial(Perceptrons, "twice"), "layers")


@mistake(ConfigError, "pp: the first block of stage 1 was never called", "Leave pp out", ranks=0)
def a_block_that_is_left_out() -> None:
    in_two_stages(partial(Perceptrons, "left"), "layers")


HALVES: Any = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)


@mistake(ConfigError, "cp: the model never called .*scaled_dot_product_attention", "leave cp out", ranks=0)
def half_a_sequence_without_attention() -> None:
    with attention_over(HALVES):
        pass


@mistake(ConfigError, r"cp=2: a batch has a tensor of shape \(2, 5\), whose dim 1", "Use another length", ranks=0)
def an_odd_sequence_in_halves() -> None:
    with attention_over(HALVES):
        cut_batch(torch.ones(2, 5), None)


@mistake(ConfigError, r"cp: attention was called with a mask of shape \(4, 4\)", "with is_causal", ranks=0)
def half_a_mask() -> Steps:
    query = torch.ones(1, 1, 4, 2)
    yield
    with attention_over(HALVES):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=torch.ones(4, 4))


@mistake(ConfigError, "--model is missing", "such as --model my_training:make_model", ranks=0)
def no_model_named() -> None:
    ParitySettings().recipe()


@mistake(ConfigError, "--model small_models: expected a function as package.module:function or file.py:", ranks=0)
def no_function_named() -> None:
    parity(model="small_models")


@mistake(ConfigError, "--model small_models:small_gtp: there is no small_gtp", "Did you mean small_gpt", ranks=0)
def a_function_that_is_not_there() -> None:
    parity(model="small_models:small_gtp")


@mistake(ConfigError, "--batch small_models:WIDTH: WIDTH is of type int, but must be a function", ranks=0)
def a_number_for_a_function() -> None:
    parity(batch="small_models:WIDTH")


@mistake(ConfigError, "--model no/such.py: the file does not exist", "relative to the current folder", ranks=0)
def a_file_that_is_not_there() -> None:
    parity(model="no/such.py:make_model")


@mistake(ConfigError, "another module is also named argparse", "Rename the file", ranks=0)
def a_file_named_like_a_module() -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "argparse.py"
        path.touch()
        yield
        parity(model=f"{path}:make_model")


@mistake(ConfigError, "--loss no.such: no such module in", ranks=0)
def a_module_that_is_not_there() -> None:
    parity(loss="no.such:loss")


def imports(source: str) -> Steps:
    """Return a module of this source, imported after the yield."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"module_{abs(hash(source))}.py"
        path.write_text(source)
        yield
        parity(model=f"{path}:make_model")


@mistake(ConfigError, "it imports nowhere_to_be_found, which is not installed", ranks=0)
def a_module_that_imports_what_is_not_there() -> Steps:
    yield from imports("import nowhere_to_be_found")


@mistake(ConfigError, "importing it raises ZeroDivisionError: division by zero", ranks=0)
def a_module_that_cannot_be_imported() -> Steps:
    yield from imports("1 / 0")


@mistake(ConfigError, "--ranks 2-4: must be whole numbers, such as 2,3,4", ranks=0)
def ranks_that_are_no_numbers() -> None:
    parity(ranks="2-4")


@mistake(ConfigError, "--dtype float8: unknown", "Choose one of float32, bfloat16, float16", ranks=0)
def an_unknown_dtype() -> None:
    parity(dtype="float8")


@mistake(ConfigError, "--json no/such/file: cannot be written", "Name another file", ranks=0)
def a_file_that_cannot_be_written() -> None:
    run_parity(["--model=small_models:chain", "--batch=small_models:inputs", "--json=no/such/file"])


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved(**values: Any) -> Path:
    """Return the checkpoint of a model that is not sharded."""
    return save(tempfile.mkdtemp(), model=linear(), step=1, **values)


@mistake(ConfigError, "step=-1: must be the number of completed steps", "0 or more", ranks=0)
def save_before_the_first_step() -> None:
    saved_of_step(-1)


def saved_of_step(step: int, **options: Any) -> Path:
    return save(tempfile.mkdtemp(), model=linear(), step=step, **options)


@mistake(
    ConfigError,
    "keep=0: must be 1 or more, since the checkpoint",
    "None keeps all",
    ranks=0,
)
def keep_nothing() -> None:
    saved_of_step(1, keep=0)


@mistake(
    CheckpointError,
    r"the checkpoint's \['extra'\] is a pathlib.*Path. Reading it back",
    "Save plain values",
    sends=True,
)
def save_what_could_not_be_read_back() -> Steps:
    model = sharded()
    yield
    save("/nowhere", model=model, step=1, extra=Path("x"))


class Twins(torch.optim.SGD):
    """Keeps states whose keys are equal as strings."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "state": {0: {"table": {1: torch.ones(2), "1": torch.ones(2)}}}}


@mistake(CheckpointError, "two values are named optimizer.state.weight.table.1", "Rename the keys", ranks=0)
def save_names_that_are_the_same_as_strings() -> Steps:
    model = linear()
    yield
    save(tempfile.mkdtemp(), model=model, optimizer=Twins(model.parameters()), step=1)


@mistake(CheckpointError, "saving step 1 to /proc/nowhere: rank 0: FileNotFoundError", sends=True)
def save_where_nothing_can_be_written() -> Steps:
    model = sharded()
    yield
    save("/proc/nowhere", model=model, step=1)


@mistake(CheckpointError, "saving step 1 to .*: OSError: .* File too large", ranks=0)
def save_more_than_may_be_written() -> Steps:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        saved()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@mistake(CheckpointError, r"__0_0.distcp: expected \d+ bytes, found a file", "a folder that all hosts share", ranks=0)
def save_where_the_first_rank_does_not_see_it() -> Steps:
    def lose(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if path.endswith(".distcp"):
            os.unlink(path)

    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container.os, "fsync", lose)
        saved()


def load_with(name: str, value: Any) -> None:
    path = saved()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, name, value)
        load(path, model=linear())


@mistake(CheckpointError, "expected byte order sparse, found little", ranks=0)
def load_on_another_kind_of_machine() -> None:
    load_with("sys", SimpleNamespace(byteorder="sparse"))


@mistake(CheckpointError, r"expected \d+ more bytes from byte \d+ on, found none", ranks=0)
def load_what_is_cut_after_it_was_verified() -> None:
    load_with("_start_of_tensor", lambda entry, nbytes: 1 << 40)


@mistake(CheckpointError, "/nowhere: rank 0: found no complete checkpoint there", "Pass a checkpoint", sends=True)
def load_from_nowhere() -> Steps:
    model = sharded()
    yield
    load("/nowhere", model=model)


@mistake(CheckpointError, "test_errors.py is a file, but a checkpoint is a folder", "torch.load", sends=True)
def load_a_single_file() -> Steps:
    model = sharded()
    yield
    load(__file__, model=model)


@mistake(CheckpointError, "manifest.json: expected the manifest of a complete checkpoint, found none", ranks=0)
def load_without_a_manifest() -> Steps:
    checkpoint = saved()
    (checkpoint / "manifest.json").unlink()
    yield
    load(checkpoint, model=linear())


@mistake(CheckpointError, r"__0_0.distcp: expected \d+ bytes, found 7", "Load another checkpoint", ranks=0)
def load_what_is_damaged() -> Steps:
    checkpoint = saved()
    os.truncate(checkpoint / "__0_0.distcp", 7)
    yield
    load(checkpoint, model=linear())


@mistake(CheckpointError, "none of its 2 checkpoints is intact", "__0_0.distcp: expected", ranks=0)
def load_where_all_are_damaged() -> Steps:
    checkpoint = saved()
    os.truncate(checkpoint / "__0_0.distcp", 7)
    shutil.copytree(checkpoint, checkpoint.with_name("step-2"))
    yield
    load(checkpoint.parent, model=linear())


@mistake(
    CheckpointError, r"missing in it: 0.weight, 0.bias; unexpected in it: weight, bias", "Build the model", ranks=0
)
def load_another_model() -> Steps:
    checkpoint = saved()
    yield
    load(checkpoint, model=nn.Sequential(linear()))


class Position:
    """A position in the data that differs from rank to rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it cannot be divided")


def save_two_positions(folder: str) -> None:
    save(folder, model=linear(), data=Position(), step=1)


@mistake(CheckpointError, "2 ranks saved it, and ranks 0 and 1 had different positions", "Pass data=None", ranks=0)
def load_positions_of_other_ranks() -> Steps:
    folder = tempfile.mkdtemp()
    run_ranks(2, save_two_positions, folder)
    yield
    load(folder, model=linear(), data=Position())


def peer(metadata: bytes) -> Path:
    """Return a checkpoint without a manifest, as if another program had written it."""
    folder = Path(tempfile.mkdtemp())
    (folder / ".metadata").write_bytes(metadata)
    return folder


@mistake(CheckpointError, "expected the metadata of a checkpoint, found something else .expected a Metadata", ranks=0)
def load_other_metadata() -> None:
    load(peer(pickle.dumps([])), model=linear())


@mistake(CheckpointError, r"it names posix.system, which no checkpoint needs", "Nothing in it was executed", ranks=0)
def load_metadata_that_would_run_code() -> None:
    load(peer(b"cposix\nsystem\n."), model=linear())


@mistake(CheckpointError, "it refers to '/etc/passwd', which is not in the checkpoint's folder", ranks=0)
def load_from_files_elsewhere() -> Steps:
    metadata = Metadata({}, storage_data={MetadataIndex("weight"): storage_info("/etc/passwd", 0, 1)})
    yield
    load(peer(pickle.dumps(metadata)), model=linear())


@mistake(CheckpointError, "expected the metadata of a checkpoint, found none", "Pass the folder", ranks=0)
def load_without_metadata() -> Steps:
    checkpoint = saved()
    yield
    with pytest.MonkeyPatch.context() as patch:  # lost after it was verified
        patch.setattr(container, "METADATA", ".lost")
        load(checkpoint, model=linear())


@mistake(CheckpointError, r"loading .*distcp: 'optim.param_groups.0.lr' .*names pathlib\.", "another", ranks=0)
def load_a_value_that_would_run_code() -> Steps:
    model = linear()
    groups = [{"params": ["weight", "bias"], "lr": Path("x")}]
    folder = tempfile.mkdtemp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "optim": {"param_groups": groups}}, checkpoint_id=folder)
    yield
    load(folder, model=model, optimizer=torch.optim.SGD(model.parameters()))


@mistake(ConfigError, r"seconds=0\): must be greater than 0", "Pass 30", ranks=0)
def a_calibration_in_no_time() -> None:
    calibration.calibrate("cpu", seconds=0)


@mistake(ConfigError, "'meta'", "expected a CPU or a device of torch.cuda", ranks=0)
def a_device_that_is_not_measured() -> None:
    calibration.calibrate("meta")


@mistake(
    ConfigError,
    "h100-80: its description lacks the measured costs",
    "Run `fullshard calibrate` on that machine",
    ranks=0,
)
def a_cpu_that_was_not_measured() -> None:
    costs_of(dataclasses.replace(hardware.hardware("h100-80"), kind="cpu"))


@mistake(ConfigError, "Abacus 3000: none of .*h100-80", "--like", ranks=0)
def a_gpu_like_no_other() -> None:
    calibration._like("Abacus 3000", 1 << 30)


@mistake(ConfigError, "like='h100-80'.*: a CPU is measured completely", "Leave `like` out", ranks=0)
def a_cpu_that_is_like_a_gpu() -> None:
    calibration.calibrate("cpu", like="h100-80")


def described_by(text: str) -> Steps:
    """Read a hardware description with this text, as a mistake."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ours.toml"
        path.write_text(text.format(path=path))
        yield
        hardware.hardware(str(path))


@mistake(ConfigError, "abacus: is neither known hardware", "Expected one of .*h100-80", ranks=0)
def unknown_hardware() -> None:
    hardware.hardware("abacus")


@mistake(ConfigError, "ours.toml: cannot be read .*FIFO", ranks=0)
def a_fifo_in_place_of_hardware() -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(Path(folder) / "ours.toml")
        yield
        hardware.hardware(f"{folder}/ours.toml")


@mistake(ConfigError, "ours.toml: is not a TOML file: .*utf-8", ranks=0)
def hardware_that_is_not_text() -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ours.toml").write_bytes(b"\xff")
        yield
        hardware.hardware(f"{folder}/ours.toml")


@mistake(ConfigError, "rank00000.jsonl: cannot be read .*FIFO", ranks=0)
def a_fifo_in_place_of_a_recorded_run() -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "report").mkdir()
        os.mkfifo(path_of(Path(folder), 0))
        yield
        read_run(Path(folder))


@mistake(ConfigError, "ours.toml: not valid TOML", ranks=0)
def a_description_that_is_no_toml() -> Steps:
    yield from described_by("=")


@mistake(ConfigError, "ours.toml: refers to itself by `like`", "Remove one `like`", ranks=0)
def a_description_like_itself() -> Steps:
    yield from described_by('like = "{path}"')


@mistake(ConfigError, "ours.toml: lacks kind, .*memory_bytes", "or name similar hardware", ranks=0)
def a_description_of_a_name() -> Steps:
    yield from described_by('name = "ours"')


@mistake(ConfigError, "ours.toml: colour: unknown", "shows a description", ranks=0)
def a_description_of_a_colour() -> Steps:
    yield from described_by('like = "h100-80"\ncolour = "red"')


@mistake(ConfigError, r"ours.toml: \[link\] colour: unknown, a link has bytes_per_s", "shows a description", ranks=0)
def a_link_of_a_colour() -> Steps:
    yield from described_by('like = "h100-80"\n[link]\ncolour = "red"')


@mistake(
    ConfigError,
    "ours.toml: memory_bytes = '80 GB': must be a number of bytes from",
    "shows a description",
    ranks=0,
)
def a_description_in_words() -> Steps:
    yield from described_by('like = "h100-80"\nmemory_bytes = "80 GB"')


@mistake(ConfigError, r"ours.toml: network = 25.0: is a table, so write \[network\]", ranks=0)
def a_network_that_is_a_number() -> Steps:
    yield from described_by('like = "h100-80"\nnetwork = 25.0')


@mistake(ConfigError, "ours.toml: fitted.matmul_share = 60: must be a share such as 0.6, from 0.0001 to 10", ranks=0)
def a_share_in_percent() -> Steps:
    yield from described_by('like = "h100-80"\n[fitted]\nmatmul_share = 60')


@mistake(ConfigError, 'ours.toml: kind = "tpu": unknown', 'take "gpu" or "cpu"', ranks=0)
def a_kind_of_machine_that_is_none() -> Steps:
    yield from described_by('like = "h100-80"\nkind = "tpu"')


@mistake(ConfigError, "here: .*here.toml does not exist yet", "Run `fullshard calibrate`", ranks=0)
def a_machine_that_was_not_measured() -> Steps:
    before = os.environ.get("XDG_CONFIG_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        yield
        try:
            hardware.hardware("here")
        finally:
            os.environ.pop("XDG_CONFIG_HOME") if before is None else os.environ.update(XDG_CONFIG_HOME=before)


# -- how mistakes are reported ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reported:
    """The report of a mistake on one rank."""

    kind: type[BaseException] | None
    message: str
    raised_at: list[tuple[str, int]]  # file and line of the error and of its causes on this rank
    sent: list[str]


def make(name: str) -> Reported:
    make_mistake = MISTAKES[name].steps
    if inspect.isgeneratorfunction(make_mistake):
        steps = make_mistake()
        next(steps)
        make_mistake = partial(next, steps, None)
    kind, message, places = None, "nothing was raised", []
    # Everything sent by torch.distributed, from any caller.
    sends = Operations(lambda func, types: "c10d" in func.namespace and "wait" not in func.name())
    with recording() as record, sends as sent:
        try:
            make_mistake()
        except Exception as error:
            kind, message, places = type(error), str(error), list(raised_at(error))
    return Reported(kind, message, places, record.names() + sent.names)


def raised_at(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """Yield the files and lines that raised `error` and its causes."""
    while error is not None:
        yield from ((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)[-1:])
        for cause, _ in error.failures.values() if isinstance(error, dcp.CheckpointException) else ():
            yield from raised_at(cause)
        error = error.__cause__


def make_all(ranks: int) -> dict[str, Reported]:
    return {name: make(name) for name, mistake in MISTAKES.items() if mistake.ranks == ranks}


@functools.cache
def reported(ranks: int) -> list[dict[str, Reported]]:
    """Return the report of each rank, by mistake."""
    return run_ranks(ranks, make_all, ranks) if ranks else [make_all(ranks)]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_raises_same_error_on_every_rank_before_communication(name):
    expected = MISTAKES[name]
    answers = [rank[name] for rank in reported(expected.ranks)]
    for answer in answers:
        assert answer.kind is not None, answer.message
        assert answer.kind is expected.kind, f"{answer.kind}: {answer.message}"
        for pattern in expected.stated:
            assert re.search(pattern, answer.message), answer.message
        assert answer.sent == [] or expected.sends
    assert len({re.sub("0x[0-9a-f]+", "", answer.message) for answer in answers}) == 1


SOURCE = Path(fullshard.__file__).parent
# Files and folders with mistakes tested separately: those of commands, liveness, shared memory, exports, safety
# copies, disks and offloaded data, runs in ranks, integrations, predictions,
# trials of optimizers, batches, names of packages.
ELSEWHERE = {
    "engine/returned_params.py",  # after a forward, in test_hidden_outputs
    *("graphs.py", "device/cuda_graph.py"),  # in test_graphs
    *("cli", "command_line.py", "versions.py", "train", "integrations", "planner"),
    *("optim/elementwise.py", "testing/parity/batches.py", "testing/parity/plain.py"),
    *("testing/ranks.py", "testing/same.py", "disk", "engine/offloaded.py", "engine/activations.py"),
    "engine/findings.py",
    *("liveness/store.py", "liveness/watchdog.py", "comm/peers.py", "comm/pretended.py", "dry"),
    *("plan/costs.py", "plan/prediction.py", "plan/forecast.py", "plan/background.py"),
    *("checkpoint/exporting.py", "checkpoint/importing.py", "checkpoint/tensor_files.py"),
    *("checkpoint/keeper.py", "checkpoint/safety_copy.py"),
    *("checkpoint/manifest.py", "checkpoint/metadata_file.py", "regular_files.py", "_lazy.py"),
}
# Functions whose mistakes are made in test_hostile_files.py, test_rank_files.py and test_safetensors.py in
# tests/checkpoint, and in tests/engine/test_residency.py and tests/engine/test_optimizers.py.
FUNCTIONS_ELSEWHERE = {
    "checkpoint/container.py": {"check_files", "_records", "_start_of_tensor", "_read", "_part_of"},
    "checkpoint/opening.py": {"records"},
    "checkpoint/saved.py": {"_leaves", "_group"},
    "checkpoint/together.py": {"check_same"},
    "comm/mesh.py": {"check_local_shard"},
    "engine/residency.py": {"_become"},
    "engine/sharded_param.py": {"refuse_tensor_hooks"},
    "optim/local_steps.py": {"_step_instead_of"},
}
# Actions of other ranks, values of numbers and the end of a stage's forward are not mistakes of a call. Tests:
# agreement, watchdog, finite, commit.
NO_MISTAKES = {"RankMismatchError", "PeerGoneError", "self._lost", "NonFiniteError", "failure_of_group", "Stopped"}


def raises(path: Path) -> Iterator[ast.Raise]:
    """Yield the statements that raise an error about a mistake of the caller."""
    tree = ast.parse(path.read_text())
    destinations = FUNCTIONS_ELSEWHERE.get(path.relative_to(SOURCE).as_posix(), set())
    functions = [node for node in ast.walk(tree) if getattr(node, "name", None) in destinations]
    skipped = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        made = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(made, ast.Call) and ast.unparse(made.func) not in NO_MISTAKES:
            yield node


def test_files_tested_elsewhere_exist():
    assert [name for name in ELSEWHERE if not (SOURCE / name).exists()] == []
    for name, functions in FUNCTIONS_ELSEWHERE.items():
        tree = ast.parse((SOURCE / name).read_text())
        assert functions <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def test_every_raise_in_the_package_is_triggered_by_a_mistake():
    made = {place for ranks in (0, 2, 4) for answer in reported(ranks)[0].values() for place in answer.raised_at}
    missed = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not any(
            place.as_posix() in ELSEWHERE for place in (path.relative_to(SOURCE), *path.relative_to(SOURCE).parents)
        )
        for node in raises(path)
        if not any(file == str(path) and node.lineno <= line <= (node.end_lineno or 0) for file, line in made)
    ]
    assert missed == []
