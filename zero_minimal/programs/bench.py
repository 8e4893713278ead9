"""Benchmark: step times compared with other implementations of data parallelism, and what a step sends and holds.

    python -m zero_minimal bench --model 11M,50M --plot bench.png

All runs have the same model, data, seeds and fused AdamW; each has its own bucket size, unless --bucket-mb gives one
for all. Times are comparable because of these rules:

    in turn      A B C, A B C, …, each time in fresh ranks. A machine's speed drifts over minutes; so a run is divided
                 by DDP's of the same round, and the median of these ratios is reported, with their spread
    the step     lasts from one barrier to the next: the slowest rank decides, and work still under way when step()
                 returns is counted. Warm-up steps are left out; a run's time is the median of its other steps
    one core     runs each rank with all its threads; if there are fewer cores than ranks, they share
    the losses   of each rank must be DDP's within 1e-5: a faster wrong result does not count
    alone        the share of the processors that other programs took is reported: if above a few percent, wait

The ledger's peak and the bytes sent come from a separate short run, since watching slows a step. Bytes on the wire and
resident memory are the operating system's figures for the timed runs. Resident memory is the peak (VmHWM) minus what
was resident just before the model was built: Python, torch, the process group, the batches. (So it includes some 25 MB
of code and scratch that any training first touches.) On a GPU it is what torch's allocator reserved. In each round the
rank with the highest figure counts; the median of the rounds is reported.

    python -m zero_minimal bench --link 100mbit,200mbit,1gbit --plot link.png

puts half of the ranks on a second node, behind a link of that speed (two_nodes.py). On a slow link, a stage spends more
time on sending than on computing, on a fast link less. There the ranks meet only after all steps: the next step can
hide collectives that a step leaves under way (late_gather.py).
"""

import argparse
import contextlib
import os
import statistics
import sys
from dataclasses import replace

import torch

from zero_minimal.meters.observer import MEMORY_STEPS, TRAFFIC_STEPS
from zero_minimal.meters.timing import ratios, run_seconds, time_steps, watch_steps
from zero_minimal.paper import formulas
from zero_minimal.pictures import style
from zero_minimal.pictures.benchmark import draw_benchmark
from zero_minimal.processes import ranks
from zero_minimal.programs import peers, progress, report, scaling, two_nodes
from zero_minimal.programs.registry import CONTENDERS, REFERENCE
from zero_minimal.programs.scaling import Point
from zero_minimal.workload import data
from zero_minimal.workload.settings import Parser, Settings, add_device, output_file, picture_file, positive

OPPONENTS = {  # besides DDP: the peers with which a stage is compared
    "stage 0": ["DeepSpeed 0"],
    "stage 1": ["ZeroRedundancy", "DeepSpeed 1"],
    "stage 2": ["ZeroRedundancy", "FSDP2 kept", "DeepSpeed 2"],
    "late 1": ["stage 1"],
    "late 2": ["stage 2"],
    "kept 3": ["stage 3"],
    "stage 3": ["FSDP2", "DeepSpeed 3"],
}
SAME_LOSS = 1e-5  # relative
QUIET = 0.05  # share of the processors that other programs may take before times are unreliable


def measure(point: Point, names: list[str], warm_up: int, repeats: int, device: str, bar: progress.Bar) -> list[dict]:
    """All contenders at one point, in turn: one row each (see `row`).

    Args: names are of CONTENDERS, the REFERENCE first.
    A peer that does not run here is left out, with the reason on stderr; an error of one of our stages is raised.
    Raises: ValueError if a contender's losses are not the reference's.
    """

    def run(name: str, purpose: str, function, *args, **options) -> list[dict]:
        options |= point.options
        bar.set_description(f"{point.describe()}: {name}, {purpose}")
        try:
            return ranks.run(function, point.ranks, CONTENDERS[name], *args, timeout=3600, device=device, **options)
        finally:
            bar.update()

    watched, timed = {}, {}
    for name in names:
        try:
            short = replace(point.settings, steps=MEMORY_STEPS + TRAFFIC_STEPS)
            watched[name] = run(name, "memory and traffic", watch_steps, short)
        except ranks.RankError as error:
            if name == REFERENCE or name in OPPONENTS:
                raise
            bar.write(f"{name} does not run here:\n{error}", file=sys.stderr)
    with two_nodes.Pair(point.link) if point.link else contextlib.nullcontext() as pair:
        place = {"before_join": pair.enter} if pair else {}
        for repeat in range(repeats):
            for name in watched:
                words = f"round {repeat + 1} of {repeats}"
                results = run(name, words, time_steps, point.settings, warm_up, one_by_one=not pair, **place)
                timed.setdefault(name, []).append(results)
                check_losses(name, results, timed[REFERENCE][repeat])
    seconds = {name: [run_seconds(results) for results in rounds] for name, rounds in timed.items()}
    parameters = watched[REFERENCE][0]["parameters"]
    return [row(point, name, parameters, watched[name], timed[name], seconds) for name in watched]


def check_losses(name: str, results: list[dict], reference: list[dict]) -> None:
    """Raise ValueError if a rank's losses are not those of the same rank of the reference.

    Ranks that do not communicate diverge after their first update; until then they agree.
    """
    steps = 1 if len(results) > 1 and not communicates(name) else len(results[0]["losses"])
    for rank, (result, expected) in enumerate(zip(results, reference, strict=True)):
        pairs = zip(result["losses"], expected["losses"], strict=True)
        for step, (loss, right) in list(enumerate(pairs))[:steps]:
            if not abs(loss - right) <= SAME_LOSS * abs(right):  # also catches NaN
                raise ValueError(
                    f"{name} computes something else than {REFERENCE}, so their times cannot be compared: "
                    f"on rank {rank} its loss in step {step} is {loss}, and {REFERENCE}'s is {right}"
                )


def communicates(name: str) -> bool:
    """Whether this contender sends anything."""
    return getattr(CONTENDERS[name], "communicates", True)


def row(point: Point, name: str, parameters: int, watched: list[dict], timed: list[list[dict]], seconds: dict) -> dict:
    """What --json writes for one contender at one point. Memory and traffic are those of the rank with the most."""
    settings, first = point.settings, watched[0]
    step_seconds = statistics.median(seconds[name])
    expected = formulas.traffic(first["theory_stage"], parameters, point.ranks, settings.dtype)
    return {
        "name": name,
        "model": point.model,
        "parameters": parameters,
        "layers": settings.layers,
        "hidden": settings.hidden,
        "sequence_tokens": settings.sequence,
        "batch_sequences_per_rank": settings.batch,
        "ranks": point.ranks,
        "sweeps": point.sweeps,
        "link_bits_per_second": two_nodes.bits(point.link) if point.link else None,
        "bucket_mib": point.bucket_mb,
        "dtype": settings.dtype,
        "device": first["device"],
        "backend": first["backend"],
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "timed_steps": settings.steps,
        "rounds": len(timed),
        "step_seconds": step_seconds,
        "step_seconds_by_round": seconds[name],
        "ratios": {
            other: ratios(seconds[name], seconds[other])
            for other in (REFERENCE, *OPPONENTS.get(name, [])) if other in seconds
        },
        "others_cpu_share": others_share(timed),
        "tokens_per_second": settings.tokens_per_step(point.ranks) / step_seconds,
        "wire_bytes_per_step": over_rounds("wire_bytes", timed),
        "sent_bytes_per_step": max(one["traffic"]["sent_bytes"] for one in watched),
        "theory_bytes_per_step": expected if communicates(name) else 0,
        "peak_ledger_bytes": max(one["memory"]["peak"] for one in watched),
        "peak_resident_bytes": over_rounds("resident_bytes", timed),
        "losses": timed[0][0]["losses"],
    }


def over_rounds(field: str, timed: list[list[dict]]) -> float | None:
    """The median over the rounds of the highest figure of all ranks. None if it is unknown here."""
    rounds = [[result[field] for result in results] for results in timed]
    return None if None in rounds[0] else statistics.median(map(max, rounds))


def others_share(timed: list[list[dict]]) -> float | None:
    """Share of this machine's processors that other programs took during the runs. None if it is unknown."""
    if timed[0][0]["machine_seconds"] is None:
        return None
    busy = sum(results[0]["machine_seconds"] for results in timed)
    own = sum(result["cpu_seconds"] for results in timed for result in results)
    elapsed = sum(results[0]["elapsed_seconds"] for results in timed)
    return max(0.0, (busy - own) / (os.cpu_count() * elapsed))


# ------------------------------------------------------------------------------------------------------------- tables


def describe(rows: list[dict]) -> str:
    """The rows of one point: a table of all contenders, and one of our stages compared with their peers."""
    first = rows[0]
    link = f", half of them behind a link of {link_words(first)}" if first.get("link_bits_per_second") else ""
    buckets = f"; buckets of {first['bucket_mib']:g} MiB" if first.get("bucket_mib") else ""
    head = (
        f"\nGPT of {first['parameters']:,} parameters, layers × width {first['layers']} × {first['hidden']}, "
        f"{first['dtype']}, N = {first['ranks']} on {first['device']}, {first['backend']}{link}; a step of a rank is "
        f"{first['batch_sequences_per_rank']} × {first['sequence_tokens']} tokens; "
        f"rounds × steps: {first['rounds']} × {first['timed_steps']}{buckets}"
    )
    alone = ["the wire alone"] if first.get("link_bits_per_second") else []  # × DDP: no stage can hide this
    times = [["", "ms a step", "× DDP", "min", "quartiles", "max", *alone]]
    reference = next(row["step_seconds"] for row in rows if row["name"] == REFERENCE)
    sizes = [["MB", "on the wire", "sent", "formula", "peak by the ledger", "peak, resident"]]
    for row in rows:
        times.append([row["name"], f"{row['step_seconds'] * 1000:.1f}", *spread_cells(row["ratios"][REFERENCE]),
                      *([two_nodes.alone(row, reference)] if alone else [])])
        sizes.append([row["name"], *(report.megabytes(row[field], 1) for field in (
            "wire_bytes_per_step", "sent_bytes_per_step", "theory_bytes_per_step", "peak_ledger_bytes",
            "peak_resident_bytes",
        ))])
    parts = [head, report.table(times), report.table(sizes)]
    duels = [[f"{row['name']} × {other}", *spread_cells(ratio)]
             for row in rows for other, ratio in row["ratios"].items() if other != REFERENCE]
    if duels:
        parts.append(report.table([["times of a step", "median", "min", "quartiles", "max"], *duels]))
    busiest = max(row["others_cpu_share"] or 0.0 for row in rows)
    if busiest > QUIET:
        parts.append(f"Other programs took up to {busiest:.0%} of the processors: do not trust the times.")
    return "\n\n".join(parts)


def describe_links(rows: list[dict]) -> str:
    """Times divided by DDP's, a column for each speed of the link."""
    speeds = list(dict.fromkeys(map(link_words, rows)))
    cells = {(row["name"], link_words(row)): f"{row['ratios'][REFERENCE]['median']:.3f}" for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    table = [[name, *(cells.get((name, speed), "") for speed in speeds)] for name in names]
    return "\n" + report.table([["time of a step × DDP", *speeds], *table])


def link_words(row: dict) -> str:
    """The speed of the link between the two nodes: "200 Mbit/s"."""
    return f"{row['link_bits_per_second'] / 1e6:g} Mbit/s"


def spread_cells(ratio: dict[str, float]) -> list[str]:
    """Median, minimum, quartiles and maximum of a ratio, for a table."""
    quartiles = f"{ratio['lower_quartile']:.3f} – {ratio['upper_quartile']:.3f}"
    return [f"{ratio['median']:.3f}", f"{ratio['min']:.3f}", quartiles, f"{ratio['max']:.3f}"]


# ------------------------------------------------------------------------------------------------------------ command


def names_of_contenders(text: str) -> list[str]:
    """The type of --only: contenders by name ("stage2,fsdp2"), in the order of CONTENDERS, after the reference."""
    known = {word_for(name): name for name in available()}
    wanted = list(map(word_for, text.split(",")))
    for word in wanted:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word!r} is no contender here: choose from {', '.join(known)}")
    return [name for key, name in known.items() if name == REFERENCE or key in wanted]


def word_for(name: str) -> str:
    """A contender's name as one word, for flags: "stage2"."""
    return name.replace(" ", "").lower()


def available() -> list[str]:
    """The contenders on this machine: DeepSpeed only if it is installed."""
    return [name for name, contender in CONTENDERS.items()
            if not issubclass(contender, peers.DeepSpeed) or contender.is_installed()]


def listed(kind):
    """The type of a flag that takes several values, separated by commas; `kind` checks each."""

    def values(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            kind(word)
        return list(dict.fromkeys(words))

    return values


def sweep(name: str) -> None:
    """Check the name of a sweep."""
    if name not in scaling.SWEEPS:
        raise argparse.ArgumentTypeError(f"{name!r} is no sweep: choose from {', '.join(scaling.SWEEPS)}")


def make_parser() -> Parser:
    """The flags."""
    parser = Parser(prog="python -m zero_minimal bench",
                    description="Time stages 0 to 3 and their peers on the same work, in turn, each in fresh ranks.")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="processes to train with (default: 2)")
    parser.add_argument("--model", type=listed(scaling.shape), default=["11M"], metavar="SIZE[,SIZE]",
                        help=f"{', '.join(scaling.MODELS)}, or layers and width, as in 6x384 (default: 11M)")
    parser.add_argument("--sequence", type=positive, default=128, metavar="TOKENS", help="in a sequence (default: 128)")
    parser.add_argument("--batch", type=positive, default=4, metavar="B", help="sequences per rank (default: 4)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="dtype of parameters (default: fp32)")
    parser.add_argument("--steps", type=positive, metavar="S", help="timed steps of a run (default: 20; with --link 6)")
    parser.add_argument("--warm-up", type=positive, metavar="S", help="steps before them (default: 4; with --link 2)")
    parser.add_argument("--repeats", type=positive, metavar="R", help="runs of each one (default: 5; with --link 3)")
    parser.add_argument("--only", type=names_of_contenders, default=available(), metavar="NAME[,NAME]",
                        help=f"measure these, and DDP: {', '.join(map(word_for, available()))}")
    parser.add_argument("--bucket-mb", type=positive, metavar="MIB", help="of all buckets (default: each one's own)")
    parser.add_argument("--sweep", type=listed(sweep), default=[], metavar="WHAT[,WHAT]",
                        help="vary ranks (1, 2, 4), size (5M to 100M) or sequence (64 to 512)")
    parser.add_argument("--link", type=listed(two_nodes.bits), default=[], metavar="SPEED[,SPEED]",
                        help="two nodes on this machine, half of the ranks each, and a link of 200mbit, say, between "
                             "them; several speeds draw a curve. Linux, root")
    add_device(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all rows to this file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw them")
    return parser


def read_points(parser: Parser, flags: argparse.Namespace) -> list[Point]:
    """What to measure; if that is impossible, ends the program with a message before anything starts."""
    try:
        two_nodes.check(flags)
        settings = Settings(sequence=flags.sequence, batch=flags.batch, steps=flags.steps, dtype=flags.dtype, lr=3e-4)
        points = [replace(point, bucket_mb=flags.bucket_mb)
                  for point in scaling.points(flags.model, flags.ranks, settings, flags.sweep, flags.link)]
        tokens = data.read_tokens(settings.text)
        for point in points:
            data.split(tokens, point.settings.sequence)
            ranks.choose(flags.device, None, point.ranks)
    except ValueError as error:
        parser.error(str(error))
    return points


def main(arguments: list[str]) -> str | None:
    """The command: read the flags, measure point by point, print tables, write JSON and picture."""
    parser = make_parser()
    flags = parser.parse_args(arguments)
    for name, usual, behind_a_link in (("steps", 20, 6), ("warm_up", 4, 2), ("repeats", 5, 3)):
        if getattr(flags, name) is None:  # a step takes seconds behind a slow link
            setattr(flags, name, behind_a_link if flags.link else usual)
    points = read_points(parser, flags)
    rows = []
    total = len(points) * len(flags.only) * (1 + flags.repeats)
    with progress.bar(name="starting ranks", total=total, unit="run") as bar:
        for point in points:
            try:
                found = measure(point, flags.only, flags.warm_up, flags.repeats, flags.device, bar)
            except ValueError as error:
                return f"error: {error}"
            rows += found
            bar.write(report.fitted(describe(found)))
            if flags.json:  # after each point, so that a stopped sweep keeps its results
                report.write_json({"rows": rows}, flags.json)
    if len(flags.link) > 1:
        print(report.fitted(describe_links(rows)))
    if flags.plot:
        style.save(draw_benchmark(rows), flags.plot)
    return None
