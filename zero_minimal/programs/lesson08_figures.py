"""Defragmentation: the figures and pictures of lesson 08's page, from a training with slabs and without.

    python -m zero_minimal.programs.lesson08_figures lessons/08_defragmentation

writes measured.json into that folder, and draws from it. First in it are traces: what each training asked an allocator
for. All else comes from replaying these. What is counted are bytes and the order of events, never time.
"""

from matplotlib.figure import Figure

from zero_minimal.core.blocks import Pool
from zero_minimal.meters import traces
from zero_minimal.meters.allocator import CachingAllocator, OutOfMemory, fails, find_capacity, replay, smallest_capacity
from zero_minimal.pictures.memory_map import draw_least, draw_map
from zero_minimal.programs import figures, report
from zero_minimal.programs.lesson08_program import Recording, mib, record, varied_lengths
from zero_minimal.workload.model import GPTConfig

CONFIG = GPTConfig(layers=3, hidden=128, heads=2, sequence=192, vocabulary=16384)
BATCH, ACCUMULATE = 8, 3  # sequences in a micro-batch; micro-batches, all of one step
SEED, OTHER_SEED = 4, 3  # of the lengths, the model and the batches
WITHOUT, WITH, OTHER = "without slabs", "with slabs", "other lengths, without slabs"


# --------------------------------------------------------------------------------------------------- what is recorded


def record_all() -> dict:
    """Three trainings by name: a trace each, with where its micro-batches begin, their lengths and losses."""
    made = {}
    for name, seed, slabs in ((WITHOUT, SEED, False), (WITH, SEED, True), (OTHER, OTHER_SEED, False)):
        lengths = varied_lengths(ACCUMULATE, CONFIG.sequence, seed)
        recording = record(CONFIG, lengths, BATCH, ACCUMULATE, slabs, seed, name)
        made[name] = {"lengths": lengths, "losses": recording.losses, "begins": recording.begins,
                      **traces.packed(recording.trace)}
    return made


def recordings(measured: dict) -> dict[str, Recording]:
    """The trainings of measured.json, by name."""
    return {name: Recording(traces.unpacked(one), one["begins"], one["losses"])
            for name, one in measured["traces"].items()}


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


def measure() -> dict:
    """measured.json."""
    recorded = {"traces": record_all()}
    return recorded | replayed(recordings(recorded))


def replayed(found: dict[str, Recording]) -> dict:
    """What each trace needs, how it fails, and what other allocators need for it."""
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


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their files' names."""
    pair = {name: recording for name, recording in recordings(measured).items() if name in (WITHOUT, WITH)}
    finding = find_capacity(*(recording.trace for recording in pair.values()))
    return {"map.png": draw_map(pair, finding), "allocators.png": draw_least(measured)}


def table(measured: dict) -> str:
    """What each trace needs, in MiB."""
    rows = [[name, *(mib(row[key]) for key in ("allocated", "reserved", "least"))]
            for name, row in measured["rows"].items()]
    return report.table([["MiB", "in use at the peak", "held, if it may", "least that is enough"], *rows])


main = figures.program("08_defragmentation", measure, pictures, table)

if __name__ == "__main__":
    main()
