"""HDET in Lightning: one callback in the Trainer. Two replicas on this machine, no data to download.

    pip install 'hdet[lightning]' scikit-learn
    python examples/lightning_digits.py                # Lightning starts the second replica itself

Stop it and start it again: it goes on from the last epoch, each replica with what was its own.
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

import hdet
from hdet.integrations.lightning import HDETCallback


class Digits(pl.LightningModule):
    """A classifier as in any Lightning script; it knows nothing of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("held_out", cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.max_epochs or 1))
        return {"optimizer": optimizer, "lr_scheduler": cosine}


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET in Lightning.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs/lightning")
    options = parser.parse_args()
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    callback = HDETCallback(
        lambda optimizer: [hdet.learning_rate(optimizer, spread=0.3)],
        interval=6,
        controller=hdet.controllers.Softmax(temperature=0.1),
        on_round=[hdet.JSONLines(f"{options.folder}/rounds.jsonl")],  # for `hdet report`
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=options.epochs,
        callbacks=[callback, ModelCheckpoint(options.folder, monitor="held_out", save_last=True)],
        logger=CSVLogger(options.folder),
        enable_progress_bar=False,
        log_every_n_steps=10,
    )
    trainer.fit(
        Digits(),
        DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=48, shuffle=True),
        DataLoader(TensorDataset(images[1200:], labels[1200:]), batch_size=300),
        ckpt_path="last",  # begins anew where there is none
    )
    if trainer.is_global_zero and callback.ensemble is not None:
        print(f"rounds: {callback.ensemble.progress['round']}")
        print(f"held-out loss: {float(trainer.callback_metrics['held_out']):.4f}")


if __name__ == "__main__":
    main()
