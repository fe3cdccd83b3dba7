"""HDET in a transformers Trainer: one line. The rate is far too low; HDET finds a better one before the first step.

    pip install 'hdet[transformers]'
    python examples/transformers_text.py            # or on two replicas: torchrun --standalone --nproc-per-node 2

A tiny language model on Python's own source code, nothing to download. The checkpoints hold the average of the
replicas. `--resume` goes on from the last one, at the rate that was found.
"""

import argparse
import inspect
import json.decoder
import textwrap

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hdet.integrations.transformers import HDETCallback

LENGTH = 64


def read_samples() -> list[dict[str, torch.Tensor]]:
    """Bytes of two modules, in pieces."""
    text = torch.tensor(list((inspect.getsource(textwrap) + inspect.getsource(json.decoder)).encode()))
    return [{"input_ids": piece, "labels": piece} for piece in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET in a transformers Trainer.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", default="runs/transformers")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    rhythm = {"save_steps": options.steps // 4, "logging_steps": options.steps // 4}
    settings = {"report_to": [], "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}
    args = TrainingArguments(options.folder, max_steps=options.steps, learning_rate=1e-5, **rhythm, **settings)
    samples = read_samples()
    trainer = Trainer(model=model, args=args, train_dataset=samples[:-40], eval_dataset=samples[-40:])
    HDETCallback().attach(trainer)
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]  # of the average, on every replica
    if trainer.is_world_process_zero():
        print(f"held-out loss: {loss:.4f}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
