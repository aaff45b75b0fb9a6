"""Accuracy of memory predictions: dry runs compared with real ranks of this machine, over gloo.

    python benchmarks/predicted_memory.py
    python benchmarks/predicted_memory.py --part peaks
    python benchmarks/predicted_memory.py --part process --threshold 65536

    peaks     the most bytes of tensors at once on a rank, from the making of the model to the end of the third step.
              Measured by an independent counter without access to the engine or its tape: after each operation of
              torch's, the bytes of all storages that any operation has met and that are still alive. Of memory that
              ranks have in common each one counts its part. How many messages are under way is decided by the pace of
              ranks: of three runs the one counts that needed most
    process   the most memory of a process, above what it had after steps of a tiny model: its own pages, and its part
              of those that ranks share. The kernel keeps the peak. Numbers are means over three runs and their ranks.
              The C library's allocator is left as it is, unless a threshold is given
    limits    runs with RLIMIT_AS on their ranks, at several sizes and at the smallest one that is predicted to fit: no
              run may fail that is predicted to fit. Limits below its tensors are left out. MALLOC_MMAP_THRESHOLD_
              is 65536 unless a threshold is given

Both sides run the same function. The table goes to the screen, all numbers to benchmarks/results/predicted_memory.json,
and predicted over measured to a picture next to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, Placement, Placements, clip_grad_norm_, dry, fully_shard
from fullshard.device.accelerator import Accelerator, pretending
from fullshard.plan.memory_used import PeakMemory, process_bytes
from fullshard.plan.process import process_memory
from fullshard.testing import RanksFailed, run_ranks

transformers.logging.set_verbosity_error()
RESULTS = Path(__file__).parent / "results"
STEPS = 3
RUNS = 3  # of each configuration
W, G, S = Placement.WHOLE, Placement.GROUPED, Placement.SHARDED
GROUPED = {
    "grouped in step": Placements(parameters=S, parameters_in_step=G, gradients=S, optimizer=S, group=2),
    "grouped": Placements(parameters=G, parameters_in_step=G, gradients=G, optimizer=S, group=2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    family: str = "llama"
    strategy: str = "zero3"
    ranks: int = 2
    width: int = 64
    layers: int = 4
    vocabulary: int = 500
    batch: int = 4
    length: int = 32
    microbatches: int = 1
    no_sync: bool = False
    checkpoints: bool = False
    bf16: bool = False
    max_norm: float | None = None
    offload: bool = False
    optimizer: str = "fused AdamW"

    @property
    def name(self) -> str:
        """Description in words."""
        words = [f"{self.family} {self.width}x{self.layers}", self.strategy, f"{self.ranks} ranks"]
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches{' under no_sync' if self.no_sync else ''}")
        words += [word for word, is_so in self._options if is_so]
        return ", ".join(words)

    @property
    def _options(self) -> Iterator[tuple[str, bool]]:
        yield "checkpointing", self.checkpoints
        yield "bf16", self.bf16
        yield "clipping", self.max_norm is not None
        yield "offload", self.offload
        yield self.optimizer, self.optimizer != "fused AdamW"


# -- what both sides run ----------------------------------------------------------------------------------------------


def make_mesh(case: Case) -> Any:
    """Return the mesh of strategies that need one, made before the tape begins."""
    if not case.strategy.startswith("hsdp"):
        return None
    return init_device_mesh("cpu", (2, case.ranks // 2), mesh_dim_names=("replicate", "shard"))


def train(case: Case, mesh: Any) -> None:
    """Three steps."""
    torch.manual_seed(0)
    model, layers = make_model(case)
    options: dict[str, Any] = {"strategy": GROUPED.get(case.strategy, case.strategy)}
    if mesh is not None:
        options["mesh"] = mesh
    if case.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in layers:
        fully_shard(layer, **options)
    sharded: Any = fully_shard(model, **options)
    optimizer = make_optimizer(case, sharded)
    for _ in range(STEPS):
        for microbatch in range(case.microbatches):
            withheld = case.no_sync and microbatch < case.microbatches - 1
            context: AbstractContextManager[Any] = sharded.no_sync() if withheld else nullcontext()
            with context:
                sharded(**make_batch(case)).loss.backward()
        if case.max_norm is not None:
            clip_grad_norm_(sharded.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of `case`."""
    if case.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if case.optimizer == "foreach AdamW":
        return torch.optim.AdamW(model.parameters(), foreach=True)
    return torch.optim.AdamW(model.parameters(), fused=True)


def make_batch(case: Case) -> dict[str, Tensor]:
    """One microbatch."""
    if case.family == "vit":
        labels = torch.zeros(case.batch, dtype=torch.long)
        return {"pixel_values": torch.randn(case.batch, 3, case.length, case.length), "labels": labels}
    ids = torch.randint(1, case.vocabulary, (case.batch, case.length))
    return {"input_ids": ids, "labels": ids}


def make_model(case: Case) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Return a model of transformers by its configuration, with random weights, and the layers that are units."""
    model, layers = FAMILIES[case.family](transformers, case)
    if case.checkpoints:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train()
    return model, layers


def llama(library: Any, case: Case) -> tuple[Any, Any]:
    sizes = {"hidden_size": case.width, "intermediate_size": case.width * 8 // 3, "num_hidden_layers": case.layers}
    made = library.LlamaForCausalLM(
        library.LlamaConfig(vocab_size=case.vocabulary, num_attention_heads=4, use_cache=False, **sizes)
    )
    return made, made.model.layers


def gpt2(library: Any, case: Case) -> tuple[Any, Any]:
    sizes = {"n_embd": case.width, "n_layer": case.layers, "n_head": 4, "n_positions": case.length}
    made = library.GPT2LMHeadModel(library.GPT2Config(vocab_size=case.vocabulary, use_cache=False, **sizes))
    return made, made.transformer.h


def t5(library: Any, case: Case) -> tuple[Any, Any]:
    sizes = {"d_model": case.width, "d_kv": case.width // 4, "d_ff": 2 * case.width, "num_layers": case.layers}
    made = library.T5ForConditionalGeneration(
        library.T5Config(vocab_size=case.vocabulary, num_heads=4, decoder_start_token_id=0, use_cache=False, **sizes)
    )
    return made, [*made.encoder.block, *made.decoder.block]


def bert(library: Any, case: Case) -> tuple[Any, Any]:
    sizes = {"hidden_size": case.width, "intermediate_size": 3 * case.width, "num_hidden_layers": case.layers}
    made = library.BertForMaskedLM(library.BertConfig(vocab_size=case.vocabulary, num_attention_heads=4, **sizes))
    return made, made.bert.encoder.layer


def mixtral(library: Any, case: Case) -> tuple[Any, Any]:
    sizes = {"hidden_size": case.width, "intermediate_size": case.width, "num_hidden_layers": case.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    made = library.MixtralForCausalLM(
        library.MixtralConfig(vocab_size=case.vocabulary, use_cache=False, **sizes, **heads)
    )
    return made, made.model.layers


def vit(library: Any, case: Case) -> tuple[Any, Any]:
    sizes = {"hidden_size": case.width, "intermediate_size": 2 * case.width, "num_hidden_layers": case.layers}
    made = library.ViTForImageClassification(
        library.ViTConfig(num_attention_heads=4, image_size=case.length, patch_size=4, **sizes)
    )
    return made, made.vit.layers


FAMILIES: dict[str, Callable[[Any, Case], tuple[Any, Any]]] = {
    item.__name__: item for item in (llama, gpt2, t5, bert, mixtral, vit)
}


def predicted_tape(case: Case, rank: int = 0) -> dry.Tape:
    """Return the tape of `rank`, recorded without peers."""
    with dry.world(case.ranks, rank=rank, ranks_per_host=case.ranks):
        mesh = make_mesh(case)
        with dry.taped(streams="cpu") as tape:
            train(case, mesh)
            gc.collect()
    return tape


# -- peaks of tensors -------------------------------------------------------------------------------------------------


class LiveStorages(TorchDispatchMode):
    """A context that counts, after each operation, the bytes of all storages that operations have met and that live.

    Args:
        shared: knows which of them ranks have in common.
    """

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._met: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count."""
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of([args, kwargs, result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._met and not tensor.is_meta:
                self._met[storage._cdata] = StorageWeakRef(storage)  # no other can have its number while this is there
        self._met = {key: ref for key, ref in self._met.items() if not ref.expired()}
        present = 0.0
        for key in self._met:
            if (alive := torch.UntypedStorage._new_with_weak_ptr(key)) is not None:
                present += alive.nbytes() / self._shared.ranks(key)
        self.peak_bytes = max(self.peak_bytes, present)
        return result


class SharedMemory(Accelerator):
    """A CPU that keeps in mind by how many ranks memory is shared."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[StorageWeakRef, int]] = {}

    def note_shared(self, storage: torch.UntypedStorage, ranks: int, purpose: str) -> None:
        self._ranks[storage._cdata] = StorageWeakRef(storage), ranks

    def ranks(self, key: int) -> int:
        """How many ranks have the memory of a storage, by its number."""
        return self._ranks[key][1] if key in self._ranks else 1


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree`, and in wrappers such as `DTensor` what they wrap."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)
    elif isinstance(tree, Tensor) and is_traceable_wrapper_subclass(tree):
        yield from tensors_of([getattr(tree, name) for name in tree.__tensor_flatten__()[0]])
    elif isinstance(tree, Tensor):
        yield tree


def measured_peaks(cases: Sequence[Case]) -> list[list[float]]:
    """On a rank: the most bytes of storages at once, of each case and run of it. Every run has a process group of its
    own, so that it finds no memory that one before it shared.
    """
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    peaks: list[list[float]] = []
    for case in cases:
        peaks.append([])
        for run in range(RUNS):
            peaks[-1].append(measured_peak(case))
            gc.collect()
            dist.destroy_process_group()
            prefix = dist.PrefixStore(f"{len(peaks)}.{run}/", store)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world)
    return peaks


def measured_peak(case: Case) -> float:
    """Return the peak bytes of storages on a rank."""
    mesh = make_mesh(case)
    shared = SharedMemory()
    with pretending(shared), LiveStorages(shared) as counter:
        train(case, mesh)
    return counter.peak_bytes


def peak_cases() -> list[Case]:
    """Return all strategies, 1 to 4 ranks, and what else changes what is in memory when."""
    cases = [Case(strategy=item, ranks=n) for item in ("ddp", "zero1", "zero2", "zero3") for n in (1, 2, 4)]
    cases += [Case(family="gpt2", strategy=item, ranks=4) for item in ("hsdp", "hsdp_zero2", *GROUPED)]
    cases += [Case(family=item, strategy="hsdp", ranks=2) for item in ("llama", "bert")]
    cases += [Case(family=item, width=100, ranks=3, strategy=s) for item in ("gpt2", "t5") for s in ("zero1", "zero3")]
    cases += [Case(family=item, strategy=s, ranks=n) for item in ("bert", "t5") for s, n in (("zero2", 2), ("ddp", 3))]
    cases += [Case(family=item, strategy="zero3") for item in ("mixtral", "vit")]
    for strategy in ("ddp", "zero1", "zero3"):
        cases += [Case(family="gpt2", strategy=strategy, microbatches=3, no_sync=item) for item in (False, True)]
    cases += [Case(family="gpt2", ranks=4, strategy=item, microbatches=2, no_sync=True) for item in ("hsdp", "grouped")]
    cases += [Case(family=item, batch=8, length=64, checkpoints=True) for item in ("llama", "gpt2", "bert")]
    cases += [
        Case(bf16=True, strategy=item, ranks=n) for item, n in (("ddp", 2), ("zero1", 3), ("zero3", 2), ("zero3", 4))
    ]
    cases += [Case(family="t5", bf16=True, checkpoints=True, max_norm=1.0, microbatches=2, no_sync=True)]
    cases += [Case(max_norm=1.0, strategy=item) for item in ("ddp", "zero2", "zero3")]
    cases += [Case(offload=True), Case(offload=True, bf16=True, ranks=3)]
    cases += [Case(optimizer=item, strategy=s) for item in ("SGD", "foreach AdamW") for s in ("zero1", "zero3")]
    return cases


def peaks(limit: int | None, threshold: int | None) -> list[dict[str, Any]]:
    """Predicted and measured peaks of the first rank of each case, and of the last where it has other sizes."""
    rows = []
    cases = peak_cases()[:limit]
    print(HEAD)
    for world in sorted({case.ranks for case in cases}):
        identical = [case for case in cases if case.ranks == world]
        by_rank = run_ranks(world, measured_peaks, identical, timeout=60.0 * len(identical))
        for number, case in enumerate(identical):
            for rank in sorted({0, case.ranks - 1 if case.width == 100 else 0}):
                runs = [round(item) for item in by_rank[rank][number]]
                predicted = predicted_tape(case, rank).peak_bytes()
                rows.append(row_of(case, rank, predicted, max(runs), least=min(runs)))
    return rows


def row_of(case: Case, rank: int, predicted: int, measured: int, **more: Any) -> dict[str, Any]:
    row = {"case": case.name, "rank": rank, "predicted": predicted, "measured": measured, **more}
    row["difference"] = round(predicted / measured - 1, 5)
    print(
        f"| {row['case']} | {rank} | {predicted / 1e6:.3f} | {measured / 1e6:.3f} | {row['difference']:+.2%} |",
        flush=True,
    )
    return row


# -- memory of processes ----------------------------------------------------------------------------------------------


def tiny_steps(case: Case, mesh: Any) -> None:
    """Steps of a tiny model, which import all there is."""
    train(replace(case, width=32, vocabulary=100, batch=1, length=8, layers=2), mesh)
    gc.collect()


def measured_process(case: Case) -> tuple[int, int]:
    """On a rank: what its process took at most, above what it had after steps of a tiny model; and what that was."""
    mesh = make_mesh(case)
    tiny_steps(case, mesh)
    before = process_bytes()
    peak = PeakMemory(torch.device("cpu"))
    peak.reset()
    train(case, mesh)
    took = peak.peak().process
    assert before is not None and took is not None, "the kernel reports no memory of processes"
    return took, before


def process_cases() -> list[Case]:
    """Return cases with processes that hold mostly tensors: 100 to 600 MB per rank."""
    small = {"width": 320, "vocabulary": 4000, "layers": 6, "batch": 4, "length": 64}
    large = {"width": 448, "vocabulary": 6000, "layers": 4, "batch": 4, "length": 64}
    return [
        *(Case(strategy=item, ranks=2, **small) for item in ("ddp", "zero1", "zero2", "zero3")),
        *(Case(family="gpt2", strategy=item, ranks=1, **large) for item in ("ddp", "zero3")),
        *(Case(family="gpt2", strategy=item, ranks=2, **large) for item in ("ddp", "zero3")),
        *(Case(family="bert", strategy=item, ranks=2, **large) for item in ("zero1", "zero3")),
        Case(ranks=2, bf16=True, **small),
        Case(family="gpt2", ranks=2, checkpoints=True, **large),
    ]


def processes(limit: int | None, threshold: int | None) -> list[dict[str, Any]]:
    """Return predicted and measured memory of a process, for each case. Ranks of a case are identical."""
    rows = []
    print(HEAD)
    for case in process_cases()[:limit]:
        runs = [run for _ in range(RUNS) for run in run_ranks(case.ranks, measured_process, case, timeout=120.0)]
        took = [item for item, _ in runs]
        predicted = process_memory(predicted_tape(case), threshold=threshold)
        more = {"least": min(took), "most": max(took), "tensors": predicted.tensors, "before": runs[0][1]}
        rows.append(row_of(case, 0, predicted.nbytes, round(sum(took) / len(took)), **more))
    return rows


# -- limits -----------------------------------------------------------------------------------------------------------

LIMITS = tuple(64 * 2**20 << i for i in range(5))  # bytes of addresses, beyond what a process has after tiny steps
LIMITS_THRESHOLD = 65536  # each tensor has a separate mapping, so that the memory of a process is predictable
_PATIENCE_S = 60.0


def limited_run(case: Case, limit: int) -> None:
    """On a rank: train within this many bytes of addresses more than the process has after steps of a tiny model."""
    mesh = make_mesh(case)
    tiny_steps(case, mesh)
    dist.barrier()
    most = address_bytes() + limit
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    train(case, mesh)


def runs_within(case: Case, limit: int) -> bool:
    try:
        run_ranks(case.ranks, limited_run, case, limit, timeout=_PATIENCE_S)
    except RanksFailed:
        return False
    return True


def address_bytes() -> int:
    """What RLIMIT_AS counts: all addresses that this process has, touched or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))


def limit_cases() -> list[Case]:
    """Return cases of 100 to 350 MB per rank."""
    sizes = {"width": 256, "vocabulary": 4000, "layers": 4, "length": 64}
    cases = [Case(family=item, ranks=1, batch=n, **sizes) for item in ("llama", "gpt2", "bert") for n in (2, 8, 16)]
    cases += [Case(strategy=item, batch=n, **sizes) for item in ("ddp", "zero1", "zero3") for n in (4, 12)]
    cases += [Case(family="gpt2", batch=16, checkpoints=item, **sizes) for item in (False, True)]
    cases += [Case(family="gpt2", ranks=n, strategy="zero2", batch=8, **sizes) for n in (3, 4)]
    return [*cases, Case(family="t5", batch=4, **sizes), Case(bf16=True, batch=8, **sizes)]


def limits(limit: int | None, threshold: int | None) -> list[dict[str, Any]]:
    """Return whether each case is predicted to fit within each limit, and whether it does. The last limit is the least
    that is predicted to fit.
    """
    rows = []
    print(
        "| case | fits from, MB | said, done within "
        + ", ".join(f"{limit / 1e6:.0f}" for limit in LIMITS)
        + " MB (those above its tensors), and the least |\n|---|---|---|"
    )
    for case in limit_cases()[:limit]:
        predicted = process_memory(predicted_tape(case), threshold=threshold)
        given = [*(limit for limit in LIMITS if limit > predicted.tensors), predicted.fits_from]
        done = [runs_within(case, limit) for limit in given]
        stated = [predicted.fits(item) for item in given]
        marks = "".join(
            {(True, True): "+", (False, False): "-", (True, False): "F", (False, True): "r"}[item]
            for item in zip(stated, done, strict=True)
        )
        name = f"{case.name}, {case.batch} rows"
        print(f"| {name} | {predicted.fits_from / 1e6:.1f} | {marks} |", flush=True)
        rows += [
            {"case": name, "limit": at, "fits from": predicted.fits_from, "fits": fits, "ran": ran}
            for at, fits, ran in zip(given, stated, done, strict=True)
        ]
    feasible = [row for row in rows if row["ran"] and row["limit"] in LIMITS]
    failed = sum(row["fits"] and not row["ran"] for row in rows)
    refused = sum(not row["fits"] for row in feasible)
    print(f"\n{len(rows)} runs; said to fit and failed: {failed}; refused of {len(feasible)} feasible: {refused}")
    return rows


PARTS = {"peaks": peaks, "process": processes, "limits": limits}


def main() -> None:
    """Predict and measure, write it all down and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="one part only")
    parser.add_argument("--limit", type=int, help="number of cases of each part")
    parser.add_argument("--threshold", type=int, help="MALLOC_MMAP_THRESHOLD_ of the ranks, for both sides")
    options = parser.parse_args()
    if options.part == ["limits"] and options.threshold is None:
        options.threshold = LIMITS_THRESHOLD
    if options.threshold:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(options.threshold)  # for processes that start from here on
    parts = options.part or list(PARTS)
    if len(parts) > 1:  # by a process each, which sets what ranks' processes begin with
        others = [f"--{name}={value}" for name, value in vars(options).items() if value and name != "part"]
        for part in parts:
            subprocess.run((sys.executable, __file__, f"--part={part}", *others), check=True)
        return
    (part,) = parts
    if part == "limits":  # other arenas have 64 MB of addresses each in reserve, which no limit stops
        os.environ["MALLOC_ARENA_MAX"] = "1"
    results = RESULTS / "predicted_memory.json"
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "libc": platform.libc_ver()[1],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    began = time.perf_counter()
    print(f"\n## {part}\n", flush=True)
    rows = PARTS[part](options.limit, options.threshold)
    differences = [abs(row["difference"]) for row in rows if "difference" in row]
    worst = (
        f", worst {max(differences):.2%}, over 2 %: {sum(difference > 0.02 for difference in differences)}"
        if differences
        else ""
    )
    print(f"{part}: {len(rows)} rows{worst}, in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if options.limit is None:
        found = json.loads(results.read_text()) if results.exists() else {}
        name = f"{part} at {options.threshold}" if options.threshold and part != "limits" else part
        found |= {"about": about, name: rows}
        results.write_text(json.dumps(found, indent=1) + "\n")
        draw(found, results.with_suffix(".png"))


HEAD = "| case | rank | predicted, MB | measured, MB | difference |\n|---|---|---|---|---|"


def draw(found: dict[str, Any], path: Path) -> None:
    """Predicted over measured, for each part that has both."""
    from matplotlib.figure import Figure

    parts = [part for part in ("peaks", "process") if part in found]
    if not parts:
        return
    figure = Figure(figsize=(5.5 * len(parts), 5), layout="constrained")
    for part, axes in zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True):
        measured, predicted = ([row[side] / 1e6 for row in found[part]] for side in ("measured", "predicted"))
        axes.scatter(measured, predicted, s=16)
        axes.axline((min(measured), min(measured)), slope=1, color="gray", lw=0.8)
        worst = max(abs(row["difference"]) for row in found[part])
        axes.set_title(f"{part}: {len(measured)}, within {worst:.1%}")
        axes.set_xlabel("measured, MB")
        axes.set_ylabel("predicted, MB")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
