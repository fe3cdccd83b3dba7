"""All figures that README and docs show of real training, in parts; a part that was stopped goes on where it was.

    python benchmarks/evidence.py                   # all parts, and what they take
    python benchmarks/evidence.py ablation returns  # these parts
    python benchmarks/evidence.py all               # everything: under 3 hours on 2 cores

ablation    the paper's six rows on text and flights, 3 seeds      results/ablation-TASK-DATE.md and .json
returns     2, 4, 8 and 16 replicas on flights, 3 seeds            results/returns-flights-DATE.md and .json
quality     every method from wrong starts, see quality.py         results/quality-DATE.md, speed-DATE.md, *.png

The runs of the first two are under ./runs/evidence; remove that folder to run them again.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from provenance import DATE, header

HERE = Path(__file__).parent
RUNS = Path("runs/evidence")
SEEDS = 3
LAB = {  # part: name of the result, its title, the command of the lab, the file that it leaves
    "ablation": [
        (f"ablation-{task}", f"The paper's ablation on {task}", ["ablate", task, "--in-process"], "ablate.json")
        for task in ("flights", "text")
    ],
    "returns": [
        (
            "returns-flights",
            "What more replicas bring on flights, line search, its cost charged",
            ["returns", "flights", "--controller", "line_search", "--charge", "--in-process"],
            "returns.json",
        )
    ],
}
QUALITY = (["all", "--workers", "2"], ["pictures"], ["table", "--write"], ["speed", "--write"])
# On 2 cores, of which the first two use one. `quality.py plan --workers 2` says what of it is missing.
MINUTES = {"ablation": 60, "returns": 8, "quality": 100}


def lab(name: str, title: str, command: list[str], left: str, *options: str) -> Path:
    """Run a command of the lab, or what is missing of it; its table in a dated file."""
    folder = RUNS / name
    command = [*command, "--seeds", str(SEEDS), "--folder", str(folder), *options]
    told = subprocess.run([sys.executable, "-m", "hdet_lab", *command], stdout=subprocess.PIPE, text=True, check=True)
    how = f"Written by `python benchmarks/evidence.py`, which ran `hdet {shlex.join(command)}`."
    written = HERE / "results" / f"{name}-{DATE}.md"
    written.write_text(f"{header(title, how, list(range(SEEDS)))}```\n{told.stdout.strip()}\n```\n")
    shutil.copy(folder / left, written.with_suffix(".json"))
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(MINUTES)}, or all")
    parts = parser.parse_args().parts
    chosen = list(MINUTES) if parts == ["all"] else parts
    if not set(chosen) <= set(MINUTES):
        parser.error(f"PART must be of {', '.join(MINUTES)}, or all; got {' '.join(parts)}")
    if not chosen:
        print("\n".join(f"{part:10} about {minutes} minutes on 2 idle cores" for part, minutes in MINUTES.items()))
        print(f"{'all':10} about {sum(MINUTES.values()) / 60:.1f} hours")
    for part in chosen:
        for what in LAB.get(part, []):
            print(lab(*what), flush=True)
        for verb in QUALITY if part == "quality" else ():
            subprocess.run([sys.executable, str(HERE / "quality.py"), *verb], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
