"""The deciding experiments, run on the broken and on the healthy code of each hunt.

    python tests/bug_hunts/experiments.py [NN …] ["11, too"]

writes experiments.json beside this file: for the teacher's page, {hunt: {"experiment", "healthy", "broken"}}, with what
each rank saw. Seconds are this machine's own.
"""

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from zero_minimal.core import collectives, precision
from zero_minimal.meters.events import Events
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress
from zero_minimal.programs.hunts import SIDES, broken_code, rounded
from zero_minimal.workload import loop

FILE = Path(__file__).with_name("experiments.json")
STEPS = 6


class Setting:
    """One run, as an experiment finds it."""

    def __init__(self, broken, hunt, side, rank):
        self.hunt, self.side, self.rank, self.settings = hunt, side, rank, hunt.settings
        self.zero = broken.build(side, hunt.settings, rank, lambda stage_class: stage_class)
        self.batches = side.batches(hunt.settings, rank.rank)

    def steps(self, count):
        """Train so many steps, and come back after each."""
        observers = self.side.around(self.zero, self.settings, self.rank)
        steps = loop.steps(self.zero, self.batches, self.settings, observers=observers)
        for _ in range(count):
            yield next(steps)

    def backward(self):
        """One batch, forward and backward."""
        self.zero.model(*next(self.batches)).backward()


def count_living_tensors(run):
    counts = []
    for _ in run.steps(STEPS):
        gc.collect()
        counts.append(sum(issubclass(type(each), torch.Tensor) and each.grad_fn is not None
                          for each in gc.get_objects()))
    return {"tensors with a grad_fn after each step": counts}


def sums_at_the_start(run):
    return {"sum of the parameters": sum(param.double().sum().item() for param in run.zero.model.parameters())}


def calls_in_one_backward(run):
    with TrafficMeter() as meter, run.zero.no_sync():
        run.backward()
    return {"collectives": sum(each["calls"] for each in meter.collectives.values())}


def print_the_input(run):
    return {"tokens": next(run.batches)[0][0, :8].tolist()}


def gradient_of_one_process(run):
    """Of the loss that is the mean over all ranks' batches, by plain autograd."""
    model, batches = type(run.zero.model)(run.settings.model_config()), []
    with torch.no_grad():
        for own, whole in zip(model.parameters(), run.zero.model.parameters(), strict=True):
            own.copy_(whole)
    for number in range(run.rank.world_size):
        its = run.side.batches(run.settings, number)
        batches += [next(its) for _ in range(run.settings.accumulate)]
    (sum(model(*batch) for batch in batches) / len(batches)).backward()
    alone = torch.cat([param.grad.flatten() for param in model.parameters()]).norm().item()
    for _ in run.steps(1):
        pass
    together = precision.global_norm(run.zero.reduced_gradients(), sharded=False).item()
    return {"norm of one process": alone, "norm here": together, "times": together / alone}


def print_the_wrapping(run):
    return {"units": [[unit.name or "root", sum(param.numel() for param in unit.params)] for unit in run.zero.units]}


def sizes_after_backward(run):
    run.zero.zero_grad()
    run.backward()
    shards = run.zero.reduced_gradients()
    return {"bytes of the shards": sum(shard.nbytes for shard in shards),
            "bytes of their storages": sum(shard.untyped_storage().nbytes() for shard in shards)}


def order_of_events(run):
    for _ in run.steps(1):
        pass
    run.zero.zero_grad()
    with Events(run.zero.model) as seen:
        run.backward()
    between = []  # gradients between a start and its wait
    for place, event in enumerate(seen.events):
        if event.kind == "start":
            later = seen.events[place:]
            wait = next(i for i, each in enumerate(later) if (each.kind, each.number) == ("wait", event.number))
            between.append(sum(each.kind == "gradient" for each in later[:wait]))
    return {"gradients between start and wait of each bucket": between}


def time_without_training(run):
    next(run.batches)
    began = time.perf_counter()
    for _ in range(4):
        next(run.batches)
    return {"ms a batch": 1000 * (time.perf_counter() - began) / 4}


def norm_by_hand(run):
    run.zero.zero_grad()
    run.backward()
    shards = torch.cat([shard.flatten() for shard in run.zero.reduced_gradients()])
    whole = shards.new_empty(run.rank.world_size * shards.numel())
    collectives.all_gather(whole, shards)
    return {"norm of the whole": whole.norm().item(), "reported": run.zero.clip_grad_norm_(run.settings.clip).item()}


def what_is_updated(run):
    tensors = [param for group in run.zero.optimizer.param_groups for param in group["params"]]
    return {"dtype": sorted({str(each.dtype) for each in tensors}), "elements": sum(each.numel() for each in tensors)}


def read_the_counters(run):
    for _ in run.steps(run.settings.steps):
        pass
    return {"updates": max(int(state["step"]) for state in run.zero.optimizer.state.values())}


def tenth_of_the_rate(run):
    """The loss of the last steps: single ones go up and down."""
    run.settings = replace(run.settings, lr=run.settings.lr / 10)  # the loop sets the rate anew in each step
    losses = [sum(each).item() for each in run.steps(run.settings.steps)]
    return {"mean loss of the last 20 steps": sum(losses[-20:]) / 20}


DECIDING = {
    "01": count_living_tensors, "02": sums_at_the_start, "03": calls_in_one_backward, "04": print_the_input,
    "05": gradient_of_one_process, "06": print_the_wrapping, "07": sizes_after_backward, "08": order_of_events,
    "09": time_without_training, "10": norm_by_hand, "11": what_is_updated, "12": read_the_counters,
    "11, too": tenth_of_the_rate,
}


def result(broken, hunt, side, experiment):
    with ranks.start() as rank:
        return experiment(Setting(broken, hunt, side, rank))


def short(seen: list[dict]) -> str:
    """What the ranks saw, in a cell of the teacher's table: once, if they saw the same."""

    def words(value):
        if isinstance(value, float):
            return f"{value:.4g}"
        if isinstance(value, list):
            return ", ".join(map(words, value))
        return f"{value:,}" if isinstance(value, int) else value

    cells = {name: list(dict.fromkeys(words(rank[name]) for rank in seen)) for name in seen[0]}
    return "; ".join(f"{name}: {' / '.join(each)}" for name, each in cells.items())


def table(found: dict) -> str:
    """Rows of the teacher's page."""
    return "\n".join(f"| {name} | {one['experiment']} | {short(one['healthy'])} | {short(one['broken'])} |"
                     for name, one in found.items())


def main(names):
    """Of these hunts, or of all."""
    broken, found = broken_code(), json.loads(FILE.read_text()) if names else {}
    wanted = {name: DECIDING[name] for name in names or DECIDING}
    with progress.bar(name="experiments", total=len(wanted), unit="hunt") as bar:
        for name, experiment in wanted.items():
            hunt = broken.HUNTS[name[:2]]
            found[name] = {"experiment": experiment.__name__.replace("_", "-")} | {
                side: rounded(ranks.run(result, hunt.ranks, broken, hunt, getattr(hunt, side), experiment,
                                        device="cpu", timeout=200)) for side in SIDES}
            bar.update()
    FILE.write_text(figures.on_few_lines(found), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
