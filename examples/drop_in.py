"""The drop-in: a script with OneCycleLR becomes one with HDET by another import and the loss given to `step()`.

pip install scikit-learn
torchrun --standalone --nproc-per-node 2 examples/drop_in.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hdet import OneCycleAutoLR  # was: from torch.optim.lr_scheduler import OneCycleLR

STEPS, GLOBAL_BATCH = 200, 96


def main() -> None:
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = OneCycleAutoLR(  # was: OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
        optimizer,
        max_lr=1e-2,
        total_steps=STEPS,
        ensemble_lr_spread_ratio=1 / 9,
        model_sync_interval=10,
        enable_auto_lr=True,
        auto_lr_warmup_steps=STEPS // 3,
        loss_scale=0.1,
    )

    for step in range(STEPS):
        batch = torch.randperm(1200, generator=torch.Generator().manual_seed(step))[:GLOBAL_BATCH][rank::replicas]
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS // 2:
            mine, base = scheduler.get_replica_lr()[0], scheduler.get_last_lr()[0]
            print(f"replica {rank} trains at {mine:.5f}, the schedule says {base:.5f}", flush=True)
        scheduler.step(loss)  # was: scheduler.step()

    if rank == 0:
        with torch.no_grad():
            print(f"held-out loss: {cross_entropy(model.module(images[1200:]), labels[1200:]):.4f}")
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
