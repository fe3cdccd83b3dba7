"""Each tracker for real, offline, and its values read back. Those that take minutes to install run in `make soak`."""

import json
import math
import struct
import sys
import time

import pytest
from made_up_runs import make_records

import hdet

RECORDS = list(make_records(3, 4, ("learning_rate", "weight_decay/<b>")))
KEY, STRANGE = "hdet/learning_rate/center", "hdet/weight_decay/<b>/center"
CENTERS = {record.step: record.hyperparameters["learning_rate"].center for record in RECORDS}
LOSSES = {record.step: math.fsum(record.scores) / 4 for record in RECORDS}


def log(sink):
    for record in RECORDS:
        sink(record)


def check(read):
    """`read(name)` gives values by step."""
    assert read(KEY) == pytest.approx(CENTERS, rel=1e-6)
    assert read("hdet/loss/mean") == pytest.approx(LOSSES, rel=1e-6)
    assert list(read("hdet/learning_rate/error")) == [10, 15]  # inf in the first round: left out


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    events = [hdet.records.RoundRecord(4, 20, True, (1.0,), {}, events=("rolled back",))]
    log(sink := hdet.records.trackers.TensorBoard(tmp_path / "own"))
    sink(events[0])
    writer = SummaryWriter(tmp_path / "given")
    log(hdet.records.trackers.TensorBoard(writer))
    writer.close()
    for folder in ("own", "given"):
        read = EventAccumulator(str(tmp_path / folder))
        read.Reload()

        def values(name, read=read):
            return {event.step: event.value for event in read.Scalars(name) if event.step <= 15}

        check(values)
        assert values(STRANGE)
    texts = EventAccumulator(str(tmp_path / "own")).Reload()
    assert "hdet/events/text_summary" in texts.Tags()["tensors"]


def leveldb_log(data):
    """The records of a .wandb file: blocks of 32 kB, in which each part has a checksum, a length and a kind."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.soak
def test_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.chdir(tmp_path)
    run = wandb.init(mode="offline", dir=tmp_path, project="hdet")
    log(hdet.records.trackers.WandB(run))
    run.finish()
    from wandb.proto import wandb_internal_pb2

    path, rows, end = next(tmp_path.glob("wandb/offline-run-*/*.wandb")), [], time.monotonic() + 30
    while len(rows) < 3 and time.monotonic() < end:  # another process of wandb's writes it
        rows = []
        for data in leveldb_log(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        rows = [row for row in rows if "hdet/step" in row]
    check(lambda name: {row["hdet/step"]: row[name] for row in rows if name in row})
    assert len(rows) == 3


@pytest.mark.soak
def test_mlflow(tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        log(hdet.records.trackers.MLflow())
    client = mlflow.MlflowClient()
    check(lambda name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)})
    assert client.get_metric_history(run.info.run_id, STRANGE.replace("<", "_").replace(">", "_"))


@pytest.mark.soak
def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    trackio.init(project="hdet-test", name="run")
    log(hdet.records.trackers.Trackio())
    trackio.finish()
    rows = SQLiteStorage.get_logs("hdet-test", "run")
    check(lambda name: {row["step"]: row[name] for row in rows if name in row})


@pytest.mark.parametrize(("kind", "module"), [("WandB", "wandb"), ("MLflow", "mlflow"), ("Trackio", "trackio"),
                                              ("TensorBoard", "torch.utils.tensorboard")])  # fmt: skip
def test_what_is_not_installed_says_how_to_install_it(kind, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"is not installed: pip install 'hdet\[{kind.lower()}\]'"):
        getattr(hdet.records.trackers, kind)(*([tmp_path] if kind == "TensorBoard" else []))


def test_only_the_first_replica_tells():
    told = []

    class Own(hdet.records.trackers.tracker.Tracker):
        def log(self, numbers, record):
            told.append((hdet.find_replicas().rank, numbers["hdet/round"], record.step))

    hdet.in_process(lambda: log(Own()), 3)
    assert told == [(0, 0.0, 5), (0, 1.0, 10), (0, 2.0, 15)]
