"""`hdet watch`: the page of runs that go on, served to this machine only, with what is new every second."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hdet.report.page import page, run_data, version
from hdet.report.run import Run

_ADDRESS = "127.0.0.1"


class Watch:
    """A server for the page of some runs, on 127.0.0.1.

    Args:
        runs: what to watch; they need not have begun.
        port: 0 for any free one.

    Attributes:
        url: where the page is.
    """

    def __init__(self, runs: Sequence[Run], port: int = 0) -> None:
        self._runs = list(runs)
        self._lock = threading.Lock()  # runs are read by one request at a time
        self._server = ThreadingHTTPServer((_ADDRESS, port), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{_ADDRESS}:{self._server.server_address[1]}/"

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
                _refresh(run)
            return page([run_data(run) for run in self._runs], live=True)

    def news(self, have: Sequence[str]) -> list[dict[str, Any] | None]:
        """What a page does not have yet, by run; it says which version of each it has."""
        with self._lock:
            for run in self._runs:
                _refresh(run)
            return [
                None if told == version(run, time.time()) else run_data(run, _since(run, told))
                for run, told in zip(self._runs, have, strict=True)
            ]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        watch = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # A page elsewhere that has this address under a name of its own must not read the runs.
                port = watch._server.server_address[1]
                if self.headers.get("Host") not in (f"{_ADDRESS}:{port}", f"localhost:{port}"):
                    self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for 127.0.0.1")
                    return
                url = urlsplit(self.path)
                try:
                    if url.path == "/":
                        self._answer(HTTPStatus.OK, "text/html", watch.page())
                    elif url.path == "/data":
                        have = parse_qs(url.query).get("have", [""])[0].split(",")
                        have = have if len(have) == len(watch._runs) else [""] * len(watch._runs)
                        self._answer(
                            HTTPStatus.OK, "application/json", json.dumps({"runs": watch.news(have)}, allow_nan=False)
                        )
                    else:
                        self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and nothing else")
                except (OSError, ValueError) as error:
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


def _refresh(run: Run) -> None:
    """Read what is new; a run that has not begun is empty."""
    if run.exists:
        run.refresh()


def _since(run: Run, version: str) -> int:
    """How many rounds a page has of what the run is now."""
    generation, _, rest = version.partition(":")
    rounds = rest.partition(":")[0]
    return (
        int(rounds) if generation == str(run.generation) and rounds.isdigit() and int(rounds) <= len(run.lines) else 0
    )
