"""Sharded replicas: two replicas of two ranks each, the model sharded within them by FSDP2.

    pip install scikit-learn
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --gradients local   # no gradients between replicas

Every rank holds half of a model. The two ranks of a replica train it with the same learning rate, and every 20 steps
each half is averaged with the same half of the other replica.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import hdet

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 within replicas.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gradients", choices=("shared", "local"), default="shared")
    options = parser.parse_args()
    mesh = init_device_mesh(
        DEVICE, (options.replicas, RANKS // options.replicas), mesh_dim_names=("replicate", "shard")
    )

    digits = load_digits()
    images, labels = torch.tensor(digits.data).float().to(DEVICE) / 16, torch.tensor(digits.target).to(DEVICE)
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    within = mesh if options.gradients == "shared" else mesh["shard"]  # the whole mesh shares gradients at every step
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=within)
    fully_shard(model, mesh=within)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.steps)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=options.steps, interval=20,
        model=model, replicas=mesh, gradients=options.gradients,
    )  # fmt: skip
    for step in range(options.steps):
        chosen = torch.randperm(1200, generator=torch.Generator().manual_seed(step))[:96][RANK::RANKS]
        loss = cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ensemble.step(loss)

    with torch.no_grad():
        held_out = cross_entropy(model(images[1200:]), labels[1200:])  # on every rank: they hold parts of one model
    first = next(model.parameters()).to_local()
    print(f"rank {RANK}: replica {ensemble.replicas.rank}, {first.shape[0]} of 128 rows, held-out loss {held_out:.6f}")
    ensemble.close()
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
