"""Page: a story as one HTML file, which needs nothing but itself. The frame, its style and its script are page.html."""

import base64
import hashlib
import html
import re
from pathlib import Path

from zero_minimal.classroom.report.chart import charts
from zero_minimal.classroom.report.markup import Html, tag, text
from zero_minimal.classroom.report.story import LOOKS, Grid, Step, Story

FRAME = Path(__file__).with_name("page.html")


def page(title: str, file: str, points: list[dict], story: Story | None, note: str = "") -> str:
    """The whole file.

    Args:
        points: a dict a step, as in results.json.
        story: of the run; None if there is none. note: why.
    """
    frame = FRAME.read_text()
    holes = {
        "title": text(title), "file": text(file), "points": _points(points), "first": _first(story, note),
        "run": _run(story) if story and story.steps else text(),
        "style_hash": _hash(frame, "style"), "script_hash": _hash(frame, "script"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], frame)  # once: what is put in is not looked at


def _hash(frame: str, name: str) -> Html:
    """Of the frame's style or script, for the Content-Security-Policy: the browser takes no other."""
    inside = re.search(rf"<{name}>(.*?)</{name}>", frame, re.DOTALL)[1]
    return Html("sha256-" + base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode())


def _points(points: list[dict]) -> Html:
    rows = [tag("tr", tag("th", f"{entry['number']} {entry['name']}", scope="row"),
                tag("td", f"{entry['score']:g} of {entry['max_score']:g}", class_="number"),
                tag("td", entry["output"] or ("all points" if entry["score"] == entry["max_score"] else ""),
                    class_="message")) for entry in points]
    score, most = (sum(entry[key] for entry in points) for key in ("score", "max_score"))
    rows.append(tag("tr", tag("th", "together", scope="row"), tag("td", f"{score:g} of {most:g}", class_="number"),
                    tag("td", "")))
    head = tag("tr", *(tag("th", name, scope="col") for name in ("step", "points", "what the grader says")))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="wide")


def _first(story: Story | None, note: str) -> Html:
    heading = tag("h2", "Where it first departs from what is expected", id="first-departure")
    if story is None or not story.steps:
        inside = tag("p", note or "No run of this lesson is drawn.")
    elif story.first_departure is None:
        inside = tag("p", "Nowhere, in this small run: every step is as expected. The points are those of the tests, "
                     "which look at more than one small run can show.")
    else:
        number = story.first_departure
        inside = text(tag("p", story.steps[number].departures[0], class_="departs"),
                      tag("p", tag("a", f"Go to that step: {_name(story, number)}", href=f"#step-{number + 1}")))
    return tag("section", heading, inside, aria_labelledby="first-departure")


def _name(story: Story, number: int) -> str:
    for part in story.parts:
        if number < len(part.steps):
            return f"{part.title}, {part.steps[number].title}" if part.title != part.steps[number].title else part.title
        number -= len(part.steps)
    raise IndexError(number)


# -------------------------------------------------------------------------------------------------------------- the run


def _run(story: Story) -> Html:
    opens, parts, entries, number = story.first_departure, [], [], 0
    for place, part in enumerate(story.parts, 1):
        wrong = any(step.departures for step in part.steps)
        entries.append(tag("li", tag("a", part.title, href=f"#step-{number + 1}"),
                           " (departs)" if wrong else " (as expected)"))
        steps = [_step(story, number + index, step) for index, step in enumerate(part.steps)]
        number += len(part.steps)
        parts.append(tag("section", tag("h3", part.title, id=f"part-{place}"), tag("p", part.about, class_="quiet"),
                         *steps, class_="part", aria_labelledby=f"part-{place}"))
    return tag(
        "section", tag("h2", "What your ranks did", id="run"),
        tag("p", story.about), tag("p", story.legend, class_="quiet"),
        tag("nav", tag("h3", "Parts", id="parts"), tag("ol", *entries), aria_labelledby="parts"), charts(story.steps),
        _controls(opens), *parts, aria_labelledby="run")


def _controls(opens: int | None) -> Html:
    """Hidden until the script runs: without it all steps are there at once."""
    names = {"first": "First step", "previous": "Previous step", "next": "Next step", "last": "Last step"}
    if opens is not None:
        names["departure"] = "Step that first departs"
    buttons = [tag("button", words, type="button", id=name) for name, words in names.items()]
    return tag("div", tag("h3", "Step by step", id="stepping"), *buttons,
               tag("span", "Keys: left and right arrow.", class_="quiet"),
               tag("p", "", id="said", role="status", aria_live="polite"),
               class_="controls", role="group", aria_labelledby="stepping", hidden=True, data_opens=opens or 0)


def _step(story: Story, number: int, step: Step) -> Html:
    departures = [tag("p", tag("strong", "Departs from what is expected: "), words, class_="departs")
                  for words in step.departures]
    said = f"Step {number + 1} of {len(story.steps)}: {_name(story, number)}. " + (
        f"It departs from what is expected: {step.departures[0]}" if step.departures else "As expected.")
    return tag("article", tag("h4", f"{number + 1}. {step.title}", id=f"title-{number + 1}"), *departures, _lines(step),
               *map(_grid, step.grids), _memory(step), id=f"step-{number + 1}", tabindex="-1",
               aria_labelledby=f"title-{number + 1}", data_said=said)


def _lines(step: Step) -> Html | None:
    if not step.lines:
        return None
    names = ("who", "what your ranks did", "expected", "the same?")
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    rows = [tag("tr", tag("th", line.who, scope="row"), tag("td", line.did), tag("td", line.expected),
                tag("td", "it differs" if line.departs else "as expected"), class_="differs" if line.departs else None)
            for line in step.lines]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="lines"), class_="wide")


def _grid(grid: Grid) -> Html:
    head = tag("tr", tag("td", ""), *(tag("th", column, scope="col") for column in grid.columns))
    rows = [tag("tr", tag("th", name, scope="row"), *(
        tag("td", cell.words, class_=cell.look if cell.look in LOOKS and cell.look else None) for cell in cells))
        for name, cells in grid.rows]
    return tag("div", tag("table", tag("caption", grid.title), tag("thead", head), tag("tbody", *rows), class_="grid"),
               class_="wide")


def _memory(step: Step) -> Html | None:
    categories = [name for name in ("parameters", "optimizer", "gradients", "activations", "other", "buffers")
                  if any(name in memory for memory in step.memory)]
    if not categories:
        return None
    head = tag("tr", tag("td", ""), *(tag("th", name, scope="col") for name in categories))
    rows = [tag("tr", tag("th", f"rank {rank}", scope="row"), *(
        tag("td", f"{memory[name]:,}" if name in memory else "–", class_="number") for name in categories))
        for rank, memory in enumerate(step.memory)]
    return tag("div", tag("table", tag("caption", "Memory, in bytes"), tag("thead", head), tag("tbody", *rows)),
               class_="wide")


def plain(page_text: str) -> str:
    """A page's text without tags, for tests and for whoever greps."""
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)>.*?</\1>", "", page_text, flags=re.DOTALL)))
