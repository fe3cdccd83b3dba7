"""The callback in a real transformers Trainer with two processes, beside a plain loop: all in one launch, as importing
transformers takes long. The replicas have different numbers of tokens."""

import pathlib
import shutil

import pytest
import torch
import torch.distributed as dist
from hosts import (
    OPTIONS,
    SAVED,
    STEPS,
    Told,
    as_under_torchrun,
    check_same,
    example,
    explored,
    follow_guide,
    make_schedule,
    weights,
)
from processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet

SAMPLES, LENGTH, ACCUMULATION = 3, 7, 2  # per micro-batch


def make_sample(number, counts=False):
    """A sentence of which only the last few tokens are predicted: on the second replica fewer than on the first.

    Its tokens are random, or count on from a random one with gaps.
    """
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 32, (LENGTH,), generator=generator)
    gaps = torch.rand(LENGTH, generator=generator) < 0.2
    tokens = torch.where(gaps, tokens, (tokens[0] + torch.arange(LENGTH)) % 32) if counts else tokens
    given = number % 3 + 3 * (number // SAMPLES % 2)
    labels = torch.where(torch.arange(LENGTH) < given, -100, tokens)
    return {"input_ids": tokens, "labels": labels}


def make_language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=LENGTH, use_cache=False, **sizes))


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def summed_loss(model, samples):
    """The sum over what is predicted, and the number of it."""
    labels = torch.stack([sample["labels"] for sample in samples])[:, 1:]
    logits = model(input_ids=torch.stack([sample["input_ids"] for sample in samples])).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.reshape(-1, 32), labels.reshape(-1), reduction="sum")
    return loss, labels.ne(-100).sum()


def held_out(model):
    model.eval()
    with torch.no_grad():
        loss, tokens = summed_loss(model, [make_sample(number) for number in range(1000, 1008)])
    model.train()
    return float(loss / tokens)


def plain_loop():
    """What the Trainer trains on, in a loop: the loss per token of all replicas; each is judged by that of its own."""
    model = make_language_model()
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    scheduler = make_schedule(optimizer)
    told = Told()
    ensemble = hdet.Ensemble(
        optimizer, explored(optimizer), total_steps=STEPS, model=ddp, on_round=[told], **OPTIONS
    )  # fmt: skip
    for step in range(STEPS):
        parts = [2 * (step * ACCUMULATION + micro) + dist.get_rank() for micro in range(ACCUMULATION)]
        batches = [[make_sample(SAMPLES * part + k) for k in range(SAMPLES)] for part in parts]
        of_all = torch.tensor([sum(int(s["labels"][1:].ne(-100).sum()) for b in batches for s in b)])
        dist.all_reduce(of_all)
        total, tokens = 0.0, 0
        for micro, samples in enumerate(batches):
            ddp.require_backward_grad_sync = micro == ACCUMULATION - 1
            loss, number = summed_loss(ddp, samples)
            (loss * 2 / of_all).sum().backward()
            total, tokens = total + loss.detach(), tokens + number
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ensemble.step(total / tokens)
        if step + 1 == SAVED:
            with ensemble.consensus():
                average, judged = weights(model), held_out(model)
    ensemble.close()
    return told.rounds, weights(model), average, judged


def train(folder, resume=None, attach=True, options=None, **arguments):
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

    model, told = make_language_model(), Told()
    optimizer = make_optimizer(model)
    samples = [make_sample(number) for number in range(SAMPLES * 2 * ACCUMULATION * STEPS)]
    arguments = {
        "save_strategy": "steps",
        "save_steps": SAVED,
        "eval_strategy": "steps",
        "eval_steps": SAVED,
    } | arguments
    args = TrainingArguments(
        folder, per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=ACCUMULATION, num_train_epochs=1,
        per_device_eval_batch_size=4, max_grad_norm=0.0, use_cpu=True, ddp_backend="gloo", report_to=[],
        disable_tqdm=True, logging_steps=3, dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    trainer = InOrder(
        model=model, args=args, train_dataset=samples, eval_dataset=[make_sample(n) for n in range(1000, 1008)],
        optimizers=(optimizer, make_schedule(optimizer)),
    )  # fmt: skip
    callback = HDETCallback(explored, find_lr=False, on_round=[told], **OPTIONS, **(options or {}))
    if attach:
        callback.attach(trainer)
    else:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, told, weights(trainer.model)


def compare(folder):
    from safetensors.torch import load_file

    rounds, ours, average, loss = plain_loop()
    trainer, told, whole = train(folder)
    check_same(told.rounds, rounds)
    check_same(whole, ours)
    saved = load_file(pathlib.Path(folder, f"checkpoint-{SAVED}", "model.safetensors"))
    check_same(saved, {name: average[name] for name in saved})
    assert "model.embed_tokens.weight" in saved
    logs = trainer.state.log_history
    check_same({row["step"]: row["eval_loss"] for row in logs if "eval_loss" in row}[SAVED], loss)
    assert [row["step"] for row in logs if "hdet/learning_rate/center" in row] == [6, 9, STEPS]  # as it logs itself
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(pathlib.Path(folder, f"checkpoint-{STEPS}"))  # as if it had been stopped
    dist.barrier()
    _, again, ended = train(folder, resume=True, save_strategy="no")
    assert all(torch.equal(ended[name], whole[name]) for name in whole)
    assert again.rounds == told.rounds[1:]


def load_the_best(folder):
    """In mid-round at every evaluation but the last."""
    from safetensors.torch import load_file

    trainer, _, ended = train(folder, save_steps=3, eval_steps=3, load_best_model_at_end=True, save_total_limit=1)
    best = pathlib.Path(trainer.state.best_model_checkpoint)
    saved = load_file(best / "model.safetensors")
    check_same({name: ended[name] for name in saved}, saved)
    assert len(list((best / "hdet").iterdir())) == 1
    return [p.sum().item() for p in trainer.model.parameters()]


RHYTHMS = {  # logging arguments, the interval, and at which steps the numbers of which round are told
    "the end of a round": ({"logging_steps": 10}, 5, [(10, 1), (20, 3), (30, 5), (40, 7)]),
    "every second end": ({"logging_steps": 10}, 10, [(10, 0), (20, 1), (30, 2), (40, 3)]),
    "a longer interval": ({"logging_steps": 10}, 20, [(20, 0), (40, 1)]),
    "an interval that does not divide": ({"logging_steps": 10}, 7, [(10, 0), (20, 1), (30, 3), (40, 5)]),
    "the first step": ({"logging_steps": 30, "logging_first_step": True}, 1, [(1, 0), (30, 29), (40, 39)]),
    "epochs": ({"logging_strategy": "epoch"}, 4, [(20, 4), (40, 9)]),
    "none": ({"logging_strategy": "no"}, 5, [(40, 7)]),
    "evaluations": ({"logging_steps": 20, "eval_strategy": "steps", "eval_steps": 10}, 5, [(20, 3), (40, 7)]),
    "batches": ({"logging_steps": 20, "gradient_accumulation_steps": 2, "num_train_epochs": 4}, 10, [(20, 1), (40, 3)]),
}  # fmt: skip


def log_as_without_hdet(folder):
    """The Trainer's own entries are all there, and as many as without; ours lie beside them."""
    for name, (arguments, interval, ours) in RHYTHMS.items():
        (plain, returned, drawn), (told, returned_too, drawn_too) = (
            logged(f"{folder}/{name}", arguments, None),
            logged(f"{folder}/{name} with", arguments, interval),
        )
        stripped = [{key for key in row if not key.startswith("hdet/")} for row in told]
        assert [(row["step"], set(row)) for row in plain] == [
            (row["step"], keys) for row, keys in zip(told, stripped, strict=True)
        ], name
        assert [(row["step"], row["hdet/round"]) for row in told if "hdet/round" in row] == ours, name
        assert returned == returned_too, name  # what train() returns is the Trainer's
        assert drawn <= drawn_too, name
        if dist.get_rank() == 0:
            assert "train/hdet/learning_rate/center" in drawn_too, name


def logged(folder, arguments, interval):
    """The log of 40 steps, what `train()` returned, and the names of the scalars that TensorBoard has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter
    from transformers import Trainer, TrainingArguments
    from transformers.integrations import TensorBoardCallback

    from hdet.integrations.transformers import HDETCallback

    samples = [make_sample(number) for number in range(SAMPLES * 2 * 20)]
    args = TrainingArguments(
        folder, per_device_train_batch_size=SAMPLES, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, save_strategy="no", **({"num_train_epochs": 2} | arguments),
    )  # fmt: skip
    board = [TensorBoardCallback(SummaryWriter(f"{folder}/board"))]
    trainer = Trainer(
        model=make_language_model(), args=args, train_dataset=samples, eval_dataset=samples[:4], callbacks=board
    )
    if interval:
        HDETCallback(find_lr=False, interval=interval).attach(trainer)
    returned = trainer.train()
    found = EventAccumulator(f"{folder}/board").Reload().Tags()["scalars"] if dist.get_rank() == 0 else []
    return trainer.state.log_history, set(returned.metrics), set(found)


def follow(folder):
    model, samples = make_language_model(), [make_sample(number, True) for number in range(800)]
    names = follow_guide("transformers", folder, model=model, train_set=samples, held_out=samples[:8])
    assert names["trainer"].state.global_step == 100
    assert names["callback"].found is not None
    assert any("hdet/loss/replica_1" in row for row in names["trainer"].state.log_history)
    return [p.sum().item() for p in model.parameters()]


def find(folder):
    """On two replicas with different numbers of tokens: as by hand, and everything is as it was."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hdet.integrations.transformers import HDETCallback

    class Sees(TrainerCallback):
        def on_train_begin(self, args, state, control, model, optimizer, train_dataloader, **_):
            torch.rand(dist.get_rank() + 1) if self is before else None  # each has random numbers of its own
            loader, gradients = train_dataloader, train_dataloader.gradient_state
            self.seen = weights(model), torch.get_rng_state()
            self.said = str([
                [module.training for module in model.modules()], [p.grad is None for p in model.parameters()],
                optimizer.state_dict()["state"], loader.iteration, gradients.sync_gradients,
                len(gradients.dataloader_references), vars(state),
            ])  # fmt: skip

        def on_step_begin(self, args, state, control, **_):
            control.should_training_stop = True

    samples = [make_sample(number, True) for number in range(SAMPLES * 2 * ACCUMULATION * 80)]
    args = TrainingArguments(
        folder, per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=ACCUMULATION, max_steps=1000,
        learning_rate=1e-4, max_grad_norm=1.0, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    before, after = Sees(), Sees()
    trainer = Trainer(model=make_language_model(), args=args, train_dataset=samples, callbacks=[before])
    callback = HDETCallback().attach(trainer)
    trainer.add_callback(after)
    trainer.train()
    torch.testing.assert_close(after.seen, before.seen, rtol=0, atol=0)
    assert after.said == before.said
    assert trainer.lr_scheduler.base_lrs == pytest.approx([callback.found.rate] * 2)
    ddp = DistributedDataParallel(make_language_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    parts = range(dist.get_rank(), 2 * ACCUMULATION * 80, 2)

    def loss_fn(model, batch):
        loss, tokens = summed_loss(model, batch)
        return loss / tokens

    loader = [[samples[SAMPLES * part + k] for k in range(SAMPLES)] for part in parts]
    options = {"total_steps": 1000, "accumulate": ACCUMULATION, "clip_grad_norm": 1.0, "progress": False}
    by_hand = hdet.find_lr(ddp, optimizer, loader, loss_fn, **options)
    assert 1 / 1.3 < callback.found.rate / by_hand.rate < 1.3
    return callback.found.rate


def refuse(folder):
    from hdet.integrations.transformers import HDETCallback

    with pytest.raises(RuntimeError, match="HDETCallback must be attached, to see this replica's losses; write"):
        train(folder, attach=False)
    with pytest.raises(TypeError, match="'steps' is no argument"):
        HDETCallback(steps=3)
    with pytest.warns(UserWarning, match="computes its own loss: is it a mean over its own tokens"):
        train_with_own_loss(f"{folder}/own")


def train_with_own_loss(folder):
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETCallback

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    args = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", report_to=[])
    HDETCallback(interval=2).attach(Own(model=make_language_model(), args=args))


def transformers(folder):
    as_under_torchrun()
    compare(f"{folder}/compared")
    equal = [load_the_best(f"{folder}/best"), follow(f"{folder}/guide"), find(f"{folder}/found")]
    log_as_without_hdet(f"{folder}/logged")
    refuse(f"{folder}/refused")
    return equal, example("transformers_text.py", "--steps", "100", "--folder", f"{folder}/example")


def test_as_in_a_plain_loop_and_the_example(tmp_path):
    (first, said), (second, _) = run(transformers, 2, str(tmp_path), timeout=230)
    assert first == second
    assert float(said.splitlines()[-1].removeprefix("held-out loss: ")) < 3.5  # guessing: 5.5
