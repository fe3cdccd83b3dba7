"""hdet in Ray Train: the training function is that of any DDP script, as Ray has made the process group already.

pip install 'hdet[ray]' scikit-learn
python examples/ray_train.py --replicas 2
"""

import argparse
import tempfile

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import hdet

GLOBAL_BATCH = 96


def train_replica(config: dict[str, int]) -> None:
    rank, replicas = train.get_context().get_world_rank(), train.get_context().get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))  # DDP, on this rank's device
    device = next(model.parameters()).device
    images, labels = images.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=config["steps"])
    ensemble = hdet.Ensemble(
        optimizer,
        [hdet.learning_rate(optimizer, spread=0.2)],
        total_steps=config["steps"],
        interval=20,
        controller=hdet.controllers.Softmax(temperature=0.1),
        model=model,
    )
    for step in range(config["steps"]):
        batch = torch.randperm(1200, generator=torch.Generator().manual_seed(step))[:GLOBAL_BATCH][rank::replicas]
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)
        if (step + 1) % 100 == 0:
            with ensemble.consensus(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:  # on every rank
                held_out = cross_entropy(model.module(images[1200:]), labels[1200:]).item()
                torch.save(model.module.state_dict(), f"{folder}/model.pt")  # the average
                checkpoint = train.Checkpoint.from_directory(folder) if rank == 0 else None
                train.report({"step": step + 1, "held_out": held_out, **ensemble.scales}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="hdet in Ray Train.")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_replica,
            train_loop_config={"steps": options.steps},
            scaling_config=train.ScalingConfig(num_workers=options.replicas, use_gpu=torch.cuda.is_available()),
            run_config=train.RunConfig(storage_path=folder),  # on several machines: one that all of them see
        )
        result = trainer.fit()
    print(f"held-out loss after {result.metrics['step']} steps: {result.metrics['held_out']:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
