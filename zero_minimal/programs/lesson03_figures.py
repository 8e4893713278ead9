"""Gradients: the figures and the pictures of lesson 03's page, from stages 1 and 2 on the same work.

    python -m zero_minimal.programs.lesson03_figures lessons/03_gradients

writes measured.json into that folder, and from it buckets.png and gradients.png. What is counted are bytes and the
order of events, never time. So another machine, or a busy one, gives the same.
"""


from matplotlib.figure import Figure

from zero_minimal.meters.buckets import Lanes
from zero_minimal.meters.memory import CATEGORIES, Moment
from zero_minimal.meters.observer import Observer
from zero_minimal.pictures.bucket_chart import draw_buckets
from zero_minimal.pictures.memory_chart import draw_memory_of_a_step
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

STAGES = {"stage 1": Stage1, "stage 2": Stage2}
RUNS = (  # ranks, and what differs from the default run; each with both stages
    (2, {}), (4, {}), (2, {"bucket_mb": 1.0}), (2, {"bucket_mb": 16.0}), (2, {"accumulate": 4}),
)
LANES_RANKS = 4  # of the picture of the buckets: a shard is a quarter there
STEPS = 3  # the observer counts memory in the second, which is like all that follow, and traffic in the third
KEPT = ("ranks", "stage", "parameters", "memory", "theory", "traffic", "settings")  # of a report: no times
SMALL = 50_000  # bytes: less than the eye sees


# ----------------------------------------------------------------------------------------------------------- in a rank


def watched_run(stage_class, settings: Settings) -> tuple[dict, list[Moment]]:
    """This rank's report, what `compare --json` has, but for times and losses; the ledger's timeline of step 2."""
    with ranks.start() as rank:
        held_out = loop.validation_batches(settings, rank.rank, rank.world_size)
        zero = loop.build(stage_class, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
        loop.evaluate(zero, held_out, rank)  # as programs/train.py: bytes are those that a stage file prints
        observer = Observer(zero, rank, settings)
        for _ in loop.steps(zero, loop.training_batches(settings, rank.rank), settings, observers=[observer]):
            pass
        row = observer.report()
        del row["traffic"]["wire_bytes"]  # the kernel may send a few bytes more or less
        return {key: row[key] for key in KEPT}, observer.ledger.timeline


def watched_backward(stage_class, settings: Settings) -> dict:
    """The record of this rank's Lanes in the second backward pass: the order of the buckets is agreed upon then."""
    with ranks.start() as rank:
        zero = loop.build(stage_class, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
        batches = loop.training_batches(settings, rank.rank)
        for _ in range(2):
            zero.zero_grad()
            loss = zero.model(*(part.to(rank.device) for part in next(batches)))
            with Lanes(zero) as lanes:
                loss.backward()
            zero.step()
        return lanes.record


# ------------------------------------------------------------------------------------------------------------- figures


def measure() -> dict:
    """All that the page and its pictures need, of rank 0: {"rows": reports, "buckets": {stage: record of Lanes},
    "steps": {stage: step, as shortened() makes it}}."""
    rows, steps = [], {}
    with progress.bar(name="lesson 03", total=2 * len(RUNS) + 2, unit="run") as bar:
        for world_size, changed in RUNS:
            for name, stage_class in STAGES.items():
                settings = Settings(steps=STEPS, **changed)
                row, timeline = ranks.run(watched_run, world_size, stage_class, settings, device="cpu", timeout=300)[0]
                rows.append(row)
                if (world_size, changed) == RUNS[0]:
                    steps[name] = shortened(timeline)
                bar.update()
        buckets = {}
        for name, stage_class in STAGES.items():
            buckets[name] = ranks.run(watched_backward, LANES_RANKS, stage_class, Settings(), device="cpu",
                                      timeout=300)[0]
            bar.update()
    return {"rows": rows, "buckets": buckets, "steps": steps}


def shortened(timeline: list[Moment]) -> dict:
    """A ledger's timeline in few words: {category: [moment], bytes}, and {"backward": the first and the last moment of
    that}. Left out is what changes memory by less than SMALL, unless it is the highest moment."""
    start = max(number for number, moment in enumerate(timeline) if moment.seconds == 0.0)  # what lived before the step
    highest = max(timeline, key=lambda moment: moment.total)
    kept = [timeline[start]]
    for moment in timeline[start + 1 :]:
        change = sum(abs(moment.bytes[name] - kept[-1].bytes[name]) for name in CATEGORIES)
        if change >= SMALL or moment is highest or moment is timeline[-1]:
            kept.append(moment)
    backward = [number for number, moment in enumerate(kept) if moment.what.endswith("backward")]
    return {name: [moment.bytes[name] for moment in kept] for name in CATEGORIES} | {
        "backward": [backward[0], backward[-1]]}


def lengthened(step: dict) -> list[Moment]:
    """The timeline that shortened() was given, as far as pictures need it; its seconds are numbers of moments."""
    first, last = step["backward"]
    rows = zip(*(step[name] for name in CATEGORIES), strict=True)
    return [Moment(number, "backward" if first <= number <= last else "", dict(zip(CATEGORIES, row, strict=True)),
                   sum(row)) for number, row in enumerate(rows)]


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    steps = {name: [lengthened(step)] for name, step in measured["steps"].items()}
    buckets = {f"{name}, rank 0 of {LANES_RANKS}": record for name, record in measured["buckets"].items()}
    return {"buckets.png": draw_buckets(buckets),
            "gradients.png": draw_memory_of_a_step(steps, timed=False)}


def table(measured: dict) -> str:
    """What was measured, in MB."""
    lines = [["ranks", "stage", "bucket MiB", "micro-batches", "gradients", "highest", "sent a step"]]
    for row in measured["rows"]:
        memory, settings = row["memory"], row["settings"]
        counts = (memory["gradients"], memory["peak"], row["traffic"]["sent_bytes"])
        lines.append([str(row["ranks"]), str(row["stage"]), f"{settings['bucket_mb']:g}", str(settings["accumulate"]),
                      *(f"{count / 1e6:.2f}" for count in counts)])
    return report.table(lines)


main = figures.program("03_gradients", measure, pictures, table)

if __name__ == "__main__":
    main()
