"""Optimizer state: the figures and the pictures of lesson 02's page, from stages 0 and 1 on the same work.

    python -m zero_minimal.programs.lesson02_figures lessons/02_optimizer_state

writes measured.json into that folder, and from it halves.png, written.png and small_steps.png. What is counted are
bytes, elements and the order of events, never time. So another machine, or a busy one, gives the same.
"""


import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

from zero_minimal.core import collectives
from zero_minimal.meters.writer_trace import Written
from zero_minimal.pictures.halves import STATES, draw_halves
from zero_minimal.pictures.writer_chart import draw_small_steps, draw_written
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.programs.lesson03_figures import STEPS, watched_run
from zero_minimal.stage0 import Stage0
from zero_minimal.stage1 import Stage1
from zero_minimal.workload.settings import Settings

STAGES = {"stage 0": Stage0, "stage 1": Stage1}
WORLDS = (2, 3, 4)
MAP_RANKS, MAP_BUCKET = 3, 1600  # of the map of who wrote what: ranks, bytes of a bucket
HALVES_RANKS = 4
UPDATES, EVERY, SIZE = 1000, 50, 1e-4  # of the experiment: how many, how often looked at, how large beside 1


# ----------------------------------------------------------------------------------------------------------- in a rank


class Small(nn.Module):
    """A model whose elements can be drawn one by one. model(x) is a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 24), nn.Linear(24, 10)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def written(stage_class, **options) -> dict[str, list]:
    """{parameter: mask [row][column] of what this rank wrote in a step}."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    zero = stage_class(Small(), torch.optim.AdamW, lr=1e-2, **options)
    zero.model(torch.randn(16, 20, generator=torch.Generator().manual_seed(rank))).backward()
    zero.reduced_gradients()
    with Written(zero) as watch:
        zero.step()
    names = [name for name, _ in zero.model.named_parameters()]
    return {name: mask.view(-1, mask.shape[-1]).tolist() for name, mask in zip(names, watch.masks, strict=True)}


def watched_map() -> dict[str, dict[str, list]]:
    with ranks.start():
        return {name: written(stage_class, bucket_bytes=MAP_BUCKET) for name, stage_class in STAGES.items()}


def watched_halves() -> dict[str, dict[str, list[str]]]:
    """{way: {phase: what of each shard this rank's vector holds}}, known by its values."""
    with ranks.start() as rank:
        count = HALVES_RANKS
        own = torch.rand(count, generator=torch.Generator().manual_seed(rank.rank)) + 1
        mean = sum(torch.rand(count, generator=torch.Generator().manual_seed(one)) + 1 for one in range(count)) / count
        old = torch.full((count,), -1.0)
        new = old - 0.1 * mean
        kinds = {"own": own, "mean": mean, "old": old, "new": new}

        def named(vector):
            return [next(kind for kind, values in kinds.items() if torch.isclose(values[place], vector[place]))
                    for place in range(count)]

        found: dict = {"stage 0": {}, "stage 1": {}}
        for way, phases in found.items():
            gradient, parameters, mine = own.clone(), old.clone(), slice(rank.rank, rank.rank + 1)
            phases["backward"] = named(gradient)
            collectives.reduce_scatter(gradient[mine], own, op="avg")
            phases["reduce-scatter"] = named(gradient)
            if way == "stage 0":
                collectives.all_gather(gradient, gradient[mine].clone())
                phases["all-gather"] = named(gradient)
                phases["update"] = named(parameters - 0.1 * gradient)
            else:
                parameters[mine] -= 0.1 * gradient[mine]
                phases["update"] = named(parameters)
                collectives.all_gather(parameters, parameters[mine].clone())
                phases["all-gather"] = named(parameters)
        return found


def small_steps() -> dict[str, list[float]]:
    """A parameter that is 1, in bf16, after each EVERY of UPDATES updates of SIZE: with a master and without."""
    with ranks.start():
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        zero = Stage1(model, torch.optim.SGD, lr=SIZE)
        plain = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([plain], lr=SIZE)
        found: dict = {"an fp32 master, rounded to bf16": [1.0], "bf16 alone": [1.0]}
        for step in range(1, UPDATES + 1):
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            plain.grad = torch.ones_like(plain)
            zero.step()
            optimizer.step()
            zero.zero_grad()
            if step % EVERY == 0:
                for values, value in zip(found.values(), (model.weight, plain), strict=True):
                    values.append(value.item())
        return found


# ------------------------------------------------------------------------------------------------------------- figures


def measure() -> dict:
    """All that the page and its pictures need: {"rows": reports of rank 0, "map": {stage: {parameter: the rank that
    wrote, [row][column]}}, "halves": {way: {phase: [rank][shard]}}, "small_steps": {name: values}}."""
    rows = []
    with progress.bar(name="lesson 02", total=len(STAGES) * len(WORLDS) + 3, unit="run") as bar:
        for world_size in WORLDS:
            for stage_class in STAGES.values():
                row, _ = ranks.run(watched_run, world_size, stage_class, Settings(steps=STEPS), device="cpu",
                                   timeout=300)[0]
                rows.append(row)
                bar.update()
        of_ranks = ranks.run(watched_map, MAP_RANKS, device="cpu", timeout=300)
        bar.update()
        halves = ranks.run(watched_halves, HALVES_RANKS, device="cpu", timeout=300)
        bar.update()
        steps = ranks.run(small_steps, 2, device="cpu", timeout=300)[0]
        bar.update()
    return {
        "rows": rows,
        "map": {stage: writers([one[stage] for one in of_ranks]) for stage in STAGES},
        "halves": {way: {phase: [one[way][phase] for one in halves] for phase in halves[0][way]} for way in STAGES},
        "small_steps": steps,
    }


def writers(masks: list[dict[str, list]]) -> dict[str, list]:
    """{parameter: [row][column] the rank that wrote it, -1 for nobody, -2 for several} from all ranks' masks."""
    found = {}
    for name in masks[0]:
        wrote = torch.tensor([one[name] for one in masks])  # [rank, row, column]
        which = wrote.int().argmax(0)
        which[wrote.sum(0) == 0], which[wrote.sum(0) > 1] = -1, -2
        found[name] = which.tolist()
    return found


def shares(measured: dict) -> dict[str, list]:
    """{way: [rank]: {state: share of all of it that a rank holds}} on HALVES_RANKS."""
    rows = {row["stage"]: row for row in measured["rows"] if row["ranks"] == HALVES_RANKS}
    whole = {state: rows[0]["memory"][state] for state in STATES}
    return {f"stage {stage}": [{state: row["memory"][state] / whole[state] for state in STATES}] * HALVES_RANKS
            for stage, row in rows.items()}


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    return {"halves.png": draw_halves(measured["halves"], shares(measured)),
            "written.png": draw_written(measured["map"]["stage 1"], MAP_RANKS),
            "small_steps.png": draw_small_steps(measured["small_steps"], EVERY)}


def table(measured: dict) -> str:
    """What was measured, in MB."""
    lines = [["ranks", "stage", "optimizer", "bytes of it", "highest", "sent a step"]]
    for row in measured["rows"]:
        memory = row["memory"]
        lines.append([str(row["ranks"]), str(row["stage"]), f"{memory['optimizer'] / 1e6:.2f}",
                      f"{memory['optimizer']:,}", f"{memory['peak'] / 1e6:.1f}",
                      f"{row['traffic']['sent_bytes'] / 1e6:.2f}"])
    return report.table(lines)


main = figures.program("02_optimizer_state", measure, pictures, table)

if __name__ == "__main__":
    main()
