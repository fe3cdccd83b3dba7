"""`hdet watch`: the live page of runs, served to this machine only and updated every second."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hdet._report.page import page, run_data, version
from hdet._report.run import Run
from hdet.records.terminal import say

_ADDRESS = "127.0.0.1"
_VERSION = re.compile(r"(?:([0-9]{1,15}):([0-9]{1,15}):[0-9]{1,15})?")  # empty: a page that has nothing yet


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line instead of a traceback; nothing if a page was closed before its answer arrived."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            say(f"hdet: error: {type(error).__name__}: {error}", sys.stderr)


class Watch:
    """A server for the page of some runs, on 127.0.0.1.

    Args:
        runs: the runs to watch; they need not have started.
        port: 0 for any free one.

    Attributes:
        url: where the page is.
        address: what it is served on: host and port.
    """

    def __init__(self, runs: Sequence[Run], port: int = 0) -> None:
        self._runs = list(runs)
        self._lock = threading.Lock()  # runs are read by one request at a time
        self._server = _Server((_ADDRESS, port), self._handler())
        self.address = self._server.server_address[:2]
        self.url = f"http://{_ADDRESS}:{self.address[1]}/"

    def serve(self) -> None:
        """Answer until `close()`, or Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def close(self) -> None:
        """Stop serving, from another thread."""
        self._server.shutdown()

    def page(self) -> str:
        """The page as it is now."""
        with self._lock:
            for run in self._runs:
                run.follow()
            return page([run_data(run) for run in self._runs], live=True)

    def news(self, have: Sequence[str]) -> list[dict[str, Any] | None]:
        """The updates for a page, by run; `have` lists the version of each that the page has."""
        with self._lock:
            for run in self._runs:
                run.follow()
            return [
                None if told == version(run, time.time()) else run_data(run, _since(run, told))
                for run, told in zip(self._runs, have, strict=True)
            ]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        watch = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # A page elsewhere that has this address under a name of its own must not read the runs.
                port = watch.address[1]
                if self.headers.get("Host") not in (f"{_ADDRESS}:{port}", f"localhost:{port}"):
                    self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for 127.0.0.1")
                    return
                try:
                    url = urlsplit(self.path)
                    have = _versions(url.query, len(watch._runs))
                except ValueError as error:
                    self._answer(HTTPStatus.BAD_REQUEST, "text/plain", str(error))
                    return
                try:
                    if url.path == "/":
                        self._answer(HTTPStatus.OK, "text/html", watch.page())
                    elif url.path == "/data":
                        self._answer(
                            HTTPStatus.OK, "application/json", json.dumps({"runs": watch.news(have)}, allow_nan=False)
                        )
                    else:
                        self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and nothing else")
                except (OSError, ValueError, ArithmeticError) as error:
                    self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

            def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing: a line per second is no log."""

        return Handler


def _versions(query: str, runs: int) -> list[str]:
    """The versions that a page has, one for each run; empty ones if it has none, or those of other runs.

    Raises:
        ValueError: for what no page asks.
    """
    have = parse_qs(query).get("have", [""])[0].split(",")
    if not all(_VERSION.fullmatch(told) for told in have):
        raise ValueError("have must be a version for each run, such as 1:20:3735928559")
    return have if len(have) == runs else [""] * runs


def _since(run: Run, version: str) -> int:
    """The number of current rounds that a page already has."""
    match = _VERSION.fullmatch(version)
    known = match is not None and match[1] == str(run.generation) and int(match[2]) <= len(run.lines)
    return int(match[2]) if match is not None and known else 0
