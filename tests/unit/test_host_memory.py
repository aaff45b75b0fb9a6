"""Available host memory, from the kernel's numbers for the machine and the control groups of a process."""

from pathlib import Path

import pytest
import torch

from fullshard.device import host_memory
from fullshard.device.accelerator import accelerator_for
from fullshard.plan.memory_used import memory_for_a_rank

FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"
SECOND = "memory.max", "memory.current", "inactive_file", "active_file"


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 MiB available, and a process outside of all groups."""
    (tmp_path / "meminfo").write_text("MemTotal:  16384 kB\nMemAvailable:  8192 kB\nHugePages_Total:  0\n")
    monkeypatch.setattr(host_memory, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    return tmp_path


def write_group(folder: Path, names: tuple[str, str, str, str], limit: object, used: int, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names[:2], (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {files // 2}\n{names[3]} {files - files // 2}\n")


def test_host_room_without_cgroups_is_available_memory(kernel):
    assert host_memory.host_room() == host_memory.available_bytes() == 8 << 20


@pytest.mark.parametrize(
    ("line", "top", "names"), [("0::", "", SECOND), ("4:cpu,memory:", "memory", FIRST)], ids=["second", "first"]
)
def test_host_room_is_smallest_remainder_of_enclosing_cgroups(kernel, line, top, names):
    (kernel / "cgroup").write_text(f"1:pids:/elsewhere\n{line}/job/step/task\n")
    tree = kernel / "groups" / top
    write_group(tree / "job/step/task", names, "max", 5)
    assert host_memory.host_room() == 8 << 20
    write_group(tree / "job/step", names, 4000, used=1000, files=301)
    assert host_memory.host_room() == 3301, "pages of files are taken back"
    write_group(tree / "job", names, 5000, used=4500)
    assert host_memory.host_room() == 500
    write_group(tree / "job", names, 5000, used=6000)
    assert host_memory.host_room() == 0, "a limit that was lowered"


@pytest.mark.parametrize(("top", "names"), [("", SECOND), ("memory", FIRST)], ids=["second", "first"])
def test_host_room_uses_limit_of_top_level_container_cgroup(kernel, top, names):
    """The process's cgroup file gives the path outside of the container, which the container's tree does not have."""
    (kernel / "cgroup").write_text("0::/\n4:memory:/docker/1f2e\n")
    write_group(kernel / "groups" / top, names, 7000, used=2000)
    assert host_memory.host_room() == 5000


def test_cgroup_limit_above_machine_memory_is_ignored(kernel):
    (kernel / "cgroup").write_text("0::/\n")
    write_group(kernel / "groups", SECOND, 1 << 60, used=0)
    assert host_memory.host_room() == 8 << 20


def test_host_room_is_none_without_kernel_report(kernel):
    (kernel / "meminfo").write_text("MemTotal:  16384 kB\n")
    assert host_memory.available_bytes() is None and host_memory.host_room() is None
    (kernel / "meminfo").unlink()
    assert host_memory.available_bytes() is None and host_memory.share_of_host(4) is None
    assert memory_for_a_rank(torch.device("cpu"), 2) == 1 << 61


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_share_nine_tenths_of_host_memory_equally(ranks):
    share = host_memory.share_of_host(ranks)
    assert share == accelerator_for(torch.device("cpu")).host_room(ranks)
    assert 0 <= 0.9 * (8 << 20) - ranks * share <= ranks
    assert memory_for_a_rank(torch.device("cpu"), ranks) == (8 << 20) // ranks
