"""Attributes and scalars: written when the slots are dealt, read by the forward pass."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, log_softmax

import hdet
from hdet._explore.in_forward import InForward


class Attention(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, x):
        return torch.softmax(x / self.temperature, -1)


def test_an_attribute_is_written_and_restored():
    layer = Attention(0.5)
    h = hdet.attribute(layer, "temperature", spread=0.2)
    h.write(2.0, 1.1)
    assert layer.temperature == pytest.approx(1.1)
    assert list(h.bases()) == [0.5]
    h.restore()
    assert layer.temperature == 0.5


def test_a_value_that_somebody_else_writes_is_a_new_base():
    layer = Attention(0.5)
    h = hdet.attribute(layer, "temperature", spread=0.2)
    h.write(2.0, 1.0)
    layer.temperature = 0.7
    assert list(h.bases()) == [0.7]
    h.write(2.0, 1.0)
    assert layer.temperature == pytest.approx(1.4)


def test_a_buffer_is_changed_in_place_and_not_averaged():
    layer = nn.Module()
    layer.register_buffer("temperature", torch.tensor(0.5))
    held = layer.temperature
    h = hdet.attribute(layer, "temperature", spread=0.2)
    h.write(3.0, 1.0)
    assert layer.temperature is held
    assert held.item() == 1.5
    assert list(h.bases()) == [0.5]
    assert h.tensors() == [held]


def test_several_modules_share_one_scale():
    layers = nn.ModuleList([Attention(0.5), Attention(1.0)])
    h = hdet.attribute(layers, "temperature", spread=0.2)
    h.write(2.0, 1.0)
    assert [layer.temperature for layer in layers] == [1.0, 2.0]


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="dropout layer"):
        hdet.dropout(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"Linear\.heat must be a number"):
        hdet.attribute(nn.Linear(2, 2), "heat")
    with pytest.raises(TypeError, match="trained"):
        hdet.attribute(nn.Linear(1, 1), "bias")
    with pytest.raises(ValueError, match="at least one"):
        hdet.attribute([], "heat")


def test_a_scalar_shows_the_value_and_a_tensor_that_follows_it():
    smoothing = hdet.scalar("label_smoothing", 0.1, bounds=(0, 0.5), spread=0.5)
    tensor = smoothing.tensor()
    smoothing.write(2.0, 1.0)
    assert smoothing.value == pytest.approx(0.5 / 3)  # the odds 0.1 : 0.4, doubled
    assert smoothing.tensor() is tensor
    assert tensor.item() == pytest.approx(smoothing.value)
    smoothing.set_base(0.2)
    assert list(smoothing.bases()) == [0.2]


def compiles(change, steps=12, dropout=False):
    """How often a model is compiled while `change` changes it before each call."""
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Attention(0.5))
    model[2].register_buffer("scale", torch.tensor(1.0))
    compiled = torch.compile(model, backend="aot_eager")
    explored: InForward = change(compiled)
    for step in range(steps):
        explored.write(1.0 + step / 100, 1.0)
        compiled(torch.randn(2, 4)).sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda m: hdet.attribute(m._orig_mod[2], "scale"), 1),
        (lambda m: hdet.attribute(m._orig_mod[2], "temperature"), 2),
        (hdet.dropout, 1),
    ],
)
def test_a_compiled_model_is_not_compiled_again_every_round(change, most):
    assert compiles(change) <= most


def smoothed(read):
    """The graphs of a compiled loss over ten values of label smoothing, and its losses beside torch's own."""
    torch._dynamo.reset()
    counters.clear()
    smoothing = hdet.scalar("label_smoothing", 0.1, bounds=(0, 0.5), spread=0.5)
    smoothing.tensor()
    loss = torch.compile(lambda logits, y: read(smoothing, logits, y), backend="aot_eager")
    torch.manual_seed(0)
    logits, y = torch.randn(6, 5, requires_grad=True), torch.arange(6) % 5
    pairs = []
    for step in range(10):
        smoothing.write(step / 2, 1.0)
        here, by_torch = loss(logits, y), cross_entropy(logits, y, label_smoothing=smoothing.value)
        torch.testing.assert_close(torch.autograd.grad(here, logits), torch.autograd.grad(by_torch, logits))
        pairs.append((here.item(), by_torch.item()))
    return counters["stats"]["unique_graphs"], pairs


def test_label_smoothing_by_its_tensor_is_torchs_in_one_graph():
    def read(smoothing, logits, y):
        s = smoothing.tensor(logits.device)
        return (1 - s) * cross_entropy(logits, y) - s * log_softmax(logits, -1).mean(-1).mean()

    compiled, pairs = smoothed(read)
    assert compiled == 1
    assert len({here for here, _ in pairs}) == 10
    for here, by_torch in pairs:
        assert here == pytest.approx(by_torch, rel=1e-6)


def test_torch_itself_compiles_for_every_label_smoothing():
    """What the formula is for."""
    assert smoothed(lambda s, logits, y: cross_entropy(logits, y, label_smoothing=s.value))[0] > 4


def test_a_schedule_of_the_users_own_keeps_multiplier_and_scale():
    smoothing = hdet.scalar("label_smoothing", 0.1, bounds=(0, 0.5), spread=0.5)
    smoothing.write(2.0, 1.5)
    smoothing.set_base(0.2)
    assert smoothing.value == pytest.approx(smoothing.value_of(0.2, 2.0, 1.5))
    with pytest.raises(ValueError, match="within its bounds"):
        smoothing.set_base(0.6)


def replicas_read(interval):
    """What each replica's forward pass reads in the first rounds, under a schedule that changes at every step."""
    model = nn.Linear(1, 1)
    o = torch.optim.SGD(model.parameters(), lr=0.1)
    heat = hdet.scalar("heat", 1.0, spread=0.5)
    ensemble = hdet.Ensemble(o, [heat], interval=interval, gradients="local", model=model)
    read = []
    for step in range(4):
        heat.set_base(1.0 + step)
        read.append(heat.value)
        model(torch.ones(1, 1)).sum().backward()
        o.step()
        ensemble.step(0.0)
    ensemble.close()
    return read


def test_replicas_differ_from_the_first_forward_pass_on():
    first, second = hdet.in_process(replicas_read, 2, 2)
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        assert {round(a / (1.0 + step), 6), round(b / (1.0 + step), 6)} == {0.5, 1.5}


def test_a_tensor_of_whole_numbers_is_refused():
    module = nn.Module()
    module.register_buffer("margin", torch.tensor(2))
    with pytest.raises(TypeError, match="margin holds whole numbers"):
        hdet.attribute(module, "margin", bounds=(0, 5))


def test_an_attribute_may_be_a_regulariser():
    module = nn.Softplus(beta=2.0)
    assert hdet.attribute(module, "beta", regulariser=True).regulariser
    assert not hdet.attribute(module, "beta").regulariser
