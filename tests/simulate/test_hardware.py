"""Descriptions of machines: shipped ones are complete and plausible, and errors in a description say what to do."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fullshard.errors import ConfigError
from fullshard.plan.costs import costs_of
from fullshard.plan.hardware import Hardware, described, hardware, known_hardware
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Collective, Operation

GPUS = ("v100-32", "a100-40", "a100-80", "h100-80", "h100hbm2e-96", "h200", "b200", "gb200", "mi300x")


def written(path, text):
    path.write_text(text)
    return str(path)


def test_common_accelerators_are_known():
    assert set(GPUS) <= set(known_hardware())


@pytest.mark.parametrize("name", GPUS)
def test_shipped_description_has_title_and_sources(name):
    machine = hardware(name)
    assert (machine.name, machine.kind) == (name, "gpu")
    assert machine.title
    assert any("data sheet" in source for source in machine.sources)
    assert any("fitted" in source for source in machine.sources)
    assert machine.multiprocessors > machine.collective_multiprocessors >= 0
    assert machine.attention is not None


@pytest.mark.parametrize("name", GPUS)
def test_shipped_figures_are_plausible(name):
    machine = hardware(name)
    assert 2e10 < machine.memory_bytes < 1e12
    assert machine.flops_per_s["float32"] <= machine.flops_per_s["bfloat16"] <= machine.flops_per_s["float16"]
    assert machine.flops_per_s["float16"] <= machine.flops_per_s.get("float8", float("inf"))
    assert machine.memory_bytes_per_s > machine.link.bytes_per_s > machine.network.bytes_per_s
    assert machine.link.step_s < machine.network.step_s < 1e-3
    assert machine.memory_bytes_per_s * machine.ranks_per_host > machine.host_memory_bytes_per_s > 1e10
    assert any("host_memory_bytes_per_s" in source for source in machine.sources) or name == "h200"
    for share in (machine.fitted.matmul_share, machine.fitted.memory_share):
        assert 0 < share < 1
    assert 0 < machine.attention.backward <= machine.attention.forward < 1


def test_newer_accelerators_are_faster():
    chips = [hardware(name) for name in ("v100-32", "a100-80", "h100-80", "b200")]
    for older, newer in pairwise(chips):
        assert newer.flops_per_s["float16"] > older.flops_per_s["float16"]
        assert newer.memory_bytes_per_s > older.memory_bytes_per_s
        assert newer.link.bytes_per_s > older.link.bytes_per_s


def test_description_inherits_missing_fields_from_like(tmp_path):
    own = hardware(
        written(
            tmp_path / "ours.toml", 'like = "h100-80"\nname = "ours"\nranks_per_host = 4\n[network]\nbytes_per_s = 25e9'
        )
    )
    base = hardware("h100-80")
    assert (own.name, own.ranks_per_host, own.network.bytes_per_s) == ("ours", 4, 25e9)
    assert own.network.step_s == base.network.step_s  # also within a table
    assert (own.link, own.fitted, own.attention) == (base.link, base.fitted, base.attention)


def test_like_accepts_a_description_file(tmp_path):
    first = written(tmp_path / "first.toml", 'like = "a100-80"\nname = "first"\nhost_memory_bytes = 1e12')
    second = hardware(written(tmp_path / "second.toml", f'like = "{first}"\nname = "second"'))
    assert (second.name, second.host_memory_bytes) == ("second", 1e12)


def test_with_hosts_of_changes_only_ranks_per_host():
    machine = hardware("h100-80").with_hosts_of(4)
    assert isinstance(machine, Hardware)
    assert (machine.ranks_per_host, machine.link) == (4, hardware("h100-80").link)


def test_unknown_hardware_name_raises_with_the_known_names():
    with pytest.raises(ConfigError, match=r"h100: is neither known hardware.*a100-80.*h100-80.*`here`.*TOML file"):
        hardware("h100")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ('name = "ours"', r"lacks kind.*link.*like = "),
        ('like = "h100-80"\nflops = 1', r"flops: unknown"),
        ('like = "h100-80"\n[link]\nspeed = 1', r"speed.*docs/plan.md"),
        ('like = "h100-81"', r"h100-81: is neither known hardware"),
        ("like = ", r"not valid TOML"),
        ('like = "h100-80"\n[title]\ntext = 1', r"title = .*must be text"),  # a table instead of a value
        (f'like = "h100-80"\nmultiprocessors = 0x{"f" * 5000}', r"not valid TOML"),
        (f'like = "{"h" * 300}.toml"', r"is neither known hardware nor a file"),
    ],
)
def test_invalid_description_raises_with_a_remedy(tmp_path, text, reported):
    with pytest.raises(ConfigError, match=reported):
        hardware(written(tmp_path / "ours.toml", text))


def test_circular_like_raises(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    written(first, f'like = "{second}"')
    written(second, f'like = "{first}"')
    with pytest.raises(ConfigError, match=r"refers to itself.*Remove one `like`"):
        hardware(str(first))


# ------------------------------------------------------------------------------------------------- values of any size

PARTS = {
    "flops_per_s": ("float32", "bfloat16", "float16"),
    "link": ("bytes_per_s", "step_s", "ll_step_s", "ll128_step_s", "ll_bytes_per_s"),
    "network": ("bytes_per_s", "step_s"),
    "fitted": ("matmul_share", "memory_share", "host_s"),
    "attention": ("forward", "backward"),
    "": (
        *("memory_bytes", "memory_bytes_per_s", "ranks_per_host", "base_s", "host_link_bytes_per_s"),
        *("host_memory_bytes", "host_memory_bytes_per_s", "multiprocessors", "collective_multiprocessors"),
    ),
}
FIGURES = st.sampled_from([(part, figure) for part, figures in PARTS.items() for figure in figures])
NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.builds(lambda power, sign: sign * 10.0**power, st.integers(-30, 30), st.sampled_from((1, -1))),
)
OTHERS = st.one_of(st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=1), st.none())


def changed(figures: dict[tuple[str, str], Any]) -> Hardware:
    stated: dict[str, Any] = {"like": "h100-80", "name": "ours"}
    for (part, figure), value in figures.items():
        (stated.setdefault(part, {}) if part else stated)[figure] = value
    return described(stated, "ours.toml")


def seconds_of(machine: Hardware) -> list[float]:
    costs, here = costs_of(machine), Origin("", Phase.FORWARD)
    tensors = [Access(i, 0, 1 << 20) for i in range(3)]
    product = Operation("aten.mm", "compute", here, tuple(tensors[:2]), (tensors[2],), 1 << 30, dtype="bfloat16")
    attention = product._replace(name="aten._flash_attention_forward")
    gather = Collective("allgather", "gather", here, (tensors[0],), (), tuple(range(16)), (1 << 20,))
    of_operations = [costs.of_operation(item) for item in (product, attention, product._replace(crosses=True))]
    return [*of_operations, costs.alongside(product), costs.of_collective(gather), costs.host_s]


@given(st.dictionaries(FIGURES, NUMBERS, min_size=1, max_size=3))
@example({("", "collective_multiprocessors"): 132})
@example({("", "multiprocessors"): 24})
@example({("", "multiprocessors"): 1.0})
@example({("link", "bytes_per_s"): 1e-300})
@example({("", "memory_bytes"): math.nan})
def test_any_figures_give_finite_times_or_raise_with_their_range(figures):
    try:
        machine = changed(figures)
    except ConfigError as error:
        pattern = r"ours.toml: ([\w.]+) = (\S+): must be (a .* from \S+ to \S+|less than multiprocessors = [\d.]+)\. "
        found = re.match(pattern, str(error))
        assert found, str(error)
        names = {".".join(filter(None, name)): value for name, value in figures.items()}
        default = hardware("h100-80").collective_multiprocessors
        assert found[2] == repr(names.get(found[1], default))
    else:
        assert all(0 <= item < math.inf for item in seconds_of(machine))
        assert 0 < machine.memory_bytes < math.inf


@given(FIGURES, OTHERS)
def test_non_numeric_figure_raises(figure, value):
    with pytest.raises(ConfigError, match=r"must be a .* from"):
        changed({figure: value})


@pytest.mark.parametrize("text", ["name = 1", "title = 2.0", 'sources = "a"\nname = []', "sources = [1]"])
def test_non_text_names_and_sources_raise(tmp_path, text):
    with pytest.raises(ConfigError, match="must be text"):
        hardware(written(tmp_path / "ours.toml", f'like = "h100-80"\n{text}'))


def test_missing_rate_of_a_common_dtype_raises():
    stated = {field: getattr(hardware("h100-80"), field) for field in ("link", "network", "fitted")}
    whole = vars(hardware("h100-80")) | {name: vars(part) for name, part in stated.items()}
    whole |= {"attention": None, "flops_per_s": {"float32": 1e12}}
    with pytest.raises(ConfigError, match=r"\[flops_per_s\] lacks bfloat16"):
        described(whole)
