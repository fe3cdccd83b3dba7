import gc
import weakref

import numpy as np
import pytest
import torch

from hdet._probe import score as score_module
from hdet._probe.score import OwnLoss, Score, as_loss

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "loss",
    [
        torch.tensor(1.5),
        torch.tensor([1.5]),
        torch.tensor([[1.5]]),
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(1.5, dtype=torch.float16),
        torch.tensor(1.5, requires_grad=True),
        torch.tensor(1.5).to(torch.float8_e5m2),
        1.5,
        np.float32(1.5),
        np.float64(1.5),
    ],
)
def test_what_a_loss_can_be(loss):
    score = Score()
    for _ in range(3):
        score.add(as_loss(loss))
    assert score.mean(CPU).item() == 1.5
    assert score.mean(CPU).dtype == torch.float64


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (torch.zeros(3), ValueError, r"one element, got shape \(3,\)"),
        (torch.zeros(0), ValueError, "one element"),
        (torch.tensor(1j), TypeError, "real floating-point"),
        (torch.tensor(3), TypeError, "int64"),
        (1j, TypeError, "complex"),
        ({"loss": 1.0}, TypeError, "dict"),
        (None, TypeError, "NoneType"),
        ("1.0", TypeError, "str"),
        (True, TypeError, "bool"),
    ],
)
def test_what_a_loss_cannot_be(loss, error, match):
    with pytest.raises(error, match=match):
        as_loss(loss)


def test_mixed_kinds_and_empty():
    score = Score()
    assert score.mean(CPU).isnan()
    for loss in (1.0, torch.tensor(2.0), 3.0, torch.tensor(6.0, dtype=torch.float64)):
        score.add(as_loss(loss))
    assert score.mean(CPU).item() == 3.0
    score.reset()
    assert score.mean(CPU).isnan()


def test_the_graph_is_not_kept_alive_and_the_loss_is_not_changed():
    class Held:
        pass

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = Held()
            graphs.append(weakref.ref(ctx.held))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    graphs = []
    loss = Double.apply(torch.ones(3, requires_grad=True)).sum()
    assert graphs[0]() is not None
    score = Score()
    score.add(as_loss(loss))
    score.add(as_loss(loss))
    assert loss.item() == 6
    del loss
    gc.collect()
    assert graphs[0]() is None


def test_state_goes_on_to_the_last_bit():
    losses = torch.rand(20).unbind()
    whole, first, second = Score(), Score(), Score()
    for loss in losses:
        whole.add(loss)
    for loss in losses[:7]:
        first.add(loss)
    state = first.state_dict()
    first.add(losses[7])  # does not reach into the saved state
    second.load_state_dict(state)
    for loss in losses[7:]:
        second.add(loss)
    assert torch.equal(whole.mean(CPU), second.mean(CPU))


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_mark_keeps_the_mean_of_the_first_losses(as_tensors):
    score, other = Score(), Score()
    score.mark()  # nothing to keep yet
    assert score.early_mean(CPU).isnan()
    for count, loss in enumerate((1.0, 2.0, 6.0, 100.0, 200.0), start=1):
        score.add(torch.tensor(loss) if as_tensors else loss)
        if count >= 3:
            score.mark()  # the first time counts
    assert score.early_mean(CPU).item() == 3.0
    other.load_state_dict(score.state_dict())
    assert other.early_mean(CPU).item() == 3.0
    other.load_state_dict(score.first_losses())
    assert other.early_mean(CPU).item() == 3.0
    assert other.count == 0
    score.reset()
    assert score.early_mean(CPU).isnan()


def test_nothing_of_the_loss_is_kept():
    """Neither what it is a view of, nor the loss itself, which the caller may reduce in place for a log."""
    score = Score()
    big = torch.ones(1000)
    alive = weakref.ref(big)
    losses = [torch.tensor(1.0), big[3], torch.tensor(4.0)]
    for loss in losses:
        score.add(as_loss(loss))
    for loss in losses:
        loss.mul_(100)
    assert score.mean(CPU).item() == 2.0
    del big, losses, loss
    gc.collect()
    assert alive() is None


class OnDevice(Score):
    """As if its losses were where reading them means to wait."""

    @property
    def device(self):
        return torch.device("cuda")


def scored(*losses):
    score = Score()
    for loss in losses:
        score.add(loss)
    return score


def test_a_loss_of_ones_own_is_read_at_once_where_that_is_free():
    own = OwnLoss()
    assert own.read(Score(), 5) is None
    for losses in ((1.0, 2.0), tuple(torch.tensor([3.0, 5.0]))):
        score = scored(*losses)
        assert own.read(score, 5) == sum(map(float, losses)) / 2
        assert score.count == 2  # which is the judge's


def test_and_now_and_then_where_it_means_to_wait(monkeypatch):
    monkeypatch.setattr(score_module, "Score", OnDevice)
    own, now = OwnLoss(), [0.0]
    monkeypatch.setattr(score_module.time, "monotonic", lambda: now[0])
    assert own.read(scored(torch.tensor(1.0)), 5) == 1.0
    now[0] = 0.1
    assert own.read(scored(torch.tensor(2.0)), 5) is None
    assert own.read(scored(torch.tensor(3.0), torch.tensor(4.0)), 5) is None
    now[0] = 0.3
    assert own.read(scored(torch.tensor(7.0)), 5) == 4.0  # of the three rounds
    assert own.steps == 15
    assert own.read(scored(torch.tensor(8.0)), 5, now=True) == 8.0  # at the end of the run


def test_nothing_is_read_that_has_no_value():
    assert OwnLoss().read(scored(torch.zeros((), device="meta")), 1) is None
