"""HDET in TRL's SFTTrainer with LoRA adapters: one line finds their learning rate. It begins far too low.

    pip install 'hdet[transformers]' trl peft
    python examples/trl_lora.py

A tiny model on Python's own source code, byte by byte, nothing to download: all weights learn one module, then adapters
learn another one.
"""

import inspect
import json.decoder
import textwrap
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hdet.integrations.transformers import HDETCallback

LENGTH = 64
PLAIN: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}


def pieces(module: Any) -> list[list[int]]:
    text = list(inspect.getsource(module).encode())
    return [text[k : k + LENGTH] for k in range(0, len(text) - LENGTH, LENGTH)]


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    before = [{"input_ids": torch.tensor(piece), "labels": torch.tensor(piece)} for piece in pieces(textwrap)]
    Trainer(
        model, TrainingArguments("runs/trl", max_steps=300, learning_rate=3e-3, **PLAIN), train_dataset=before
    ).train()

    words = Tokenizer(models.WordLevel({f"<{byte}>": byte for byte in range(256)}, "<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<1>")
    table = InMemoryTable.from_pydict({"input_ids": pieces(json.decoder)})
    rows = Dataset(table, fingerprint="json.decoder")
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    config = SFTConfig("runs/trl", max_steps=200, learning_rate=1e-6, logging_steps=50, bf16=False, max_length=LENGTH,
                       dataset_kwargs={"skip_prepare_dataset": True}, **PLAIN)  # fmt: skip
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)
    HDETCallback().attach(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"training loss: {losses[0]:.3f} in the first 50 steps, {losses[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
