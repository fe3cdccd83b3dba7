"""A small run with dropout that saves and resumes, for the tests of checkpoints: what a user's script would do."""

import pathlib
import random
import time

import numpy as np
import torch
from cases import batch
from torch import nn

import hdet


def parts(interval=4, total_steps=24, spread=0.3, **options):
    """The entries of a run: a model with dropout and BatchNorm, its optimizer, a schedule, and an ensemble."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)]
    model = hdet.data_parallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=spread)], total_steps=total_steps, interval=interval,
        controller=hdet.controllers.Softmax(temperature=0.05), model=model, **options,
    )  # fmt: skip
    rank = hdet.find_replicas().rank
    torch.manual_seed(100 + rank)  # each replica has dropout of its own
    random.seed(rank)
    np.random.seed(rank)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ensemble": ensemble}


def train(run, steps):
    """Take these steps; the data come from the step and the replica alone."""
    rank = hdet.find_replicas().rank
    for step in steps:
        x, y = batch(rank, step)
        x = x * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
        loss = nn.functional.mse_loss(run["model"](x), y)
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["scheduler"].step()
        run["ensemble"].step(loss)


def bits(run):
    """Everything that must be the same after a resume, as bytes and plain values."""
    inner = getattr(run["model"], "module", run["model"])
    tensors = [t.detach().numpy().tobytes() for t in inner.state_dict().values()]
    state = run["optimizer"].state_dict()["state"]
    tensors += [v.numpy().tobytes() for entry in state.values() for v in entry.values()]
    ensemble = run["ensemble"].state_dict()
    plain = [str(ensemble), str(run["scheduler"].state_dict()), str(run["optimizer"].param_groups[0]["lr"])]
    generators = [torch.get_rng_state().numpy().tobytes(), str(random.getstate()), str(np.random.get_state())]
    return [*tensors, *plain, *generators]


def finish(path, total_steps=24, every=None, **options):
    """Begin or go on, saving every so many steps, to the end; where it began, what is left of it, and its seconds."""
    run = parts(total_steps=total_steps, **options)
    resumed = hdet.load(path, run)
    first = 0 if resumed is None else resumed.step
    pathlib.Path(f"{path}.begun").touch()
    began = time.perf_counter()
    for step in range(first, total_steps):
        train(run, [step])
        if every and (step + 1) % every == 0:
            hdet.save(path, run)
    left = bits(run)
    run["ensemble"].close()
    return first, left, time.perf_counter() - began
