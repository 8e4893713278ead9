"""Fragmentation: where storages are in memory, with and without slabs, replayed by a model of the allocator; and how
much memory allocators without best fit, splitting or merging need. And a slider that moves through a memory, request by
request, in a notebook or a browser, without a server."""

import bisect
import json
import zlib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero_minimal.meters.allocator import MIB, CachingAllocator, Finding, OutOfMemory, Row, memory_map
from zero_minimal.meters.memory import Event
from zero_minimal.pictures import style

HOLE = {"facecolor": "#F4F4F4", "edgecolor": "#ADADAD", "hatch": "xxx", "linewidth": 0}
SEGMENT = {"facecolor": "none", "edgecolor": "black", "linewidth": 0.5}
ASKED = {"facecolor": "#D55E00", "edgecolor": "black", "linewidth": 1.2}
LARGE = 0.015  # share of memory from which a storage is hatched, and a hole labelled with its size


def draw_map(recordings: dict, finding: Finding) -> Figure:
    """The recordings {name: without slabs, name: with them}, replayed at the capacity at which only one fails.

    Above, address against time: each rectangle is a storage, in the look of its category; free parts of segments are
    hatched, and the driver's memory is white. Addresses exceed the capacity after segments were returned: the driver
    maps the same pages elsewhere. Below, the whole memory when the first recording fails, and at the same request of
    the second. If there is no such capacity, both succeed, and nothing is drawn below.
    """
    capacity = finding.capacity or max(finding.smallest_without, finding.smallest_with)
    picture = Figure(figsize=(8.6, 7.3 if finding.failure else 4.6), layout="constrained")
    bars = [["bar 0", "bar 0"], ["bar 1", "bar 1"]] if finding.failure else []
    axes = picture.subplot_mosaic([["map 0", "map 1"], *bars], height_ratios=(3.6, 1.1, 0.6)[: 1 + len(bars)])
    ends = moments(*recordings.values(), capacity) if finding.failure else (None, None)
    seen, top = set(), 0
    for number, ((name, recording), moment) in enumerate(zip(recordings.items(), ends, strict=True)):
        allocator = CachingAllocator(capacity)
        rows, failure = memory_map(recording.trace, allocator)
        seen |= {look_of(row.category) for row in rows}
        top = max([top, *(segment.address + segment.bytes for segment in _all_segments(allocator))])
        _draw_time(axes[f"map {number}"], rows, allocator, recording.begins, moment)
        axes[f"map {number}"].set_title(name + (": out of memory" if failure else ""), fontsize=11)
        if moment is not None:
            _draw_moment(axes[f"bar {number}"], name, recording.trace[: moment + 1], capacity, finding.failure)
        elif finding.failure:
            axes[f"bar {number}"].set_visible(False)
    for number in (0, 1):
        axes[f"map {number}"].set(ylim=(0, top / MIB), ylabel="" if number else "address, MiB")
    style.legend_outside(picture, _entries(seen, finding), columns=4)
    picture.suptitle(f"Who lies where in {capacity / MIB:,.0f} MiB", fontsize=13)
    return picture


def moments(first, second, capacity: int) -> tuple[int, int | None]:
    """The event at which the first recording fails, and the same request in the second, or None. It is the same if it
    is the n-th request of this many bytes in the same micro-batch of both."""
    rows, _ = memory_map(first.trace, CachingAllocator(capacity))
    fails = max(row.end for row in rows)
    batch = bisect.bisect_right(first.begins, fails) - 1
    wanted = first.trace[fails].bytes
    before = sum(event.bytes == wanted for event in first.trace[first.begins[batch] : fails])
    begin, end = (*second.begins, len(second.trace))[batch : batch + 2]
    same = [index for index in range(begin, end) if second.trace[index].bytes == wanted]
    return fails, same[before] if before < len(same) else None


# ----------------------------------------------------------------------------------------------------------- over time


def _draw_time(axis: Axes, rows: list[Row], allocator: CachingAllocator, begins: list[int], moment: int | None) -> None:
    last = max(row.end for row in rows)
    lives = [Row(segment.begin, segment.end or last, segment.address, segment.bytes, "")
             for segment in _all_segments(allocator)]
    _rectangles(axis, lives, **HOLE)
    for category, (colour, hatch) in style.LOOKS.items():
        own = [row for row in rows if look_of(row.category) == category]
        large = [row for row in own if row.bytes >= LARGE * allocator.capacity]
        _rectangles(axis, own, facecolor=colour, linewidth=0)
        _rectangles(axis, large, facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0)
    _rectangles(axis, lives, **SEGMENT)
    if moment is not None:
        axis.axvline(moment, color="black", linewidth=2, linestyle="--")
    axis.set_xlim(begins[0], last * 1.02)
    shown = [begin for begin in begins if begin < last]
    axis.set_xticks(shown, range(1, len(shown) + 1))
    axis.set_xlabel("micro-batch, from where it begins")
    axis.spines[["top", "right"]].set_visible(False)


def _rectangles(axis: Axes, rows: list[Row], **look) -> None:
    corners = [
        [(row.begin, row.address / MIB), (row.end, row.address / MIB),
         (row.end, (row.address + row.bytes) / MIB), (row.begin, (row.address + row.bytes) / MIB)]
        for row in rows
    ]
    axis.add_collection(PolyCollection(corners, rasterized=True, **look))


# --------------------------------------------------------------------------------------------------------- at a moment


def _draw_moment(axis: Axes, name: str, trace: list, capacity: int, failure: OutOfMemory) -> None:
    """A bar of the whole memory after the trace's last event, the request: its segments, then the driver's remaining
    memory. A refused request is drawn below."""
    allocator = CachingAllocator(capacity)
    rows, refused = memory_map(trace, allocator)
    alive = [row for row in rows if row.end == max(row.end for row in rows)]
    starts, used = {}, 0
    for segment in allocator.segments:  # in a row: the addresses between segments are unused
        starts[segment.address] = used
        used += segment.bytes

    def place(address: int) -> float:
        """An address's position in the bar, in MiB."""
        segment = max(start for start in starts if start <= address)
        return (starts[segment] + address - segment) / MIB

    for row in alive:
        colour, hatch = style.LOOKS[look_of(row.category)]
        axis.barh(0, row.bytes / MIB, 1, left=place(row.address), facecolor=colour, edgecolor="white", hatch=hatch,
                  linewidth=0)
    for address, bytes in allocator.holes:
        axis.barh(0, bytes / MIB, 1, left=place(address), **HOLE)
        _name(axis, place(address), bytes, capacity)
    for segment in allocator.segments:
        axis.barh(0, segment.bytes / MIB, 1, left=place(segment.address), **SEGMENT)
    axis.barh(0, (capacity - used) / MIB, 1, left=used / MIB, **SEGMENT)
    _name(axis, used / MIB, capacity - used, capacity)
    asked, free = failure.requested / MIB, failure.free / MIB
    if refused:
        axis.barh(-1.1, asked, 0.7, left=0, **ASKED)
        lacks = "has so much" if failure.is_for_want_of_a_block else "serves requests of this size"
        axis.text(asked, -1.1, f"  {asked:.1f} MiB are asked for, and no free block {lacks}", va="center", fontsize=9)
        words = f"{free:.0f} MiB are free ({failure.free_share:.0%})"
    else:
        (row,) = (row for row in alive if row.begin == len(trace) - 1)
        axis.barh(0, row.bytes / MIB, 1, left=place(row.address), **ASKED)
        words = f"the same {asked:.1f} MiB find room"
    axis.set_title(f"{name}, at the dashed line: {words}", fontsize=10, loc="left")
    axis.set(xlim=(0, capacity / MIB), yticks=[], ylim=(-1.6 if refused else -0.6, 0.6))
    axis.set_xlabel("" if refused else "MiB")
    axis.spines[["top", "right", "left"]].set_visible(False)


def _name(axis: Axes, start: float, bytes: int, capacity: int) -> None:
    if bytes >= LARGE * capacity:
        axis.text(start + bytes / MIB / 2, 0, f"{bytes / MIB:.1f}", ha="center", va="center", fontsize=9,
                  bbox=style.WHITE | {"pad": 1.0})


def _all_segments(allocator: CachingAllocator) -> list:
    return allocator.segments + allocator.past_segments


def look_of(category: str) -> str:
    """The category whose look is used for this one."""
    return "optimizer" if category == "scalars" else category


def _entries(seen: set[str], finding: Finding) -> dict[str, Patch]:
    entries = {category: Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0)
               for category, (colour, hatch) in style.LOOKS.items() if category in seen}
    entries |= {"free, in a segment": Patch(**HOLE), "a segment's border; white: the driver's": Patch(**SEGMENT)}
    return entries | ({"asked for": Patch(**ASKED)} if finding.failure else {})


# --------------------------------------------------------------------------------------- allocators that lack something


def draw_least(pools: dict[str, int], used: float, with_slabs: int) -> Figure:
    """A bar for each allocator, {name: fewest bytes that suffice}, and one for the first of them with slabs; a line at
    the MiB in use at the peak."""
    bars = pools | {"the first one, with slabs": with_slabs}
    picture, ((axis,),) = style.figure(1, 1, 8.6, 2.9)
    for place, size in enumerate(bars.values()):
        last = place == len(bars) - 1
        axis.barh(-place, size / MIB, 0.62, facecolor="white" if last else style.PLAIN[0],
                  edgecolor=style.PLAIN[0], hatch="//" if last else "", linewidth=1)
        style.note(axis, f"{size / MIB:,.0f} MiB", (size / MIB, -place), (5, 0), va="center", bbox=style.WHITE)
    axis.axvline(used, color="black", linewidth=1.6, linestyle="--")
    axis.text(used, 0.5, f" in use at the peak: {used:,.0f} MiB", va="bottom", fontsize=9)
    axis.set_yticks([-place for place in range(len(bars))], list(bars))
    axis.set(xlabel="least memory, in MiB, that is enough for the same training", ylim=(None, 1.0),
             xlim=(0, 1.12 * max(bars.values()) / MIB))
    axis.grid(visible=False, axis="y")
    axis.grid(axis="x", **style.GRID)
    return picture


# --------------------------------------------------------------------------------------------------- request by request

TEMPLATE = Path(__file__).with_name("scrub.html")


class Scrub:
    """Bars of whole memories, each with a slider over the requests of a trace; shown as HTML.

    Args:
        traces: {name: trace}, from unpacked(), replayed with this capacity until they end or fail.
        starts: {name: the request shown first}; by default the one that fails, or else the last.
        pools: {name: the Pool that serves it}; by default the allocator's own.
    """

    def __init__(self, traces: dict[str, list[Event]], capacity: int, starts: dict[str, int] | None = None,
                 pools: dict[str, type] | None = None):
        self.capacity = capacity
        self.memories = [_memory(name, trace, capacity, (starts or {}).get(name), (pools or {}).get(name))
                         for name, trace in traces.items()]

    def __repr__(self) -> str:
        return f"{' and '.join(memory['name'] for memory in self.memories)}, to be scrubbed through in a notebook"

    def _repr_html_(self) -> str:
        seen = {row[-1] for memory in self.memories for row in memory["rows"]}
        content = {"capacity": self.capacity, "memories": self.memories,
                   "looks": {category: colour for category, (colour, _) in style.LOOKS.items() if category in seen}}
        data = json.dumps(content, separators=(",", ":"))
        name = f"scrub-{zlib.crc32(data.encode()):x}"  # a page may have several elements
        return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data).replace("__ID__", name)


def _memory(name: str, trace: list[Event], capacity: int, start: int | None, pool: type | None) -> dict:
    """One replay for the page: rows (begin, end, address, bytes, category), segments (begin, end, address, bytes), the
    bytes of each request (negative: freed), and where it fails."""
    allocator = CachingAllocator(capacity, pool) if pool else CachingAllocator(capacity)
    rows, failure = memory_map(trace, allocator)
    last = failure.request if failure else len(trace) - 1
    return {
        "name": name, "start": last if start is None else start, "fails": failure and failure.request,
        "requests": [event.bytes for event in trace[: last + 1]],
        # include the failing request in the lifetime of what is alive then
        "rows": [[row.begin, row.end + (failure is not None and row.end == last), row.address, row.bytes,
                  look_of(row.category)] for row in rows],
        "segments": [[segment.begin, segment.end, segment.address, segment.bytes]
                     for segment in _all_segments(allocator)],
    }
