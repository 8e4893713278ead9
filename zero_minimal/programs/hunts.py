"""Hunts: records and pictures of the twelve broken runs of lessons/bug-hunts, each with the healthy run.

    python -m zero_minimal.programs.hunts lessons/bug-hunts

trains the broken code, which is in tests/bug_hunts, where learners do not read it by accident, and the right code. It
writes NN.json and NN.png. Losses, norms, bytes and the order of events are the same on any machine (up to the last
digits); seconds are this machine's. With --draw it only draws.
"""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import cloudpickle

from zero_minimal.meters.run_record import RunRecord, watched
from zero_minimal.pictures import style
from zero_minimal.pictures.hunt_panels import draw_hunt
from zero_minimal.processes import interrupts, ranks
from zero_minimal.programs import figures, progress
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Parser

BROKEN = Path(__file__).parents[2] / "tests/bug_hunts/broken.py"
SIDES = ("healthy", "broken")


def broken_code():
    """The module of the broken code. Its functions are sent to ranks by value. Raises: FileNotFoundError."""
    name = "bug_hunts_broken"
    if name not in sys.modules:
        if not BROKEN.exists():
            raise FileNotFoundError(f"there is no {BROKEN}, which holds the broken code: take a whole copy")
        spec = importlib.util.spec_from_file_location(name, BROKEN)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)
    return sys.modules[name]


def watched_run(build, hunt, side) -> dict:
    """One run of a hunt on this rank; returns what the instruments recorded."""
    with ranks.start() as rank:
        zero = build(side, hunt.settings, rank, watched)
        batches = side.batches(hunt.settings, rank.rank)
        record = RunRecord(zero, rank)
        observers = [record, *side.around(zero, hunt.settings, rank)]
        for losses in loop.steps(zero, batches, hunt.settings, observers=observers):
            record.heard(losses)
        return record.report()


def recorded(hunt) -> dict:
    """A hunt's file: its settings, and the reports of all ranks of both runs."""
    build = broken_code().build
    runs = {name: with_one_time(ranks.run(watched_run, hunt.ranks, build, hunt, getattr(hunt, name), device="cpu",
                                          timeout=300)) for name in SIDES}
    stage = int(hunt.healthy.stage.__name__[-1])
    return {"stage": stage, "ranks": hunt.ranks, "settings": asdict(hunt.settings), "runs": rounded(runs)}


def with_one_time(reports: list[dict]) -> list[dict]:
    """The ranks' reports with only the quickest timed step, which was disturbed least."""
    steps = [max(times, key=lambda each: each["seconds"])["seconds"]
             for times in zip(*(report["times"] for report in reports), strict=True)]
    for report in reports:
        report["time"] = report.pop("times")[steps.index(min(steps))]
    return reports


def rounded(value):
    """Round numbers to seven digits, so that a file is readable and small."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


@interrupts.program
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Record the runs of the bug hunts again, and draw them.")
    parser.add_argument("folder", type=Path, help="the hunts' folder: lessons/bug-hunts")
    parser.add_argument("--draw", action="store_true", help="only draw, from the existing records")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="only these hunts")
    parser.add_argument("--others", type=Path, metavar="FILE",
                        help="also record the causes that no hunt has, into this file")
    flags = parser.parse_args(arguments)
    if not flags.folder.is_dir():
        parser.error(f"there is no folder {flags.folder}: name the hunts', lessons/bug-hunts")
    if not flags.draw:
        record_all(flags, parser)
    for file in sorted(flags.folder.glob("[0-9][0-9].json")):
        if not flags.only or file.stem in flags.only:
            style.save(draw_hunt(json.loads(file.read_text(encoding="utf-8"))), file.with_suffix(".png"))


def record_all(flags, parser) -> None:
    """Write the files that the flags request."""
    try:
        broken = broken_code()
    except FileNotFoundError as error:
        parser.error(str(error))
    known = broken.HUNTS | (broken.OTHERS if flags.others else {})
    if unknown := set(flags.only) - set(known):
        parser.error(f"there is no hunt {', '.join(sorted(unknown))}: they are {', '.join(known)}")
    wanted = {name: hunt for name, hunt in known.items() if not flags.only or name in flags.only}
    for name, hunt in progress.bar(wanted.items(), name="bug hunts", total=len(wanted), unit="hunt"):
        found = recorded(hunt)
        if name in broken.HUNTS:
            (flags.folder / f"{name}.json").write_text(figures.on_few_lines(found), encoding="utf-8")
            continue
        before = json.loads(flags.others.read_text(encoding="utf-8")) if flags.others.exists() else {}
        flags.others.write_text(figures.on_few_lines(before | {name: found}), encoding="utf-8")


if __name__ == "__main__":
    main()
