"""DeepSpeed: ZeRO-0 fans out and converges as DDP does; the other stages are refused with what to write."""

import os

import pytest
import torch
import torch.distributed as dist
from processes import initialise_gloo, run
from torch import nn

import hdet


def stand_in(name, module="deepspeed.runtime.zero.stage_1_and_2"):
    """What DeepSpeed hands to its users, as far as it is looked at; the package itself is in the test below."""
    return type(name, (), {"__module__": module})


@pytest.mark.parametrize("name", ["DeepSpeedZeroOptimizer", "BF16_Optimizer", "FP16_Optimizer"])
def test_wrappers_of_what_is_sharded_are_refused(name):
    model = nn.Linear(2, 1)
    inner = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])  # this rank's part
    wrapper = stand_in(name)()
    wrapper.optimizer = inner
    around = stand_in("AcceleratedOptimizer", "accelerate.optimizer")()
    around.optimizer = wrapper
    said = rf"DeepSpeed's {name} steps a part of the model.*write \"zero_optimization\": {{\"stage\": 0}} in its config"
    for given in (wrapper, around, [inner, wrapper]):
        with pytest.raises(ValueError, match=said):
            hdet.Ensemble(given, total_steps=10)
    with pytest.raises(ValueError, match=said):
        hdet.OneCycleAutoLR(wrapper, 0.1, total_steps=10)
    with pytest.raises(ValueError, match=said):
        hdet.find_lr(model, wrapper, lambda index: None, probe=None)


@pytest.mark.parametrize(("mark", "stage"), [("_hp_mapping", 1), ("ds_id", 3)])
def test_a_module_whose_parameters_were_taken_is_refused(mark, stage):
    model = nn.Linear(2, 1)
    setattr(model.weight, mark, 0)
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    with pytest.raises(ValueError, match=f"DeepSpeed ZeRO-{stage} spreads the"):
        hdet.Ensemble(optimizer, total_steps=10, model=model)


def engine_of(stage, precision=None):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK=os.environ["HDET_TEST_RANK"], LOCAL_RANK=os.environ["HDET_TEST_RANK"])
    os.environ["WORLD_SIZE"] = os.environ["HDET_TEST_SIZE"]
    initialise_gloo()
    import deepspeed

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}}
    config["gradient_clipping"] = 0.0  # by default it clips, as DDP does not
    config |= {"zero_allow_untested_optimizer": True} | ({precision: {"enabled": True}} if precision else {})
    engine, wrapped, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, wrapped, optimizer, model


def train(optimizer, model, ensemble, backward, step_optimizer, steps):
    course = []
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        backward(loss)
        step_optimizer()
        optimizer.zero_grad()
        ensemble.step(loss)
        course.append(model.module.weight.detach().clone())
    return course


def stage_zero():
    engine, optimizer, _, _ = engine_of(0)
    options = {"total_steps": 12, "interval": 4}
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.3)], model=engine, **options)
    ours = train(optimizer, engine, ensemble, engine.backward, engine.step, 12)
    ensemble.close()
    with pytest.raises(ValueError, match="DeepSpeed's engine shares them itself"):
        hdet.Ensemble(optimizer, model=engine, gradients="local", **options)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(plain, [hdet.learning_rate(plain, spread=0.3)], model=model, **options)
    theirs = train(plain, model, ensemble, lambda loss: loss.backward(), plain.step, 12)
    ensemble.close()
    return ours, theirs


def refused(stage, precision):
    engine, wrapped, optimizer, model = engine_of(stage, precision)
    said = []
    for given, module in (
        (wrapped, engine),
        (wrapped, None),
        (wrapped, model),
        (optimizer, engine),
        (optimizer, model),
    ):
        with pytest.raises(ValueError, match=r"DeepSpeed.*\"stage\": 0") as caught:
            hdet.Ensemble(given, total_steps=10, model=module)
        said.append(str(caught.value))
    return said


@pytest.mark.soak
def test_stage_zero_is_what_ddp_is():
    for ours, theirs in run(stage_zero, 2, initialise=False, timeout=230):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "precision"), [(1, None), (2, None), (3, None), (1, "bf16")])
def test_other_stages_are_refused_by_all_ranks_alike(stage, precision):
    first, second = run(refused, 2, stage, precision, initialise=False, timeout=230)
    assert first == second
    assert f"ZeRO-{stage}" in first[0]
