"""Who lies where in memory: address over time, from a trace that a model of the allocator replays."""

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero_minimal.meters.allocator import MIB, CachingAllocator, Row, memory_map
from zero_minimal.pictures.style import LOOKS, figure, legend_outside

CACHED = "#E4E4E4"


def draw_map(recordings: dict, capacity: int) -> Figure:
    """Address over time, a panel for each recording, replayed at this capacity.

    A rectangle is a storage, in the colour of its category; light grey is memory that the allocator holds and nobody
    uses, white what it never had or gave back. Addresses go beyond the capacity where segments were given back: the
    driver maps the same pages elsewhere. A black line ends a panel where memory ran out.
    """
    result, axes = figure(1, len(recordings), 7.5 * len(recordings), 5.6)
    seen, tops = [], []
    for axis, (title, recording) in zip(axes[0], recordings.items(), strict=True):
        allocator = CachingAllocator(capacity)
        rows, failure = memory_map(recording.trace, allocator)
        last = max(row.end for row in rows)
        cached = [Row(segment.begin, segment.end or last, segment.address, segment.bytes, "")
                  for segment in allocator.segments + allocator.past_segments]
        _rectangles(axis, cached, CACHED)
        for category, (colour, _) in LOOKS.items():
            own = [row for row in rows if _drawn_as(row.category) == category]
            _rectangles(axis, own, colour)
            seen += [category] if own and category not in seen else []
        if failure:
            axis.axvline(last, color="black", linewidth=2)
            title += f": out of memory, {failure.free_share:.0%} free"
        axis.set_title(title)
        axis.set_xlim(0, len(recording.trace))
        tops.append(max(row.address + row.bytes for row in cached) / MIB)
        axis.set_xticks(recording.begins, range(1, len(recording.begins) + 1))
        axis.set_xlabel("micro-batch, from where it begins")
    for axis in axes[0]:
        axis.set_ylim(0, max(tops))
        axis.set_ylabel("address, MiB; white: not the allocator's")
    entries = {category: Patch(color=colour) for category, (colour, _) in LOOKS.items() if category in seen}
    legend_outside(result, entries | {"held by the allocator, free": Patch(color=CACHED)})
    result.suptitle(f"Who lies where, with a capacity of {capacity / MIB:,.0f} MiB", fontsize=14)
    return result


def _drawn_as(category: str) -> str:
    return "optimizer" if category == "scalars" else category


def _rectangles(axis, rows: list[Row], colour: str) -> None:
    corners = [
        [(row.begin, row.address / MIB), (row.end, row.address / MIB),
         (row.end, (row.address + row.bytes) / MIB), (row.begin, (row.address + row.bytes) / MIB)]
        for row in rows
    ]
    axis.add_collection(PolyCollection(corners, facecolors=colour, linewidths=0, rasterized=True))
