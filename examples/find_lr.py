"""Find the learning rate before the run, then train at it: in one process or several. It begins far too low.

pip install scikit-learn
python examples/find_lr.py
torchrun --standalone --nproc-per-node 2 examples/find_lr.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hdet

RANK, REPLICAS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
EPOCHS = 20


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    if REPLICAS > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    train_set, held_out = TensorDataset(images[:1200], labels[:1200]), [images[1200:], labels[1200:]]
    loader = DataLoader(train_set, 120 // REPLICAS, sampler=DistributedSampler(train_set, REPLICAS, RANK))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model) if REPLICAS > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    steps = EPOCHS * len(loader)
    scheduler = OneCycleLR(optimizer, max_lr=1e-5, total_steps=steps)

    found = hdet.find_lr(model, optimizer, loader, loss_fn, total_steps=steps).apply(optimizer, scheduler)

    for _ in range(EPOCHS):
        for batch in loader:
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    if RANK == 0:
        print(f"{found}\nheld-out loss after {steps} steps: {loss_fn(model, held_out).item():.4f}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
