"""The demo and the benchmark run, small, as a user would start them."""

import io
import json
import os
import pathlib
import re
import runpy
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch.distributed as dist
from processes import run

ROOT = pathlib.Path(__file__).parent.parent
BIN = pathlib.Path(sys.executable).parent
# torch 2.10 prints this from C++ in pieces, so the lines of several ranks interleave.
GLOO = re.compile(
    r"(\[Gloo\] Rank | ?is connected to | ?peer ranks\. |Expected number of connected peer ranks is : |\d| )*\n"
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def call(*command, timeout=200):
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "[Gloo] Rank" in done.stdout:
        done.stdout = "".join(line for line in done.stdout.splitlines(keepends=True) if not GLOO.fullmatch(line))
    return done


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def as_script(name, arguments, port):
    """An example as one of torchrun's processes has it, in a process that has imported torch: stdout and stderr."""
    rank, size = os.environ["HDET_TEST_RANK"], os.environ["HDET_TEST_SIZE"]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sys.argv = [name, *arguments]
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return said.getvalue(), errors.getvalue()


def start(name, replicas, *arguments):
    """What each replica of an example says."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun serves it, not a replica
    return run(as_script, replicas, name, arguments, store.port, initialise=False)


def test_one_replica_is_plain_training_and_says_so():
    ((_, errors),) = start("drop_in.py", 1)
    assert "only one replica" in errors


def test_find_lr():
    (said, errors), _ = start("find_lr.py", 2)
    found, held_out = said.splitlines()
    assert 1e-4 < float(found.removeprefix("found ").partition(",")[0]) < 1
    assert float(held_out.rpartition(" ")[2]) < 1  # guessing: 2.3
    assert "Warning" not in errors


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_fsdp2(gradients):
    lines = [said.splitlines()[0] for said, _ in start("fsdp2.py", 4, "--steps", "40", "--gradients", gradients)]
    assert [line.partition(",")[0] for line in lines] == [f"rank {r}: replica {r // 2}" for r in range(4)]
    assert all("64 of 128 rows" in line for line in lines)
    losses = {line.rpartition(" ")[2] for line in lines}
    assert len(losses) == 1  # after the last step all replicas are one model
    assert float(losses.pop()) < 2.0  # guessing: 2.3


def elastic(folder, replicas, *options):
    torchrun = BIN / "torchrun", "--standalone", "--nproc-per-node", str(replicas)
    return call(*torchrun, *options[:2], "examples/elastic.py", "--folder", folder, "--steps", "60", *options[2:])


def test_elastic(tmp_path):
    survived = elastic(tmp_path, 2, "--max-restarts", "1", "--die-at", "30")
    began, held_out = survived.stdout.splitlines()
    assert began == "2 replicas go on from step 20, which 2 had saved"
    assert float(held_out.rpartition(" ")[2]) < 1  # guessing: 2.3
    assert "failed (exitcode: " in survived.stderr  # whom torchrun sees first: the killed one, or one that missed it


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


def test_plain_ddp():
    (first, _), (second, _) = start("ddp.py", 2)
    last = first.splitlines()[-1]
    halfway, end = map(float, re.fullmatch(r"held-out loss: (\S+) halfway, (\S+) at the end", last).groups())
    assert end < halfway < 1  # guessing: 2.3
    assert second == ""


@pytest.mark.soak
def test_trl_with_lora():
    pytest.importorskip("trl")
    ((said, _),) = start("trl_lora.py", 1)
    first, last = map(float, re.search(r"training loss: (\S+) in the first 50 steps, (\S+) in the last", said).groups())
    assert last < 0.85 * first  # at the rate that it begins with: 0.99
    assert "hdet found 0.00" in said


def test_the_drop_in():
    first, second = (said.splitlines() for said, _ in start("drop_in.py", 2))
    rates = [
        re.fullmatch(r"replica \d trains at (\S+), the schedule says (\S+)", shown[0]) for shown in (first, second)
    ]
    assert sorted(float(rate[1]) < float(rate[2]) for rate in rates) == [False, True]
    assert float(first[1].removeprefix("held-out loss: ")) < 1


def test_the_notebook():
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    names = {}
    with redirect_stdout(io.StringIO()) as shown:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    held_out, *rounds = shown.getvalue().splitlines()
    assert float(held_out.removeprefix("held-out loss ")) < 1
    assert re.fullmatch(r"step   5: tried 0\.000\d to 0\.00\d\d, went on with 1\.00x", rounds[0])
    assert float(rounds[-1].rpartition(" ")[2].rstrip("x")) > 1, "the rate was too low"


def test_two_machines():
    """Two torchrun agents on loopback, of two replicas each: all four end with the same model."""
    meet = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint")
    command = [BIN / "torchrun", *meet, f"localhost:{free_port()}", "examples/machines.py", "--steps", "120"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    agents = [subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes) for _ in range(2)]
    said = ""
    for agent in agents:
        shown, errors = agent.communicate(timeout=200)
        assert agent.returncode == 0, errors
        said += shown
    # replicas of a machine write to one pipe, and a line may begin before another ends
    seen = re.findall(r"replica (\d) of 4, on machine (\d): held-out loss (\d+\.\d{6})", said)
    assert sorted(replica for replica, _, _ in seen) == ["0", "1", "2", "3"]
    assert sorted(machine for _, machine, _ in seen) == ["0", "0", "1", "1"]
    (loss,) = {loss for _, _, loss in seen}
    assert float(loss) < 1


@pytest.mark.soak
def test_ray_train():
    done = call(sys.executable, "examples/ray_train.py", "--steps", "100", timeout=600)
    assert float(done.stdout.splitlines()[-1].removeprefix("held-out loss after 100 steps: ")) < 1


INTEGRATIONS = {"accelerate_digits": False, "lightning_digits": True, "transformers_text": True}  # with a folder?


@pytest.mark.soak
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations(name, tmp_path):
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]
    launch = [sys.executable] if name == "lightning_digits" else torchrun  # Lightning starts the others itself
    done = call(*launch, f"examples/{name}.py", *(["--folder", tmp_path] if INTEGRATIONS[name] else []))
    held_out = done.stdout.splitlines()[-1]
    assert float(held_out.removeprefix("held-out loss: ")) < 2.6  # guessing: 2.3, and 5.5 for text


def test_the_overhead_benchmark():
    rows = [line.split("|") for line in call(sys.executable, "benchmarks/overhead.py", "--smoke").stdout.splitlines()]
    parts = {row[1].strip() for row in rows if len(row) > 3}
    assert {"step", "loop", "2 ranks"} <= parts
    assert all(" (" in row[3] for row in rows[2:])
