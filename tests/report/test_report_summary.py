"""The sentences about a run, on rounds whose answers are known."""

import json

import pytest

from hdet._report.columns import columns
from hdet._report.page import run_data
from hdet._report.run import Run, Status
from hdet._report.summary import summary


def line(step, base, scale, probe, before=None, **changes):
    values = [0.5 * base * scale, 2 * base * scale]
    decision = "kept" if before in (None, scale) else f"raised by {scale / before - 1:.0%}"
    row = {"base": base, "center": base * scale, "values": values, "scale": scale, "decision": decision}
    row["finding"] = "learning_rate: x2.00 +- 0.10"
    seconds = {"round_seconds": 10.0, "converge_seconds": 0.5, "probe_seconds": 1.0}
    about = {"round": step // 5 - 1, "step": step, "steps": 5, "full": True, "scores": [9.0, 9.0], "probe": probe}
    return {**about, "events": [], "hyperparameters": {"learning_rate": row}, **seconds, **changes}


def told(lines, state="ended", text="ended at step 20 of 20", search=None):
    return {part["title"]: part for part in summary(lines, Status(state, text), search)}


ANNEALED = [
    line(5, 0.1, 1.0, [3.0, 2.0]),
    line(10, 1.0, 2.0, [2.0, 1.5], before=1.0),
    line(15, 0.6, 4.0, [1.5, 1.4], before=2.0),
    line(20, 1e-6, 4e6, [1.0, 1.1], before=4.0),
]


def test_the_five_sentences():
    said = {title: part["text"] for title, part in told(ANNEALED).items()}
    assert said["Tried"] == "2 replicas, 4 rounds of 5 steps.\nlearning_rate: 0.50 to 2.00 times its center."
    assert said["Won"] == "learning_rate: the higher values, in 75% of 4 rounds."
    assert said["Cost"] == "15.0% of 40.0 s: converge 5.0%, probe 10.0%. The rest is training."
    assert said["Health"] == (
        "Ended at step 20 of 20. All losses are finite, no rollback. Loss 2.5 in the first round, 1.05 in the last."
    )


def test_what_was_found_before_the_run():
    """By `ensemble.find_lr()`, which the first record tells, or by the lab, in find_lr.json."""
    assert "Found" not in told(ANNEALED)
    prepared = [{**ANNEALED[0], "events": ["learning_rate: to be found", "found: learning rate 0.02"]}, *ANNEALED[1:]]
    assert told(prepared)["Found"]["text"] == "learning rate 0.02."
    search = {"rate": 0.00391, "peak_lr": 1.33e-4, "cost": 371.2, "seconds": 12.34}
    assert next(iter(told(ANNEALED, search=search))) == "Found"
    assert told(ANNEALED, search=search)["Found"]["text"] == (
        "0.00391, 29.4 times your rate, 0.000133. The search took 12.3 s, as much as 371 steps."
    )


def test_the_last_loss_may_be_of_an_earlier_round():
    """A controller that has done its part explores no more, and nothing is gathered then."""
    quiet = line(25, 1e-6, 4e6, [None, None])
    quiet["hyperparameters"]["learning_rate"]["values"] = [1.0, 1.0]
    assert told([*ANNEALED, quiet])["Health"]["text"].endswith(
        "Loss 2.5 in the first round, 1.05 in that of step 20, the last with losses."
    )


def test_the_scale_is_told_where_it_mattered():
    """At the end of a schedule that goes to zero the factor runs away, and nobody trains with it."""
    said = told(ANNEALED)["Controller"]["text"]
    assert said == (
        "learning_rate: until step 15, where the schedule falls below half its peak, x4 of the schedule, moved in 2 "
        "rounds. At most 2.4, where the schedule has 1. Last: raised by 100% (x2.00 +- 0.10)."
    )
    assert told(ANNEALED[:2], "running")["Controller"]["text"].startswith("learning_rate: now x2 of the schedule")


def test_who_should_look():
    assert told(ANNEALED)["Health"]["tone"] == "good"
    assert told(ANNEALED, "cut off")["Health"]["tone"] == "bad"
    hole = [*ANNEALED[:3], line(20, 1.0, 4.0, [None, 1.1])]
    assert told(hole)["Health"]["tone"] == "bad"
    assert "1 round with losses that are not finite" in told(hole)["Health"]["text"]
    back = [*ANNEALED[:3], line(20, 1.0, 1.0, [1.0, 1.1], events=["rolled back at step 20 to the weights of step 10"])]
    assert "1 alarm in the events below" in told(back)["Health"]["text"]
    assert told([], "waiting", "nothing was written yet")["Health"]["tone"] == "good"


def test_a_run_that_went_on_with_fewer_replicas_shows_all_of_them():
    fewer = line(20, 1.0, 4.0, [1.0], scores=[9.0])
    fewer["hyperparameters"]["learning_rate"]["values"] = [2.0]
    told = columns([*ANNEALED[:3], fewer])
    values = told["hyperparameters"]["learning_rate"]["values"]
    assert len(values) == len(told["probe"]) == 2
    assert values[1][-1] is None
    assert values[1][0] is not None


def test_a_search_that_another_program_wrote_is_left_out(tmp_path):
    (tmp_path / "options.json").write_text("{}")
    (tmp_path / "losses.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for text in ("no json", "[1, 2]"):
        (tmp_path / "find_lr.json").write_text(text)
        run = Run(tmp_path)
        run.refresh()
        assert run.search is None


SEARCH = {
    "rate": 0.02, "start": 1e-4, "interval": [0.03, 0.3], "whole": [0.02, 0.3], "factor": 0.25, "first_loss": 2.0,
    "coarse": [[1e-4, 2.0], [1e-2, 1.0], [1.0, None]], "fine": [[1e-3, 1.9], [0.1, 0.5]], "steps": 170, "cost": 216.0,
    "seconds": 10.0, "doubts": [],
}  # fmt: skip


def test_what_the_search_took_is_a_cost():
    """Whether the lab has measured it or the first record tells of it."""
    said = "32.0% of 50.0 s: search 20.0%, converge 4.0%, probe 8.0%. The rest is training."
    assert told(ANNEALED, search={"rate": 0.02, "seconds": 10.0})["Cost"]["text"] == said
    within = [{**ANNEALED[0], "search": SEARCH}, *ANNEALED[1:]]
    assert told(within)["Cost"]["text"] == said
    assert told(within)["Found"]["text"] == (
        "0.02, 200 times your rate, 0.0001. The search took 10.0 s, as much as 216 steps."
    )


def test_doubts_about_an_answer_are_told():
    doubtful = {**SEARCH, "doubts": ["the loss fell by 1.3 % only", "scores scatter"]}
    card = told([{**ANNEALED[0], "search": doubtful}])["Found"]
    assert card["tone"] == "bad"
    assert card["text"].endswith("Not sure: the loss fell by 1.3 % only; scores scatter.")
    assert "tone" not in told([{**ANNEALED[0], "search": SEARCH}])["Found"]


def test_a_run_in_which_nothing_was_gathered_has_losses_all_the_same():
    def alone(step, loss):
        quiet = line(step, 1.0, 1.0, None, scores=[None, None], loss=loss)
        quiet["hyperparameters"]["learning_rate"]["values"] = [1.0, 1.0]
        return quiet

    lines = [alone(5, 2.5), alone(10, None), alone(15, 0.5)]  # not every round waits for a device
    assert columns(lines)["own"] == [2.5, None, 0.5]
    assert told(lines)["Health"]["text"].endswith("Loss of the first replica 2.5 at the start, 0.5 at the end.")


def searched_folder(folder, search, controller):
    (folder / "options.json").write_text(json.dumps({"options": {"controller": controller}}))
    (folder / "find_lr.json").write_text(json.dumps(search))
    run = Run(folder)
    run.refresh()
    return run


def test_the_folder_of_a_search_alone(tmp_path):
    search = {**SEARCH, "scale": 200.0, "task": "digits; rm -rf /", "size": "smoke", "total_steps": 80}
    run = searched_folder(tmp_path, search, "none")
    data = run_data(run)
    assert run.exists
    assert data["state"] == "ended"
    said = {part["title"]: part["text"] for part in data["summary"]}
    assert list(said) == ["Found", "Where", "Next", "Health"]
    assert said["Next"].startswith("hdet train 'digits; rm -rf /' --size smoke --steps 80 --peak-lr 0.02\n")
    assert "OneCycleLR(optimizer, max_lr=0.02, ...), or 200 times the rates that there were" in said["Next"]
    assert said["Where"] == (
        "Losses were low from 0.03 to 0.3; that is narrow, as the ramp was too fast to see all of it, so it counts "
        "from 0.02 on. The answer is 0.25 x the geometric middle of that, and so lies below what was seen to be low."
    )
    assert data["search"]["coarse"] == [[1e-4, 1e-2, 1.0], [2.0, 1.0, 3.0]]  # a loss beyond all is drawn at the top
    assert run_data(searched_folder(tmp_path, search, "auto"))["state"] == "waiting"  # its run is about to begin


@pytest.mark.parametrize(
    "search",
    [
        {"a": 1}, {"rate": None}, {"rate": -1.0}, {"rate": "fast"}, {"rate": True}, {"rate": 1e308, "cost": 1e999},
        {**SEARCH, "interval": [3], "whole": "x", "coarse": {"a": 1}, "fine": [[1], 2, [None, 1], [1, "y"], [-1, 1]]},
        {**SEARCH, "seconds": "long", "cost": [], "first_loss": None, "doubts": "none", "start": 0, "task": 7},
        {**SEARCH, "interval": [0.3, 0.03], "steps": float("inf"), "factor": -1, "doubts": [1, None, {}]},
    ],
)  # fmt: skip
def test_a_search_of_any_kind_is_shown_as_far_as_it_can_be_told(tmp_path, search):
    try:
        data = run_data(searched_folder(tmp_path, search, "none"))
    except FileNotFoundError as error:
        assert "find_lr.json is left out: " in str(error)  # noqa: PT017
    else:
        json.dumps(data, allow_nan=False)
        assert (data["search"] is None) == (search.get("rate") != 0.02)
    told([{**ANNEALED[0], "search": search}])
