"""HDET in Lightning: one callback in the Trainer. Two replicas on this machine, no data to download.

    pip install 'hdet[lightning]' scikit-learn
    python examples/lightning_digits.py                # Lightning starts the second replica itself

The optimizer's rate is far too low; the callback finds a good one before the first step. Stop it and start it again: it
goes on from the last epoch at that rate, each replica with what was its own.
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hdet.integrations.lightning import HDETCallback


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("held_out", cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs or 1)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="HDET in Lightning.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs/lightning")
    options = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    train, held_out = TensorDataset(images[:1200], labels[:1200]), TensorDataset(images[1200:], labels[1200:])
    callback = HDETCallback()  # finds the learning rate, and lets the two replicas explore around it
    saved = ModelCheckpoint(options.folder, monitor="held_out", save_last=True)
    run = {"max_epochs": options.epochs, "logger": CSVLogger(options.folder), "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", strategy="ddp", devices=2, callbacks=[callback, saved], **run)
    loader = DataLoader(train, batch_size=24, shuffle=True)
    trainer.fit(Digits(), loader, DataLoader(held_out, batch_size=300), ckpt_path="last")  # anew if there is none
    if trainer.is_global_zero and callback.ensemble is not None:
        print(callback.found or "the learning rate of the checkpoint")
        print(f"rounds: {callback.ensemble.progress['round']}")
        print(f"held-out loss: {float(trainer.callback_metrics['held_out']):.4f}")
