"""Lessons with an assignment: the functions of the reference that a learner writes, their steps and points.

A lesson is a folder lessons/NN_name with a lesson.toml; there is no other list of lessons. Its checks are in
tests/NN_name/test_assignment.py, where each test names its step and its points. The keys:

    title        the title on the lesson's page, without the number
    world        the hardware on which it is graded, in words
    points       of all steps of assignment.py; if fewer than 100, something else earns the rest         (default: 100)
    reference    the module from which the starter is made
    takes_in     definitions of other modules that the starter also has: ["package.module.name", …]     (default: none)
    class        the class of the file that the tests use                               (default: the file as a module)
    forbidden    more modules that a submission may not import, see below                               (default: none)
    builds_on    lesson files that it may import nevertheless                                           (default: none)
    draw         how many steps are graded, drawn by the learner's NAME, see drawn.py                    (default: all)
    called       the word for a step before its number                                                  (default: step)
    patience     seconds that ranks may take for one test, about 10 times what they need                  (default: 15)
    written      texts in assignment.py that a teacher reads, for the points up to 100                  (default: none)
    [[steps]]    title, points, and in [steps.tasks] "function" or "Class.method" = what must hold when it returns,
                 followed by a line for each call that it needs, beginning with "- ";
                 in [steps.core] check = the most that the step earns without this check, the lesson's subject;
                 quiet: its functions that do nothing until they are written, so that earlier steps can call
                 them                                                                                   (default: none)
                 group: at least one step of each group is drawn                                        (default: none)

A submission may not import the reference or any lesson file zero_minimal/*.py, nor anything that imports these. In
other modules from which the lesson takes definitions, it may use everything else.
"""

import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[2]  # the repository
PACKAGE = HOUSE / "zero_minimal"
FILE = "lesson.toml"

# words by which messages are recognised
UNWRITTEN = "() is not written yet ("
LOOK_AT = "\n    To look at: "
STOOD = re.compile(r"^    (?:the host of )?ranks? .* stood at line \d+ of .*? \((\w+)\): ", re.MULTILINE)
USED_UP = "not looked at: the time for this lesson was used up before. Look at this step alone: --step NUMBER"


def needs(message: str, number: int = 0, steps: Iterable["Step"] = ()) -> int:
    """The step whose function is not written yet, according to a message; 0 if it says nothing about that.

    number, steps: the step of the check with this message, and all steps. With them, the result may also be a later
        step whose function never returned.
    """
    if found := re.search(rf"{re.escape(UNWRITTEN)}\w+ (\d+)", message):
        return int(found[1])
    owners = [step.number for name in STOOD.findall(message) for step in steps
              if name in {task.rpartition(".")[2] for task in step.tasks}]
    return min(owners) if owners and min(owners) > number else 0


@dataclass(frozen=True, eq=False)
class Step:
    """One step: its functions, and for each what must hold when it returns."""

    number: int
    title: str
    points: float
    tasks: dict[str, str]  # "Class.method" or "function": a comment in the starter
    core: dict[str, float]  # check: the step's maximum if the check fails
    quiet: frozenset[str] = frozenset()  # functions that raise nothing in the starter
    group: str = ""  # if steps are drawn: at least one of each group
    called: str = "step"

    @property
    def label(self) -> str:
        """Its label, such as "step 3"."""
        return f"{self.called} {self.number}"


@dataclass(frozen=True, eq=False)
class Lesson:
    """One assignment."""

    folder: Path
    title: str
    world: str
    reference: str
    takes_in: tuple[str, ...]
    class_name: str  # "": the tests use the module
    forbidden: frozenset[str]  # modules that would do the learner's work
    steps: tuple[Step, ...]
    points: float = 100  # of the steps, or of those that are drawn
    draw: int = 0  # how many steps; 0: all
    patience: float = 15.0  # seconds for the ranks of one test
    written: tuple[str, ...] = ()  # texts for the teacher

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def starter(self) -> Path:
        return self.folder / "assignment.py"

    @property
    def contract(self) -> Path:
        """The file with the rules for every solution. (Some lessons still have them on their page.)"""
        return self.folder / "contract.md"

    @property
    def tests(self) -> Path:
        return self.folder.parents[1] / "tests" / self.name / "test_assignment.py"

    @property
    def tasks(self) -> dict[str, tuple[int, str]]:
        """{function: (number of its step, what must hold)}."""
        return {name: (step.number, task) for step in self.steps for name, task in step.tasks.items()}

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of its steps, in order."""
        return tuple(dict.fromkeys(step.group for step in self.steps))


@functools.cache
def found(folder: Path = HOUSE / "lessons") -> dict[str, Lesson]:
    """{name: lesson}, for every lesson.toml. Raises: ValueError, which names file and key, if one is wrong."""
    return {file.parent.name: read(file) for file in sorted(folder.glob(f"*/{FILE}"))}


def read(file: Path) -> Lesson:
    """The lesson of a lesson.toml. Raises: ValueError, which names file and key, if it is broken or incomplete."""
    where = "/".join(file.parts[-3:])
    try:
        table = Table(tomllib.loads(file.read_text()), where)
    except ValueError as error:  # including UnicodeDecodeError
        raise ValueError(f"{where} is not TOML: {error}") from None
    reference, takes_in = table.take("reference", str), table.texts("takes_in")
    called = table.take("called", str, Step.called)
    lesson_files = {f"{PACKAGE.name}.{file.stem}" for file in PACKAGE.glob("*.py") if not file.stem.startswith("__")}
    for name in takes_in:
        if "." not in name:
            raise ValueError(f"{where}: takes_in must name definitions as \"package.module.name\", not {name!r}")
    lesson = Lesson(
        points=table.take("points", (int, float), 100), draw=table.take("draw", int, 0),
        written=table.texts("written"), patience=table.take("patience", (int, float), Lesson.patience),
        folder=file.parent, title=table.take("title", str), world=table.take("world", str), reference=reference,
        takes_in=takes_in, class_name=table.take("class", str, ""),
        forbidden=frozenset(lesson_files - set(table.texts("builds_on")) | {reference, *table.texts("forbidden")}),
        steps=tuple(_step(Table(entry, f"{where}, step {number}"), number, called)
                    for number, entry in enumerate(table.take("steps", list), 1)),
    )
    table.end()
    if lesson.draw and not len(lesson.groups) <= lesson.draw <= len(lesson.steps):
        raise ValueError(f"{where}: draw must be from {len(lesson.groups)}, one of each group, to {len(lesson.steps)}, "
                         f"not {lesson.draw}")
    return lesson


def _step(table: "Table", number: int, called: str) -> Step:
    title, points, tasks = table.take("title", str), table.take("points", (int, float)), table.take("tasks", dict)
    core = Table(dict(table.take("core", dict, {})), f"{table.where}, core")
    quiet, group = frozenset(table.texts("quiet")), table.take("group", str, "")
    table.end()
    if points <= 0:
        raise ValueError(f"{table.where}: points must be above 0, not {points}")
    texts = Table(dict(tasks), f"{table.where}, tasks")
    tasks = {name: "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*(?=- )", texts.take(name, str)))
             for name in tasks}
    for name in sorted(quiet - set(tasks)):
        raise ValueError(f"{table.where}: quiet names {name}, which is none of its tasks")
    most = {name: core.take(name, (int, float)) for name in list(core.entries)}
    return Step(number, title, points, tasks, most, quiet, group, called)


KINDS = {str: "text", int: "a whole number", list: "a list", dict: "a table", (int, float): "a number"}


class Table:
    """A table of a lesson.toml, from which keys are taken: errors name keys that are missing, wrong or left over."""

    def __init__(self, entries: dict, where: str):
        if not isinstance(entries, dict):
            raise ValueError(f"{where} must be a table, not {entries!r}")
        self.entries, self.where, self.known = entries, where, []

    def take(self, key: str, kind, default=None):
        """The value of a key. Without a default it must exist and not be empty."""
        self.known.append(key)
        value = self.entries.pop(key, default)
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing ({KINDS[kind]})")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be {KINDS[kind]}, not {value!r}")
        if default is None and value in ("", [], {}):
            raise ValueError(f"{self.where}: {key} is empty")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, none by default."""
        values = self.take(key, list, [])
        for value in values:
            if not isinstance(value, str):
                raise ValueError(f"{self.where}: {key} must be a list of texts, and holds {value!r}")
        return tuple(values)

    def end(self) -> None:
        """Check that all keys have been taken."""
        for key in self.entries:
            raise ValueError(f"{self.where}: {key} is no key of a lesson: {', '.join(self.known)} are")
