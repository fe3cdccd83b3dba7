"""Checkpoints changed at random, or by somebody: an error or the one before; nothing runs, nothing crashes."""

import hashlib
import json
import pathlib
import pickle
import random
import shutil
import warnings

import pytest
import torch
from processes import run
from torch import nn

import hdet


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path(self.mark),))


def sign(folder):
    """Make the checksums right, as somebody who changes a checkpoint on purpose would."""
    values = json.loads((folder / "checkpoint.json").read_bytes().partition(b"\n")[0])
    for name in values["files"]:
        data = (folder / name).read_bytes()
        values["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    line = json.dumps(values, sort_keys=True).encode()
    (folder / "checkpoint.json").write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


# A file that would run something


@pytest.mark.parametrize("form", ["raw", "zip", "legacy"])
@pytest.mark.parametrize("file", ["shared.pt", "replica-0.pt", "checkpoint.json"])
@pytest.mark.parametrize("signed", [True, False])
def test_a_pickle_bomb_does_not_go_off(tmp_path, form, file, signed):
    entries = {"model": nn.Linear(2, 2)}
    hdet.save(tmp_path / "run", entries, step=1)
    saved = hdet.save(tmp_path / "run", entries, step=2)
    bomb, mark = Bomb(str(tmp_path / "mark")), tmp_path / "mark"
    if form == "raw":
        (saved / file).write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"entries": bomb}, saved / file, _use_new_zipfile_serialization=form == "zip")
    if signed and file != "checkpoint.json":
        sign(saved)
    with pytest.warns(UserWarning, match="cannot be verified"):
        assert hdet.load(tmp_path / "run", entries).step == 1
    with pytest.warns(UserWarning, match="cannot be verified"), pytest.raises(RuntimeError, match="none of 1"):
        hdet.load(saved, entries)
    assert not mark.exists()
    torch.load(saved / file, weights_only=False) if form != "raw" else pickle.loads((saved / file).read_bytes())
    assert mark.exists(), "the bomb is a dud, so this test shows nothing"


# Files changed at random


def mutate(data, draw, mark):
    """`data` changed somewhere."""
    place, length = draw.randrange(len(data)), draw.choice([1, 4, 64, 1024])
    rest = data[place + length :]
    return draw.choice(
        [
            lambda: data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :],
            lambda: data[:place],
            lambda: data[:place] + rest,
            lambda: data + draw.randbytes(length),
            lambda: data[:place] + draw.randbytes(length) + rest,
            lambda: data[:place] + bytes(length) + rest,
            lambda: data[:place] + data[place : place + length] * 2 + rest,
            lambda: b"",
            lambda: draw.randbytes(length),
            lambda: pickle.dumps(Bomb(mark)),
        ]
    )()


def make(value):
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "list": [value, {"a": torch.ones(2)}]}


def tell(entries):
    moments = [t.clone() for state in entries["optimizer"].state.values() for t in state.values()]
    return [t.detach().clone() for t in entries["model"].parameters()] + moments


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def change(folder, draw, forged):
    """Change the files of a checkpoint at random; whether anything is different now."""
    files = sorted(folder.iterdir())
    before = {file: file.read_bytes() for file in files}
    file = draw.choice([f for f in files if f.name != "checkpoint.json"] if forged else files)
    kind = draw.randrange(12)
    if kind == 0 and not forged:
        file.unlink()
    elif kind == 1:
        file.write_bytes(before[draw.choice(files)])
    else:
        file.write_bytes(mutate(before[file], draw, str(folder.parent / "mark")))
    if forged:
        sign(folder)
    return not file.exists() or file.read_bytes() != before[file]


def fuzz(path, mutations, seed, forged):
    """Counts of what became of checkpoints that were changed."""
    warnings.simplefilter("ignore")
    draw, path, counts = random.Random(seed), pathlib.Path(path), {"older": 0, "error": 0, "same": 0, "forgery": 0}
    old, new = make(1.0), make(2.0)
    hdet.save(path / "original", old, step=1)
    hdet.save(path / "original", new, step=2)
    old, new = tell(old), tell(new)
    for number in range(mutations):
        run_folder = path / "run"
        shutil.rmtree(run_folder, ignore_errors=True)
        shutil.copytree(path / "original", run_folder)
        changed = change(run_folder / "000002-step-2", draw, forged)
        if draw.random() < 0.3:  # nothing to fall back to
            shutil.rmtree(run_folder / "000001-step-1")
        entries = make(3.0)
        before = tell(entries)
        try:
            loaded = hdet.load(run_folder, entries)
        except (RuntimeError, ValueError):
            assert not (run_folder / "mark").exists(), f"mutation {number}: something was run"
            assert equal(tell(entries), before), f"mutation {number}: an error, and something was loaded"
            counts["error"] += 1
            continue
        assert not (run_folder / "mark").exists(), f"mutation {number}: something was run"
        found = tell(entries)
        if loaded.step == 1 and equal(found, old):
            counts["older"] += 1
        elif loaded.step == 2 and equal(found, new) and (not changed or forged):
            counts["same"] += 1
        else:
            assert forged, f"mutation {number}: garbage was loaded"
            counts["forgery"] += 1  # numbers that somebody changed, and signed
    return counts


def test_changed_checkpoints_are_not_loaded(tmp_path):
    (counts,) = run(fuzz, 1, str(tmp_path), 60, 0, False)
    assert counts["older"] > 20
    assert counts["error"] > 5


def test_forged_checkpoints_do_not_crash(tmp_path):
    run(fuzz, 1, str(tmp_path), 60, 1, True)


@pytest.mark.soak
@pytest.mark.parametrize("forged", [False, True])
def test_a_thousand_changed_checkpoints(tmp_path, capsys, forged):
    (counts,) = run(fuzz, 1, str(tmp_path), 1000, 2, forged, timeout=3000)
    with capsys.disabled():
        print(f"\n1,000 mutations, forged={forged}: {counts}")
