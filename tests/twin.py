"""A plain float64 twin of the whole protocol: N replicas in one process, every formula written out.

It shares nothing with the library but the slots, which are a drawing of lots, not a computation.
"""

import math

import torch

from hdet._explore.slots import slots


def cosine(start, end, part):
    return end + (start - end) / 2 * (math.cos(math.pi * part) + 1)


def one_cycle(step, total, start, peak, end, pct_start=0.3):
    """OneCycleLR in two phases; for momentum, give the values of momentum."""
    top = pct_start * total - 1
    if step <= top:
        return cosine(start, peak, step / top)
    return cosine(peak, end, (step - top) / (total - 1 - top))


def ladder(size, spread):
    return [1 + spread * (s - (size - 1) / 2) / max((size - 1) / 2, 0.5) for s in range(size)]


def softmax_weights(losses, temperature):
    mean = sum(losses) / len(losses)
    raw = [math.exp((mean - loss) / temperature) for loss in losses]
    return [r / sum(raw) for r in raw]


class Twin:
    """N replicas with AdamW under OneCycleAutoLR, one parameter per group, gradients shared."""

    def __init__(self, parameters, loss_fn, size, total, interval, warmup, max_lrs, decays, **options):
        self.replicas = [[p.clone() for p in parameters] for _ in range(size)]
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.loss_fn, self.size, self.total, self.interval, self.warmup = loss_fn, size, total, interval, warmup
        self.max_lrs, self.decays = max_lrs, decays
        self.spread, self.seed = options["spread"], options["seed"]
        self.temperature, self.step_size, self.momentum = 0.1, 0.5, 0.9
        self.geometric = options.get("geometric", False)
        self.floors = [lr / 25 / 1e4 for lr in max_lrs]
        self.step = self.round = 0
        self.scale = [1.0] * len(max_lrs)
        self.velocity = [0.0] * len(max_lrs)  # in units of a learning rate
        self.scores = [0.0] * size
        self.steps_in_round = 0
        self.all_slots = []

    def base(self, group, step):
        handover = max(1, math.ceil(self.warmup / self.interval)) * self.interval
        curve = one_cycle(min(step, handover) if self.geometric else step, self.total, *self.cycle(group))
        if not self.geometric or step < handover:
            return curve
        converges = math.ceil((self.total - handover) / self.interval) + 1
        gamma = 1 - (self.floors[group] / curve) ** (1 / converges)
        done = converges if step >= self.total else (step - handover) // self.interval + 1
        return curve * (1 - gamma) ** done

    def cycle(self, group):
        peak = self.max_lrs[group]
        return peak / 25, peak, self.floors[group]

    def center(self, group, step):
        base = self.base(group, step)
        return max(base * self.scale[group], min(base, self.floors[group]))

    def multipliers(self, group):
        order = slots(self.size, self.seed, self.round, f"learning_rate/{group}")
        return [ladder(self.size, self.spread)[slot] for slot in order]

    def train_step(self, batches):
        """One step of every replica, on its own batch."""
        losses, grads = [], []
        for weights, batch in zip(self.replicas, batches, strict=True):
            leaves = [w.clone().requires_grad_() for w in weights]
            loss = self.loss_fn(leaves, batch)
            grads.append(torch.autograd.grad(loss, leaves))
            losses.append(loss.item())
        beta1 = one_cycle(self.step, self.total, 0.95, 0.85, 0.95)
        t = self.step + 1
        for g in range(len(self.max_lrs)):
            shared = sum(grad[g] for grad in grads) / self.size
            self.first[g] = beta1 * self.first[g] + (1 - beta1) * shared
            self.second[g] = 0.999 * self.second[g] + 0.001 * shared**2
            direction = (self.first[g] / (1 - beta1**t)) / ((self.second[g] / (1 - 0.999**t)).sqrt() + 1e-8)
            for r, multiplier in enumerate(self.multipliers(g)):
                lr = self.center(g, self.step) * multiplier
                old = self.replicas[r][g]
                self.replicas[r][g] = old - lr * self.decays[g] * old - lr * direction
        self.scores = [s + loss for s, loss in zip(self.scores, losses, strict=True)]
        self.step += 1
        self.steps_in_round += 1
        if self.steps_in_round == self.interval or self.step == self.total:
            self.end_round()

    def end_round(self):
        for g in range(len(self.max_lrs)):
            mean = sum(weights[g] for weights in self.replicas) / self.size
            for weights in self.replicas:
                weights[g] = mean.clone()
        if self.steps_in_round == self.interval and self.step >= self.warmup:
            w = softmax_weights([s / self.interval for s in self.scores], self.temperature)
            for g in range(len(self.max_lrs)):
                self.move(g, w)
        self.all_slots.append([slots(self.size, self.seed, self.round, f"learning_rate/{g}") for g in range(4)])
        self.round += 1
        self.steps_in_round = 0
        self.scores = [0.0] * self.size

    def move(self, group, w):
        """The paper's update, in units of a learning rate."""
        last, coming = self.base(group, self.step - 1), self.base(group, self.step)
        center = self.center(group, self.step - 1)
        rates = [center * m for m in self.multipliers(group)]
        delta = sum(a * b for a, b in zip(w, rates, strict=True)) - sum(rates) / self.size
        # between two converges the velocity shrinks with the curve
        v = self.velocity[group] * last
        v = self.momentum * v + (1 - self.momentum) * delta
        gamma = 1 - coming / last
        moved = center * (1 - gamma) + self.step_size * v
        limited = min(max(moved, min(coming, self.floors[group])), 10 * coming)
        self.scale[group] = limited / coming
        self.velocity[group] = v / last if limited == moved else 0.0
