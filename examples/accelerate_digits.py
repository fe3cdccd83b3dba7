"""HDET in a loop with Accelerate: one line finds the learning rate, where the one given is far too low.

    pip install 'hdet[accelerate]' scikit-learn
    python examples/accelerate_digits.py            # or on two replicas: torchrun --standalone --nproc-per-node 2

On two replicas an ensemble goes on to adapt it.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.accelerate import find_lr


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET in a loop with Accelerate.")
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-5)
    loader = DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=24, shuffle=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(layers, optimizer, loader)
    steps = epochs * -(-len(loader) // 2)  # accumulation ends with the epoch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, steps)  # not prepared
    found = find_lr(accelerator, model, optimizer, loader, loss_fn, total_steps=steps).apply(optimizer, scheduler)
    accelerator.print(found)
    ensemble = hdet.Ensemble(optimizer, total_steps=steps, model=model) if accelerator.num_processes > 1 else None
    for batch in (batch for _ in range(epochs) for batch in loader):
        with accelerator.accumulate(model):
            loss = loss_fn(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
        if ensemble is not None:
            ensemble.step(loss)  # of every batch: it sees for itself when a step was taken
    held_out = [tensor[1200:].to(accelerator.device) for tensor in (images, labels)]
    accelerator.print(f"held-out loss: {loss_fn(accelerator.unwrap_model(model).eval(), held_out):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
