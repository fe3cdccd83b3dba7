"""What an ensemble saves: its version, and what is refused."""

import pytest
from torch import nn, optim

import hdet


def make():
    optimizer = optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    return hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.0)], total_steps=8, interval=4)


def test_a_state_has_a_version_and_loads_again():
    state = make().state_dict()
    assert isinstance(state["version"], int)
    make().load_state_dict(state)


@pytest.mark.parametrize("older", [1, 2])
def test_a_state_of_an_older_format_is_refused_with_what_to_do(older):
    state = make().state_dict()
    said = f"an older hdet, in format {older}, and this one reads format {state['version']}: .* load the weights alone"
    with pytest.raises(ValueError, match=said):
        make().load_state_dict({**state, "version": older})


@pytest.mark.parametrize("state", [{}, {"version": 99}, {"version": "3"}, {"version": None}, None, [3]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match=r"state_dict must come from Ensemble\.state_dict"):
        make().load_state_dict(state)


def test_a_refused_state_changes_nothing():
    ensemble = make()
    before = ensemble.state_dict()
    with pytest.raises(ValueError, match="older hdet"):
        ensemble.load_state_dict({**before, "version": 1, "progress": {**before["progress"], "step": 4}})
    assert ensemble.state_dict() == before
