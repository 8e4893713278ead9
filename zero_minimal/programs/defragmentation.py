"""Defragmentation: the figures and pictures of lesson 08's page, from a training with slabs and without.

    python -m zero_minimal.programs.defragmentation lessons/08_defragmentation

writes traces.json into that folder: what the training asked an allocator for. The rest comes from replaying these:
measured.json, and the pictures. With --replay the traces are not recorded anew. What is counted are bytes and the order
of events, never time.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from zero_minimal.foundations import interrupts
from zero_minimal.foundations.blocks import Pool
from zero_minimal.meters import traces
from zero_minimal.meters.allocator import CachingAllocator, OutOfMemory, fails, find_capacity, replay, smallest_capacity
from zero_minimal.pictures import style
from zero_minimal.pictures.allocators import draw_least
from zero_minimal.pictures.fragmentation import draw_map
from zero_minimal.programs import report
from zero_minimal.programs.figures import on_few_lines
from zero_minimal.programs.fragmentation import Recording, mib, record, varied_lengths
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Parser

CONFIG = GPTConfig(layers=3, hidden=128, heads=2, sequence=192, vocabulary=16384)
BATCH, ACCUMULATE = 8, 3  # sequences in a micro-batch; micro-batches, all of one step
SEED, OTHER_SEED = 4, 3  # of the lengths, the model and the batches
WITHOUT, WITH, OTHER = "without slabs", "with slabs", "other lengths, without slabs"


# --------------------------------------------------------------------------------------------------- what is recorded


def record_all() -> dict:
    """traces.json: three trainings."""
    made = {}
    for name, seed, slabs in ((WITHOUT, SEED, False), (WITH, SEED, True), (OTHER, OTHER_SEED, False)):
        lengths = varied_lengths(ACCUMULATE, CONFIG.sequence, seed)
        recording = record(CONFIG, lengths, BATCH, ACCUMULATE, slabs, seed, name)
        made[name] = {"lengths": lengths, "losses": recording.losses, "begins": recording.begins,
                      **traces.packed(recording.trace)}
    return made


def recordings(folder: Path) -> dict[str, Recording]:
    """What traces.json holds, by name."""
    records = json.loads((folder / "traces.json").read_text(encoding="utf-8"))
    return {name: Recording(traces.unpacked(one), one["begins"], one["losses"]) for name, one in records.items()}


# --------------------------------------------------------------------------------------- allocators that lack something


class FirstFit(Pool):
    """Takes the first free block that is large enough, by address."""

    def take(self, size):
        fitting = [address for address, free in self.holes if free >= size]
        if not fitting:
            return None
        kept, self._free = self._free, [entry for entry in self._free if entry[1] == fitting[0]]
        block = super().take(size)
        self._free = sorted([entry for entry in kept if entry[1] != fitting[0]] + self._free,
                            key=lambda entry: entry[:2])
        return block


class NeverSplits(Pool):
    """Who asks gets the whole free block."""

    def __init__(self, slack=0):
        super().__init__(slack=2**62)


class NeverMerges(Pool):
    """A block that is freed stays as small as it was."""

    def give(self, block):
        block.used = False
        self._insert(block)


POOLS = {"best fit, split, merge": Pool, "first fit": FirstFit, "never splits": NeverSplits,
         "never merges": NeverMerges}


# ---------------------------------------------------------------------------------------------------- what is measured


def measure(found: dict[str, Recording]) -> dict:
    """measured.json: what each trace needs, how it fails, and what other allocators need for it."""
    without, with_slabs = found[WITHOUT].trace, found[WITH].trace
    finding = find_capacity(without, with_slabs)
    rows = {}
    for name, recording in found.items():
        generous = replay(recording.trace, CachingAllocator(2**62))
        rows[name] = {"events": len(recording.trace), "allocated": generous.peak_allocated,
                      "reserved": generous.peak_reserved, "least": smallest_capacity(recording.trace)}
    capacities = range(finding.smallest_with - 2**21, finding.smallest_without + 2**21, 2**21)
    failures = {capacity: described(fails(without, capacity)) for capacity in capacities}
    pools, pools_with_slabs = ({name: smallest_capacity(trace, pool=pool) for name, pool in POOLS.items()}
                               for trace in (without, with_slabs))
    return {"rows": rows, "capacity": finding.capacity, "failure": described(finding.failure), "pools": pools,
            "pools with slabs": pools_with_slabs,
            "failures": [{"capacity": capacity, **(failure or {})} for capacity, failure in failures.items()],
            "slabs": slab_bytes(found[WITH]), "same losses": found[WITHOUT].losses == found[WITH].losses}


def slab_bytes(recording: Recording) -> dict[str, int]:
    """Bytes of both slabs: what is alive from the first micro-batch to the last, and is no model state."""
    first, last = recording.begins[0], recording.begins[-1]
    alive = {event.storage for event in recording.trace[:first] if event.bytes > 0}
    alive -= {event.storage for event in recording.trace[:last] if event.bytes < 0}
    return {name: sum(storage.bytes for storage in alive if storage.category == category)
            for name, category in (("checkpoints", "activations"), ("gradients", "gradients"))}


def described(failure: OutOfMemory | None) -> dict | None:
    """Bytes, and the number of the request."""
    return failure and {name: getattr(failure, name)
                        for name in ("requested", "free", "largest_free", "allocated", "request", "capacity")}


# ------------------------------------------------------------------------------------------------------------ program


def pictures(found: dict[str, Recording], measured: dict) -> dict[str, Figure]:
    """The page's pictures by their files' names."""
    pair = {name: found[name] for name in (WITHOUT, WITH)}
    finding = find_capacity(*(recording.trace for recording in pair.values()))
    return {"map.png": draw_map(pair, finding), "allocators.png": draw_least(measured)}


@interrupts.program
def main(arguments: list[str] | None = None) -> None:
    """The program: record, measure, write, draw."""
    parser = Parser(description="Measure what lesson 08's page says, and draw its pictures.")
    parser.add_argument("folder", type=Path, help="of the lesson: lessons/08_defragmentation")
    parser.add_argument("--replay", action="store_true", help="of the traces that are there; record none")
    flags = parser.parse_args(arguments)
    if not flags.folder.is_dir():
        parser.error(f"there is no folder {flags.folder}: name the lesson's, lessons/08_defragmentation")
    if not flags.replay:
        (flags.folder / "traces.json").write_text(on_few_lines(record_all()), encoding="utf-8")
    found = recordings(flags.folder)
    measured = measure(found)
    (flags.folder / "measured.json").write_text(on_few_lines(measured), encoding="utf-8")
    for name, picture in pictures(found, measured).items():
        style.save(picture, flags.folder / name)
    report.say(table(measured))


def table(measured: dict) -> str:
    """What each trace needs, in MiB."""
    rows = [[name, *(mib(row[key]) for key in ("allocated", "reserved", "least"))]
            for name, row in measured["rows"].items()]
    return report.table([["MiB", "in use at the peak", "held, if it may", "least that is enough"], *rows])


if __name__ == "__main__":
    main()
