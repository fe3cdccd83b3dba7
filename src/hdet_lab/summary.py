"""The summary of a run: a table of its result, and its pictures."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hdet_lab import pictures
from hdet_lab.errors import LabError
from hdet_lab.folder import full_result, read, reported, why_early
from hdet_lab.options import RunOptions
from hdet_lab.tables import number, table


def summary(options: RunOptions, folder: Path) -> str:
    """Draw the pictures of the run in `folder`; return its table and the paths."""
    result = read(folder / "result.json", full_result)
    if why_early(result):
        return f"\nThe run ended early: {why_early(result)}\nEverything is in {folder}"
    rows = [
        [name, number(value) if name == "loss" or value is not None else "-"]  # a ranking without positives has no AUC
        for name, value in reported(result).items()
    ]
    if result["held_out_probe"]:
        rows.append(["loss with what the probe saw", number(result["held_out"]["loss"])])
    rows += [["loss of the marginals", number(result.get("marginal_loss"))]]
    rows += [["peak lr", f"{result['peak_lr']:.3g}"], ["steps", str(result["steps"])]]
    if "finder_steps" in result:
        rows.append(["finding the rate, in steps", f"{result.get('finder_cost') or 0.0:.0f}"])
    rows += [[f"{name}: scale at step {result['scales_step']}", f"{x:.3g}"] for name, x in result["scales"].items()]
    rows += [["seconds", f"{result['seconds']:.1f}"]]
    if result.get("resumed_at"):
        rows.append(["resumed at step", ", ".join(map(str, result["resumed_at"]))])
    drawn = draw({f"{options.task}, {options.controller}": folder}, folder)
    header = "held out, unseen half" if result["held_out_probe"] else "held out, all samples"
    return f"\n{table([header, ''], rows)}\n\n{drawn}\nEverything is in {folder}\n{what_next([folder])}"


def what_next(runs: Sequence[Path], first: Sequence[str] = ()) -> str:
    """The commands to continue with after some runs; the first run is the one to export.

    Args:
        runs: their folders.
        first: commands to list before them.
    """
    names = [shlex.quote(str(path)) for path in runs]
    said = [f"{_command()} {words}" for words in first]
    said.append(f"{_command()} report {' '.join(names)}")
    if (runs[0] / "rounds.jsonl").exists():
        said.append(f"{_command()} export {names[0]}")
    return "Next: " + "\n      ".join(said)


def _command() -> str:
    """The command to type for `hdet`: its path, unless the shell finds it."""
    own = Path(sys.executable).with_name("hdet")
    if shutil.which("hdet") or not own.exists():
        return "hdet"
    inside = own.is_relative_to(Path.cwd())
    return shlex.quote(str(own.relative_to(Path.cwd()) if inside else own))


def draw(runs: dict[str, Path], folder: Path) -> str:
    """Draw the fan of the runs that fanned out and the losses of all; say where, or why not."""
    try:
        drawn = [pictures.losses(list(runs.items()), folder / "losses.png")]
        fans = [path for path in runs.values() if (path / "rounds.jsonl").exists()]
        for path in fans:
            picture = folder / ("fan.png" if len(fans) == 1 else f"fan-{path.name}.png")
            drawn += [found for found in [pictures.fan(path, picture)] if found]
        drawn += [path / "find_lr.png" for path in runs.values() if (path / "find_lr.png").exists()]
    except LabError as error:
        return f"No pictures: {error}"
    return f"Pictures: {', '.join(str(path) for path in drawn)}"
