"""Lessons are found by their folders, and a folder more is a lesson more; starters are cut from the reference."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import submissions

from zero_minimal.classroom import lessons, references, starters
from zero_minimal.classroom.lessons import HOUSE

LESSONS = lessons.found()
GRADIENTS = LESSONS["03_gradients"]
each_lesson = pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)


def test_found_by_their_folders(tmp_path):
    for name in ("02_two", "01_one", "pictures"):
        (tmp_path / name).mkdir()
    for name in ("02_two", "01_one"):
        shutil.copy(GRADIENTS.folder / "lesson.toml", tmp_path / name)
    assert list(lessons.found(tmp_path)) == ["01_one", "02_two"]
    assert lessons.found(tmp_path)["02_two"].starter == tmp_path / "02_two/assignment.py"


@each_lesson
def test_its_title_is_that_of_its_page(lesson):
    page = (lesson.folder / "README.md").read_text()
    assert page.splitlines()[0] == f"# {lesson.name[:2]} {lesson.title}"


NUMBERS = "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
GIVEN = {  # lines of a solution that may be read: in hints, or since the starter does the same at another place
    "00_collectives": {"exchange(outgoing, incoming, group)"},
    "01_data_parallel": {"self.accumulating = False", "self.reducing = None", "for param in self.buckets_of:"},
    "02_optimizer_state": {"self.reducing = None"},
    "03_gradients": {"self.reducing = None"},
    "04_parameters": {"self.reducing = None", "param.grad = None", "self.inside_gather_parameters = False"},
    "08_defragmentation": {"self.pool = self._empty_pool()", "self.used = 0"},
    "09_offload": {"precision.keep_changes(bucket)", "replicas.broadcast_statistics(self.model, self.group)",
                   'seams.tell("update_begins", bucket)', "self.reducer.needs_zero_grad = True",
                   'seams.tell("update_ends", bucket)'},
    "10_whole_system": {"self.zero.reduced_gradients()"},
}


def solutions(lesson):
    """The lines that a learner writes, without comments."""
    lines = [line.partition("  #")[0].strip() for name in lesson.tasks for line in submissions.solution(lesson, name)]
    return [line for line in lines if line and not line.startswith("#")]


@each_lesson
def test_no_line_of_the_solution_is_on_a_page_or_in_the_starter(lesson):
    """What sets, returns or compares something, and what is long; short loops are in the hints."""
    telling = {line for line in solutions(lesson) if "= " in line or "return " in line or len(line) >= 28}
    texts = [page.read_text() for page in (*lesson.folder.glob("*.md"), lesson.starter) if page.name != "teacher.md"]
    read = {line for line in telling for text in texts if line in text}
    assert read == GIVEN.get(lesson.name, set()) and len(telling) > 10


@each_lesson
def test_how_much_there_is_to_write(lesson):
    page, teacher = (" ".join((lesson.folder / name).read_text().split()) for name in ("README.md", "teacher.md"))
    said = re.findall(r"(?:about|some|these) (\d+) (?:short )?lines", f"{page} {teacher}")
    assert len(set(said)) == 1 or lesson.name == "11_reading_critically"  # whose notes are the work
    for number in said:
        assert abs(len(solutions(lesson)) - int(number)) <= int(number) / 5
    for word in re.findall(r"(\w+) (?:short )?holes", page):
        assert word not in NUMBERS or NUMBERS.index(word) == len(lesson.tasks)


def test_what_a_submission_may_import():
    assert {f"zero_minimal.stage{number}" for number in range(4)} <= GRADIENTS.forbidden
    assert not any(name.startswith("zero_minimal.guards") for name in GRADIENTS.forbidden)
    assert "zero_minimal.core.ring" in LESSONS["00_collectives"].forbidden


RIGHT = """
title = "Gradients"
world = "2 ranks"
reference = "zero_minimal.stage2"
class = "Stage2"
takes_in = ["zero_minimal.core.precision.clip"]
builds_on = ["zero_minimal.tensor_parallel"]

[[steps]]
title = "the first"
points = 40
[steps.tasks]
"Stage2.step" = "what\\n must hold"

[[steps]]
title = "the second"
points = 60
[steps.tasks]
"Stage2.zero_grad" = "what must hold"
"""


def written(tmp_path, text):
    file = tmp_path / "lessons/07_new/lesson.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_a_lesson_is_read(tmp_path):
    lesson = lessons.read(written(tmp_path, RIGHT))
    assert lesson.name == "07_new" and lesson.class_name == "Stage2" and lesson.world == "2 ranks"
    assert [step.points for step in lesson.steps] == [40, 60]
    assert lesson.tasks == {"Stage2.step": (1, "what must hold"), "Stage2.zero_grad": (2, "what must hold")}
    assert "zero_minimal.stage3" in lesson.forbidden and "zero_minimal.tensor_parallel" not in lesson.forbidden


@pytest.mark.parametrize("old, new, says", [
    ('title = "Gradients"', "", r": title is missing \(text\)$"),
    ('title = "Gradients"', "title = 3", r": title must be text, not 3$"),
    ('title = "Gradients"', 'title = ""', r": title is empty$"),
    ('title = "Gradients"', "title = Gradients", r" is not TOML: .*line 2"),
    ("world", "worlds", r": world is missing"),
    ("builds_on", "build_on", r": build_on is no key of a lesson: .*builds_on.* are$"),
    ('["zero_minimal.core.precision.clip"]', '"clip"', r": takes_in must be a list, not 'clip'$"),
    ('["zero_minimal.core.precision.clip"]', "[1]", r": takes_in must be a list of texts, and holds 1$"),
    ('["zero_minimal.core.precision.clip"]', '["clip"]', r': takes_in must .*"package.module.name", not \'clip'),
    ("points = 60", "", r", step 2: points is missing \(a number\)$"),
    ("points = 60", "points = -1", r", step 2: points must be above 0, not -1$"),
    ("points = 60", "points = true", r", step 2: points must be a number, not True$"),
    ('"Stage2.zero_grad" =', '"Stage2.zero_grad" = 1 #', r", step 2, tasks: Stage2.zero_grad must be text, not 1$"),
    ("[steps.tasks]\n\"Stage2.z", "#", r", step 2: tasks is missing \(a table\)$"),
    ("points = 60", 'points = 60\ngroup = 2', r", step 2: group must be text, not 2$"),
    ("builds_on", "draw = 3\nbuilds_on", r": draw must be from 1, one of each group, to 2, not 3$"),
    ("builds_on", "draw = 1.5\nbuilds_on", r": draw must be a whole number, not 1.5$"),
    ("points = 60", 'points = 60\nquiet = ["Stage2.step"]', r", step 2: quiet names Stage2.step, which is none of"),
    (RIGHT[RIGHT.index("\n[[steps]]"):], "steps = [1]", r", step 1 must be a table, not 1$"),
    (RIGHT[RIGHT.index("\n[[steps]]"):], "", r": steps is missing \(a list\)$"),
])
def test_a_wrong_file_is_named_with_its_key(tmp_path, old, new, says):
    text = RIGHT.replace(old, new)
    assert text != RIGHT
    with pytest.raises(ValueError, match="^lessons/07_new/lesson.toml" + says):
        lessons.read(written(tmp_path, text))


# ------------------------------------------------------------------------------------------------------------ starters


@each_lesson
def test_starters_hold_no_answer(lesson):
    """What is to be written is gone: only the docstring, what must hold, and the error that names the step are left."""
    source, starter = references.reference(lesson), lesson.starter.read_text()
    quiet = sum(len(step.quiet) for step in lesson.steps)
    assert starter.count("raise NotImplementedError") == len(lesson.tasks) - quiet
    assert starter.count("...  # until step ") == quiet
    gone = set(map(str.strip, source.splitlines())) - set(map(str.strip, starter.splitlines()))
    share = lesson.draw / len(lesson.steps) if lesson.draw else 1
    assert 30 <= len(gone) * share <= 80, "lines that a learner writes"
    compile(starter, "starter", "exec")


def test_a_function_that_the_reference_has_not_got():
    with pytest.raises(ValueError, match="03_gradients: the reference has no function Stage2.step"):
        starters.starter(GRADIENTS, GRADIENTS.starter.read_text().replace("def step(", "def stride("))


# ---------------------------------------------------------------------------------------------------- one folder more

NEW = """
title = "Norms"
world = "2 ranks"
reference = "zero_minimal.stage1"
class = "Stage1"
takes_in = ["zero_minimal.core.precision.master_of", "zero_minimal.core.precision.global_norm"]

[[steps]]
title = "the norm of all shards"
points = 5

[steps.tasks]
global_norm = "the same on every rank."
"""
CHECK = '''
import pytest
import toys


def trained(stage_class):
    return toys.train(stage_class, toys.Recipe(steps=1, clip=0.1)).norms


@pytest.mark.step(1, points=5)
def test_ranks_agree(assignment):
    one, two = toys.run(trained, 2, assignment)
    assert one == two and one[0] > 0.1
'''


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the repository without its assignments, with one more lesson: its folder, and its checks."""
    copy = tmp_path_factory.mktemp("house")
    shutil.copytree(HOUSE / "zero_minimal", copy / "zero_minimal", ignore=shutil.ignore_patterns("__pycache__"))
    for file in [HOUSE / "pyproject.toml", *HOUSE.glob("tests/*.py"), *HOUSE.glob("lessons/*/lesson.toml"),
                 *HOUSE.glob("tests/*/test_assignment.py")]:
        (copy / file.relative_to(HOUSE)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / file.relative_to(HOUSE))
    for file, text in (("lessons/99_norms/lesson.toml", NEW), ("tests/99_norms/test_assignment.py", CHECK)):
        (copy / file).parent.mkdir()
        (copy / file).write_text(text)
    return copy


def command(house, *arguments):
    """python -m zero_minimal ARGUMENTS in that copy: exit code, what it printed."""
    done = subprocess.run([sys.executable, "-m", "zero_minimal", *map(str, arguments)], cwd=house, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "PYTHONPATH": str(house)})
    return done.returncode, done.stdout


def test_starters_are_those_of_the_repository(house):
    code, printed = command(house, "starters")
    assert code == 0, printed
    for lesson in LESSONS.values():
        made = house / lesson.starter.relative_to(HOUSE)
        assert made.read_text() == lesson.starter.read_text(), "run python -m zero_minimal starters"
    assert 'raise NotImplementedError("step 1: global_norm")' in (house / "lessons/99_norms/assignment.py").read_text()


@pytest.mark.thorough
def test_a_new_folder_is_a_lesson(house, tmp_path):
    command(house, "starters")
    code, printed = command(house, "grade", "lessons/99_norms/assignment.py")
    assert code == 1 and "global_norm() is not written yet (step 1, line" in printed and "0 of 5 points" in printed
    mine = tmp_path / "mine.py"
    mine.write_text(references.reference(lessons.read(house / "lessons/99_norms/lesson.toml")))
    code, printed = command(house, "grade", mine, "--lesson", "99_norms")
    assert code == 0 and "5 of 5 points" in printed, printed


@pytest.mark.thorough
def test_a_broken_lesson_ends_every_command_with_its_message(house):
    file = house / "lessons/99_norms/lesson.toml"
    file.write_text(NEW.replace("points = 5", ""))
    for arguments, code in ((["grade", "mine.py"], 3), (["starters"], 2)):
        ended, printed = command(house, *arguments)
        assert ended == code and "error: lessons/99_norms/lesson.toml, step 1: points is missing" in printed
        assert "Traceback" not in printed
    file.write_text(NEW)


# ------------------------------------------------------------------------------------------------ wrong ones, by name


def test_a_definition_is_put_in_by_its_name():
    text = submissions.spliced(GRADIENTS, {
        "Stage2.step": "def step(self):\n    pass", "Stage2.late": "def late(self): ...", "Stage2.FEW": "FEW = 3",
        "helper": "def helper(x):\n    return x", "MANY": "MANY = 4", "Stage2.zero_grad": None}, top="import os\n")
    file = references.Module("assignment", text)
    functions = starters.functions_of(file.tree)
    assert text.startswith('import os\n"""') and {"helper", "MANY", "Stage2"} <= set(file.definitions)
    assert {"Stage2.step", "Stage2.late", "Stage2.clip_grad_norm_"} <= set(functions)
    assert "Stage2.zero_grad" not in functions and "    FEW = 3\n" in text
    assert len(functions["Stage2.step"].body) == 1 and not functions["Stage2.step"].decorator_list


@pytest.mark.parametrize("code, says", [
    ({"Stage9.step": "def step(self): ..."}, "Stage9.step: the reference has no class Stage9"),
    ({"Stage2.step": "def stride(self): ..."}, "the text for Stage2.step defines stride"),
    ({"helper": "import os\ndef helper(): ..."}, "the text for helper defines import os, helper"),
    ({"helper": "# nothing"}, "the text for helper defines nothing"),
    ({"Stage2.stride": None}, "Stage2.stride: the reference has none to take away"),
])
def test_what_cannot_be_put_in(code, says):
    with pytest.raises(ValueError, match=says):
        submissions.spliced(GRADIENTS, code)
