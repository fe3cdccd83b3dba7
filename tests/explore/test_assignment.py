import collections
import itertools
import math
import random

import numpy as np
import pytest
import torch

from hdet._explore.hadamard import balanced_column, count_columns
from hdet._explore.slots import check_spread, deal, deal_round, multipliers, slots

SIZES = [2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 64, 100]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("spread", [0.0, 1 / 9, 0.3, 0.99])
def test_linear_ladder_is_symmetric_around_one(size, spread):
    rungs = multipliers(size, spread)
    assert sum(rungs) / size == pytest.approx(1, abs=1e-15)
    assert all(low + high == pytest.approx(2) for low, high in zip(rungs, reversed(rungs), strict=True))
    assert rungs[0] >= 1 - spread - 1e-15
    assert rungs[-1] <= 1 + spread + 1e-15
    if size > 1 and spread > 0:
        assert (rungs[0], rungs[-1]) == pytest.approx((1 - spread, 1 + spread))
        assert rungs == sorted(rungs)


def test_log_ladder_by_hand():
    assert multipliers(2, 2.0, "log") == pytest.approx([0.4, 1.6])
    four = multipliers(4, 2.0, "log")
    assert (four[0], four[-1]) == pytest.approx((0.5 / 1.13839, 2 / 1.13839), abs=1e-4)
    assert sum(four) / 4 == pytest.approx(1)
    ratios = [b / a for a, b in itertools.pairwise(four)]
    assert ratios == pytest.approx([ratios[0]] * 3)
    assert multipliers(1, 2.0, "log") == [1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64, 1000])
def test_slots_are_a_bijection_in_every_round(size):
    for k in range(20):
        assert sorted(slots(size, 0, k, "learning_rate")) == list(range(size))


def test_slots_are_a_pure_function_of_seed_round_and_name():
    assert slots(8, 1, 2, "a") == slots(8, 1, 2, "a")
    different = {tuple(slots(8, *key)) for key in [(1, 2, "a"), (2, 2, "a"), (1, 3, "a"), (1, 2, "b")]}
    assert len(different) == 4
    # pinned: a change here would break the resume of every saved run
    assert slots(4, 0, 0, "learning_rate") == [2, 3, 0, 1]


def test_slots_are_uniform():
    counts = collections.Counter(tuple(slots(3, 0, k, "x")) for k in range(6000))
    assert len(counts) == 6
    chi_squared = sum((n - 1000) ** 2 / 1000 for n in counts.values())
    assert chi_squared < 20.5  # 0.1 % point with 5 degrees of freedom


def test_global_random_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    deal(8, 0, 0, "x", 0.3, "linear")
    for design in ("permutations", "orthogonal", "turns"):
        deal_round(8, 0, 0, some(3), design)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize(
    ("spread", "ladder"),
    [(-0.1, "linear"), (1.0, "linear"), (math.nan, "linear"), (0.5, "log"), (math.inf, "log"), (0.1, "cubic")],
)
def test_bad_spreads(spread, ladder):
    with pytest.raises(ValueError, match="must"):
        check_spread(spread, ladder)


@pytest.mark.parametrize("spread", ["0.1", None, True])
def test_spreads_that_are_no_numbers(spread):
    with pytest.raises(TypeError, match="spread must be a number"):
        check_spread(spread, "linear")


def some(number):
    """That many hyperparameters, on both ladders and with different spreads."""
    return [(f"h{k}", 2.0 + k / 4, "log") if k % 2 else (f"h{k}", 0.9 / (k + 1), "linear") for k in range(number)]


def coordinates(dealt, explored):
    """Dealt multipliers as columns, by replica, in their ladder's own coordinate, centered and scaled to +-1."""
    columns = []
    for name, spread, ladder in explored:
        column = np.array(dealt[name])
        column = np.log(column) / math.log(spread) if ladder == "log" else (column - 1) / spread
        columns.append(column - column.mean())
    return np.stack(columns, axis=1)


def test_permutations_are_those_of_deal_bit_for_bit():
    explored = some(4)
    for k in range(10):
        dealt = deal_round(8, 3, k, explored, "permutations")
        assert dealt == {name: deal(8, 3, k, name, spread, ladder) for name, spread, ladder in explored}


def test_turns_explore_one_at_a_time():
    explored = [*some(3), ("still", 0.0, "linear")]
    for k in range(12):
        dealt = deal_round(4, 0, k, explored, "turns")
        for turn, (name, spread, ladder) in enumerate(explored):
            plain = turn != k % 3
            assert dealt[name] == ((1.0,) * 4 if plain else deal(4, 0, k, name, spread, ladder))


@pytest.mark.parametrize("length", [2, 4, 6, 8, 10, 12, 20, 26, 28, 36, 52, 92, 100, 116, 244, 340])
def test_columns_are_balanced_and_as_orthogonal_as_can_be(length):
    number = count_columns(length)
    columns = np.array([balanced_column(length, k) for k in range(number)])
    assert columns.shape == (number, length)
    assert set(np.unique(columns)) == {-1, 1}
    assert not columns.sum(axis=1).any()
    products = columns @ columns.T - length * np.eye(number, dtype=int)
    assert abs(products).max() == (0 if length % 4 == 0 or number == 1 else 2)
    known = length % 4 == 0 and length not in (92, 116)  # no Paley matrix: two shorter ones, end to end
    assert number >= (length - 1 if known else length - 3 if length % 4 == 2 else length // 2 - 4)


def test_every_multiple_of_four_has_columns():
    assert [n for n in range(4, 1025, 4) if count_columns(n) < min(n - 1, n // 2 - 12)] == []
    assert count_columns(1000) == 999


@pytest.mark.parametrize("size", SIZES)
def test_orthogonal_designs_are_orthogonal_and_balanced(size):
    even = size - size % 2
    number = min(count_columns(even), even - 1)
    explored = some(number)
    for k in range(5 if size < 50 else 1):
        dealt = deal_round(size, 1, k, explored, "orthogonal")
        assert [len(row) for row in dealt.values()] == [size] * number
        assert all(abs(sum(row) / size - 1) < 1e-12 for row in dealt.values())
        levels = coordinates(dealt, explored)
        assert abs(abs(levels).sum(axis=0) - even).max() < 1e-10, "everybody but the odd one is at an end"
        products = levels.T @ levels - even * np.eye(number)
        assert abs(products).max() < (1e-10 if even % 4 == 0 or number == 1 else 2 + 1e-10)


@pytest.mark.parametrize("size", [4, 8, 12, 16, 20, 64, 100])
def test_logarithms_of_the_multipliers_are_orthogonal(size):
    explored = some(min(size - 1, 8))
    dealt = deal_round(size, 0, 7, explored, "orthogonal")
    logs = np.log([dealt[name] for name, _, _ in explored])
    logs -= logs.mean(axis=1, keepdims=True)
    products = logs @ logs.T
    assert abs(products - np.diag(np.diag(products))).max() < 1e-12 * size


def test_the_odd_replica_sits_in_the_middle():
    for ladder, spread in (("linear", 0.3), ("log", 2.0)):
        row = deal_round(5, 0, 0, [("x", spread, ladder)], "orthogonal")["x"]
        assert len(set(row)) == 3
        middle = sorted(row)[2]
        assert row.count(middle) == 1
        assert middle == pytest.approx(1.0 if ladder == "linear" else 5 / (2 * 2.5 + 1))


@pytest.mark.parametrize("design", ["permutations", "orthogonal", "turns"])
def test_without_spread_or_company_everything_is_one(design):
    flat = [("a", 0.0, "linear"), ("b", 1.0, "log")]
    for size in SIZES:
        assert deal_round(size, 0, 0, flat, design) == {"a": (1.0,) * size, "b": (1.0,) * size}
    assert deal_round(1, 0, 0, some(2), design) == {"h0": (1.0,), "h1": (1.0,)}
    assert deal_round(4, 0, 0, [], design) == {}
    # what does not diverge takes no column from what does
    wide = some(2)
    assert deal_round(4, 0, 5, [*wide, *flat], "orthogonal").items() >= deal_round(4, 0, 5, wide, "orthogonal").items()


def test_unknown_designs_are_refused():
    with pytest.raises(ValueError, match='design must be "permutations", "orthogonal" or "turns", got \'latin\''):
        deal_round(4, 0, 0, some(1), "latin")


def test_rounds_are_a_pure_function_of_seed_round_and_names():
    first = deal_round(8, 0, 0, some(3), "orthogonal")
    assert first == deal_round(8, 0, 0, some(3)[::-1], "orthogonal")
    assert len({tuple(deal_round(8, s, k, some(3), "orthogonal").values()) for s in (0, 1) for k in (0, 1)}) == 4
    # pinned: a change here would break the resume of every saved run
    assert deal_round(4, 0, 0, [("a", 0.5, "linear"), ("b", 0.5, "linear")], "orthogonal") == {
        "a": (1.5, 0.5, 0.5, 1.5),
        "b": (1.5, 1.5, 0.5, 0.5),
    }


@pytest.mark.parametrize(("size", "number"), [(2, 2), (3, 2), (4, 3), (4, 5), (6, 3), (7, 4), (8, 3)])
def test_over_rounds_nothing_is_confounded_and_every_replica_has_every_level(size, number):
    rounds = 2000
    explored = [(f"h{k}", 0.5, "linear") for k in range(number)]
    levels = np.stack([coordinates(deal_round(size, 0, k, explored, "orthogonal"), explored) for k in range(rounds)])
    even = size - size % 2
    correlations = np.einsum("kri,krj->kij", levels, levels) / even
    error = correlations.std(axis=0) / math.sqrt(rounds) + 1e-12
    off_diagonal = ~np.eye(number, dtype=bool)
    assert (abs(correlations.mean(axis=0)) < 4 * error)[off_diagonal].all()
    share = np.array([(levels > 0.5).mean(axis=0), (levels < -0.5).mean(axis=0)])
    expected = even / size / 2
    assert abs(share - expected).max() < 4 * math.sqrt(expected * (1 - expected) / rounds)
    # products of two effects are not confounded with a third either
    triples = np.einsum("kr,kr,kr->k", *(levels[:, :, i] for i in (0, 1, min(2, number - 1)))) / even
    assert abs(triples.mean()) < 4 * triples.std() / math.sqrt(rounds) + 1e-12


def test_shared_columns_are_shared_with_others_in_other_rounds():
    explored = [(f"h{k}", 0.5, "linear") for k in range(5)]
    together = np.zeros((5, 5))
    for k in range(500):
        levels = coordinates(deal_round(4, 0, k, explored, "orthogonal"), explored)
        together += abs(levels.T @ levels) == 4
    assert (together > 50).all()


def slope_error(design, number, jointly, size=8, rounds=2000):
    """Root mean square error of estimated slopes, per round, with additive noise of 1 and effects of 1."""
    draw = np.random.default_rng(0)
    explored = [(f"h{k}", 0.3, "linear") for k in range(number)]
    errors = []
    for k in range(rounds):
        x = coordinates(deal_round(size, 0, k, explored, design), explored)
        y = x @ np.ones(number) + draw.normal(size=size)
        y -= y.mean()
        found = np.linalg.lstsq(x, y, rcond=None)[0] if jointly else x.T @ y / (x**2).sum(axis=0)
        errors.append(found - 1)
    return math.sqrt(np.mean(np.square(errors)))


@pytest.mark.parametrize(("number", "jointly"), [(2, True), (5, True), (2, False), (5, False)])
def test_orthogonal_designs_beat_permutations(number, jointly, record_property):
    ratio = slope_error("permutations", number, jointly) / slope_error("orthogonal", number, jointly)
    record_property("ratio", ratio)
    print(f"{number} hyperparameters, {'jointly' if jointly else 'one at a time'}: {ratio:.2f} times")
    assert ratio > 1.5
