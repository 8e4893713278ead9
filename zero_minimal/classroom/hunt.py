"""python -m zero_minimal hunt FILE: points for the bug hunts, and the evidence against a wrong answer.

FILE is a copy of lessons/bug-hunts/answers.toml. The checker has no list of answers: signs.toml in the same folder
describes how each cause shows in the figures of a hunt's record, and what each experiment would show.
"""

import argparse
import difflib
import json
import tomllib
from pathlib import Path
from typing import NamedTuple

from jinja2 import DictLoader, Environment, StrictUndefined

from zero_minimal.classroom.hunt_figures import figures
from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.programs import report

FOLDER = HOUSE / "lessons/bug-hunts"
FOR_CAUSE, FOR_EXPERIMENT = 5, 3  # points per hunt


class Verdict(NamedTuple):
    """The result of one hunt."""

    points: int
    words: list[str]


class Checker:
    """The entries of signs.toml for each cause and each experiment, by name."""

    def __init__(self, file: Path):
        known = tomllib.loads(file.read_text(encoding="utf-8"))
        self.causes, self.experiments = known["causes"], known["experiments"]
        messages = {name: cause["against"] for name, cause in self.causes.items()}
        self.jinja = Environment(loader=DictLoader(messages | known["phrases"]), undefined=StrictUndefined,
                                 finalize=written)
        self.signs = {name: self.jinja.compile_expression(cause["sign"].strip(), undefined_to_none=False)
                      for name, cause in self.causes.items()}

    def shows(self, cause: str, seen: dict) -> bool:
        """Whether the figures of a record have the sign of this cause."""
        return bool(self.signs[cause](seen, shows=lambda other: self.shows(other, seen)))

    def against(self, cause: str, seen: dict) -> str:
        """The sign that this cause would have, and the figure found instead."""
        return " ".join(self.jinja.get_template(cause).render(seen).split())

    def decides(self, experiment: str, cause: str) -> bool:
        """Whether its result distinguishes this cause from a healthy run and from all its rivals."""
        return cause in self.experiments[experiment]["shows"] and not self.confused(experiment, cause)

    def confused(self, experiment: str, cause: str) -> list[str]:
        """Rivals for which it would show the same."""
        shows = self.experiments[experiment]["shows"]
        return [rival for rival in self.causes[cause].get("rivals", ()) if shows.get(rival) == shows.get(cause)]

    def no_decision(self, experiment: str, cause: str) -> str:
        """Why an experiment does not decide, for a learner who knows the cause."""
        known = self.experiments[experiment]
        words = f"with your cause, {experiment} would show: {known['shows'].get(cause, known['healthy'])}"
        if cause in known["shows"]:
            return f"{words}. So it would with {self.confused(experiment, cause)[0]}: it does not tell the two apart"
        why = f" ({known['though'][cause]})" if cause in known.get("though", {}) else ""
        return f"{words}, as in a healthy run{why}. So it tells nothing of your cause"

    def judged(self, seen: dict, answer: dict[str, str]) -> Verdict:
        """An experiment counts only with the right cause, since it must decide on that cause. "why" is only checked for
        presence."""
        cause, experiment = answer.get("cause", ""), answer.get("experiment", "")
        if not cause:
            return Verdict(0, ["no cause yet" if not experiment
                               else "name the cause first: an experiment tests a guess"])
        if not self.shows(cause, seen):
            return Verdict(0, [f"{cause} is not it: {self.against(cause, seen)}"])
        if not experiment:
            return Verdict(FOR_CAUSE, [f"{cause}: the record shows it. Which experiment decides?"])
        if not self.decides(experiment, cause):
            return Verdict(FOR_CAUSE, [f"{cause}: the record shows it", self.no_decision(experiment, cause)])
        missing = [] if answer.get("why", "").strip() else [
            "why is empty: write which figure, or which setting, excludes the likely rival. Your teacher reads it"]
        return Verdict(FOR_CAUSE + FOR_EXPERIMENT, [
            f"{cause}: the record shows it",
            f"{experiment} decides. It would show: {self.experiments[experiment]['shows'][cause]}", *missing])

    def read(self, file: Path, hunts: list[str]) -> dict[str, dict[str, str]]:
        """The answers, {hunt: {"cause": …, "experiment": …, "why": …}}. Raises: ValueError, saying what to fix."""
        try:
            answers = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {file} ({getattr(error, 'strerror', error)}): name your answers.toml"
                             ) from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{file} is no TOML: {error}. A line is: cause = \"name\"") from error
        names = {"cause": self.causes, "experiment": self.experiments, "why": None}  # "why" is free text
        for hunt, answer in answers.items():
            if hunt not in hunts or not isinstance(answer, dict):
                raise ValueError(f"{file}: [{hunt}] is no hunt: they are {', '.join(hunts)}")
            for key, value in answer.items():
                if key not in names:
                    raise ValueError(f"{file}, [{hunt}]: there is no {key!r}: a hunt has cause, experiment and why")
                if not isinstance(value, str):
                    raise ValueError(f"{file}, [{hunt}]: {key} must be {'text' if key == 'why' else 'one name'} in "
                                     f"quotes, not {value!r}")
                if value and names[key] is not None and value not in names[key]:
                    near = difflib.get_close_matches(value, names[key], n=1)
                    meant = f": did you mean {near[0]}?" if near else "; the names are in lessons/bug-hunts/README.md"
                    raise ValueError(f"{file}, [{hunt}]: there is no {key} {value!r}{meant}")
        return answers


def written(value):
    """A figure as shown in a message: four digits, or all digits of a count; for a list, each of them."""
    if isinstance(value, list):
        return ", ".join(map(written, value))
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def main(arguments: list[str]) -> int | str:
    """Exit code: 0 for full points, 1 for fewer, 2 for an unreadable file."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_minimal hunt", allow_abbrev=False,
        description="Points for your answers to the bug hunts, and the evidence against a wrong one.")
    parser.add_argument("file", type=Path, help="your answers: lessons/bug-hunts/answers.toml, filled in")
    parser.add_argument("--hunt", metavar="NN", type=lambda name: name.zfill(2), help="only this hunt: 03, or 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the points into this file")
    flags = parser.parse_args(arguments)
    hunts = {file.stem: file for file in sorted(FOLDER.glob("[0-9][0-9].json"))}
    checker = Checker(FOLDER / "signs.toml")
    try:
        answers = checker.read(flags.file, list(hunts))
    except ValueError as error:
        print(error)
        return 2
    if flags.hunt and flags.hunt not in hunts:
        print(f"there is no hunt {flags.hunt}: they are {', '.join(hunts)}")
        return 2
    wanted = [flags.hunt] if flags.hunt else list(hunts)
    verdicts = {name: checker.judged(figures(json.loads(hunts[name].read_text(encoding="utf-8"))),
                                     answers.get(name, {})) for name in wanted}
    for name, verdict in verdicts.items():
        lines = [f"hunt {name}: {verdict.points} of {FOR_CAUSE + FOR_EXPERIMENT} points"]
        report.say("\n".join([*lines, *(f"- {words}" for words in verdict.words)]))
    points, most = sum(verdict.points for verdict in verdicts.values()), len(wanted) * (FOR_CAUSE + FOR_EXPERIMENT)
    print(f"\n{points} of {most} points")
    if flags.json:
        flags.json.write_text(json.dumps({
            "points": points, "of": most, "hunts": {name: one._asdict() for name, one in verdicts.items()}}, indent=1))
    return 0 if points == most else 1
