"""Causes of a bug hunt, and how each would show: a predicate on the facts, and the words that hold a figure against it.

The checker has no list of answers. A cause is right if its sign is in the record; in the record of each hunt there is
the sign of one cause only (tests/house/test_hunts.py). What it says of a wrong one is what that sign would be, beside
the figure that the record has.
"""

from collections.abc import Callable

from zero_minimal.classroom.hunt_facts import BROKEN, HEALTHY, Facts, near
from zero_minimal.classroom.hunt_traffic import TRAFFIC
from zero_minimal.classroom.hunt_words import Cause, both, each, late, number, two

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
    return (f"the first step would move the parameters several times as far; here {broken / healthy:.2f} times: by "
            f"{number(broken)}, and in the healthy run by {number(healthy)}")


def _skipped_against(facts: Facts) -> str:
    words = ("that rank's parameters would leave the others' at the first step it skips, with all the traffic that "
             "there should be")
    if len(facts.apart) and facts.apart[0] == 0 and any(facts.apart):
        return f"{words}. But the traffic of a step is not that of the healthy run: {_collectives(facts)}"
    if facts.stage == 3:
        broken, healthy = (facts.run(side)[0]["losses"][-1] for side in (BROKEN, HEALTHY))
        return ("that rank's shards would stay as they were, and the losses leave the healthy run's. In the last step "
                f"rank 0's is {number(broken)}, in the healthy run {number(healthy)}")
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
        "one rank skips one or more updates that the others make",
        lambda facts: bool(facts.apart) and facts.apart[0] == 0 < max(facts.apart) and not _collectives(facts),
        _skipped_against),
    "last-gather-missing": Cause(
        "the last bucket is updated, and never gathered",
        lambda facts: facts.stage in (1, 2) and max(facts.apart) > 0
        and 0 < facts.payload(BROKEN, "all_gather") < facts.payload(HEALTHY, "all_gather"), _last_gather_against),
}

# --------------------------------------------------------------------------------------------------------------- memory


def _no_masters_against(facts: Facts) -> str:
    if facts.dtype == "fp32":
        return "this run is in fp32, and keeps no masters in the healthy run neither"
    return f"the optimizer's bytes would be fewer; they are {both(facts, 'optimizer')}"


def _whole_state_against(facts: Facts) -> str:
    if facts.stage == 0:
        return "at stage 0 every rank keeps all of the state, in the healthy run too"
    return f"the optimizer's bytes would be {facts.ranks} times the healthy run's; they are {both(facts, 'optimizer')}"


def _view_against(facts: Facts) -> str:
    if facts.stage < 2:
        return f"at stage {facts.stage} whole gradients stay by plan, in the healthy run too"
    return f"whole gradients would be alive at the end of a step. What is alive then are {both(facts, 'gradients')}"


def _late_against(facts: Facts) -> str:
    if facts.stage < 2:
        return _late_against_by_order(facts)
    calls, expected = facts.reductions(BROKEN)[0], facts.reductions(HEALTHY)[0]
    if calls != expected:
        return f"the buckets would go late, but all {expected} of them: the record has {calls} {facts.reduction} a step"
    if not near(*two(facts, "gradients")):
        return f"shards alone would be left at the end of a step; there are {both(facts, 'gradients')}"
    return f"gradients would be whole for a moment; at most they are {both(facts, 'gradients', highest=True)}"


def _late_against_by_order(facts: Facts) -> str:
    """Below stage 2 whole gradients stay until the update, so memory tells nothing. The order of events does."""
    words = "the first reduction would start after the last gradient"
    came, count = facts.overlap(BROKEN)
    if not facts.reductions(BROKEN)[0]:
        return f"{words}. The record has no {facts.reduction} at all"
    if came:
        return f"{words}. In the record {came} of {count} gradients come while a collective is under way"
    first, last, between = (1000 * seconds for seconds in facts.reductions_begin(BROKEN))
    return (f"{words}, and all others on its heels. In the record rank 0 starts the first at {first:.0f} ms and the "
            f"last at {last:.0f} ms, and computes for {between:.0f} ms in between")


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
    "reduced-late": Cause("whole gradients wait until backward has ended, and are reduced then", late, _late_against),
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
                             f"what is alive then are {both(facts, 'parameters')}")),
}

# all that a learner may name, in the order of the page's list
CAUSES: dict[str, Cause] = {**LOSSES, **MEMORY, **TRAFFIC}
