"""`run_ranks` and `assert_same`, which all other multi-rank tests use."""

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import covering_pairs
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from fullshard.device.current import count_devices
from fullshard.errors import ConfigError, LayoutError
from fullshard.testing import RanksFailed, assert_same, ranks, run_ranks


def own_rank() -> int:
    return dist.get_rank()


def summed(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor.mul_(dist.get_rank() + 1))
    return tensor


def surroundings() -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FULLSHARD_TEST_MARK")
    return {
        "environ": {name: os.environ.get(name) for name in names},
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "pid": os.getpid(),
    }


def leave_a_trace() -> bool:
    """Return True if an earlier call in this process left a mark."""
    visited = hasattr(torch, "mark_of_an_earlier_test")
    torch.mark_of_an_earlier_test = True  # type: ignore[attr-defined]
    return visited


def tied_views() -> dict[str, Tensor]:
    base = torch.arange(6.0)
    return {"whole": base, "view": base[2:4], "half": base.bfloat16(), "empty": base[:0]}


def raise_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise LayoutError(f"rank {dist.get_rank()} does not like its rows")
    dist.barrier()


def return_on_rank_0_and_hang_on_others() -> None:
    if dist.get_rank() != 0:
        wait_for_a_message_without_sender()


def wait_for_a_message_without_sender() -> None:
    dist.recv(torch.empty(1), src=0)


def die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "os._exit":
            os._exit(3)
        sys.exit(3)
    dist.barrier()


def warn() -> None:
    warnings.warn("old habit", DeprecationWarning, stacklevel=1)


def run_layer(layer: nn.Module, batch: Tensor) -> Tensor:
    return layer(batch)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_run_ranks_returns_results_in_rank_order(world):
    assert run_ranks(world, own_rank) == list(range(world))


@pytest.mark.parametrize("world", [1, 3])
def test_run_ranks_passes_tensors_by_value_and_supports_collectives(world):
    local = torch.ones(5)
    for received in run_ranks(world, summed, local):
        assert_same(received, torch.full((5,), world * (world + 1) / 2))
    assert_same(local, torch.ones(5))  # the ranks worked on copies


def test_run_ranks_passes_modules():
    layer, batch = nn.Linear(3, 2), torch.randn(4, 3)
    (out,) = run_ranks(1, run_layer, layer, batch)
    torch.testing.assert_close(out, layer(batch))


def test_run_ranks_preserves_shared_storages_dtypes_and_empty_tensors():
    (returned,) = run_ranks(1, tied_views)
    assert_same(returned, tied_views())
    returned["whole"][2] = 9.0
    assert returned["view"][0] == 9.0


def test_ranks_see_torchrun_variables_and_the_callers_environment(monkeypatch):
    run_ranks(1, own_rank)  # starts the fork server, with the current environment
    monkeypatch.setenv("FULLSHARD_TEST_MARK", "later")
    visited = run_ranks(2, surroundings)
    for rank, one in enumerate(visited):
        assert list(one["environ"].values()) == [str(rank), "2", str(rank), "2", "later"]
        assert (one["threads"], one["backend"]) == (1, "gloo")
    assert len({os.getpid(), *(one["pid"] for one in visited)}) == 3


def test_run_ranks_leaks_no_state_between_calls():
    assert run_ranks(2, leave_a_trace) == [False, False]
    assert run_ranks(2, leave_a_trace) == [False, False]
    assert not dist.is_initialized()


@pytest.mark.parametrize("failing", [[0], [2], [0, 1, 2]])
def test_run_ranks_reports_failed_ranks_and_stops_running_ranks(failing):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, raise_on, failing)
    assert time.monotonic() - start < 10.0
    assert sorted(caught.value.failures) == failing
    assert sorted([*failing, *caught.value.running]) == [0, 1, 2]
    for rank in failing:
        assert f"rank {rank} does not like its rows" in str(caught.value)
        failure = caught.value.failures[rank]
        assert failure.kind == "fullshard.errors.LayoutError"
        assert "in raise_on" in failure.traceback and ranks.__file__ not in failure.traceback


@pytest.mark.slow
def test_run_ranks_timeout_reports_running_ranks_and_their_frames():
    with pytest.raises(RanksFailed, match=r"ranks 1, 2 of 3 did not end within 2 s") as caught:
        run_ranks(3, return_on_rank_0_and_hang_on_others, timeout=2.0)
    assert caught.value.running == [1, 2]
    assert str(caught.value).count("in wait_for_a_message_without_sender") == 2


@pytest.mark.parametrize(
    ("how", "stated"),
    [("signal", "killed by SIGKILL"), ("os._exit", "ended with exit code 3"), ("sys.exit", "SystemExit: 3")],
)
def test_run_ranks_does_not_wait_for_a_dead_rank(how, stated):
    with pytest.raises(RanksFailed, match=stated) as caught:
        run_ranks(2, die, how)
    assert next(iter(caught.value.failures)) == 1  # the cause comes first; rank 0 may fail later


def test_run_ranks_applies_warning_filters_of_the_caller():
    with pytest.raises(RanksFailed, match="DeprecationWarning: old habit"):
        run_ranks(1, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert run_ranks(1, warn) == [None]


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        ((0, own_rank), "world=0"),
        ((own_rank, 2), r"world=<function own_rank .*run_ranks\(2, function\)"),
        ((1, 3), "function=3 cannot be called"),
        ((2, lambda: 1), "top level"),
        ((2, run_layer, lambda: 1, 2), "top level"),
    ],
)
def test_run_ranks_rejects_invalid_arguments(arguments, stated):
    with pytest.raises(ConfigError, match=stated):
        run_ranks(*arguments)


@pytest.mark.parametrize(
    ("backend", "stated"),
    [
        ("glo", "backend='glo' names 'glo', which is unknown. Pass one of gloo, fake"),
        ("cpu:glo", "names 'glo', which is unknown"),
        ("", "names '', which is unknown"),
        (3, "backend=3 is a int. Pass the name of a backend, such as 'gloo'"),
    ],
)
def test_run_ranks_rejects_unknown_backend(backend, stated):
    with pytest.raises(ConfigError, match=stated):
        run_ranks(1, own_rank, backend=backend)


@pytest.mark.skipif(count_devices() > 0, reason="this machine has devices")
def test_run_ranks_rejects_backend_without_its_device():
    with pytest.raises(ConfigError, match=r"'nccl', but this machine has no device for it\. Pass one of gloo, fake"):
        run_ranks(1, own_rank, backend="cpu:gloo,cuda:nccl")


def test_run_ranks_accepts_backend_per_device_type():
    assert run_ranks(2, own_rank, backend="cpu:gloo") == [0, 1]


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, 1e30, "1"])
def test_run_ranks_rejects_invalid_timeout(timeout):
    with pytest.raises(ConfigError, match=f"timeout={timeout!r}, but it must be".replace("+", "[+]")):
        run_ranks(1, own_rank, timeout=timeout)


# --------------------------------------------------------------------------------------------------- assert_same


class Pair(NamedTuple):
    left: object
    right: object


tensors = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.floats(allow_nan=True, width=32), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool]),
)
leaves = tensors | st.integers() | st.text(max_size=3) | st.none() | st.floats(allow_nan=True)
nests = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


@given(nests)
@settings(deadline=None, max_examples=50)
def test_assert_same_accepts_copies(value):
    assert_same(copied(value), value)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.data())
@settings(deadline=None)
def test_assert_same_finds_one_flipped_bit(values, data):
    expected = torch.tensor(values)
    actual = expected.clone()
    place = data.draw(st.integers(0, len(values) - 1))
    actual.view(torch.int32)[place] ^= 1 << data.draw(st.integers(0, 30))
    with pytest.raises(AssertionError, match=rf"1 of {len(values)} elements differ.*at \({place},\)"):
        assert_same(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected", "stated"),
    [
        ({"a": {"b": torch.zeros(2)}}, {"a": {"b": torch.tensor([0.0, 0.5])}}, r"\['a'\]\['b'\]: 1 of 2.*at most 0.5"),
        ([torch.zeros(2, 2)], [torch.tensor([[0.0, 0.0], [3.0, 1.0]])], r"\[0\]: 2 of 4.*at most 3 \(at \(1, 0\)"),
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            r"1 of 1 elements differ, by at most 0 \(at \(0,\): 0.0 instead of -0.0",
        ),
        (torch.tensor(1.0), torch.tensor(2.0), r"at \(\)"),
        (torch.zeros(2), torch.zeros(3), r"float32 of \(2,\) instead of torch.float32 of \(3,\)"),
        (torch.zeros(2), torch.zeros(2).double(), "float32 of"),
        ([1, 2], [1], "2 items instead of 1"),
        ([1], (1,), "list instead of a tuple"),
        ({"a": 1}, {"b": 1}, r"missing keys \['b'\], unexpected keys \['a'\]"),
        ({"a": 1.0}, {"a": torch.ones(1)}, "float instead of a tensor"),
        (Pair(1, [2]), Pair(1, [3]), r"\[1\]\[0\]: 2 instead of 3"),
        (None, {}, "NoneType instead of a mapping"),
    ],
)
def test_assert_same_reports_first_difference(actual, expected, stated):
    with pytest.raises(AssertionError, match=stated):
        assert_same(actual, expected)


def test_assert_same_ignores_memory_layout_and_requires_grad():
    expected = torch.arange(6.0).reshape(2, 3)
    assert_same(expected.t().contiguous().t().requires_grad_(), expected)
    assert_same(nn.Parameter(expected), expected)


def test_assert_same_ignores_strides_of_size_one_dims_and_lazy_conj():
    numbers = torch.randn(5, 3)
    column = torch.as_strided(numbers, (5, 1), (3, 7))
    spin = torch.randn(3, dtype=torch.complex64)

    assert_same(column[:1], numbers[:1, :1].clone())
    assert_same(torch.as_strided(numbers, (3, 1), (1, 7)), numbers[0, :, None].clone())
    assert_same([spin.conj(), spin.conj().imag], [spin.conj().resolve_conj(), -spin.imag])
    with pytest.raises(AssertionError, match="3 of 3 elements differ"):
        assert_same(spin.conj(), spin)


@given(lengths=st.lists(st.integers(1, 4), min_size=2, max_size=4), divisor=st.integers(2, 4))
def test_covering_pairs_contains_every_allowed_pair_of_values(lengths, divisor):
    axes = [range(length) for length in lengths]
    existing = [values for values in product(*axes) if sum(values) % divisor]
    chosen = covering_pairs(*axes, allows=lambda *values: values in existing)
    assert set(chosen) <= set(existing)
    assert pairs_in(chosen) == pairs_in(existing)


def pairs_in(chosen: Iterable[tuple[int, ...]]) -> set[Any]:
    return {pair for values in chosen for pair in combinations(enumerate(values), 2)}


def test_covering_pairs_returns_few_combinations():
    assert len(covering_pairs(range(4), range(3), range(4), range(3))) <= 20  # of 144; the minimum is 16


def compare_cut(rows: int, place: int) -> str:
    """Return the message about two tensors sharded over all ranks that differ in row `place`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = torch.arange(3.0 * rows).reshape(rows, 3)
    changed = expected.clone()
    changed[place, 2] = -1.0
    own, same, peer = (distribute_tensor(item, mesh, [Shard(0)]) for item in (changed, expected, expected))
    assert_same(same, peer)
    assert_same(same, expected)
    try:
        assert_same(own, peer)
    except AssertionError as difference:
        return str(difference)
    return "no difference"


@pytest.mark.parametrize("place", [0, 4])
def test_assert_same_reports_same_difference_of_dtensors_on_every_rank(place):
    reported = run_ranks(3, compare_cut, 5, place)  # ranks have different numbers of rows
    assert len(set(reported)) == 1
    assert f"1 of 15 elements differ, by at most {3 * place + 3:.3g} (at ({place}, 2): -1.0 instead of" in reported[0]
