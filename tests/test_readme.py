"""The README's code blocks run as they are, on two replicas; its commands and links exist."""

import contextlib
import io
import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def run_blocks(blocks):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(dist.get_rank())
    loader = [(torch.randn(8, 4, generator=g), torch.randn(8, 1, generator=g)) for _ in range(300)]
    names = {
        "model": model,
        "optimizer": optimizer,
        "total_steps": 300,
        "loader": loader,
        "loss_fn": nn.functional.mse_loss,
        "evaluate": lambda m: m.eval()(loader[0][0]) is not None and m.train(),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), printed.getvalue()


@pytest.mark.parametrize("blocks", [BLOCKS[:2], BLOCKS[2:]], ids=["drop-in", "general"])
def test_the_code_blocks_run(blocks):
    (a, said), (b, _) = run(run_blocks, 2, blocks)
    assert torch.equal(a, b)
    assert ("print" not in blocks[0]) or len(said.splitlines()) == 6


def test_the_commands_and_links_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert f"\n{target}:" in makefile
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
