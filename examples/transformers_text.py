"""HDET in a transformers Trainer: one line. A tiny language model on Python's own source code, nothing to download.

    pip install 'hdet[transformers]'
    torchrun --standalone --nproc-per-node 2 examples/transformers_text.py

The checkpoints hold the average of the replicas. `--resume` goes on from the last one, each replica with what was its
own.
"""

import argparse
import inspect
import json.decoder
import textwrap

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hdet
from hdet.integrations.transformers import HDETCallback

LENGTH = 64


def read_samples() -> list[dict[str, torch.Tensor]]:
    """Bytes of two modules, in pieces; the first bytes of each piece are given, the others are to be predicted."""
    text = torch.tensor(list((inspect.getsource(textwrap) + inspect.getsource(json.decoder)).encode()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [
        {"input_ids": piece, "labels": torch.where(torch.arange(LENGTH) < 8 * (number % 4), -100, piece)}
        for number, piece in enumerate(pieces)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="HDET in a transformers Trainer.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="runs/transformers")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    samples = read_samples()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    args = TrainingArguments(
        options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=options.steps // 4,
        save_steps=options.steps // 4,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=options.steps // 4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=samples[:-40], eval_dataset=samples[-40:])
    callback = HDETCallback(
        lambda optimizer: [hdet.learning_rate(optimizer, spread=0.3)],
        interval=max(1, options.steps // 20),
        controller=hdet.controllers.Softmax(temperature=0.1),
    ).attach(trainer)
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]  # of the best model, on every replica
    if trainer.is_world_process_zero() and callback.ensemble is not None:
        print(f"rounds: {callback.ensemble.progress['round']}")
        print(f"held-out loss: {loss:.4f}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
