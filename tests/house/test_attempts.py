"""Attempts: a notebook draws the learner's own file, in whatever state that is, beside the lesson's."""

import ast
import contextlib
import io
import re

import pytest
import submissions
from cells import sources_of
from thorough import sample

from zero_minimal import notebook
from zero_minimal.classroom import lessons
from zero_minimal.meters import deliveries
from zero_minimal.notebook import attempt
from zero_minimal.pictures.ring_chart import draw_attempt

LESSONS = lessons.found()
RINGS, GRADIENTS = LESSONS["00_collectives"], LESSONS["03_gradients"]


# ------------------------------------------------------------------------------------------------------- is read anew


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The learner's file, here in the notebook."""
    file = tmp_path / "assignment.py"
    monkeypatch.setenv("ZERO_ATTEMPT", str(file))
    return file


def test_the_lessons_own_file_is_the_learners(monkeypatch):
    monkeypatch.delenv("ZERO_ATTEMPT", raising=False)
    assert attempt.file_of("00_collectives") == RINGS.starter
    assert attempt.load("00_collectives").__doc__.startswith("Ring algorithms")


def test_a_change_is_seen_at_once(file):
    (file.parent / "beside_it.py").write_text("VALUE = 1\n")
    file.write_text("from beside_it import VALUE\nx = 1\n")
    assert (attempt.load("00_collectives").x, attempt.load("00_collectives").VALUE) == (1, 1)
    (file.parent / "beside_it.py").write_text("VALUE = 2\n")
    file.write_text("from beside_it import VALUE\nx = 2\n")
    assert (attempt.load("00_collectives").x, attempt.load("00_collectives").VALUE) == (2, 2)


@pytest.mark.parametrize("text, words", [
    ("import torch\nx = (1,\n", "line 2: '(' was never closed. Mend it, save the file, and run this cell again."),
    ("def f():\nreturn 1\n", "line 2: expected an indented block"),
    ("\nx = unknown\n", "line 2: NameError: name 'unknown' is not defined. Mend it"),
    ("import sys\nsys.exit()\n", "line 2: SystemExit. Mend it"),
    ("import no_such_module_here\n", "line 1: ModuleNotFoundError: No module named 'no_such_module_here'. Mend it"),
    (b"x = '\xff'\n", "is not text in UTF-8"),
    (None, "cannot be read (No such file or directory)"),
])
def test_a_file_that_cannot_run_is_told_in_a_sentence(file, text, words):
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(attempt.Unreadable) as told:
        attempt.load("00_collectives")
    (line,) = told.value._render_traceback_()
    assert line.startswith(str(file)) and words in line


def test_what_is_missing_is_told_in_a_line(file):
    file.write_text(RINGS.starter.read_text().replace('raise NotImplementedError("step 2', 'return ("'))
    module = attempt.load("00_collectives")
    assert attempt.next_step(module) == (
        "Not written yet: exchange, all_gather, all_reduce, broadcast. Next comes step 1, exchange: write it in "
        f"{file}, save it, and run the cells of this section again."
    )
    with attempt.as_far_as_written():
        module.exchange(None, None)
    with pytest.raises(NotImplementedError, match="of torch"), attempt.as_far_as_written():
        raise NotImplementedError("of torch")
    file.write_text("def exchange(): pass\n")
    assert attempt.next_step(attempt.load("00_collectives")).startswith("All of it is written.")


# ------------------------------------------------------------------------------------------------------------ is drawn


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """drawn(lesson, text): runs the notebook's last section on three ranks with that file; returns the names that it
    leaves here, the pictures in order, and what was printed."""
    file = tmp_path_factory.mktemp("attempt") / "assignment.py"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ZERO_ATTEMPT", str(file))
        world = notebook.World(3, "cpu")
        prepared = set()

        def drawn(lesson, text):
            cells = sources_of(lesson.name)
            if lesson.name == "03_gradients" and not prepared:
                setup = cells["cell-03"].replace("Settings()", "Settings(layers=2, hidden=48)")
                world.run(setup.partition("\n")[2])
                prepared.add(lesson)
            file.write_text(text)
            names, pictures = {"world": world, "n": 3}, []
            _import_pictures(names, cells["cell-01"], pictures)
            if lesson.name == "03_gradients":
                names["whole"] = dict.fromkeys(("parameters", "gradients", "optimizer"), 4 * world["psi"][0])
            with contextlib.redirect_stdout(io.StringIO()) as said:
                world.run(cells["attempt-run"].partition("\n")[2])
                for name, source in cells.items():
                    if name.startswith("attempt-") and not source.startswith("%%px"):
                        exec(source, names)
            return names, pictures, said.getvalue()

        drawn.world = world
        yield drawn
        world.stop()


def _import_pictures(names, source, pictures):
    """The imports of a notebook's first cell, whose draw_… keep what they have drawn."""
    for line in ast.parse(source).body:
        if isinstance(line, ast.ImportFrom):
            exec(ast.unparse(line), names)

    def keeping(draw):
        def kept(*args):
            pictures.append(draw(*args))
            return pictures[-1]
        return kept

    names |= {name: keeping(value) for name, value in names.items() if name.startswith("draw_")}


def text_in(picture):
    """All that is written in a picture."""
    return [text.get_text() for text in picture.findobj(lambda artist: hasattr(artist, "get_text"))]


@pytest.mark.thorough
def test_an_untouched_starter_is_told_what_to_write_first(drawn):
    _, (picture,), said = drawn(RINGS, RINGS.starter.read_text())
    assert picture is None
    assert said.count("Not written yet: exchange, reduce") == said.count("Next comes step 1, exchange: write it") == 1
    _, (memory, holdings), said = drawn(GRADIENTS, GRADIENTS.starter.read_text())
    assert said.count("Not written yet: bucket_complete, _wait, ") == said.count("Next comes step 1, bucket_comp") == 1
    assert [axis.get_title() for axis in memory.axes] == [f"the lesson's, rank {rank}" for rank in range(3)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", sample(submissions.right(RINGS), ["both messages in one batch"]))
def test_right_rings_look_like_the_lessons_however_they_are_written(drawn, name):
    _, (picture,), said = drawn(RINGS, submissions.right(RINGS)[name])
    assert "Not written" not in said
    words = text_in(picture)
    assert [word for word in words if word in deliveries.ALGORITHMS] == list(deliveries.ALGORITHMS)
    assert not [word for word in words if word[:1] in ("≠", "?", "→")]
    assert words.count("all") >= 2 * 3


# what the picture must show of a wrong one: a word that stands nowhere else
SHOWN = {
    "writes over instead of adding": "≠", "stops a step too early": "≠", "ends on the right neighbour's chunk": "≠",
    "gives the mean": "?", "sends to the left": "→2", "sends each part straight to its owner": "→2",
    "reduces by torch's own collective": "In yours, torch's own all_reduce did the work.",
    "sends whole tensors around": "≠", "gathers in the order of arrival": "≠", "passes on its own part only": "≠",
    "sends each chunk in two messages": "after step 3", "broadcasts from the root to each": "→0",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sample(SHOWN, list(SHOWN)[:3]))
def test_wrong_rings_are_seen_to_be_wrong(drawn, name):
    wrong = submissions.mistakes(RINGS).WRONG[name]
    _, (picture,), _ = drawn(RINGS, submissions.spliced(RINGS, wrong.code, wrong.top))
    words = text_in(picture)
    assert SHOWN[name] in words or any(SHOWN[name] in word for word in words if "\n" in word), words


@pytest.mark.thorough
def test_a_file_that_is_half_written_is_drawn_as_far_as_it_goes(drawn):
    half = submissions.spliced(RINGS, {"broadcast": submissions.function(
        "def broadcast(*_, **__):", "raise NotImplementedError('step 5: broadcast')")})
    _, (picture,), said = drawn(RINGS, half)
    assert "Not written yet: broadcast. Next comes step 5, broadcast: write it in" in said
    assert {"reduce_scatter", "all_gather"} <= set(text_in(picture)) and "broadcast" not in text_in(picture)
    half = submissions.spliced(GRADIENTS, {"Stage2.step": submissions.function(
        "def step(self):", "raise NotImplementedError('step 2: step')")})
    _, (memory, holdings), said = drawn(GRADIENTS, half)
    assert "Not written yet: step. Next comes step 2, step: write it in" in said
    assert [axis.get_title() for axis in memory.axes][3:] == [f"yours, rank {rank}" for rank in range(3)]


@pytest.mark.thorough
def test_without_the_lessons_ring_the_attempt_is_drawn_alone(drawn):
    world = drawn.world
    world.run("from zero_minimal.notebook.errors import Withheld\nkept, ring = ring, Withheld('ring')")
    try:
        _, (picture,), said = drawn(RINGS, submissions.spliced(RINGS, {}))
        with pytest.raises(notebook.CellError, match="ring.all_gather is not in this copy of the course") as failed:
            world.run("ring.all_gather(torch.ones(1))")
        _, (nothing,), _ = drawn(RINGS, RINGS.starter.read_text())
    finally:
        world.run("ring = kept")
    assert "mend" not in str(failed.value)
    words = text_in(picture)
    assert "yours" in words and "the lesson's" not in words and set(deliveries.ALGORITHMS) <= set(words)
    assert sum("The lesson's own is not in this copy of the course" in word for word in words) == 3
    assert nothing is None


def held(names, state):
    """Bytes of a state after the first step: {whose: by rank}."""
    by_rank = names["first_steps"]
    return {whose: [rank[whose]["held"][1][state] for rank in by_rank] for whose in by_rank[0]}


@pytest.mark.thorough
def test_stages_are_drawn_beside_the_lessons(drawn):
    names, pictures, _ = drawn(GRADIENTS, submissions.spliced(GRADIENTS, {}))
    assert [len(picture.axes) for picture in pictures] == [6, 4]
    for state in ("parameters", "gradients", "optimizer"):
        assert held(names, state)["yours"] == held(names, state)["the lesson's"]
    wrong = submissions.mistakes(GRADIENTS).WRONG["param.grad stays"]
    names, _, _ = drawn(GRADIENTS, submissions.spliced(GRADIENTS, wrong.code))
    gradients = held(names, "gradients")
    assert all(own > 2 * lesson for own, lesson in zip(gradients["yours"], gradients["the lesson's"], strict=True))


def failure_of(drawn, lesson, text):
    with pytest.raises(notebook.CellError) as failed:
        drawn(lesson, text)
    return str(failed.value)


@pytest.mark.thorough
def test_a_syntax_error_names_file_and_line(drawn):
    text = failure_of(drawn, RINGS, "import torch\n\ndef exchange(:\n")
    first, *_, last = text.splitlines()
    assert re.fullmatch(r"all ranks failed: .*assignment.py, line 3: .*\. Mend it, save the file, .*", first), text
    assert last.endswith("mend your file, and run the cell again.")
    assert "Traceback" not in text and len(text.splitlines()) == 3


@pytest.mark.thorough
def test_an_error_and_a_deadlock_name_the_line_of_the_file(drawn):
    bad = submissions.spliced(RINGS, {"all_gather": "def all_gather(part, group=None):\n    return part.view(-3)\n"})
    assert re.search(r"line \d+ of assignment.py: return part.view\(-3\)", failure_of(drawn, RINGS, bad))
    wrong = submissions.mistakes(RINGS).WRONG["receives before it sends"]
    text = failure_of(drawn, RINGS, submissions.spliced(RINGS, wrong.code))
    assert text.startswith("stuck: for 5 s each rank has waited for another one.")
    assert re.search(r"rank 0, line \d+ of assignment.py: dist.recv\(incoming.*    \(waits in recv from rank 2\)", text)
    assert "mend your file" in text
    drawn(RINGS, submissions.spliced(RINGS, {}))  # and after that it works


def test_a_story_that_takes_long_shows_its_beginning_and_its_end():
    records = [{"chunks": 2, "start": [1.0, 1, 3, 3], "sent": [(1, [1.0, 1])] * 20, "collectives": [], "end": [1.0, 1]},
               {"chunks": 2, "start": [16.0, 16, 48, 48], "sent": [], "collectives": [], "end": [17.0, 17]}]
    assert len(deliveries.told(records).states) == 21
    words = text_in(draw_attempt({"yours": [{"reduce_scatter": record} for record in records]}))
    assert {"after step 7", "at the end"} <= set(words) and "after step 8" not in words
