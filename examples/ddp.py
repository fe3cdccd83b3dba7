"""Plain DDP: the replicas try learning rates and weight decays around yours. Three places are new, and marked.

pip install scikit-learn
torchrun --standalone --nproc-per-node 2 examples/ddp.py
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
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    explored = [hdet.learning_rate(optimizer, spread=0.2), hdet.weight_decay(optimizer, spread=0.3)]
    ensemble = hdet.Ensemble(  # 1: what is explored, and how often the replicas are averaged
        optimizer, explored, total_steps=STEPS, interval=20, model=model, on_round=[hdet.Progress()]
    )
    for step in range(STEPS):
        order = torch.randperm(1200, generator=torch.Generator().manual_seed(step), device="cpu")
        batch = order[:GLOBAL_BATCH][rank::replicas].to(images.device)
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
