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

from hdet.report.page import page, run_data
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
        self._said: list[tuple[Any, ...]] = [()] * len(self._runs)
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
            return page([self._data(run, 0) for run in self._runs], live=True)

    def news(self, have: Sequence[tuple[int, int]]) -> list[dict[str, Any] | None]:
        """What a page does not have yet, by run: it says which generation it has, and how many rounds of it."""
        with self._lock:
            found: list[dict[str, Any] | None] = []
            for run, (generation, rounds) in zip(self._runs, have, strict=True):
                since = rounds if _refreshed(run) == generation else 0
                new = self._data(run, since)
                # The losses of a run are long, and its words are the same most of the time.
                unchanged = since and new["rounds"] == since and generation == run.generation
                found.append(None if unchanged and self._same_words(run, new) else new)
            return found

    def _same_words(self, run: Run, new: dict[str, Any]) -> bool:
        index = self._runs.index(run)
        words = (new["state"], new["status"].partition(": ")[0], new["held_out"])
        same, self._said[index] = self._said[index] == words, words
        return same and new["state"] not in ("stalled", "cut off")  # these say since when

    def _data(self, run: Run, since: int) -> dict[str, Any]:
        _refreshed(run)
        return run_data(run, min(since, len(run.lines)))

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
                        have = _have(parse_qs(url.query).get("have", [""])[0], len(watch._runs))
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


def wait_for(run: Run, seconds: float, every: float = 0.2) -> bool:
    """Whether the file of a run is there, or comes within that time."""
    end = time.monotonic() + seconds
    while not run.path.exists() and time.monotonic() < end:
        time.sleep(every)
    return run.path.exists()


def _refreshed(run: Run) -> int:
    """The generation of a run, read anew; one that has not begun is empty."""
    if run.path.exists():
        run.refresh()
    return run.generation


def _have(text: str, runs: int) -> list[tuple[int, int]]:
    pairs = [part.split(":") for part in text.split(",")]
    if len(pairs) != runs or any(len(pair) != 2 or not all(x.isdigit() for x in pair) for pair in pairs):
        return [(-1, 0)] * runs
    return [(int(generation), int(rounds)) for generation, rounds in pairs]
