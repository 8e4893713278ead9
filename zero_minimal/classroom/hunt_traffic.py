"""Causes of a bug hunt that show in traffic and time. See hunt_causes.py."""

from zero_minimal.classroom.hunt_facts import BROKEN, HEALTHY, Facts, in_order, near
from zero_minimal.classroom.hunt_words import Cause, both, late, number


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
        calls, expected = facts.calls(BROKEN, "all_gather"), facts.calls(HEALTHY, "all_gather")
        return (f"a bucket size cuts gradients, and does not change what is gathered. Parameters come by "
                f"{calls} all_gather, in the healthy run by {expected}; at most they are "
                f"{both(facts, 'parameters', highest=True)}")
    return f"a step would have a single {facts.reduction}; {_calls(facts)}"


def _at_once(facts: Facts) -> bool:
    return (facts.overlap(BROKEN)[0] == 0 < facts.overlap(HEALTHY)[0]
            and facts.reductions(BROKEN) == facts.reductions(HEALTHY) and not late(facts))


def _at_once_against(facts: Facts) -> str:
    came, count = facts.overlap(BROKEN)
    if came:
        return (f"no gradient would come while a collective is under way. In the record {came} of {count} do, and "
                f"{facts.overlap(HEALTHY)[0]} in the healthy run")
    return f"there would be as many collectives as in the healthy run, each waited for where it starts; {_calls(facts)}"


def _straggler_against(facts: Facts) -> str:
    late, behind = facts.lag(BROKEN)
    return (f"one rank would come to its first collective when others could have done two steps. The last to come, "
            f"rank {late}, is behind by {1000 * behind:.1f} ms; a step of the healthy run takes "
            f"{1000 * facts.seconds(HEALTHY):.0f} ms")


def _slow_against(facts: Facts) -> str:
    if facts.reductions(BROKEN) != facts.reductions(HEALTHY):
        return f"there would be as many messages, of as many bytes, as in the healthy run; {_calls(facts)}"
    what, broken, healthy = min(_message_times(facts), key=lambda one: one[1] / max(one[2], 1e-6))
    return (f"every message would take several times as long, on every rank. {what} {1000 * broken:.3g} ms, "
            f"{broken / max(healthy, 1e-6):.1f} times the healthy run's {1000 * healthy:.3g} ms{_held_up(facts)}")


def _message_times(facts: Facts) -> list[tuple[str, float, float]]:
    """What a slow network would make several times as long, each of these. (what, broken run, healthy run)"""
    broken, healthy = facts.under_way(BROKEN), facts.under_way(HEALTHY)
    return [("From its start to its end the quickest takes", broken[0], healthy[0]),
            (f"From its start to its end the middle one of the {len(broken)} takes", broken[len(broken) // 2],
             healthy[len(healthy) // 2]),
            ("The one that is waited for least is waited for", facts.wait(BROKEN), facts.wait(HEALTHY))]


def _held_up(facts: Facts) -> str:
    """The first message of a step, if it takes many times as long on one rank as on another."""
    times = [one[3] - one[1] for one in (in_order(rank)[0] for rank in facts.run(BROKEN))]
    long, short = (times.index(most) for most in (max(times), min(times)))
    if times[long] < 5 * times[short]:
        return ""
    return (f". And the step's first one takes {1000 * times[long]:.1f} ms on rank {long}, but "
            f"{1000 * times[short]:.1f} ms on rank {short}: the same message, on the same network")


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
        "the bucket size is too large: all gradients are in one bucket, which leaves when the last has come",
        lambda facts: facts.stage < 3 and facts.reductions(BROKEN)[0] == 1 < facts.reductions(HEALTHY)[0],
        _one_bucket_against),
    "waited-for-at-once": Cause("each collective is waited for as soon as it has started", _at_once, _at_once_against),
    "straggler": Cause(
        "one rank is late in each step, and the others wait for it",
        lambda facts: facts.lag(BROKEN)[1] > 2 * facts.seconds(HEALTHY), _straggler_against),
    "slow-network": Cause(
        "every message takes several times as long: the network is slow",
        lambda facts: facts.wait(BROKEN) > 4 * facts.wait(HEALTHY) + 0.005
        and facts.reductions(BROKEN) == facts.reductions(HEALTHY), _slow_against),
}
