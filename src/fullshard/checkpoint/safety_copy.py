"""Safety copies: the state of a run in the memory of its hosts. They survive the loss of all ranks, or of one host.

A copy is a checkpoint whose files are in a folder in memory on each host: the files of the ranks of this host, and of
the previous host. If one host is lost, all files still exist, and a resumed run reads them like any checkpoint, with
any number of ranks. See keeper.py for the lifetime of the folder.

1. Every rank copies its state to host memory, and training continues.
2. Meanwhile each rank writes its file to the folder of its host. The first rank of each host sends the host's files to
   the next host, and receives the files of the previous host.
3. Once all files have arrived, every host commits the copy. After that, every host deletes the previous copy. So one
   copy always survives the loss of a host.
"""

from __future__ import annotations

import os
import socket
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint.background import Background, PendingSave
from fullshard.checkpoint.contents import Contents, collect
from fullshard.checkpoint.folder import (
    clear_up,
    commit,
    delete,
    discard,
    entries,
    newest_number,
    partial_in,
    write_synced,
)
from fullshard.checkpoint.keeper import MEMORY, kept_folder, launcher_identity, named, opened_folder
from fullshard.checkpoint.manifest import MANIFEST, Manifest, StoredFile, damage_in
from fullshard.checkpoint.saving import manifest_of, write_files
from fullshard.checkpoint.staging import HostMemory
from fullshard.checkpoint.together import default_ranks
from fullshard.errors import CheckpointError
from fullshard.liveness.rank_progress import here
from fullshard.tape.recorder import noting


@dataclass(frozen=True)
class SafetyCopy:
    """A complete copy: every file exists on at least one host."""

    manifest: Manifest
    holders: Mapping[str, Sequence[int]]  # by file, the indices of its hosts, in the order of their ranks


@dataclass(frozen=True)
class _Transfer:
    """A file that one host sends to another. Hosts are given by index."""

    name: str
    stored: StoredFile
    source: int
    target: int


_background = Background("fullshard-safety-copy")  # shared by all objects, because it has only one process group


class SafetyCopies:
    """The copies of one run. Every rank of the default process group creates this object and calls all methods.

    Args:
        folder: A folder in the memory of this rank's host, shared by the ranks of the host. It belongs to this user,
            and other users cannot access it. Files are accessed through its descriptor, never by its name.

    Raises:
        CheckpointError: A rank cannot open its folder, or other users can access it; or a copy in progress failed.
    """

    def __init__(self, folder: Path) -> None:
        _background.wait()
        self._memory = HostMemory()
        self._ranks = _background.ranks()
        self._folder = self._ranks.do("opening the folder of safety copies", lambda: self._opened(folder))
        places = self._ranks.share("looking for hosts", lambda: (socket.gethostname(), str(folder)))
        self._leaders = [rank for rank, place in enumerate(places) if places.index(place) == rank]
        self._host_of = [self._leaders.index(places.index(place)) for place in places]

    @classmethod
    def kept_with(cls, launcher: int, memory: Path = MEMORY) -> SafetyCopies:
        """Return the copies of a run whose ranks are started by the process `launcher` of each host.

        The first rank of each host finds or creates the folder, and shares its name with the other ranks.

        Raises:
            CheckpointError: A host cannot create a folder.
        """
        ranks = default_ranks()
        launchers = ranks.share("looking for hosts", lambda: (socket.gethostname(), launcher_identity(launcher)))
        first = launchers.index(launchers[ranks.index])
        folders = ranks.share(
            f"making a folder in {memory}", lambda: kept_folder(launcher, memory) if first == ranks.index else None
        )
        folder = folders[first]
        assert folder is not None, "made by the first rank of each host"
        return cls(folder)

    def _opened(self, folder: Path) -> Path:
        with opened_folder(folder) as descriptor:
            kept = os.dup(descriptor)
        weakref.finalize(self, os.close, kept)
        return Path(f"/proc/self/fd/{kept}")

    @property
    def _host(self) -> int:
        return self._host_of[self._ranks.index]

    @property
    def _leads(self) -> bool:
        """True if this rank acts for its host."""
        return self._ranks.index in self._leaders

    @noting("checkpoint")
    def save(self, *, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, extra: Any) -> PendingSave:
        """Start a safety copy, and return once the states are in host memory. Wait for the previous copy first.

        See `fullshard.checkpoint.async_save` for the contents of a copy.

        Raises:
            CheckpointError: A rank could not copy, or the previous copy failed. The run can continue.
        """
        doing = f"copying step {step} to the memory of the hosts"
        _background.wait()
        default_ranks().barrier("SafetyCopies.save")
        contents = self._ranks.do(doing, lambda: self._memory.copy(collect(model, optimizer, None, None, extra)))
        return _background.start(lambda: self._write(contents, step, doing))

    def wait(self) -> None:
        """Wait for the copy in progress, if there is one.

        Raises:
            CheckpointError: It failed, and its error has not been raised by `PendingSave.wait` yet.
        """
        _background.wait()

    def newest(self) -> SafetyCopy | None:
        """Return the newest complete copy, if there is one."""
        doing = "looking for safety copies"
        by_rank = self._ranks.share(doing, lambda: list(self._found()) if self._leads else [])
        by_host = [by_rank[leader] for leader in self._leaders]
        manifests = {manifest.id: manifest for of_host in by_host for manifest, _ in of_host}
        copies = []
        for manifest in manifests.values():
            holders: dict[str, list[int]] = {name: [] for name in manifest.files}
            for host, of_host in enumerate(by_host):
                for name in (name for other, names in of_host if other.id == manifest.id for name in names):
                    holders[name].append(host)
            if all(holders.values()):
                copies.append(SafetyCopy(manifest, holders))
        return max(copies, key=lambda copy: copy.manifest.number, default=None)

    def fetch(self, copy: SafetyCopy) -> Path:
        """Fetch all files of `copy` to every host, and return its path on this host: a checkpoint that can be loaded.

        Raises:
            CheckpointError: A host cannot get the files, or some are damaged.
        """
        manifest = copy.manifest
        doing = f"fetching the safety copy of step {manifest.step}"
        path = self._folder / f"step-{manifest.step:09d}"
        transfers = [
            _Transfer(name, stored, copy.holders[name][0], host)
            for name, stored in manifest.files.items()
            for host in range(len(self._leaders))
            if host not in copy.holders[name]
        ]
        self._ranks.do(doing, lambda: self._make_room_for(path, manifest))
        self._exchange(path, transfers, doing)
        self._ranks.do(doing, lambda: _check(path, manifest.files if self._leads else {}))
        return path

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self, contents: Contents, step: int, doing: str) -> Path:
        ranks = self._ranks
        id = ranks.once(doing, lambda: uuid.uuid4().hex)
        partial = partial_in(self._folder, step, id)
        try:
            number = 1 + max(ranks.share(doing, lambda: self._begin(partial)))
            by_rank = write_files(partial, contents, ranks, doing)
            by_host: list[dict[str, StoredFile]] = [{} for _ in self._leaders]
            for host, files in zip(self._host_of, by_rank, strict=True):
                by_host[host] |= files
            self._exchange(partial, self._mirrored(by_host), doing)
            manifest = ranks.once(doing, lambda: manifest_of(partial, step, number, contents.strategy, by_rank))
            kept = {**by_host[self._host], **by_host[self._host - 1]}
            path = ranks.do(doing, lambda: self._commit(partial, manifest, kept))
            ranks.do(doing, lambda: self._delete_all_but(path))
        except CheckpointError:
            if self._leads:
                discard(partial)
            raise
        return path

    def _begin(self, partial: Path) -> int:
        """Prepare the folder for a copy, and return the number of the newest copy in it.

        A missing folder is not created, because the keeper has removed it and would not remove a new one.
        """
        if self._leads:
            clear_up(self._folder)
            partial.mkdir()
        return newest_number(self._folder)

    def _mirrored(self, by_host: Sequence[Mapping[str, StoredFile]]) -> list[_Transfer]:
        """Return transfers of each host's files to the next host; none for a single host."""
        hosts = len(by_host)
        return [
            _Transfer(name, stored, host, (host + 1) % hosts)
            for host, files in enumerate(by_host)
            for name, stored in files.items()
            if hosts > 1
        ]

    def _commit(self, partial: Path, manifest: Manifest, kept: Mapping[str, StoredFile]) -> Path:
        if self._leads:
            commit(partial, manifest, kept)
        return self._folder / f"step-{manifest.step:09d}"

    def _delete_all_but(self, path: Path) -> None:
        if self._leads:
            for entry in entries(self._folder):
                if entry.path != path:
                    delete(entry)

    # -- between hosts ------------------------------------------------------------------------------------------------

    def _exchange(self, folder: Path, transfers: Sequence[_Transfer], doing: str) -> None:
        """Send each file to its target, which renames it once it is complete."""
        local = _Exchange(folder, transfers, self._host if self._leads else None)
        self._ranks.do(doing, local.allocate)  # a host without enough memory raises an error before any transfer
        self._ranks.do(doing, lambda: local.run(self._leaders, self._ranks.group))
        self._ranks.do(doing, local.rename)

    def _found(self) -> Iterator[tuple[Manifest, list[str]]]:
        """Yield the copies on this host, with the names of their files on this host."""
        for entry in entries(self._folder):
            if entry.manifest is not None:
                files = entry.manifest.files.items()
                present = [item[0] for item in files if not any(damage_in(entry.path, dict([item]), reads=False))]
                yield entry.manifest, present

    def _make_room_for(self, path: Path, manifest: Manifest) -> None:
        if self._leads and not path.exists():
            path.mkdir()
            write_synced(path / MANIFEST, manifest.dumps().encode())


@dataclass(frozen=True)
class _Exchange:
    """The transfers of one host. A rank that does not act for a host does nothing."""

    folder: Path
    transfers: Sequence[_Transfer]
    host: int | None

    @cached_property
    def received(self) -> dict[str, StoredFile]:
        """The files that this host receives, by their temporary names."""
        return {
            f"{transfer.name}.coming": transfer.stored for transfer in self.transfers if transfer.target == self.host
        }

    def allocate(self) -> None:
        """Allocate all memory. Without memory, a later write to a mapped file raises a signal instead of an error."""
        for name, stored in self.received.items():
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                if stored.nbytes:
                    os.posix_fallocate(descriptor, 0, stored.nbytes)
            finally:
                os.close(descriptor)

    def run(self, leaders: Sequence[int], group: dist.ProcessGroup | None) -> None:
        """Send and receive directly between the memory of hosts."""
        works = []
        for tag, transfer in enumerate(self.transfers):
            if transfer.source == self.host and transfer.stored.nbytes:
                data = _mapped(self.folder / transfer.name, transfer.stored)
                works.append(dist.isend(data, leaders[transfer.target], group=group, tag=tag))
            elif transfer.target == self.host and transfer.stored.nbytes:
                data = _mapped(self.folder / f"{transfer.name}.coming", transfer.stored)
                works.append(dist.irecv(data, leaders[transfer.source], group=group, tag=tag))
        with here.waiting("files of a safety copy"):
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()

    def rename(self) -> None:
        """Verify the received files, and rename them to their final names."""
        _check(self.folder, self.received)
        for name in self.received:
            (self.folder / name).rename(self.folder / name.removesuffix(".coming"))


def _mapped(path: Path, stored: StoredFile) -> Tensor:
    return torch.from_file(str(path), shared=True, size=stored.nbytes, dtype=torch.uint8)


def _check(folder: Path, files: Mapping[str, StoredFile]) -> None:
    damage = next(damage_in(folder, files), None)
    if damage is not None:
        raise CheckpointError(f"{named(folder)}{damage.removeprefix(str(folder))}. Load another checkpoint.")
