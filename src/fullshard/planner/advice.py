"""Code for a plan: Python, flags of `fullshard train`, and arguments for the Trainer of transformers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from torch import nn

from fullshard.planner.candidates import PRECISIONS, Cluster, Program, units_of
from fullshard.planner.shorten import block_lists
from fullshard.planner.sketch import SketchFigures
from fullshard.planner.subject import Subject


def python_lines(
    subject: Subject, program: Program, figures: SketchFigures, cluster: Cluster, max_norm: float | None = 1.0
) -> list[str]:
    """Return the lines of a script that creates the model and the optimizer, and those of one step: a loop over
    microbatches, with clipping.

    The script must have called `init_process_group` before.
    """
    imports = {"fully_shard"} if subject.model is not None else set()
    if max_norm is not None:
        imports.add("clip_grad_norm_")
    if program.scales_loss:
        imports.add("ShardedGradScaler")
    options = []
    before: list[str] = []
    if program.strategy == "hfsdp":
        imports |= {"Placement", "Placements"}
        before += [
            "S, G = Placement.SHARDED, Placement.GROUPED",
            "hfsdp = Placements("
            f"parameters=G, parameters_in_step=G, gradients=G, optimizer=S, group={cluster.per_host})",
        ]
        options.append("strategy=hfsdp")
    elif program.strategy == "hpz":
        options.append(f"reshard_after_forward={cluster.per_host}")
    elif program.strategy != "own":
        options.append(f'strategy="{program.strategy}"')
    if program.shard_hosts > 1:
        shape = program.mesh_shape(cluster)
        before += [
            'device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")',
            f'mesh = init_device_mesh(device.type, {shape}, mesh_dim_names=("replicate", "shard"))',
        ]
        options.append("mesh=mesh")
    if program.precision != "own" and (program.policy() != type(program.policy())()):
        imports.add("MixedPrecisionPolicy")
        options.append(f"mp_policy={_policy(program)}")
    if program.offload:
        imports.add("CPUOffloadPolicy")
        options.append("offload_policy=CPUOffloadPolicy()")
    if program.cpu or program.disk:
        imports.add("Offload")
        shares = {tier: share for tier, share in (("cpu", program.cpu), ("disk", program.disk)) if share}
        optimizer = ", ".join(f'"{tier}": {share:g}' for tier, share in shares.items())
        folder = f", folder={json.dumps(str(cluster.disk.folder))}" if program.disk else ""
        options.append(f"offload_policy=Offload(optimizer={{{optimizer}}}{folder})")
    units = _units(subject)
    lines = ["import torch"]
    if program.checkpointing != "none":
        lines = ["from functools import partial", "", *lines]
        names = ["checkpoint", *_selective_names(program)]
        lines.append(f"from torch.utils.checkpoint import {', '.join(sorted(names, key=str.lower))}")
    if program.shard_hosts > 1:
        lines.insert(lines.index("import torch") + 1, "from torch.distributed.device_mesh import init_device_mesh")
    lines += ["", *([f"from fullshard import {', '.join(sorted(imports, key=str.lower))}"] if imports else [])]
    import_line, optimizer = subject.paste_optimizer
    *making, model = subject.paste
    seeded = "torch.manual_seed(0)  # the same values on every rank"
    lines += [*([import_line] if import_line else []), *making, seeded, model, ""]
    if subject.model is not None:
        lines += [*before, f"options = dict({', '.join(options)})"]
        if units:
            lines += [
                f"blocks = {units}",
                *_checkpointing(program),
                *_compiling(program),
                *_sharding(program.blocks_per_unit),
            ]
        lines.append("fully_shard(model, **options)")
    if program.prefetch_depth > 1:
        lines += _prefetching(program.prefetch_depth)
    scaler = ["scaler = ShardedGradScaler()"] if program.scales_loss else []
    return [*lines, f"optimizer = {optimizer}", *scaler, "", *_step(program, figures, max_norm)]


def train_flags(
    subject: Subject, program: Program, figures: SketchFigures, cluster: Cluster, max_norm: float | None = 1.0
) -> str | None:
    """Return the command line of `fullshard train`; None if it cannot run `program`, or the model is not its GPT.

    `fullshard train` makes each block a unit, independent of `program`.
    """
    known = program.strategy in ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2")
    simple = program.checkpointing in ("none", "every-1") and not program.offload and program.prefetch_depth == 1
    if (
        not subject.train_flags
        or not known
        or not simple
        or program.syncs_each
        or program.scales_loss
        or program.compiled
    ):
        return None
    world, hosts = cluster.world, cluster.hosts
    param, reduce = PRECISIONS[program.precision]
    flags = [*subject.train_flags, f"--strategy {program.strategy}"]
    candidate = figures.candidate
    flags += [f"--batch {candidate.rows * world}", f"--accumulate {candidate.microbatches}"]
    flags += [f"--dtype {'float32' if param is None else 'bfloat16'}"]
    if reduce is not None and str(reduce) == "torch.bfloat16":
        flags.append("--reduce-dtype bfloat16")
    if program.gather_wire:
        flags.append(f"--gather-wire {program.gather_wire}")
    if program.reduce_wire:
        flags.append(f"--reduce-wire {program.reduce_wire}")
    if program.shard_hosts > 1:
        flags.append(f"--replicas {program.mesh_shape(cluster)[0]}")
    if program.checkpointing == "every-1":
        flags.append("--activation-checkpointing")
    if max_norm != 1.0:
        flags.append(f"--clip {max_norm or 0:g}")
    if program.cpu:
        flags.append(f"--offload-optimizer-cpu {program.cpu:g}")
    if program.disk:
        flags.append(f"--offload-optimizer {program.disk:g} --offload-folder {shlex.quote(str(cluster.disk.folder))}")
    if hosts == 1:
        return f"fullshard train {' '.join(flags)} --ranks {world}"
    start = f"torchrun --nnodes {hosts} --nproc-per-node {cluster.per_host} --rdzv-backend c10d"
    return f"{start} --rdzv-endpoint FIRST_HOST:29400 -m fullshard.cli train {' '.join(flags)}"


def trainer_arguments(
    subject: Subject, program: Program, figures: SketchFigures, cluster: Cluster, max_norm: float | None = 1.0
) -> str | None:
    """Return the code of transformers' `TrainingArguments`; None if these do not support `program`.

    The Trainer makes each block a unit, independent of `program`.
    """
    if not subject.is_transformers or program.strategy in ("own", "hfsdp") or program.compiled:
        return None
    if program.shard_hosts > 1:  # the Trainer has one replica per host
        return None
    if program.checkpointing not in ("none", "every-1") or program.gather_wire or program.reduce_wire:
        return None
    config: dict[str, Any] = {"version": 2}
    if program.strategy == "hpz":  # with version 2, transformers does not accept a number
        config |= {"version": 1, "reshard_after_forward": cluster.per_host}
    else:
        config["strategy"] = program.strategy
    assert subject.model is not None
    layers = sorted({type(unit).__name__ for unit in units_of(subject.model)})
    config["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    config["transformer_layer_cls_to_wrap"] = layers
    if program.checkpointing == "every-1":
        config["activation_checkpointing"] = True
    if program.offload:
        config["cpu_offload"] = True
    if program.cpu:
        config["offload_optimizer_cpu"] = program.cpu
    if program.disk:
        config |= {"offload_optimizer": program.disk, "offload_folder": str(cluster.disk.folder)}
    if program.prefetch_depth > 1:
        config["limit_all_gathers"] = False
    param, reduce = PRECISIONS[program.precision]
    if reduce is not None and reduce == param:
        config["reduce_dtype"] = "bfloat16"
    arguments = [
        f"per_device_train_batch_size={figures.candidate.rows}",
        f"gradient_accumulation_steps={figures.candidate.microbatches}",
        *([_SUMS_EACH] if program.syncs_each else []),
        *([f"max_grad_norm={max_norm or 0:g}"] if max_norm != 1.0 else []),
        *([] if param is None else ["fp16=True" if program.scales_loss else "bf16=True"]),
        "fsdp=True",
        f"fsdp_config={_python(config)}",
    ]
    return (
        'TrainingArguments(\n    "out",  # the folder of the run\n'
        + "".join(f"    {argument},\n" for argument in arguments)
        + ")"
    )


_SUMS_EACH = 'accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}'


def _python(value: dict[str, Any]) -> str:
    return json.dumps(value).replace(": true", ": True").replace(": false", ": False")


def _policy(program: Program) -> str:
    param, reduce = PRECISIONS[program.precision]
    given = {"param_dtype": param, "reduce_dtype": reduce}
    parts = [f"{name}={dtype}" for name, dtype in given.items() if dtype is not None]
    encodings = {"gather_wire": program.gather_wire, "reduce_wire": program.reduce_wire}
    parts += [f'{name}="{encoding}"' for name, encoding in encodings.items() if encoding]
    return f"MixedPrecisionPolicy({', '.join(parts)})"


def _units(subject: Subject) -> str:
    """Return an expression for the modules that become units; empty if there are none."""
    units = [] if subject.model is None else units_of(subject.model)
    if subject.model is None or not units:
        return ""
    for blocks in block_lists(subject.model):
        if list(_at(subject.model, blocks.fqn).children()) == units:
            return f"list(model.{blocks.fqn})" if blocks.fqn else "list(model)"
    names = {module: name for name, module in subject.model.named_modules()}
    parents = list(dict.fromkeys(names[unit].rpartition(".")[0] for unit in units))
    whole = [child for parent in parents for child in _at(subject.model, parent).children()]
    if whole == units:
        return f"[{', '.join(f'*model.{parent}' if parent else '*model' for parent in parents)}]"
    listed = ", ".join(repr(names[unit]) for unit in units)
    return f"[model.get_submodule(name) for name in ({listed},)]"


def _at(model: nn.Module, fqn: str) -> nn.Module:
    return model.get_submodule(fqn)


def _selective_names(program: Program) -> Sequence[str]:
    return ("CheckpointPolicy", "create_selective_checkpoint_contexts") if program.checkpointing == "selective" else ()


def _sharding(blocks_per_unit: int) -> list[str]:
    if blocks_per_unit == 1:
        return ["for block in blocks:", "    fully_shard(block, **options)"]
    loop = f"for first in range(0, len(blocks), {blocks_per_unit}):"
    return [loop, f"    fully_shard(blocks[first : first + {blocks_per_unit}], **options)"]


def _checkpointing(program: Program) -> list[str]:
    if program.checkpointing == "none":
        return []
    if program.checkpointing != "selective":
        chosen = "blocks" if program.checkpointing == "every-1" else "blocks[1::2]"
        return [
            f"for block in {chosen}:",
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        ]
    return [
        "",
        "",
        "def keep_products(context, operation, *args, **kwargs):",
        '    names = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")',
        '    kept = str(operation._overloadpacket).removeprefix("aten.").startswith(names)',
        "    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE",
        "",
        "",
        "contexts = partial(create_selective_checkpoint_contexts, keep_products)",
        "for block in blocks:",
        "    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)",
    ]


def _compiling(program: Program) -> list[str]:
    return ["for block in blocks:", "    block.compile()"] if program.compiled else []


def _prefetching(depth: int) -> list[str]:
    return [
        "forward, backward = [model, *blocks], [model, *blocks[::-1]]",
        "for place, (unit, other) in enumerate(zip(forward, backward)):",
        f"    unit.set_modules_to_forward_prefetch(forward[place + 1 : place + {depth + 1}])",
        f"    other.set_modules_to_backward_prefetch(backward[place + 1 : place + {depth + 1}])",
    ]


def _step(program: Program, figures: SketchFigures, max_norm: float | None) -> list[str]:
    candidate = figures.candidate
    count, rows = candidate.microbatches, f"{candidate.rows} row{'s' * (candidate.rows > 1)} a rank"
    backward = "forward, and scaler.scale(loss).backward()" if program.scales_loss else "forward and backward"
    pass_both = f"...  # {backward}"
    if count == 1:
        lines = [f"# each step: one microbatch of {rows}", pass_both]
    else:
        sums = (
            "# gradients are reduced after each microbatch, which needs less memory than no_sync"
            if program.syncs_each
            else f"model.set_requires_gradient_sync(number == {count - 1})"
        )
        lines = [f"# each step: {count} microbatches of {rows}", f"for number in range({count}):", f"    {sums}"]
        lines.append(f"    {pass_both}")
    if max_norm is not None:
        lines += ["scaler.unscale_(optimizer)"] if program.scales_loss else []
        lines.append(f"clip_grad_norm_(model.parameters(), {max_norm})")
    steps = ["scaler.step(optimizer)", "scaler.update()"] if program.scales_loss else ["optimizer.step()"]
    return [*lines, *steps, "optimizer.zero_grad()"]
