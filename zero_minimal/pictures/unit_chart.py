"""Unit chart: a model's units at stage 3, gathered and released turn by turn; and what it costs to keep some."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.pictures import style

LOOK_OF: dict[str, tuple[style.Look, str]] = {  # of the states of meters/unit_trace.py, and of gradients
    "whole": (style.LOOKS["parameters"], "whole"),
    "coming": (style.COMING, "on its way: the other ranks send their shards"),
    "shard": (("#002F4B", ""), "its own shard, which stays"),
    "idle": (style.IDLE, "memory that nobody can read"),
    "gradients": (style.LOOKS["gradients"], "its gradients, on their way to their shards"),
}
RAIL = 0.16  # the shard's part of a line's height
GAP = 0.6  # between forward, backward and the end


def draw_conveyor(records: dict[str, dict]) -> Figure:
    """Two panels for each record, one above the other: the units, a line for each, turn by turn; and the bytes of whole
    parameters at each turn.

    Args: records, {title: the record of meters/unit_trace.py}; all over the same turns.
    """
    units = max(len(record["units"]) for record in records.values())
    heights = [height for _ in records for height in (0.32 * units + 0.75, 1.35)]
    result = Figure(figsize=(style.PAGE, sum(heights) + 0.4), layout="constrained")
    axes = result.subplots(len(heights), 1, height_ratios=heights)
    highest = max(max(record["bytes"]) for record in records.values())
    longest = max(_places(record)[-1] for record in records.values())
    for (title, record), belt, memory in zip(records.items(), axes[::2], axes[1::2], strict=True):
        places = _places(record)
        _belt(belt, record, places)
        belt.set_title(title, fontsize=11, pad=20)
        _memory(memory, record, places, highest)
        for axis in (belt, memory):
            axis.set_xlim(-0.6, longest + 0.6)
            style.bare(axis)
    seen = {state for record in records.values() for line in record["states"] for state in line}
    if any(number is not None for record in records.values() for number in record["reducing"]):
        seen.add("gradients")
    if any(any(_lost(record)) for record in records.values()):
        seen.add("idle")
    style.legend_outside(result, style.keys({words: look for kind, (look, words) in LOOK_OF.items() if kind in seen}),
                         columns=2)
    return result


def _places(record: dict) -> list[float]:
    """The position of each moment: in order, with a gap before each new phase."""
    places, before = [], None
    for phase, _ in record["turns"]:
        step = 0.0 if before is None else 1.0 if phase == before else 1.0 + GAP
        places.append((places[-1] if places else 0.0) + step)
        before = phase
    return places


def _belt(axis: Axes, record: dict, places: list[float]) -> None:
    """A line for each unit, the root on top: its shard, which is kept, and above it what this rank has of the rest."""
    for unit, states in enumerate(record["states"]):
        for moment, (place, state) in enumerate(zip(places, states, strict=True)):
            _cell(axis, place, unit, 0.0, RAIL, "shard")
            if state != "shard":
                _cell(axis, place, unit, RAIL, 1.0, state)
            if record["reducing"][moment] == unit:
                _cell(axis, place, unit, RAIL, 1.0 if state == "shard" else (1 + RAIL) / 2, "gradients")
            if record["turns"][moment][1] == unit:
                axis.text(place, unit - 0.08, "●", ha="center", va="center", fontsize=9, color="white")
    _phases(axis, record, places)
    axis.set_yticks(range(len(record["units"])), record["units"])
    axis.set_ylim(len(record["units"]) - 0.45, -0.55)
    axis.set_xticks([])


def _cell(axis: Axes, place: float, unit: int, floor: float, top: float, kind: str) -> None:
    """A part of a cell, from its floor (0) to its top (1)."""
    style.cell(axis, place - 0.5, unit + 0.4 - 0.8 * top, 1.0, 0.8 * (top - floor), LOOK_OF[kind][0])


def _phases(axis: Axes, record: dict, places: list[float]) -> None:
    """The names of the phases above the line of the root."""
    for phase in dict.fromkeys(phase for phase, _ in record["turns"]):
        there = [place for place, (name, _) in zip(places, record["turns"], strict=True) if name == phase]
        words = f"{phase} →" if len(there) > 1 else "at the end" if phase == "end" else phase
        style.note(axis, words, ((there[0] + there[-1]) / 2, 1.0), (0, 3), xycoords=("data", "axes fraction"),
                   ha="center")


def _memory(axis: Axes, record: dict, places: list[float], highest: float) -> None:
    heights = [count / 1e6 for count in record["bytes"]]
    lost = [count / 1e6 for count in _lost(record)]
    known = [height - rest for height, rest in zip(heights, lost, strict=True)]
    style.bars(axis, places, known, style.LOOKS["parameters"], width=1.0)
    for bar in style.bars(axis, places, lost, LOOK_OF["idle"][0], width=1.0, bottom=known) if any(lost) else ():
        bar.set_edgecolor(style.HATCHED[style.IDLE])
    words = [f"{height:.2f}" if height else "0" for height in heights]
    style.words_above(axis, places, heights, words, gap=2, fontsize=9)
    axis.set_ylim(0, 1.25 * highest / 1e6)
    axis.set_ylabel("MB whole", fontsize=9)
    short = [name.rpartition(".")[2] for name in record["units"]]
    axis.set_xticks(places, ["" if unit is None else short[unit] for _, unit in record["turns"]], fontsize=9)
    axis.set_xlabel("whose turn it is (●)", fontsize=9)


def _lost(record: dict) -> list[int]:
    """Bytes, at each moment, of storages that belong to no gathered unit but are still referenced."""
    units = [[size if state != "shard" else 0 for state in states]
             for size, states in zip(record["whole"], record["states"], strict=True)]
    return [max(0, count - sum(here)) for count, here in zip(record["bytes"], zip(*units, strict=True), strict=True)]


# ---------------------------------------------------------------------------------------- kept from forward to backward


def draw_kept(ways: dict[str, list[dict]], others: dict[str, dict]) -> Figure:
    """Traffic against memory: a line for each way to keep blocks whole, a mark for each number of kept blocks.

    Args: ways {name: dicts with kept, sent and peak (bytes)}; others {name: such a dict}, each a single mark.
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 4.4)
    named: set = set()
    entries = [*ways.items(), *((name, [row]) for name, row in others.items())]
    for number, (name, rows) in enumerate(entries):
        places = [(row["sent"] / 1e6, row["peak"] / 1e6) for row in rows]
        axis.plot(*zip(*places, strict=True), label=name, linestyle="-" if len(rows) > 1 else "", linewidth=1.5,
                  color=style.STAGE_COLOURS[3 - number], marker=style.MARKERS[number], markersize=8)
        for row, place in zip(rows, places, strict=True):
            if name in ways and place not in named:
                style.note(axis, f"{row['kept']}", place, (0, -16 if number else 8), ha="center")
                named.add(place)
    axis.set_xlabel("MB that a rank sends in a step")
    axis.set_ylabel("MB at the peak")
    axis.grid(axis="x", **style.GRID)
    axis.margins(x=0.05, y=0.12)
    axis.legend(fontsize=9, frameon=False, title="numbers: so many blocks stay whole from forward to backward",
                title_fontsize=9, loc="upper right", alignment="left")
    return result
