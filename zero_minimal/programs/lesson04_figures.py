"""Parameters: the figures and the pictures of lesson 04's page, from stages 0 and 3 on the same work.

    python -m zero_minimal.programs.lesson04_figures lessons/04_parameters

writes measured.json into that folder, and from it conveyor.png and kept.png. What is counted are bytes and the order of
events, never time. So another machine, or a busy one, gives the same.
"""

from collections.abc import Callable

from matplotlib.figure import Figure
from torch import nn

from zero_minimal.kept_units import Kept3
from zero_minimal.meters.observer import Observer, watched
from zero_minimal.meters.unit_trace import Conveyor
from zero_minimal.pictures.unit_chart import draw_conveyor, draw_kept
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.stage0 import Stage0
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

STAGES = {"stage 0": Stage0, "stage 3": Stage3}
WORLDS = (1, 2, 3, 4)
KEPT = ("ranks", "stage", "parameters", "memory", "theory", "traffic", "settings")  # of a report: no times
BELT_RANKS = 4  # of the picture of the conveyor
KEPT_RANKS = 2  # of the blocks that stay whole
BELTS = ("the first step", "the second step")  # the order of the units is known from the second on


# ---------------------------------------------------------------------------------- blocks that stay whole for backward


def as_one_unit(count: int) -> Callable:
    """Makes a Stage3 whose last `count` blocks are one unit. Forward's last unit stays: backward needs it first."""

    def build(model, optimizer_class, **options) -> Stage3:
        if not count:  # then what runs after the blocks must be the last unit
            return Stage3(model, optimizer_class, units=[*model.blocks, model.norm], **options)
        first, last = list(model.blocks)[:-count], list(model.blocks)[-count:]
        model.blocks = nn.ModuleList([*first, nn.Sequential(*last)])
        return Stage3(model, optimizer_class, units=model.blocks, **options)

    return build


def one_by_one(count: int) -> Callable:
    """Makes a stage that keeps the last `count` blocks: units of their own, which come and go one by one."""

    def build(model, optimizer_class, **options) -> Kept3:
        last = [] if count else [model.norm]  # as above
        return Kept3(model, optimizer_class, keep_units=count, units=[*model.blocks, *last], **options)

    return build


WAYS = {"as one unit, by units=": as_one_unit, "each a unit of its own": one_by_one}


# ----------------------------------------------------------------------------------------------------------- in a rank


def watched_belts(settings: Settings) -> dict[str, dict]:
    """{name of BELTS: this rank's record of the conveyor in this step}."""
    with ranks.start() as rank:
        zero = loop.build(Stage3, settings, rank)
        batches = loop.training_batches(settings, rank.rank)
        found = {}
        for name in BELTS:
            zero.zero_grad()
            with Conveyor(zero) as belt:
                zero.model(*(part.to(rank.device) for part in next(batches))).backward()
                zero.step()
            found[name] = belt.record
        return found


def watched_costs(way: str, count: int, settings: Settings) -> dict:
    """What it costs to keep so many blocks; of a way that is none, what stage 2 costs."""
    with ranks.start() as rank:
        zero = loop.build(WAYS[way](count) if way in WAYS else Stage2, settings, rank)
        observer = Observer(zero, rank, settings)
        losses = list(loop.steps(zero, loop.training_batches(settings, rank.rank), settings, observers=[observer]))
        found = observer.report()
        return {"way": way, "kept": count, "sent": found["traffic"]["sent_bytes"], "peak": found["memory"]["peak"],
                "parameters": observer.ledger.highest()["parameters"], "loss": losses[-1][0].item()}


# ------------------------------------------------------------------------------------------------------------- figures


def measure() -> dict:
    """All that the page and its pictures need, of rank 0: {"rows": reports, "belts": {name: record of the conveyor},
    "kept": what watched_costs() gave}."""
    settings = Settings(steps=3)
    costs = [(way, count) for way in WAYS for count in range(settings.layers + 1)] + [("stage 2", settings.layers)]
    with progress.bar(name="lesson 04", total=len(STAGES) * len(WORLDS) + 1 + len(costs), unit="run") as bar:

        def first_rank(*call):
            found = ranks.run(*call, device="cpu", timeout=300)[0]
            bar.update()
            return found

        def report(stage_class, world_size):
            found = watched(stage_class, settings, world_size)
            bar.update()
            return {key: found[key] for key in KEPT}

        return {
            "rows": [report(stage_class, world_size) for world_size in WORLDS for stage_class in STAGES.values()],
            "belts": first_rank(watched_belts, BELT_RANKS, settings),
            "kept": [first_rank(watched_costs, KEPT_RANKS, *cost, settings) for cost in costs],
        }


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    kept = {way: [row for row in measured["kept"] if row["way"] == way] for way in WAYS}
    (other,) = (row for row in measured["kept"] if row["way"] not in WAYS)
    name = BELTS[-1]
    return {"conveyor.png": draw_conveyor({f"stage 3, rank 0 of {BELT_RANKS}, {name}": measured["belts"][name]}),
            "kept.png": draw_kept(kept, {"stage 2: all blocks are always whole": other})}


def table(measured: dict) -> str:
    """What was measured, in MB."""
    lines = [["ranks", "stage", "parameters", "highest", "sent a step"]]
    for row in measured["rows"]:
        memory = row["memory"]
        counts = (memory["parameters"], memory["peak"], row["traffic"]["sent_bytes"])
        lines.append([str(row["ranks"]), str(row["stage"]), *(f"{count / 1e6:.2f}" for count in counts)])
    kept = [["kept whole", "", "sent a step", "highest"]]
    for row in measured["kept"]:
        kept.append([str(row["kept"]), row["way"], f"{row['sent'] / 1e6:.2f}", f"{row['peak'] / 1e6:.2f}"])
    highest = max(max(record["bytes"]) for record in measured["belts"].values())
    return "\n".join((report.table(lines), f"parameters whole at a time: at most {highest / 1e6:.2f}",
                      report.table(kept)))


main = figures.program("04_parameters", measure, pictures, table)

if __name__ == "__main__":
    main()
