"""The fuzzer: a fixed sample of programs, and planted engine faults that it finds and shrinks."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.fuzzing.generation import Generator
from benchmarks.fuzzing.judging import EQUAL, REFUSED, WRONG, Pool, script_of, shrink
from fullshard.comm import pairwise, shared_memory
from fullshard.liveness import watchdog

SAMPLE = 30


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, as ranks do: the last bits of results may depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_sampled_programs_match_plain_pytorch_or_are_rejected():
    with Pool() as pool:
        programs = {f"sample:{i}": Generator(f"sample:{i}", (1, 2)).program() for i in range(SAMPLE)}
        verdicts = {name: pool.judge(program) for name, program in programs.items()}
    failures = {name: verdict for name, verdict in verdicts.items() if verdict.is_failure}
    assert not failures
    assert sum(verdict.kind == EQUAL for verdict in verdicts.values()) > SAMPLE / 2


def test_bfloat16_model_with_inplace_input_matches_plain_pytorch():
    nodes = [{"kind": "shape", "how": "inplace on input"}, {"kind": "linear"}, {"kind": "weight norm", "unit": {}}]
    steps = [{"do": "step"}, {"do": "copied"}, {"do": "step"}]
    momentum = {"name": "SGD", "momentum": 0.9, "weight_decay": 0.1}
    for root in ("fully_shard", "wrapper"):
        program = {"ranks": 3, "width": 48, "dtype": "bfloat16", "input needs grad": True, "interface": root}
        program |= {"model": {"kind": "sequence", "children": nodes}, "optimizer": momentum, "loop": steps}
        with Pool() as pool:
            assert pool.judge(program).kind == EQUAL


TRAINED_LATER = [{"do": "freeze", "trained": True}, {"do": "step", "micro": 2, "sync": "each"}]
TWICE = {"kind": "parallel", "children": [{"kind": "batch norm"}], "unit": {}}
LEAF = {"kind": "parallel", "children": [TWICE, {"kind": "linear"}], "recompute": "reentrant", "unit outside": True}
IGNORED = {"kind": "linear", "ignored": True, "label": "5"}
PLAIN_CASES = {
    "a unit adds its gradients of a leaf first": {
        "ranks": 1,
        "width": 48,
        "model": {"kind": "sequence", "children": [{"kind": "linear"}, LEAF]},
        "loop": [{"do": "step"}],
    },
    "a loaded model has no gradients": {
        "loop": [{"do": "step", "keep grads": True}, {"do": "checkpointed", "into": "ddp"}, {"do": "step"}]
    },
    "a checkpoint changes the order of sums": {
        "ranks": 4,
        "strategy": "hfsdp",
        "loop": [{"do": "step"}, {"do": "checkpointed", "into": "zero1"}, {"do": "step"}],
    },
    "ignored parameters stay frozen": {
        "model": {"kind": "sequence", "children": [{"kind": "linear", "ignored": True}, {"kind": "linear"}]},
        "loop": [*TRAINED_LATER, {"do": "step"}],
    },
    "a matrix with few rows is stepped in parts of columns": {
        "width": 39,
        "model": {"kind": "sequence", "children": [{"kind": "norm"}, {"kind": "mlp", "hidden": 1}]},
        "dtype": "bfloat16",
        "loop": [{"do": "step"}],
    },
    "unsharded parameters have the compute dtype": {
        "precision": {"param_dtype": "bfloat16"},
        "loop": [{"do": "step"}, {"do": "unshard", "leave": True}, {"do": "step"}],
    },
    "gradients of inputs are no reason to reduce": {
        "penalty": True,
        "input needs grad": True,
        "loop": [{"do": "step", "micro": 2}],
    },
    "a gradient of inputs is a backward, after which buffers are broadcast": {
        "model": {"kind": "batch norm"},
        "broadcast_buffers": True,
        "penalty": True,
        "input needs grad": True,
        "loop": [{"do": "forward_only"}, {"do": "step"}],
    },
    "units that a graph needs do not move": {
        "model": {"kind": "mlp", "unit": {}},
        "penalty": True,
        "input needs grad": True,
        "autocast": "bfloat16",
        "loop": [{"do": "step"}, {"do": "step"}],
    },
    "loaded states are cast to the dtype of the parameter": {
        "model": {"kind": "double", "children": [{"kind": "norm"}]},
        "optimizer": {"name": "NAdam"},
        "loop": [{"do": "step"}, {"do": "saved"}, {"do": "step"}],
    },
    "an abandoned step and a copy broadcast buffers again": {
        "model": {"kind": "sequence", "children": [{"kind": "counted"}, {"kind": "linear"}]},
        "broadcast_buffers": True,
        "loop": [{"do": "boom", "after": 2}, {"do": "step"}, {"do": "forward_only"}, {"do": "copied"}, {"do": "step"}],
    },
    "to_empty of torch unties ignored parameters": {
        "model": {"kind": "sequence", "children": [IGNORED, {"kind": "tied", "to": "5"}, {"kind": "linear"}]},
        "start": "loaded",
    },
    "a recomputed unit casts no inputs unless it is the root": {
        "interface": "wrapper",
        "precision": {"param_dtype": "bfloat16"},
        "model": {"kind": "sequence", "children": [IGNORED, {"kind": "scale", "unit": {}, "recompute": "no"}]},
        "loop": [{"do": "step"}, {"do": "step"}],
    },
    "optimizers are made of sharded parameters": {
        "optimizer": {"name": "Adadelta"},
        "loop": [{"do": "step"}, {"do": "unshard", "leave": True}, {"do": "optimizer_state"}, {"do": "reload"}],
    },
}


@pytest.mark.slow
def test_plain_reference_run_matches_semantics_of_sharded_training():
    with Pool() as pool:
        verdicts = {name: pool.judge({"ranks": 2} | program) for name, program in PLAIN_CASES.items()}
    assert all(verdict.kind == EQUAL for verdict in verdicts.values()), verdicts


def test_ranks_skipping_different_modules_raise_instead_of_hanging():
    """The backward order becomes known in different microbatches per rank. It decides when memory is shared."""
    dropped = {"kind": "dropped", "children": [{"kind": "norm"}], "every": 3, "by rank": True, "unit": {}}
    model = {"kind": "sequence", "children": [dropped, {"kind": "linear"}]}
    steps = [{"do": "step", "micro": 3}, {"do": "step"}]
    program = {"ranks": 3, "width": 48, "model": model, "strategy": "zero2", "loop": steps}
    program |= {"optimizer": {"name": "SGD", "lr": 0.1}}
    with Pool() as pool:
        assert pool.judge(program).kind == REFUSED


DROPPED = {"kind": "dropped", "children": [{"kind": "linear"}], "every": 3, "by rank": True, "unit": {}}
WITHIN = {"kind": "sequence", "children": [DROPPED, {"kind": "linear", "unit": {}}], "unit": {}}
AFTER_A_BACKWARD = {
    "a gather of a forward": {"nodes": [{**DROPPED, "children": [{"kind": "linear", "unit": {}}]}], "no_sync": True},
    "a gather of a backward": {"nodes": [WITHIN]},
    "a reduction": {"nodes": [DROPPED], "ranks": 2, "strategy": "zero2", "micro": 1},
}


@pytest.mark.parametrize("case", AFTER_A_BACKWARD.values(), ids=AFTER_A_BACKWARD)
def test_different_collective_during_shared_memory_agreement_raises(case):
    """Both collectives have the same number. No rank seems to miss a message, so only a comparison detects this."""
    case = {"ranks": 3, "strategy": "zero3", "micro": 3, "no_sync": False, **case}
    step = {"do": "step", "micro": case["micro"], "no_sync": case["no_sync"]}
    model = {"kind": "sequence", "children": [*case["nodes"], {"kind": "linear"}]}
    program = {"ranks": case["ranks"], "width": 16, "strategy": case["strategy"], "model": model, "loop": [step] * 3}
    with Pool(timeout=15) as pool:
        verdict = pool.judge({**program, "optimizer": {"name": "SGD", "lr": 0.1}})
    assert verdict.kind == REFUSED, verdict.details
    assert "started agreement on shared memory after a backward; rank" in verdict.details


def ask_early() -> None:
    watchdog._EARLY_S, watchdog._LOOK_S = 0.6, 0.2


SKIPPED = {"kind": "dropped", "children": [{"kind": "linear"}], "every": 3, "by rank": True}
NORM = {"kind": "dropped", "children": [{"kind": "batch norm", "unit": {}}], "every": 3, "by rank": True, "unit": {}}
FROZEN = {"kind": "own", "children": [NORM], "unit": {}, "as one": True, "frozen": True}
TIED = [{"kind": "linear", "label": "4"}, {"kind": "linear"}, {"kind": "tied", "to": "4", "unit": {}, "as one": True}]


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", [True, False])
def test_ranks_skipping_modules_raise_with_several_process_groups(shares_memory):
    """One process group detects the difference while other groups wait for its ranks, or no group detects it."""
    common = {"ranks": 4, "no shared memory": not shares_memory, "optimizer": {"name": "SGD", "lr": 0.1}}
    common["loop"] = [{"do": "step"}, {"do": "step", "micro": 2}]
    with Pool(before=ask_early) as pool:
        for children, strategy in (
            ([{"kind": "linear", "unit": {}}, SKIPPED, {"kind": "linear"}], {"strategy": "hsdp", "replicas": 2}),
            ([{**SKIPPED, "unit": {}}, {"kind": "linear"}], {"strategy": "hfsdp"}),
            ([FROZEN, *TIED], {"strategy": "hpz"}),
        ):
            program = {**common, **strategy, "model": {"kind": "sequence", "children": children}}
            verdict = pool.judge(program)
            assert verdict.kind == REFUSED, verdict.details
            assert verdict.cause.startswith("RankMismatchError")


def scale_gradients() -> None:
    whole_sum = pairwise.sum_in_rank_order

    def scaled(out, terms, divisor):
        whole_sum(out, terms, divisor * 1.01)

    patch.object(shared_memory, "sum_in_rank_order", scaled).start()


def leave_a_rank_out() -> None:
    whole_sum = pairwise.sum_in_rank_order

    def partial_sum(out, terms, divisor):
        whole_sum(out, terms[:1], divisor)

    patch.object(shared_memory, "sum_in_rank_order", partial_sum).start()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [leave_a_rank_out, pytest.param(scale_gradients, marks=pytest.mark.slow)])
def test_fuzzer_finds_and_shrinks_planted_fault(fault):
    with Pool(before=fault) as pool:
        programs = (Generator(f"planted:{i}", (2,)).program() for i in range(20))
        found = next(program for program in programs if pool.judge(program).kind == WRONG)
        shrunk = shrink(found, lambda smaller: pool.judge(smaller).kind == WRONG, 60)
        verdict = pool.judge(shrunk)
    assert verdict.kind == WRONG
    assert len(shrunk["loop"]) == 1
    assert len(str(shrunk)) < 200


def test_shrink_terminates_with_empty_program():
    program = Generator("any", (4,)).program()

    assert shrink(program, lambda smaller: True) == {}


@pytest.mark.slow
def test_generated_script_runs_standalone(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(script_of({"loop": [{"do": "step"}]}))
    env = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }
    ran = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "the same bits" in ran.stdout
