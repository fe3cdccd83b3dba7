"""Dropout: every layer of a model, and in compiled ones from a tensor, beside torch's own layers."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hdet


def test_dropout_finds_every_layer_that_drops():
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Dropout(0.0), nn.Dropout2d(0.2), nn.MultiheadAttention(4, 2, dropout=0.3),
        nn.LSTM(4, 4, 2, dropout=0.4), nn.AlphaDropout(0.5),
    )  # fmt: skip
    h = hdet.dropout(model)
    assert list(h.bases()) == [0.1, 0.2, 0.3, 0.4, 0.5]
    h.write(1e9, 1.0)
    assert all(0 <= x <= 0.95 for x in (model[0].p, model[2].p, model[3].dropout, model[4].dropout))
    assert model[1].p == 0.0
    h.restore()
    assert list(h.bases()) == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_torch_itself_compiles_for_every_probability():
    """What the tensor is for: if this fails, torch has learnt it and `compiled` can go."""
    assert graphs(nn.Dropout(0.3), (2, 4), compiled=False)[0] > 4


def test_dropout_read_from_a_tensor_drops_and_keeps_the_mean():
    model = torch.compile(nn.Sequential(nn.Dropout(0.5)), backend="eager")
    h = hdet.dropout(model)
    h.write(1 / 3, 1.0)  # odds 1 : 3
    torch.manual_seed(0)
    out = model(torch.ones(100_000))
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    model.eval()
    assert model(torch.ones(4)).tolist() == [1.0] * 4


LAYERS = [  # and a shape that shows what goes whole
    (nn.Dropout(0.3), (300, 300)),
    (nn.Dropout(0.3, inplace=True), (300, 300)),
    (nn.Dropout1d(0.3), (50, 200, 4)),
    (nn.Dropout1d(0.3), (10_000, 4)),
    (nn.Dropout1d(0.3, inplace=True), (50, 200, 4)),
    (nn.Dropout2d(0.3), (50, 200, 2, 2)),
    (nn.Dropout2d(0.3), (50, 200, 4)),
    (nn.Dropout3d(0.3), (50, 200, 2, 2, 2)),
    (nn.Dropout3d(0.3), (10_000, 2, 2, 2)),
    (nn.AlphaDropout(0.3), (300, 300)),
    (nn.FeatureAlphaDropout(0.3), (50, 200, 4)),
]
every_layer = pytest.mark.parametrize(
    ("layer", "shape"), LAYERS, ids=lambda x: str(list(x)) if isinstance(x, tuple) else repr(x)
)
assumes = pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")


def graphs(layer, shape, steps=10, **options):
    """How many graphs ten probabilities take, and how many outputs they give with the same random numbers."""
    torch._dynamo.reset()
    counters.clear()
    model = torch.compile(nn.Sequential(nn.Linear(shape[-1], 4), copy.deepcopy(layer)), backend="aot_eager")
    explored = hdet.dropout(model, **options)
    outputs = set()
    for step in range(steps):
        explored.write(1.0 + step / 2, 1.0)
        torch.manual_seed(0)
        out = model(torch.ones(shape))
        out.square().sum().backward()
        outputs.add(out.detach().double().square().sum().item())
    return counters["stats"]["unique_graphs"], len(outputs)


@assumes
@every_layer
def test_one_graph_serves_every_probability_of_a_layer(layer, shape):
    assert graphs(layer, shape) == (1, 10)


def dropped(layer, x):
    """What a layer makes of x, which it may change in place."""
    torch.manual_seed(1)
    return layer(x.clone())


def whole(out):
    """The dimensions along which nothing differs."""
    return [dim for dim in range(out.dim()) if torch.equal(out, out.narrow(dim, 0, 1).expand_as(out))]


@assumes
@every_layer
@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_dropout_read_from_a_tensor_is_distributed_as_torchs(layer, shape, scale):
    layer = copy.deepcopy(layer)
    h = hdet.dropout(layer, compiled=True)
    h.write(scale, 1.0)
    p, x = layer.p, torch.ones(shape)
    by_torch = type(layer)(p, layer.inplace)
    assert p != 0.3
    ours, theirs = dropped(layer, x), dropped(by_torch, x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.unique(), theirs.unique())  # what is kept and what is dropped, both scaled
    assert whole(ours) == whole(theirs)
    assert (ours == ours.min()).float().mean().item() == pytest.approx(p, abs=0.02)  # 10,000 masks at least: 4 sigma


@assumes
@every_layer
def test_nothing_is_dropped_in_eval_mode_nor_with_probability_0(layer, shape):
    model = torch.compile(nn.Sequential(copy.deepcopy(layer)), backend="eager")
    h = hdet.dropout(model)
    x = torch.randn(shape)
    h.write(0.0, 1.0)
    torch.testing.assert_close(dropped(model, x), x, rtol=1e-6, atol=1e-6)
    h.write(1.0, 1.0)
    assert not torch.allclose(dropped(model, x), x)
    model.eval()
    assert torch.equal(dropped(model, x), x)


@assumes
@every_layer
def test_a_layer_that_drops_everything_gives_zeros_as_torchs(layer, shape):
    layer, by_torch = copy.deepcopy(layer), type(layer)(1.0)
    hdet.dropout(layer, compiled=True, bounds=(0.0, 1.0)).cells[0].write(1.0)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(shape).to(dtype)
        torch.testing.assert_close(dropped(layer, x), dropped(by_torch, x), rtol=0, atol=1e-3)


def test_half_precision_does_not_round_the_probability():
    layer = nn.Dropout(0.002)  # 1/256 is the least step of a uniform bfloat16
    hdet.dropout(layer, compiled=True)
    out = dropped(layer, torch.ones(1000, 1000, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert (out == 0).float().mean().item() == pytest.approx(0.002, abs=0.0004)


SHAPES = {nn.Dropout: (64,), nn.Dropout1d: (4, 16, 2), nn.Dropout2d: (4, 16, 2, 2), nn.Dropout3d: (4, 16, 2, 2, 2)}


@pytest.mark.parametrize("make", SHAPES)
def test_a_layer_in_place_changes_its_input_as_torchs_does(make):
    model = torch.compile(nn.Sequential(make(0.5, inplace=True)), backend="aot_eager")
    hdet.dropout(model)
    leaf = torch.ones(SHAPES[make], requires_grad=True)
    for call in (model, model._orig_mod):
        given = leaf * 1.0
        out = call(given)
        assert torch.equal(out, given)
        assert set(out.unique().tolist()) == {0.0, 2.0}
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.equal(gradient, out.detach())


def test_shapes_that_torch_refuses_are_refused():
    layer = nn.Dropout1d(0.5)
    hdet.dropout(layer, compiled=True)
    with pytest.raises(RuntimeError, match="Expected 2D or 3D input"):
        layer(torch.ones(2, 2, 2, 2))


def test_a_closed_layer_has_its_own_forward_and_probability_again():
    layer = nn.Dropout(0.3)
    h = hdet.dropout(layer, compiled=True)
    h.write(2.0, 1.0)
    assert "forward" in vars(layer)
    h.restore([0.2])  # from a checkpoint: it goes on
    assert (layer.p, "forward" in vars(layer)) == (0.2, True)
    h.write(2.0, 1.0)
    h.restore()
    assert (layer.p, vars(layer).keys()) == (0.2, vars(nn.Dropout(0.2)).keys())
    x = torch.ones(100)
    assert torch.equal(dropped(layer, x), dropped(nn.Dropout(0.2), x))
    h.write(2.0, 1.0)
    assert "forward" in vars(layer)


def test_a_probability_that_somebody_else_writes_is_a_new_base_for_the_tensor_too():
    layer = nn.Dropout(0.3)
    h = hdet.dropout(layer, compiled=True)
    layer.p = 0.5
    h.write(1 / 3, 1.0)
    assert list(h.bases()) == [0.5]
    assert (dropped(layer, torch.ones(100_000)) == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_a_copy_and_a_saved_model_drop_by_themselves():
    model = nn.Sequential(nn.Dropout(0.5))
    h = hdet.dropout(model, compiled=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    h.write(0.0, 1.0)
    for other in copies:
        assert (dropped(other, torch.ones(10_000)) == 0).float().mean().item() == pytest.approx(0.5, abs=0.03)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3), 5, enable_nested_tensor=False)


def test_layers_that_torch_compiles_anew_are_named():
    said = (
        r"every dropout probability of layers\.0\.self_attn \(MultiheadAttention\), layers\.1\S+ \(Multi\w+\), "
        r"layers\.2\S+ \(Multi\w+\) and 2 more, .* keep it out of the compiled part"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        hdet.dropout(torch.compile(encoder()))
    assert sum("compiles anew" in str(w.message) for w in warned) == 1
    with pytest.warns(UserWarning, match=said):
        hdet.dropout(encoder(), compiled=True)

    class Own(nn.Dropout):
        pass

    with pytest.warns(UserWarning, match=r"probability of 0 \(Own\), and"):
        hdet.dropout(nn.Sequential(Own(0.1)), compiled=True)


@pytest.mark.filterwarnings("error")
def test_nobody_is_warned_of_what_is_not_compiled():
    hdet.dropout(encoder())
    hdet.dropout(torch.compile(encoder()), compiled=False)
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Dropout(0.1))), encoder())
    hdet.dropout(model)
    assert "forward" not in vars(model[1].layers[0].dropout1)
    hdet.dropout(nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.3)), compiled=True)


@pytest.mark.filterwarnings("ignore:torch compiles anew")
def test_torch_itself_compiles_for_every_probability_of_attention():
    """What the warning is for: if this fails, torch has learnt it."""
    assert graphs(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3), (3, 2, 4), steps=4) == (4, 4)


def test_a_transformer_layer_whose_attention_does_not_drop_is_compiled_once():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3)
    layer.self_attn.dropout = 0.0
    assert graphs(layer, (3, 2, 4)) == (1, 10)


def test_what_torch_does_with_recurrent_layers():
    """Why nobody is warned of them: torch does not compile what calls them, unless it is told to."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LSTM(4, 4, 2, dropout=0.3)

        def forward(self, x):
            return self.inner(x)[0]

    assert graphs(Recurrent(), (3, 2, 4))[0] <= 1
    with torch._dynamo.config.patch(allow_rnn=True), pytest.warns(UserWarning, match=r"of \(LSTM\), and"):
        hdet.dropout(nn.LSTM(4, 4, 2, dropout=0.3), compiled=True)


def test_closing_twice_leaves_another_ensembles_forward_alone():
    layer = nn.Sequential(nn.Dropout(0.3))
    first = hdet.dropout(layer, compiled=True)
    first.restore()
    second = hdet.dropout(layer, compiled=True)
    second.write(2.0, 1.0)
    p, forward = layer[0].p, layer[0].forward
    first.restore()  # as when an old ensemble is dropped
    assert (layer[0].p, layer[0].forward) == (p, forward)
    second.restore()
    assert layer[0].p == 0.3
    assert "forward" not in vars(layer[0])
