"""The README's code blocks run as they are, on two replicas; its commands and links exist."""

import contextlib
import io
import itertools
import pathlib
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from hdet_lab.cli import main
from hdet_lab.options import CONTROLLERS

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = {
    section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, flags=re.S)
    for section in README.split("\n## ")
    if "```python" in section
}
LINES = {"Any schedule, any optimizer": 6, "Any scalar, several at once": 30, "Not knowing the rate": 1}  # printed


def make_data(samples, seed):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def run_blocks(blocks):
    warnings.simplefilter("error", UserWarning)  # hdet's own: a block should not raise any
    warnings.filterwarnings("ignore", message=".*barrier.*")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = make_data(2400, 2 + dist.get_rank())
    names = {
        "model": model,
        "optimizer": optimizer,
        "total_steps": 300,
        "global_batch": 16,
        "batch_size": 8,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "loader": [batches[8 * k : 8 * k + 8] for k in range(300)],
        "train_set": make_data(256, 0),
        "held_out": make_data(64, 1),
        "loss_fn": nn.functional.cross_entropy,
        "evaluate": lambda m: m.eval()(batches[:8][0]) is not None and m.train(),
    }
    if any("cosine" in block for block in blocks):
        names["cosine"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), printed.getvalue()


@pytest.mark.parametrize("section", BLOCKS)
def test_the_code_blocks_run(section):
    (a, said), (b, _) = run(run_blocks, 2, BLOCKS[section])
    assert torch.equal(a, b)
    assert len(said.splitlines()) == LINES.get(section, 0)


def test_every_section_with_code_is_known():
    assert set(LINES) < set(BLOCKS)
    assert len(BLOCKS) == 5


def test_the_commands_and_links_exist(capsys):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert f"\n{target}:" in makefile
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
    for command, rest in re.findall(r"^    hdet ([\w-]+)(.*)", README, flags=re.M):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        words = rest.partition("#")[0].split()
        assert all(word in text for word in words if word.startswith("--"))
        controllers = [word for before, word in itertools.pairwise(words) if before == "--controller"]
        assert set(controllers) <= set(CONTROLLERS)
