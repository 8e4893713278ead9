"""The pattern of a lesson's page, and what every page of the course keeps to.

An author runs this file, and is told what is missing: lessons/how-to-write-a-lesson.md says what each part is for.
"""

import contextlib
import functools
import importlib
import io
import re
import runpy
import sys

import pages
import pytest
from thorough import each

from zero_minimal.__main__ import COMMANDS
from zero_minimal.classroom.lessons import HOUSE, Lesson, found
from zero_minimal.classroom.references import reference

LESSONS = found()
PAGES = [*sorted(HOUSE.glob("*.md")), *sorted((HOUSE / "lessons").rglob("*.md"))]
each_lesson = pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
each_page = each(PAGES, lambda page: str(page.relative_to(HOUSE)))

IDEA, PREDICT, RULE = "The idea in one picture", "Predict", "A rule to leave with"
SECTIONS = (IDEA, PREDICT, "Walk through it", "The assignment", "Hints", "Grade it", "What people get wrong",
            "Five questions", "What the big ones do", "Further problems", RULE)  # own ones: between the first two
KEEP_TO = "What every solution must keep to"
HINTS = ("A question", "A smaller example", "A picture of the moment")
BEFORE, IN_ALL = 1500, 2800  # words: before the assignment, and with all that is folded
TEACHER = ("Discussion", "Exam", "Stumbles", "Rubric", "AI assistants")
NO_VERBS = {"a", "an", "the", "how", "what", "why", "that", "when", "which", "you", "to", "be", "know", "learn",
            "understand", "see", "have"}  # objectives begin with what can be seen: explain, predict, build
WIDTH, WORDS = 128, 35


def wrong_with(lesson: Lesson, page: str, contract: str) -> list[str]:
    """What a lesson's page lacks of the pattern, in words for its author. `contract`: the text of contract.md."""
    return [*_head(page), *_sections(page), *_idea(page), *_assignment(lesson, page, contract), *_hints(lesson, page),
            *_last(page)]


def _head(page: str):
    head = pages.head(page)
    if not pages.after_bold(head, "The question"):
        yield "no **The question.** with its paragraph before the first section"
    if not pages.commands(pages.after_bold(head, "Start here")):
        yield "**Start here** must hold a command to type, and say what to look at"
    words = len(page.partition("\n## The assignment")[0].split()), len(page.split())
    if words[0] > BEFORE or words[1] > IN_ALL:
        yield (f"a page is a quarter of an hour: it has {words[0]} words before the assignment and {words[1]} in all, "
               f"and {BEFORE} and {IN_ALL} are the most")
    goals = pages.items(pages.after_bold(head, "Afterwards you can"))
    if len(goals) != 3:
        yield f"**Afterwards you can** must be followed by a list of three, and has {len(goals)}"
    for goal in goals:
        if goal.split()[0].strip("*").lower() in NO_VERBS:
            yield f"an objective begins with a verb that a learner can show (explain, predict, build): {goal!r}"
    before = pages.after_bold(head, "Before you start")
    yield from _questions(before, 3, "**Before you start**")
    if not pages.links(before):
        yield "**Before you start** must link to where what is missing can be learned"
    time = pages.after_bold(head, "Time")
    for part in ("read", "notebook", "write"):
        if part not in time.lower():
            yield f"**Time** must say how long it takes by part, and does not name: {part}"
    if len(re.findall(r"\d+", time)) < 3:
        yield "**Time** must give minutes in figures for each part: read, notebook, write"


def _questions(text: str, count: int, where: str):
    asked = pages.folded(text)
    if len(asked) != count:
        yield f"{where} must have {count} questions in <details>, the question as <summary>, and has {len(asked)}"
    for question, answer in asked:
        if not question.endswith("?"):
            yield f"{where}: a summary must be a question, and is {question!r}"
        if not answer:
            yield f"{where}: nothing is folded below {question!r}"


def _sections(page: str):
    titles = [title for level, title in pages.headings(page) if level == 2]
    missing = [title for title in SECTIONS if title not in titles]
    for title in missing:
        yield f"no section '## {title}'"
    if missing:
        return
    order = [title for title in titles if title in SECTIONS]
    if order != list(SECTIONS):
        yield f"the sections must come in this order, each once: {', '.join(SECTIONS)}"
    if titles[0] != IDEA:
        yield f"'## {titles[0]}' stands before '## {IDEA}': the picture comes first"
    own = {title for title in titles if title not in SECTIONS}
    for title in own - set(titles[titles.index(IDEA) : titles.index(PREDICT)]):
        yield f"'## {title}': a section of a lesson's own stands between '## {IDEA}' and '## {PREDICT}'"
    for title in SECTIONS:
        if not pages.section(page, 2, title).strip():
            yield f"'## {title}' is empty"


def _idea(page: str):
    pictures = pages.IMAGE.findall(pages.without_folded(pages.section(page, 2, IDEA)))
    if not pictures:
        yield f"'## {IDEA}' must show a picture in plain sight, not inside <details>"
    for words, file in pictures:
        if len(words.split()) < 4:
            yield f"the alt text of {file} must say what the picture shows, and is {words!r}"
    if not any(inside for _, inside in pages.folded(pages.section(page, 2, PREDICT))):
        yield f"'## {PREDICT}' must fold what was measured in <details>"


def _assignment(lesson: Lesson, page: str, contract: str):
    assignment = pages.section(page, 2, "The assignment")
    rows = re.findall(r"^\| (\d+ .*)\|$", assignment, re.MULTILINE)
    rows = [[cell.strip() for cell in row.split("|")] for row in rows]
    said = [(int(row[0]), {cell for cell in row[1:] if cell.isdigit()}) for row in rows if row[0].isdigit()]
    if said != [(step.number, {f"{step.points:g}"}) for step in lesson.steps]:
        yield "'## The assignment' must have a table with a row a step: | number | … | points |, as in lesson.toml"
    yield from _contract(lesson, assignment, contract)
    command = f"python -m zero_minimal grade lessons/{lesson.name}/assignment.py"
    if command not in pages.section(page, 2, "Grade it"):
        yield f"'## Grade it' must hold the command: {command}"
    if repeated := lines_of_the_solution(lesson, page):
        yield f"the page prints the solution: {' / '.join(repeated)}"


def _contract(lesson: Lesson, assignment: str, contract: str):
    if lesson.contract.name not in pages.links(assignment):
        yield f"'## The assignment' must link {lesson.contract.name}"
    title = f"{KEEP_TO}: lesson {lesson.name[:2]}"
    if pages.headings(contract)[:1] != [(1, title)]:
        yield f"{lesson.contract.name} must begin with '# {title}'"
    named, checks = set(re.findall(r"`(test_\w+)`", contract)), checks_of(lesson)
    for name in sorted(checks ^ named):
        what = "does not say what this check holds a solution to" if name in checks else "names no check of the lesson"
        yield f"{lesson.contract.name}: {name}: {what}"
    for item in pages.items(contract):
        if not re.search(r"\(`test_.*\)$", item):
            yield f"{lesson.contract.name}: an item ends with the checks that hold it, (`test_…`): {item[:60]!r}"


def checks_of(lesson: Lesson) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", lesson.tests.read_text(), re.MULTILINE))


def _hints(lesson: Lesson, page: str):
    hints = pages.section(page, 2, "Hints")
    titles = list(lesson.groups) if lesson.draw else [f"Step {step.number}: {step.title}" for step in lesson.steps]
    found = [title for level, title in pages.headings(hints) if level == 3]
    if found != titles:
        yield f"'## Hints' must have these headings of level 3, from lesson.toml: {titles}, and has {found}"
        return
    for title in titles:
        levels = pages.folded(pages.section(hints, 3, title))
        if tuple(summary for summary, _ in levels) != HINTS or not all(inside for _, inside in levels):
            yield f"'### {title}' must have three <details> with the summaries: {', '.join(HINTS)}"
        if any("...  " in inside for _, inside in levels):
            yield f"'### {title}' must not be the solution with blanks"


def _last(page: str):
    rule = pages.sentences(pages.section(page, 2, RULE))
    if len(rule) != 1 or not re.search(r"\d", rule[0]):
        yield f"'## {RULE}' must be one sentence with a number that a run gave, and has {len(rule)} sentences"
    yield from _questions(pages.section(page, 2, "Five questions"), 5, "'## Five questions'")
    problems = len(pages.items(pages.section(page, 2, "Further problems")))
    if problems != 3:
        yield f"'## Further problems' must be a list of three, and has {problems}"
    if len(pages.items(pages.section(page, 2, "What people get wrong"))) < 3:
        yield "'## What people get wrong' must be a list of three mistakes or more"


def lines_of_the_solution(lesson: Lesson, page: str) -> list[str]:
    """Lines of code on the page, two or more in a row, that the reference has and the starter has not."""
    starter = {_bare(line) for line in lesson.starter.read_text().splitlines()}
    own = {_bare(line) for line in reference(lesson).splitlines()} - starter - {""}
    run, worst = [], []
    for line in pages.code(page).splitlines():
        run = [*run, line.strip()] if _bare(line) in own else [] if _bare(line) else run
        worst = max(worst, run, key=len)
    return worst if len(worst) > 1 else []


def _bare(line: str) -> str:
    return re.sub(r"\s+", "", line.partition("#")[0])


def wrong_with_teachers(lesson: Lesson, page: str) -> list[str]:
    """What teacher.md lacks of the pattern."""
    first, found = f"Teacher's page: {lesson.name[:2]} {lesson.title}", pages.headings(page)
    faults = [] if found[:1] == [(1, first)] else [f"it must begin with '# {first}'"]
    if tuple(title for level, title in found if level == 2) != TEACHER:
        faults.append(f"its sections must be, in this order: {', '.join(TEACHER)}")
    faults += [f"'## {title}' is empty" for title in TEACHER if not pages.section(page, 2, title).strip()]
    if "?" not in pages.section(page, 2, "Discussion"):
        faults.append("'## Discussion' must ask a question")
    exam = pages.section(page, 2, "Exam")
    if exam.count("?") < 2 or len(re.findall(r"\banswers?\b", exam, re.IGNORECASE)) < 2:
        faults.append("'## Exam' must have two questions, each with its answer, called Answer")
    return faults


@each_lesson
def test_a_lessons_page_follows_the_pattern(lesson):
    assert lesson.contract.exists(), f"write lessons/{lesson.name}/contract.md: what every solution must keep to"
    faults = wrong_with(lesson, (lesson.folder / "README.md").read_text(), lesson.contract.read_text())
    assert not faults, f"lessons/{lesson.name}/README.md:\n- " + "\n- ".join(faults)


@each_lesson
def test_a_lesson_has_a_page_for_teachers(lesson):
    file = lesson.folder / "teacher.md"
    assert file.exists(), f"write lessons/{lesson.name}/teacher.md: {', '.join(TEACHER)}"
    faults = wrong_with_teachers(lesson, file.read_text())
    assert not faults, f"lessons/{lesson.name}/teacher.md:\n- " + "\n- ".join(faults)


@each_lesson
def test_a_picture_has_words_for_who_cannot_see_it(lesson):
    shown = pages.IMAGE.findall((lesson.folder / "README.md").read_text())
    assert shown and not [file for words, file in shown if len(words) <= 100]


@functools.cache
def what_the_grader_says(lesson: Lesson) -> list[str]:
    """The texts that its words come from: the lesson's checks and the shared ones, what they must find in wrong
    submissions, errors of the reference, and what the grader says of errors."""
    files = [*lesson.tests.parent.glob("*.py"), *lesson.tests.parents[1].glob("*.py"),
             *(HOUSE / "zero_minimal/classroom").glob("*.py"), *(HOUSE / "zero_minimal/core").glob("*.py"),
             *(HOUSE / "zero_minimal/guards").glob("*.py"), *(HOUSE / "zero_minimal/processes").glob("*.py"),
             *(HOUSE / "zero_minimal/extensions").glob("*.py"), *(HOUSE / "zero_minimal/offloading").glob("*.py")]
    texts = [file.read_text() for file in files] + [reference(lesson)]
    # one text of several pieces, as the learner reads it
    return [re.sub(r'"\s*\n\s*r?f?"', "", text).replace("\\", "") for text in texts]


@each_lesson
def test_the_grader_says_what_the_teachers_page_quotes(lesson):
    """What it says of wrong submissions is tested where they are: mistakes.py."""
    table = " ".join(pages.section((lesson.folder / "teacher.md").read_text(), 2, "Stumbles").split())
    quoted = [part.strip() for quote in re.findall(r'"([^"]+)"', table) for part in quote.split("…")]
    assert not [words for words in quoted if not any(words in text for text in what_the_grader_says(lesson))]


# -------------------------------------------------------------------------------------------- what every page keeps to


@each_page
def test_links_lead_somewhere(page):
    for link in pages.links(page.read_text()):
        if re.match(r"\w+:", link):
            continue
        file, _, name = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{link}: there is no such file"
        if name:
            assert name in pages.anchors(target.read_text()), f"{link}: {target.name} has no heading with that anchor"


@each_page
def test_no_line_is_too_wide(page):
    """Tables and pictures, which cannot be broken, left out."""
    wide = [number for number, line in enumerate(page.read_text().splitlines(), 1)
            if len(line) > WIDTH and not line.startswith(("|", "!["))]
    assert not wide, f"lines of more than {WIDTH} characters: {wide}"


@each_page
def test_no_sentence_is_too_long(page):
    """Lists and tables left out. Who reads in a second language has lost the beginning before the end comes."""
    long = [sentence for sentence in pages.sentences(page.read_text()) if pages.words(sentence) > WORDS]
    assert not long, f"more than {WORDS} words, make two sentences of each:\n- " + "\n- ".join(long)


@functools.cache
def help_of(*program) -> str:
    """What a command or a file prints for --help."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        if program[0] == "command":
            importlib.import_module(f"zero_minimal.{COMMANDS[program[1]][0]}").main(["--help"])
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [program[1], "--help"])
                runpy.run_path(str(HOUSE / program[1]), run_name="__main__")
    return printed.getvalue()


def assert_exists(command: list[str]) -> None:
    """A command on a page: its name, its file, its flags."""
    said = " ".join(command)
    if "zero_minimal" in command:
        name, *rest = command[command.index("zero_minimal") + 1 :] or [""]
        if name == name.upper():
            return  # NAME, COMMAND: any of them
        assert name in COMMANDS, f"{said}: python -m zero_minimal knows {', '.join(COMMANDS)}"
        program = ("command", name)
    else:
        place, file = next((place, word) for place, word in enumerate(command) if word.endswith(".py"))
        assert (HOUSE / file).is_file(), f"{said}: there is no file {file}"
        program, rest = ("file", file), command[place + 1 :]
    for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert re.search(rf"{flag}(?![\w-])", help_of(*program) + " --help"), f"{said}: there is no flag {flag}"


@each_page
def test_commands_and_their_flags_exist(page):
    for command in pages.commands(page.read_text()):
        assert_exists(command)


# ---------------------------------------------------------------------------------------------- the tests can be failed

GRADIENTS = LESSONS["03_gradients"]
FOLDED = "<details><summary>{}</summary>\n\n{}\n</details>\n"
GOOD = "\n".join([
    "# 03 Gradients", "**The question.** Why keep them?", "",
    "**Start here.** Type", "", "    torchrun --nproc-per-node 2 zero_minimal/stage1.py --steps 5", "",
    "**Afterwards you can**", "", "- explain it;", "- predict it;", "- build\n  it.", "",
    "**Before you start**", "", *[FOLDED.format("What is a rank?", "[Lesson 00](../00_collectives/README.md).")] * 3,
    "**Time.** Read 20 minutes, notebook 15, write 60.", "",
    f"## {IDEA}", "![Gradients of two ranks over a step](../pictures/gradients.png)", "",
    "## A section of its own", "Text.", "",
    f"## {PREDICT}", FOLDED.format("What was measured", "9.6 MB"),
    "## Walk through it", "Text.", "", "    a drawing", "",
    "## The assignment", "", "| step | | points |", "|---|---|---|",
    *[f"| {step.number} | `step` | {step.points} |" for step in GRADIENTS.steps], "",
    "The grader holds you to [contract.md](contract.md).", "",
    "## Hints", *[f"### Step {step.number}: {step.title}\n" + "".join(FOLDED.format(hint, "Text.") for hint in HINTS)
                  for step in GRADIENTS.steps],
    "## Grade it", "", "    python -m zero_minimal grade lessons/03_gradients/assignment.py", "",
    "## What people get wrong", "- one", "- two", "- three", "",
    "## Five questions", *[FOLDED.format("Why?", "Because.")] * 5,
    "## What the big ones do", "Text.", "",
    "## Further problems", "1. one", "2. two", "3. three", "",
    f"## {RULE}", "A rank of 4 keeps a quarter.", "",
])
CONTRACT = "\n".join([f"# {KEEP_TO}: lesson 03", "",
                      *[f"- `step` returns nothing. (`{name}`)" for name in sorted(checks_of(GRADIENTS))], ""])
SOLUTION = "\n    whole = self.memory.whole(bucket)\n\n    bucket.fuse_gradients(whole)  # copied\n"


def test_a_page_that_follows_the_pattern_has_no_faults():
    assert wrong_with(GRADIENTS, GOOD, CONTRACT) == []


@pytest.mark.parametrize("old, new, says", [
    ("**The question.**", "The question.", r"no \*\*The question"),
    ("- predict it;\n", "", "list of three, and has 2"),
    ("- predict it;", "- Understand it;", "begins with a verb .*'Understand it;'"),
    ("What is a rank?", "Ranks", "must be a question, and is 'Ranks'"),
    ("[Lesson 00](../00_collectives/README.md)", "Lesson 00", "must link to where"),
    ("notebook 15", "look 15", "by part, and does not name: notebook"),
    ("20 minutes", "some minutes", "minutes in figures"),
    (f"## {IDEA}\n", f"## {IDEA}s\n", f"no section '## {IDEA}'"),
    (f"## {IDEA}\n", f"## Before\n\nText.\n## {IDEA}\n", "'## Before' stands before"),
    ("## Grade it", "## Own\nText.\n## Grade it", "'## Own': a section of a lesson's own"),
    ("## Walk through it\nText.\n\n    a drawing", "## Walk through it", "'## Walk through it' is empty"),
    ("![Gradients of two ranks over a step]", "![Gradients]", "alt text of .*gradients.png .* 'Gradients'"),
    ("![Gradients", "[Gradients", "picture in plain sight"),
    (FOLDED.format("What was measured", "9.6 MB"), "9.6 MB", "must fold what was measured"),
    ("| 2 | `step` | 25 |", "| 2 | `step` | 20 |", "must have a table with a row a step"),
    ("[contract.md](contract.md)", "contract.md", "must link contract.md"),
    ("    torchrun", "torch run", "[*][*]Start here[*][*] must hold a command"),
    ("## A section of its own\nText.", "## A section of its own\n" + "word " * BEFORE, "hour: it has 1[56]"),
    ("A rank of 4 keeps a quarter.", "A rank keeps a part.", "one sentence with a number"),
    ("lessons/03_gradients/assignment.py", "assignment.py", "must hold the command: python -m zero_minimal grade less"),
    ("### Step 2: update", "### Step 2: Update", "must have these headings of level 3, from lesson.toml"),
    ("A smaller example", "A hint", "must have three <details> with the summaries: A question, A smaller example"),
    ("Text.\n</details>", "whole = ...  # here\n</details>", "must not be the solution with blanks"),
    ("- two\n", "", "three mistakes or more"),
    ("Because.", "", "'## Five questions': nothing is folded below 'Why[?]'"),
    ("3. three\n", "", "must be a list of three, and has 2"),
    ("    a drawing\n", SOLUTION, "prints the solution: whole = self.memory.whole.bucket. / bucket.fuse"),
])
def test_what_a_page_lacks_is_named(old, new, says):
    assert old in GOOD
    faults = wrong_with(GRADIENTS, GOOD.replace(old, new), CONTRACT)
    assert any(re.search(says, fault) for fault in faults), faults


@pytest.mark.parametrize("old, new, says", [
    (f"{KEEP_TO}: lesson 03", KEEP_TO, "must begin with '# What every solution"),
    ("test_shards_hold", "test_shards_held", "names no check of the lesson"),
    ("- `step` returns nothing. (`test_shards_hold_the_mean_gradient`)\n", "", "does not say what this check holds"),
    (" (`test_shards_hold_the_mean_gradient`)", " `test_shards_hold_the_mean_gradient`!", "ends with the checks"),
])
def test_what_a_contract_lacks_is_named(old, new, says):
    assert old in CONTRACT
    assert any(says in fault for fault in wrong_with(GRADIENTS, GOOD, CONTRACT.replace(old, new)))


def test_a_picture_that_is_folded_is_none():
    picture = re.search(r"!\[.*\n", GOOD)[0]
    assert any("plain sight" in fault for fault in wrong_with(GRADIENTS, GOOD.replace(
        picture, FOLDED.format("Look", picture)), CONTRACT))


def test_what_a_teachers_page_lacks_is_named():
    first = f"# Teacher's page: 03 {GRADIENTS.title}"
    exam = "1. Why?\n   *Answer.* So.\n2. How?\n   *Answer.* So."
    texts = {"Discussion": "Why?", "Exam": exam, "Stumbles": "One.", "Rubric": "One.", "AI assistants": "One."}
    good = first + "".join(f"\n\n## {title}\n\n{text}" for title, text in texts.items())
    assert wrong_with_teachers(GRADIENTS, good) == []
    for old, new, says in (
        (first, "# 03", "must begin with"), ("## Stumbles", "### Stumbles", "sections must be"),
        ("## Rubric\n\nOne.", "## Rubric", "'## Rubric' is empty"),
        ("Why?\n\n## Exam", "Why.\n\n## Exam", "must ask a question"),
        ("2. How?\n   *Answer.* So.", "2. How?", "each with its answer"),
    ):
        assert old in good
        assert any(says in fault for fault in wrong_with_teachers(GRADIENTS, good.replace(old, new))), says


@pytest.mark.parametrize("command, says", [
    ("python -m zero_minimal grades lessons/00_collectives/assignment.py", "knows compare, plan"),
    ("python -m zero_minimal grade FILE --lessons 03_gradients", "there is no flag --lessons"),
    ("torchrun --nproc-per-node 2 zero_minimal/stage9.py", "there is no file zero_minimal/stage9.py"),
    ("torchrun --nproc-per-node 2 zero_minimal/stage2.py --bucket 3", r"there is no flag --bucket\b(?!-)"),
    ("python zero_minimal/stage2.py --steps=3 --bucket-mb 1", ""),
    ("python -m zero_minimal COMMAND", ""),
])
def test_a_command_that_does_not_exist_is_found(command, says):
    for page in (f"Text.\n\n    {command}\n", f"```\n{command}\n```", f"Type `{command}` here."):
        found = pages.commands(page)
        assert len(found) == 1
        if says:
            with pytest.raises(AssertionError, match=says):
                assert_exists(found[0])
        else:
            assert_exists(found[0])


def test_how_a_page_is_read():
    text = (
        "# One `a` & two\n\nFirst, of 6.4 MB. gloo is second? *Third!*\nit goes on\n\n- an item. Of two\n  lines\n\n"
        "| a table. |\n\nIn code:\n\n    # no heading. [no](link)\n\n```\n# nor this\n```\n## One `a` & two\n\n"
        "<details><summary>Why?</summary>\n\nSo.\n</details>\n"
    )
    assert pages.sentences(text) == ["First, of 6.4 MB.", "gloo is second?", "*Third!* it goes on", "In code:", "So."]
    assert pages.headings(text) == [(1, "One `a` & two"), (2, "One `a` & two")]
    assert pages.anchors(text) == {"one-a--two", "one-a--two-1"}
    assert pages.items(text) == ["an item. Of two lines"]
    assert pages.folded(text) == [("Why?", "So.")] and "So." not in pages.without_folded(text)
    assert pages.words("the 2 ranks — *send*, both") == 5
    assert pages.links("[a](b.md) ![c](d.png) `[no](e.md)`\n\n    [code](f.md)\n") == ["b.md", "d.png"]
