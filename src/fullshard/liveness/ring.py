"""A ring of connections, from each rank to the next, to detect the end of a process immediately.

The system closes a connection when its process ends for any reason, and detects when a host no longer responds. Only a
greeting and a farewell are sent, so a slow rank is never considered lost.

[Note: where a rank listens]
Only the previous rank connects. If it is on the same host, the socket is bound to the loopback address, and other hosts
cannot reach it. Otherwise it is bound to the address that this host uses to reach the store. So ranks first exchange
their hosts through the store. A connection that does not begin with the token from the store is closed. Any user of the
host can connect, so the ring never waits for a message of a connection: it polls for the token.
"""

from __future__ import annotations

import errno
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from time import monotonic

from fullshard.liveness.store import PatientStore

_FAREWELL = b"."
_PATIENCE_S = 5.0  # for one connection to be made, and for its token
_MOST_STRANGERS = 64  # maximum number of connections without a token; the oldest is closed for a new one
_BACKLOG = 1024
_IDLE_S, _PROBE_S = 2, 1  # the system probes after 2 s without data from the other host, then every second
_LOOPBACK = "127.0.0.1"
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # errors of the system if a host does not answer


def host_identity() -> str:
    """Return text that identifies the kernel and network namespace, whose processes share a loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


class Ring:
    """This rank's position in the ring.

    Args:
        store: The store to exchange addresses. It is not used after `join()` has returned True.
        rank: This rank.
        world: The number of ranks.
        silence_s: The seconds without a response from a host before it is considered lost, at most 127.
        way: The host and port of a server that all ranks can reach. None means this host.
    """

    def __init__(
        self, store: PatientStore, rank: int, world: int, *, silence_s: int, way: tuple[str, int] | None = None
    ) -> None:
        self.previous = (rank - 1) % world
        self.previous_is_silent = False  # whether it was lost because its host does not answer
        self._store = store
        self._silence_s = silence_s
        self._way = way
        self._rank = rank
        self._next = (rank + 1) % world
        self._token = secrets.token_hex(16).encode()
        self._server: socket.socket | None = None
        self._to_next: socket.socket | None = None
        self._from_previous: socket.socket | None = None
        self._strangers: dict[socket.socket, float] = {}  # accepted, without a token so far, and their deadlines
        self._host = ""  # unknown
        with suppress(OSError):
            self._host = host_identity()
        store.set(_host_key(rank), self._host)

    def join(self) -> bool:
        """Make the connections that are possible now. Return True once both neighbors are connected."""
        if self._server is None and self._store.check([_host_key(self.previous)]):
            self._listen(self._store.get(_host_key(self.previous)).decode())
        if self._to_next is None and self._store.check([_key(self._next)]):
            host, port, token = self._store.get(_key(self._next)).decode().split()
            try:
                connection = socket.create_connection((host, int(port)), timeout=_PATIENCE_S)
            except ConnectionRefusedError:
                if host != _LOOPBACK:
                    raise
                return False  # no firewall refuses here: the next rank has left since it published its address
            _find_silence(connection, self._silence_s)
            connection.sendall(token.encode())
            self._to_next = connection
        if self._from_previous is None and self._server is not None:
            self._accept(self._server)
        return self._to_next is not None and self._from_previous is not None

    def _listen(self, host_of_previous: str) -> None:
        """Listen at an address for the previous rank, and publish it. See [Note: where a rank listens]."""
        is_here = bool(self._host) and host_of_previous == self._host
        address = _LOOPBACK if is_here else _own_address(self._way)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._server.setblocking(False)
        self._store.set(_key(self._rank), f"{address} {self._server.getsockname()[1]} {self._token.decode()}")

    def _accept(self, server: socket.socket) -> None:
        """Accept connections, and keep the one that has sent the token. Does not wait."""
        with suppress(BlockingIOError):
            for _ in range(_BACKLOG):
                connection, _ = server.accept()
                connection.setblocking(False)
                self._strangers[connection] = monotonic() + _PATIENCE_S
                self._greet_strangers()
                if len(self._strangers) > _MOST_STRANGERS:
                    self._close_stranger(next(iter(self._strangers)))
        self._greet_strangers()

    def _greet_strangers(self) -> None:
        """Keep the connection that sent the token. Only complete ones are compared, so parts cannot be guessed."""
        for connection, deadline in list(self._strangers.items()):
            token = _received(connection, len(self._token))
            if self._from_previous is None and secrets.compare_digest(token or b"", self._token):
                connection.recv(len(self._token))
                _find_silence(connection, self._silence_s)
                self._from_previous = connection
                del self._strangers[connection]
            elif token is None or len(token) == len(self._token) or self._from_previous or monotonic() > deadline:
                self._close_stranger(connection)

    def _close_stranger(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        with suppress(OSError):
            connection.recv(len(self._token))  # otherwise closing would reset the connection
        connection.close()

    def lost_previous(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds. Return True if the previous rank's process ended without a farewell."""
        if self._from_previous is None:
            return False
        self._from_previous.settimeout(timeout_s)
        try:
            farewell = self._from_previous.recv(1)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # `timeout_s` has passed
                return False
            self.previous_is_silent = error.errno in _SILENT
            farewell = b""
        self._from_previous.close()
        self._from_previous = None
        return farewell != _FAREWELL

    @property
    def watches(self) -> bool:
        """True if the previous rank is connected, so that its loss is detected."""
        return self._from_previous is not None

    def leave(self, *, farewell: bool) -> None:
        """Close the connections. Without a farewell, the next rank considers this rank lost."""
        for connection in self._connections:
            with suppress(OSError):
                if farewell and connection is self._to_next:
                    connection.sendall(_FAREWELL)
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        self.forget()

    def forget(self) -> None:
        """Close the descriptors of this process only. In a forked process, the connections of its parent stay open."""
        for connection in self._connections:
            with suppress(OSError):
                connection.close()

    @property
    def _connections(self) -> list[socket.socket]:
        found = (self._to_next, self._from_previous, self._server, *self._strangers)
        return [connection for connection in found if connection is not None]


def _key(rank: int) -> str:
    return f"ring/{rank}"


def _host_key(rank: int) -> str:
    return f"ring/host/{rank}"


def _own_address(way: tuple[str, int] | None) -> str:
    """Return the address of this host for other ranks: the local end of a connection to `way`."""
    host, port = way or (socket.gethostname(), 9)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _received(connection: socket.socket, nbytes: int) -> bytes | None:
    """Return up to `nbytes` that have arrived, without removing them; None if the connection is closed."""
    try:
        return connection.recv(nbytes, socket.MSG_PEEK) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None


def _find_silence(connection: socket.socket, silence_s: int) -> None:
    """Make the system close `connection` when the other host has not answered for `silence_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    for option, value in zip(options, (_IDLE_S, _PROBE_S, silence_s // _PROBE_S), strict=True):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
