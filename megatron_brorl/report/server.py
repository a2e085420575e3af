"""A report that follows a running run: served on this machine alone, made anew when a file of the run has changed."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.report.page import MOST_MB, page_content, plain, render
from megatron_brorl.report.run_files import stamp

ADDRESS = "127.0.0.1"
PORT = 8765


class Source:
    """The content of the page, as new as the files."""

    def __init__(self, folders: Sequence[Path], megabytes: float = MOST_MB) -> None:
        self._folders, self._megabytes = list(folders), megabytes
        self._lock = threading.Lock()  # one reader of the files at a time
        self._stamp = ""
        self._content: dict[str, Any] = {}

    def now(self) -> tuple[str, dict[str, Any]]:
        """(stamp, content): with the same stamp the content is the same. Raises UserError as page_content."""
        with self._lock:
            found = stamp(self._folders)
            if found != self._stamp:
                self._content, self._stamp = page_content(self._folders, self._megabytes), found
            return self._stamp, self._content


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed meanwhile is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    source: Source
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        # A name that somebody else lets point here must not read the page (DNS rebinding).
        host, _, port = self.headers.get("Host", "").partition(":")
        if host not in (ADDRESS, "localhost") or port not in ("", str(self.server.server_port)):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"ask for http://{ADDRESS}:{self.server.server_port}/\n")
            return
        try:
            if self.path == "/":
                self._send(HTTPStatus.OK, "text/html", render(self.source.now()[1], live=True))
            elif self.path == "/content":
                self._changes()
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "no such page\n")
        except UserError as e:  # a file that was whole a moment ago
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{e}\n")

    def _changes(self) -> None:
        found, content = self.source.now()
        tag = f'"{hash(found):x}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, "application/json", "", tag)
            return
        self._send(HTTPStatus.OK, "application/json", json.dumps(plain({**content, "live": True})), tag)

    def _send(self, status: HTTPStatus, kind: str, text: str, tag: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a page that asks every few seconds would fill the terminal."""


def open_server(folders: Sequence[Path], port: int, megabytes: float = MOST_MB) -> ThreadingHTTPServer:
    """A server that listens, to be run by serve_forever; port 0: any that is free.

    Raises UserError where the port cannot be had, or a folder holds no run.
    """
    source = Source(folders, megabytes)
    source.now()  # a mistake is told before anything listens
    handler = type("Handler", (_Handler,), {"source": source})
    try:
        return _Server((ADDRESS, port), handler)
    except OverflowError:
        raise UserError(f"--port {port}: must be in [0, 65535]") from None
    except OSError as e:
        why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be listened on: {e.strerror}"
        raise UserError(f"--port {port}: {why}; give another, or 0 for any that is free") from None
