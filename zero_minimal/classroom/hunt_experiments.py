"""Experiments of a bug hunt: what each would show for which cause.

An experiment decides a hunt if its result, were that cause the true one, is neither that of the healthy run nor that of
a rival: a cause that a hasty reader would name for the same complaint.
"""

from typing import NamedTuple


class Experiment(NamedTuple):
    """What one does; what a healthy run shows, and a broken one with any cause that is not named; {cause: what would be
    seen}; {cause: why one sees what a healthy run shows, where that is no matter of course}."""

    words: str
    healthy: str
    shows: dict[str, str]
    though: dict[str, str] = {}


EXPERIMENTS: dict[str, Experiment] = {
    "print-the-input": Experiment(
        "print the first tokens of the first batch on each rank",
        "other tokens on each rank",
        {"same-data": "the same tokens on every rank"}),
    "gradient-of-one-process": Experiment(
        "hold the gradient of the first step, before clipping, beside that of one process which gets the very batches "
        "that the ranks read",
        "the same gradient, up to rounding",
        {"summed": "N times as large", "averaged-twice": "N times too small",
         "micro-batches-not-divided": "larger by the number of micro-batches",
         "never-reduced": "another gradient", "loaded-on-one-rank": "another gradient"},
        {"same-data": "the one process reads the same batches, too"}),
    "sums-at-the-start": Experiment(
        "print a sum of all parameters on each rank, before the first step",
        "the same sum on every rank",
        {"loaded-on-one-rank": "another sum on each rank"}),
    "sums-by-bucket": Experiment(
        "print a sum of each bucket's parameters on each rank, after the first step",
        "the same sums on every rank",
        {"last-gather-missing": "the last bucket's sums differ", "never-reduced": "all sums differ",
         "loaded-on-one-rank": "all sums differ"},
        {"skipped-on-one-rank": "the sums are those after the first step, and the first skip comes later"}),
    "read-the-counters": Experiment(
        "print on each rank how many updates its optimizer has made",
        "the same number on every rank",
        {"skipped-on-one-rank": "one rank has made fewer"}),
    "sizes-after-backward": Experiment(
        "list the gradients that stay after backward: bytes of each, and bytes of the storage that it lies in",
        "no storage larger than what lies in it",
        {"view-of-the-whole": "storages that are larger than the shards in them"}),
    "count-living-tensors": Experiment(
        "count after each step the living tensors that still have a grad_fn",
        "as many after each step",
        {"graph-kept": "more of them after each step"}),
    "print-the-wrapping": Experiment(
        "print a line for each piece of the model that stage 3 gathers at once, with its number of parameters",
        "a line for each block, and one for the rest; below stage 3 no line",
        {"one-unit": "one line"}),
    "calls-in-one-backward": Experiment(
        "count the collectives in a backward pass which is not the last one of its step",
        "no reduction of a bucket",
        {"reduced-each-micro-batch": "a reduction of every bucket"}),
    "order-of-events": Experiment(
        "in a step's last backward pass, print a line at each gradient, each start of a collective and each wait",
        "starts between the gradients, and each wait some gradients later",
        {"waited-for-at-once": "each wait follows its start at once",
         "one-bucket": "no reduction starts before the last gradient",
         "one-unit": "no reduction starts before the last gradient",
         "reduced-late": "no reduction starts before the last gradient",
         "never-reduced": "no start", "tiny-buckets": "a start at nearly every gradient"}),
    "time-without-training": Experiment(
        "time on each rank how long the next batch takes, without training",
        "about the same time on every rank",
        {"straggler": "one rank takes many times as long"}),
    "time-one-call": Experiment(
        "time an all-reduce of one bucket by itself, when all ranks are there",
        "what a message of its size takes",
        {"slow-network": "many times as long"}),
    "norm-by-hand": Experiment(
        "gather the gradients before clipping, and hold the norm of the whole beside what each rank reports",
        "each rank reports the norm of the whole",
        {"norm-of-a-shard": "each rank reports less than the norm of the whole"}),
    "what-is-updated": Experiment(
        "list dtype and size of the tensors that the optimizer updates",
        "fp32 tensors, of as many elements as are the rank's to update",
        {"no-masters": "16-bit tensors", "whole-optimizer-state": "N times as many elements"}),
    "tenth-of-the-rate": Experiment(
        "train both runs again with the learning rate divided by ten, and hold the losses beside each other and beside "
        "those at the full rate",
        "losses that fall more slowly than those at the full rate",
        {"learning-rate": "the losses of the healthy run at the full rate",
         "no-masters": "losses that stay above those of the healthy run at that rate: smaller updates are rounded away "
                       "even more"}),
}

RIVALS: dict[str, tuple[str, ...]] = {  # what a hasty reader takes a cause for, and no setting of its hunt excludes
    "graph-kept": ("reduced-late", "one-bucket"),
    "loaded-on-one-rank": ("never-reduced", "skipped-on-one-rank", "same-data"),
    "reduced-each-micro-batch": ("tiny-buckets", "one-bucket"),
    "same-data": ("never-reduced", "loaded-on-one-rank", "learning-rate"),
    "summed": ("averaged-twice", "micro-batches-not-divided", "learning-rate"),
    "one-unit": ("never-released", "reduced-late"),
    "view-of-the-whole": ("reduced-late", "graph-kept"),
    "waited-for-at-once": ("one-bucket", "slow-network", "straggler"),
    "straggler": ("slow-network", "waited-for-at-once"),
    "norm-of-a-shard": ("same-data", "skipped-on-one-rank", "never-reduced"),
    "no-masters": ("learning-rate", "averaged-twice"),
    "skipped-on-one-rank": ("never-reduced", "loaded-on-one-rank"),
}


def decides(experiment: str, cause: str) -> bool:
    """Whether its result tells this cause from a healthy run and from all its rivals."""
    shows = EXPERIMENTS[experiment].shows
    return cause in shows and all(shows.get(rival) != shows[cause] for rival in RIVALS.get(cause, ()))


def against(experiment: str, cause: str) -> str:
    """What is wrong with one that does not decide, for a learner who knows the cause."""
    known = EXPERIMENTS[experiment]
    words = f"with your cause, {experiment} would show: {known.shows.get(cause, known.healthy)}"
    if cause in known.shows:
        same = next(rival for rival in RIVALS[cause] if known.shows.get(rival) == known.shows[cause])
        return f"{words}. So it would with {same}: it does not tell the two apart"
    why = f" ({known.though[cause]})" if cause in known.though else ""
    return f"{words}, as in a healthy run{why}. So it tells nothing of your cause"
