"""One self-contained page: the data of some runs, the script that draws them, and nothing from the network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import time
import zlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from hdet._report.columns import MOST_REPLICAS, columns, events, points
from hdet._report.run import Run
from hdet._report.search import find_search, where
from hdet._report.summary import summary

_MOST_LOSSES = 20_000  # lines of the lab's losses to draw


def version(run: Run, now: float) -> str:
    """A text that changes when there is something new to show: generation, rounds, and a checksum of the rest."""
    rest = json.dumps([run.status(now), run.held_out, len(run.losses), run.search is None, run.notices])
    return f"{run.generation}:{len(run.lines)}:{zlib.crc32(rest.encode())}"


def run_data(run: Run, since: int = 0, now: float | None = None) -> dict[str, Any]:
    """The page's data about a run, with its rounds from `since` on."""
    now = time.time() if now is None else now
    status = run.status(now)
    replicas = len(run.lines[-1]["scores"]) if run.lines else 0
    every = max(1, len(run.losses) // _MOST_LOSSES)
    return {
        "name": run.name,
        "version": version(run, now),
        "since": since,
        "rounds": len(run.lines),
        "replicas": replicas,
        "many": replicas > MOST_REPLICAS,
        "total_steps": run.lines[-1].get("total_steps") if run.lines else None,
        "state": status.state,
        "status": status.text,
        "summary": [*summary(run.lines, status, run.search), *_left_out(run)],
        "search": _search(run),
        "held_out": run.held_out,
        "losses": [list(column) for column in zip(*run.losses[::every], strict=True)] or [[], [], []],
        "events": events(run.lines, since),
        "columns": columns(run.lines, since),
        "points": points(run.lines, since),
    }


def page(runs: Sequence[dict[str, Any]], *, live: bool = False, chosen: int | None = None) -> str:
    """The page of some runs, as HTML.

    The data cannot become part of the page: they are embedded as base64 and shown as text only, and the content
    security policy allows no scripts but the three inserted here.

    Args:
        runs: from `run_data`.
        live: ask the server for more.
        chosen: the index of the round whose line search is shown first; by default the last.
    """
    data = {"runs": list(runs), "live": live, "chosen": chosen}
    packed = gzip.compress(json.dumps(data, allow_nan=False, separators=(",", ":")).encode(), 5, mtime=0)
    scripts = [_asset(name) for name in ("uPlot.iife.min.js", "charts.js", "page.js")]
    style = _asset("uPlot.min.css") + _asset("page.css")
    title = ", ".join(run["name"] for run in runs)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {_hash(style)}",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "POLICY": html.escape(policy, quote=False),  # single quotes are its syntax, and the attribute has double ones
        "TITLE": html.escape(title[:200]),
        "STYLE": style,
        "DATA": base64.b64encode(packed).decode(),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    text = _asset("page.html")
    for name, part in parts.items():
        before, mark, after = text.partition(f"<!--{name}-->")
        assert mark, name
        text = before + part + after
    return text


def write_page(
    runs: Sequence[Run], path: str | os.PathLike[str], chosen: int | None = None
) -> list[list[dict[str, str]]]:
    """Write the page of some runs to a file; return the summaries at its top."""
    told = [run_data(run) for run in runs]
    text = page(told, chosen=chosen)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return [run["summary"] for run in told]


def _search(run: Run) -> dict[str, Any] | None:
    """The search before the first step, with a sentence about its picture."""
    found = find_search(run.lines, run.search)
    return None if found is None else {**found, "where": where(found)}


def _left_out(run: Run) -> list[dict[str, str]]:
    return [{"title": "Left out", "text": "\n".join(run.notices), "tone": "bad"}] if run.notices else []


def _asset(name: str) -> str:
    return (resources.files("hdet._report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
