"""The planner: closed forms, units, and a real converge that its model is fitted to."""

import math
import re

import pytest
from processes import run

from hdet_lab import cli
from hdet_lab.cost import BUCKET, Link, RunPlan, errors, fit
from hdet_lab.errors import OptionError
from hdet_lab.link import Timing, time_converges
from hdet_lab.quantities import count, part, rate, seconds

NEEDED = ["plan", "--params", "7e9", "--replicas", "64", "--bandwidth", "400Gb/s", "--step-time", "1.2"]


def plan(**options):
    given = {"params": 7e9, "replicas": 64, "step_time": 1.2, "interval": 1000, "link": Link(50e9, 10e-6)}
    return RunPlan(**{**given, **options})


def test_closed_forms():
    ring, averaged = 2 * 63 / 64, 28e9
    buckets = math.ceil(averaged / BUCKET)
    found = plan()
    assert found.averaged == averaged
    assert found.sent == pytest.approx(ring * averaged)
    assert found.converge_seconds == pytest.approx(126 * (1 + buckets) * 10e-6 + ring * averaged / 50e9)
    assert found.overhead == pytest.approx(found.converge_seconds / 1200)
    assert found.sent_per_step == pytest.approx(ring * averaged * 1.001)
    local = plan(local=True)
    assert local.averaged == 3 * averaged
    own = plan(local=True, average_state=False, copies=2)
    assert own.sent_per_step == pytest.approx(ring * averaged / 1000)
    assert own.gradient_bytes / own.sent_per_step == pytest.approx(1000)
    assert own.memory["the outer step"] == 2 * averaged
    assert plan(tail_average=True, width=2, shard=8).memory["the tail average"] == averaged / 8
    sharded = plan(shard=8, rollback=True)
    assert sharded.averaged == averaged / 8
    assert sharded.memory["the snapshot of a rollback"] == pytest.approx(averaged * 3 / 8 / 64)
    kept = plan(local=True, average_state=False, rollback=True).memory["the snapshot of a rollback"]
    assert kept == pytest.approx(averaged / 64 + 2 * averaged), "optimizer state of one's own is kept whole"
    assert plan(width=2).averaged == averaged, "half precision travels as single precision"
    assert plan(width=2).gradient_bytes == pytest.approx(ring * averaged / 2)
    assert plan(probe=4).probe_seconds == pytest.approx(65 * 4 / 3 * 1.2)


@pytest.mark.parametrize("overhead", [0.05, 0.01, 0.001])
def test_the_smallest_interval_is_the_smallest(overhead):
    least = plan().least_interval(overhead)
    assert plan(interval=least).overhead <= overhead * (1 + 1e-9)
    assert least == 1 or plan(interval=least - 1).overhead > overhead


def test_more_costs_more():
    seconds = [plan(replicas=n).converge_seconds for n in (2, 4, 8, 64, 512)]
    assert seconds == sorted(seconds)
    assert plan(params=14e9).converge_seconds > plan().converge_seconds
    assert plan(link=Link(100e9, 10e-6)).converge_seconds < plan().converge_seconds
    assert plan(link=Link(50e9, 20e-6)).converge_seconds > plan().converge_seconds
    assert plan(link=Link(50e9, 10e-6, copying=1e9)).converge_seconds > plan().converge_seconds
    assert plan(shard=8).converge_seconds < plan().converge_seconds
    assert plan(local=True).overhead > plan(local=True, average_state=False).overhead
    assert plan(interval=100).overhead == pytest.approx(10 * plan().overhead)
    assert (
        plan(replicas=2, link=Link(1e9, cores=2)).converge_seconds
        < plan(replicas=8, link=Link(1e9, cores=2)).converge_seconds / 4
    )


@pytest.mark.parametrize("cores", [0, 2])
def test_a_fit_finds_the_link_again(cores):
    link = Link(2e9, 50e-6, 1.5e9, 2e-3, cores)
    timings = [Timing(n, b, link.seconds(n, b)) for n in (2, 4, 8) for b in (1 << 14, 1 << 22, 1 << 24, 1 << 26)]
    found = fit(timings, cores)
    assert found.bandwidth == pytest.approx(2e9, rel=1e-6)
    assert found.latency == pytest.approx(50e-6, rel=1e-6)
    assert found.copying == pytest.approx(1.5e9, rel=1e-6)
    assert found.fixed == pytest.approx(2e-3, rel=1e-6)
    assert max(map(abs, errors(found, timings))) < 1e-9
    without = Link(2e9, 50e-6, math.inf, 2e-3, cores)
    timings = [Timing(t.replicas, t.nbytes, without.seconds(t.replicas, t.nbytes) * (1 + 0.1 * (k % 2)))
               for k, t in enumerate(timings)]  # fmt: skip
    found = fit(timings, cores)
    assert min(found.bandwidth, found.copying, found.latency + 1, found.fixed + 1) > 0, "nothing is negative"
    assert max(map(abs, errors(found, timings))) < 0.1


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (count, "7e9", 7e9), (count, "7B", 7e9), (count, " 350 M ", 350e6), (count, "12k", 12e3),
        (seconds, "1.2", 1.2), (seconds, "1.2s", 1.2), (seconds, "350ms", 0.35), (seconds, "2min", 120),
        (rate, "400Gb/s", 50e9), (rate, "400Gbit/s", 50e9), (rate, "50GB/s", 50e9), (rate, "1MiB/s", 2**20),
        (part, "1%", 0.01), (part, "0.5", 0.5),
    ],
)  # fmt: skip
def test_quantities(read, text, value):
    assert read("it", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (rate, "400", "it must be like 400Gb/s (bits) or 50GB/s (bytes), got '400': a unit is missing"),
        (rate, "400Gb", "'Gb' is no unit of it"),
        (rate, "400gb/s", "'gb/s' is no unit of it"),
        (rate, "0GB/s", "it must be positive"),
        (count, "seven", "it must be positive, and like 7e9, 350M or 7B, got 'seven'"),
        (count, "7GB", "'GB' is no unit of it"),
        (count, "-1", "it must be positive"),
        (count, "1.2.3", "no number"),
        (seconds, "3h", "it must be like 1.2, 350ms or 20us, got '3h': 'h' is no unit of it"),
        (part, "100%", "it must be less than 100%"),
        (part, "1 percent", "'percent' is no unit of it"),
    ],
)
def test_what_is_no_quantity_is_refused(read, text, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        read("it", text)


def test_the_command(capsys):
    assert (
        cli.main([*NEEDED, "--overhead", "1%", "--gradients", "local", "--no-average-state", "--outer-momentum"]) == 0
    )
    shown = capsys.readouterr().out
    expected = plan(local=True, average_state=False, copies=2)
    assert re.search(r"of DDP's +1/1000\n", shown)
    assert re.search(rf"smallest interval for 1 % +{expected.least_interval(0.01)}\n", shown)
    assert re.search(r"the outer step +56 GB\n", shown)
    assert "bandwidth 50 GB/s, 10 us per hop" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "a plan needs --params, --replicas, --bandwidth, --step-time as well; for example --params 7e9"),
        ([*NEEDED, "--bandwidth", "400"], "--bandwidth must be like 400Gb/s (bits) or 50GB/s (bytes)"),
        ([*NEEDED, "--step-time", "1 hour"], "--step-time must be like"),
        ([*NEEDED, "--replicas", "1"], "--replicas must be at least 2, got 1"),
        ([*NEEDED, "--interval", "0"], "--interval must be at least 1, got 0"),
        ([*NEEDED, "--shard", "0"], "--shard must be at least 1"),
        ([*NEEDED, "--no-average-state"], "--average-state has no effect with shared gradients"),
        ([*NEEDED, "--probe", "-1"], "--probe must be at least 0"),
        ([*NEEDED, "--measure"], "--params has no effect with --measure"),
        (["plan", "--measure", "--sizes", "1"], "--sizes must be numbers of replicas from 2 on"),
        (["plan", "--measure", "--sizes", "two"], "--sizes must be numbers of replicas from 2 on"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_real_converge_is_timed_and_the_model_fits_it():
    """Loose, as other processes share the cores: a megabyte takes longer than a kilobyte, and the fit is near both."""
    small, large = 1 << 8, 1 << 22
    for timings in run(time_converges, 2, (small, large), 5):
        assert [(t.replicas, t.nbytes) for t in timings] == [(2, 4 * small), (2, 4 * large)]
        assert 0 < timings[0].seconds < timings[1].seconds < 10
        assert max(map(abs, errors(fit(timings, 2), timings))) < 0.2


@pytest.mark.soak
def test_the_measurement(capsys):
    assert cli.main(["plan", "--measure", "--sizes", "2,4"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" replicas, ") == 8
    assert re.search(r"Error of the fit: median \d+ %, most \d+ %", shown)
