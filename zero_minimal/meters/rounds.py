"""Rounds: runs that were timed in turn, A B C, A B C, …, and what is said of them.

A machine drifts over minutes, so a run is divided by another of its own round: the median of these ratios, and how far
they are spread, is what can be trusted.
"""

import statistics


def run_seconds(results: list[dict]) -> float:
    """Seconds a step of one run: a step is as long as on its slowest rank, and the median step stands for the run.

    results: [rank], what timing.time_steps returns.
    """
    return statistics.median(max(step) for step in zip(*(result["seconds"] for result in results), strict=True))


def ratios(own: list[float], theirs: list[float]) -> dict[str, float]:
    """The spread of own / theirs, round by round. own, theirs: [round]."""
    return spread([mine / other for mine, other in zip(own, theirs, strict=True)])


def spread(values: list[float]) -> dict[str, float]:
    """{"min", "lower_quartile", "median", "upper_quartile", "max"}; of a single value, that value for all."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return dict(zip(("min", "lower_quartile", "median", "upper_quartile", "max"),
                    (min(values), *quartiles, max(values)), strict=True))
