"""Safety copies in host memory: if any host is lost at any time, the other hosts have a complete copy."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from killing import die_before, ended_well
from shared_ranks import on_ranks, run_ranks, same_on_all_ranks
from small_models import adamw, chain, inputs, take_step, wholes
from torch import nn

from fullshard import CheckpointError, fully_shard
from fullshard.checkpoint import load
from fullshard.checkpoint.folder import entries
from fullshard.checkpoint.keeper import keeps_folders, kept_folder, launcher_identity, named, opened_folder
from fullshard.checkpoint.safety_copy import SafetyCopies, _Exchange
from fullshard.testing import assert_same


def learn(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        take_step(optimizer, model(inputs(step)).square().mean())


def begun(strategy: str = "zero3") -> tuple[nn.Module, Any]:
    model = chain(lambda module: fully_shard(module, strategy=strategy))
    return model, adamw(model)


def host(memory: Path, ranks_of_host: int = 1) -> Path:
    """Return the folder of this rank's host. Hosts of several ranks consist of adjacent ranks."""
    folder = memory / f"host{dist.get_rank() // ranks_of_host}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def copy_steps(memory: Path, steps: int, ranks_of_host: int = 1) -> tuple[nn.Module, Any]:
    """Learn, and copy after each step."""
    copies = SafetyCopies(host(memory, ranks_of_host))
    model, optimizer = begun()
    for step in range(1, steps + 1):
        learn(model, optimizer, range(step - 1, step))
        copies.save(model=model, optimizer=optimizer, step=step, extra={"seen": step})
    copies.wait()
    return model, optimizer


def go_on(memory: Path, steps: int, ranks_of_host: int = 1) -> tuple[int, dict[str, Any]]:
    """Resume from the newest copy and train. Return the step of the copy (0 if there is none) and the final weights."""
    copies = SafetyCopies(host(memory, ranks_of_host))
    model, optimizer = begun()
    found, done = copies.newest(), 0
    if found is not None:
        restored = load(copies.fetch(found), model=model, optimizer=optimizer)
        assert restored.extra == {"seen": restored.step}
        done = restored.step
    learn(model, optimizer, range(done, steps))
    return done, wholes(model)


def without(memory: Path, name: str, lost: set[int]) -> Path:
    """Return a copy of `memory` in which the `lost` hosts are empty. Every rank must call this function."""
    other = memory.with_name(name)
    dist.barrier()
    if dist.get_rank() not in lost:
        shutil.copytree(host(memory), host(other), dirs_exist_ok=True)
    return other


@pytest.mark.slow
@on_ranks(3)
def test_state_of_any_lost_host_is_restored_from_its_neighbor(tmp_path):
    """If two adjacent hosts are lost together, their state is not restored."""
    model, optimizer = copy_steps(tmp_path / "all", 3)
    learn(model, optimizer, range(3, 5))
    rank = dist.get_rank()
    (entry,) = entries(host(tmp_path / "all"))
    files = {name.split("_")[2] for name in os.listdir(entry.path) if name.endswith(".distcp")}
    assert files == {str(rank), str((rank - 1) % 3)}
    for lost in range(3):
        done, weights = go_on(without(tmp_path / "all", f"lost{lost}", {lost}), 5)
        assert done == 3
        assert_same(weights, wholes(model))
    assert go_on(without(tmp_path / "all", "lost two", {0, 1}), 1)[0] == 0


def go_on_without_each(memory: Path) -> None:
    """Resume on the two remaining hosts of three, for each lost host."""
    for lost in range(3):
        local = memory / f"host{[number for number in range(3) if number != lost][dist.get_rank()]}"
        here = local.with_name(f"{local.name} without {lost}")
        shutil.copytree(local, here)
        copies = SafetyCopies(here)
        model, optimizer = begun("zero2")
        found = copies.newest()
        assert found is not None
        assert load(copies.fetch(found), model=model, optimizer=optimizer).step == 2
        # The hosts copy again, each to the other, and delete their older copies.
        copies.save(model=model, optimizer=optimizer, step=3, extra=None).wait()
        assert [path.name for path in here.iterdir()] == ["step-000000003"]
        assert not list(here.glob("*/*.coming"))


def copy_twice(memory: Path) -> None:
    copy_steps(memory, 2)


@pytest.mark.slow
def test_remaining_hosts_resume_at_a_smaller_world_size(tmp_path):
    run_ranks(3, copy_twice, tmp_path)
    run_ranks(2, go_on_without_each, tmp_path)


@pytest.mark.slow
@on_ranks(2)
def test_single_host_restores_state_of_its_restarted_ranks(tmp_path):
    model, optimizer = copy_steps(tmp_path, 3, ranks_of_host=2)
    learn(model, optimizer, range(3, 4))
    done, weights = go_on(tmp_path, 4, ranks_of_host=2)
    assert done == 3
    assert_same(weights, wholes(model))


# -- kills at any time ------------------------------------------------------------------------------------------------


def copy_and_die(memory: Path, doomed: int, operation: int) -> None:
    """Resume from step 1, train, and copy step 2. The host `doomed` is killed before file operation `operation`."""
    copies = SafetyCopies(host(memory))
    model, optimizer = begun()
    found = copies.newest()
    load(copies.fetch(found), model=model, optimizer=optimizer)
    learn(model, optimizer, range(1, 2))
    if dist.get_rank() == doomed:
        die_before(operation, memory)
    copies.save(model=model, optimizer=optimizer, step=2, extra={"seen": 2}).wait()


def copy_once(memory: Path) -> None:
    copy_steps(memory, 1)


def check_kills(tmp_path: Path, operations: range) -> bool:
    """Kill a run at each of these operations. Return True if the run ended before the last one."""
    run_ranks(2, copy_once, tmp_path / "first")
    ((_, expected), _) = run_ranks(2, go_on, tmp_path / "calm", 3)
    for operation in operations:
        memory = tmp_path / str(operation)
        shutil.copytree(tmp_path / "first", memory)
        ended = ended_well(2, copy_and_die, memory, 0, operation)
        shutil.rmtree(memory / "host0")
        for done, weights in run_ranks(2, go_on, memory, 3):
            assert done == 2 if ended else done in (1, 2)
            assert_same(weights, expected)
        if ended:
            return True
    return False


@pytest.mark.slow
def test_host_lost_during_copy_loses_at_most_one_copy(tmp_path):
    assert not check_kills(tmp_path, range(9, 10))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_host_lost_at_every_second_file_operation_loses_at_most_one_copy(tmp_path):
    assert check_kills(tmp_path, range(1, 200, 2))


# -- no space left ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_host_out_of_memory_raises_on_every_rank_and_keeps_old_copy(tmp_path):
    stated = []
    copies = SafetyCopies(host(tmp_path))
    model, optimizer = begun()
    copies.save(model=model, optimizer=optimizer, step=1, extra={"seen": 1}).wait()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for place in ("posix_fallocate", "mkdir"):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(os, place, full)
            pending = copies.save(model=model, optimizer=optimizer, step=2, extra={"seen": 2})
            with pytest.raises(CheckpointError) as caught:
                pending.wait()
            stated.append(str(caught.value))
    (entry,) = entries(host(tmp_path))
    assert entry.step == copies.newest().manifest.step == 1
    assert not list(host(tmp_path).glob("*partial*"))
    first = same_on_all_ranks(stated)
    for stated in first:
        assert (
            "copying step 2 to the memory of the hosts: rank 1: OSError: [Errno 28] No space left on device" in stated
        )


@on_ranks(2)
def test_new_copies_wait_for_one_in_progress(tmp_path):
    """As when a loop raises an error after `save`, and starts again in the same process."""
    model, optimizer = begun()
    for step in range(1, 4):
        copies = SafetyCopies(host(tmp_path))
        found = copies.newest()
        assert (found.manifest.step if found else 0) == step - 1
        copies.save(model=model, optimizer=optimizer, step=step, extra=None)
    copies.wait()


@on_ranks(2)
def test_data_that_changed_in_transit_is_rejected(tmp_path):
    copies = SafetyCopies(host(tmp_path))
    model, optimizer = begun()
    run = _Exchange.run

    def garbled(self: _Exchange, *args: Any) -> None:
        run(self, *args)
        for name in self.received:
            with (self.folder / name).open("r+b") as file:
                file.write(b"?")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Exchange, "run", garbled)
        with pytest.raises(CheckpointError) as caught:
            copies.save(model=model, optimizer=optimizer, step=1, extra=None).wait()
    assert copies.newest() is None
    stated = str(caught.value)
    assert "expected the checksum" in stated


@on_ranks(2)
def test_damaged_copy_error_names_the_user_visible_path(tmp_path):
    copy_steps(tmp_path, 1)
    file = host(tmp_path) / "step-000000001" / f"__{dist.get_rank()}_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    dist.barrier()
    copies = SafetyCopies(host(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        copies.fetch(copies.newest())
    assert f"{tmp_path}/host0/step-000000001/__" in str(caught.value)
    assert "/proc" not in str(caught.value)


# -- the keeper -------------------------------------------------------------------------------------------------------


def wait_until_gone(folder: Path) -> None:
    while folder.exists():  # pytest-timeout ends this loop if the folder stays
        time.sleep(0.02)


@pytest.fixture
def launcher() -> Any:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def plant(memory: Path, kind: str, launcher: int) -> Path:
    """Create what another user could create in `memory` to imitate the folder of `launcher`."""
    victim = memory / "victim"
    victim.mkdir()
    (victim / "kept").write_text("precious")
    planted = memory / f"fullshard-{'0' * 32}"
    if kind == "link to a folder":
        victim.chmod(0o700)
        (victim / "kept").write_text(launcher_identity(launcher))
        planted.symlink_to(victim)
    elif kind == "file":
        planted.write_text(launcher_identity(launcher))
    elif kind == "fifo":
        os.mkfifo(planted)
    elif kind == "name of before":  # earlier versions looked here
        planted = memory / f"fullshard-{os.getuid()}-{launcher}-{launcher_identity(launcher).split()[-1]}"
        planted.mkdir()
        (planted / "kept").symlink_to(victim / "kept")
    else:
        planted.mkdir(mode=0o700)
        record = planted / "kept"
        if kind == "record is a fifo":
            os.mkfifo(record)
        elif kind == "record is a link":
            (victim / "kept").write_text(launcher_identity(launcher))
            record.symlink_to(victim / "kept")
        else:
            record.write_text(launcher_identity(launcher))
        if kind == "open to others":
            planted.chmod(0o777)
        elif kind == "of another user":
            os.chown(planted, 65534, 65534)
    return planted


def state_of(path: Path) -> tuple[int, ...]:
    """Return the attributes that a write or a removal changes. Reads change the access time, which is left out."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns, found.st_ctime_ns


PLANTED = ["link to a folder", "file", "fifo", "name of before", "record is a fifo", "record is a link"]


@pytest.mark.parametrize(
    "kind",
    [
        *PLANTED,
        "open to others",
        pytest.param("of another user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can make it")),
    ],
)
def test_folder_planted_by_another_user_is_not_used(launcher, tmp_path, kind):
    """The folder is not written to, nothing in it is removed, and opening it does not block."""
    planted = plant(tmp_path, kind, launcher.pid)
    kept = {path: state_of(path) for path in tmp_path.rglob("*")}
    precious = (tmp_path / "victim" / "kept").read_text()
    folder = kept_folder(launcher.pid, tmp_path)
    assert folder != planted
    assert not folder.is_symlink()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "kept").stat().st_mode & 0o777 == 0o600
    assert kept_folder(launcher.pid, tmp_path) == folder
    assert {path: state_of(path) for path in kept} == kept
    assert (tmp_path / "victim" / "kept").read_text() == precious
    with pytest.raises(OSError, match=f"{planted}"), opened_folder(planted if kind not in RECORDS else planted / "no"):
        pass


RECORDS = ["record is a fifo", "record is a link"]  # inside a valid folder


@pytest.mark.parametrize("record", [b"", b"\xff" * 90, b"{0} x 3", b"{0} {0} {0} {0}"])
def test_folder_with_damaged_record_is_not_used(launcher, tmp_path, record):
    damaged = tmp_path / f"fullshard-{'0' * 32}"
    damaged.mkdir(mode=0o700)
    namespace = launcher_identity(launcher.pid).split()[1].encode()
    (damaged / "kept").write_bytes(b"boot " + record.replace(b"{0}", namespace))
    assert kept_folder(launcher.pid, tmp_path) != damaged
    assert damaged.exists()


def test_world_writable_memory_without_sticky_bit_is_rejected(launcher, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"has mode 777: other users can rename and replace its contents"):
        kept_folder(launcher.pid, tmp_path)
    tmp_path.chmod(0o1777)
    kept_folder(launcher.pid, tmp_path)


@on_ranks(2)
def test_save_does_not_write_to_folder_that_replaced_the_original(tmp_path):
    """The folder is removed, and another user creates one with the same name and with links to files of this user."""
    here = host(tmp_path)
    copies = SafetyCopies(here)
    model, optimizer = begun()
    copies.save(model=model, optimizer=optimizer, step=1, extra=None).wait()
    dist.barrier()
    here.rename(here.with_name(f"{here.name} removed"))
    shutil.rmtree(here.with_name(f"{here.name} removed"))
    here.mkdir()
    assert copies.newest() is None
    with pytest.raises(CheckpointError) as caught:
        copies.save(model=model, optimizer=optimizer, step=2, extra=None).wait()
    assert not list(here.iterdir())
    first = same_on_all_ranks(str(caught.value))
    assert "No such file or directory" in first


@on_ranks(2)
def test_folder_accessible_to_others_raises_on_every_rank(tmp_path):
    here = host(tmp_path)
    if dist.get_rank() == 1:
        here.chmod(0o750)
    with pytest.raises(CheckpointError) as caught:
        SafetyCopies(here)
    first = same_on_all_ranks(str(caught.value))
    assert "rank 1: PermissionError: " in first
    assert "and has mode 750, but must belong to user" in first


def meet_in_a_folder(memory: Path, launcher: int) -> set[str]:
    """Open the folder twice, as after a restart of the ranks. Return its paths."""
    model, optimizer = begun()
    copies = SafetyCopies.kept_with(launcher, memory)
    copies.save(model=model, optimizer=optimizer, step=1, extra=None).wait()
    again = SafetyCopies.kept_with(launcher, memory)
    found = again.newest()
    assert found is not None
    assert found.manifest.step == 1
    return {str(named(again.fetch(found)).parent), str(named(copies.fetch(found)).parent)}


def test_ranks_of_one_host_share_one_folder_across_restarts(launcher, tmp_path):
    folders = set.union(*run_ranks(2, meet_in_a_folder, tmp_path, launcher.pid))
    assert folders == {str(path) for path in tmp_path.iterdir()}
    assert len(folders) == 1


def test_folder_is_removed_when_its_launcher_is_killed(launcher, tmp_path):
    assert keeps_folders(launcher.pid)
    folder = kept_folder(launcher.pid, tmp_path)
    (folder / "step-000000001").mkdir()
    assert kept_folder(launcher.pid, tmp_path) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    launcher.kill()
    launcher.wait()
    wait_until_gone(folder)


def keeper_of(folder: Path) -> int:
    """Return the process that has the folder in its command."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words:
            return int(process.name)
    raise AssertionError(f"no process keeps {folder}")


@pytest.mark.slow
def test_folder_outlives_the_requesting_process(launcher, tmp_path):
    """The folder also outlives the signals that a scheduler sends to all processes of a job before it kills them."""
    code = "import sys, fullshard.checkpoint.keeper as it; it.kept_folder(int(sys.argv[1]), it.Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, str(launcher.pid), tmp_path], check=True)
    (folder,) = tmp_path.iterdir()
    keeper = keeper_of(folder)
    os.kill(keeper, signal.SIGTERM)
    time.sleep(0.2)
    assert folder.exists()
    launcher.kill()
    launcher.wait()
    wait_until_gone(folder)


def test_folder_of_killed_keeper_is_reused_or_removed(launcher, tmp_path):
    folder = kept_folder(launcher.pid, tmp_path)
    os.kill(keeper_of(folder), signal.SIGKILL)
    time.sleep(0.1)
    assert kept_folder(launcher.pid, tmp_path) == folder
    os.kill(keeper_of(folder), signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    assert folder.exists()
    with subprocess.Popen(["sleep", "1000"]) as other:
        peer = kept_folder(other.pid, tmp_path)
        assert not folder.exists()
        other.kill()
    wait_until_gone(peer)
