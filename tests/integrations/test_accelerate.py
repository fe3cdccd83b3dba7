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
        loss_fn=torch.nn.functional.mse_loss, on_cpu=True,
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
    return example("accelerate_digits.py", "--epochs", "2", "--folder", f"{folder}/example")


def with_another_number(folder):
    from safetensors.torch import load_file

    as_under_torchrun()
    saved = pathlib.Path(folder, str(SAVED))
    begun = train(folder, 1, False, resume=saved, steps=0)[1]
    ended = train(folder, 1, False, resume=saved)
    return begun, load_file(saved / "model.safetensors"), [row[1] for row in ended[0]], ended[1]


def test_as_in_a_plain_loop_and_the_example(tmp_path):
    said, nothing = run(accelerate, 2, str(tmp_path), timeout=200)
    assert nothing == ""
    rounds, held_out = said.splitlines()
    assert rounds == "rounds: 5"
    assert float(held_out.removeprefix("held-out loss: ")) < 2.2  # guessing: 2.3
    others = run(with_another_number, 3, f"{tmp_path}/plain")
    for begun, average, rounds, ended in others:
        check_same(begun, average)
        assert rounds == [8, STEPS]
        check_same(ended, others[0][3])
