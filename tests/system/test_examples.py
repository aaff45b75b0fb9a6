"""Every example prints the documented results, without warnings, and exits cleanly."""

import contextlib
import gzip
import io
import os
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets  # the server that forks ranks imports the modules of this file
import torch.distributed as dist

from fullshard.cli import main
from fullshard.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
# Warnings are errors in workers as well. OMP_NUM_THREADS is set because torchrun warns otherwise.
TORCHRUN_ENV = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}


def run_here(name: str, *options: str) -> str:
    """Return the output of a rank. Its process group exists already, and the example destroys it."""
    sys.argv = [name, *options]
    dist.init_process_group = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not dist.is_initialized()
    return printed.getvalue()


def printed_by(world: int, name: str, *options: str) -> str:
    """Return the output of the example on `world` ranks. Only rank 0 may print."""
    first, *others = run_ranks(world, run_here, name, *options)
    assert set(others) <= {""}
    return first


def losses(line: str) -> tuple[float, float]:
    """Return the first and the last of `... loss 5.43 -> 2.10`."""
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", line).groups()
    return float(first), float(last)


def assert_learns(line: str) -> None:
    first, last = losses(line)
    assert last < 0.6 * first


def test_each_of_eight_examples_states_its_command():
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert [name[0] for name in names] == list("12345678")
    for name in names:
        command = rf"(torchrun --nproc-per-node \d|fullshard parity --model) examples/{name}"
        assert re.search(command, (EXAMPLES / name).read_text())


@pytest.mark.slow
def test_eight_lines_example_trains_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, EXAMPLES / "1_eight_lines.py"], env=TORCHRUN_ENV, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    learned, placed, kept = done.stdout.splitlines()
    assert_learns(learned)
    assert "shape (1024, 256), placed (Shard(dim=0),) over 2 ranks" in placed
    assert "keeps (512, 256)" in kept


def test_eight_lines_example_numbers_its_lines():
    lines = [line for line in (EXAMPLES / "1_eight_lines.py").read_text().splitlines() if re.search(r"# \d", line)]
    assert sorted(re.search(r"# (\d)", line)[1] for line in lines) == list("12345678")


@pytest.mark.slow
def test_wrapper_example_prints_units_and_dtypes():
    *structure, units, dtypes, learned = printed_by(2, "2_wrapper.py").splitlines()
    assert sum("FullyShardedDataParallel" in line for line in structure) == 2  # the root, and "(0-2): 3 x ..."
    assert units == "units: 4"
    assert dtypes == "stored torch.float32, computed torch.bfloat16"
    assert_learns(learned)


@pytest.mark.parametrize("world", [1, 2])
def test_wrap_by_hand_example_matches_plain_training(world):
    *structure, plain, sharded = printed_by(world, "3_wrap_by_hand.py").splitlines()
    assert sum("FullyShardedDataParallel" in line for line in structure) == 3
    assert_learns(sharded)
    assert losses(sharded) == pytest.approx(losses(plain), abs=2e-4)


def accuracies(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^(.+): test accuracy (.+)$", printed, re.MULTILINE))


@pytest.mark.slow
def test_digits_example_has_same_accuracy_for_ddp_and_units():
    printed = printed_by(2, "4_digits.py", "--epochs", "3")
    by_way = accuracies(printed)
    assert list(by_way) == ["DDP", "one unit", "units by size"]
    assert len(set(by_way.values())) == 1
    assert float(by_way["DDP"].rstrip("%")) > 85
    one_unit, by_size = printed.split("units by size")
    assert one_unit.count("FullyShardedDataParallel(") == 1
    assert by_size.count("FullyShardedDataParallel(") == 3


@pytest.mark.slow
def test_digits_example_reads_idx_files(tmp_path):
    data = sklearn.datasets.load_digits()
    for split, chosen in (("train", slice(0, 320)), ("t10k", slice(320, 480))):
        images = (data.images[chosen] * 255 / 16).astype(np.uint8)
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", images)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte.gz", data.target[chosen].astype(np.uint8))
    by_way = accuracies(printed_by(2, "4_digits.py", "--data", str(tmp_path), "--epochs", "2"))
    assert len(by_way) == 3
    assert len(set(by_way.values())) == 1


def write_idx(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_digits_example_names_missing_file(tmp_path):
    mnist = runpy.run_path(str(EXAMPLES / "4_digits.py"))["mnist"]
    with pytest.raises(SystemExit, match=r"neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz"):
        mnist(tmp_path)


@pytest.mark.slow
def test_hybrid_example_prints_ranks_and_collectives():
    ranks, placed, gathers, scatters, reductions, learned = printed_by(4, "5_hybrid.py").splitlines()
    assert ranks == "shards within ranks [0, 1], replicas on ranks [0, 2]"
    assert placed.endswith("(Replicate(), Shard(dim=0))")
    # Four units; the root stays unsharded from forward to backward; two microbatches.
    assert gathers.startswith("all_gather: 14 a step")
    assert scatters.startswith("reduce_scatter: 8 a step")
    assert reductions.startswith("all_reduce: 4 a step")
    assert_learns(learned)


@pytest.mark.slow
def test_meta_device_example_trains_and_loads_model():
    on_meta, learned, loaded = printed_by(2, "6_meta_device.py").splitlines()
    assert on_meta == "on the meta device when sharded: True"
    assert_learns(learned)
    before, after = re.search(r"loss ([\d.]+), and ([\d.]+) with", loaded).groups()
    assert before == after


@pytest.mark.slow
def test_long_context_example_matches_single_process_losses():
    """Attention sees whole sequences: ranks exchange sequence parts and heads, and nothing else changes."""
    whole, *_, alone = printed_by(1, "8_long_context.py").splitlines()
    parts, placed, learned = printed_by(4, "8_long_context.py").splitlines()
    assert whole == "each rank has 32 of 32 positions, of 32 of 32 sequences"
    assert parts == "each rank has 16 of 32 positions, of 16 of 32 sequences"
    assert placed.endswith("(Shard(dim=0),) over 4 ranks")
    assert_learns(learned)
    assert losses(learned) == pytest.approx(losses(alone), rel=2e-4)


def parity(*options: str) -> int:
    functions = [f"--{name}={EXAMPLES / '7_parity.py'}:make_{name}" for name in ("model", "batch")]
    return main(["parity", *functions, "--ranks=2", "--strategies=zero3", *options])


@pytest.mark.slow
def test_parity_example_agrees_bitwise(capsys):
    assert parity("--wrap=Block") == 0
    assert capsys.readouterr().out.endswith("All 1 agree with the plain process bit for bit.\n")


@pytest.mark.slow
def test_parity_example_detects_careless_model(capsys):
    assert parity(f"--model={EXAMPLES / '7_parity.py'}:make_careless_model") == 1
    assert "zero3, 2 ranks: differs: gradient of embedding.weight, step 1, rank 0" in capsys.readouterr().out


@pytest.mark.slow
def test_parity_example_runs_as_script():
    command = [sys.executable, EXAMPLES / "7_parity.py"]
    done = subprocess.run(command, env=TORCHRUN_ENV, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("All 1 agree with the plain process bit for bit.\n")
