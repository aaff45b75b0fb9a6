"""The code lines that a plan recommends: a dry run of them matches the simulated steps, real ranks match the plan."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hf_models import Sentences
from hypothesis import example, given, settings
from rich.console import Console
from shared_ranks import run_ranks
from torch import nn
from training_runs import TEXT, this_rank

from fullshard import Offload, ShardedGradScaler, dry
from fullshard.disk.speed import TYPICAL
from fullshard.engine.registry import units_in
from fullshard.plan.hardware import hardware
from fullshard.plan.prediction import steps_of
from fullshard.planner.advice import python_lines, train_flags, trainer_arguments
from fullshard.planner.candidates import Candidate, Cluster, Program, checkpointed, units_of
from fullshard.planner.question import Question, with_cpu
from fullshard.planner.sketch import sketch
from fullshard.planner.steps import take_steps
from fullshard.planner.subject import Subject, gpt_subject, named_subject, transformers_subject
from fullshard.tape.recorder import Origin, Phase, note_origin, recording
from fullshard.tape.tape import Tape
from fullshard.train.loop import TrainingLoop, agreed_text, resolved
from fullshard.train.options import parse_settings
from fullshard.train.progress import display_for
from fullshard.train.run_folder import RunFolder
from fullshard.train.settings import ModelSettings
from fullshard.train.sharding import sharded_gpt
from fullshard.train.text import find_text

TWO_HOSTS = Cluster(hardware=hardware("h100-80"), hosts=2, per_host=2)


@dataclass(frozen=True)
class Advice:
    """A program that a search can recommend, with rows and microbatches."""

    subject: str
    program: Program
    rows: int
    microbatches: int

    @property
    def figures(self) -> Any:
        return SimpleNamespace(
            candidate=Candidate(program=self.program, rows=self.rows, microbatches=self.microbatches)
        )


def subject_named(name: str, folder: Path) -> Subject:
    """Return a small model of each kind that a plan takes."""
    if name == "gpt":
        return gpt_subject(ModelSettings(size="nano", layers=4), seq=16)
    if name in CONFIGS:
        return transformers_subject(folder / f"{name}.json", 8)
    return named_subject(f"test_plan_advice:{name}", "test_plan_advice:make_batch", None)


@contextmanager
def configs() -> Iterator[Path]:
    """Context manager with a folder of the configurations, which is deleted afterwards."""
    with TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(config))
        yield Path(folder)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
}


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU())


def make_lists() -> nn.Module:
    """Two lists, and a layer between them."""
    return nn.Sequential(
        nn.Sequential(*[layer() for _ in range(3)]), nn.Linear(32, 32), nn.Sequential(*[layer() for _ in range(2)])
    )


def make_plain() -> nn.Module:
    """A model without blocks: no two layers have one class."""
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.LayerNorm(48))


def make_batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, 32)


SUBJECTS = ("gpt", "llama", "t5", "make_lists", "make_plain")


@st.composite
def recommended(draw: st.DrawFn, cluster: Cluster) -> Advice:
    """Draw a recommendation that a search on `cluster` can make."""
    name = draw(st.sampled_from(SUBJECTS))
    precision = draw(st.sampled_from(("bf16", "bf16-reduce", "fp16", "fp32")))
    subject = subject_named(name if name not in CONFIGS else "gpt", Path())
    question = Question(subject=subject, cluster=cluster, global_batch=6 * cluster.world, precisions=(precision,))
    wanted = question.programs()
    change = draw(st.sampled_from(("none", "none", "offload", "cpu", "disk", "two ahead", "larger units", "encoded")))
    if change in ("offload", "disk"):
        wanted = [item for item in replace(question, offload=True).programs() if item.offload or item.disk]
        wanted = [item for item in wanted if item.offload == (change == "offload")]
        wanted = [replace(item, disk=item.disk and 0.25) for item in wanted]
    elif change == "cpu":
        wanted = [replace(item, cpu=0.5) for item in with_cpu(question, wanted)]
    elif change == "two ahead" and question.blocks:
        wanted = [replace(item, prefetch_depth=2) for item in wanted if item.strategy not in ("ddp", "zero1")]
    elif change == "larger units" and question.blocks > 2:
        wanted = [replace(item, blocks_per_unit=2) for item in wanted]
    elif change == "encoded" and precision != "bf16-reduce":
        wanted = [replace(item, reduce_wire="int8") for item in wanted]
    program = draw(st.sampled_from(wanted))
    return Advice(name, program, *draw(st.sampled_from(question.shapes_of(program))))


# ----------------------------------------------------------------------------------------- the steps that are simulated


def kinds(step: Any) -> list[Any]:
    """Return what entries do and for whom, without the numbers of storages and the events of streams."""
    kept = ("name", "stream", "origin", "nbytes", "flops", "ranks", "sizes")
    events = ("Recorded", "Waited")  # of streams; their order depends on the position of the root in backward
    named = [(type(entry).__name__, *(getattr(entry, name, None) for name in kept)) for entry in step]
    return [entry for entry in named if entry[0] not in events]


def step_lines(subject: Subject, advice: Advice, cluster: Cluster) -> tuple[str, str]:
    """Return the lines up to the optimizer, and those of a step, in which `forward_and_backward` is called."""
    text = "\n".join(python_lines(subject, advice.program, advice.figures, cluster))
    before, mark, step = text.partition("# each step")
    return before, re.sub(r"\.\.\.  # forward.*backward.*", "forward_and_backward()", mark + step)


def forward_and_backward(names: dict[str, Any], subject: Subject, rows: int) -> None:
    """Run forward and backward in place of the dots in the lines, whose globals are `names`."""
    scaler = names.get("scaler", ShardedGradScaler("cpu", enabled=False))
    scaler.scale(subject.loss(names["model"], subject.make_batch(rows))).backward()


def dry_steps(subject: Subject, advice: Advice, cluster: Cluster) -> Tape:
    """Return the trace of a dry run of the lines, with as many steps as the planner simulates."""
    before, step = step_lines(subject, advice, cluster)
    single = replace(advice, program=replace(advice.program, accumulates=False), microbatches=1)
    _, first = step_lines(subject, single, cluster)
    names: dict[str, Any] = {}
    names["forward_and_backward"] = partial(forward_and_backward, names, subject, 1)
    with dry.world(cluster.world, ranks_per_host=cluster.per_host), dry.taped() as tape:
        exec(before, names)
        for text in [first] * (1 + bool(advice.program.cpu)) + [step, step]:
            note_origin(Origin("", Phase.IDLE))
            exec(text, names)
    return tape


@pytest.mark.slow
@settings(deadline=None, max_examples=12, derandomize=True)
@given(advice=recommended(TWO_HOSTS))
@example(advice=Advice("gpt", Program(strategy="hpz", accumulates=True), 1, 2))
@example(advice=Advice("gpt", Program(strategy="zero3", precision="fp16"), 1, 1))
@example(advice=Advice("gpt", Program(strategy="zero2", precision="fp16", cpu=0.5), 1, 1))
@example(advice=Advice("gpt", Program(strategy="hfsdp", prefetch_depth=2, accumulates=True), 1, 2))
@example(advice=Advice("gpt", Program(strategy="hsdp", shard_hosts=2, checkpointing="selective"), 1, 1))
def test_advice_lines_in_dry_run_match_simulated_steps(advice):
    """Both have the same operations, collectives and allocations in the same order. Dry runs do not include disks."""
    program = replace(advice.program, disk=0.0)
    cluster = replace(TWO_HOSTS, hosts=2 * program.shard_hosts)
    advice = replace(advice, program=program, microbatches=1 + program.accumulates)
    with configs() as folder:
        subject = subject_named(advice.subject, folder)
        simulated = take_steps(subject, cluster, program, {}, (1, 1, 1), 1.0, None).tape.entries
        pasted = dry_steps(subject, advice, cluster).entries
    assert kinds(pasted[steps_of(pasted)[-1] :]) == kinds(simulated[steps_of(simulated)[-1] :])


def test_python_lines_compile_blocks_before_sharding():
    program = Program(strategy="zero3", compiled=True)
    advice = Advice("gpt", program, 1, 1)
    with configs() as folder:
        subject = subject_named("gpt", folder)
    lines = python_lines(subject, program, advice.figures, TWO_HOSTS)
    assert lines.index("    block.compile()") < lines.index("    fully_shard(block, **options)")
    assert train_flags(subject, program, advice.figures, TWO_HOSTS) is None, "the trainer does not compile"
    eager, compiled = (
        sketch(subject, TWO_HOSTS, replace(program, compiled=item)).figures(2, 1) for item in (False, True)
    )
    assert compiled.step_s < eager.step_s
    assert compiled.needed_bytes == eager.needed_bytes


# ------------------------------------------------------------------------------------------------------ run on ranks


@dataclass
class Seen:
    """What a step on real ranks did, and how its model is sharded."""

    units: list[list[str]]  # the modules of each unit
    options: list[tuple[Any, ...]]  # per unit: placements, dtypes, offload, prefetch depth and backward prefetch
    rows: list[int]  # of each microbatch
    recomputed: list[str]  # modules whose forward ran again in backward
    reduced: list[int]  # microbatches after which gradients were reduced over all hosts


def expected(subject: Subject, advice: Advice, cluster: Cluster, where: str) -> Seen:
    """Return what the plan states. Only the Python lines set larger units, only the Trainer sets a prefetch depth."""
    assert subject.model is not None
    program, names = advice.program, {module: name for name, module in subject.model.named_modules()}
    blocks = [names[unit] for unit in units_of(subject.model)]
    size = program.blocks_per_unit if where == "Python" else 1
    units = [*(blocks[first : first + size] for first in range(0, len(blocks), size)), [""]]
    disk = Offload(optimizer={"disk": program.disk}, folder=cluster.disk.folder) if program.disk else None
    offload = fractions(disk or program.offload_policy() or Offload())
    ahead = program.prefetch_depth if where == "TrainingArguments" else 1
    options = (program.placements(cluster.per_host), summed_in(program.policy()), offload, ahead, "pre")
    every = range(1, advice.microbatches + 1)
    return Seen(
        units=units,
        options=[options] * len(units),
        rows=[advice.rows] * advice.microbatches,
        recomputed=list(checkpointed(blocks, program.checkpointing)),
        reduced=list(every) if program.syncs_each else [advice.microbatches],
    )


def options_of(options: Any) -> tuple[Any, ...]:
    ahead = options.prefetch_depth, options.backward_prefetch
    return options.placements, summed_in(options.precision), fractions(options.offload), *ahead


def fractions(policy: Any) -> list[Any]:
    full = policy.in_full
    return [dict(full.parameters), dict(full.optimizer), dict(full.activations), str(full.folder)]


def summed_in(policy: Any) -> tuple[Any, ...]:
    """Return the dtypes and encodings. Without an explicit dtype, gradients are reduced in float32."""
    return policy.param_dtype, policy.reduce_dtype or torch.float32, policy.gather_wire, policy.reduce_wire


def run_advice(subject: Subject, advice: Advice, cluster: Cluster, where: str, folder: Path) -> Seen | None:
    """Execute the lines for `where` on this rank for one step. Return None if the plan has no such lines."""
    of = (subject, advice.program, advice.figures, cluster)
    if where == "Python":
        return run_python(subject, advice, cluster)
    if where == "fullshard train":
        flags = train_flags(*of)
        return None if flags is None else run_train(flags, subject, cluster, folder)
    text = None if advice.program.scales_loss else trainer_arguments(*of)  # accelerate has no scaler on CPUs
    return None if text is None else run_trainer(text, subject, advice, cluster, folder)


def run_python(subject: Subject, advice: Advice, cluster: Cluster) -> Seen:
    before, step = step_lines(subject, advice, cluster)
    names: dict[str, Any] = {}
    names["forward_and_backward"] = partial(forward_and_backward, names, subject, advice.rows)
    exec(before, names)
    return seen_in(names["model"], subject, cluster, lambda: exec(step, names))


def run_train(flags: str, subject: Subject, cluster: Cluster, folder: Path) -> Seen:
    """Run a step of the trainer's loop on a rank of the hosts."""
    given = flags.split(" train ")[1].partition(" --ranks")[0].split()
    index = dist.get_rank()
    rank = replace(this_rank(), local_index=index % cluster.per_host, local_world=cluster.per_host)
    rank = replace(rank, machines=cluster.hosts)
    settings = resolved(parse_settings([*given, "--text", TEXT, "--steps", "1", "--out", str(folder)]), rank)
    text = agreed_text(find_text(settings.text.text), folder, rank)
    model, display = sharded_gpt(settings, rank), display_for(Console(), shows=False)
    loop = TrainingLoop(settings, rank, text, model, RunFolder(folder, writes=False), display)
    return seen_in(model, subject, cluster, lambda: loop.train_step(0))


def run_trainer(text: str, subject: Subject, advice: Advice, cluster: Cluster, folder: Path) -> Seen:
    """Run one step of the transformers integration's Trainer with the model that the Python lines create."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    from fullshard.integrations.transformers import Trainer

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate warns otherwise
    AcceleratorState._reset_state()
    GradientState._reset_state()
    names: dict[str, Any] = {}
    exec("\n".join(python_lines(subject, advice.program, advice.figures, cluster)).partition("options =")[0], names)
    usual = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    made = {"TrainingArguments": lambda out, **given: TrainingArguments(str(folder / out), **usual, **given)}
    trainer = Trainer(model=names["model"], args=eval(text, made), train_dataset=Sentences(64))
    return seen_in(names["model"], subject, cluster, trainer.train)


def seen_in(model: nn.Module, subject: Subject, cluster: Cluster, step: Callable[[], Any]) -> Seen:
    """Return what `step` does with `model`."""
    assert subject.model is not None
    names = {module: name for name, module in subject.model.named_modules()}
    blocks = [names[unit] for unit in units_of(subject.model)]
    with called(model, blocks) as rows, recording() as record:
        step()
    names = {module: name for name, module in model.named_modules()}
    units = sorted(units_in(model), key=lambda unit: names[unit.module] == "")
    sums = [event for event in record.collectives() if event.origin.phase in SUMS and event.name != "all_gather"]
    return Seen(
        units=[[names[module] for module in unit.modules] for unit in units],
        options=[options_of(unit.options) for unit in units],
        rows=rows[""],
        recomputed=[block for block in blocks if len(rows[block]) == 2 * len(rows[""])],
        reduced=sorted({event.origin.microbatch for event in sums if hosts_of(event.ranks, cluster) == cluster.hosts}),
    )


def hosts_of(ranks: tuple[int, ...], cluster: Cluster) -> int:
    return len({rank // cluster.per_host for rank in ranks})


SUMS = (Phase.BACKWARD, Phase.POST_BACKWARD)


@contextmanager
def called(model: nn.Module, blocks: list[str]) -> Iterator[dict[str, list[int]]]:
    """Context manager that lists the rows of each call of the model, and of the first layer of each of its `blocks`."""
    rows: dict[str, list[int]] = {name: [] for name in ("", *blocks)}
    layers = {name: [layer for layer in model.get_submodule(name).modules() if holds(layer)] for name in blocks}
    first = {"": model, **{name: found[0] for name, found in layers.items()}}
    handles = [
        module.register_forward_pre_hook(partial(count_rows, rows[name]), with_kwargs=True)
        for name, module in first.items()
    ]
    yield rows
    for handle in handles:
        handle.remove()


def holds(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters(recurse=False))


def count_rows(rows: list[int], module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    rows.append(len(next(iter((*args, *named.values())))))


def compare(advice: Advice, hosts: int, folder: Path) -> list[tuple[str, Seen, Seen]]:
    """Execute all lines of one recommendation on the ranks of this world. Return the results next to the plan's."""
    cluster = replace(TWO_HOSTS, hosts=hosts, per_host=dist.get_world_size() // hosts)
    cluster = replace(cluster, disk=replace(TYPICAL, folder=folder))
    of_hosts = {"LOCAL_WORLD_SIZE": str(cluster.per_host), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, of_hosts):
        subject = subject_named(advice.subject, folder)
        found = []
        for where in ("Python", "fullshard train", "TrainingArguments"):
            seen = run_advice(subject, advice, cluster, where, folder)
            if seen is not None:
                found.append((where, seen, expected(subject, advice, cluster, where)))
        return found


@pytest.mark.slow
@settings(deadline=None, max_examples=8, derandomize=True)
@given(advice=recommended(replace(TWO_HOSTS, hosts=1)))
def test_advice_lines_on_real_ranks_match_plan(advice):
    check(advice, hosts=1)


@pytest.mark.slow
@settings(deadline=None, max_examples=4, derandomize=True)
@given(advice=recommended(TWO_HOSTS).filter(lambda advice: advice.program.strategy in HYBRID))
def test_advice_lines_on_two_hosts_match_plan(advice):
    check(advice, hosts=2)


HYBRID = ("hpz", "hsdp", "hsdp_zero2", "hfsdp")


def check(advice: Advice, *, hosts: int) -> None:
    with configs() as folder:
        for found in run_ranks(2 * hosts, compare, advice, hosts, folder):
            for where, seen, stated in found:
                assert seen == stated, where
