"""Experiments of a bug hunt: what each would show for which cause.

An experiment decides a hunt if its result, were that cause the true one, is neither that of the healthy run nor that of
a rival: a cause that a hasty reader would name for the same complaint.
"""

from typing import NamedTuple


class Experiment(NamedTuple):
    """What one does, and {cause: what would be seen}. With any other cause one sees what a healthy run shows."""

    words: str
    shows: dict[str, str]


EXPERIMENTS: dict[str, Experiment] = {
    "first-tokens": Experiment(
        "print the first tokens of the first batch on each rank",
        {"same-data": "the same tokens on every rank"}),
    "gradient-of-one-process": Experiment(
        "hold the gradient of the first step beside that of one process which gets the batches of all ranks",
        {"summed": "N times as large", "averaged-twice": "N times too small",
         "micro-batches-not-divided": "larger by the number of micro-batches",
         "never-reduced": "another gradient", "loaded-on-one-rank": "another gradient"}),
    "sums-at-the-start": Experiment(
        "print a sum of all parameters on each rank, before the first step",
        {"loaded-on-one-rank": "another sum on each rank"}),
    "sums-by-bucket": Experiment(
        "print a sum of each bucket's parameters on each rank, after the first step",
        {"last-gather-missing": "the last bucket's sums differ", "never-reduced": "all sums differ",
         "loaded-on-one-rank": "all sums differ"}),
    "count-updates": Experiment(
        "print on each rank how many updates its optimizer has made",
        {"skipped-on-one-rank": "one rank has made fewer"}),
    "storages": Experiment(
        "list the gradient shards after backward: bytes of each, and bytes of the storage that it lies in",
        {"view-of-the-whole": "storages that are larger than the shards"}),
    "living-graphs": Experiment(
        "count after each step the living tensors that still have a grad_fn",
        {"graph-kept": "more of them after each step"}),
    "list-units": Experiment(
        "list the units that are gathered, with their parameters",
        {"one-unit": "one line"}),
    "first-micro-batch": Experiment(
        "count the collectives in the backward pass of a step's first micro-batch, which is not its last",
        {"reduced-each-micro-batch": "a reduction of every bucket"}),
    "order-of-events": Experiment(
        "in a step's last backward pass, print a line at each gradient, each start of a collective and each wait",
        {"waited-for-at-once": "each wait follows its start at once",
         "one-bucket": "one start, after the last gradient", "one-unit": "one start, after the last gradient",
         "reduced-late": "all starts after the last gradient",
         "never-reduced": "no start", "tiny-buckets": "a start at nearly every gradient"}),
    "time-the-batches": Experiment(
        "time on each rank how long the next batch takes, without training",
        {"straggler": "one rank takes many times as long"}),
    "time-a-message": Experiment(
        "time an all-reduce of one bucket by itself, when all ranks are there",
        {"slow-network": "many times as long"}),
    "norm-of-the-whole": Experiment(
        "gather the gradient shards, and hold the norm of the whole beside the norm that each rank reports",
        {"norm-of-a-shard": "each rank reports less than the norm of the whole"}),
    "optimizers-tensors": Experiment(
        "list dtype and size of the tensors that the optimizer updates",
        {"no-masters": "16-bit tensors", "whole-optimizer-state": "N times as many elements"}),
    "half-the-rate": Experiment(
        "train again with the learning rate divided by ten",
        {"learning-rate": "the losses of the healthy run"}),
}

RIVALS: dict[str, tuple[str, ...]] = {  # what a hasty reader takes a cause for
    "graph-kept": ("view-of-the-whole", "whole-optimizer-state"),
    "loaded-on-one-rank": ("never-reduced", "skipped-on-one-rank", "same-data"),
    "reduced-each-micro-batch": ("tiny-buckets", "all-reduced-and-sliced", "one-bucket"),
    "same-data": ("never-reduced", "loaded-on-one-rank", "learning-rate"),
    "summed": ("averaged-twice", "micro-batches-not-divided", "learning-rate"),
    "one-unit": ("never-released", "reduced-late", "one-bucket"),
    "view-of-the-whole": ("reduced-late", "graph-kept"),
    "waited-for-at-once": ("one-bucket", "slow-network", "straggler"),
    "straggler": ("slow-network", "waited-for-at-once"),
    "norm-of-a-shard": ("same-data", "skipped-on-one-rank", "never-reduced"),
    "no-masters": ("learning-rate", "averaged-twice"),
    "skipped-on-one-rank": ("last-gather-missing", "never-reduced", "loaded-on-one-rank"),
}


def decides(experiment: str, cause: str) -> bool:
    """Whether its result tells this cause from a healthy run and from all its rivals."""
    shows = EXPERIMENTS[experiment].shows
    return cause in shows and all(shows.get(rival) != shows[cause] for rival in RIVALS.get(cause, ()))


def against(experiment: str, cause: str) -> str:
    """What is wrong with one that does not decide, for a learner who knows the cause."""
    shows = EXPERIMENTS[experiment].shows
    same = [rival for rival in RIVALS.get(cause, ()) if shows.get(rival) == shows.get(cause)]
    if cause in shows:
        return f"that experiment would give the same result for your cause and for {same[0]}: {shows[cause]}"
    words = "that experiment would show what a healthy run shows, if your cause is the true one"
    return f"{words}; so it would if it were {same[0]}, and you could not tell them apart" if same else words
