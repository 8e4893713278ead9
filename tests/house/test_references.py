"""A reference that lies in several modules is one file for the learner, and trains as they do."""

import ast
import builtins
import dataclasses

import pytest
import toys

from zero_minimal.classroom import lessons, references
from zero_minimal.classroom.guard import guarded
from zero_minimal.classroom.submission import Submission
from zero_minimal.processes.ranks import RankError

GRADIENTS = lessons.found()["03_gradients"]
CORE = "zero_minimal.core."
SEVERAL = [
    dataclasses.replace(GRADIENTS, reference="zero_minimal.stage0", class_name="Stage0",
                        takes_in=(CORE + "reducer.Reducer",)),
    dataclasses.replace(GRADIENTS, reference="zero_minimal.stage1", class_name="Stage1",
                        takes_in=(CORE + "precision.master_of", CORE + "precision.global_norm")),
]
several = pytest.mark.parametrize("lesson", SEVERAL, ids=("a class", "two functions"))


@several
def test_definitions_of_other_modules_are_taken_in(lesson):
    """The text of each stands in front of the class, comments and all; no import or mention of it is left."""
    text = references.reference(lesson)
    file = references.Module("assignment", text)
    known = {*vars(builtins), *references.imports_of(ast.walk(file.tree)), *file.definitions, "__name__"}
    assert references.used_names(text) <= known, "names that nothing defines"
    main = references.Module.named(lesson.reference, lesson)
    for module, names in references.definitions(lesson).items():
        other = references.Module.named(module, lesson)
        for name in names:
            assert other.cut(other.definitions[name]) in text.split(f"class {lesson.class_name}")[0]
            assert f"{module.split('.')[-1]}.{name}" not in file.cut(file.definitions[lesson.class_name])
    assert main.text.count("#") <= text.count("#") and main.lines[-1] == file.lines[-1]
    assert references.borrowed(lesson, text) == []


def trained(stage_class):
    run = toys.train(stage_class, toys.Recipe(steps=2, accumulate=2, clip=0.1))
    return run.losses + run.norms, run.parameters


@several
def test_one_file_of_several_trains_as_they_do(lesson, tmp_path):
    file = tmp_path / "assignment.py"
    file.write_text(references.reference(lesson))
    ours = toys.run(trained, 2, Submission(file, lesson))
    theirs = toys.run(trained, 2, toys.STAGES[int(lesson.class_name[-1])])
    for (numbers, parameters), (wanted, same) in zip(ours, theirs, strict=True):
        assert numbers == wanted and toys.identical(parameters, same)


MAIN = '''"""A page."""

import torch
from package import low, other  # why not
from package.low import Thing


# the main class
class Main(Thing):
    """Größe: of low.scale."""

    def run(self, x):
        return other.use(low.scale(x) + low.scale(low.keep))
'''
LOW = '''"""Another page."""

import math
import os
from collections import abc

UNIT = 2


class Thing:
    pass


def scale(x: abc.Sized):
    # in units
    return math.sqrt(x * UNIT)
'''


def one_file(main=MAIN, low=LOW, taken=("Thing", "scale")):
    names = {"package.low": list(taken)}
    return references.merged(references.Module("package.main", main), names, [references.Module("package.low", low)])


def test_imports_are_merged_and_names_shortened():
    assert one_file() == '''"""A page."""

import math
from collections import abc

import torch
from package import low, other  # why not
from package.low import UNIT


class Thing:
    pass


def scale(x: abc.Sized):
    # in units
    return math.sqrt(x * UNIT)


# the main class
class Main(Thing):
    """Größe: of low.scale."""

    def run(self, x):
        return other.use(scale(x) + scale(low.keep))
'''
    assert "from package import other\n" in one_file(MAIN.replace("low.keep", "1")), "an import without use goes"


@pytest.mark.parametrize("change, says", [
    (dict(taken=["rescale"]), "package.low has no rescale to be taken in"),
    (dict(main=MAIN.replace("import Thing", "import Thing as Base")), "package.low.Thing is imported as Base"),
    (dict(main=MAIN.replace("self, x", "self, scale")), r"low.scale would be scale .* of that name in run\(\)"),
    (dict(low=LOW.replace("UNIT", "_UNIT")), "scale of package.low uses _UNIT, which is private: take it in too"),
    (dict(main=MAIN + "\nUNIT = 3\n"), "UNIT would have two meanings: package.main.UNIT and package.low.UNIT"),
    (dict(main=MAIN.replace("torch", "torch as math")), "math would have two meanings: torch and math"),
])
def test_what_cannot_stand_in_one_file(change, says):
    with pytest.raises(ValueError, match=says):
        one_file(**change)


@pytest.mark.parametrize("text, found", [
    ("from zero_minimal.core.precision import master_of", "zero_minimal.core.precision.master_of"),
    ("def f():\n    from zero_minimal.core.precision import master_of as m",
     "zero_minimal.core.precision.master_of"),
    ("from zero_minimal.core import precision as p\np.master_of(1)", "p.master_of"),
    ("from zero_minimal.core import precision\nprecision.clip(self.master_of, 1)", None),
])
def test_what_a_lesson_takes_in_is_not_to_be_borrowed(text, found):
    assert references.borrowed(SEVERAL[1], text) == [found] * bool(found)


def test_who_borrows_it_is_told(tmp_path):
    file = tmp_path / "assignment.py"
    file.write_text(references.reference(SEVERAL[1]) + "\nmaster_of = precision.master_of\n")
    with pytest.raises(RankError) as caught:
        toys.run(guarded(int, Submission(file, SEVERAL[1])), 1)
    assert str(caught.value.__cause__) == (
        "it uses precision.master_of, where the work of lesson 03_gradients is done already")
