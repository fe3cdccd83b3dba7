"""A run that survives: it goes on from its last checkpoint when a replica is killed, and on any number of replicas.

    pip install scikit-learn
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --die-at 70

In step 70 one replica kills itself, as `kill -9` would. torchrun starts all of them again, and they go on from step 60
bit for bit: the result is that of a run in which nothing happened. Press Ctrl-C and start it again, with any number of
replicas: it goes on as well.

The variable is for torch, without hdet as well: when torchrun starts replicas again, torch 2.13 finds the addresses of
the dead ones in its store, and waits for them.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hdet

RANK, REPLICAS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
SEED, GLOBAL_BATCH, SAVE_EVERY = 0, 96, 20


def my_batch(images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """This replica's part of a global batch, drawn from the step alone: nothing to save, right for any number."""
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:GLOBAL_BATCH]
    return images[chosen[RANK::REPLICAS]], labels[chosen[RANK::REPLICAS]]


def main() -> None:
    parser = argparse.ArgumentParser(description="A run that goes on after a kill.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="checkpoints/elastic", help="where the checkpoints are")
    parser.add_argument("--die-at", type=int, help="the step in which the last replica is killed, the first time")
    options = parser.parse_args()
    if REPLICAS > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(SEED)
    model = hdet.data_parallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = hdet.OneCycleAutoLR(
        optimizer, max_lr=1e-2, total_steps=options.steps, ensemble_lr_spread_ratio=0.2, model_sync_interval=8
    )
    torch.manual_seed(SEED + RANK)  # every replica has dropout of its own

    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    resumed = hdet.load(options.folder, run)  # after the model was wrapped
    if resumed is not None and RANK == 0:
        print(f"{REPLICAS} replicas go on from step {resumed.step}, which {resumed.replicas} had saved", flush=True)
    for step in range(0 if resumed is None else resumed.step, options.steps):
        if step == options.die_at and RESTARTS == 0 and RANK == REPLICAS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = my_batch(images[:1200], labels[:1200], step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
        if (step + 1) % SAVE_EVERY == 0:
            hdet.save(options.folder, run, keep=2)
    if RANK == 0:
        model.eval()
        with torch.no_grad():
            held_out = cross_entropy(model(images[1200:]), labels[1200:])
        print(f"held-out loss after {options.steps} steps: {held_out:.6f}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
