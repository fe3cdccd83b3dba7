"""The runner itself: every replica's traceback is shown, and one that hangs or dies is named."""

import os
import time

import pytest
import torch.distributed as dist
from processes import ReplicaError, run


def misbehave(how):
    if how == "raise":
        raise KeyError(f"from replica {dist.get_rank()}")
    if dist.get_rank() == 1 and how == "hang":
        time.sleep(60)
    if dist.get_rank() == 1 and how == "die":
        os._exit(3)
    return dist.get_rank()


def test_it_returns_by_rank():
    assert run(misbehave, 3, "not") == [0, 1, 2]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["replica 0 ---", "replica 1 ---", "KeyError: 'from replica 0'", "KeyError: 'from replica 1'"]),
        ("hang", ["replica 1 ---", "did not come back in time"]),
        ("die", ["replica 1 ---", "died without a word"]),
    ],
)
def test_misbehaving_replicas_are_shown(how, expected):
    started = time.monotonic()
    with pytest.raises(ReplicaError) as caught:
        run(misbehave, 2, how, timeout=6)
    assert all(text in str(caught.value) for text in expected)
    assert time.monotonic() - started < 40
