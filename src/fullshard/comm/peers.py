"""Shared memory of the ranks on one host, and the small messages that describe its contents.

A rank writes data for its peers to a *block* of shared memory, and publishes its offset. The peers read the data there
and acknowledge it. Then the block may be used again.

[Note: cleanup]
All resources are freed, however a rank ends. Blocks are anonymous (memfd): they have no name in a file system, and the
kernel frees them with the last process. /dev/shm and its limit are not used. Sockets have no names in a file system
either.

[Note: waiting]
A rank that waits sleeps in the kernel until a message arrives. If the rank that it waits for ends, the kernel closes
the sockets of that rank, and the waiting rank gets an error immediately. If no message arrives, it gets an error after
the group's timeout.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.device.accelerator import accelerator_for
from fullshard.errors import FullshardError, named_ranks
from fullshard.layout.offsets import align
from fullshard.liveness.ring import host_identity
from fullshard.liveness.watchdog import PeerGoneError
from fullshard.policy.switches import switches

ADDRESS_NBYTES = 512  # of the addresses that ranks exchange to connect
_ALIGNMENT = 64  # bytes: a tensor starts on a cache line
_CONNECT_S = 60.0  # ranks connect at the same time, so a longer wait does not help
_GREETING_S = 5.0  # timeout for the greeting of an unknown process
_MESSAGE_NBYTES = 1024  # more than the size of any message
_HEAD = struct.Struct("<BIQQQ")  # kind, block, collective, tag, and a number that depends on the kind
_HELLO = struct.Struct("<i16s")  # rank, and the token of the one that listens
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PATIENCE_S = 1.0  # maximum wait for a block to be read, before a new one is allocated
_POLL_S = 1.0  # interval at which a waiting rank checks whether to continue
_FULL_MS = 10  # maximum wait for space in a socket, before checking for messages again

_BLOCK, _DROP, _PUBLISH, _READ, _SIGNAL = range(5)  # new block; dropped block; published data; data was read; progress


def nbytes_end_to_end(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of one buffer for `tensors`, with the layout of `MappedMemory.tensors_like`."""
    return sum(align(tensor.nbytes, _ALIGNMENT) for tensor in tensors)


class MappedMemory:
    """Shared memory of several ranks, as mapped by this process."""

    def __init__(self, whole: Tensor, ranks: int) -> None:
        self.nbytes = whole.nbytes
        self._typed = {torch.uint8: whole}
        self._ranks = ranks
        self.note_purpose("messages")

    @classmethod
    def mapped(cls, descriptor: int, nbytes: int, ranks: int) -> MappedMemory:
        """Map the memory of an anonymous file, given its descriptor."""
        with torch.inference_mode(False):  # writable both in inference mode and outside of it
            return cls(torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8), ranks)

    def note_purpose(self, purpose: str) -> None:
        """Record that the memory is used for `purpose`, see `tape.recorder.allocating`."""
        accelerator_for(self._typed[torch.uint8].device).note_shared(self.storage, self._ranks, purpose)

    def tensors_like(self, tensors: Sequence[Tensor], byte_offset: int = 0) -> list[Tensor]:
        """Return 1-D tensors of the sizes and dtypes of `tensors`, laid out contiguously from `byte_offset`."""
        views = []
        for tensor in tensors:
            start = byte_offset // tensor.itemsize
            views.append(self._of_dtype(tensor.dtype)[start : start + tensor.numel()])
            byte_offset += align(tensor.nbytes, _ALIGNMENT)
        return views

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage of all of the memory."""
        return self._typed[torch.uint8].untyped_storage()

    def _of_dtype(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._typed:
            with torch.inference_mode(False):
                self._typed[dtype] = self._typed[torch.uint8].view(dtype)
        return self._typed[dtype]


Key = tuple[int, int]
"""The key of a message: the number of a collective of the group, and a tag."""


@dataclass(eq=False)
class SharedBlock:
    """Memory that this rank writes and its peers read."""

    number: int
    memory: MappedMemory
    readers: int = 0  # number of peers that have not acknowledged reading it
    about: Key | None = None  # the key that was published last
    is_due: bool = False  # the peers can read it without further data from this rank


@dataclass(frozen=True)
class Published:
    """The memory and offset of data that a peer has published."""

    rank: int
    block: int
    memory: MappedMemory
    byte_offset: int

    def tensors_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return its data as 1-D tensors of the sizes and dtypes of `tensors`."""
        return self.memory.tensors_like(tensors, self.byte_offset)


@dataclass(eq=False)
class _HostPeer:
    rank: int
    socket: socket.socket
    ended: bool = False
    blocks: dict[int, MappedMemory] = field(default_factory=dict)
    published: dict[Key, Published] = field(default_factory=dict)
    signals: set[Key] = field(default_factory=set)
    fingerprints: deque[bytes] = field(default_factory=deque)


class HostPeers:
    """The other ranks of a group, all of them on this host. Ranks are numbered as in the group."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self._timeout_s = timeout_s
        self._others = {peer: _HostPeer(peer, connection) for peer, connection in sorted(sockets.items())}
        self._by_descriptor = {other.socket.fileno(): other for other in self._others.values()}
        self._epoll = select.epoll()
        for descriptor, other in self._by_descriptor.items():
            other.socket.setblocking(False)
            self._epoll.register(descriptor, select.EPOLLIN)
        self._blocks: dict[int, SharedBlock] = {}
        self._made = 0
        self._acts: dict[Key, Callable[[], None]] = {}
        self._failure: FullshardError | None = None
        _open.add(self)

    # -- this rank's blocks -------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[SharedBlock]:
        """This rank's blocks."""
        return list(self._blocks.values())

    def take(self, nbytes: int, *, patiently: bool = False) -> SharedBlock:
        """Return a block of at least `nbytes`, with undefined contents. It is free again once all peers have read it.

        Args:
            patiently: whether to wait briefly for a block that is being read before allocating a new one.
        """
        self._receive_all()
        large = [block for block in self._blocks.values() if block.memory.nbytes >= nbytes]
        if patiently and any(block.is_due for block in large):
            deadline = monotonic() + _PATIENCE_S
            while all(block.readers for block in large) and self._receive(deadline - monotonic()):
                pass
        fitting = [block for block in large if not block.readers]
        free = [block for block in self._blocks.values() if not block.readers]
        if fitting:
            block = min(fitting, key=lambda candidate: candidate.memory.nbytes)
        else:
            if free:  # replace a block that is too small
                self._drop(min(free, key=lambda candidate: candidate.memory.nbytes))
            block = self._new_block(nbytes)
            self._blocks[block.number] = block
        block.readers, block.is_due = len(self._others), False
        return block

    def _new_block(self, nbytes: int) -> SharedBlock:
        number, self._made = self._made, self._made + 1
        return self._shared_block(number, align(max(nbytes, 1), mmap.PAGESIZE))

    def _shared_block(self, number: int, nbytes: int) -> SharedBlock:
        descriptor = os.memfd_create("fullshard")
        try:
            os.ftruncate(descriptor, nbytes)
            block = SharedBlock(number, MappedMemory.mapped(descriptor, nbytes, len(self._others) + 1))
            for other in self._others.values():
                self._send(other, _HEAD.pack(_BLOCK, number, 0, 0, nbytes), _DESCRIPTOR.pack(descriptor))
        finally:
            os.close(descriptor)
        return block

    def drop_free(self) -> None:
        """Free all blocks that are not in use."""
        self._receive_all()
        for block in [block for block in self._blocks.values() if not block.readers]:
            self._drop(block)

    def _drop(self, block: SharedBlock) -> None:
        del self._blocks[block.number]
        for other in self._others.values():
            self._send(other, _HEAD.pack(_DROP, block.number, 0, 0, 0))

    # -- publishing, and reading what is published --------------------------------------------------------------------

    def publish(
        self, key: Key, block: SharedBlock, byte_offsets: Mapping[int, int] | None = None, fingerprint: bytes = b""
    ) -> None:
        """Notify every peer that the data of `key` is in `block`, at the peer's offset in `byte_offsets`.

        Args:
            fingerprint: sent along; the peers get it with `next_fingerprints`.
        """
        block.about = key
        for other in self._others.values():
            byte_offset = byte_offsets[other.rank] if byte_offsets else 0
            self._send(other, _HEAD.pack(_PUBLISH, block.number, *key, byte_offset) + fingerprint)

    def published(self, key: Key) -> list[Published]:
        """Wait for the data of all peers for `key`, and return it. Call `have_read` after reading it."""
        self._wait_for_all(lambda other: key in other.published)
        return [other.published.pop(key) for other in self._others.values()]

    def have_all_published(self, key: Key) -> bool:
        """Return True if all peers have published data for `key`, so that `published` does not wait."""
        self._receive_all()
        return all(key in other.published for other in self._others.values())

    def have_read(self, published: Iterable[Published]) -> None:
        """Notify the publishers that their blocks are free again."""
        for one in published:
            self._send(self._others[one.rank], _HEAD.pack(_READ, one.block, 0, 0, 0))

    def signal(self, key: Key, fingerprint: bytes = b"") -> None:
        """Notify every peer that this rank has reached `key`.

        Args:
            fingerprint: sent along; the peers get it with `next_fingerprints`.
        """
        for other in self._others.values():
            self._send(other, _HEAD.pack(_SIGNAL, 0, *key, 0) + fingerprint)

    def when_signalled(self, key: Key, act: Callable[[], None]) -> None:
        """Call `act` as soon as this rank is notified that every peer has reached `key`."""
        self._receive_all()
        self._acts[key] = act
        self._act(key)

    def _act(self, key: Key) -> None:
        if key in self._acts and all(key in other.signals for other in self._others.values()):
            for other in self._others.values():
                other.signals.remove(key)
            self._acts.pop(key)()

    def await_signals(self, key: Key) -> None:
        """Wait until every peer has reached `key` and the registered action has run."""
        self._wait_for_all(lambda other: key not in self._acts or key in other.signals)

    def rank_shared(self, sizes: Sequence[int], collective: int) -> list[MappedMemory]:
        """Allocate memory of `sizes` bytes that all ranks share, in the collective of this number.

        It is freed when no rank uses it anymore.
        """
        memories = self._rank_shared(sizes, collective)
        for memory in memories:
            memory.note_purpose("unsharded parameters")
        return memories

    def _rank_shared(self, sizes: Sequence[int], collective: int) -> list[MappedMemory]:
        if self.rank == 0:
            blocks = [self._new_block(nbytes) for nbytes in sizes]
            for i, block in enumerate(blocks):
                self.publish((collective, i), block)
            return [block.memory for block in blocks]
        first = self._others[0]
        keys = [(collective, i) for i in range(len(sizes))]
        self._wait_for_all(lambda other: other is not first or all(key in first.published for key in keys))
        published = [first.published.pop(key) for key in keys]
        return [first.blocks.pop(one.block) for one in published]

    def next_fingerprints(self) -> dict[int, bytes]:
        """Wait for every peer's next fingerprint, and return them by rank."""
        self._wait_for_all(lambda other: bool(other.fingerprints))
        return {rank: other.fingerprints.popleft() for rank, other in self._others.items()}

    # -- messages -----------------------------------------------------------------------------------------------------

    def end_wait(self, failure: FullshardError) -> None:
        """Make the current wait, in another thread, and all later waits raise `failure`."""
        self._failure = failure

    def _wait_for_all(self, has_arrived: Callable[[_HostPeer], bool]) -> None:
        deadline = monotonic() + self._timeout_s
        while missing := [other for other in self._others.values() if not has_arrived(other)]:
            if self._failure is not None:
                raise self._failure
            for other in missing:
                if other.ended:
                    raise PeerGoneError(other.rank)
            if not self._receive(deadline - monotonic()) and monotonic() >= deadline:
                raise self._too_late([other.rank for other in missing])

    def _too_late(self, ranks: Sequence[int]) -> dist.DistError:
        return dist.DistError(
            f"Timed out: rank {self.rank} of the process group has waited for its {named_ranks(ranks)} for "
            f"{self._timeout_s:g} s, the group's timeout."
        )

    def _receive_all(self) -> None:
        while self._receive(0):
            pass

    def _receive(self, timeout_s: float) -> bool:
        """Process one message of each peer that has sent some, or wait for one. Return True if any arrived."""
        ready = self._epoll.poll(min(max(0.0, timeout_s), _POLL_S))
        for descriptor, _ in ready:
            self._take_message(self._by_descriptor[descriptor])
        return bool(ready)

    def _take_message(self, other: _HostPeer) -> None:
        try:
            message, ancillary, _, _ = other.socket.recvmsg(_MESSAGE_NBYTES, socket.CMSG_SPACE(_DESCRIPTOR.size))
        except BlockingIOError:  # it was taken while the socket had no space to send
            return
        except ConnectionError:
            message, ancillary = b"", []
        if not message:
            other.ended = True
            self._epoll.unregister(other.socket)
            return
        kind, number, collective, tag, value = _HEAD.unpack_from(message)
        if kind == _BLOCK:
            [descriptor] = _DESCRIPTOR.unpack(ancillary[0][2])
            try:
                other.blocks[number] = MappedMemory.mapped(descriptor, value, len(self._others) + 1)
            finally:
                os.close(descriptor)
        elif kind == _DROP:
            del other.blocks[number]
        elif kind == _PUBLISH:
            other.published[collective, tag] = Published(other.rank, number, other.blocks[number], value)
            if len(message) > _HEAD.size:
                other.fingerprints.append(message[_HEAD.size :])
        elif kind == _SIGNAL:
            other.signals.add((collective, tag))
            if len(message) > _HEAD.size:
                other.fingerprints.append(message[_HEAD.size :])
            self._act((collective, tag))
        else:
            self._blocks[number].readers -= 1

    def _send(self, other: _HostPeer, message: bytes, descriptor: bytes | None = None) -> None:
        ancillary = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)]
        deadline = monotonic() + self._timeout_s
        while True:
            try:
                other.socket.sendmsg([message], ancillary)
                return
            except BlockingIOError:  # the socket is full. The peer may be waiting for this rank to receive
                if not self._receive(0) and monotonic() >= deadline:
                    raise self._too_late([other.rank]) from None
                poll = select.poll()
                poll.register(other.socket, select.POLLOUT)
                poll.poll(_FULL_MS)
            except ConnectionError:
                return  # the peer has ended. Its earlier messages are still received

    def close(self) -> None:
        """Close the connections. For the peers this looks like the end of this rank."""
        self._epoll.close()
        for other in self._others.values():
            other.socket.close()


_open: weakref.WeakSet[HostPeers] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process, such as a worker of a data loader."""
    for peers in list(_open):
        peers.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# -- how ranks connect ------------------------------------------------------------------------------------------------


class CannotShareError(Exception):
    """The ranks of a group cannot share memory, for the reason in the message."""


def connect(rank: int, exchange: Callable[[bytes], Sequence[bytes]], timeout_s: float) -> HostPeers:
    """Connect to this rank's peers. All ranks of the group must call it, and all of them succeed or raise.

    Args:
        rank: this rank.
        exchange: all-gathers a message of `ADDRESS_NBYTES` bytes, in rank order. Called at most twice.
        timeout_s: the timeout of later waits, in seconds.

    Raises:
        CannotShareError: the ranks are on several hosts, or one of them cannot share memory or has disabled this.
    """
    with ExitStack() as listening:
        listener, address = _listen(listening)
        addresses = [_Address(**json.loads(published)) for published in exchange(address.published())]
        _check_obstacles(one.obstacle for one in addresses)
        hosts = {one.host for one in addresses}
        _check_obstacles([f"they are on {len(hosts)} hosts" if len(hosts) > 1 else ""])
        sockets: dict[int, socket.socket] = {}
        failure = ""
        try:
            assert listener is not None
            _connect_all(sockets, listener, addresses, rank)
        except OSError as error:
            failure = f"rank {rank} could not connect: {error}"
        try:
            _check_obstacles(
                _Address(**json.loads(published)).obstacle
                for published in exchange(_Address(obstacle=failure).published())
            )
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
    return HostPeers(rank, sockets, timeout_s)


def address_of_none(obstacle: str) -> bytes:
    """Return the message of a rank that does not connect, for the first exchange of `connect`."""
    return _Address(obstacle=obstacle).published()


def _check_obstacles(obstacles: Iterable[str]) -> None:
    obstacle = next(filter(None, obstacles), "")
    if obstacle:
        raise CannotShareError(obstacle)


@dataclass(frozen=True)
class _Address:
    """The address at which a rank listens, or why it does not."""

    host: str = ""
    name: str = ""  # visible to other processes
    token: str = ""  # known only to the ranks of the group
    obstacle: str = ""

    def published(self) -> bytes:
        """Return the bytes that the peers receive, `ADDRESS_NBYTES` of them."""
        short = {**vars(self), "obstacle": self.obstacle.encode("ascii", "replace").decode()[:200]}
        return json.dumps(short).encode().ljust(ADDRESS_NBYTES)


def _listen(stack: ExitStack) -> tuple[socket.socket | None, _Address]:
    """Return a socket that listens until `stack` is closed, and its address."""
    if not switches.shares_memory_between_ranks:
        return None, _Address(obstacle="it is switched off")
    if sys.platform != "linux":
        return None, _Address(obstacle=f"it is not possible on {sys.platform}")
    name = f"\0fullshard-{secrets.token_hex(16)}"
    try:
        os.close(os.memfd_create("fullshard"))  # sandboxes may forbid it, and C libraries may lack it
        host = host_identity()
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(name)
        listener.listen(socket.SOMAXCONN)
    except (OSError, AttributeError) as error:
        return None, _Address(obstacle=str(error))
    return listener, _Address(host, name, secrets.token_hex(8))


def _user_of(connection: socket.socket) -> int:
    """Return the user that owns the process at the other end, or the listening process, as reported by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def _connect_all(
    sockets: dict[int, socket.socket], listener: socket.socket, addresses: Sequence[_Address], rank: int
) -> None:
    """Connect to every other rank, and add the connections to `sockets`: connect to lower ranks, accept higher ones."""
    for peer in range(rank):
        sockets[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_CONNECT_S)
        connection.connect(addresses[peer].name)
        if _user_of(connection) != os.geteuid():  # the rank has ended, and its name was taken
            raise OSError(f"the socket of rank {peer} belongs to another user")
        connection.sendall(_HELLO.pack(rank, addresses[peer].token.encode()))
    listener.settimeout(_CONNECT_S)
    while len(sockets) < len(addresses) - 1:
        connection, _ = listener.accept()
        if _user_of(connection) != os.geteuid():  # any user can connect: do not wait for its message
            connection.close()
            continue
        connection.settimeout(_GREETING_S)
        hello = b""
        with suppress(OSError):
            hello = connection.recv(_HELLO.size)
        peer, token = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (rank, b"")
        if secrets.compare_digest(token, addresses[rank].token.encode()):
            sockets[peer] = connection
        else:
            connection.close()  # a stranger
