"""The demo and the benchmark run, small, as a user would start them."""

import io
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch.distributed as dist
from processes import run

ROOT = pathlib.Path(__file__).parent.parent
BIN = pathlib.Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def call(*command):
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_digits():
    done = call(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "examples/digits.py", "--steps", "40")
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("OneCycle")}
    assert set(rows) == {"OneCycleLR", "OneCycleAutoLR"}
    for _, loss, accuracy, steps, _ in rows.values():
        assert float(loss) < 2.0  # guessing: 2.3
        assert float(accuracy.rstrip("%")) > 30
        assert steps == "40"
    assert "Warning" not in done.stderr


def as_script(name, arguments, port):
    """An example as one of torchrun's processes has it, in a process that has imported torch: stdout and stderr."""
    rank, size = os.environ["HDET_TEST_RANK"], os.environ["HDET_TEST_SIZE"]
    os.environ.update(RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sys.argv = [name, *arguments]
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return said.getvalue(), errors.getvalue()


def start(name, replicas, *arguments):
    """What the first replica of an example says."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun serves it, not a replica
    return run(as_script, replicas, name, arguments, store.port, initialise=False)[0]


def test_digits_with_one_replica():
    _, errors = start("digits.py", 1, "--steps", "5")
    assert "one replica only" in errors


def test_find_lr():
    said, errors = start("find_lr.py", 2)
    found, held_out = said.splitlines()
    assert 1e-4 < float(found.removeprefix("learning rate ").partition(",")[0]) < 1
    assert float(held_out.rpartition(" ")[2]) < 1  # guessing: 2.3
    assert "Warning" not in errors


def elastic(folder, replicas, *options):
    torchrun = BIN / "torchrun", "--standalone", "--nproc-per-node", str(replicas)
    return call(*torchrun, *options[:2], "examples/elastic.py", "--folder", folder, "--steps", "60", *options[2:])


def test_elastic(tmp_path):
    survived = elastic(tmp_path, 2, "--max-restarts", "1", "--die-at", "30")
    began, held_out = survived.stdout.splitlines()
    assert began == "2 replicas go on from step 20, which 2 had saved"
    assert float(held_out.rpartition(" ")[2]) < 1  # guessing: 2.3
    assert "exitcode: -9" in survived.stderr


@pytest.mark.soak
def test_elastic_ends_as_if_nothing_had_happened(tmp_path):
    whole = elastic(tmp_path / "whole", 2).stdout
    survived = elastic(tmp_path / "survived", 2, "--max-restarts", "1", "--die-at", "30").stdout
    assert survived.splitlines()[1] == whole.strip()
    shutil.rmtree(tmp_path / "whole" / "000003-step-60")  # as if it had been stopped after the one before
    others = elastic(tmp_path / "whole", 3)
    began, held_out = others.stdout.splitlines()
    assert began == "3 replicas go on from step 40, which 2 had saved"
    assert float(held_out.rpartition(" ")[2]) < 1
    assert "was saved by 2 replicas and is loaded by 3" in others.stderr


def test_the_overhead_benchmark():
    rows = [line.split("|") for line in call(sys.executable, "benchmarks/overhead.py", "--smoke").stdout.splitlines()]
    parts = {row[1].strip() for row in rows if len(row) > 3}
    assert {"step", "loop", "2 ranks"} <= parts
    assert all(" (" in row[3] for row in rows[2:])
