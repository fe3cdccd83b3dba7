"""The direction of imports, read from the source: leaves, then converge and the like, engine, ensemble, one_cycle."""

import ast
import os
import pathlib
import statistics
import subprocess
import sys

import pytest

import hdet

SOURCE = pathlib.Path(hdet.__file__).parent
MAY_IMPORT = {
    "arguments": set(),
    "_options": {"arguments"},
    "user_warning": set(),
    "interrupts": set(),
    "hadamard": set(),
    "assignment": {"arguments", "hadamard"},
    "score": set(),
    "hooks": set(),
    "record": set(),
    "sink": {"record", "replicas"},
    "reading": set(),
    "schema": set(),
    "terminal": set(),
    "json_lines": {"reading", "record", "replicas", "schema", "sink"},
    "schedule": {"schema"},
    "replay": {"arguments", "hooks", "reading", "record", "schedule"},
    "progress": {"record", "replicas", "sink"},
    "trackers": {"record", "replicas", "sink"},
    "report": {
        "controllers", "descent", "json_lines", "liveness", "range_test", "reading", "record", "replay", "schedule",
        "schema", "terminal",
    },
    "board": set(),
    "liveness": set(),
    "replicas": {"board", "liveness"},
    "shards": {"replicas"},
    "agreement": {"board", "hooks", "hyperparameters", "replicas"},
    "restore": {"shards"},
    "deepspeed": set(),
    "local_gradients": {"shards"},
    "outer_step": {"_options"},
    "tail": set(),
    "descent": set(),
    "controllers": {"_options", "arguments", "assignment"},
    "hyperparameters": {"assignment", "hooks"},
    "fan_out": {"hooks", "hyperparameters"},
    "values": {"fan_out", "hyperparameters"},
    "rounds": {"assignment", "hyperparameters", "replicas"},
    "converge": {"replicas", "shards"},
    "optimizer_state": {"shards"},
    "tensors": {"converge", "hyperparameters", "optimizer_state", "shards"},
    "in_process": {"converge", "hooks", "replicas"},
    "warm_init": {"agreement", "replicas", "shards"},
    "probe": {"arguments", "hooks", "replicas", "restore", "shards"},
    "range_test": {
        "agreement", "arguments", "deepspeed", "hooks", "interrupts", "probe", "replicas", "restore", "shards",
    },
    "judge": {"probe", "replicas", "score"},
    "rollback": {"_options", "arguments", "converge", "replicas", "score"},
    "checks": {
        "_options", "arguments", "assignment", "controllers", "hyperparameters", "local_gradients", "probe", "replicas",
        "shards",
    },
    "no_effect": {"controllers", "hyperparameters", "outer_step"},
    "settings": {
        "_options", "agreement", "arguments", "assignment", "checks", "controllers", "deepspeed", "hooks",
        "hyperparameters", "judge", "local_gradients", "no_effect", "outer_step", "probe", "record", "replicas",
        "shards", "tail",
    },
    "guard": {"board", "converge", "hooks", "replicas"},
    "_phases": {
        "_engine", "_options", "agreement", "board", "controllers", "converge", "descent", "guard", "hyperparameters", "judge",
        "local_gradients", "outer_step", "range_test", "record", "replicas", "rollback", "rounds", "score", "tail",
        "user_warning",
    },
    "_engine": {
        "_phases", "agreement", "controllers", "converge", "hooks", "no_effect", "range_test", "replicas",
        "rounds", "score", "settings", "tensors", "user_warning", "values", "warm_init",
    },
    "in_words": {"_engine", "hyperparameters", "rounds"},
    "ensemble": {
        "_engine", "_options", "_phases", "agreement", "arguments", "assignment", "checks", "controllers", "converge",
        "hooks", "hyperparameters", "in_words", "judge", "local_gradients", "outer_step", "probe", "range_test",
        "record", "replicas", "rounds", "score", "settings", "tail",
    },
    "checkpoint": {"agreement", "arguments", "converge", "ensemble", "hooks", "replicas", "restore"},
    "integrations": {
        "_options", "arguments", "checkpoint", "ensemble", "hooks", "hyperparameters", "record", "replicas", "settings",
    },
    "one_cycle": {
        "agreement", "arguments", "assignment", "controllers", "deepspeed", "ensemble", "hooks", "hyperparameters",
        "no_effect", "range_test", "score", "settings",
    },
}  # fmt: skip


def imported(path):
    """The modules of hdet that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "hdet":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hdet."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            inside = [alias.name for alias in node.names if alias.name.startswith("hdet.")]
            assert not inside, f"{path}: use from-imports"


def test_imports_go_one_way():
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        allowed = (
            {"lab", "report", "json_lines", "interrupts", "reading", "schema", "terminal", *hdet.__all__}
            if module == "lab"
            else {module} | MAY_IMPORT[module]
        )  # lab: the public API, the format of what it writes, and what has nothing to do with training
        extra = set(imported(path)) - allowed - {"user_warning"}
        assert not extra, f"{module} must not import {extra}"


def test_torch_is_the_only_dependency():
    for path in SOURCE.rglob("*.py"):
        if "lab" in path.relative_to(SOURCE).parts:
            continue
        host = {path.stem} if path.parent.name == "integrations" else set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                top = name.split(".")[0]
                assert top in {"hdet", "torch", *host, *sys.stdlib_module_names}, f"{path.name} imports {name}"


def test_importing_hdet_imports_no_host():
    others = {"accelerate", "lightning", "pytorch_lightning", "transformers", "hdet.integrations", "matplotlib"}
    script = f"import hdet, sys; print(*({others!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == []


@pytest.mark.soak
def test_importing_it_takes_no_longer_than_torch_and_50_ms(tmp_path):
    code = "import time, torch; t = time.process_time(); import hdet; print(time.process_time() - t)"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    seconds = [
        float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        for _ in range(8)
    ]
    assert statistics.median(seconds[1:]) < 0.05, seconds  # the first one writes the bytecode


def test_everything_public_is_in_the_index():
    assert all(hasattr(hdet, name) for name in hdet.__all__)
    assert list(hdet.__all__) == sorted(hdet.__all__)


def test_only_replicas_issues_collectives():
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "replicas":
            text = path.read_text()
            assert "dist.all_" not in text, path.name
            assert "dist.broadcast" not in text, path.name
