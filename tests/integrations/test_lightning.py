"""The callback in a real Lightning Trainer with two processes, beside a plain loop: all in one launch, as importing
Lightning takes long."""

import pathlib
import shutil

import pytest
import torch
import torch.distributed as dist
from cases import batch
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
    held_out,
    loss_of,
    make_model,
    make_optimizer,
    make_schedule,
    plain_loop,
    weights,
)
from processes import run


class Batches:
    """This replica's batches in order; it knows its place, as a resumable loader does."""

    def __init__(self, number):
        self.number, self.at = number, 0

    def __len__(self):
        return self.number

    def __iter__(self):
        self.at %= self.number
        while self.at < self.number:
            self.at += 1
            yield batch(dist.get_rank(), self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make_module(kind):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()
            self.validated = []

        def forward(self, x):
            return self.model(x)

        def training_step(self, data, index):
            return loss_of(self, data)

        def validation_step(self, data, index):
            self.validated.append((self.trainer.global_step, held_out(self.model)))
            self.log("held_out", self.validated[-1][1])

        def configure_optimizers(self):
            optimizer = make_optimizer(self.model)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": make_schedule(optimizer), "interval": "step"},
            }

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, data, index):
            optimizers, schedule = self.optimizers(), self.lr_schedulers()
            loss = loss_of(self, data)
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            schedule.step()
            return {"loss": loss, "other": 1}

        def configure_optimizers(self):
            first = make_optimizer(self.model)
            second = torch.optim.AdamW(first.param_groups.pop()["params"], lr=0.02, weight_decay=0.1)
            both = torch.optim.lr_scheduler.CosineAnnealingLR
            self.second = both(second, STEPS)
            return [first, second], [make_schedule(first)]

        def on_train_batch_end(self, *_):
            self.second.step()

    return Module() if kind == "automatic" else Manual()


def fit(folder, kind="automatic", accumulation=1, resume=None, before=(), after=(), trainer_options=None, **options):
    """The callback, the module and what was told of the rounds."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from hdet.integrations.lightning import HDETCallback

    told, module = Told(), make_module(kind)
    callback = HDETCallback(explored, find_lr=False, on_round=[told], **OPTIONS, **options)
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=STEPS * (2 if kind == "manual" else 1), max_epochs=1,
        accumulate_grad_batches=accumulation, val_check_interval=SAVED * accumulation, logger=CSVLogger(folder, "log"),
        callbacks=[*before, callback, saved, *after], enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=1, **(trainer_options or {}),
    )  # fmt: skip
    validation = [torch.zeros(1)]  # a DataLoader would draw from the global random numbers
    trainer.fit(module, Batches(STEPS * accumulation), validation, ckpt_path=resume)
    return callback, module, told, trainer


def compare_automatic(folder):
    """With accumulation, validation and a checkpoint in mid-round; then the same again, from the checkpoint."""
    rounds, ours, average, loss = plain_loop(accumulation=2)
    callback, module, told, _ = fit(folder, accumulation=2)
    check_same(told.rounds, rounds)
    check_same(weights(module.model), ours)
    assert callback.ensemble.closed
    assert [at for at, _ in module.validated] == [0, SAVED]  # the first is Lightning's sanity check
    check_same(module.validated[1][1], loss)
    path = pathlib.Path(folder, f"step={SAVED}.ckpt")
    saved = torch.load(path, weights_only=False)["state_dict"]
    check_same({name.removeprefix("model."): tensor for name, tensor in saved.items()}, average)
    dist.barrier()  # the first replica writes it
    assert "hdet/learning_rate/center" in pathlib.Path(folder, "log/version_0/metrics.csv").read_text()
    resume(folder, path, weights(module.model), told.rounds[1:])
    return path


def resume(folder, path, whole, rounds):
    """Exactly; through a link, too. It goes on from the average where the replicas' own state is lost."""
    link = pathlib.Path(folder, "last.ckpt")
    if dist.get_rank() == 0:
        link.symlink_to(path)
    dist.barrier()
    _, module, told, _ = fit(f"{folder}/resumed", accumulation=2, resume=link)
    ended = weights(module.model)
    assert all(torch.equal(ended[name], whole[name]) for name in whole)
    assert told.rounds == rounds


def resume_without(folder, path):
    bare = pathlib.Path(folder, "bare.ckpt")
    if dist.get_rank() == 0:
        shutil.copy(path, bare)
    dist.barrier()
    with pytest.warns(UserWarning, match="there is no state of an ensemble at step 6"):
        _, module, told, _ = fit(f"{folder}/bare", accumulation=2, resume=bare)
    assert [row[1] for row in told.rounds] == [8, 10]
    return module.model[1].weight.tolist()


def compare_manual(folder):
    """Two optimizers that step together."""
    rounds, ours, _, _ = plain_loop(broadcast_buffers=False)  # as Lightning does it there
    with pytest.raises(ValueError, match="total_steps must be given with manual optimization"):
        fit(folder, "manual")
    with pytest.raises(ValueError, match="with manual optimization Lightning shares the gradients itself"):
        fit(folder, "manual", total_steps=STEPS, gradients="local")
    _, module, told, _ = fit(folder, "manual", total_steps=STEPS)
    check_same(told.rounds, rounds)
    check_same(weights(module.model), ours)


def compare_local(folder):
    rounds, ours, _, _ = plain_loop(options={"gradients": "local"})
    _, module, told, _ = fit(folder, gradients="local")
    check_same(told.rounds, rounds)
    check_same(weights(module.model), ours)


def follow(folder):
    module = make_module("automatic")
    names = follow_guide("Lightning", folder, module=module, loader=Learnable(4 * STEPS))
    assert names["callback"].ensemble.progress["step"] == names["trainer"].global_step == 12 * STEPS
    assert names["callback"].found is not None
    dist.barrier()  # the first replica may still be removing the checkpoint before the last
    assert len(list(pathlib.Path(folder, "checkpoints").iterdir())) == 2
    return module.model[1].weight.tolist()


class Learnable(Batches):
    """With targets that follow from the inputs."""

    def __iter__(self):
        return ((x, x[:, :2].tanh() + x[:, 2:4]) for x, _ in super().__iter__())


def run_at(rate, find_lr):
    """101 steps of two micro-batches."""
    import lightning.pytorch as pl

    from hdet.integrations.lightning import HDETCallback

    told, module = Told(), make_module("automatic")
    module.configure_optimizers = lambda: torch.optim.AdamW(module.model.parameters(), rate)
    callback = HDETCallback(explored, find_lr=find_lr, on_round=[told], **OPTIONS)
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=101, accumulate_grad_batches=2, callbacks=[callback],
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, Learnable(202))
    return callback.found, told.rounds, weights(module.model)


def search():
    """Everything is put back on every replica: the run goes on as one that has the found rate from the start."""
    found, *ours = run_at(1e-5, True)
    assert found.scale > 10
    none, *theirs = run_at(found.rate, False)
    assert none is None
    assert ours[0] == theirs[0]
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in ours[1])
    return found.rate


def keep_the_best(folder):
    """What lies beside a checkpoint goes with it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(f"{folder}/best", filename="{step}", monitor="held_out", every_n_train_steps=2, mode="max")
    _, _, _, trainer = fit(folder, after=[best], trainer_options={"check_val_every_n_epoch": None})
    dist.barrier()
    assert trainer.checkpoint_callbacks[1].best_model_path
    assert len(list(pathlib.Path(folder, "best").iterdir())) == 2


def refuse(folder):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import FSDPStrategy

    from hdet.integrations.lightning import HDETCallback, check_strategy

    with pytest.raises(ValueError, match=r"strategy must be DDP, .* got FSDPStrategy; write Trainer\(strategy"):
        check_strategy(FSDPStrategy())
    with pytest.raises(
        TypeError, match=r"'intervall' is no argument of hdet\.Ensemble, which takes total_steps, interval"
    ):
        HDETCallback(intervall=3)
    with pytest.raises(TypeError, match="model is given by the trainer"):
        HDETCallback(model=None)

    class TooEarly(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(f"{folder}/early.ckpt")

    with pytest.raises(RuntimeError, match="put HDETCallback first"):
        fit(folder, before=[TooEarly()])


def lightning(folder):
    as_under_torchrun()
    path = compare_automatic(f"{folder}/automatic")
    compare_manual(f"{folder}/manual")
    compare_local(f"{folder}/local")
    keep_the_best(f"{folder}/kept")
    refuse(f"{folder}/refused")
    equal = [resume_without(f"{folder}/automatic", path), follow(f"{folder}/guide"), search()]
    return equal, example("lightning_digits.py", "--epochs", "5", "--folder", f"{folder}/example")


def test_as_in_a_plain_loop_and_the_example(tmp_path):
    (first, said), (second, _) = run(lightning, 2, str(tmp_path), timeout=230)
    assert first == second
    rounds, held_out = said.splitlines()[-2:]
    assert rounds == "rounds: 125"
    assert float(held_out.removeprefix("held-out loss: ")) < 0.5  # at the optimizer's own rate: 2.3
