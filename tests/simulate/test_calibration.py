"""`fullshard calibrate`: the description of this machine loads, and predicts the time of a tape. No test here
depends on the speed of the machine or on its load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import ConfigError, dry, fully_shard
from fullshard.cli import main
from fullshard.plan import calibration
from fullshard.plan.calibration import calibrate, write_description
from fullshard.plan.costs import costs_of
from fullshard.plan.cpu_costs import CoreTime, _Cache, _rate, core_seconds, step_seconds
from fullshard.plan.gpu_speeds import large_rate
from fullshard.plan.hardware import Hardware, described, hardware, here_path
from fullshard.plan.operations import counted
from fullshard.plan.timeline import lay_out
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Allocation, Free, Operation

MIB = 2**20


@pytest.fixture(scope="module")
def stated() -> dict[str, Any]:
    """Return quick measurements, just enough for a description."""
    return calibrate("cpu", seconds=0.1)


@pytest.fixture(scope="module")
def here(stated: dict[str, Any]) -> Hardware:
    return described(stated)


@pytest.fixture
def empty_config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_written_description_is_read_back_equal(stated, empty_config_folder):
    write_description(stated, here_path())
    assert here_path() == empty_config_folder / "fullshard" / "here.toml"
    assert hardware("here") == hardware(str(here_path())) == described(stated)


def test_description_contains_plausible_measurements(stated, here):
    assert here.kind == "cpu" and here.name == "here" and here.ranks_per_host >= 1
    assert 1e8 < here.flops_per_s["float32"] < 1e14
    assert 1e8 < here.memory_bytes_per_s < 1e13
    assert 0 < here.fitted.matmul_share <= 1
    assert 1e-7 < here.fitted.host_s < 1e-2
    assert 0 < here.link.bytes_per_s < 1e13 and here.base_s >= 0
    numbers = [leaf for leaf in leaves(stated["measured"]) if not isinstance(leaf, str)]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    else:
        yield tree


def test_short_calibration_measures_fewer_sizes(stated):
    assert len(stated["measured"]["dims"]) < 5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "here.json"], "Use here.toml"),
        (["--out", "."], "Use here.toml"),
        (["--out", "/proc/none/here.toml"], "cannot be written"),
        (["--device", "tpu"], "Expected cpu or cuda"),
        (["--seconds", "0"], "Pass 30"),
        (["--secs", "1"], "Did you mean seconds"),
    ],
)
def test_invalid_calibrate_arguments_print_a_one_line_error(argv, words, empty_config_folder, capsys):
    assert main(["calibrate", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_calibrate_command_writes_and_prints_a_description(stated, empty_config_folder, monkeypatch, capsys):
    monkeypatch.setattr("fullshard.cli.calibrate.calibrate", lambda *_, **__: stated)
    assert main(["calibrate"]) == 0
    shown = capsys.readouterr().out
    assert "matrix products, float32" in shown and str(here_path()) in shown.replace("\n", "")
    assert hardware("here").title == stated["title"]


def test_calibrate_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--help"])
    assert ended.value.code == 0
    assert "--like" in capsys.readouterr().out


# -- seconds of a tape ------------------------------------------------------------------------------------------------


def test_measured_matmul_rates_are_exact_and_others_interpolated():
    dims = (16, 64, 256)
    seconds = [[[2 * m * k * n / (1e9 + 1e6 * m + 1e5 * k + n) for n in dims] for k in dims] for m in dims]
    for sizes in itertools.product(dims, repeat=3):
        assert _rate(seconds, dims, sizes) == pytest.approx(1e9 + 1e6 * sizes[0] + 1e5 * sizes[1] + sizes[2])
    assert (
        _rate(seconds, dims, (64, 16, 16)) < _rate(seconds, dims, (100, 16, 16)) < _rate(seconds, dims, (256, 16, 16))
    )
    assert _rate(seconds, dims, (1e6, 256, 256)) == _rate(seconds, dims, (256, 256, 256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_sizes_and_dtype_are_inferred_from_its_bytes(here, dtype):
    """A tape has no shapes. The inferred sizes and dtype select the rate of the actual product."""
    tables = {}
    for name, fast in (("float32", 1e9), ("bfloat16", 3e9)):
        tables[name] = [[[2 * m * k * n / (fast + 1e6 * k) for n in (16, 64)] for k in (16, 64)] for m in (16, 64)]
    table = {**here.measured, "products": tables, "dims": [16, 64]}
    time = CoreTime(described({**vars_of(here), "measured": table}), ranks=1, dtype="float32")
    (product,) = counted(lambda: torch.mm(torch.ones(16, 64, dtype=dtype), torch.ones(64, 32, dtype=dtype)))[2:]
    seconds = time._product_s(product)
    assert seconds == pytest.approx(product.flops / ((1e9 if dtype is torch.float32 else 3e9) + 64e6), rel=1e-3)


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (64, 16)])
def test_matmul_is_not_confused_with_its_transpose(here, rows, columns):
    table = [[[1.0 + m / n for n in (16, 64)] for _ in (16, 64)] for m in (16, 64)]
    speeds = {**here.measured, "products": {"float32": table}, "dims": [16, 64]}
    time = CoreTime(described({**vars_of(here), "measured": speeds}), ranks=1, dtype="float32")
    bias, left, right = torch.ones(columns), torch.ones(rows, 64), torch.ones(64, columns)
    for call in (lambda: torch.mm(left, right), lambda: torch.addmm(bias, left, right)):
        (product,) = counted(call)
        assert time._product_s(product) == pytest.approx(1.0 + rows / columns)


def vars_of(machine: Hardware) -> dict[str, Any]:
    parts = {name: vars(getattr(machine, name)) for name in ("link", "network", "fitted")}
    return {**vars(machine), **parts}


def test_cache_model_keeps_the_most_recently_used_data():
    cache = _Cache(10 * MIB)
    one, other, large = (Access(number, 0, size * MIB) for number, size in enumerate((4, 4, 8)))
    assert cache.miss(one) == 4 * MIB and cache.miss(one) == 0
    assert cache.miss(other) == 4 * MIB and cache.miss(one) == 0
    assert cache.miss(large) == 8 * MIB
    assert cache.miss(one) == 4 * MIB


@pytest.mark.parametrize("threshold", [None, "65536"])
def test_page_faults_cost_time_only_for_newly_mapped_memory(here, monkeypatch, threshold):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if threshold is not None:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    time, origin = CoreTime(here, ranks=1, dtype="float32"), dry.Tape().origin
    for mib in (16, 12, 8):
        for entry in (Allocation(1, mib * MIB, "compute", origin), Free(1, mib * MIB, "compute", origin)):
            time.note(entry)
    new = (16 if threshold is None else 36) * MIB  # memory of the heap is reused
    assert time.spent["pages"] == pytest.approx(new * here.measured["page_s"], rel=0.01)


def test_costs_of_unmeasured_dtype_raise(here):
    with pytest.raises(
        ConfigError, match=r"has no rate for matrix products in float64, .* Known dtypes: float32, bfloat16"
    ):
        costs_of(here, dtype="float64")


def test_first_write_to_new_pages_reads_no_memory(here):
    """The system has just cleared the pages. The second write is like any other."""
    time, origin = CoreTime(here, ranks=1, dtype="float32"), dry.Tape().origin
    large = MIB + here.measured["cache_bytes"]
    for number in (0, 1):
        time.note(Allocation(number, large, "compute", origin))
    behind = [time._written_behind(Access(number, 0, large)) for number in (0, 1, 0)]
    assert behind == [0, 0, large]


def chain(layers: int) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def seconds_of(layers: int, here: Hardware, ranks: int) -> float:
    tape = dry.run(lambda: chain(layers), lambda: torch.randn(4, 64), world=ranks, streams="cpu")
    return step_seconds(tape.entries, here, ranks=ranks, dtype="float32")


def test_more_layers_take_longer(here):
    assert seconds_of(4, here, 2) > seconds_of(2, here, 2) > 0


def test_step_time_scales_with_ranks_per_core(here):
    tape = dry.run(lambda: chain(2), lambda: torch.randn(4, 64), world=4, streams="cpu")
    about: dict[str, Any] = {"ranks": 4, "dtype": "float32"}
    alone = sum(core_seconds(tape.entries, here, **about).values())
    for cores, turns in ((1, 4.0), (2, 2.0), (4, 1.0), (8, 1.0)):
        taken = step_seconds(tape.entries, here.with_hosts_of(cores), **about)
        assert taken == pytest.approx(turns * alone)


def test_timeline_end_matches_the_busy_time_of_shared_cores(here):
    tape = dry.run(lambda: chain(2), lambda: torch.randn(4, 64), world=4, streams="cpu")
    parts = core_seconds(tape.entries, here, ranks=4, dtype="float32")
    costs = costs_of(here.with_hosts_of(2), dtype="float32", ranks=4)
    assert lay_out(tape.entries, costs).end == pytest.approx(2 * sum(parts.values()))


def test_unmeasured_operations_are_costed_by_their_bytes(here):
    time = CoreTime(here, ranks=1, dtype="float32")
    origin = Origin("", Phase.FORWARD)
    nbytes = (Access(0, 0, MIB),)
    for name in ("aten.add", "aten.of_somebody_else"):
        time.note(Operation(name, "compute", origin, nbytes, nbytes))
    sizes = time._kernels["float32"]["aten.add"]
    unknown, known = (
        time._work_s(Operation(name, "compute", origin, nbytes, nbytes), "aten.add", sizes) for name in "ab"
    )
    assert unknown == known > 0


def test_link_is_derived_from_smallest_and_largest_all_gather():
    sizes = [{"nbytes": 1024, "gather_s": 17e-6}, {"nbytes": 4e8, "gather_s": 1e-3 + 17e-6}]
    link = calibration._link(sizes, ranks=4, base_s=8e-6)
    assert link["step_s"] == pytest.approx(3e-6) and link["bytes_per_s"] == pytest.approx(3e11)


# -- GPUs -------------------------------------------------------------------------------------------------------------


def test_large_matmul_rate_is_the_median_over_large_sizes():
    rates = [(8192, 5.0), (4096, 3.0), (4096, 4.0), (64, 1.0)]
    assert large_rate([{"rows": n, "inner": n, "columns": n, "flops_per_s": rate} for n, rate in rates]) == 4.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_calibration_is_plausible():
    found = described(calibrate("cuda"))
    assert found.kind == "gpu"
    assert 0.2 < found.fitted.matmul_share < 1 and 0.4 < found.fitted.memory_share <= 1
    assert 1e-7 < found.measured["launch_s"] < found.fitted.host_s < 1e-3
