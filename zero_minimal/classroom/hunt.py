"""python -m zero_minimal hunt FILE: points for the bug hunts, and what speaks against a wrong answer.

FILE is a copy of lessons/bug-hunts/answers.toml. The checker has no list of answers: it holds each cause against what
the hunt's record shows (hunt_causes.py), and each experiment against what it would tell apart (hunt_experiments.py).
"""

import argparse
import difflib
import json
import tomllib
from pathlib import Path
from typing import NamedTuple

from zero_minimal.classroom.hunt_causes import CAUSES
from zero_minimal.classroom.hunt_experiments import EXPERIMENTS, against, decides
from zero_minimal.classroom.hunt_facts import Facts
from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.programs import report

FOLDER = HOUSE / "lessons/bug-hunts"
FOR_CAUSE, FOR_EXPERIMENT = 5, 3  # points of a hunt
KEYS = {"cause": CAUSES, "experiment": EXPERIMENTS, "why": None}  # with the names that are known; "why" is free text


class Verdict(NamedTuple):
    """On one hunt."""

    points: int
    words: list[str]


def main(arguments: list[str]) -> int | str:
    """0 for full points, 1 for fewer, 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_minimal hunt", allow_abbrev=False,
        description="Points for your answers to the bug hunts, and what speaks against a wrong one.")
    parser.add_argument("file", type=Path, help="your answers: lessons/bug-hunts/answers.toml, filled in")
    parser.add_argument("--hunt", metavar="NN", type=lambda name: name.zfill(2), help="this hunt alone: 03, or 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points into this file, too")
    flags = parser.parse_args(arguments)
    hunts = {file.stem: file for file in sorted(FOLDER.glob("[0-9][0-9].json"))}
    try:
        answers = read(flags.file, list(hunts))
    except ValueError as error:
        print(error)
        return 2
    if flags.hunt and flags.hunt not in hunts:
        print(f"there is no hunt {flags.hunt}: they are {', '.join(hunts)}")
        return 2
    wanted = [flags.hunt] if flags.hunt else list(hunts)
    verdicts = {name: judged(Facts.read(hunts[name]), answers.get(name, {})) for name in wanted}
    for name, verdict in verdicts.items():
        lines = [f"hunt {name}: {verdict.points} of {FOR_CAUSE + FOR_EXPERIMENT} points"]
        report.say("\n".join([*lines, *(f"- {words}" for words in verdict.words)]))
    points, most = sum(verdict.points for verdict in verdicts.values()), len(wanted) * (FOR_CAUSE + FOR_EXPERIMENT)
    print(f"\n{points} of {most} points")
    if flags.json:
        flags.json.write_text(json.dumps({
            "points": points, "of": most, "hunts": {name: one._asdict() for name, one in verdicts.items()}}, indent=1))
    return 0 if points == most else 1


def read(file: Path, hunts: list[str]) -> dict[str, dict[str, str]]:
    """The answers, {hunt: {"cause": …, "experiment": …}}. Raises: ValueError, saying what to mend."""
    try:
        answers = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file} ({getattr(error, 'strerror', error)}): name your answers.toml") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is no TOML: {error}. A line is: cause = \"name\"") from error
    for hunt, answer in answers.items():
        if hunt not in hunts or not isinstance(answer, dict):
            raise ValueError(f"{file}: [{hunt}] is no hunt: they are {', '.join(hunts)}")
        for key, value in answer.items():
            if key not in KEYS:
                raise ValueError(f"{file}, [{hunt}]: there is no {key!r}: a hunt has cause, experiment and why")
            if not isinstance(value, str):
                raise ValueError(f"{file}, [{hunt}]: {key} must be {'text' if key == 'why' else 'one name'} in quotes, "
                                 f"not {value!r}")
            if value and KEYS[key] is not None and value not in KEYS[key]:
                near = difflib.get_close_matches(value, KEYS[key], n=1)
                meant = f": did you mean {near[0]}?" if near else "; the names are in lessons/bug-hunts/README.md"
                raise ValueError(f"{file}, [{hunt}]: there is no {key} {value!r}{meant}")
    return answers


def judged(facts: Facts, answer: dict[str, str]) -> Verdict:
    """An experiment counts only with the right cause: without it, nobody knows what it is to decide. "why" is only
    looked for."""
    cause, experiment = answer.get("cause", ""), answer.get("experiment", "")
    if not cause:
        return Verdict(0, ["no cause yet" if not experiment else "name the cause first: an experiment tests a guess"])
    if not CAUSES[cause].sign(facts):
        return Verdict(0, [f"{cause} is not it: {CAUSES[cause].against(facts)}"])
    if not experiment:
        return Verdict(FOR_CAUSE, [f"{cause}: the record shows it. Which experiment decides?"])
    if not decides(experiment, cause):
        return Verdict(FOR_CAUSE, [f"{cause}: the record shows it", against(experiment, cause)])
    missing = [] if answer.get("why", "").strip() else [
        "why is empty: write which figure, or which setting, excludes the likely rival. Your teacher reads it"]
    return Verdict(FOR_CAUSE + FOR_EXPERIMENT, [
        f"{cause}: the record shows it",
        f"{experiment} decides. It would show: {EXPERIMENTS[experiment].shows[cause]}", *missing])
