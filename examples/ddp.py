"""Plain DDP with any optimizer and any schedule: the replicas try learning rates and weight decays around yours.

    pip install scikit-learn
    torchrun --standalone --nproc-per-node 2 examples/ddp.py

Three places differ from a DDP script without hdet, and are marked.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet

STEPS, GLOBAL_BATCH = 200, 96


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, device=device).float() / 16, torch.tensor(digits.target, device=device)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    ensemble = hdet.Ensemble(  # 1: what is explored, and how often the replicas are averaged
        optimizer,
        [hdet.learning_rate(optimizer, spread=0.2), hdet.weight_decay(optimizer, spread=0.3)],
        total_steps=STEPS,
        interval=20,
        model=model,
        on_round=[hdet.Progress()],
    )

    for step in range(STEPS):
        batch = torch.randperm(1200, generator=torch.Generator().manual_seed(step))[:GLOBAL_BATCH][rank::replicas]
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)  # 2: the last step averages, so that all replicas end with one model
        if step + 1 == STEPS // 2 + 5:
            with ensemble.consensus(), torch.no_grad():  # 3: in mid-round, look at the average
                halfway = cross_entropy(model.module(images[1200:]), labels[1200:]).item()

    if rank == 0:
        with torch.no_grad():
            held_out = cross_entropy(model.module(images[1200:]), labels[1200:]).item()
        print(f"held-out loss: {halfway:.4f} halfway, {held_out:.4f} at the end")
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
