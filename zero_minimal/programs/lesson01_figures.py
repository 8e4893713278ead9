"""Data parallel: the figures and the pictures of lesson 01's page, from naive.py and stage0.py on the same work.

    python -m zero_minimal.programs.lesson01_figures lessons/01_data_parallel

writes measured.json into that folder, and from it overlap.png and buckets.png. Bytes, messages and the order of events
are the same on any machine; the seconds of the all-reduces, and α and β with them, are this machine's own.
"""

import itertools
import math
import time

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from zero_minimal.core import collectives
from zero_minimal.meters import latency_probe
from zero_minimal.meters.arrivals import Arrivals, Event, overlapped
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.naive import Naive
from zero_minimal.pictures.arrival_chart import draw_arrivals, draw_bucket_cost
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, report
from zero_minimal.stage0 import Stage0
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

RANKS = 2
MICROS = 8
MIB = 2**20
ALONE = tuple(2**power for power in range(8, 24, 2)) + (2**23,)  # bytes of one all-reduce, for the fit
BUCKETS = tuple(2**power for power in range(14, 25, 2))  # bytes, and all gradients at once
ROUNDS = 15


class AtOnce(Stage0):
    """Stage 0, but each all-reduce is waited for as soon as it has started."""

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        self._wait()


WAYS = {"naive": Naive, "buckets, each waited for at once": AtOnce, "stage 0": Stage0}


# ----------------------------------------------------------------------------------------------------------- in a rank


def watched(stage_class, settings: Settings) -> list[list]:
    """Events of the second step's backward, and of what is reduced after it; without seconds."""
    with ranks.start() as rank:
        zero = loop.build(stage_class, settings, rank, bucket_bytes=int(settings.bucket_mb * MIB))
        batches = loop.training_batches(settings, rank.rank)
        for _ in range(2):
            zero.zero_grad()
            loss = zero.model(*next(batches))
            with Arrivals(zero.model) as arrivals:
                loss.backward()
                zero.reduced_gradients()
        return [[event.kind, event.number, event.bytes] for event in arrivals.events]


def sent(settings: Settings, no_sync: bool) -> int:
    """Bytes that this rank sends in a step of stage 0 with that many micro-batches."""
    with ranks.start() as rank:
        zero = loop.build(Stage0, settings, rank, bucket_bytes=int(settings.bucket_mb * MIB))
        batches = loop.training_batches(settings, rank.rank)
        for _ in range(2):
            zero.zero_grad()
            with TrafficMeter() as meter:
                for micro in range(settings.accumulate):
                    if no_sync and micro + 1 < settings.accumulate:
                        with zero.no_sync():
                            zero.model(*next(batches)).backward()
                    else:
                        zero.model(*next(batches)).backward()
                zero.step()
        return meter.sent_bytes


def all_reduces(sizes: tuple[int, ...], whole: int) -> tuple[list, list]:
    """[bytes, seconds] of one all-reduce of each size; and of `whole` bytes in buckets of each of BUCKETS."""
    alone = {size: torch.zeros(size // 4) for size in sizes}
    gradients = torch.zeros(whole // 4)
    single, cut = dict.fromkeys(sizes, math.inf), dict.fromkeys((*BUCKETS, whole), math.inf)
    for _ in range(ROUNDS):
        for size, tensor in alone.items():
            single[size] = min(single[size], *(timed([tensor]) for _ in range(3)))
        for size in cut:
            cut[size] = min(cut[size], timed(gradients.split(size // 4)))
    return [list(entry) for entry in single.items()], [list(entry) for entry in cut.items()]


def timed(tensors) -> float:
    """Seconds of all-reducing these, one after the other."""
    dist.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        collectives.all_reduce(tensor)
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------------------- figures


def measure() -> dict:
    """All that the page and its pictures need, of rank 0."""
    settings = Settings()
    ways = {name: ranks.run(watched, RANKS, stage_class, settings, device="cpu", timeout=300)[0]
            for name, stage_class in WAYS.items()}
    whole = sum(bytes for kind, _, bytes in ways["naive"] if kind == "gradient")
    micro = Settings(accumulate=MICROS)
    sent_bytes = {name: ranks.run(sent, RANKS, settings_, no_sync, device="cpu", timeout=300)[0]
                  for name, settings_, no_sync in (("one batch", settings, True), ("no_sync", micro, True),
                                                   ("without no_sync", micro, False))}
    alone, cut = ranks.run(all_reduces, RANKS, ALONE, whole, device="cpu", timeout=300)[0]
    cost = latency_probe.fit(alone)
    return {"ranks": RANKS, "whole": whole, "micros": MICROS, "ways": ways, "sent": sent_bytes, "alone": alone,
            "cut": cut, "alpha": cost.alpha, "beta": cost.beta}


def events(way: list[list]) -> list[Event]:
    """A recorded way as draw_arrivals() takes it; a second for each event."""
    return [Event(*entry, float(number)) for number, entry in enumerate(way)]


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    ways = {name: events(way) for name, way in measured["ways"].items()}
    cost = latency_probe.Cost(measured["alpha"], measured["beta"])
    return {"overlap.png": draw_arrivals(ways),
            "buckets.png": draw_bucket_cost(measured["cut"], measured["whole"], cost)}


def table(measured: dict) -> str:
    """What was measured, in words."""
    lines = [["", "all-reduces", "before backward ended", "gradients meanwhile"]]
    for name, way in measured["ways"].items():
        last = max(place for place, (kind, *_) in enumerate(way) if kind == "gradient")
        starts = [place for place, (kind, *_) in enumerate(way) if kind == "start"]
        meanwhile, count = overlapped(events(way))
        early = sum(place < last for place in starts)
        lines.append([name, str(len(starts)), str(early), f"{meanwhile} of {count}"])
    sizes = [["bucket", "ms"]] + [[f"{size / 2**10:.0f} KiB", f"{1000 * seconds:.2f}"] for size, seconds in
                                  itertools.chain(measured["alone"], measured["cut"])]
    words = ", ".join(f"{name} {count / 1e6:.2f} MB" for name, count in measured["sent"].items())
    return "\n".join((report.table(lines), words, f"α {measured['alpha'] * 1e6:.0f} µs, β {measured['beta'] * 1e9:.3f} "
                      f"ns a byte, n½ {measured['alpha'] / measured['beta'] / 1e3:.0f} kB", report.table(sizes)))


main = figures.program("01_data_parallel", measure, pictures, table)

if __name__ == "__main__":
    main()
