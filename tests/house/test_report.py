"""The report of `grade --html`: it opens where a run departs from what is expected, and is a page that anybody can use.

A lesson's ranks are forked from one fork server. Of the wrong submissions a few run in the plain run, all in
the thorough one.
"""

import dataclasses
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import submissions
from thorough import sample

from zero_minimal.classroom.lessons import DRAWN, HOUSE, found, read
from zero_minimal.classroom.report import messages_told, recording, small_model, writing
from zero_minimal.classroom.report.page import page, plain
from zero_minimal.classroom.report.story import Line, Part, Step, Story, alike
from zero_minimal.classroom.report.writing import KINDS, told_by
from zero_minimal.classroom.submission import Submission

pytestmark = pytest.mark.thorough

LESSONS = found()
COLLECTIVES, GRADIENTS = LESSONS["00_collectives"], LESSONS["03_gradients"]


@pytest.fixture
def told(tmp_path):
    """told(lesson, source): the story of a submission's small run."""

    def run(lesson, source):
        file = tmp_path / "assignment.py"
        file.write_text(source)
        story, note = told_by(submissions.supervisor(lesson), Submission(file, lesson))
        assert story is not None, note
        return story

    return run


def opens(story):
    """(part, step, sentence) where the page opens; None if nothing departs."""
    for part in story.parts:
        for step in part.steps:
            if step.departures:
                return part.title, step.title, step.departures[0]
    return None


# ------------------------------------------------------------------------------------------------- right and wrong ones

RIGHT = {(lesson.name, name): text for lesson in LESSONS.values() if lesson.report
         for name, text in ({"the reference": submissions.spliced(lesson, {})} | submissions.right(lesson)).items()}


@pytest.mark.parametrize("lesson, name", sample(RIGHT, [("03_gradients", "the reference")]))
def test_a_right_one_departs_nowhere(told, lesson, name):
    story = told(LESSONS[lesson], RIGHT[lesson, name])
    assert opens(story) is None and len(story.steps) > 10
    assert not [line for step in story.steps for line in step.lines if line.departs]


# name: (part, step, sentence) where the page must open
OPENS = {
    "00_collectives": {
        "sends to the left": ("exchange", "Round 1", "rank 0 sends to rank 2: .* here rank 1"),
        "waits for its send before it receives": ("exchange", "Round 1", "ranks 0, 1 and 2 waited in send"),
        "does not wait for its send": ("exchange", "Returned", "while 1 of its messages had not been waited for"),
        "sends in two messages": ("exchange", "Round 1", "sends 524,288 bytes in one message, .* has 1,048,576"),
        "ends on the right neighbour's chunk": ("reduce_scatter", "Round 1", "rank 0 sends a0, and c0 is expected"),
        "writes over instead of adding": ("reduce_scatter", "Round 2", r"sends b2, and b0\+b2 is expected"),
        "stops a step too early": ("reduce_scatter", "Round 2", r"sends nothing, and b0\+b2 is expected"),
        "gives the mean": ("reduce_scatter", "Returned", r"\(Σa\)/3 on rank 0, .* the mean, not the sum"),
        "computes in fp32, and gives the dtype back": ("reduce_scatter", "Round 1", "of float32, .* of float64"),
        "passes on its own part only": ("all_gather", "Round 2", "rank 0 sends a, and c is expected"),
        "gathers in the order of arrival": ("all_gather", "Returned", "a c b on rank 0, and a b c is expected"),
        "gathers everything and sums": ("all_reduce", "Round 1", "72 bytes in one message, and one chunk has 24"),
        "adds whole numbers as floats": ("all_reduce", "Round 1", "numbers of float64, and the tensor's are of int64"),
        "returns the padding too": ("all_reduce", "Returned", r"a tensor \[9\] on rank 0, and a flat one \[7\]"),
        "receives all before it sends": ("broadcast", "Round 5", "passes its first chunk on when it has received"),
        "the last rank sends too": ("broadcast", "Round 3", "rank 0 sends a message, and it is the last rank"),
    },
    "01_data_parallel": {
        "the sum of a bucket": ("Step 1: backward", "At its end", "Rank 0's gradient holds layer 12's .* the sum"),
        "each bucket twice": ("Step 1: backward", "At its end", "has sent [\\d,]+ bytes .* all-reduce 26 times"),
        "nobody listens": ("Step 1: backward", "Layer 8", "by now, and 0 of them have left: a bucket leaves when"),
        "waits at once": ("Step 1: backward", "Layer 12", "waits for each all-reduce before the next gradient comes"),
        "a micro-batch leaves all the same": ("Step 2: first micro-batch", "At its end", "and 0 are expected"),
        "old gradients stay": ("Step 2: second micro-batch", "At its end", "still has the gradient of step 1 in it"),
    },
    "02_optimizer_state": {
        "the sum instead of the mean": ("Step 1: backward", "At its end", "3 times too large: the sum"),
        "an all-reduce, and the shard of it": ("Step 1: backward", "Layer 12", "sends twice what"),
        "no all-gather after the update": ("Step 1: update", "", "has sent 0 bytes in this phase, and 3,176 are"),
        "the norm of the own shards": ("Step 2: clipping", "", "the norm of this rank's shards alone"),
    },
    "03_gradients": {
        "P_os in disguise: whole gradients until backward ends": (
            "Step 1: backward", "Layer . gradient", "whole gradients pile up"),
        "param.grad stays": ("Step 1: backward", "Layer . gradient", "of 12 layers have their .grad"),
        "the sum instead of the mean": ("Step 1: backward", "At its end", "3 times too large: the sum"),
        "the house's all-reduce, and a slice of it": ("Step 1: backward", "Layer 12", "sends twice what"),
        "frees the bucket before its reduction ends": ("Step 1: backward", "Layer 11", "it is still being sent"),
        "fills the vector that is being sent": ("Step 1: backward", "Layer 11", "while it was being sent"),
        "a bucket without gradient is skipped": ("Step 1: backward", "", "not in the same collective|no grad"),
        "a gradient that two buckets need goes with the first": (
            "Step 1: backward", "At its end", "the others are on no rank"),
        "nobody collects the updated shards": ("Step 1: update", "", "has sent 0 bytes in this phase, and 3,176 are"),
        "shards come to their neighbour's place": ("Step 1: update", "At its end", "that is layer 2's value"),
        "every rank keeps the whole optimizer state": ("Step 1: update", "At its end", "bytes of optimizer state"),
        "does not start backward afresh": ("Step 2: first micro-batch", "It stops here", "call zero.zero_grad"),
        "keeps old gradients": ("Step 2: second micro-batch", "At its end", "still has the gradient of step 1 in it"),
        "the shard is overwritten": ("Step 2: second micro-batch", "At its end", "of the second micro-batch alone"),
        "the norm of the own shards": ("Step 2: clipping", "", "the norm of this rank's shards alone"),
        "the scale is not used": ("Step 2: update", "At its end", "the gradient was not clipped"),
    },
    "04_parameters": {
        "parameters are never released": ("The stage is made", "At its end", "can still read layers 1, 2, .*: shards"),
        "the shard is a view, and keeps the whole": (
            "The stage is made", "At its end", "bytes of parameters between its steps, .* but its memory is there"),
        "the shard goes with the whole": ("The stage is made", "It stops here", "SIGSEGV"),
        "units stay whole once they are": (
            "Step 1: backward", "Forward comes to layer 3", "can read layers 1 and 2, too, in forward, while layer 3"),
        "units are freed at the end of the turn, after the next one was begun": (
            "Step 2: first micro-batch", "Forward comes to", "begins a gather while layers .* have memory: more than"),
        "param.data is swapped, while autograd holds the old storage": (
            "Step 1: backward", "Forward comes to layer 3", "still has memory of layers 1 and 2, in forward, while la"),
        "the whole model is gathered at once": (
            "Step 1: backward", "Forward comes to layers 1 and 2", "can read layers 4, 5, .* and 12, too"),
        "nothing is prefetched": (
            "Step 2: first micro-batch", "Forward comes to layers 1 and 2", "has not begun to gather layer 3, in forw"),
        "the prefetch is waited for at once": (
            "Step 2: first micro-batch", "Forward comes to layers 1 and 2", "can read layer 3 already, .* has waited"),
        "shards come to their neighbour's place": ("Step 2: update", "Step 2: update", "not what one process would"),
        "backward frees nothing": (
            "Step 1: backward", "Layer 11's", "can read layer 12, too, in backward, while layer 11 works"),
        "only forward prefetches": (
            "Step 2: first micro-batch", "Layer 12's", "has not begun to gather layer 11, in backward"),
        "all is freed between forward and backward": (
            "Step 1: backward", "At its end", "has sent 11,136 bytes .* all-gather 22 times"),
        "whole gradients until backward ends": ("Step 1: backward", "Layer 3's", "whole gradients pile up"),
        "the first unit is forgotten": ("Step 1: update", "Step 1: update", "it did not move"),
        "units stay whole after a step": ("Step 1: update", "", "can still read layers 1 and 2 when step.. is over"),
        "step gathers the parameters, as stage 2 does": ("Step 1: update", "", "sent 3,712 bytes .*, and 0 are expect"),
    },
}
CASES = [(lesson, name) for lesson, cases in OPENS.items() for name in cases]


@pytest.mark.parametrize("lesson, name", sample(CASES, [
    ("00_collectives", "writes over instead of adding"), ("04_parameters", "units stay whole once they are")]))
def test_a_wrong_one_opens_at_its_mistake(told, lesson, name):
    wrong = submissions.mistakes(LESSONS[lesson]).WRONG[name]
    part, step, sentence = opens(told(LESSONS[lesson], submissions.spliced(LESSONS[lesson], wrong.code, wrong.top)))
    wanted_part, wanted_step, pattern = OPENS[lesson][name]
    assert part == wanted_part and re.match(wanted_step.replace(" . ", r" \d+'s "), step), (part, step, sentence)
    assert re.search(pattern, sentence), sentence


def test_a_stage_that_is_half_written_is_drawn_as_far_as_it_goes(told):
    """What shows the parameters is written last, and what comes before is seen all the same."""
    holes = {f"Stage3.{name}": f"def {name}(self):\n    raise NotImplementedError('step 5: {name}')"
             for name in ("gather_parameters", "step")}
    story = told(LESSONS["04_parameters"], submissions.spliced(LESSONS["04_parameters"], holes))
    part, step, sentence = opens(story)
    assert (part, step) == ("Step 1: update", "Not written yet") and sentence.startswith("step() is not written yet")


# stage: the reference of a lesson that is not written yet, and chooses this kind of report
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_other_stages_depart_nowhere(tmp_path, stage):
    lesson = dataclasses.replace(GRADIENTS, reference=f"zero_minimal.stage{stage}", class_name=f"Stage{stage}")
    file = tmp_path / "assignment.py"
    file.write_text(submissions.spliced(lesson, {}))
    story, note = writing.told(lesson, file)
    assert story is not None and opens(story) is None, note or opens(story)


# ------------------------------------------------------------------------------------- what does not come to its end


@pytest.fixture
def exchange_alone(monkeypatch):
    """Of lesson 0 only the first function is called, and not waited for long."""
    monkeypatch.setattr(messages_told, "names", lambda lesson: ["exchange"])
    monkeypatch.setattr(recording, "PATIENCE", 3.0)


EXCHANGE = """
    def exchange(outgoing, incoming, group=None):
        rank = dist.get_rank(group)
        sending = dist.isend(outgoing, _global(rank + 1, group), group=group)
        {then}
        dist.recv(incoming, _global(rank - 1, group), group=group)
        sending.wait()
    """


@pytest.mark.parametrize("then, sentence, sent", [
    ("while rank == 1: pass", "rank 1 stood at line .*while rank == 1: pass", True),
    ("import os; rank == 1 and os._exit(3)", "rank 1 is gone in the middle of the test", True),
    ("rank == 1 and 1 / 0", "rank 1: it raised ZeroDivisionError", True),
    ("raise RuntimeError('<script>alert(1)</script>')", "<script>alert", True),
    ("raise NotImplementedError('step 1: exchange')", r"exchange\(\) is not written yet \(step 1", False)],
    ids=("hangs", "dies", "raises", "raises HTML", "is not written"))
def test_a_run_that_stops_is_told_up_to_there(told, exchange_alone, then, sentence, sent):
    story = told(COLLECTIVES, submissions.spliced(COLLECTIVES, {"exchange": EXCHANGE.format(then=then)}))
    part, step, words = opens(story)
    assert part == "exchange" and re.search(sentence, words, re.DOTALL), words
    did = [line.did for step in story.steps for line in step.lines]
    assert any("sends rank 1's tensor to rank 2" in words for words in did) == sent
    text = page("title", "file", POINTS, story)
    assert text.count("<script") == 1 and words in plain(text)


def test_a_file_that_is_not_python_gets_a_page(tmp_path):
    (tmp_path / "mine.py").write_text("def step(:\n")
    code, printed = submissions.grade(
        tmp_path / "mine.py", "--lesson", "00_collectives", "--html", tmp_path / "report.html")
    assert code == 1 and "report.html: what your ranks did" in printed, printed
    shown = plain((tmp_path / "report.html").read_text())
    assert "the file is not Python, line 1" in shown and "0 of 100" in shown and "nothing could be run" in shown


def test_a_course_without_its_references_reports_too(tmp_path):
    """What is expected comes from rules: the files that solve the lessons are not needed."""
    copy, file = tmp_path / "house", tmp_path / "mine.py"
    without = shutil.ignore_patterns("__pycache__", "stage2.py", "ring.py", "mistakes.py", "right", ".git", "*.png")
    shutil.copytree(HOUSE, copy, ignore=without)
    for lesson in (COLLECTIVES, GRADIENTS):
        file.write_text(submissions.spliced(lesson, {}))
        code = ("import sys; from pathlib import Path; from zero_minimal.classroom.lessons import found; "
                "from zero_minimal.classroom.report.writing import told; "
                f"story, note = told(found()['{lesson.name}'], Path(sys.argv[1])); "
                "print(note, len(story.steps), story.first_departure)")
        done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=copy, text=True, capture_output=True,
                              env={**os.environ, "PYTHONPATH": str(copy)})
        assert re.search(r"^ \d\d None$", done.stdout), done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------------- the page


class Parsed(html.parser.HTMLParser):
    """A page's elements, and whether each is closed where it must be."""

    EMPTY = ("meta", "!doctype")

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []  # names; (name, attributes, [words])
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes), []))
        if name not in self.EMPTY:
            self.open.append((name, self.elements[-1][2]))

    def handle_endtag(self, name):
        assert self.open.pop()[0] == name, f"{name} is closed where another element is open"

    def handle_data(self, data):
        for _, words in self.open:
            words.append(data)

    def all(self, name):
        return [(attributes, "".join(words).strip()) for found, attributes, words in self.elements if found == name]


HOSTILE = "</td></script><script>alert(1)</script><img src=http://example.com onerror='alert(1)'>{{title}}"
POINTS = [{"number": "1", "name": "the first", "score": 3, "max_score": 5, "output": HOSTILE},
          {"number": "2", "name": "the second", "score": 5, "max_score": 5, "output": ""}]


def a_story():
    """Two parts; the second step of three departs."""
    memory = [{"parameters": 800, "gradients": 300, HOSTILE: 5}] * 2
    return Story("A run.", "Words.", [
        Part("one", "about it", [Step("a", [Line("rank 0", "sends a", "sends a")], memory=memory, limit=1000.0),
                                 Step("b", [Line("rank 0", HOSTILE, "sends b", True)], departures=[HOSTILE, "more"])]),
        Part("two", "", [Step("c")])])


def test_the_page_needs_nothing_but_itself():
    text = page("00 " + HOSTILE, HOSTILE, POINTS, a_story())
    parsed = Parsed(text)
    assert len(parsed.all("script")) == len(parsed.all("style")) == 1
    assert {name for name, *_ in parsed.elements}.isdisjoint({"link", "img", "iframe", "object", "base", "form"})
    for _, attributes, _ in parsed.elements:
        assert not {"src", "srcset", "style", "action"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    own = (HOUSE / "zero_minimal/classroom/report/page.html").read_text()
    assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp|innerHTML", own)
    policy = next(attributes["content"] for attributes, _ in parsed.all("meta") if "http-equiv" in attributes)
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_what_a_submission_says_is_text():
    shown = plain(page(HOSTILE, HOSTILE, POINTS, a_story()))
    assert shown.count(HOSTILE) >= 6  # title twice, file, points, line, departure


def test_the_page_can_be_used_without_a_mouse_and_without_eyes():
    parsed = Parsed(page("title", "file", POINTS, a_story()))
    assert [words for _, words in parsed.all("button")] == [
        "First step", "Previous step", "Next step", "Last step", "Step that first departs"]
    assert all(attributes["type"] == "button" for attributes, _ in parsed.all("button"))
    assert len(parsed.all("main")) == len(parsed.all("header")) == len(parsed.all("nav")) == len(parsed.all("h1")) == 1
    names = {attributes["id"]: attributes for _, attributes, _ in parsed.elements if "id" in attributes}
    assert len(names) == sum("id" in attributes for _, attributes, _ in parsed.elements), "an id stands twice"
    for _, attributes, _ in parsed.elements:
        assert attributes.get("aria-labelledby", "run") in names
        assert attributes.get("href", "#run")[1:] in names
    said = [attributes for attributes in names.values() if attributes.get("role") == "status"]
    assert [each["aria-live"] for each in said] == ["polite"]
    steps = [attributes for attributes, _ in parsed.all("article")]
    assert [step["data-said"].split(":")[0] for step in steps] == [f"Step {number} of 3" for number in (1, 2, 3)]
    assert "departs from what is expected: " + HOSTILE in steps[1]["data-said"]
    assert "As expected" in steps[0]["data-said"]
    assert all("aria-label" in attributes or "aria-hidden" in attributes for attributes, _ in parsed.all("svg"))
    levels = [int(name[1]) for name, *_ in parsed.elements if re.fullmatch("h[1-6]", name)]
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False)), levels


def test_without_a_script_every_step_is_there_and_where_it_opens_is_a_link():
    parsed = Parsed(page("title", "file", POINTS, a_story()))
    assert [attributes for attributes, _ in parsed.all("article") if "hidden" in attributes] == []
    assert [attributes["class"] for _, attributes, _ in parsed.elements if "hidden" in attributes] == ["controls"]
    assert parsed.all("a")[0] == ({"href": "#step-2"}, "Go to that step: one, b")
    assert {"data-opens": "1"}.items() <= next(each for _, each, _ in parsed.elements if "data-opens" in each).items()


def test_points_and_messages_stand_on_top():
    shown = " ".join(plain(page("title", "file", POINTS, None, "It could not be started.")).split())
    assert "3 of 5" in shown and "8 of 10" in shown and "It could not be started." in shown
    assert "Step by step" not in shown
    assert "Nowhere, in this small run" in plain(page("title", "file", POINTS, dataclasses.replace(
        a_story(), parts=[Part("one", "", [Step("a")])])))


def test_its_colours_are_those_of_the_pictures():
    from zero_minimal.pictures.style import LOOKS

    style = (HOUSE / "zero_minimal/classroom/report/page.html").read_text()
    assert dict(re.findall(r"--(\w+): (#\w{6});", style.split("/* memory")[1].split("}")[0])) == {
        category: colour for category, (colour, _) in LOOKS.items()}


# ------------------------------------------------------------------------------------------ what ranks write is data


@pytest.mark.parametrize("data, count", [
    (b"", 0), (b"\xff\xfe garbage", 0), (b"[1]\n", 0), (b'{"what": 3}\n', 0), (b"[" * 10**5, 0),
    (b'{"what": "send"}\nrest', 1), (b'{"what": "a", "x": NaN}\n{"what": "b"}\n', 2)])
def test_the_record_ends_where_it_is_none(tmp_path, data, count):
    (tmp_path / "record").write_bytes(data)
    events = recording.read(tmp_path / "record")
    assert len(events) == count and all(event.get("x") is None for event in events)


def test_nothing_else_is_read_as_a_record(tmp_path):
    (tmp_path / "secret").write_text('{"what": "send"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "nothing", "."):
        assert recording.read(tmp_path / name) == []
    (tmp_path / "long").write_text(json.dumps({"what": "x" * 5000, "more": [["y" * 5000]]}) + "\n")
    assert len(json.dumps(recording.read(tmp_path / "long"))) < 1000


@pytest.mark.parametrize("event", [
    {"what": "received", "number": 9}, {"what": "send", "peer": [], "bytes": "x"}, {"what": "returned"},
    {"what": "gradient", "layer": "x"}, {"what": "made"}, {"what": "begins", "holds": 5}, {"what": "end"}])
@pytest.mark.parametrize("kind", DRAWN)
def test_a_record_that_makes_no_sense_is_said_to_be_none(monkeypatch, kind, event):
    lesson = next(each for each in LESSONS.values() if each.report == kind)
    ranks = [[{"what": "empty", "memory": {}}, event]] * 3
    monkeypatch.setattr(writing, "record", lambda supervisor, submission, kind, names, world_size: [
        recording.Recorded(name, ranks, "it stopped") for name in names])
    story, note = told_by(None, Submission(lesson.starter, lesson))
    assert story is not None or "is no record of a run" in note and "it stopped" in note


def test_every_kind_that_a_lesson_may_name_is_there():
    assert set(KINDS) == set(DRAWN) and {lesson.report for lesson in LESSONS.values()} - {""} == set(DRAWN)


def test_a_kind_that_is_none_is_refused(tmp_path):
    file = tmp_path / "07_new/lesson.toml"
    file.parent.mkdir()
    file.write_text((GRADIENTS.folder / "lesson.toml").read_text().replace('report = "buckets"', 'report = "bucket"'))
    with pytest.raises(ValueError, match="lesson.toml: report must be one of messages, buckets, not 'bucket'$"):
        read(file)


def test_sentences_that_ranks_share_are_said_once():
    said = ["Rank 0 waits.", "Rank 0 sends to rank 1.", "Rank 1 waits.", "Rank 1 sends to rank 2.", "Rank 2 waits."]
    assert alike(said) == [
        "Rank 0 waits. The same on ranks 1 and 2.", "Rank 0 sends to rank 1.", "Rank 1 sends to rank 2."]


def test_a_gradient_says_whose_it_is():
    """Each sum of parts that the small run can make is read as what it is."""
    for layer in range(1, len(small_model.SIZES) + 1):
        for batches in ((0,), (1,), (0, 1)):
            read = small_model.read(small_model.mean_gradient(layer, *batches))
            assert (read.layer, read.times) == (layer, 1)
            assert {batch for _, batch in read.parts} == set(batches)
            assert {rank for rank, _ in read.parts} == ({0} if layer == 1 else {0, 1, 2})


def test_a_lesson_that_chooses_nothing_gets_its_points_alone():
    story, note = writing.told(dataclasses.replace(GRADIENTS, report=""), GRADIENTS.starter)
    assert story is None and "No run of this lesson is drawn" in plain(page("title", "file", POINTS, story, note))
