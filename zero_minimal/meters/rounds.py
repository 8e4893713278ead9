"""Rounds: runs that were timed in turn, A B C, A B C, …, and their statistics.

A machine's speed drifts over minutes, so a run is divided by another run of its own round: the median and the spread of
these ratios can be trusted.
"""

import statistics


def run_seconds(results: list[dict]) -> float:
    """Seconds per step of one run: the median step, where the slowest rank determines a step's time.

    results: [rank], what timing.time_steps returns.
    """
    return statistics.median(max(step) for step in zip(*(result["seconds"] for result in results), strict=True))


def ratios(own: list[float], theirs: list[float]) -> dict[str, float]:
    """The spread of own / theirs, round by round. own, theirs: [round]."""
    return spread([mine / other for mine, other in zip(own, theirs, strict=True)])


def spread(values: list[float]) -> dict[str, float]:
    """{"min", "lower_quartile", "median", "upper_quartile", "max"}; for a single value, all are that value."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return dict(zip(("min", "lower_quartile", "median", "upper_quartile", "max"),
                    (min(values), *quartiles, max(values)), strict=True))
