"""Builds the site: README, guides, measurements and examples where their links expect them, and the API's reference.

    make docs        # into site/; needs no network, and a broken link is an error

The pages are collected in build/pages, as they lie in the repository, so that each link works here and there.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import hdet

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
COPIED = (
    "*.md", "LICENSE", "docs/*.md", "docs/*.png", "examples/*", "benchmarks/*.py", "benchmarks/peers/*.py",
    "benchmarks/results/*.md", "benchmarks/results/*.png",
)  # fmt: skip
SECTIONS = {
    "Training": (
        "Ensemble", "OneCycleAutoLR", "Averaging", "Nesterov", "Safety", "Rollback", "Limits", "LostReplicaError",
        "warm_init",
    ),
    "What is explored": (
        "learning_rate", "weight_decay", "momentum", "dropout", "attribute", "scalar", "Scalar", "Hyperparameter",
    ),
    "The rate before the run": ("find_lr", "FoundRate", "FindLRError"),
    "Probes and controllers": (
        "Probe", "Auto",
        *(f"controllers.{name}" for name in (
            "LineSearch", "Slope", "Softmax", "Fixed", "Controller", "Plan", "Report", "Observation",
        )),
    ),
    "Checkpoints": ("save", "load", "checkpoint.Checkpoint", "checkpoint.replica_key"),
    "Records": (
        "JSONLines", "Progress",
        *(f"records.{name}" for name in (
            "RoundRecord", "HyperparameterRecord", "SearchRecord", "read_records", "describe", "metrics",
            "make_schedule", "ReplayLR",
        )),
    ),
    "Replicas": ("in_process", "data_parallel", "find_replicas", "ReplicaError"),
}  # fmt: skip


PACKAGES = ("checkpoint", "controllers", "records")
INTEGRATIONS = (
    "lightning.HDETCallback", "transformers.HDETCallback", "accelerate.find_lr", "accelerate.save_state",
    "accelerate.load_state",
)  # fmt: skip


def collect() -> None:
    """Copy what the site is made of."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file():
                target = PAGES / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    (PAGES / "api.md").write_text(reference())


def reference() -> str:
    """A page with everything that is public, from its docstrings."""
    listed = [name for names in SECTIONS.values() for name in names]
    if set(listed) != public() or len(listed) != len(public()):
        raise SystemExit(f"docs/build.py: put each public name into SECTIONS once: {set(listed) ^ public() or listed}")
    sections = {title: [_place(name) for name in names] for title, names in SECTIONS.items()}
    sections["Trackers"] = [f"hdet.records.trackers.{name}" for name in hdet.records.trackers.__all__]
    sections["Integrations"] = [f"hdet.integrations.{name}" for name in INTEGRATIONS]
    about = "Everything public, after `import hdet`. Integrations have modules of their own."
    text = ["# API", "", about, ""]
    for title, names in sections.items():
        text += [f"## {title}", "", *(f"::: {name}\n" for name in names)]
    return "\n".join(text)


def public() -> set[str]:
    """Every public name once, as it is written after `hdet.`."""
    names = {name for name in hdet.__all__ if name not in PACKAGES}
    for package in PACKAGES:
        inside = getattr(hdet, package).__all__
        names |= {f"{package}.{name}" for name in inside if name not in {*names, "trackers", "OnRound"}}
    return names


def _place(name: str) -> str:
    """Where mkdocstrings finds a public name: a function that is named as its module would be taken for that."""
    module = importlib.util.find_spec(f"hdet.{name}")
    return f"hdet.{name}" if module is None else f"hdet.{name}.{name}"


def main() -> int:
    """Build it; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--into", default=str(ROOT / "site"), help="default: site")
    into = parser.parse_args().into
    collect()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", into]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # --quiet would hide what it counts
    if done.returncode:
        print("\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO")), file=sys.stderr)
        return 1
    print(f"The site is in {into}")
    return 0


def on_page_content(html: str, **_: object) -> str:
    """A hook of mkdocs: docstrings end a sentence before an indented block with two colons, as in reStructuredText."""
    return html.replace("::</p>", ":</p>")


if __name__ == "__main__":
    sys.exit(main())
