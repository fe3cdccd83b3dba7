"""`HDETCallback().attach(trainer)` in one process: it finds the rate, trains at it and leaves no other trace."""

import collections
import random

import numpy as np
import pytest
import torch
from torch import nn

import hdet

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hdet.integrations.transformers import HDETCallback

WORDS, LENGTH, BATCH = 32, 8, 8
LOW, HIGH = 2.0**-17, 0.3  # a power of two: found.apply then makes the very rate
pytestmark = pytest.mark.filterwarnings("ignore:the learning rate that was found")


def make_samples(count, seed):
    """Each token follows from the one before, with some noise; the first ones of every other sentence are given."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    for place in range(1, LENGTH):
        noise = torch.rand(count, generator=generator) < 0.05
        tokens[:, place] = torch.where(noise, tokens[:, place], (5 * tokens[:, place - 1] + 3) % WORDS)
    given = torch.arange(LENGTH) < 3 * (torch.arange(count)[:, None] % 2)
    labels = torch.where(given, -100, tokens)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


TRAINED, HELD_OUT = make_samples(1600, 0), make_samples(256, 1)


def make_model(dropout=0.0):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, use_cache=False, attention_dropout=dropout, **sizes
    )
    return LlamaForCausalLM(config)


def make_trainer(folder, lr, steps=100, kind=Trainer, model=None, callbacks=(), **arguments):
    arguments = {"lr_scheduler_type": "cosine", "warmup_steps": 10, "save_strategy": "no", "seed": 3} | arguments
    args = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=lr, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, **{"logging_steps": 20} | arguments,
    )  # fmt: skip
    given = {"model_init": model} if callable(model) and not isinstance(model, nn.Module) else {"model": model}
    if model is None:
        given = {"model": make_model()}
    return kind(args=args, train_dataset=TRAINED, eval_dataset=HELD_OUT, callbacks=list(callbacks), **given)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def rates(trainer):
    return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


class Stop(TrainerCallback):
    """After the search and one micro-batch."""

    def on_step_begin(self, args, state, control, **_):
        control.should_training_stop = True


class Noting(Trainer):
    """Writes into itself, as trl's trainers do, draws random numbers, and may fail in the middle of the search."""

    error, calls = None, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.calls == 0:
            self.metrics, self.tokens = {"train": collections.defaultdict(list)}, torch.zeros(())
        self.calls += 1
        self.metrics["train"]["noise"].append(random.random() + np.random.rand())
        self.tokens += inputs["labels"].ne(-100).sum()
        self.log({"own": 1.0})
        if self.error is not None and self.calls == 30:
            raise self.error
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Keeps(TrainerCallback):
    """What there is when training begins."""

    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, train_dataloader, **_):
        self.trained_on = (model, optimizer, lr_scheduler, train_dataloader, state)
        self.before = self.everything()

    def everything(self):
        model, optimizer, scheduler, loader, state = self.trained_on
        sampler = loader.batch_sampler.sampler
        gradients = loader.gradient_state
        return [
            {name: tensor.clone() for name, tensor in model.state_dict().items()},
            [p.grad is None for p in model.parameters()], [module.training for module in model.modules()],
            [len(module._forward_hooks) for module in model.modules()], sorted(vars(model)),
            str(optimizer.state_dict()), sorted(vars(optimizer.optimizer)), str(scheduler.state_dict()),
            len(optimizer.optimizer._optimizer_step_pre_hooks), len(optimizer.optimizer._optimizer_step_post_hooks),
            torch.get_rng_state(), random.getstate(), str(np.random.get_state()),
            loader.iteration, sampler.epoch, str(sampler.generator.get_state()) if sampler.generator else "",
            loader.base_dataloader._iterator is None, gradients.sync_gradients, len(gradients.dataloader_references),
            gradients.end_of_dataloader, state.global_step, list(state.log_history), state.epoch,
        ]  # fmt: skip


# The rate


def test_from_a_bad_rate_it_is_as_good_as_the_best_of_a_sweep(tmp_path):
    def end_of(lr, ours):
        trainer = make_trainer(tmp_path, lr, 400)
        if ours:
            HDETCallback().attach(trainer)
        trainer.train()
        return trainer.evaluate()["eval_loss"]

    plain = {lr: end_of(lr, False) for lr in (LOW, 3e-3, 1e-2, 3e-2)}
    best = min(plain.values())
    assert plain[LOW] > 2 * best, plain
    found = {lr: end_of(lr, True) for lr in (1e-5, HIGH)}
    assert max(found.values()) < 1.3 * best, (found, plain)


@pytest.mark.parametrize(("bf16", "scaled"), [(False, False), (True, False), (False, True)])
def test_it_agrees_with_find_lr_by_hand(tmp_path, bf16, scaled):
    """Accumulation and clipping, with bf16 or a grad scaler."""
    trainer = make_trainer(
        tmp_path, 1e-4, 1000, gradient_accumulation_steps=4, max_grad_norm=1.0, bf16=bf16, warmup_steps=0
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    trainer.accelerator.scaler = scaler if scaled else None
    callback = HDETCallback().attach(trainer)
    trainer.add_callback(Stop())
    trainer.train()
    assert not scaled or scaler.get_scale() == 2.0**10
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(**batch).loss

    rows = [TRAINED[start : start + BATCH] for start in range(0, len(TRAINED), BATCH)]
    loader = [{name: torch.stack([row[name] for row in part]) for name in part[0]} for part in rows]
    by_hand = hdet.find_lr(
        model, optimizer, loader, loss_fn, total_steps=1000, accumulate=4, clip_grad_norm=1.0, progress=False
    )
    assert 1 / 1.3 < callback.found.rate / by_hand.rate < 1.3


# Everything else as before


def test_the_run_is_the_one_that_begins_at_the_found_rate(tmp_path, capsys):
    """Bit for bit: weights, data order, dropout, random numbers of the loss, log."""
    ours = make_trainer(tmp_path, LOW, 100, Noting, make_model(0.3))
    ours.loss_is_scaled_for_ga = True
    callback = HDETCallback().attach(ours)
    ours.train()
    assert capsys.readouterr().out.count("hdet found ") == 1  # what was found is said once
    plain = make_trainer(tmp_path, callback.found.rate, 100, Noting, make_model(0.3))
    plain.loss_is_scaled_for_ga = True
    plain.train()
    same(weights(ours), weights(plain))
    assert losses(ours) == losses(plain)
    assert rates(ours) == rates(plain)
    assert max(rates(ours)) < callback.found.rate < 1.1 * max(rates(ours))
    assert ours.metrics == plain.metrics
    assert ours.calls == plain.calls
    same(ours.tokens, plain.tokens)
    told = [row for row in ours.state.log_history if any(key.startswith("hdet/search/") for key in row)]
    assert [row["step"] for row in told] == [20]
    assert told[0]["hdet/search/rate"] == callback.found.rate
    assert "loss" in told[0]
    assert len([row for row in ours.state.log_history if "own" in row]) == ours.calls
    assert callback.ensemble.found is callback.found


@pytest.mark.parametrize(
    "error", [RuntimeError("not enough memory: you tried to allocate"), KeyboardInterrupt("Ctrl-C")]
)
def test_everything_is_as_before_after_an_error(tmp_path, error):
    keeps = Keeps()
    trainer = make_trainer(tmp_path, 1e-3, 200, Noting, make_model(0.3), [keeps], gradient_accumulation_steps=2)
    trainer.loss_is_scaled_for_ga, trainer.error = True, error
    HDETCallback().attach(trainer)
    names = set(vars(trainer))
    with pytest.raises(type(error), match=str(error)):
        trainer.train()
    after = keeps.everything()
    for before, now in zip(keeps.before, after, strict=True):
        same(before, now) if isinstance(before, (dict, torch.Tensor)) else None
        assert isinstance(before, (dict, torch.Tensor)) or before == now
    assert trainer.calls == 0
    assert not {"metrics", "tokens"} & set(vars(trainer))
    assert "training_step" not in set(vars(trainer)) - names
    assert trainer.state.log_history == []


# Which runs are searched


def test_a_resumed_run_keeps_the_schedule_that_was_found(tmp_path):
    whole = make_trainer(tmp_path, 1e-5, 120, save_strategy="steps", save_steps=60)
    HDETCallback().attach(whole)
    whole.train()
    again = make_trainer(tmp_path, 1e-5, 120)
    callback = HDETCallback().attach(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-60"))
    assert callback.found is None
    assert rates(again) == rates(whole)
    same(weights(again), weights(whole))


@pytest.mark.parametrize(("steps", "options", "said"), [(99, {}, 1), (100, {"find_lr": False}, 0)])
def test_short_runs_and_those_of_whom_knows_keep_their_rate(tmp_path, capsys, recwarn, steps, options, said):
    trainer = make_trainer(tmp_path, 1e-3, steps)
    callback = HDETCallback(**options).attach(trainer)
    trainer.add_callback(Stop())
    trainer.train()
    assert callback.found is None
    assert trainer.lr_scheduler.base_lrs == [1e-3] * 2
    assert capsys.readouterr().out.count(f"keeps the learning rate as it is: {steps} optimizer steps") == said
    assert not [w for w in recwarn if "replica" in str(w.message)]


def test_where_none_is_found_the_run_keeps_its_rate(tmp_path):
    class Constant(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 0 * super().compute_loss(model, inputs, False, num_items_in_batch) + 1

    trainer = make_trainer(tmp_path, 1e-3, kind=Constant)
    trainer.loss_is_scaled_for_ga = True
    callback = HDETCallback().attach(trainer)
    trainer.add_callback(Stop())
    with pytest.warns(UserWarning, match="no learning rate was found, so the run keeps its own"):
        trainer.train()
    assert callback.found is None
    assert trainer.lr_scheduler.base_lrs == [1e-3] * 2


def test_data_that_cannot_be_read_twice(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self):
            self.rows = iter(TRAINED)

        def __iter__(self):
            return self.rows

    trainer = make_trainer(tmp_path, 1e-3)
    trainer.train_dataset = Stream()
    HDETCallback().attach(trainer)
    with pytest.raises(ValueError, match=r"leave the search out: HDETCallback\(find_lr=False\)"):
        trainer.train()


# Schedules and models


def test_plateau_and_model_init(tmp_path):
    trainer = make_trainer(
        tmp_path, 1e-5, model=lambda: make_model(), lr_scheduler_type="reduce_lr_on_plateau", warmup_steps=0,
        eval_strategy="steps", eval_steps=50,
    )  # fmt: skip
    callback = HDETCallback().attach(trainer)
    trainer.train()
    first, found = weights(trainer), callback.found
    assert rates(trainer)[0] == pytest.approx(found.rate)
    trainer.train()  # anew, with another model
    assert callback.found.rate == found.rate
    same(weights(trainer), first)


def summed_loss(outputs, labels, num_items_in_batch):
    logits, labels = outputs["logits"][:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def test_a_loss_function_is_given_its_own_tokens(tmp_path):
    found = []
    for function in (None, summed_loss):
        trainer = make_trainer(tmp_path, 1e-4, 200)
        trainer.compute_loss_func = function
        found.append(HDETCallback().attach(trainer))
        trainer.add_callback(Stop())
        trainer.train()
    theirs, ours = (callback.found for callback in found)
    assert ours.first_loss == pytest.approx(theirs.first_loss)
    assert ours.rate == pytest.approx(theirs.rate, rel=0.01)


class Line(nn.Module):
    """A model that is not of transformers, whose batches have no labels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(self.layer(x), y)}


def test_batches_without_labels(tmp_path):
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, 1e-5, 200, model=Line())
    inputs = torch.randn(400, 4)
    trainer.train_dataset = [{"x": x, "y": 1 + x.sum().reshape(1)} for x in inputs]
    callback = HDETCallback().attach(trainer)
    trainer.train()
    assert callback.found.rate > 1e-3
    assert callback.found.samples % (4 * BATCH) == 0  # four batches each time
    assert losses(trainer)[-1] < 0.1 * losses(trainer)[0]


@pytest.mark.soak
def test_peft_trains_the_adapters_only(tmp_path):
    peft = pytest.importorskip("peft")
    base = make_model()
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    trainer = make_trainer(tmp_path, 1e-5, 200, model=peft.get_peft_model(base, adapters))
    callback = HDETCallback().attach(trainer)
    trainer.train()
    assert callback.found.rate > 1e-4
    ended = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora" not in name}
    same(ended, frozen)
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.soak
def test_trls_supervised_fine_tuning(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    columns = {name: [row[name].tolist() for row in TRAINED] for name in TRAINED[0]}
    table = datasets.table.InMemoryTable.from_pydict(columns)
    rows = datasets.Dataset(table, fingerprint="made on the spot")

    def run(lr, ours):
        args = trl.SFTConfig(
            str(tmp_path), max_steps=100, per_device_train_batch_size=BATCH, learning_rate=lr, use_cpu=True, seed=3,
            report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=20, bf16=False, max_length=LENGTH,
            gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
            dataloader_pin_memory=False, warmup_steps=0,
        )  # fmt: skip
        trainer = trl.SFTTrainer(make_model(), args, train_dataset=rows, processing_class=tokenizer())
        callback = HDETCallback().attach(trainer) if ours else None
        trainer.train()
        return trainer, callback

    ours, callback = run(LOW, True)
    plain, _ = run(callback.found.rate, False)
    same(weights(ours), weights(plain))
    for name in ("loss", "mean_token_accuracy", "num_tokens", "entropy"):
        told, without = ([row[name] for row in t.state.log_history if name in row] for t in (ours, plain))
        assert len(told) == 5
        assert told == without


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(2, WORDS)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
