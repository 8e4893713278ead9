"""Scaling: the points that the benchmark measures: models by name, and sweeps over ranks, sizes and sequence lengths.

A point is a model on a number of ranks, measured once for every contender. A sweep is a row of points:

    ranks       1, 2 and 4. Weak: each rank keeps its batch, so the total work grows; ideally the time stays the same.
                Strong: the total batch stays the same, so a rank's work shrinks; ideally the time is 1/N
    size        5M to 100M parameters
    sequence    64 to 512 tokens
    link        the link between two nodes, at the given speeds
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_minimal.workload.settings import Settings, positive

MODELS = {  # millions of parameters: layers, hidden; heads are 64 wide
    "5M": (6, 256),
    "11M": (6, 384),
    "25M": (8, 512),
    "50M": (10, 640),
    "100M": (12, 832),
}
SWEEPS = ("ranks", "size", "sequence")
RANKS, SEQUENCES = (1, 2, 4), (64, 128, 256, 512)


@dataclass(frozen=True)
class Point:
    """A model on `ranks` ranks; `sweeps` names its curves: "size", "sequence", "weak", "strong", "link", or "" for
    none."""

    ranks: int
    model: str
    settings: Settings
    sweeps: tuple[str, ...] = ("",)
    link: str = ""  # between two nodes, as two_nodes.bits reads it; "": all ranks on one machine
    bucket_mb: int | None = None  # MiB of all contenders' buckets; None: each has its own

    def describe(self) -> str:
        """In a few words, for progress and titles."""
        words = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        link = f", link of {self.link}" if self.link else ""
        return f"{self.model}, {words}, {self.settings.batch} × {self.settings.sequence} tokens a rank{link}"

    @property
    def options(self) -> dict:
        """Options for a contender's class."""
        return {} if self.bucket_mb is None else {"bucket_bytes": self.bucket_mb * 2**20}


def points(
    models: list[str], ranks: int, settings: Settings, sweeps: list[str], links: Sequence[str] = ()
) -> list[Point]:
    """The points to measure: the models as they are, or, if sweeps are named, only the first model along each sweep;
    all of them behind each of these links.

    A point on several curves occurs once. Raises ValueError if a batch is not divisible for strong scaling.
    """
    if links:
        curve = ("link",) if len(links) > 1 else ("",)
        return [Point(ranks, model, of_size(settings, model), curve, link) for model in models for link in links]
    first = models[0]
    wanted = [] if sweeps else [("", ranks, model, settings) for model in models]
    if "ranks" in sweeps:
        total = ranks * settings.batch
        odd = [count for count in RANKS if total % count]
        if odd:
            raise ValueError(f"strong scaling cannot share {ranks} × {settings.batch} sequences among {odd[0]} ranks: "
                             f"choose --batch so that {' and '.join(map(str, RANKS))} divide them")
        wanted += [("weak", count, first, settings) for count in RANKS]
        wanted += [("strong", count, first, replace(settings, batch=total // count)) for count in RANKS]
    if "size" in sweeps:
        wanted += [("size", ranks, model, settings) for model in MODELS]
    if "sequence" in sweeps:
        wanted += [("sequence", ranks, first, replace(settings, sequence=length)) for length in SEQUENCES]

    curves: dict[tuple, list[str]] = {}
    for curve, count, model, point_settings in wanted:
        curves.setdefault((count, model, of_size(point_settings, model)), []).append(curve)
    return [Point(*key, sweeps=tuple(names)) for key, names in curves.items()]


def of_size(settings: Settings, model: str) -> Settings:
    """The settings with this model's shape."""
    layers, hidden = shape(model)
    return replace(settings, layers=layers, hidden=hidden, heads=hidden // 64 if hidden % 64 == 0 else 1)


def shape(model: str) -> tuple[int, int]:
    """(layers, hidden) of a model: a name of MODELS, or numbers such as "6x384"; the type of a flag."""
    if model in MODELS:
        return MODELS[model]
    layers, x, hidden = model.partition("x")
    try:
        if not x:
            raise ValueError
        return positive(layers), positive(hidden)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{model!r} is no model: choose from {', '.join(MODELS)}, or give layers and width, as in 6x384"
        ) from None
