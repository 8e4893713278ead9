"""Double buffer chart: two buffers that take turns; their cost against one large buffer's; the loss of 16-bit sums."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zero_minimal.pictures import style

FILLED, TRAVELS, READ = style.LOOKS["gradients"], style.COMING, style.LOOKS["parameters"]
TENSORS = ("#E6E6E6", "#BDBDBD")  # alternating in the long vector


def draw_trays(records: dict[str, dict], names: str = "g") -> Figure:
    """For each record, the tensors as one long vector, cut into loads, and below it the two buffers: a column for each
    time that the rank fills or unpacks one, and the load that is sent meanwhile.

    Args: records, {title: the record of meters/double_buffer_trace.py}; names, the letter before a tensor's number.
    """
    heights = [height for _ in records for height in (0.65, 1.5)]
    result = Figure(figsize=(style.PAGE, sum(heights) + 0.9 * len(records)), layout="constrained")
    axes = result.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for (title, record), vector, lanes in zip(records.items(), axes[::2], axes[1::2], strict=True):
        _vector(vector, record, names)
        _lanes(lanes, record)
        vector.set_title(title, fontsize=11)
        for axis in (vector, lanes):
            style.bare(axis)
    style.legend_outside(result, style.keys({
        "the rank fills it": FILLED, "on its way, among the ranks": TRAVELS,
        "back: the rank writes the result to the tensors": READ}))
    return result


def _vector(axis: Axes, record: dict, names: str) -> None:
    """The tensors side by side, grey, and black lines where a load ends."""
    start, narrow = 0, {}
    for number, load in enumerate(record["loads"]):
        first = start
        for tensor, count in load:
            axis.add_patch(Rectangle((start, 0), count, 1, facecolor=TENSORS[tensor % 2], linewidth=0))
            if count > 0.12 * record["elements"]:
                axis.text(start + count / 2, 0.5, f"{names}{tensor}", ha="center", va="center", fontsize=9)
                narrow[tensor] = None
            else:
                narrow.setdefault(tensor, start + count / 2)
            start += count
        axis.plot([start, start], [-0.25, 1.25], color="black", linewidth=1.5, clip_on=False)
        axis.text((first + start) / 2, -0.4, f"load {number + 1}", ha="center", va="top", fontsize=9)
    axis.plot([0, 0], [-0.25, 1.25], color="black", linewidth=1.5, clip_on=False)
    for tensor, place in narrow.items():  # names that do not fit inside go above
        if place is not None:
            axis.text(place, 1.3, f"{names}{tensor}", ha="center", va="bottom", fontsize=9)
    axis.set(xlim=(0, max(start, 1)), ylim=(-0.9, 2.1), xticks=[], yticks=[])


def columns(record: dict) -> list[tuple[str, int | None, int]]:
    """(kind, buffer, load) for each time that the rank fills or unpacks."""
    return [(kind, place, load) for kind, place, load in record["events"] if kind in ("fill", "unpack")]


def on_the_way(record: dict) -> dict[tuple[int | None, int], tuple[float, float]]:
    """{(buffer, load): (first, last) column of its collective}. It ends when the rank has waited for it, or never."""
    spans: dict = {}
    column, last = -1, len(columns(record))
    for kind, place, load in record["events"]:
        column += kind in ("fill", "unpack")
        if kind == "send":
            spans[place, load] = (column + 1, last)
        elif kind == "wait" and (place, load) in spans:
            spans[place, load] = (spans[place, load][0], column + 1)
    return spans


def _lanes(axis: Axes, record: dict) -> None:
    """A line for each buffer, in the order in which they are taken; other memory has a line for each load. Work on a
    buffer during its collective is drawn small, inside the collective."""
    done, spans = columns(record), on_the_way(record)
    keys = dict.fromkeys((place, load if place is None else None) for _, place, load in done)
    lines = sorted(keys, key=lambda key: key[0] is None)
    line_of = {(place, load): lines.index((place, load if place is None else None)) for _, place, load in done}
    for key, (begin, end) in spans.items():
        if end > begin:
            _cell(axis, begin, end - begin, line_of[key], TRAVELS, f"{key[1] + 1}", "black")
    for column, (kind, *key) in enumerate(done):
        line = line_of[tuple(key)]
        busy = any(begin <= column < end for other, (begin, end) in spans.items() if line_of[other] == line)
        look, colour = (FILLED, "black") if kind == "fill" else (READ, "white")
        _cell(axis, column, 1, line, look, f"{key[1] + 1}", colour, 0.4 if busy else 0.8)
    names = iter(("buffer A", "buffer B"))
    axis.set_yticks(range(len(lines)), [f"memory of {load + 1}" if place is None else next(names)
                                        for place, load in lines])
    axis.set_xticks([column + 0.5 for column in range(len(done))],
                    [f"{'fills' if kind == 'fill' else 'unpacks'}\n{load + 1}" for kind, _, load in done], fontsize=9)
    axis.set(xlim=(0, max(len(done), 1)), ylim=(max(len(lines), 1) - 0.45, -0.55))
    axis.set_xlabel("what the rank does, one after the other →", fontsize=9)


def _cell(axis: Axes, start: float, length: float, line: int, look: tuple, words: str, colour: str,
          height: float = 0.8) -> None:
    style.cell(axis, start + 0.03, line - height / 2, length - 0.06, height, look)
    axis.text(start + length / 2, line, words, ha="center", va="center", fontsize=10, color=colour,
              bbox=style.WHITE | {"pad": 1.5} if look[1] else None)


# ------------------------------------------------------------------------------------------------------- what they cost


def draw_sizes(rows: list[dict], prices: list[dict]) -> Figure:
    """Left: MB of buffers against the model's parameters. Right: time of one model's all-reduce against the buffer
    size.

    Args:
        rows: "parameters", "fused" and "constant" in bytes, "measured": False for those that are calculated.
        prices: "size" of a buffer in bytes, or None for one large buffer; "seconds"; "collectives".
    """
    result, ((memory, time),) = style.figure(1, 2, style.PAGE, 3.9)
    for number, (name, words) in enumerate((("fused", "one buffer for all"), ("constant", "two constant buffers"))):
        places = [(row["parameters"], row[name] / 1e6) for row in rows]
        memory.plot(*zip(*places, strict=True), color=style.STAGE_COLOURS[3 - number], label=words, zorder=1)
        for measured in (True, False):
            marks = [place for place, row in zip(places, rows, strict=True) if row["measured"] == measured]
            if marks:
                memory.scatter(*zip(*marks, strict=True), marker=style.MARKERS[number], s=45, zorder=2,
                               color=style.STAGE_COLOURS[3 - number], facecolor=None if measured else "white")
    memory.set(xscale="log", yscale="log", xlabel="parameters of the model", ylabel="MB of buffers")
    memory.legend(frameon=False, fontsize=9, title="filled: measured, hollow: calculated", title_fontsize=9,
                  alignment="left")
    fused = next(row for row in prices if row["size"] is None)
    rest = [row for row in prices if row["size"] is not None]
    time.axhline(1e3 * fused["seconds"], color=style.STAGE_COLOURS[3], label="one buffer for all")
    time.plot([row["size"] / 1e6 for row in rest], [1e3 * row["seconds"] for row in rest], color=style.STAGE_COLOURS[2],
              marker=style.MARKERS[1], label="two constant buffers, with the number of collectives")
    for row in rest:
        style.note(time, f"{row['collectives']:,}", (row["size"] / 1e6, 1e3 * row["seconds"]), (0, 7), ha="center")
    time.set(xscale="log", yscale="log", xlabel="MB of each buffer", ylabel="ms of one all-reduce")
    time.legend(frameon=False, fontsize=9)
    for axis in (memory, time):
        axis.grid(axis="x", **style.GRID)
        axis.margins(y=0.15)
    return result


def draw_ones(sums: dict[str, list[float]], every: int) -> Figure:
    """A sum of ones, rank after rank, a line for each dtype. sums: {dtype: the sums after every `every` ranks}."""
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 3.3)
    for number, (name, values) in enumerate(sums.items()):
        places = [every * (place + 1) for place in range(len(values))]
        axis.plot(places, values, color=style.STAGE_COLOURS[3 - number], marker=style.MARKERS[number], markersize=5,
                  markevery=max(1, len(values) // 8), label=name)
    axis.set(xlabel="ranks that have added their 1", ylabel="the sum so far", xlim=(0, None), ylim=(0, None))
    axis.legend(frameon=False, fontsize=9)
    return result
