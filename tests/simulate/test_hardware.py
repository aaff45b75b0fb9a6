"""Descriptions of machines: shipped ones are complete and plausible, and errors in a description say what to do."""

from itertools import pairwise

import pytest

from fullshard.errors import ConfigError
from fullshard.plan.hardware import Hardware, hardware, known_hardware

GPUS = ("v100-32", "a100-40", "a100-80", "h100-80", "h200", "b200", "gb200", "mi300x")


def written(path, text):
    path.write_text(text)
    return str(path)


def test_the_usual_accelerators_are_known():
    assert set(GPUS) <= set(known_hardware())


@pytest.mark.parametrize("name", GPUS)
def test_what_ships_states_what_it_is_and_where_that_is_from(name):
    machine = hardware(name)
    assert (machine.name, machine.kind) == (name, "gpu")
    assert machine.title
    assert any("data sheet" in source for source in machine.sources)
    assert any("fitted" in source for source in machine.sources)
    assert machine.multiprocessors > machine.collective_multiprocessors >= 0
    assert machine.attention is not None


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_in_an_order_that_machines_have(name):
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


def test_a_description_has_whatever_it_leaves_out_from_what_it_is_like(tmp_path):
    own = hardware(
        written(
            tmp_path / "ours.toml", 'like = "h100-80"\nname = "ours"\nranks_per_host = 4\n[network]\nbytes_per_s = 25e9'
        )
    )
    base = hardware("h100-80")
    assert (own.name, own.ranks_per_host, own.network.bytes_per_s) == ("ours", 4, 25e9)
    assert own.network.step_s == base.network.step_s  # of a table, too
    assert (own.link, own.fitted, own.attention) == (base.link, base.fitted, base.attention)


def test_what_is_like_a_file_reads_that_file(tmp_path):
    first = written(tmp_path / "first.toml", 'like = "a100-80"\nname = "first"\nhost_memory_bytes = 1e12')
    second = hardware(written(tmp_path / "second.toml", f'like = "{first}"\nname = "second"'))
    assert (second.name, second.host_memory_bytes) == ("second", 1e12)


def test_hosts_of_another_size_are_otherwise_the_same():
    machine = hardware("h100-80").with_hosts_of(4)
    assert isinstance(machine, Hardware)
    assert (machine.ranks_per_host, machine.link) == (4, hardware("h100-80").link)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"h100: neither known hardware.*a100-80.*h100-80.*`here`.*TOML file"):
        hardware("h100")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ('name = "ours"', r"lacks kind.*link.*like = "),
        ('like = "h100-80"\nflops = 1', r"flops: unknown"),
        ('like = "h100-80"\n[link]\nspeed = 1', r"speed.*docs/plan.md"),
        ('like = "h100-81"', r"h100-81: neither known hardware"),
        ("like = ", r"not valid TOML"),
    ],
)
def test_a_wrong_description_is_reported_with_its_remedy(tmp_path, text, reported):
    with pytest.raises(ConfigError, match=reported):
        hardware(written(tmp_path / "ours.toml", text))


def test_a_description_cannot_be_like_itself(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    written(first, f'like = "{second}"')
    written(second, f'like = "{first}"')
    with pytest.raises(ConfigError, match=r"is like itself.*Leave one `like` out"):
        hardware(str(first))
