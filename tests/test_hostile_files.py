"""Files of a run that anyone may have damaged, replaced or made up: commands answer in words, with what is good.

Each kind of file is put into the folder of a real run, and `hdet report`, `export`, `watch` and `resume` are let loose
on it. Nothing may raise, block, run what a file holds, or send its control characters to the terminal.
"""

import dataclasses
import http.client
import json
import math
import os
import pickle
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from made_up_runs import make_records, write_run

from hdet._report.page import run_data
from hdet._report.run import Run
from hdet._report.watch import Watch
from hdet.records.json_lines import to_line
from hdet_lab import summary
from hdet_lab.cli import main

STEPS, SAVED = 6, 4  # of the run, and of the last checkpoint that `resume` finds
SECONDS = 20.0  # for one command on a busy machine; each takes a fraction of one
PAGES = ("report", "export", "watch")
CANARY = "canary"  # a file that payloads would make in the current folder
SCRIPT = "<script>hacked=1</script>"
ANSI = "\x1b]0;pwned\x07\x1b[2J\x1b[31m\x9b31m\r\u202e"


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


@dataclasses.dataclass
class Kind:
    """What is done to a folder, and what becomes of it.

    Attributes:
        spoil: does it.
        says: what is said on stderr, by every command that reads the file; None for nothing.
        rounds: how many are shown.
        refused: the commands that cannot do without it, and end with 1.
        unheard: those that do not read it, or mend it, so that they have nothing to say.
    """

    spoil: Callable
    says: str | None = None
    rounds: int = STEPS
    refused: tuple = ()
    unheard: tuple = ()


def lines_of(folder, name="rounds.jsonl"):
    return (folder / name).read_bytes().splitlines(keepends=True)


def inserted(text, name="rounds.jsonl"):
    """A line between the third and the fourth."""

    def spoil(folder):
        lines = lines_of(folder, name)
        (folder / name).write_bytes(b"".join([*lines[:3], text + b"\n", *lines[3:]]))

    return spoil


def changed(name="rounds.jsonl", row=False, **changes):
    """The fourth line with other entries, or others in its only hyperparameter; `...` takes one away."""

    def spoil(folder):
        lines = lines_of(folder, name)
        line = json.loads(lines[3])
        entries = line["hyperparameters"]["learning_rate"] if row else line
        entries.update(changes)
        for key in [key for key, value in entries.items() if value is ...]:
            del entries[key]
        lines[3] = json.dumps(line).encode() + b"\n"
        (folder / name).write_bytes(b"".join(lines))

    return spoil


def replaced(old, new, name="rounds.jsonl", count=1):
    """Other bytes in the fourth line."""

    def spoil(folder):
        lines = lines_of(folder, name)
        assert re.search(old, lines[3])
        lines[3] = re.sub(old, lambda match: new, lines[3], count=count)
        (folder / name).write_bytes(b"".join(lines))

    return spoil


def holding(name, content):
    """A file of this content, which is JSON unless it is bytes."""

    def spoil(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    return spoil


def made(name, make):
    """Something else than a file in its place."""

    def spoil(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def rewritten(change, name="rounds.jsonl"):
    def spoil(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoil


def listen(path):
    before = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(before)


def grow(path):
    """To three GB, of which the disk holds nothing."""
    text = path.read_bytes()
    with open(path, "wb") as file:
        file.write(text)
        file.truncate(3 << 30)


def nested(depth):
    return b'{"a": ' * depth + b"1" + b"}" * depth


def bad(says, spoil):
    """A line of rounds.jsonl that is left out. A resume needs no more of it than its step."""
    return Kind(spoil, rf"rounds\.jsonl: 1 line was left out; line 4: {says}", rounds=STEPS - 1, unheard=("resume",))


def extra(says, text):
    unheard = ("resume",) if b'"step"' in text else ()  # which needs no more of a line
    return Kind(inserted(text), rf"rounds\.jsonl: 1 line was left out; line 4: {says}", unheard=unheard)


def no_file(name, make, what, refused=("resume",), **more):
    unheard = {"rounds.jsonl": (), "losses.jsonl": (), "result.json": (), "find_lr.json": ("resume",)}
    unheard |= dict.fromkeys(("options.json", "start.json"), PAGES)
    return Kind(made(name, make), rf"{name}.*{what}", refused=refused, unheard=unheard[name], **more)


def document(name, content, says, refused=()):
    """A bad JSON file of the lab: the report does without it, and so does a resume but for the options."""
    readers = {"result.json": (), "find_lr.json": ("resume",), "start.json": PAGES}
    return Kind(
        holding(name, content),
        rf"{name}.*{says}",
        refused=refused,
        unheard=readers.get(name, PAGES),
    )


def row(**changes):
    return changed(row=True, **changes)


EXTRA_LINES = {
    "another object": extra("it must be an object with '(round|step)', got an object", b'{"a": 1}'),
    "text": extra("it is no JSON", b"hello"),
    "a list": extra("it must be an object, got a list of 1", b"[1]"),
    "a number": extra("it must be an object, got 5", b"5"),
    "null": extra("it must be an object, got null", b"null"),
    "brackets without end": extra("it is nested too deeply|it is no JSON", b"[" * 200_000),
    "deep nesting": extra("it is nested too deeply", nested(100_000)),
    "nesting that Python takes": extra("it is nested too deeply", nested(200)),
    "bytes that are no text": extra("it is not UTF-8", b'{"round": "\xff\xfe"}'),
    "another encoding": extra("it is no(t UTF-8| JSON)", '{"round": 1}'.encode("utf-16-be")),
    "NUL bytes": extra("it is no JSON", b"\0" * 1000),
    "a pickle": extra("it is no", pickle.dumps(Payload(), protocol=0).replace(b"\n", b"\\n")),
    "Python": extra("it is no JSON", b"__import__('os').system('touch canary')"),
    "a tag of YAML": extra("it is no JSON", b'!!python/object/apply:os.system ["touch canary"]'),
    "a key twice": extra("it has a key twice", b'{"round": 3, "round": 4}'),
    "a number of many digits": extra("it has a number of too many digits", b'{"round": ' + b"9" * 5000 + b"}"),
    "an endless line": extra("it is longer than 16 MB", b" " * (17 << 20)),
    "a later version": extra("it has version 99 of the records", b'{"version": 99, "round": 3, "step": 4}'),
}
BAD_ENTRIES = {
    "a step that is infinite": bad("step must be a whole number, got inf", replaced(rb'"step": 4', b'"step": 1e999')),
    "a step below 0": bad("step must be at least 0, got -4", changed(step=-4)),
    "a step that is true": bad("step must be a whole number, got true", changed(step=True)),
    "a round of 300 digits": bad("round must be a whole number, got a larger one", changed(round=10**300)),
    "events that are an object": bad("events must be a list, got an object", changed(events={"a": 1})),
    "events that are numbers": bad(r"events\[0\] must be text, got 5", changed(events=[5])),
    "scores that are an object": bad("scores must be a list, got an object", changed(scores={"0": 1.0})),
    "scores that are text": bad(r"scores\[1\] must be a number, got '<b>'", changed(scores=[1.0, "<b>"])),
    "a loss that is true": bad(r"scores\[0\] must be a number, got true", changed(scores=[True, 1.0])),
    "more replicas than there are": bad("it has 100001 replicas and 1 hyperp", changed(scores=[1.0] * 100_001)),
    "more probes than replicas": bad("probe must be a list of 2, as scores is", changed(probe=[1.0] * 3)),
    "fewer values than replicas": bad("values of .* must be a list of 2, as scores is", row(values=[0.1])),
    "hyperparameters that are a list": bad(
        "hyperparameters must be an object, got a list", changed(hyperparameters=[1])
    ),
    "a hyperparameter that is a number": bad("hyperparameters.lr must be an", changed(hyperparameters={"lr": 5})),
    "a hyperparameter without values": bad(
        "hyperparameters.learning_rate must be an object with 'values'", row(values=...)
    ),
    "memory that is a list": bad("hyperparameters.learning_rate.memory must be an object", row(memory=[1])),
    "places that are numbers": bad(r"hyperparameters.learning_rate.places\[0\] must be text", row(places=[1, 2])),
    "a version that is text": bad("version must be a whole number, got 'x'", changed(version="x")),
    "a writer that is a number": bad("written_by must be text, got 5", changed(written_by=5)),
}
TAKEN = {
    "a score that is infinite": Kind(replaced(rb'"scores": \[[0-9.]+', b'"scores": [1e999')),
    "scores that are not numbers": Kind(replaced(rb'"scores": \[[^]]*\]', b'"scores": [NaN, -Infinity]')),
    "a center that is infinite": Kind(replaced(rb'"first": \[[^]]*\]', b'"first": [1e999, NaN]'), refused=("export",)),
    "half a character": Kind(changed(events=["found: \ud800 half"])),
    "control characters": Kind(changed(events=[f"found: {ANSI}"], written_by=ANSI)),
    "scripts": Kind(row(finding=SCRIPT, decision=SCRIPT)),
    "names of all kinds": Kind(
        lambda folder: rename(folder, [ANSI, SCRIPT, "__proto__", "=cmd|'/C calc'!A0", "", "x" * 9999])
    ),
    "keys of later versions": Kind(changed(mood={"good": [1, {}]}, replica=7)),
    "an earlier version's": Kind(
        changed(**dict.fromkeys(("probe", "start", "events", "steps", "outer_step", "time"), ...))
    ),
    "null for what has a default": Kind(
        changed(events=None, steps=None, total_steps=None, last=None, round_seconds=None)
    ),
    "the largest numbers": Kind(changed(round_seconds=1e308, start=-1.7e308, probe=[1.7e308, -1.7e308])),
    "a writer that is no process": Kind(changed(written_by=f"{socket.gethostname()}:²")),
    "a writer beyond all processes": Kind(changed(written_by=f"{socket.gethostname()}:{10**30}")),
    "ends of lines of Windows": Kind(rewritten(lambda text: text.replace(b"\n", b"\r\n"))),
    "a mark in front": Kind(rewritten(lambda text: b"\xef\xbb\xbf" + text)),
    "empty lines": Kind(rewritten(lambda text: b"\n\n" + text.replace(b"\n", b"\n\n"))),
    "a last line that was cut short": Kind(rewritten(lambda text: text + b'{"version": 1, "rou')),
}
LOSSES = {
    f"losses: {name}": Kind(inserted(text, "losses.jsonl"), rf"losses\.jsonl: 1 line was left out; line 4: {says}")
    for name, text, says in [
        ("another object", b'{"a": 1}', "it must be an object with 'step'"),
        ("text", b"hello", "it is no JSON"),
        ("an infinite step", b'{"step": 1e999, "loss": 1.0, "lr": 0.1}', "step must be a whole number"),
        ("deep nesting", nested(100_000), "it is nested too deeply"),
    ]
} | {"losses: infinite": Kind(replaced(rb'"loss": [0-9.]+', b'"loss": 1e999', "losses.jsonl"))}
NO_FILES = {
    "rounds: a pipe": no_file("rounds.jsonl", os.mkfifo, "a named pipe, not a file", ("export", "resume"), rounds=0),
    "rounds: a folder": no_file("rounds.jsonl", os.mkdir, "a folder, not a file", ("export", "resume"), rounds=0),
    "rounds: a socket": no_file("rounds.jsonl", listen, "a socket, not a file", ("export", "resume"), rounds=0),
    "rounds: a device": no_file(
        "rounds.jsonl",
        lambda path: path.symlink_to("/dev/zero"),
        "a device, not a file",
        ("export", "resume"),
        rounds=0,
    ),
    "losses: a pipe": no_file("losses.jsonl", os.mkfifo, "a named pipe"),
    "result: a pipe": no_file("result.json", os.mkfifo, "a named pipe"),
    "find_lr: a pipe": no_file("find_lr.json", os.mkfifo, "a named pipe", refused=()),
    "start: a pipe": no_file("start.json", os.mkfifo, "a named pipe"),
    "options: a pipe": no_file("options.json", os.mkfifo, "a named pipe"),
    "rounds: garbage": Kind(
        holding("rounds.jsonl", b"\xff\xfe\n" * 1000), "1,000 lines were left out; the first, line 1", 0, ("export",)
    ),
    "rounds: empty": Kind(holding("rounds.jsonl", b""), rounds=0, refused=("export",)),
    "rounds: without end": Kind(
        lambda folder: grow(folder / "rounds.jsonl"), "longer than 16 MB.*after 0 GB|too large", refused=("resume",)
    ),
}
DEEP = b"[" * 200_000
DOCUMENTS = {
    "result: a list": document("result.json", [1], "it must be an object, got a list of 1"),
    "result: another type": document("result.json", {"held_out": 5}, "held_out must be an object, got 5"),
    "result: an infinite loss": Kind(
        holding("result.json", b'{"held_out": {"loss": 1e999}}'), "result.json: it has no", unheard=PAGES
    ),
    "result: deep nesting": document("result.json", DEEP, "nested too deeply|no JSON"),
    "result: of a run that diverged": Kind(
        holding("result.json", {"held_out": None, "held_out_unseen": None, "train_loss": None, "diverged": "lost"})
    ),
    "find_lr: a list": document("find_lr.json", [1], "it must be an object"),
    "find_lr: another type": document("find_lr.json", {"rate": "fast"}, "rate must be a number, got 'fast'"),
    "find_lr: times": document("find_lr.json", {"seconds": [1]}, "seconds must be a number, got a list"),
    "find_lr: curves": document("find_lr.json", {"coarse": [[1]]}, r"coarse\[0\] must be a list of 2"),
    "find_lr: infinite": Kind(holding("find_lr.json", b'{"rate": 1e999, "cost": NaN, "mood": {}}')),
    "find_lr: deep nesting": document("find_lr.json", DEEP, "nested too deeply|no JSON"),
    "start: a list": document("start.json", [1], "it must be an object"),
    "start: another type": document("start.json", {"peak_lr": "x", "steps": 6}, "peak_lr must be a number, got 'x'"),
    "start: infinite": document("start.json", b'{"peak_lr": 1e999, "steps": 6}', "peak_lr must be a finite number"),
    "start: a longer run": document("start.json", {"peak_lr": 0.1, "steps": 10**9}, "it is no start of a run of 6"),
    "options: a list": document("options.json", [1], "it must be an object", ("resume",)),
    "options: of another program": document("options.json", {"a": 1}, "object with 'options'", ("resume",)),
    "options: another type": document("options.json", {"options": {"task": 5}}, "task must be text", ("resume",)),
    "options: no task": document("options.json", {"options": {}}, "an object with 'task'", ("resume",)),
    "options: a text for a number": document(
        "options.json", {"options": {"task": "digits", "seed": "0"}}, "seed must be a whole number", ("resume",)
    ),
    "options: null for a number": document(
        "options.json", {"options": {"task": "digits", "seed": None}}, "seed must be a whole number", ("resume",)
    ),
    "options: a number for text": document(
        "options.json", {"options": {"task": "digits", "explore": 7}}, "explore must be text, got 7", ("resume",)
    ),
    "options: deep nesting": document("options.json", DEEP, "nested too deeply|no JSON", ("resume",)),
}  # fmt: skip
KINDS = EXTRA_LINES | BAD_ENTRIES | TAKEN | LOSSES | NO_FILES | DOCUMENTS


def rename(folder, names):
    """The hyperparameter of all rounds gets these names."""
    lines = [json.loads(line) for line in lines_of(folder)]
    for line in lines:
        (found,) = line["hyperparameters"].values()
        line["hyperparameters"] = dict.fromkeys(names, found)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that has ended, and that of the same one stopped before its end."""
    whole = tmp_path_factory.mktemp("hostile") / "whole"
    words = [
        "train",
        "digits",
        "--size",
        "smoke",
        "--controller",
        "softmax",
        "--steps",
        str(STEPS),
        "--checkpoint-every",
        "2",
        "--in-process",
    ]
    assert main([*words, "--folder", str(whole)]) == 0
    stopped = whole.with_name("stopped")
    shutil.copytree(whole, stopped)
    (stopped / "result.json").unlink()
    shutil.rmtree(next((stopped / "checkpoints").glob(f"*-step-{STEPS}")))
    return whole, stopped


def ask(url, path="/", **headers):
    """Status and text of an answer."""
    port = int(re.search(r":(\d+)/", url)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


class Watched:
    """The page of some folders, served in this process."""

    def __init__(self, *folders):
        self.watch = Watch([Run(folder) for folder in folders])
        threading.Thread(target=self.watch.serve, daemon=True).start()

    def runs(self):
        status, text = ask(self.watch.url, "/data?have=")
        assert status == 200, text
        return json.loads(text, parse_constant=pytest.fail)["runs"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.watch.close()


def let_loose(command, folder, healthy, capsys):
    """Exit code and what was said. A good run is watched beside the other one, and stays there."""
    began = time.monotonic()
    if command == "watch":
        with Watched(folder, healthy) as watched:
            assert ask(watched.watch.url)[0] == 200
            run, good = watched.runs()
        assert good["rounds"] == 12
        code = run["rounds"], "\n".join(part["text"] for part in run["summary"] if part["title"] == "Left out")
    else:
        code = main([command, str(folder), *(["--in-process"] if command == "resume" else [])])
    assert time.monotonic() - began < SECONDS
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "Traceback" not in text
        assert not re.search(r"[^\n\t\x20-\x7e\xa1-\u1fff]", text.replace("²", "")), ascii(text)
    return code, said


@pytest.mark.parametrize("name", KINDS)
def test_every_command_answers_in_words_with_what_is_good(name, trained, tmp_path, capsys, monkeypatch):
    kind = KINDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(summary, "draw", lambda *given: "")  # takes long, and is the test below
    if name == "rounds: without end":
        monkeypatch.setattr("hdet.records.reading.MOST_BYTES", 1 << 26)
    write_run(tmp_path / "healthy", 12, 2)
    for command in (*PAGES, "resume"):
        folder = tmp_path / command
        shutil.copytree(trained[command == "resume"], folder)
        kind.spoil(folder)
        code, said = let_loose(command, folder, tmp_path / "healthy", capsys)
        heard = said.err
        if command == "watch":
            rounds, heard = code
            assert rounds == kind.rounds
        else:
            assert code == (command in kind.refused), heard
        if command == "report":
            assert f"{kind.rounds or 'no'} rounds" in said.out
        if command == "export" and not code:
            assert json.loads((folder / "schedule.json").read_text())["total_steps"] == STEPS
        if command == "resume" and "diverged" in name:
            assert "The run ended early: lost\n" in said.out
        elif command == "resume" and not code:
            assert json.loads((folder / "result.json").read_text())["steps"] == STEPS
            assert [line["step"] for line in map(json.loads, lines_of(folder, "losses.jsonl"))][-2:] == [5, 6]
        if kind.says and command not in kind.unheard:
            assert re.search(kind.says, heard), heard
        elif command != "resume" and not code:
            assert "hdet: warning" not in heard
            assert command == "watch" or not heard
    assert not list(tmp_path.rglob(CANARY))


def test_a_file_that_is_rewritten_is_watched_from_its_beginning(tmp_path):
    """Shorter, longer, in the same place or in another one, with the same beginning or another."""
    write_run(tmp_path, 12, 2)
    path = tmp_path / "rounds.jsonl"
    other = write_run(tmp_path / "other", 30, 2, seed=1) and (tmp_path / "other" / "rounds.jsonl").read_bytes()
    lines = path.read_bytes().splitlines(keepends=True)
    with Watched(tmp_path) as watched:
        assert watched.runs()[0]["rounds"] == 12
        for text, rounds in [
            (other, 30),
            (b"".join(lines[:5]), 5),
            (b"", 0),
            (b"".join(lines), 12),
            (b"".join([lines[0], *other.splitlines(keepends=True)[1:20]]), 20),  # begins as before
            (b"no records\n" * 1000, 0),
            (b"".join(lines[:7]), 7),
        ]:
            path.write_bytes(text)  # in place
            (run,) = watched.runs()
            assert run["rounds"] == rounds
            assert len(run["columns"]["step"]) == rounds
            assert (run["state"], len(run["summary"])) != ("waiting", 1) or not rounds
        path.unlink()
        path.write_bytes(other)
        assert watched.runs()[0]["rounds"] == 30


def test_a_page_gets_all_of_a_rewritten_run(tmp_path):
    write_run(tmp_path, 12, 2)
    with Watched(tmp_path) as watched:
        version = watched.runs()[0]["version"]
        assert json.loads(ask(watched.watch.url, f"/data?have={version}")[1])["runs"] == [None]
        write_run(tmp_path, 20, 2, seed=1)
        (run,) = json.loads(ask(watched.watch.url, f"/data?have={version}")[1])["runs"]
        assert (run["since"], run["rounds"], len(run["columns"]["step"])) == (0, 20, 20)


@pytest.mark.parametrize("kind", ["rounds", "losses"])
def test_a_folder_that_is_deleted_is_told_and_taken_up_again(kind, tmp_path):
    folder = tmp_path / "run"
    write_run(folder, 12, 2, last=False)
    if kind == "losses":
        (folder / "rounds.jsonl").unlink()
        (folder / "options.json").write_text("{}")
        (folder / "losses.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
    with Watched(folder) as watched:
        before = watched.runs()[0]
        os.rename(folder, tmp_path / "away")
        gone = watched.runs()[0]
        assert gone["state"] == "cut off"
        assert "its files are gone; what they held is shown" in gone["status"]
        assert (gone["rounds"], gone["losses"]) == (before["rounds"], before["losses"])
        assert ask(watched.watch.url)[0] == 200
        os.rename(tmp_path / "away", folder)
        assert watched.runs()[0]["status"] == before["status"]
        shutil.rmtree(folder)
        assert watched.runs()[0]["state"] == "cut off"
        write_run(folder, 20, 2)
        assert watched.runs()[0]["rounds"] == 20


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/data?have=1:²:1", 400), ("/data?have=1:%C2%B2:1", 400), ("/data?have=-1:0:0", 400), ("/data?have=x", 400),
        (f"/data?have=1:{'9' * 5000}:1", 400), ("/data?have=1:1", 400), ("/data?have=%00", 400), ("http://[", 400),
        ("/data?have=1:٣:1", 400), ("/data?have=99:5:1", 200), ("/data?have=0:999999999999999:1", 200),
        ("/data?have=,,,", 200), ("/data", 200), ("/data?" + "&".join("a=1" for _ in range(2000)), 200),
        ("/../../etc/passwd", 404), ("/%2e%2e/%2e%2e/etc/passwd", 404), ("/data/../options.json", 404),
        ("/rounds.jsonl", 404), ("/%00", 404), ("/<script>", 404),
    ],
)  # fmt: skip
def test_whatever_is_asked_has_an_answer(path, status, tmp_path, capsys):
    write_run(tmp_path, 12, 2)
    with Watched(tmp_path) as watched:
        port = int(re.search(r":(\d+)/", watched.watch.url)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as raw:
            raw.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            answer = b""
            while block := raw.recv(1 << 16):
                answer += block
        assert answer.split()[1] == str(status).encode(), answer[:300]
        if status != 200:
            assert b"text/plain" in answer
            assert b"root:" not in answer
            assert b"<" not in answer
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as raw:  # one that does not wait for it
            raw.sendall(b"GET / HTT")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert watched.runs()[0]["rounds"] == 12
    assert not capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1", "65536", "x", "²", "1.5", ""])
def test_a_port_that_is_none_is_one_line(port, tmp_path, capsys):
    assert main(["watch", str(tmp_path), "--port", port]) == 2
    errors = capsys.readouterr().err
    assert "argument --port: must be a whole number from 0 to 65535, got" in errors or "--port: expected" in errors
    assert errors.count("\n") == 1


def test_a_port_in_use_is_one_line(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"hdet: error: port {port} cannot be used: Address already in use\n"


def test_folders_that_lead_nowhere_are_one_line(tmp_path, capsys):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "rounds.jsonl").symlink_to("rounds.jsonl")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\x1b[31m")
    for name in ("circle", "loop", "gone", "file", "a\x1b[2Jname", "x" * 300, "\udcff\x1b[31m"):
        for command in ("report", "export", "resume"):
            assert main([command, str(tmp_path / name)]) == 1
            errors = capsys.readouterr().err
            assert errors.startswith("hdet: error: ")
            assert errors.count("\n") == 1
            assert errors.rstrip("\n").isprintable()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_what_may_not_be_read_is_said(tmp_path, capsys):
    write_run(tmp_path / "file", 12, 2)
    write_run(tmp_path / "folder" / "run", 12, 2)
    for path in (tmp_path, *tmp_path.parents[:-2], tmp_path / "file"):
        path.chmod(0o755)
    (tmp_path / "file" / "rounds.jsonl").chmod(0)
    (tmp_path / "folder").chmod(0)
    os.seteuid(65534)
    try:
        for folder in (tmp_path / "file", tmp_path / "folder" / "run"):
            for command in ("report", "export", "resume"):
                assert main([command, str(folder)]) == 1
                errors = capsys.readouterr().err
                assert "Permission denied" in errors or "is not a run that saves checkpoints" in errors
                assert errors.count("\n") == 1
            with Watched(folder) as watched:
                (run,) = watched.runs()
                assert run["rounds"] == 0
                assert "Permission denied" in run["summary"][-1]["text"]
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("command", "name"), [("report", "report.html"), ("export", "schedule.json")])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("../precious")])
def test_what_a_folder_leads_to_is_not_written(command, name, make, tmp_path, capsys):
    """A run folder of somebody else may hold a link to a file of one's own under the name of the output."""
    folder = tmp_path / "run"
    write_run(folder, 12, 2)
    (tmp_path / "precious").write_text("precious")
    make(folder / name)
    assert main([command, str(folder)]) == 1
    assert "is there and is no plain file; remove it, or choose another one with --output" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "precious"
    assert main([command, str(folder), "--output", str(tmp_path / "out")]) == 0


def test_names_are_shown_and_not_obeyed(tmp_path, trained):
    """By the real command, on a terminal that has not all characters."""
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    rename(folder, [ANSI, "größe", "\ud800"])
    inserted(b"\x1b[31mred")(folder)
    command = [sys.executable, "-m", "hdet_lab", "report", str(folder)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=100, check=True)
    assert rb"\x1b[2J" in done.stdout
    assert "größe".encode("ascii", "backslashreplace") in done.stdout
    assert done.stderr.startswith(b"hdet: warning: ")
    for text in (done.stdout, done.stderr):
        assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", text)


def test_pictures_of_odd_rounds_are_drawn_or_refused(tmp_path, trained, capsys):
    for number, kind in enumerate(
        KINDS[name] for name in ("the largest numbers", "names of all kinds", "half a character")
    ):
        folder = tmp_path / str(number)
        shutil.copytree(trained[0], folder)
        kind.spoil(folder)
        code = main(["report", str(folder), "--pictures"])
        assert code == 0 or capsys.readouterr().err.count("\n") == 1


def test_a_resumed_run_keeps_what_it_could_not_read(trained, tmp_path, capsys):
    """With its pictures, once, and beside the file that goes on."""
    folder = tmp_path / "run"
    shutil.copytree(trained[1], folder)
    for name in ("losses.jsonl", "rounds.jsonl"):
        inserted(b'{"a": 1}', name)(folder)
    losses = (folder / "losses.jsonl").read_bytes()
    assert main(["resume", str(folder), "--in-process"]) == 0
    said = capsys.readouterr()
    assert said.err.count("1 line was left out; line 4: it must be an object with 'step', got an object") == 2
    assert "losses.png" in said.out
    assert (folder / "losses.jsonl.damaged").read_bytes() == losses
    whole = lines_of(trained[0], "losses.jsonl")
    assert lines_of(folder, "losses.jsonl") == whole
    assert [json.loads(line)["scores"] for line in lines_of(folder)] == [
        json.loads(line)["scores"] for line in lines_of(trained[0])
    ]


ODD = [None, True, -1, 0, 2**53, 10**400, 0.5, -0.0, 5e-324, 1.7e308, -1.7e308, 1e200, math.inf, math.nan]
ODD += [
    "",
    "NaN",
    ANSI,
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"": 1},
    [1.7e308] * 2,
    [0.0, 0.0],
    [5e-324, 1e-323],
    [1e200, -1e200],
]


def entries(value):
    """All containers in a JSON value, with their keys."""
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from entries(entry)


def test_odd_values_anywhere_break_nothing(tmp_path, capsys):
    """Each value in each place of a round, one or two at a time."""
    draw, record = random.Random(0), list(make_records(3, 3))
    text = [to_line(each, 0.0, "elsewhere:1") for each in record]
    for number in range(400):
        lines = [json.loads(line) for line in text]
        for _ in range(1 + number % 3):
            holder, key = draw.choice(list(entries(draw.choice(lines))))
            holder[key] = draw.choice(ODD)
        (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = Run(tmp_path)
        run.refresh()
        told = run_data(run)
        json.dumps(told, allow_nan=False)
        assert told["rounds"] + sum("left out" in part["text"] for part in told["summary"]) >= 1
        if number % 50 == 0:
            main(["report", str(tmp_path)])
        if run.lines:
            assert main(["export", str(tmp_path)]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"[1]", b'"text"', DEEP, b"\xff", b'{"options": {}, "seeds": "x"}', None])
def test_several_runs_are_not_begun_beside_something_else(content, tmp_path, capsys):
    for command, name in (("sweep", "sweep.json"), ("returns", "returns.json"), ("ablate", "ablate.json")):
        folder = tmp_path / command
        folder.mkdir()
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)
        assert (
            main([command, "digits", "--size", "smoke", "--steps", "4", "--in-process", "--folder", str(folder)]) == 1
        )
        errors = capsys.readouterr().err
        assert errors.startswith("hdet: error: ")
        assert name in errors or "holds runs with other options" in errors
        assert errors.count("\n") == 1


@pytest.mark.parametrize("content", [pickle.dumps(Payload()), b"", b"PK\x03\x04", pickle.dumps([1]), None])
def test_weights_to_begin_with_are_a_runs_or_refused(content, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is None:
        os.mkfifo(tmp_path / "weights.pt")
    else:
        (tmp_path / "weights.pt").write_bytes(content)
    words = ["train", "digits", "--size", "smoke", "--steps", "4", "--in-process", "--start", str(tmp_path)]
    assert main([*words, "--folder", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert "start must be the folder of a run of the same task" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / CANARY).exists()


def test_processes_resume_as_threads_do(trained, tmp_path):
    """Only the first of them reads the files."""
    folder, kinds = tmp_path / "run", [KINDS[f"{name}: another type"] for name in ("start", "result")]
    kinds.append(KINDS["losses: another object"])
    shutil.copytree(trained[1], folder)
    for kind in kinds:
        kind.spoil(folder)
    command = [sys.executable, "-m", "hdet_lab", "resume", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert all(re.search(kind.says, done.stderr) for kind in kinds)
    assert "Traceback" not in done.stderr
    assert json.loads((folder / "result.json").read_text())["steps"] == STEPS


@pytest.mark.parametrize("name", ["checkpoint.json", "shared.pt"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.write_bytes(pickle.dumps(Payload()))])
def test_checkpoints_that_are_something_else_are_one_line(name, make, trained, tmp_path, capsys, monkeypatch):
    """The newest one alone, and all of them."""
    monkeypatch.chdir(tmp_path)
    for number, all_of_them in enumerate([False, True]):
        folder = tmp_path / str(number)
        shutil.copytree(trained[1], folder)
        found = sorted((folder / "checkpoints").iterdir(), reverse=True)
        for checkpoint in found if all_of_them else found[:1]:
            (checkpoint / name).unlink()
            make(checkpoint / name)
        code, said = let_loose("resume", folder, None, capsys)
        assert code == all_of_them
        assert "cannot be verified" in said.err or "can be verified" in said.err
        assert not list(tmp_path.rglob(CANARY))
