"""Find the learning rate before the run, then train with it: plain DDP and OneCycleLR.

The rate that the optimizer begins with is far too low, which does not matter.

    pip install scikit-learn
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
from torch.utils.data import TensorDataset

from hdet import Probe, find_lr

RANK, REPLICAS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 200


def loss_fn(model: nn.Module, batch: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    if REPLICAS > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    train_set, held_out = TensorDataset(images[:1200], labels[:1200]), (images[1200:], labels[1200:])
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(layers) if REPLICAS > 1 else layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def loss_of_step(index: int) -> Tensor:  # this replica's part of global batch `index`
        chosen = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(index))[:128]
        return loss_fn(model, train_set[chosen[RANK::REPLICAS]])

    probe = Probe(train_set, loss_fn, size=512)  # four global batches
    found = find_lr(model, optimizer, lambda i: loss_of_step(i).backward(), probe=probe, total_steps=STEPS)
    scheduler = OneCycleLR(optimizer, found.rate, total_steps=STEPS)
    for step in range(STEPS):
        loss_of_step(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if RANK == 0:
        print(f"{found}\nheld-out loss after {STEPS} steps: {loss_fn(model, held_out).item():.4f}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
