"""Figures of a bug hunt: the names that signs and messages of lessons/bug-hunts/signs.toml may use."""

import math
from operator import itemgetter

from zero_minimal.meters.events import Collective

NEAR = 0.01  # two figures are equal if they differ by at most this share
NAMES = "all_reduce", "reduce_scatter", "all_gather"


def near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))


def figures(record: dict) -> dict:
    """Those of one hunt's file. Memory and traffic are rank 0's, in bytes; times are in seconds, or ms if named so."""
    stage, ranks = record["stage"], record["ranks"]
    reduction = "reduce_scatter" if stage else "all_reduce"  # what averages gradients in the healthy run
    healthy, broken = (of_run(record["runs"][side], reduction) for side in ("healthy", "broken"))
    return {
        "stage": stage, "ranks": ranks, "reduction": reduction, "healthy": healthy, "broken": broken,
        "micros": record["settings"]["accumulate"], "dtype": record["settings"]["dtype"],
        # bytes of all parameters with padding: the same as all gradients of the healthy run
        "whole": healthy["end"]["gradients"] * (ranks if stage >= 2 else 1),
        "starts_alike": all(near(one[0], other[0]) for one, other in zip(broken["losses"], healthy["losses"],
                                                                        strict=True)),
        "norm_ratio": broken["norms"][0] / healthy["norms"][0],
        "near": near, "slowest": lambda: slowest(broken, healthy),
        "beside": lambda when, kind: f"{broken[when][kind]:,} bytes, in the healthy run {healthy[when][kind]:,}",
    }


def of_run(reports: list[dict], reduction: str) -> dict:
    """The figures of one run, from its ranks' reports."""
    first = reports[0]
    counts = first["traffic"]["collectives"]
    calls, bytes = ({name: counts.get(name, {}).get(key, 0) for name in NAMES} for key in ("calls", "bytes"))
    apart = [max(values) for values in zip(*(rank["apart"] for rank in reports), strict=True)]
    messages = [in_order(rank) for rank in reports]
    starts = [min((one.start for one in own), default=0.0) for own in messages]
    norms = [rank["norms"][0] for rank in reports]
    return {
        "losses": [rank["losses"] for rank in reports],
        "norms": norms, "norm_of_all": math.hypot(*norms),  # of the first step
        "apart": apart,  # the largest distance of ranks, before the first step and after each; [] at stage 3
        "parted": next((step for step, distance in enumerate(apart) if distance), None),
        "moved": first["moved"][0],  # by the first step
        "early": first["memory"][1]["at the end"], "end": first["memory"][-1]["at the end"],
        "most": first["memory"][-1]["highest"],
        "calls": calls, "bytes": bytes, "reductions": (calls[reduction], bytes[reduction]),
        "overlap": first["overlap"],  # gradients computed while a collective was under way, and all gradients
        "seconds": max(rank["time"]["seconds"] for rank in reports),
        "last_to_come": starts.index(max(starts)), "behind": max(starts) - min(starts),  # at the first collective
        "wait": min((one.end - one.wait for own in messages for one in own), default=0.0),  # the shortest wait
        "first_takes": [own[0].end - own[0].start for own in messages if own],  # on each rank
        # from start to end of each collective, on its fastest rank; the quickest first
        "under_way": sorted(min(one.end - one.start for one in same) for same in zip(*messages, strict=True)),
        "starts_ms": starts_ms([one for one in messages[0] if one.name == reduction]),
    }


def in_order(rank: dict) -> list[Collective]:
    """The collectives of a rank's step as they started. All ranks have this order."""
    return sorted((Collective(*one) for one in rank["time"]["collectives"]), key=lambda one: one.start)


def starts_ms(ours: list[Collective]) -> tuple[float, ...]:
    """When the first starts; when the last starts; how long the rank computes in between, without waiting."""
    if not ours:
        return ()
    first, last = ours[0].start, ours[-1].start
    waits = sum(min(one.end, last) - one.wait for one in ours if one.wait < last)
    return tuple(1000 * seconds for seconds in (first, last, last - first - waits))


def slowest(broken: dict, healthy: dict) -> tuple[float, str, float, float]:
    """A slow network would make each of these several times as long. The one that grew least: (ratio, what, both)."""
    here, there = broken["under_way"], healthy["under_way"]
    return min(((mine / max(theirs, 1e-6), what, mine, theirs) for what, mine, theirs in (
        ("From its start to its end the quickest takes", here[0], there[0]),
        (f"From its start to its end the middle one of the {len(here)} takes", here[len(here) // 2],
         there[len(there) // 2]),
        ("The one that is waited for least is waited for", broken["wait"], healthy["wait"]))), key=itemgetter(0))
