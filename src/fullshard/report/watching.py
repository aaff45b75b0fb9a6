"""The page of a run in progress, which is served on localhost only and rewritten when there is new data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from fullshard.report.page import DATA, PAGE, TRACE

HERE = "127.0.0.1"
_KINDS = {
    f"/{PAGE}": "text/html; charset=utf-8",
    f"/{DATA}": "application/json",
    f"/{TRACE}": "application/gzip",
}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Context manager that serves the page in `folder` and its files on a free port, and yields the address.

    Only this machine can reach the server, and it only serves the page, its data and its trace. Requests for another
    host name are rejected, because other pages in the same browser could make them.
    """
    server = ThreadingHTTPServer((HERE, 0), _handler(folder))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="report", daemon=True)
    thread.start()
    try:
        yield f"http://{HERE}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def follow(state: Callable[[], object], write: Callable[[], object], remaining: Callable[[], bool]) -> None:
    """Call `write` whenever `state` has changed. Call `remaining` between checks, until it returns False."""
    visited = state()
    while remaining():
        now = state()
        if now != visited:
            write()
            visited = now


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = f"/{PAGE}" if self.path == "/" else self.path
            if self.headers.get("Host", "").rpartition(":")[0] != HERE:
                self.send_error(HTTPStatus.FORBIDDEN)
            elif name == "/version":
                self._answer(str((folder / PAGE).stat().st_mtime_ns).encode(), "text/plain")
            elif name in _KINDS and (folder / name[1:]).is_file():
                self._answer((folder / name[1:]).read_bytes(), _KINDS[name])
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, content: bytes, kind: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    return Handler
