"""The search for the learning rate in a Lightning Trainer of one process; test_lightning.py has one of two."""

import copy
import pickle
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hdet

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)  # fmt: skip
from lightning.pytorch.loggers import Logger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from torchmetrics import MeanMetric, MetricCollection  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC  # noqa: E402

from hdet.integrations.lightning import HDETCallback  # noqa: E402

schedulers = torch.optim.lr_scheduler
DIGITS = load_digits()
IMAGES, LABELS = torch.tensor(DIGITS.data).float() / 16, torch.tensor(DIGITS.target)
TRAIN, HELD_OUT = TensorDataset(IMAGES[:1200], LABELS[:1200]), TensorDataset(IMAGES[1200:], LABELS[1200:])


class Digits(pl.LightningModule):
    """A classifier; `options` are what `configure_optimizers` returns, made from the optimizer."""

    def __init__(self, lr=1e-5, configure=lambda optimizer, module: optimizer):
        super().__init__()
        self.lr, self.configure = lr, configure
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("train", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("held_out", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.configure(torch.optim.AdamW(self.parameters(), lr=self.lr), self)


class Records(Logger):
    """What loggers are told."""

    name, version = "records", 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


def loader(data=TRAIN, batch_size=48, shuffle=True, **options):
    return DataLoader(data, batch_size, shuffle=shuffle, **options)


def fit(
    module, loaders=None, held_out=None, callbacks=(), before=(), max_epochs=5, ckpt_path=None, ours=None, **options
):
    """The callback and the Trainer, 125 steps unless told otherwise."""
    callback = HDETCallback() if ours is None else ours
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {
        "logger": False,
        "accelerator": "cpu",
        "max_epochs": max_epochs,
        "log_every_n_steps": 1,
        **quiet,
        **options,
    }
    saves = any(isinstance(entry, ModelCheckpoint) for entry in callbacks)
    trainer = pl.Trainer(callbacks=[*before, callback, *callbacks], enable_checkpointing=saves, **options)
    trainer.fit(module, loader() if loaders is None else loaders, held_out, ckpt_path=ckpt_path)
    return callback, trainer


def seeded(kind=Digits, *args, seed=0, **options):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return kind(*args, **options)


def one_cycle(optimizer, module):
    steps = module.trainer.estimated_stepping_batches
    return [optimizer], [{"scheduler": schedulers.OneCycleLR(optimizer, module.lr, steps), "interval": "step"}]


# What it brings


def ends_at(lr, ours):
    """The held-out loss after 400 steps."""
    callback, trainer = fit(
        seeded(Digits, lr, one_cycle), held_out=loader(HELD_OUT, 597, False), max_epochs=16, ours=ours,
        check_val_every_n_epoch=16,
    )  # fmt: skip
    return float(trainer.callback_metrics["held_out"]), callback


def test_from_a_rate_far_too_low_or_high_it_ends_as_at_the_best_of_a_sweep():
    best = min(ends_at(lr, HDETCallback(find_lr=False))[0] for lr in (3e-3, 1e-2, 3e-2))
    for lr in (1e-5, 0.3):
        loss, callback = ends_at(lr, HDETCallback())
        assert loss < 1.3 * best, (lr, loss, best)
        assert callback.ensemble.found is callback.found


def in_a_plain_loop(autocast, scaler=None):
    module = seeded()
    optimizer = torch.optim.AdamW(module.net.parameters(), lr=1e-3)

    def loss_fn(net, batch):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return cross_entropy(net(batch[0]), batch[1])

    return hdet.find_lr(
        module.net, optimizer, loader(batch_size=12), loss_fn, total_steps=125, accumulate=4, clip_grad_norm=1.0,
        scaler=scaler,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_answer_is_that_of_a_plain_loop_with_accumulation_clipping_and_half_precision(precision):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None
    how = {"precision": precision}
    if scaler is not None:  # Lightning takes bf16 on a CPU otherwise
        how = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
    rows = []
    ours, _ = fit(
        seeded(Digits, 1e-3), loader(batch_size=12), accumulate_grad_batches=4, gradient_clip_val=1.0,
        before=[Look(rows)], callbacks=[Look(rows)], **how,
    )  # fmt: skip
    assert_same(*rows, but="lr")
    dtype = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
    theirs = in_a_plain_loop(dtype, scaler and torch.amp.GradScaler("cpu", init_scale=256.0))
    assert 1 / 1.3 < ours.found.rate / theirs.rate < 1.3, (ours.found.rate, theirs.rate)


# What is put back


class Keeps(Digits):
    """A module that keeps all that a module may keep, and logs in all ways."""

    def __init__(self, lr=1e-5, raises=None):
        super().__init__(lr)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10)
        self.many = MetricCollection([MulticlassAUROC(10, thresholds=None), MulticlassAccuracy(10)])
        self.nested = Nested()
        self.outputs, self.calls, self.raises = [], 0, raises
        self.net[0].register_forward_hook(lambda *_: None)

    def training_step(self, batch, index):
        self.calls += 1
        if self.raises is not None and self.calls == 150:
            raise self.raises
        logits = self.net(batch[0] + 0.01 * torch.randn_like(batch[0]) * random.random() * np.random.rand())
        loss = cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.many.update(logits, batch[1])
        self.nested(loss)
        self.outputs.append(batch[0].sum())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"loss": loss, "index": float(index)})
        if self.logger is not None:
            self.logger.log_metrics({"by_hand": float(loss)}, step=self.global_step)
        self.print(end="")
        return {"loss": loss, "logits": logits.detach()}

    def on_train_epoch_end(self):
        self.many.reset()


class Nested(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, loss):
        self.mean.update(loss.detach())


class Look(Callback):
    """Everything that a run holds, when training starts and when it fails."""

    def __init__(self, rows):
        self.rows = rows

    @property
    def state_key(self):
        return f"look {id(self)}"

    def on_train_start(self, trainer, module):
        self.rows.append(everything(trainer, module))

    def on_exception(self, trainer, module, exception):
        self.on_train_start(trainer, module)


def everything(trainer, module):
    optimizer = trainer.optimizers[0]
    metrics = {name: part.metric_state for name, part in module.named_modules() if hasattr(part, "metric_state")}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    sampled = getattr(trainer.train_dataloader, "generator", None)
    kept = {
        "weights": module.state_dict(),
        "gradients": [p.grad for p in module.parameters()],
        "metrics": metrics,
        "updates": [part.update_count for part in module.modules() if hasattr(part, "update_count")],
        "outputs": getattr(module, "outputs", None),
        "names": sorted(vars(module)),
        "modes": [part.training for part in module.modules()],
        "optimizer": optimizer.state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "loader": None if sampled is None else sampled.get_state(),
        "loops": trainer.fit_loop.state_dict(),
        "steps": [trainer.global_step, trainer.current_epoch, trainer.should_stop],
        "told": [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)],
    }
    return {**copy.deepcopy(kept), "objects": [*map(id, trainer.callbacks), *map(id, trainer.loggers)]}


def assert_same(one, other, but=(), at=""):
    """Equal bit for bit, apart from the entries named `but`."""
    assert type(one) is type(other), at
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in set(one) - {but}:
            assert_same(one[key], other[key], but, f"{at}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, but, f"{at}/{number}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), at
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), at
    else:
        assert one == other, at


@pytest.mark.parametrize("raises", [None, RuntimeError("out of memory"), KeyboardInterrupt(), ValueError("bad image")])
def test_everything_is_put_back(raises, capsys):
    rows, records = [], Records()
    look = Look(rows)
    before = signal.getsignal(signal.SIGINT)
    drawn = loader(generator=torch.Generator().manual_seed(5))
    run = {"before": [look], "logger": records, "max_epochs": 5}
    try:
        if raises is None:
            callback, _ = fit(seeded(Keeps), drawn, callbacks=[Look(rows)], **run)
            assert callback.found.steps > 50
        else:
            with pytest.raises(SystemExit if isinstance(raises, KeyboardInterrupt) else type(raises)):
                fit(seeded(Keeps, raises=raises), drawn, **run)
            assert [name for _, told in records.lines for name in told] == []
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same(*rows, but="lr" if raises is None else ())


def test_the_run_goes_on_as_one_that_has_the_found_rate_from_the_start():
    ended = []
    found = None
    for ours in (HDETCallback(), HDETCallback(find_lr=False)):
        records = Records()
        module = seeded(Keeps, 1e-5 if found is None else found)
        callback, trainer = fit(
            module, held_out=loader(HELD_OUT, 597, False), ours=ours, logger=records, accumulate_grad_batches=2,
            max_epochs=9, gradient_clip_val=0.5, val_check_interval=10,
        )  # fmt: skip
        found = found or callback.found.rate
        searched = [line for line in records.lines if any("hdet/search" in name for name in line[1])]
        records.lines = [line for line in records.lines if line not in searched and "hdet/round" not in line[1]]
        ended.append((module.state_dict(), module.outputs, module.calls, trainer.global_step, records.lines))
        names = [f"hdet/search/{name}" for name in ("rate", "scale", "cost", "sure")]
        assert [(step, list(told)) for step, told in searched] == ([(0, names)] if ours.found else [])
    same = [{"x": [str(line) for line in lines if not any("hdet" in name for name in line[1])]} for *_, lines in ended]
    assert_same(*same)
    assert_same(ended[0][:4], ended[1][:4])


# Schedules


def every(kind, *args, **given):
    """One scheduler in a configuration."""

    def configure(optimizer, module):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": kind(optimizer, *args), **given}}

    return configure


def two(optimizer, module):
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=20)
    return [optimizer], [{"scheduler": warm, "interval": "step"}, schedulers.StepLR(optimizer, 2)]


SCHEDULES = {
    "none": lambda optimizer, module: optimizer,
    "one cycle": one_cycle,
    "every epoch": every(schedulers.CosineAnnealingLR, 5),
    "every other epoch": every(schedulers.ExponentialLR, 0.5, frequency=2),
    "growing": every(schedulers.LambdaLR, lambda epoch: 1 + epoch),
    "growing every other epoch": every(schedulers.LambdaLR, lambda epoch: 1 + epoch, frequency=2),
    "every third step": every(schedulers.LinearLR, 0.1, 1.0, 30, interval="step", frequency=3),
    "plateau": every(schedulers.ReduceLROnPlateau, monitor="held_out", interval="epoch"),
    "plateau in steps": every(schedulers.ReduceLROnPlateau, monitor="train", interval="step", frequency=5),
    "two of them": two,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_monitors_show_the_found_rate_at_the_peak_of_every_schedule(name):
    records = Records()
    callback, _ = fit(
        seeded(Digits, 1e-4, SCHEDULES[name]), held_out=loader(HELD_OUT, 597, False), logger=records,
        callbacks=[LearningRateMonitor("step")],
    )  # fmt: skip
    shown = [rate for _, told in records.lines for key, rate in told.items() if key.startswith("lr-")]
    assert max(shown) == pytest.approx(callback.found.rate, rel=1e-5)
    assert callback.found.scale > 3


def test_parameter_groups_keep_their_ratios():
    def configure(_, module):
        first, last = module.net[0].parameters(), module.net[2].parameters()
        return torch.optim.AdamW([{"params": first, "lr": 1e-6}, {"params": last, "lr": 1e-5}])

    callback, trainer = fit(seeded(Digits, configure=configure), accumulate_grad_batches=1)
    one, other = (group["lr"] for group in trainer.optimizers[0].param_groups)
    assert (one, other) == callback.found.rates[0]
    assert other == pytest.approx(10 * one)


# Whether to search


def test_it_searches_once_and_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    """A second fit() of the Trainer goes on at the found rate, too; and so does one from a checkpoint."""
    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=13, save_top_k=-1)
    whole = seeded(Keeps, 1e-5)
    batches = Place(list(loader(shuffle=False)))
    callback, trainer = fit(whole, batches, callbacks=[saved])
    ended = copy.deepcopy(whole.state_dict())

    resumed = seeded(Keeps, 1e-5, seed=1)
    again, other = fit(resumed, Place(list(batches.batches)), ckpt_path=tmp_path / "step=13.ckpt")
    assert again.found is None
    assert other.optimizers[0].param_groups[0]["lr"] == callback.found.rate
    names = [name for name in ended if not name.startswith(("accuracy", "many", "nested"))]
    assert_same({name: ended[name] for name in names}, {name: resumed.state_dict()[name] for name in names})

    found, steps = callback.found, trainer.global_step
    trainer.fit_loop.max_epochs = 7
    trainer.fit(whole, batches)
    assert trainer.global_step > steps
    assert callback.found is found
    assert trainer.optimizers[0].param_groups[0]["lr"] == found.rate


class Place:
    """Batches in order; it knows its place, as a resumable loader does."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("options", [{"max_steps": 99}, {"max_epochs": 3}, {"fast_dev_run": True}])
def test_runs_too_short_for_a_search_keep_their_rate_and_say_so(options, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        callback, trainer = fit(seeded(Digits, 2e-3), **options)
    assert callback.found is None
    assert trainer.optimizers[0].param_groups[0]["lr"] == 2e-3
    assert sum("too few for a search" in line or "a search does not pay" in line for line in caplog.messages) == 1


def test_those_who_know_the_rate_keep_it_and_one_process_hears_nothing_of_replicas(caplog):
    with (
        warnings.catch_warnings(record=True) as heard,
        caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"),
    ):
        warnings.simplefilter("always")
        callback, trainer = fit(seeded(Digits, 2e-3), ours=HDETCallback(find_lr=False))
        assert trainer.optimizers[0].param_groups[0]["lr"] == 2e-3
        assert not [line for line in caplog.messages if "hdet" in line]
        callback, _ = fit(seeded(Digits, 2e-3))
    assert not [str(entry.message) for entry in heard if "replica" in str(entry.message)]
    assert [line for line in caplog.messages if "hdet" in line] == [f"hdet {callback.found}"]


def test_manual_optimization_is_refused_with_the_reason():
    module = seeded()
    module.automatic_optimization = False
    with pytest.raises(
        ValueError, match=r"takes the optimizer steps itself.*; write HDETCallback\(find_lr=False\), or"
    ):
        fit(module)
    with pytest.raises(TypeError, match="find_lr must be"):
        HDETCallback(find_lr="yes")
    assert pickle.loads(pickle.dumps(HDETCallback())).found is None  # as ddp_spawn does it


def test_where_no_rate_is_found_the_run_keeps_its_own():
    class Negative(Digits):
        def training_step(self, batch, index):
            return super().training_step(batch, index) - 50

    with pytest.warns(UserWarning, match="no learning rate was found, so the run keeps its own"):
        callback, trainer = fit(seeded(Negative, 2e-3))
    assert callback.found is None
    assert trainer.global_step == 125
    assert trainer.optimizers[0].param_groups[0]["lr"] == 2e-3


# What it reads and runs


class Several(Digits):
    def training_step(self, batch, index):
        batch = batch if isinstance(batch, dict) else {"a": batch[0], "b": batch[1]}
        assert 0 <= index < 25
        return sum(cross_entropy(self.net(part[0]), part[1]) for part in batch.values() if part is not None) / 2


def several(kind):
    if kind == "dict":
        return {"a": loader(), "b": loader(batch_size=24)}
    if kind == "list":
        return [loader(), loader(batch_size=24)]
    if kind == "combined":
        return CombinedLoader({"a": loader(), "b": loader(batch_size=96)}, "max_size")
    return CombinedLoader([loader(), loader(batch_size=24)], "min_size")


@pytest.mark.parametrize("kind", ["dict", "list", "combined", "min size"])
def test_several_loaders(kind):
    rows = []
    callback, trainer = fit(
        seeded(Several), several(kind), before=[Look(rows)], callbacks=[Look(rows)], limit_train_batches=25
    )
    assert_same(*rows, but="lr")
    assert 1e-3 < callback.found.rate < 0.3
    assert trainer.global_step == 125


class Stream(IterableDataset):
    def __init__(self):
        self.read = 0

    def __iter__(self):
        for entry in TRAIN:
            self.read += 1
            yield entry


def test_streams_are_read_again_and_iterators_are_refused():
    data = Stream()
    callback, trainer = fit(seeded(), loader(data, shuffle=False))
    assert callback.found.scale > 10
    assert (trainer.global_step, data.read) == (125, 6000)
    with pytest.raises(
        ValueError, match=r"can be read again, got .*; HDETCallback\(find_lr=False\) trains at the rate"
    ):
        fit(seeded(), iter(list(loader())), max_steps=150)
    with pytest.raises(ValueError, match=r"training_step takes batches itself \(dataloader_iter\)"):
        fit(seeded(TakesItself), max_steps=150)


class TakesItself(Digits):
    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])


def test_limits_and_overfitting_on_few_batches():
    taken = []

    class Sees(Digits):
        def training_step(self, batch, index):
            taken.append(float(batch[0].sum()))
            return super().training_step(batch, index)

    for options in ({"limit_train_batches": 5}, {"overfit_batches": 5}):
        taken.clear()
        callback, _ = fit(seeded(Sees), loader(shuffle=False), max_epochs=25, **options)
        assert callback.found.scale > 10
        assert len(set(taken)) == 5


def test_accumulation_that_a_callback_schedules():
    ours, _ = fit(seeded(), callbacks=[GradientAccumulationScheduler({0: 2})], max_epochs=-1, max_steps=120)
    theirs, trainer = fit(seeded(), accumulate_grad_batches=2, max_epochs=-1, max_steps=120)
    assert ours.found.rate == theirs.found.rate
    assert trainer.accumulate_grad_batches == 2


class Moves(Digits):
    """A module with hooks of its own around batches, gradients and steps; some batches have no loss."""

    skips = True

    def __init__(self, *args):
        super().__init__(*args)
        self.hooks = {}

    def training_step(self, batch):
        if batch["label"][0] == 3 and self.skips:
            return None
        return {"loss": cross_entropy(self.net(batch["image"]), batch["label"])}

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.hooks["before"] = True
        return {"image": batch[0], "label": batch[1]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert dataloader_idx == 0
        batch["image"].mul_(1.0 if self.hooks["before"] else 0.0)
        return batch

    def on_after_backward(self):
        self.hooks["backward"] = True

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        assert (gradient_clip_val, gradient_clip_algorithm) == (0.1, None)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        CLIPPED.append(sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None) ** 0.5)


CLIPPED = []


def test_the_modules_own_hooks_and_batches_without_a_loss():
    rows = []
    CLIPPED.clear()
    callback, _ = fit(
        seeded(Moves), loader(shuffle=False), before=[Look(rows)], callbacks=[Look(rows)], gradient_clip_val=0.1,
    )  # fmt: skip
    assert 1e-3 < callback.found.rate < 0.1
    assert len(CLIPPED) > callback.found.steps
    assert max(CLIPPED) < 0.101
    assert_same(*rows, but="lr")


class NoLoss(Digits):
    def training_step(self, batch, index):
        return {"logits": self.net(batch[0])}


class Later(Digits):
    def on_train_start(self):
        self.weight = 1.0

    def training_step(self, batch, index):
        return super().training_step(batch, index) * self.weight


def test_what_cannot_be_searched_says_what_to_write():
    with pytest.raises(TypeError, match=r'training_step must return the loss, .*or a dict with a "loss".*got dict'):
        fit(seeded(NoLoss))
    with pytest.raises(
        RuntimeError, match=r"comes before the module's on_train_start.*no attribute 'weight'.*in setup"
    ):
        fit(seeded(Later))


def test_early_stopping_and_no_callback_hears_of_the_search():
    class Counts(Callback):
        heard = 0

        def on_before_backward(self, trainer, module, loss):
            self.heard += 1

        def on_after_backward(self, trainer, module):
            self.heard += 1

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.heard += 1

    class Stops(Digits):
        def training_step(self, batch, index):
            self.trainer.should_stop = self.trainer.should_stop or self.trainer.sanity_checking
            return super().training_step(batch, index)

    counts = Counts()
    _, trainer = fit(
        seeded(Stops), held_out=loader(HELD_OUT, 597, False), max_epochs=30,
        callbacks=[counts, EarlyStopping("held_out", patience=1, min_delta=0.01)],
    )  # fmt: skip
    assert 25 < trainer.global_step < 750
    assert counts.heard == 3 * trainer.global_step
