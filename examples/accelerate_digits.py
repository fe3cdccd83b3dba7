"""HDET in a loop with Accelerate: an ensemble beside the optimizer, and checkpoints that keep the replicas apart.

    pip install 'hdet[accelerate]' scikit-learn
    torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py

It saves in the middle and at the end; `--resume` goes on from what was saved last.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.accelerate import load_state, save_state


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET in a loop with Accelerate.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    naming = ProjectConfiguration(options.folder, automatic_checkpoint_naming=True, total_limit=2)
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2, project_config=naming)
    model, optimizer, loader = accelerator.prepare(
        layers,
        torch.optim.AdamW(layers.parameters(), lr=3e-3),
        DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=24, shuffle=True),
    )
    total_steps = options.epochs * -(-len(loader) // 2)  # accumulation ends with the epoch
    # Not prepared: Accelerate would step the schedule once per process.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, total_steps)
    ensemble = hdet.Ensemble(
        optimizer,
        [hdet.learning_rate(optimizer, spread=0.3)],
        total_steps=total_steps,
        interval=6,
        controller=hdet.controllers.Softmax(temperature=0.1),
        model=model,
    )
    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ensemble": ensemble}
    if options.resume:
        load_state(accelerator, run)
    first = ensemble.progress["step"] * options.epochs // total_steps
    accelerator.project_configuration.iteration = first  # how many were saved before
    for epoch in range(first, options.epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
            ensemble.step(loss)  # of every batch: it sees for itself when a step was taken
        save_state(accelerator, run)
    with ensemble.consensus(), torch.no_grad():
        model.eval()
        held_out = cross_entropy(model(images[1200:].to(accelerator.device)), labels[1200:].to(accelerator.device))
    accelerator.print(f"rounds: {ensemble.progress['round']}")
    accelerator.print(f"held-out loss: {held_out:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
