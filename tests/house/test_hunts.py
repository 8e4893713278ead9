"""Bug hunts: each record shows one cause alone; what is said of a wrong answer is true; the pages say what was run."""

import functools
import json
import re
import time
import tomllib

import pages
import pytest
import submissions
import texts

from zero_minimal.classroom import hunt
from zero_minimal.classroom.hunt_figures import figures, in_order, near
from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.meters import run_record
from zero_minimal.pictures.hunt_panels import draw_hunt
from zero_minimal.processes import ranks
from zero_minimal.programs import hunts

FOLDER, CODE = hunt.FOLDER, HOUSE / "tests/bug_hunts"
HEALTHY, BROKEN = "healthy", "broken"
RECORDS = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("[0-9][0-9].json"))}
OTHERS = json.loads((CODE / "others.json").read_text())
FIGURES = {name: figures(record) for name, record in (RECORDS | OTHERS).items()}
CHECKER = hunt.Checker(FOLDER / "signs.toml")
CAUSES, EXPERIMENTS = CHECKER.causes, CHECKER.experiments
TEACHER = (FOLDER / "teacher.md").read_text()
each_hunt = pytest.mark.parametrize("name", RECORDS)


@functools.cache
def true_cause(name):
    """As the broken code says, which the checker does not read."""
    return hunts.broken_code().HUNTS[name].cause


def signs(seen):
    return [cause for cause in CAUSES if CHECKER.shows(cause, seen)]


def runs(name):
    """The reports of the healthy run's ranks, and of the broken one's."""
    record = (RECORDS | OTHERS)[name]
    return record["runs"][HEALTHY], record["runs"][BROKEN]


# --------------------------------------------------------------------------------------------------------- the records


def test_there_are_twelve_and_each_has_another_cause():
    assert list(RECORDS) == [f"{number:02}" for number in range(1, 13)] == list(hunts.broken_code().HUNTS)
    assert len({true_cause(name) for name in RECORDS}) == 12
    assert {*map(true_cause, RECORDS), *OTHERS} == set(CAUSES) and len(CAUSES) == 24


@pytest.mark.parametrize("name", FIGURES)
def test_a_record_has_the_sign_of_its_cause_alone_and_a_healthy_run_has_none(name):
    """Causes that no hunt has are recorded too, so no sign is one that never comes."""
    assert signs(FIGURES[name]) == [true_cause(name) if name in RECORDS else name]
    record, (healthy, _) = (RECORDS | OTHERS)[name], runs(name)
    assert signs(figures(record | {"runs": {HEALTHY: healthy, BROKEN: healthy}})) == []


@each_hunt
def test_what_is_said_against_a_cause_has_a_figure_of_the_run(name):
    """Figures that the record has; or a stage, a dtype, a number of micro-batches that leaves no room for it."""
    numbers = {f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
               for value in numbers_in(RECORDS[name]["runs"])}
    for cause in set(CAUSES) - {true_cause(name)}:
        said = CHECKER.against(cause, FIGURES[name])
        settings = f"stage {RECORDS[name]['stage']}|in fp32|accumulate is 1|alike from before the first step to the end"
        shown = set(re.findall(r"\d[\d,.]*\d|\d", said))
        assert re.search(settings, said) or shown & numbers or re.search(r"\d ms\b", said), (cause, said)
        assert len(said) > 40 and "None" not in said and ": ;" not in said and not said.endswith(":")
        assert not re.search(r"[{}%]| [,.;:]", said)  # what is left of a template


def numbers_in(value):
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(each)
    elif isinstance(value, (int, float)):
        yield value


@each_hunt
def test_both_runs_had_the_same_settings_and_what_agrees_agrees(name):
    record, (healthy, broken) = RECORDS[name], runs(name)
    assert len(healthy) == len(broken) == record["ranks"]
    steps = record["settings"]["steps"]
    for rank in (*healthy, *broken):
        assert len(rank["losses"]) == len(rank["norms"]) == steps and len(rank["memory"]) == run_record.MEMORY_STEPS
        assert len(rank["apart"]) == (0 if record["stage"] == 3 else steps + 1)
    assert not any(any(rank["apart"]) for rank in healthy)
    assert [rank["norms"] for rank in healthy] == [healthy[0]["norms"]] * record["ranks"]
    right_losses = {"graph-kept", "reduced-each-micro-batch", "summed", "one-unit", "view-of-the-whole",
                    "waited-for-at-once", "straggler"}
    agree = all(near(one, other) for mine, theirs in zip(broken, healthy, strict=True)
                for one, other in zip(mine["losses"], theirs["losses"], strict=True))
    assert agree if true_cause(name) in right_losses else True


@pytest.mark.parametrize("name", FIGURES)
def test_no_collective_ends_on_a_rank_before_all_have_begun_it(name):
    """So the ranks' times are of one clock. Seven digits of a file are good to a microsecond here."""
    for run in runs(name):
        for same in zip(*map(in_order, run), strict=True):
            assert len({one.name for one in same}) == 1
            assert max(one.start for one in same) <= min(one.end for one in same) + 2e-6, same
        for rank in run:
            assert 0 <= rank["time"]["computing"][0][1] and rank["time"]["seconds"] == rank["time"]["computing"][-1][2]


def test_times_count_from_the_moment_when_the_first_rank_came():
    """Rank 1 comes to its forward later, by what it slept, and its times say so."""
    early, late = ranks.run(one_that_sleeps, 2, device="cpu", timeout=60)
    assert 0.2 < late - early < 1


def one_that_sleeps():
    with ranks.start() as rank:
        time.sleep(0.3 * rank.rank)  # before the exchange: this is not seen
        began = run_record.one_zero(rank.device)
        time.sleep(0.3 * rank.rank)
        return time.perf_counter() - began


@each_hunt
def test_late_reductions_and_a_slow_network_are_refuted_by_figures(name):
    """Not supported by them: gradients come after the first reduction has started, or the rank computes between its
    reductions; and some time of a message is not several times the healthy run's."""
    broken = FIGURES[name]["broken"]
    if true_cause(name) == "waited-for-at-once":
        first, last, between = broken["starts_ms"]
        assert between > 0.3 * (last - first)
    elif RECORDS[name]["stage"] < 2:
        assert broken["overlap"][0] > 0
    said = CHECKER.against("slow-network", FIGURES[name])
    times = re.search(r"([\d.]+) times the healthy", said)
    assert float(times[1]) < 2.5 if times else "as many messages" in said
    if true_cause(name) == "straggler":
        assert "on rank 1: the same message" in said


# --------------------------------------------------------------------------------------------------------- experiments


@each_hunt
def test_one_experiment_decides_and_in_hunt_11_two_do(name):
    right = [experiment_of(name), *([experiment_of("11, too")] if name == "11" else [])]
    assert [each for each in EXPERIMENTS if CHECKER.decides(each, true_cause(name))] == right


def rivals(cause):
    return CAUSES[cause].get("rivals", [])


@each_hunt
def test_a_rival_is_none_that_a_setting_excludes(name):
    assert len(rivals(true_cause(name))) >= 2
    for rival in rivals(true_cause(name)):
        said = CHECKER.against(rival, FIGURES[name])
        assert not re.search(r"at stage \d|in fp32|accumulate is 1|a bucket size", said), (rival, said)


def experiment_of(name):
    return ran()[name]["experiment"]


@functools.cache
def ran():
    return json.loads((CODE / "experiments.json").read_text())


def test_what_is_known_of_causes_and_experiments_fits_together():
    named = {cause for each in EXPERIMENTS.values() for cause in (*each["shows"], *each.get("though", ()))}
    assert named | {rival for cause in CAUSES for rival in rivals(cause)} <= set(CAUSES) and len(EXPERIMENTS) == 15
    for cause in filter(rivals, CAUSES):
        assert cause not in rivals(cause)
        for experiment in EXPERIMENTS:
            if not CHECKER.decides(experiment, cause):
                said = CHECKER.no_decision(experiment, cause)
                assert said.startswith(f"with your cause, {experiment} would show: ")
                assert said.endswith("as in a healthy run. So it tells nothing of your cause") or re.search(
                    r"it does not tell the two apart$|as in a healthy run \(.+\)\. So it", said)


def test_the_experiments_showed_what_the_checker_says():
    def last(name, side, key):
        return [rank[key] for rank in ran()[name][side]]

    def alike(values):
        return all(value == values[0] for value in values)

    graphs = "tensors with a grad_fn after each step"
    assert all(counts == sorted(set(counts)) for counts in last("01", BROKEN, graphs))
    assert all(len(set(counts)) == 1 for counts in last("01", HEALTHY, graphs))
    sums = "sum of the parameters"
    assert alike(last("02", HEALTHY, sums)) and not alike(last("02", BROKEN, sums))
    assert last("03", HEALTHY, "collectives") == [0, 0] and min(last("03", BROKEN, "collectives")) > 0
    assert alike(last("04", BROKEN, "tokens")) and not alike(last("04", HEALTHY, "tokens"))
    assert all(near(times, 3) for times in last("05", BROKEN, "times"))
    assert all(near(times, 1) for times in last("05", HEALTHY, "times"))
    assert {len(units) for units in last("06", BROKEN, "units")} == {1} != {len(each) for each in
                                                                          last("06", HEALTHY, "units")}
    for side, times in ((HEALTHY, 1), (BROKEN, 4)):
        (shards,), (storages,) = ({*last("07", side, f"bytes of {whose}")} for whose in
                                  ("the shards", "their storages"))
        assert storages == times * shards
    between = "gradients between start and wait of each bucket"
    assert not any(map(any, last("08", BROKEN, between))) and all(map(any, last("08", HEALTHY, between)))
    assert last("09", BROKEN, "ms a batch")[1] > 10 * max(last("09", BROKEN, "ms a batch")[::2])
    assert all(one < 0.9 * whole for one, whole in zip(last("10", BROKEN, "reported"), last("10", BROKEN,
               "norm of the whole"), strict=True))
    assert near(last("10", HEALTHY, "reported")[0], last("10", HEALTHY, "norm of the whole")[0])
    assert last("11", BROKEN, "dtype")[0] == ["torch.bfloat16"] != last("11", HEALTHY, "dtype")[0]
    assert not alike(last("12", BROKEN, "updates")) and alike(last("12", HEALTHY, "updates"))
    gaps = [worse - better for worse, better in zip(last("11, too", BROKEN, "mean loss of the last 20 steps"),
                                                    last("11, too", HEALTHY, "mean loss of the last 20 steps"),
                                                    strict=True)]
    assert min(gaps) > 0.1 and sum(gaps) / 2 > gap_of_11()


def gap_of_11():
    """How far the broken run's loss is above the healthy one's in the last 20 steps."""
    healthy, broken = (sum(sum(rank["losses"][-20:]) for rank in run) / 40 for run in runs("11"))
    return broken - healthy


# --------------------------------------------------------------------------------------------------------- the checker


def checked(tmp_path, capsys, text, *flags):
    file = tmp_path / "answers.toml"
    file.write_text(text)
    code = hunt.main([str(file), *flags])
    return code, capsys.readouterr().out


def full():
    return "".join(f'["{name}"]\ncause = "{true_cause(name)}"\nexperiment = "{experiment_of(name)}"\n'
                   for name in RECORDS)


def test_all_right_has_all_points(tmp_path, capsys):
    code, said = checked(tmp_path, capsys, full(), "--json", str(tmp_path / "points.json"))
    assert code == 0 and said.endswith("\n96 of 96 points\n") and said.count("why is empty") == 12
    reasons = re.sub(r"(experiment = .+)", r"\1\nwhy = 'the norm of step 1'", full())
    assert "why" not in checked(tmp_path, capsys, reasons)[1]
    assert json.loads((tmp_path / "points.json").read_text())["points"] == 96


def test_an_untouched_file_has_none(tmp_path, capsys):
    code, said = checked(tmp_path, capsys, (FOLDER / "answers.toml").read_text())
    assert code == 1 and said.endswith("\n0 of 96 points\n") and not any(cause in said for cause in CAUSES)


@each_hunt
def test_a_wrong_answer_has_no_points_and_names_no_right_one(name, tmp_path, capsys):
    right = true_cause(name)
    for cause in set(CAUSES) - {right}:
        verdict = CHECKER.judged(FIGURES[name], {"cause": cause, "experiment": experiment_of(name)})
        assert verdict.points == 0 and right not in " ".join(verdict.words)
    for experiment in EXPERIMENTS:
        if CHECKER.decides(experiment, right):
            continue
        verdict = CHECKER.judged(FIGURES[name], {"cause": right, "experiment": experiment})
        assert verdict.points == hunt.FOR_CAUSE and experiment_of(name) not in " ".join(verdict.words)


@pytest.mark.parametrize("text, says", [
    ("[01\n", "is no TOML"), ("[13]\ncause = ''", r"\[13\] is no hunt"), ("[01]\nreason = ''", "there is no 'reason'"),
    ("[01]\nwhy = 3", "must be text in quotes"),
    ("[01]\ncause = 3", "must be one name in quotes"), ("[01]\ncause = 'sumed'", "did you mean summed"),
    ("[01]\ncause = 'xyz'", "the names are in"), ("01 = 'summed'", "is no hunt"),
])
def test_a_file_that_cannot_be_judged_is_refused_in_one_line(tmp_path, capsys, text, says):
    code, said = checked(tmp_path, capsys, text)
    assert code == 2 and re.search(says, said) and said.count("\n") == 1
    assert hunt.main([str(tmp_path / "none.toml")]) == 2


def test_a_hunt_is_named_by_one_digit_too(tmp_path, capsys):
    assert checked(tmp_path, capsys, full(), "--hunt", "3") == checked(tmp_path, capsys, full(), "--hunt", "03")
    assert checked(tmp_path, capsys, full(), "--hunt", "3")[0] == 0
    assert "there is no hunt 13" in checked(tmp_path, capsys, full(), "--hunt", "13")[1]


# ----------------------------------------------------------------------------------------------------------- the pages


def setting(record):
    """The line of a hunt's page that says what was run."""
    settings, micros = record["settings"], record["settings"]["accumulate"]
    return (f"Stage {record['stage']}, {record['ranks']} ranks, {settings['dtype']}, {settings['steps']} steps of "
            f"{micros} micro-batch{'es' * (micros > 1)}, clipped at {settings['clip']:g}.")


@each_hunt
def test_a_page_says_what_was_run_and_not_what_is_wrong(name):
    page = (FOLDER / f"{name}.md").read_text()
    assert setting(RECORDS[name]) in page and f"({name}.png)" in page and f"--hunt {name}" in page
    story = page.split("\n\n")[1]
    assert len(pages.sentences(story)) == 3
    assert true_cause(name) not in page and len(pages.folded(page)) == 2
    assert (FOLDER / f"{name}.png").exists()
    title = pages.headings(page)[0][1].partition(": ")[2]
    assert f"| [{name}]({name}.md) | {title} |" in (FOLDER / "README.md").read_text()
    assert f"# {title}\n" in (FOLDER / "answers.toml").read_text()


def test_the_stories_are_true_of_the_records():
    first = {name: [run[0] for run in runs(name)] for name in RECORDS}  # rank 0, healthy and broken
    seen = {name: (FIGURES[name][HEALTHY], FIGURES[name][BROKEN]) for name in RECORDS}
    for name in ("06", "07", "08", "09"):  # right losses, up to the order of sums
        healthy, broken = first[name]
        assert broken["losses"] == pytest.approx(healthy["losses"], rel=1e-4)
    rank_0, rank_1 = (losses[0] for losses in seen["02"][1]["losses"])
    assert rank_0 < 3.5 and rank_1 > 5.3
    assert min(first["05"][1]["norms"]) > 5 * RECORDS["05"]["settings"]["clip"]
    healthy, broken = seen["06"]
    assert first["06"][1]["traffic"]["sent_bytes"] < first["06"][0]["traffic"]["sent_bytes"]
    for category in ("parameters", "gradients"):
        assert broken["most"][category] > 1.3 * healthy["most"][category]
        assert near(broken["end"][category], healthy["end"][category])
    for name in ("07", "12"):
        assert first[name][0]["traffic"] == first[name][1]["traffic"]
    assert seen["08"][1]["overlap"][0] == 0 < seen["08"][0]["overlap"][0]
    healthy, broken = seen["09"]
    assert broken["seconds"] > 2 * healthy["seconds"]
    message = in_order(first["09"][1])[0]
    assert message.end - message.wait > 0.3 * broken["seconds"]
    assert FIGURES["11"]["starts_alike"] and gap_of_11() > 0.1
    apart = seen["12"][1]["apart"]
    assert apart[1] == 0 < apart[2] < apart[-1]
    skipped = [rank["moved"].count(0) for rank in runs("12")[1]]
    updates = [rank["updates"] for rank in ran()["12"][BROKEN]]
    assert skipped == [RECORDS["12"]["settings"]["steps"] - count for count in updates] and max(skipped) > 0


def test_the_lists_on_the_page_are_the_checkers():
    page = (FOLDER / "README.md").read_text()
    for title, known in (("Causes", CAUSES), ("Experiments", EXPERIMENTS)):
        assert re.findall(r"^\| `(.+?)` \| .{20,} \|$", pages.section(page, 2, title), re.MULTILINE) == list(known)
    assert {name: {"cause": "", "experiment": "", "why": ""} for name in RECORDS} == tomllib.loads(
        (FOLDER / "answers.toml").read_text())
    most = len(RECORDS) * (hunt.FOR_CAUSE + hunt.FOR_EXPERIMENT)
    assert f"worth {hunt.FOR_CAUSE} points, and the experiment that decides it {hunt.FOR_EXPERIMENT}: {most}" in page


def test_the_teachers_page_has_the_answers_and_what_the_experiments_showed():
    for name in RECORDS:
        row = re.search(rf"^\| {name} \| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", TEACHER, re.MULTILINE)
        assert row and row[1] == true_cause(name) and row[2] in rivals(row[1]) and row[3] == experiment_of(name)
    assert submissions.module_in(CODE / "experiments.py").table(ran()) in TEACHER


def test_the_names_on_the_page_are_the_names_in_a_file():
    table = pages.section((FOLDER / "README.md").read_text(), 2, "How to read the instruments")
    named = {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}
    assert named == set(runs("01")[0][0])


@pytest.mark.thorough
def test_a_picture_is_drawn_of_what_a_file_holds():
    figure = draw_hunt(RECORDS["09"])
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "before forward: not recorded" in named and len(named) == len(set(named))
    most, end = figure.axes[4], figure.axes[3]
    assert end.texts and not most.texts
    long = draw_hunt(RECORDS["11"]).axes[0]
    assert long.get_xlabel() == "step; each point is the mean of 4 steps" and len(long.lines[0].get_xdata()) == 40
    assert len(figure.axes) == 8 and [axis.get_title(loc="left") for axis in figure.axes][-1].startswith("one step")


# ------------------------------------------------------------------------------------------------------- recorded anew


@pytest.mark.thorough
@pytest.mark.skipif(not texts.as_recorded(), reason="the runs were recorded with the text of another Python")
@pytest.mark.parametrize("name", ("05", "12"))
def test_a_hunt_recorded_anew_has_the_same_signs_and_counts(name):
    anew, committed = hunts.recorded(hunts.broken_code().HUNTS[name]), RECORDS[name]
    assert signs(figures(anew)) == [true_cause(name)]
    assert committed["settings"].items() <= anew["settings"].items()  # there may be more flags now
    for side in (HEALTHY, BROKEN):
        for now, before in zip(anew["runs"][side], committed["runs"][side], strict=True):
            assert now["memory"] == before["memory"] and now["overlap"] == before["overlap"]
            assert now["traffic"] == before["traffic"]
            assert now["losses"] == pytest.approx(before["losses"], rel=1e-3)
