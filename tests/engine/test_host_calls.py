"""Host function calls that sharding adds to a step, counted by `benchmarks/host_overhead.py`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from shared_ranks import in_fake_world, on_ranks
from torch.distributed.device_mesh import init_device_mesh

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "host_overhead.py"
UNITS, WORLD, MORE = 20, 8, 12
UNSHARDED = "unsharded"
DTENSOR_DISPATCH = ("OpDispatcher", "find_torch_dispatch_rule")
CEILINGS = {"fullshard": (300, 250), "fullshard on streams": (400, 350)}
"""Calls of Python functions and of functions in C, per unit of 12 parameters and microbatch."""
REST = {"clip_grad_norm_": (30, 180), "optimizer.step": (45, 90)}
"""Those that sharding adds to other parts of a step, per unit."""
PER_PARAMETER = 3


@on_ranks(1)
def test_sharding_adds_few_host_calls_per_step():
    spec = spec_from_file_location("host_overhead", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = sys.modules[spec.name] = module_from_spec(spec)  # its dataclasses look it up there
    spec.loader.exec_module(benchmark)
    in_fake_world(WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    found = {}
    for system in (UNSHARDED, *CEILINGS):
        for more in (0, MORE):
            calls = benchmark.count_calls(system, mesh, UNITS, more)
            found[system, more] = {part: of_part.per(UNITS) for part, of_part in calls.items()}
    for system, units in (("fullshard", UNITS), ("FSDP2", 2)):
        calls = benchmark.count_calls(system, mesh, units)
        found[system, -1] = {
            part: sum(
                number for code, number in of_part.python.items() if code.co_qualname.startswith(DTENSOR_DISPATCH)
            )
            for part, of_part in calls.items()
        }
    passes = "forward and backward"
    plain, plain_more = found[UNSHARDED, 0][passes], found[UNSHARDED, MORE][passes]
    for system, (python, c) in CEILINGS.items():
        calls, with_more = found[system, 0][passes], found[system, MORE][passes]
        added, added_with_more = calls[0] - plain[0], with_more[0] - plain_more[0]
        assert added <= python, f"{system} adds {added} Python calls to a unit"
        assert calls[1] - plain[1] <= c, f"{system} adds {calls[1] - plain[1]} C calls to a unit"
        assert (added_with_more - added) / MORE <= PER_PARAMETER, system
    for part, (python, c) in REST.items():
        calls, plain_calls = found["fullshard", 0][part], found[UNSHARDED, 0][part]
        assert calls[0] - plain_calls[0] <= python, f"{part} makes {calls[0]} Python calls for a unit"
        assert calls[1] - plain_calls[1] <= c, f"{part} makes {calls[1]} C calls for a unit"
    assert found["FSDP2", -1]["optimizer.step"] > 0, "calls of DTensor's dispatcher have other names now"
    assert not any(found["fullshard", -1].values()), "an operation on a DTensor was dispatched in Python"
