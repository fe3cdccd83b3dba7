"""The direction of imports, read from the source: a package imports those above it in this table, and no others."""

import ast
import os
import pathlib
import statistics
import subprocess
import sys

import pytest

import hdet

SOURCE = pathlib.Path(hdet.__file__).parent
LAYERS = {
    "_arguments": set(),
    "_hooks": set(),
    "_user_warning": set(),
    "_options": {"_arguments"},
    "_explore": {"_arguments", "_hooks", "_user_warning"},
    "controllers": {"_arguments", "_explore", "_options"},
    "_replicas": {"_explore", "_hooks"},
    "_tensors": {"_explore", "_replicas", "_user_warning"},
    "in_process": {"_hooks", "_replicas", "_tensors"},
    "_probe": {"_arguments", "_hooks", "_replicas", "_tensors", "_user_warning"},
    "_find_lr": {"_arguments", "_hooks", "_probe", "_replicas", "_tensors", "_user_warning"},
    "records": {"_arguments", "_explore", "_hooks", "_replicas", "_user_warning"},
    "_run": {
        "_arguments", "_explore", "_find_lr", "_hooks", "_options", "_probe", "_replicas", "_tensors",
        "_user_warning", "controllers", "records",
    },
    "_phases": {
        "_arguments", "_explore", "_find_lr", "_hooks", "_options", "_probe", "_replicas", "_run", "_tensors",
        "_user_warning", "controllers", "records",
    },
    "_engine": {"_hooks", "_phases", "_probe", "_replicas", "_run", "_tensors", "_user_warning"},
    "ensemble": {
        "_arguments", "_engine", "_explore", "_find_lr", "_hooks", "_options", "_phases", "_probe", "_replicas",
        "_run", "_tensors", "_user_warning", "controllers", "records",
    },
    "checkpoint": {"_arguments", "_hooks", "_replicas", "_tensors", "_user_warning", "ensemble", "records"},
    "one_cycle": {
        "_arguments", "_explore", "_find_lr", "_hooks", "_probe", "_replicas", "_run", "_tensors", "_user_warning",
        "controllers", "ensemble",
    },
    "integrations": {
        "_arguments", "_explore", "_find_lr", "_hooks", "_options", "_probe", "_replicas", "_run", "_tensors",
        "_user_warning", "checkpoint", "ensemble", "records",
    },
    "_report": {"_find_lr", "_replicas", "controllers", "records"},
}  # fmt: skip


LAB = SOURCE.parent / "hdet_lab"
PUBLIC = {"checkpoint", "controllers", "integrations", "records", *hdet.__all__}
PRIVATE_FOR_THE_LAB = {
    "hdet._report.commands": "`hdet report`, `watch` and `export` are commands of the lab's command line",
    "hdet._report.run": "a run on disk, of which `hdet train` draws a picture",
    "hdet._report.pictures": "that picture is one of those of `hdet report --pictures`",
    "hdet._report.search": "`hdet find-lr` and the page of its search name the same next commands",
    "hdet._find_lr.interrupts": "Ctrl-C waits while the server of the replicas is forked; no user of hdet needs it",
}


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
    above = list(LAYERS)
    assert all(above.index(other) < above.index(name) for name, allowed in LAYERS.items() for other in allowed)
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package != "__init__":
            extra = set(imported(path)) - LAYERS[package] - {package}
            assert not extra, f"{path.relative_to(SOURCE)} must not import {extra}"


def test_what_users_do_not_import_is_private_and_the_top_level_is_short():
    files = [path.name for path in SOURCE.iterdir() if path.is_file()]
    assert len(files) < 9, files  # with py.typed
    public = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert public == {
        "checkpoint", "controllers", "ensemble", "in_process", "integrations", "one_cycle", "records"
    }  # fmt: skip


def test_the_lab_imports_what_is_public_and_what_has_a_reason_above():
    used = set()
    for path in LAB.rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        private = {node.module for node in nodes if (node.module or "").startswith("hdet._")}
        extra = (private - set(PRIVATE_FOR_THE_LAB)) | {name for name in imported(path) if name[0] != "_"} - PUBLIC
        assert not extra, f"{path.relative_to(LAB)} must not import {extra}"
        used |= private
    assert used == set(PRIVATE_FOR_THE_LAB), "take what the lab no longer imports off the list"


def test_hdet_knows_nothing_of_the_lab():
    for path in SOURCE.rglob("*.py"):
        assert "hdet_lab" not in path.read_text(), path.name


def test_torch_is_the_only_dependency():
    for path in SOURCE.rglob("*.py"):
        host = {path.stem.split("_")[0]} if path.parent.name == "integrations" else set()
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
        if path.parent.name != "_replicas":
            text = path.read_text()
            assert "dist.all_" not in text, path.name
            assert "dist.broadcast" not in text, path.name


TORCHS = {  # private attributes of named tuples and of the objects of torch, transformers and Accelerate
    "_base", "_fields", "_forward_hooks", "_get_process_group_store", "_init_lrs", "_iterator",
    "_optimizer_state_dict_post_hooks", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_orig_mod",
    "_parameters", "_per_optimizer_states", "_replace", "_reset_state", "_scale", "_shutdown_workers",
    "_state_dict_pre_hooks", "_world",
}  # fmt: skip


def test_tests_look_at_nothing_private():
    """Not by an attribute, not by an import of a private name. Private modules are imported as a whole, or by name."""
    for path in pathlib.Path(__file__).parent.rglob("*.py"):
        found = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "torch", "os")
                found += [] if own else [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("hdet", "hdet_lab"):
                found += [alias.name for alias in node.names if node.module not in ("hdet", "hdet_lab")]
        private = {name for name in found if name[0] == "_" and name[:2] != "__"} - TORCHS
        assert not private, f"{path.name} looks at {private}"
