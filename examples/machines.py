"""Several machines with a slow network between them: replicas train on their own, and meet every 50 steps.

On each machine, with the first one's name or address:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id 1 \
        examples/machines.py

Gradients stay local, so an ordinary step sends nothing; Nesterov's momentum makes few long rounds go as far as many
short ones. docs/machines.md has the same for Slurm and Ray Train, and what it saves.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet

GLOBAL_BATCH = 96


def main() -> None:
    parser = argparse.ArgumentParser(description="Local gradients on several machines.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--interval", type=int, default=50, help="steps between two converges")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, device=device).float() / 16, torch.tensor(digits.target, device=device)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.steps)
    ensemble = hdet.Ensemble(
        optimizer,
        [hdet.learning_rate(optimizer, spread=0.1)],  # spread=0.0 to explore nothing
        total_steps=options.steps,
        interval=options.interval,
        gradients="local",
        averaging=hdet.Averaging(outer_step=hdet.Nesterov(lr=0.7, momentum=0.5), state=False),
        model=model,
    )
    for step in range(options.steps):
        batch = torch.randperm(1200, generator=torch.Generator().manual_seed(step))[:GLOBAL_BATCH][rank::replicas]
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)

    machine = rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with torch.no_grad():
        held_out = cross_entropy(model.module(images[1200:]), labels[1200:])
    print(f"replica {rank} of {replicas}, on machine {machine}: held-out loss {held_out:.6f}", flush=True)
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
