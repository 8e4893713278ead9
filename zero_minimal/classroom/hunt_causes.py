"""Causes of a bug hunt, and how each would show: a predicate on the facts, and the words that hold a figure against it.

The checker has no list of answers. A cause is right if its sign is in the record; in the record of each hunt there is
the sign of one cause only (tests/house/test_hunts.py). What it says of a wrong one is what that sign would be, beside
the figure that the record has.
"""

from collections.abc import Callable
from typing import NamedTuple

from zero_minimal.classroom.hunt_facts import BROKEN, HEALTHY, Facts, near


class Cause(NamedTuple):
    """words: what is wrong, for the list. sign: whether the record shows it. against: what would be seen, and what is
    seen in its place."""

    words: str
    sign: Callable[[Facts], bool]
    against: Callable[[Facts], str]


def number(value: float) -> str:
    """Four digits, or all of a count."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def each(values: list[float]) -> str:
    return ", ".join(number(value) for value in values)


# -------------------------------------------------------------------------------------------- losses, norms, parameters


def _ratio(wanted: Callable[[Facts], float], so: str) -> tuple[Callable, Callable]:
    """Sign and words of what makes gradients so many times too large."""

    def sign(facts):
        return facts.starts_alike and near(facts.norm_ratio, wanted(facts)) and not near(wanted(facts), 1)

    def against(facts):
        broken, healthy = facts.norms
        return (f"{so}, so the first norm would be {number(wanted(facts))} times the healthy run's. Rank 0 reports "
                f"{number(broken[0])}, the healthy run {number(healthy)}: {facts.norm_ratio:.2f} times")

    return sign, against


def _undivided(facts: Facts) -> str:
    if facts.micros == 1:
        return "a step has one micro-batch here (accumulate is 1): there is nothing to divide by"
    return _ratio(lambda facts: facts.micros, "the step would be the sum of its micro-batches")[1](facts)


def _same_data(facts: Facts) -> bool:
    return all(losses == facts.losses[0] for losses in facts.losses)


def _shard_norms(facts: Facts) -> bool:
    broken, healthy = facts.norms
    together = sum(norm**2 for norm in broken) ** 0.5
    return facts.stage > 0 and not near(min(broken), max(broken)) and near(together, healthy)


def _shard_norms_against(facts: Facts) -> str:
    broken, _ = facts.norms
    words = f"in the first step the ranks report {each(broken)}"
    if facts.stage == 0:
        return f"at stage 0 no rank has a shard: each clips by the norm of the whole gradient, and {words}"
    return f"each rank would report another norm, since it has another shard; {words}"


def _apart(facts: Facts, words: str) -> str:
    """What the ranks' parameters show, against a cause that drives them apart."""
    if not facts.apart:
        return "at stage 3 each parameter has one owner: the ranks have no two copies that could differ"
    first = next((step for step, value in enumerate(facts.apart) if value), None)
    if first is None:
        return f"{words}. In the record they are alike from before the first step to the end"
    when = "before the first step" if first == 0 else f"after step {first}"
    return f"{words}. In the record they first differ {when}, by {number(facts.apart[first])}"


def _never_reduced_against(facts: Facts) -> str:
    calls, count = facts.reductions(BROKEN)
    name = facts.reduction if calls else "all_reduce"
    calls, count = (calls, count) if calls else (facts.calls(BROKEN, name), facts.payload(BROKEN, name))
    return f"backward would send nothing. The record has {calls} {name} a step, of {number(count)} bytes in all"


def _last_gather_against(facts: Facts) -> str:
    healthy, broken = facts.payload(HEALTHY, "all_gather"), facts.payload(BROKEN, "all_gather")
    if not healthy:
        return "at stage 0 nothing is gathered after the update, in the healthy run neither: every rank updates all"
    if facts.stage == 3:
        return _apart(facts, "")
    return (f"a step would gather less than the healthy run, which gathers {number(healthy)} bytes; the record has "
            f"{number(broken)}")


def _learning_rate_against(facts: Facts) -> str:
    broken, healthy = facts.moved(BROKEN), facts.moved(HEALTHY)
    return ("the first step would move the parameters further, by as much as the rate is too high. They move by "
            f"{number(broken)}, and in the healthy run by {number(healthy)}")


def _skipped_against(facts: Facts) -> str:
    words = ("that rank's parameters would leave the others' at the step it skips, with all the traffic that there "
             "should be")
    if len(facts.apart) and facts.apart[0] == 0 and any(facts.apart):
        return f"{words}. But the traffic of a step is not that of the healthy run: {_collectives(facts)}"
    return _apart(facts, words)


def _collectives(facts: Facts) -> str:
    parts = []
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        healthy, broken = facts.payload(HEALTHY, name), facts.payload(BROKEN, name)
        if healthy != broken:
            parts.append(f"{name} {number(broken)} bytes, healthy {number(healthy)}")
    return "; ".join(parts)


LOSSES = {
    "same-data": Cause(
        "every rank reads the same batches", _same_data,
        lambda facts: "the ranks' losses would be the same in every step. In step 1 they are "
                      + each([losses[0] for losses in facts.losses])),
    "loaded-on-one-rank": Cause(
        "one rank alone loads the weights, after the model was wrapped",
        lambda facts: bool(facts.apart) and facts.apart[0] > 0,
        lambda facts: _apart(facts, "the ranks' parameters would differ before the first step")),
    "summed": Cause(
        "gradients are summed over the ranks, not averaged",
        *_ratio(lambda facts: facts.ranks, "the sum of N gradients is N times their mean")),
    "averaged-twice": Cause(
        "gradients are divided by the number of ranks twice",
        *_ratio(lambda facts: 1 / facts.ranks, "the mean would be divided by N once more")),
    "micro-batches-not-divided": Cause(
        "a micro-batch's loss is not divided by the number of micro-batches",
        _ratio(lambda facts: facts.micros, "")[0], _undivided),
    "norm-of-a-shard": Cause("each rank clips by the norm of its own shard", _shard_norms, _shard_norms_against),
    "learning-rate": Cause(
        "the learning rate is several times too high",
        lambda facts: facts.starts_alike and facts.moved(BROKEN) > 1.5 * facts.moved(HEALTHY), _learning_rate_against),
    "never-reduced": Cause(
        "each rank updates with its own gradients: nothing reduces them",
        lambda facts: facts.reductions(BROKEN)[1] == 0 and facts.payload(BROKEN, "all_reduce") < facts.whole / 2,
        _never_reduced_against),
    "skipped-on-one-rank": Cause(
        "one rank skips an update that the others make",
        lambda facts: bool(facts.apart) and facts.apart[0] == 0 < max(facts.apart) and not _collectives(facts),
        _skipped_against),
    "last-gather-missing": Cause(
        "the last bucket is updated, and never gathered",
        lambda facts: facts.stage in (1, 2) and max(facts.apart) > 0
        and 0 < facts.payload(BROKEN, "all_gather") < facts.payload(HEALTHY, "all_gather"), _last_gather_against),
}

# --------------------------------------------------------------------------------------------------------------- memory


def _two(facts: Facts, category: str, highest: bool = False) -> tuple[int, int]:
    """Bytes of the broken and of the healthy run."""
    look = facts.highest if highest else facts.at_the_end
    return look(BROKEN, category), look(HEALTHY, category)


def _both(facts: Facts, category: str, highest: bool = False) -> str:
    broken, healthy = _two(facts, category, highest)
    return f"{number(broken)} bytes, in the healthy run {number(healthy)}"


def _no_masters_against(facts: Facts) -> str:
    if facts.dtype == "fp32":
        return "this run is in fp32, and keeps no masters in the healthy run neither"
    return f"the optimizer's bytes would be fewer; they are {_both(facts, 'optimizer')}"


def _whole_state_against(facts: Facts) -> str:
    if facts.stage == 0:
        return "at stage 0 every rank keeps all of the state, in the healthy run too"
    return f"the optimizer's bytes would be {facts.ranks} times the healthy run's; they are {_both(facts, 'optimizer')}"


def _view_against(facts: Facts) -> str:
    if facts.stage < 2:
        return f"at stage {facts.stage} whole gradients stay by plan, in the healthy run too"
    return f"whole gradients would be alive at the end of a step. What is alive then are {_both(facts, 'gradients')}"


def _late(facts: Facts) -> bool:
    broken, healthy = _two(facts, "gradients", highest=True)
    return (facts.stage >= 2 and broken > 1.3 * healthy and near(*_two(facts, "gradients"))
            and facts.reductions(BROKEN) == facts.reductions(HEALTHY))


def _late_against(facts: Facts) -> str:
    if facts.stage < 2:
        return f"at stage {facts.stage} whole gradients stay until the update, in the healthy run too"
    calls, expected = facts.reductions(BROKEN)[0], facts.reductions(HEALTHY)[0]
    if calls != expected:
        return f"the buckets would go late, but all {expected} of them: the record has {calls} {facts.reduction} a step"
    if not near(*_two(facts, "gradients")):
        return f"shards alone would be left at the end of a step; there are {_both(facts, 'gradients')}"
    return f"gradients would be whole for a moment; at most they are {_both(facts, 'gradients', highest=True)}"


def _graph_against(facts: Facts) -> str:
    early, late = (facts.at_the_end(BROKEN, "activations", step) for step in (1, -1))
    return (f"the activations that outlive a step would grow from step to step. At the end of step 2 there are "
            f"{number(early)} bytes of them, at the end of step 6 {number(late)}")


def _units(facts: Facts, so: str, seen: str) -> str:
    if facts.stage < 3:
        return f"at stage {facts.stage} parameters are whole all the time, in the healthy run too"
    return f"{so}; {seen}"


MEMORY = {
    "no-masters": Cause(
        "16-bit parameters are updated without fp32 masters",
        lambda facts: facts.dtype != "fp32" and facts.at_the_end(BROKEN, "optimizer")
        < 0.8 * facts.at_the_end(HEALTHY, "optimizer"), _no_masters_against),
    "whole-optimizer-state": Cause(
        "every rank keeps the optimizer state of all parameters",
        lambda facts: facts.stage > 0 and near(facts.at_the_end(BROKEN, "optimizer"),
                                               facts.ranks * facts.at_the_end(HEALTHY, "optimizer")),
        _whole_state_against),
    "view-of-the-whole": Cause(
        "the gradient shard is a view, which keeps the whole bucket alive",
        lambda facts: facts.stage >= 2 and near(facts.at_the_end(BROKEN, "gradients"), facts.whole), _view_against),
    "reduced-late": Cause("whole gradients wait until backward has ended, and are reduced then", _late, _late_against),
    "graph-kept": Cause(
        "something keeps a graph of every step alive: a loss that was not detached, say",
        lambda facts: facts.at_the_end(BROKEN, "activations") > 2 * facts.at_the_end(BROKEN, "activations", 1),
        _graph_against),
    "one-unit": Cause(
        "the whole model is a single unit, gathered at once",
        lambda facts: facts.stage == 3 and facts.calls(BROKEN, "all_gather") == 1 < facts.calls(HEALTHY, "all_gather"),
        lambda facts: _units(facts, "a step would have a single all_gather",
                             f"the record has {facts.calls(BROKEN, 'all_gather')}")),
    "never-released": Cause(
        "units are gathered, and never freed after their turn",
        lambda facts: facts.stage == 3 and facts.at_the_end(BROKEN, "parameters") >= 0.9 * facts.whole,
        lambda facts: _units(facts, "parameters would be whole at the end of a step, too",
                             f"what is alive then are {_both(facts, 'parameters')}")),
}

# ----------------------------------------------------------------------------------------------------- traffic and time


def _calls(facts: Facts) -> str:
    calls, count = facts.reductions(BROKEN)
    expected, bytes = facts.reductions(HEALTHY)
    return (f"the record has {calls} {facts.reduction} of {number(count)} bytes in all, "
            f"the healthy run {expected} of {number(bytes)}")


def _each_micro_against(facts: Facts) -> str:
    if facts.micros == 1:
        return "a step has one micro-batch here (accumulate is 1): there is no other that could be reduced too"
    return f"a step would have {facts.micros} times as many reductions, and bytes; {_calls(facts)}"


def _one_bucket_against(facts: Facts) -> str:
    if facts.stage == 3:
        return "at stage 3 a unit is a bucket, whatever bucket size is set: the cut follows the units"
    return f"a step would have a single {facts.reduction}; {_calls(facts)}"


def _at_once(facts: Facts) -> bool:
    return (facts.overlap(BROKEN)[0] == 0 < facts.overlap(HEALTHY)[0]
            and facts.reductions(BROKEN) == facts.reductions(HEALTHY) and not _late(facts))


def _at_once_against(facts: Facts) -> str:
    came, count = facts.overlap(BROKEN)
    if came:
        return (f"no gradient would come while a collective is under way. In the record {came} of {count} do, and "
                f"{facts.overlap(HEALTHY)[0]} in the healthy run")
    return f"there would be as many collectives as in the healthy run, each waited for where it starts; {_calls(facts)}"


def _straggler_against(facts: Facts) -> str:
    late, behind = facts.lag(BROKEN)
    return (f"one rank would come to its first collective when others could have done a whole step. The last to come, "
            f"rank {late}, is behind by {1000 * behind:.1f} ms; a step of the healthy run takes "
            f"{1000 * facts.seconds(HEALTHY):.0f} ms")


def _slow_against(facts: Facts) -> str:
    if facts.reductions(BROKEN) != facts.reductions(HEALTHY):
        return f"there would be as many messages, of as many bytes, as in the healthy run; {_calls(facts)}"
    return ("every message would be waited for, on every rank. The one that is waited for least takes "
            f"{1000 * facts.wait(BROKEN):.2f} ms; in the healthy run {1000 * facts.wait(HEALTHY):.2f} ms")


TRAFFIC = {
    "reduced-each-micro-batch": Cause(
        "gradients are reduced after each micro-batch, not after the last one alone",
        lambda facts: facts.micros > 1 and facts.reductions(BROKEN) == tuple(
            facts.micros * count for count in facts.reductions(HEALTHY)), _each_micro_against),
    "all-reduced-and-sliced": Cause(
        "gradients are all-reduced, and a slice is kept: no reduce-scatter",
        lambda facts: facts.stage > 0 and facts.calls(BROKEN, "reduce_scatter") == 0
        and facts.payload(BROKEN, "all_reduce") >= facts.whole,
        lambda facts: (f"a step would all-reduce all gradients, {number(facts.whole)} bytes, and have no "
                       f"reduce_scatter; {_calls(facts)}") if facts.stage else
        "at stage 0 the gradients are all-reduced by plan: no rank has a shard"),
    "tiny-buckets": Cause(
        "buckets are far too small: the size was given in another unit",
        lambda facts: facts.stage < 3 and facts.reductions(BROKEN)[0] > 1.5 * facts.reductions(HEALTHY)[0]
        and near(facts.reductions(BROKEN)[1], facts.reductions(HEALTHY)[1]),
        lambda facts: f"there would be many more reductions of as many bytes in all; {_calls(facts)}"),
    "one-bucket": Cause(
        "all gradients are in one bucket, which leaves when the last has come",
        lambda facts: facts.stage < 3 and facts.reductions(BROKEN)[0] == 1 < facts.reductions(HEALTHY)[0],
        _one_bucket_against),
    "waited-for-at-once": Cause("each collective is waited for as soon as it has started", _at_once, _at_once_against),
    "straggler": Cause(
        "one rank is late in each step, and the others wait for it",
        lambda facts: facts.lag(BROKEN)[1] > facts.seconds(HEALTHY), _straggler_against),
    "slow-network": Cause(
        "every message takes several times as long: the network is slow",
        lambda facts: facts.wait(BROKEN) > 4 * facts.wait(HEALTHY) + 0.005
        and facts.reductions(BROKEN) == facts.reductions(HEALTHY), _slow_against),
}

CAUSES: dict[str, Cause] = {**LOSSES, **MEMORY, **TRAFFIC}
