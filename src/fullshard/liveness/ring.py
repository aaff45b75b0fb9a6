"""A ring of connections, each rank to the next, so that a process that is gone is noticed at once.

The system closes a connection when its process ends, however it ends, and finds out by itself when a host does not
answer any more. Nothing is sent but a greeting and a farewell, so a rank that is merely slow is never taken for lost.
"""

from __future__ import annotations

import errno
import secrets
import socket
from contextlib import suppress

from fullshard.liveness.store import PatientStore

__all__ = ["Ring"]

_FAREWELL = b"."
_PATIENCE_S = 5.0  # for one connection to be made
_IDLE_S, _PROBE_S = 2, 1  # the system asks after 2 s without a sign of the other host, then every second
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # what the system then says


class Ring:
    """This rank's place in the ring.

    Args:
        store: used by ranks to find one another. Not used after `join()` has returned True.
        rank: this one.
        world: the number of ranks.
        silence_s: seconds that a host may answer nothing before it is taken for lost; 127 at most.
        way: host and port of something that all ranks reach; this host, if None.
    """

    def __init__(
        self, store: PatientStore, rank: int, world: int, *, silence_s: int, way: tuple[str, int] | None = None
    ) -> None:
        self.previous = (rank - 1) % world
        self.previous_is_silent = False  # whether it was lost because its host does not answer
        self._store = store
        self._silence_s = silence_s
        self._next = (rank + 1) % world
        self._token = secrets.token_hex(16).encode()
        self._server = socket.create_server(("", 0))
        self._server.setblocking(False)
        self._to_next: socket.socket | None = None
        self._from_previous: socket.socket | None = None
        address = f"{_own_address(way)} {self._server.getsockname()[1]} {self._token.decode()}"
        store.set(_key(rank), address)

    def join(self) -> bool:
        """Connect as far as is possible now; True once both neighbours are connected.

        Raises:
            OSError: a neighbour's address cannot be reached.
        """
        if self._to_next is None and self._store.check([_key(self._next)]):
            host, port, token = self._store.get(_key(self._next)).decode().split()
            connection = socket.create_connection((host, int(port)), timeout=_PATIENCE_S)
            _find_silence(connection, self._silence_s)
            connection.sendall(token.encode())
            self._to_next = connection
        if self._from_previous is None:
            with suppress(BlockingIOError):
                self._greet(self._server.accept()[0])
        return self._to_next is not None and self._from_previous is not None

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE_S)
        token = b""
        with suppress(OSError):
            token = connection.recv(len(self._token), socket.MSG_WAITALL)
        if secrets.compare_digest(token, self._token):
            _find_silence(connection, self._silence_s)
            self._from_previous = connection
        else:
            connection.close()  # a stranger

    def lost_previous(self, timeout_s: float) -> bool:
        """True if the previous rank's process ended without a farewell; waits up to `timeout_s` seconds for that."""
        if self._from_previous is None:
            return False
        self._from_previous.settimeout(timeout_s)
        try:
            farewell = self._from_previous.recv(1)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # our own time is up, not the system's
                return False
            self.previous_is_silent = error.errno in _SILENT
            farewell = b""
        self._from_previous.close()
        self._from_previous = None
        return farewell != _FAREWELL

    @property
    def watches(self) -> bool:
        """True if the previous rank is connected."""
        return self._from_previous is not None

    def leave(self, *, farewell: bool) -> None:
        """Close the connections; without a farewell the next rank takes this one for lost."""
        for connection in (self._to_next, self._from_previous, self._server):
            if connection is not None:
                with suppress(OSError):
                    if farewell and connection is self._to_next:
                        connection.sendall(_FAREWELL)
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
                with suppress(OSError):
                    connection.close()


def _key(rank: int) -> str:
    return f"ring/{rank}"


def _own_address(way: tuple[str, int] | None) -> str:
    """The address by which other ranks reach this host: the local end of a connection to `way`."""
    host, port = way or (socket.gethostname(), 9)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _find_silence(connection: socket.socket, silence_s: int) -> None:
    """Let the system close `connection` when the other host has answered nothing for `silence_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    for option, value in zip(options, (_IDLE_S, _PROBE_S, silence_s // _PROBE_S), strict=True):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
