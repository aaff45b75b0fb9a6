"""torchtitan's own trainer on FSDP2, and with its imports swapped for fullshard: are losses and gradients the same?

    python benchmarks/torchtitan_client.py               # all cases
    python benchmarks/torchtitan_client.py tp ep         # some
    python benchmarks/torchtitan_client.py --gloo-order  # with FSDP2's sums taken as gloo takes them

It needs torchtitan (`pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchdata tyro
typeguard docstring_parser shtab einops`), and trains its debug models on four ranks of this machine, on gloo. For
fullshard torchtitan's imports are changed as `SWAPPED` says, and nothing else. What a CPU, and torch 2.13 in place of a
nightly build, ask for is in `on_a_cpu`, `on_gloo` and `on_torch_2_13`, identical for both. FSDP2 sums gradients in
the order of ranks (`in_rank_order`): what is left of differences is not rounding.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import logging
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullshard.testing import run_ranks

LIBRARIES = ("fsdp2", "fullshard")
STEPS, SEQUENCE, BATCH, VOCABULARY = 4, 64, 4, 2048
TOLERANCE = 1e-5  # relative, of a different order of sums
Run = list[tuple[float, float]] | str  # loss and norm of the gradients of each step; or why there is none

TORCH = r"from torch\.distributed"
SWAPPED = [
    (TORCH + r"(\._composable)?\.fsdp(\._fully_shard\._fsdp_common)? import", "from fullshard import"),
    (TORCH + r"\.fsdp\._fully_shard\._fsdp_init import \(\s*_get_mesh_info,\s*\)", "_get_mesh_info = FSDPMeshInfo"),
    (TORCH + r"\.pipelining import PipelineStage", "from fullshard.integrations.pipelining import PipelineStage"),
]


# -- swapped imports --------------------------------------------------------------------------------------------------


class SwappedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module of torchtitan with its imports changed, as a user would by a stream editor."""

    def get_code(self, fullname: str) -> Any:
        """See `importlib`. Never from a cache, which is of the module as it is."""
        text = self.get_data(self.path).decode()
        for pattern, instead in SWAPPED:
            text = re.sub(pattern, instead, text)
        return self.source_to_code(text.encode(), self.path)


class SwappedFinder(importlib.abc.MetaPathFinder):
    """Has torchtitan's modules loaded by `SwappedLoader`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """See `importlib`."""
        if fullname.split(".", maxsplit=1)[0] != "torchtitan":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = SwappedLoader(spec.loader.name, spec.loader.path)
        return spec


# -- patches, identical for both --------------------------------------------------------------------------------------


def on_a_cpu() -> None:
    """Select the CPU as device, and replace parts made for GPUs only: triton's kernels of one kind of
    expert parallelism, compiled flex attention, statistics of memory; and remove tensorboard.
    """
    for name in ("torch.utils.tensorboard", "torchtitan.distributed.minimal_async_ep.kernels"):
        module: Any = types.ModuleType(name)
        module.__getattr__ = lambda name: None
        sys.modules[name] = module
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    utils.get_local_device = lambda: torch.device("cpu")
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention

    distributed.set_pg_timeouts = lambda **_: None  # its barrier names a device by number
    attention._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
    none = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: none, reset_peak_stats=lambda: None
    )


def attend(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """Compute flex attention with a dense mask."""
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, *block_mask.shape[:2], q.shape[-2], k.shape[-2], device="cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def on_gloo() -> None:
    """Make FSDP2 sum gradients and scale them afterwards: gloo cannot do both at once."""
    from torch.distributed.fsdp import FSDPModule

    def divide(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        set_factor(module, factor)

    set_factor, FSDPModule.set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor, divide


def in_rank_order() -> None:
    """Make FSDP2 sum in rank order, as this library does. The order of gloo differs between the
    parts of a message, which changes last digits.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    def reduce_scatter(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        assert op == torch.distributed.ReduceOp.SUM, op
        received = torch.empty_like(input_tensor)
        torch.distributed.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.chunk(group.size())
        output_tensor.copy_(first)
        for other in others:
            output_tensor += other
        return None

    DefaultReduceScatter.__call__ = reduce_scatter  # type: ignore[method-assign]


def on_torch_2_13() -> None:
    """Make pipeline schedules accept microbatches that are already split, as newer torch versions do."""
    from torch.distributed.pipelining import schedules

    def step(
        self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any
    ) -> None:
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)

    schedules._PipelineScheduleRuntime.step = schedules.PipelineScheduleMulti.step = step
    schedules.PipelineScheduleSingle.step = step


# -- a run ------------------------------------------------------------------------------------------------------------


def configure(config: Any, folder: str, parallelism: dict[str, Any]) -> Any:
    """A small run of a debug model of torchtitan's, on random tokens."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):
        """Random tokens, others on each rank of data parallelism."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            """Nothing to choose."""

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.shape, self.rank, self.given = (local_batch_size, seq_len + 1), dp_rank, 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(1000 * self.rank + self.given)
                self.given += 1
                tokens = torch.randint(VOCABULARY, self.shape, generator=generator)
                positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given = state["given"]

    class NoTokenizer(BaseTokenizer):
        """None is needed."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            """Nothing to choose."""

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        decode = get_vocab_size = encode

    config.dataloader, config.tokenizer, config.dump_folder = Tokens.Config(), NoTokenizer.Config(), folder
    config.training.local_batch_size, config.training.seq_len, config.training.steps = BATCH, SEQUENCE, STEPS
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.checkpoint.enable = False
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a nightly build of torch
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def llama3(folder: str, **parallelism: Any) -> Any:
    """Its dense debug model; the loss is in 8 chunks, except in a pipeline."""
    from torchtitan.models.llama3 import config_registry

    return configure(config_registry.llama3_debugmodel(), folder, parallelism)


def moe(folder: str, **parallelism: Any) -> Any:
    """Its mixture of experts of the form of Qwen3's."""
    from torchtitan.models.qwen3 import config_registry

    return configure(config_registry.qwen3_moe_debug(), folder, parallelism)


def long(config: Any) -> Any:
    """Use a context that torch can split: 128 tokens for each of two ranks."""
    config.training.seq_len, config.training.local_batch_size = 256, 1
    config.parallelism.context_parallel_load_balancer = None
    return config


def recomputed(config: Any) -> Any:
    """Enable activation checkpointing."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    config.activation_checkpoint = FullAC.Config()
    return config


def saved(config: Any) -> Any:
    """Save its own checkpoints, every second step."""
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.keep_latest_k = True, 2, 0
    return config


def in_stages(config: Any) -> Any:
    """A pipeline of two stages a rank."""
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    return config


CASES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dp": ("llama3, data", llama3),
    "hsdp": ("llama3, data on two groups", lambda folder: llama3(folder, data_parallel_replicate_degree=2)),
    "tp": ("llama3, data x tensor", lambda folder: llama3(folder, tensor_parallel_degree=2)),
    "cp": ("llama3, data x context", lambda folder: long(llama3(folder, context_parallel_degree=2))),
    "pp": ("llama3, pipeline x data", lambda folder: in_stages(llama3(folder))),
    "pp-tp": ("llama3, pipeline x tensor", lambda folder: in_stages(llama3(folder, tensor_parallel_degree=2))),
    "ac": ("llama3, data, activations recomputed", lambda folder: recomputed(llama3(folder))),
    "resumed": ("llama3, data, resumed from its own checkpoint", lambda folder: saved(llama3(folder))),
    "moe": ("mixture of experts, data", moe),
    "ep": ("mixture of experts, data x expert", lambda folder: moe(folder, expert_parallel_degree=2)),
    "ep-tp": (
        "mixture of experts, data x tensor x expert",
        lambda folder: moe(folder, expert_parallel_degree=2, tensor_parallel_degree=2),
    ),
}


def run(config: Any) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each step, as torchtitan logs them."""
    logged: list[tuple[float, float]] = []
    trainer = config.build()
    trainer.metrics_processor.log = lambda step, loss, worst, norm, **_: logged.append((loss, norm))
    trainer.train()
    trainer.close()
    return logged


def train(library: str, by_gloo: bool, names: list[str], folder: str) -> dict[str, Run]:
    """Each case on this rank."""
    os.environ["LOCAL_RANK"] = "0"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if library == "fullshard":
        sys.meta_path.insert(0, SwappedFinder())
    else:
        on_gloo()
        if not by_gloo:
            in_rank_order()
    on_a_cpu()
    on_torch_2_13()
    found: dict[str, Run] = {}
    for name in names:
        config = CASES[name][1](f"{folder}/{name}")
        try:
            logged = run(config)
            if name == "resumed":
                config = CASES[name][1](f"{folder}/{name}")
                config.checkpoint.load_step = 2
                logged = [*logged[:2], *run(config)]
            found[name] = logged
        except Exception as error:  # one that all ranks have: it is what there is to say of the case
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--gloo-order", action="store_true", help="leave the order of FSDP2's sums to gloo")
    options = parser.parse_args(arguments)
    names = options.cases or list(CASES)
    found = {}
    for library in LIBRARIES:
        with tempfile.TemporaryDirectory() as folder:
            found[library] = run_ranks(4, train, library, options.gloo_order, names, folder, timeout=1200)
    print("| case | last loss | largest difference of a loss | of a norm of gradients |\n|---|---|---|---|")
    for name in names:
        # Of a pipeline the ranks of the last stage know the loss; the others log a negative number.
        peer, own = (max((rank[name] for rank in found[library]), key=last_loss) for library in LIBRARIES)
        print(f"| {CASES[name][0]} | {' | '.join(cells(peer, own))} |")
    print(json.dumps(found))


def last_loss(run: Run) -> float:
    """Return the loss of the last step. The value of a failed run is the smallest of all."""
    return float("-inf") if isinstance(run, str) else run[-1][0]


def cells(peer: Run, own: Run) -> list[str]:
    """Return the last loss on fullshard, and relative differences from FSDP2; or what an error says."""
    if isinstance(peer, str) or isinstance(own, str):
        return [f"{name}: {run[:90]}" for name, run in zip(LIBRARIES, (peer, own), strict=True) if isinstance(run, str)]
    worst = [max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(own, peer, strict=True)) for i in (0, 1)]
    return [
        f"{own[-1][0]:.6f}",
        *("none" if item == 0 else f"{item:.0e}{'' if item < TOLERANCE else ' !'}" for item in worst),
    ]


if __name__ == "__main__":
    main()
