"""Optimizers, schedulers, a model and batches for every test of the protocol; and whether all replicas are equal."""

import inspect

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler


def groups(model):
    """Two parameter groups: matrices and the rest, with different learning rates later on."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return matrices, rest


def _two_groups(kind, lr, **options):
    def make(model):
        matrices, rest = groups(model)
        second = torch.tensor(lr / 2) if options.get("tensor") else lr / 2
        first = torch.tensor(lr) if options.get("tensor") else lr
        known = {k: v for k, v in options.items() if k != "tensor"}
        return [kind([{"params": matrices}, {"params": rest, "lr": second}], lr=first, **known)]

    return make


def _muon_beside_adamw(model):
    matrices, rest = groups(model)
    half = len(matrices) // 2
    muon = optim.Muon([{"params": matrices[:half]}, {"params": matrices[half:]}], lr=0.02, weight_decay=0.1)
    return [muon, optim.AdamW([{"params": rest}], lr=0.01)]


OPTIMIZERS = {
    "sgd": _two_groups(optim.SGD, 0.05),
    "sgd_coupled": _two_groups(optim.SGD, 0.05, momentum=0.9, weight_decay=0.1),
    "sgd_foreach": _two_groups(optim.SGD, 0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": _two_groups(optim.Adam, 0.01),
    "adam_coupled": _two_groups(optim.Adam, 0.01, weight_decay=0.1, amsgrad=True),
    "adam_fused": _two_groups(optim.Adam, 0.01, fused=True),
    "adamw": _two_groups(optim.AdamW, 0.01, weight_decay=0.1),
    "adamw_foreach": _two_groups(optim.AdamW, 0.01, foreach=True),
    "adamw_fused": _two_groups(optim.AdamW, 0.01, fused=True),
    "adamw_tensor_lr": _two_groups(optim.AdamW, 0.01, foreach=False, tensor=True),
    "nadam": _two_groups(optim.NAdam, 0.01, weight_decay=0.1),
    "radam": _two_groups(optim.RAdam, 0.01),
    "rmsprop": _two_groups(optim.RMSprop, 0.01, momentum=0.9, centered=True),
    "adagrad": _two_groups(optim.Adagrad, 0.05),
    "adafactor": _two_groups(optim.Adafactor, 0.05),
    "adamax": _two_groups(optim.Adamax, 0.01),
    "adadelta": _two_groups(optim.Adadelta, 1.0),
    "muon_beside_adamw": _muon_beside_adamw,
}

STEPS = 8  # two rounds and a part of one


def _sequential(o):
    return lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    )


def _chained(o):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)])


SCHEDULERS = {
    "none": None,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.95),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 6),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS + 1, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=3, cycle_momentum=False),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=STEPS, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "sequential": _sequential,
    "chained": _chained,
}


class Net(nn.Module):
    """Small, with BatchNorm, an int buffer, a tied and a frozen parameter."""

    def __init__(self, statistics=True):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8, track_running_stats=statistics)
        self.tied = nn.Linear(8, 8, bias=False)
        self.outer = nn.Linear(8, 2)
        self.again = self.tied
        self.frozen = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)
        self.heat = 1.0

    def forward(self, x):
        x = torch.tanh(self.norm(self.inner(x)))
        return self.outer(self.again(torch.tanh(self.tied(x) / self.heat))) + self.frozen


def keeping_buffers(model):
    """DDP in which each replica keeps its own buffers; torch 2.10 has the argument under another name."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, **{name: False})


def drawn(seed):
    """A function that draws tensors of any shape and dtype."""
    g = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(
        shape, generator=g, dtype=torch.promote_types(dtype, torch.float32)
    ).to(dtype)


def batch(replica, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7919 * replica + step)
    x = torch.randn(8, 6, generator=generator, dtype=dtype)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def flat(tensors):
    return torch.cat([t.detach().flatten().double() for t in tensors])


def gathered(tensors):
    own = flat(tensors)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return everyone


def all_equal(tensors):
    everyone = gathered(tensors)
    return all(torch.equal(everyone[0], other) for other in everyone)
