"""A small run in a plain loop, for the integrations to be compared with; and what their frameworks need to start."""

import contextlib
import io
import os
import pathlib
import runpy
import sys
import warnings

import torch
import torch.distributed as dist
from cases import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
STEPS, INTERVAL, SAVED = 10, 4, 6  # it is saved in mid-round
OPTIONS = {"interval": INTERVAL, "controller": hdet.controllers.Softmax(temperature=0.05)}


def as_under_torchrun():
    """Let frameworks find the process group that is there, as if torchrun had started this process."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    warnings.simplefilter("ignore")


def make_model():
    """A network with BatchNorm and dropout, the same on every replica; each has random numbers of its own."""
    torch.manual_seed(0)
    # No bias before BatchNorm: its gradient is noise, which Adam makes large.
    first = [nn.Dropout(0.2), nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()]
    model = nn.Sequential(*first, nn.Linear(8, 2))
    torch.manual_seed(100 + dist.get_rank())
    return model


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "lr": 0.02}], lr=0.01, weight_decay=0.1)


def make_schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def explored(optimizer):
    return [hdet.learning_rate(optimizer, spread=0.3)]


def loss_of(model, data):
    return nn.functional.mse_loss(model(data[0]), data[1])


def held_out(model):
    """The loss on data that no replica trains on, without touching the statistics of the BatchNorm."""
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, batch(99, 0))
    model.train()
    return float(loss)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Told:
    """What the rounds were: slots, losses, scales."""

    def __init__(self):
        self.rounds = []

    def __call__(self, record):
        row = record.hyperparameters["learning_rate"]
        self.rounds.append([record.round, record.step, *record.scores, *row.values, row.scale])


def plain_loop(accumulation=1, options=None, **ddp_options):
    """The rounds, the weights at the end, and those of the consensus in mid-round with their held-out loss."""
    model = make_model()
    ddp = DistributedDataParallel(model, **ddp_options)
    optimizer = make_optimizer(model)
    scheduler = make_schedule(optimizer)
    told = Told()
    ensemble = hdet.Ensemble(
        optimizer, explored(optimizer), total_steps=STEPS, model=ddp, on_round=[told], **OPTIONS, **(options or {})
    )  # fmt: skip
    for step in range(STEPS):
        losses = []
        for micro in range(accumulation):
            with ddp.no_sync() if micro < accumulation - 1 else contextlib.nullcontext():
                loss = loss_of(ddp, batch(dist.get_rank(), step * accumulation + micro))
                (loss / accumulation).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ensemble.step(sum(losses) / accumulation)
        if step + 1 == SAVED:
            with ensemble.consensus():
                average, judged = weights(model), held_out(model)
    ensemble.close()
    return told.rounds, weights(model), average, judged


def example(name, *arguments):
    """What a script in examples/ prints on this replica; it may end the process group."""
    printed = io.StringIO()
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def follow_guide(section, folder, **names):
    """Run the code of a section of docs/integrations.md, as it is; the names that it leaves behind."""
    text = (EXAMPLES.parent / "docs/integrations.md").read_text().partition(f"\n## {section}\n")[2]
    block = text.partition("```python\n")[2].partition("```")[0]
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    exec(block, names)
    return names


def check_same(ours, theirs):
    """Equal to 1e-6, numbers and tensors by name."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
