"""A loop with Accelerate in two processes, beside a plain one: prepared and not, accumulated, saved and resumed."""

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
    loss_of,
    make_model,
    make_optimizer,
    make_schedule,
    plain_loop,
    weights,
)
from processes import run

import hdet


def train(folder, accumulation, prepare_optimizer, resume=None, save=None, steps=STEPS, options=None):
    """The rounds, the weights at the end, and the folder that was saved."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from hdet.integrations.accelerate import load_state, save_state

    plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, project_dir=folder)
    plain = make_model()
    optimizer = make_optimizer(plain)
    scheduler = make_schedule(optimizer)  # not prepared: Accelerate would step it once per process
    model = accelerator.prepare(plain)
    if prepare_optimizer:
        optimizer = accelerator.prepare(optimizer)
    told = Told()
    ensemble = hdet.Ensemble(
        optimizer, explored(optimizer), total_steps=STEPS, model=model, on_round=[told], **OPTIONS, **(options or {})
    )  # fmt: skip
    entries = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ensemble": ensemble}
    if resume is not None:
        load_state(accelerator, entries, resume)
    saved = None
    for index in range(ensemble.progress["step"] * accumulation, steps * accumulation):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch(dist.get_rank(), index))
            accelerator.backward(loss)
            if prepare_optimizer or accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
        ensemble.step(loss)
        if save is not None and index + 1 == save * accumulation:
            saved = save_state(accelerator, entries, pathlib.Path(folder, str(save)))
    ensemble.close()
    return told.rounds, weights(plain), saved


def compare(folder, accumulation, prepare_optimizer):
    from safetensors.torch import load_file

    rounds, ours, average, _ = plain_loop(accumulation)
    theirs, whole, saved = train(folder, accumulation, prepare_optimizer, save=SAVED)
    check_same(theirs, rounds)
    check_same(whole, ours)
    check_same(load_file(saved / "model.safetensors"), average)
    for save, left in ((SAVED, 1), (8, 2)):  # in mid-round, and at a round's end
        if save != SAVED:
            saved = train(folder, accumulation, prepare_optimizer, save=save)[2]
        again, ended, _ = train(folder, accumulation, prepare_optimizer, resume=saved)
        assert all(torch.equal(ended[name], whole[name]) for name in whole)
        assert again == theirs[left:]
    return saved


def keep_own_state(folder):
    """At a round's end, where replicas hold the same weights and optimizer states of their own."""
    own = {"gradients": "local", "averaging": hdet.Averaging(state=False)}
    _, whole, saved = train(folder, 1, True, save=8, options=own)
    _, ended, _ = train(folder, 1, True, resume=saved, options=own)
    assert all(torch.equal(ended[name], whole[name]) for name in whole)


def find(folder):
    """On two replicas: the same rate, which a prepared schedule then has, and nothing else is another."""
    from accelerate import Accelerator

    from hdet.integrations.accelerate import find_lr

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = make_model()
    optimizer = make_optimizer(plain)
    parts = [batch(0, k) for k in range(90)]
    data = torch.utils.data.TensorDataset(*(torch.cat([part[k] for part in parts]) for k in (0, 1)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    model, optimizer, loader, scheduler = accelerator.prepare(plain, optimizer, loader, scheduler)
    before = whole_state(accelerator, model, optimizer, loader)
    found = find_lr(accelerator, model, optimizer, loader, loss_of, total_steps=400, progress=False)
    for ours, theirs in zip(whole_state(accelerator, model, optimizer, loader), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    found.apply(optimizer, scheduler)
    assert found.rates[0][1] == pytest.approx(2 * found.rate)
    assert scheduler.get_last_lr() == pytest.approx([0.1 * found.rate, 0.2 * found.rate])
    return found.rate


def whole_state(accelerator, model, optimizer, loader):
    gradients = accelerator.gradient_state
    return [
        weights(model), torch.get_rng_state(), [group["lr"] for group in optimizer.param_groups],
        len(optimizer.state), loader.iteration, loader.synchronized_generator.get_state(),
        gradients.sync_gradients, len(gradients.dataloader_references), model.training,
        [p.grad is None for p in model.parameters()],
    ]  # fmt: skip


def refuse(folder, saved):
    from accelerate import Accelerator

    from hdet.integrations.accelerate import save_state

    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="run must hold the ensemble; write"):
        save_state(accelerator, {"model": torch.nn.Linear(1, 1)}, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(saved / "hdet")
    dist.barrier()
    with pytest.raises(ValueError, match=r"has no folder 'hdet', as .*save_state writes it; to go on from a plain"):
        train(folder, 2, True, resume=saved)


def follow(folder):
    model = make_model()
    optimizer = make_optimizer(model)
    loader = torch.utils.data.DataLoader([tuple(part[0] for part in batch(0, k)) for k in range(160)], batch_size=4)
    names = follow_guide(
        "Accelerate", folder, model=model, optimizer=optimizer, scheduler=make_schedule(optimizer), loader=loader,
        loss_of=loss_of, on_cpu=True,
    )  # fmt: skip
    assert names["ensemble"].progress["step"] == 10
    assert not names["ensemble"].mid_round


def accelerate(folder):
    as_under_torchrun()
    saved = compare(f"{folder}/prepared", 2, True)
    compare(f"{folder}/plain", 1, False)
    refuse(f"{folder}/prepared", saved)
    keep_own_state(f"{folder}/own")
    follow(f"{folder}/guide")
    rate = find(f"{folder}/found")
    return rate, example("accelerate_digits.py", "--epochs", "4")


def with_another_number(folder):
    from safetensors.torch import load_file

    as_under_torchrun()
    saved = pathlib.Path(folder, str(SAVED))
    begun = train(folder, 1, False, resume=saved, steps=0)[1]
    ended = train(folder, 1, False, resume=saved)
    return begun, load_file(saved / "model.safetensors"), [row[1] for row in ended[0]], ended[1]


def test_as_in_a_plain_loop_and_the_example(tmp_path):
    (rate, said), (same_rate, nothing) = run(accelerate, 2, str(tmp_path), timeout=200)
    assert rate == same_rate
    assert nothing == ""
    found, held_out = said.splitlines()
    assert found.startswith("found 0.0")
    assert float(held_out.removeprefix("held-out loss: ")) < 1  # guessing: 2.3
    others = run(with_another_number, 3, f"{tmp_path}/plain")
    for begun, average, rounds, ended in others:
        check_same(begun, average)
        assert rounds == [8, STEPS]
        check_same(ended, others[0][3])


# In one process

WORDS, CONTEXT = 32, 2


def make_text(count, seed):
    """Two tokens and the one that follows, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (count, CONTEXT), generator=generator)
    noise = torch.randint(0, WORDS, (count,), generator=generator)
    follows = torch.where(torch.rand(count, generator=generator) < 0.05, noise, (5 * tokens[:, 0] + 3) % WORDS)
    return torch.utils.data.TensorDataset(tokens, follows)


def make_text_model():
    torch.manual_seed(0)
    sizes = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
    layer = torch.nn.TransformerEncoderLayer(32, 2, **sizes)
    embedding = torch.nn.Embedding(WORDS, 32)
    return torch.nn.Sequential(embedding, layer, torch.nn.Flatten(), torch.nn.Linear(CONTEXT * 32, WORDS))


def text_loss(model, data):
    return torch.nn.functional.cross_entropy(model(data[0]), data[1])


@pytest.fixture
def make_accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def reset():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    reset()
    yield lambda **options: Accelerator(cpu=True, **options)
    reset()


def test_from_a_bad_rate_it_is_as_good_as_the_best_of_a_sweep(make_accelerator):
    from hdet.integrations.accelerate import find_lr

    steps, held_out = 300, make_text(512, 1).tensors

    def end_of(lr, ours):
        accelerator, model = make_accelerator(), make_text_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        loader = torch.utils.data.DataLoader(make_text(16 * steps, 0), batch_size=16, shuffle=True)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        if ours:
            find_lr(accelerator, model, optimizer, loader, text_loss, total_steps=steps).apply(optimizer, scheduler)
        for data in loader:
            accelerator.backward(text_loss(model, data))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with torch.no_grad():
            return text_loss(model, held_out).item()

    plain = {lr: end_of(lr, False) for lr in (1e-5, 3e-3, 1e-2)}
    best = min(plain.values())
    assert plain[1e-5] > 2 * best, plain
    found = {lr: end_of(lr, True) for lr in (1e-5, 0.3)}
    assert max(found.values()) < 1.3 * best, (found, plain)


@pytest.mark.parametrize(("prepared", "scaled"), [(False, True), (True, False)])
def test_it_agrees_with_find_lr_by_hand(make_accelerator, prepared, scaled):
    """Accumulation, clipping and bf16; the grad scaler is one that works on a CPU."""
    from hdet.integrations.accelerate import find_lr

    data = make_text(16 * 300, 0)
    given = {"total_steps": 1000, "clip_grad_norm": 1.0, "progress": False}

    def loader():
        return torch.utils.data.DataLoader(data, batch_size=16)

    accelerator, model = make_accelerator(mixed_precision="bf16", gradient_accumulation_steps=4), make_text_model()
    ours = model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader()
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    if prepared:
        ours = accelerator.prepare(*ours)
    before = weights(model)
    found = find_lr(accelerator, *ours, text_loss, **given)
    assert not scaled or accelerator.scaler.get_scale() == 2.0**10
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=prepared):
            return text_loss(model, batch).float()

    model = make_text_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    by_hand = hdet.find_lr(model, optimizer, loader(), loss_fn, accumulate=4, **given)
    assert 1 / 1.3 < found.rate / by_hand.rate < 1.3
