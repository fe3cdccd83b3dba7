"""The page in a real browser: what is drawn, what hover says, what a hostile run can do, what 20,000 rounds cost."""

import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib import resources
from types import SimpleNamespace

import browser as browsers
import pytest
from browser import Page
from made_up_runs import make_records, write_run

import hdet
from hdet._report import pictures
from hdet._report.page import page, run_data
from hdet._report.run import Run
from hdet._report.watch import Watch
from hdet.records.json_lines import strict, to_line
from hdet_lab.cli import main

UPLOT = {  # version 1.6.32, from npm
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
KILLED = """
import sys, time, torch, hdet
model = torch.nn.Linear(2, 1)
o = torch.optim.SGD(model.parameters(), lr=0.1)
ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], total_steps=10_000, interval=2,
                         on_round=[hdet.JSONLines(sys.argv[1])])
while True:
    model(torch.ones(4, 2)).square().mean().backward()
    o.step()
    ensemble.step()
    time.sleep(0.002)
"""
CHARTS = ("fan", "loss", "scale", "cost", "line")


def report(folder, *more):
    """The address of a run's page."""
    assert main(["report", str(folder), *more]) == 0
    return f"file://{folder}/report.html"


def number(text):
    return float(text.replace(",", ""))


def close_to(value):
    return pytest.approx(value, rel=1e-3)  # four digits are shown


def check_quiet(seen):
    """No console message, no request but for the page itself."""
    assert seen.errors == []
    assert len(seen.requests) == 1, seen.requests


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, write_run(folder, 120, 4, ("learning_rate", "weight_decay"))


def test_the_charts_are_drawn_and_hover_says_what_the_records_say(browser, run_folder):
    folder, records = run_folder
    seen = Page(browser, report(folder))
    for chart in CHARTS:
        assert seen.drawn(chart) > 1000, chart
    for index in (3, 77, 119):
        record = records[index]
        row = record.hyperparameters["learning_rate"]
        told = seen.hover("fan", index)
        assert number(told["step"]) == record.step
        assert [number(told[f"replica {k}"]) for k in range(4)] == [close_to(x) for x in row.values]
        assert number(told["schedule"]) == close_to(row.base)
        assert number(told["center"]) == close_to(row.center)
        told = seen.hover("loss", index)
        assert [number(told[f"replica {k}"]) for k in range(4)] == [close_to(x) for x in record.probe]
        if index < 119:
            assert number(told["consensus, next probe"]) == close_to(records[index + 1].start)
        told = seen.hover("scale", index)
        assert number(told["factor"]) == close_to(row.scale)
        high = row.scale_before * math.exp(row.estimate + 2 * row.error)
        assert number(told["to (2 standard errors)"]) == close_to(high)
        told = seen.hover("cost", index)
        assert number(told["probe %"]) == close_to(100 * record.probe_seconds / record.round_seconds)
    check_quiet(seen)
    seen.close()


def test_a_round_is_chosen_and_its_line_search_is_that_of_the_record(browser, run_folder):
    folder, records = run_folder
    seen = Page(browser, report(folder, "--round", "40"))
    record, shown = records[40], "charts.line.plot.data"
    assert "Round 40" in seen.tab.inner_text("#line-title")
    pairs = seen.ask(f"{shown}[0].map((x, i) => [x, {shown}[1][i]]).filter(([, y]) => y != null)")
    row = record.hyperparameters["learning_rate"]
    rises = sorted((v / row.center, loss - record.start) for v, loss in zip(row.values, record.probe, strict=True))
    assert pairs == [[pytest.approx(x, rel=1e-4), pytest.approx(y, abs=2e-5)] for x, y in rises]
    labels = seen.ask("charts.line.plot.series.map((s) => s.label)")
    assert labels[1:] == ["replicas", "parabola", "vertex", "target of the vertex"]
    vertex = seen.ask(f"{shown}[3].findIndex((y) => y != null)")
    at, lowest = seen.ask(f"[{shown}[0][{vertex}], {shown}[3][{vertex}]]")
    heights = seen.ask(f"{shown}[2].filter((y) => y != null)")
    assert lowest <= min(heights) <= lowest + 1e-5  # the vertex lies at the parabola's lowest point
    assert 0 < at < 4
    assert f"Decision: {row.decision}" in seen.tab.inner_text("#line-text")
    seen.hover("fan", 60)
    seen.tab.mouse.down()
    seen.tab.mouse.up()
    assert "Round 60" in seen.tab.inner_text("#line-title")
    assert seen.tab.inner_text("#rounds tr.chosen td").startswith("60")
    seen.tab.click("#rounds tr:nth-child(3)")
    assert "Round 51" in seen.tab.inner_text("#line-title")
    seen.tab.select_option("#hyper", index=1)
    assert "weight_decay" in seen.tab.inner_text("#fan-title")
    for button in seen.tab.query_selector_all(".buttons button:not([disabled])"):
        button.evaluate("(b) => b.click()")
    check_quiet(seen)
    seen.close()


def test_it_is_readable_in_the_dark_on_a_phone_and_on_paper(browser, run_folder):
    folder, _ = run_folder
    url = report(folder)
    pages = [Page(browser, url, scheme=scheme) for scheme in ("light", "dark")]
    colors = [seen.ask("getComputedStyle(document.body).backgroundColor") for seen in pages]
    assert colors == ["rgb(246, 247, 249)", "rgb(14, 17, 22)"]
    pages[0].tab.click("#theme")
    assert pages[0].ask("getComputedStyle(document.body).backgroundColor") == colors[1]
    narrow = Page(browser, url, width=360)
    assert narrow.ask("document.documentElement.scrollWidth") <= 360
    assert len(pages[1].tab.pdf()) > 20_000
    assert pages[1].ask("document.documentElement.dataset.theme") == ""  # as before printing
    for seen in (*pages, narrow):
        check_quiet(seen)
        seen.close()


def test_several_runs_on_one_page(browser, run_folder, tmp_path):
    folder, _ = run_folder
    other = write_run(tmp_path / "second", 50, 4, seed=1)
    assert main(["report", str(folder), str(tmp_path / "second"), "--output", str(tmp_path / "both.html")]) == 0
    seen = Page(browser, f"file://{tmp_path}/both.html")
    assert seen.tab.inner_text("#runs").count("ended") == 2
    assert seen.drawn("compareLoss") > 1000
    assert seen.drawn("compareCenter") > 1000
    told = seen.hover("compareCenter", 20)
    assert number(told["second"]) == close_to(other[20].hyperparameters["learning_rate"].center)
    seen.tab.click("#runs tr:nth-child(3)")
    assert seen.tab.inner_text("#name") == "second"
    check_quiet(seen)
    seen.close()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Of the kind that `Auto` makes of a long run: a search before it, and rounds that gather nothing."""
    folder = tmp_path_factory.mktemp("runs") / "long"
    rates = [10 ** (k / 8 - 6) for k in range(41)]
    curve = tuple((rate, 2.0 - 1.5 * math.exp(-(math.log10(rate / 0.02) ** 2))) for rate in rates)
    fine = tuple(point for point in curve if point[0] > 1e-3)
    search = hdet.records.SearchRecord(0.01, 1e-4, (0.02, 0.05), (0.01, 0.05), 0.5, 2.0, curve, fine, 170, 216.0, 15.0)
    records = []
    for record in write_run(folder, 60, 2):
        rows = {
            name: dataclasses.replace(row, values=(row.center,) * 2, error=None)
            for name, row in record.hyperparameters.items()
        }
        loss = None if record.round % 5 == 3 else 2 * math.exp(-record.round / 20)
        alone = {"scores": (math.nan,) * 2, "probe": None, "start": None, "loss": loss, "hyperparameters": rows}
        alone |= {"search": search if record.round == 0 else None, "converge_seconds": 0.0, "probe_seconds": 0.0}
        records.append(dataclasses.replace(record, **alone))
    (folder / "rounds.jsonl").write_text("".join(to_line(record, 1e9, "elsewhere:1") for record in records))
    return folder, records, search


def test_a_long_run_with_a_search_is_shown_as_well_as_a_short_one(browser, long_run, capsys):
    folder, records, search = long_run
    url = report(folder, "--pictures")
    seconds = sum(record.round_seconds for record in records)
    assert f"search {15 / (15 + seconds):.1%}, converge 0.0%" in capsys.readouterr().out
    for scheme in ("light", "dark"):
        seen = Page(browser, url, scheme=scheme)
        assert all(seen.drawn(chart) > 1000 for chart in ("search", "fan", "loss", "scale", "cost"))
        for index in (0, 17, 59):
            told = seen.hover("loss", index)
            assert number(told["step"]) == records[index].step
            assert number(told["first replica"]) == close_to(records[index].loss)
        told = seen.hover("search", 20)
        assert number(told["first ramp"]) == close_to(search.coarse[20][1])
        assert number(told["learning rate"]) == close_to(search.coarse[20][0])
        rates, *columns = seen.ask("charts.search.plot.data")
        answer = rates.index(0.01)
        assert columns[2][answer] == close_to(min(search.fine, key=lambda p: abs(math.log(p[0] / 0.01)))[1])
        green = """(() => { const u = charts.search.plot, one = new OffscreenCanvas(1, 1).getContext("2d");
            one.drawImage(u.ctx.canvas, -Math.round(u.valToPos(0.035, "x", true)), -Math.round(u.bbox.top + 3));
            return [...one.getImageData(0, 0, 1, 1).data]; })()"""
        red, shade, blue, _ = seen.ask(green)
        assert shade > red  # where losses were low
        assert shade > blue
        assert "as much as steps of training\t216" in seen.tab.inner_text("#found")
        assert "that is narrow, as the ramp was too fast" in seen.tab.inner_text("#search-text")
        assert seen.tab.inner_text("#cost-text") == "Before the first step: the search, 15 seconds."
        assert not seen.tab.is_visible("#line-figure")  # no replica was compared with another
        assert seen.tab.inner_text("#rounds tr:last-child td:nth-child(3)") == f"{records[-1].loss:.4g}"
        seen.tab.click("#rounds tr:nth-child(3)")
        check_quiet(seen)
        seen.close()
    assert (folder / "pictures" / "search.png").stat().st_size > 5000
    assert (folder / "pictures" / "losses.png").stat().st_size > 5000


def test_the_search_and_its_run_beside_one_without(browser, long_run, run_folder, tmp_path):
    """What a search took counts in the table too; and the page of a run has no place for what it did not do."""
    (folder, records, _), (other, _) = long_run, run_folder
    assert main(["report", str(folder), str(other), "--output", str(tmp_path / "both.html")]) == 0
    seen = Page(browser, f"file://{tmp_path}/both.html")
    spent = 100 * 15 / (15 + sum(record.round_seconds for record in records))
    assert f"{spent:.4g} %" in seen.tab.inner_text("#runs tr:nth-child(2)")
    assert f"{records[-1].loss:.4g}" in seen.tab.inner_text("#runs tr:nth-child(2)")
    assert seen.tab.is_visible("#searched")
    seen.tab.select_option("#run", index=1)
    assert not seen.tab.is_visible("#searched")
    assert seen.tab.is_visible("#line-figure")
    assert seen.drawn("line") > 1000
    seen.tab.select_option("#run", index=0)
    assert seen.drawn("search") > 1000
    check_quiet(seen)
    seen.close()


def test_a_folder_of_find_lr_has_a_page(browser, long_run, tmp_path):
    _, _, search = long_run
    told = {**strict(search), "task": "digits", "size": "smoke", "total_steps": 80, "doubts": ["<b>noise</b>"]}
    (tmp_path / "find_lr.json").write_text(json.dumps(told))
    (tmp_path / "options.json").write_text(json.dumps({"options": {"controller": "none"}}))
    seen = Page(browser, report(tmp_path, "--pictures"))
    assert seen.drawn("search") > 1000
    assert seen.tab.inner_text("#state") == "ended"
    assert "hdet train digits --size smoke --steps 80 --peak-lr 0.01" in seen.tab.inner_text("#summary")
    assert "<b>noise</b>" in seen.tab.inner_text("#found")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["search.png"]
    check_quiet(seen)
    seen.close()


def test_one_round_and_losses_of_some_rounds_only(browser, long_run, tmp_path):
    _, records, _ = long_run
    compared = list(make_records(60, 2))
    trained = [dataclasses.replace(record, probe=None, start=None) for record in compared[:30]]
    for name, some in {"one": records[:1], "mixed": [*trained, *records[30:]]}.items():
        (tmp_path / name).mkdir()
        lines = [to_line(record, 1e9, "elsewhere:1") for record in some]
        (tmp_path / name / "rounds.jsonl").write_text("".join(lines))
        seen = Page(browser, report(tmp_path / name))
        told = seen.hover("loss", len(some) - 1)
        assert number(told["first replica" if name == "one" else "first replica alone"]) == close_to(some[-1].loss)
        check_quiet(seen)
        seen.close()


HOSTILE = [
    "<script>hacked=1;alert(1)</script>",
    "</script><script>hacked=1</script><!--",
    "\"><img src=x onerror='hacked=1;alert(2)'>",
    "'); hacked=1; ('",
    "javascript:hacked=1 // <svg onload=hacked=1> ${hacked=1} {{hacked=1}} \u2028 \x00 ]]>",
    "<!--DATA--><!--SCRIPTS-->",
    "x" * 10_000,
]


def test_hostile_names_and_values_inject_nothing(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=hacked=1>"
    write_run(folder, 40, 2, tuple(HOSTILE))
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        line["scores"] = [None, "<script>hacked=1</script>" if index == 7 else 1e308]
        line["events"] = HOSTILE
        line["start"] = -1e308
        for row in line["hyperparameters"].values():
            row["decision"] = row["finding"] = HOSTILE[index % len(HOSTILE)]
            row["error"] = None
    lines[7]["probe"] = ["NaN", "<b>1</b>"]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "options.json").write_text("{}")
    (folder / "losses.jsonl").write_text('{"step": 1, "loss": 1e999, "lr": NaN}\n{"step": 2, "loss": "<b>"}\n')
    (folder / "result.json").write_text(json.dumps({"held_out": {"loss": HOSTILE[0]}}))
    runs = [Run(folder), Run(folder)]
    for run in runs:
        run.refresh()
    watch = Watch(runs)
    threading.Thread(target=watch.serve, daemon=True).start()
    (tmp_path / "page.html").write_text(page([run_data(run) for run in runs]))
    for url in (f"file://{tmp_path}/page.html", watch.url):
        seen = Page(browser, url)
        for index in range(len(HOSTILE)):
            seen.tab.select_option("#hyper", index=index)
            seen.hover("fan", index)
        seen.hover("line", 0)
        seen.tab.click("#rounds tr:nth-child(2)")
        assert seen.ask("typeof hacked") == "undefined"
        assert seen.ask("document.querySelectorAll('img, svg, iframe, b:not(#events b), script:not([id])').length") == 3
        assert HOSTILE[0] in seen.tab.inner_text("#events")
        assert seen.errors == []
        assert all(asked.startswith((watch.url, "file://")) for asked in seen.requests)
        seen.close()
    watch.close()


def test_the_policy_stops_scripts_that_are_put_in_later(browser, run_folder):
    folder, _ = run_folder
    report(folder)
    text = (folder / "report.html").read_text()
    (folder / "tampered.html").write_text(text.replace("</footer>", "</footer><script>hacked=1</script>"))
    seen = Page(browser, f"file://{folder}/tampered.html")
    assert seen.ask("typeof hacked") == "undefined"
    assert any("Content Security Policy" in error for error in seen.errors)
    seen.close()


def test_twenty_thousand_rounds(browser, tmp_path):
    write_run(tmp_path / "long", 20_000, 8)
    began = time.perf_counter()
    report(tmp_path / "long")
    assert time.perf_counter() - began < 10 * slowness()
    assert (tmp_path / "long" / "report.html").stat().st_size < 10e6
    began = time.perf_counter()
    seen = Page(browser, f"file://{tmp_path}/long/report.html")
    opened = time.perf_counter() - began
    told = seen.hover("fan", 12_345)
    assert number(told["step"]) == pytest.approx(5 * 12_346, abs=5 * 60)  # some 40 rounds to a pixel
    redraws = seen.ask(
        "(() => { const began = performance.now(); choose(100); choose(15000); return performance.now() - began; })()"
    )
    assert opened < 5 * slowness()
    assert redraws / 2 < 300 * slowness()
    check_quiet(seen)
    seen.close()


def slowness():
    """How much slower this machine is now than an idle one, so that a busy one does not fail the test."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, 2 * busy)


def cpu_ticks():
    """(all, stolen by other machines on the same host) so far."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


def share_since(before):
    """The part of the time since then that this machine had its cores to itself."""
    whole, stolen = (now - then for now, then in zip(cpu_ticks(), before, strict=True))
    return 1 - stolen / max(whole, 1)


def test_a_thousand_replicas_are_shown_by_quantiles(browser, tmp_path):
    records = write_run(tmp_path / "wide", 60, 1000)
    seen = Page(browser, report(tmp_path / "wide"))
    told = seen.hover("fan", 30)
    values = sorted(records[30].hyperparameters["learning_rate"].values)
    assert set(told) == {"step", "lowest", "lower quarter", "median", "upper quarter", "highest", "schedule", "center"}
    assert number(told["lowest"]) == close_to(values[0])
    assert number(told["upper quarter"]) == close_to(values[round(0.75 * 999)])
    assert seen.ask("charts.line.plot.data[1].filter((y) => y != null).length") == 1000
    assert all(seen.drawn(chart) > 1000 for chart in CHARTS)
    check_quiet(seen)
    seen.close()


def test_watch_shows_new_rounds_within_two_seconds_and_says_when_the_run_ends(browser, tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    command = [sys.executable, "-m", "hdet_lab", "watch", str(folder)]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    url = re.search(r"http://127\.0\.0\.1:\d+/", watch.stdout.readline())[0]
    seen = Page(browser, url)
    assert seen.tab.inner_text("#state") == "waiting"
    records = list(make_records(12, 4, total=60))
    seen.ask("window.mark = 'not reloaded'")
    alive = f"{os.uname().nodename}:{os.getpid()}"
    for record in records:
        with open(folder / "rounds.jsonl", "a") as file:
            file.write(to_line(record, time.time(), alive))
        began, ticks = time.perf_counter(), cpu_ticks()
        seen.wait(f"charts.fan.plot && charts.fan.plot.data[0].at(-1) === {record.step}")
        assert (time.perf_counter() - began) * share_since(ticks) < 2 * slowness()
        assert seen.tab.inner_text("#state") == ("ended" if record.last else "running")
        if record.round == 5:
            os.utime(folder / "rounds.jsonl", (0, 0))  # as if nothing had been written for long
            seen.wait("document.getElementById('state').textContent === 'stalled'")
    told = seen.hover("fan", 5)
    row = records[5].hyperparameters["learning_rate"]
    assert [number(told[f"replica {k}"]) for k in range(4)] == [close_to(x) for x in row.values]
    assert len(seen.ask("state.runs[0].columns.hyperparameters.learning_rate.values[0]")) == 12
    assert seen.ask("window.mark") == "not reloaded"
    assert seen.errors == []
    assert all(asked.startswith(url) for asked in seen.requests)
    (folder / "rounds.jsonl").write_text(to_line(records[0], time.time(), alive))  # another run in the same place
    seen.wait("charts.fan.plot.data[0].length === 1")
    watch.send_signal(signal.SIGINT)
    assert watch.wait(20) == 130
    seen.wait("document.getElementById('state').textContent.startsWith('lost contact')")
    seen.close()


def test_only_this_machine_may_ask(run_folder):
    import http.client

    watch = Watch([Run(run_folder[0])])
    threading.Thread(target=watch.serve, daemon=True).start()
    port = int(re.search(r":(\d+)/", watch.url)[1])
    answers = {}
    for host, path in [("evil.example", "/"), (f"127.0.0.1:{port}", "/"), (f"localhost:{port}", "/../etc/passwd")]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers={"Host": host})
        answers[host] = connection.getresponse().status
    watch.close()
    assert list(answers.values()) == [403, 200, 404]
    assert watch.address[0] == "127.0.0.1"


def status(tmp_path, now, written_by, **kwargs):
    write_run(tmp_path, 20, 2, now=now - 100, written_by=written_by, **kwargs)
    os.utime(tmp_path / "rounds.jsonl", (now, now))
    run = Run(tmp_path)
    run.refresh()
    return run


def test_a_run_that_stalls_is_told_from_one_that_goes_on(tmp_path):
    now, here = time.time(), f"{os.uname().nodename}:{os.getpid()}"
    run = status(tmp_path, now, here, last=False, total=1000)
    assert run.status(now + 5) == ("running", "running, at step 100 of 1,000")
    assert run.status(now + 300)[0] == "stalled"
    assert run.status(now + 300)[1] == "stalled at step 100 of 1,000: nothing was written for 5 minutes"
    run = status(tmp_path, now, "elsewhere:1", last=False)
    assert "stalled, or was cut off" in run.status(now + 300).text
    run = status(tmp_path, now, here)
    assert run.status(now + 300)[0] == "ended"


def test_the_report_of_a_killed_run_says_that_it_is_cut_off(browser, tmp_path, capsys):
    path = tmp_path / "rounds.jsonl"
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED, path])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") > 3):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not buried
    with open(path, "a") as file:  # and in the middle of a line
        file.write('{"version": 1, "rou')
    read = hdet.records.read_records(path)
    assert [record.step for record in read] == [2 * (k + 1) for k in range(len(read))]
    url = report(tmp_path)
    child.wait()
    assert "Cut off at step" in capsys.readouterr().out
    seen = Page(browser, url)
    assert seen.tab.inner_text("#state") == "cut off"
    assert "had not finished" in seen.tab.inner_text("#summary")
    check_quiet(seen)
    seen.close()


def test_the_fan_is_labelled_with_what_it_shows():
    assert pictures.quantity("learning_rate/dense") == "learning rate"
    assert pictures.quantity("weight_decay") == "weight decay"


def test_a_browser_is_installed_where_there_is_none_or_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("HDET_BROWSER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(browsers, "SECONDS", 0.5)
    sh = ["/bin/sh", "-c"]
    ways = [[*sh, "echo not permitted >&2; exit 100"], [*sh, "/bin/sleep 600 & /bin/sleep 600"], ["no-such-installer"]]
    monkeypatch.setattr(browsers, "install_commands", lambda: ways)
    nowhere = SimpleNamespace(chromium=SimpleNamespace(executable_path=str(tmp_path / "own")))
    with pytest.raises(RuntimeError, match="neither found nor installed") as error:
        browsers.find_browser(nowhere)
    for said in ("exit 100': ended with 100, 'not permitted'", "not done in 0.5 s", "No such file", "HDET_BROWSER"):
        assert said in str(error.value)
    ways.append([*sh, f"echo > {tmp_path}/chromium; /bin/chmod +x {tmp_path}/chromium"])
    assert browsers.find_browser(nowhere) == str(tmp_path / "chromium")
    monkeypatch.setattr(browsers, "install_commands", lambda: pytest.fail("there is one"))
    assert browsers.find_browser(nowhere) == str(tmp_path / "chromium")


def test_pictures(tmp_path):
    write_run(tmp_path / "$run_{", 30, 20, ("learning_rate", "$\\frac{"))
    folder = tmp_path / "$run_{"
    report(folder, "--pictures", "--round", "7")
    for name in ("fan", "factor", "losses", "line_search", "cost"):
        assert (folder / "pictures" / f"{name}.png").stat().st_size > 5000


def test_export_writes_what_replay_reads(run_folder, capsys):
    folder, records = run_folder
    assert main(["export", str(folder)]) == 0
    assert "600 steps" in capsys.readouterr().out
    told = json.loads((folder / "schedule.json").read_text())
    assert told["complete"]
    assert told["hyperparameters"]["learning_rate"]["centers"][-1] == [
        records[-1].hyperparameters["learning_rate"].last[0]
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "/no/such/run"], "cannot be read (No such file or directory); give a run folder"),
        (["export", "{folder}/empty.jsonl"], "holds no round yet"),
        (["report", "{folder}", "--round", "9999"], "--round must be one of the rounds of first, 0 to 119, got 9999"),
        (["watch", "/no/such/run"], "/no/such/run is no folder"),
    ],
)
def test_mistakes_are_one_line(run_folder, words, says, capsys):
    (run_folder[0] / "empty.jsonl").touch()
    assert main([word.format(folder=run_folder[0]) for word in words]) == 1
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.startswith("hdet: error: ")
    assert errors.count("\n") == 1


def test_the_plotting_library_is_the_published_one():
    assets = resources.files("hdet._report") / "assets"
    for name, digest in UPLOT.items():
        assert hashlib.sha256((assets / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (assets / "uPlot.LICENSE").read_text()
