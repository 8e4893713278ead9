"""GPU: the results of `python -m zero_minimal check-gpu` on one page."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.pictures.style import (
    ON_THE_WIRE,
    PAGE,
    PLAIN,
    SENT,
    bars,
    figure,
    flat_bars,
    name_bars,
    note,
    words_above,
)

STATUS = {"ok": ("#009E73", ""), "off": ("#E69F00", "//"), "failed": ("#D55E00", "xx"), "skipped": ("#BBBBBB", "")}


def draw_gpu(parts: list[dict]) -> Figure:
    """Four panels: how long each part took and how it ended; memory, by ledger and allocator; the share of copies and
    messages that overlapped with kernels; step times. A panel says so if its part failed or was left out."""
    result, axes = figure(2, 2, PAGE, 7.6)
    found = {part["part"]: part for part in parts}
    draw_parts(axes[0, 0], parts)
    for axis, name, title, draw in (
        (axes[0, 1], "memory", "Memory at the peak, GB: ledger and allocator", draw_memory),
        (axes[1, 0], "offload", "Share of copies and messages beside kernels", draw_hidden),
        (axes[1, 1], "throughput", "Time of a step, ms", draw_times),
    ):
        axis.set_title(title, fontsize=10)
        rows = found.get(name, {}).get("rows")
        if rows:
            draw(axis, rows, found)
        else:
            why = found.get(name, {}).get("why") or "not measured"
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, why[:60], ha="center", va="center", fontsize=9, transform=axis.transAxes)
    return result


def draw_parts(axis: Axes, parts: list[dict]) -> None:
    """Seconds of each part, coloured by its result."""
    axis.set_title("Seconds of each part, and how it ended", fontsize=10)
    for place, part in enumerate(parts):
        flat_bars(axis, place, max(part["seconds"], 0.1), STATUS[part["status"]])
        note(axis, part["status"], (part["seconds"], place), (3, 0), va="center", fontsize=8)
    axis.set_yticks(range(len(parts)), [part["part"] for part in parts], fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.2)


def draw_memory(axis: Axes, rows: list[dict], found: dict) -> None:
    """Two bars for each stage."""
    for shift, who, look in ((-0.2, "ledger", PLAIN), (0.2, "allocator", ON_THE_WIRE)):
        heights = [row[who]["peak"] / 1e9 for row in rows]
        bars(axis, [place + shift for place in range(len(rows))], heights, look, who, width=0.36)
    name_bars(axis, range(len(rows)), [row["name"] for row in rows])
    axis.margins(y=0.25)
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")


def draw_hidden(axis: Axes, rows: list[dict], found: dict) -> None:
    """A bar for each direction in each run: offload, checkpoints, NCCL."""
    shares = [(f"{row['name'].split(',')[0]}\n{words}", row["hidden"][way], SENT) for row in rows
              for way, words in (("DtoH", "leaves"), ("HtoD", "returns"))]
    shares += [("P_a+cpu\nleaves", row["hidden"]["DtoH"], SENT) for row in found.get("checkpoints", {}).get("rows", ())
               if row["to_host"]]
    shares += [(f"{row['name']}\nNCCL", row["hidden"], ON_THE_WIRE) for row in found.get("overlap", {}).get("rows", ())]
    for place, (_, share, look) in enumerate(shares):
        bars(axis, [place], [share or 0.0], look)
    words_above(axis, range(len(shares)), [share or 0.0 for _, share, _ in shares],
                ["–" if share is None else f"{share:.0%}" for _, share, _ in shares], fontsize=8)
    axis.set_ylim(0, 1.15)
    axis.set_xticks(range(len(shares)), [name for name, _, _ in shares], fontsize=8)


def draw_times(axis: Axes, rows: list[dict], found: dict) -> None:
    """A bar for each contender."""
    heights = [row["step_seconds"] * 1000 for row in rows]
    for place, row in enumerate(rows):
        bars(axis, [place], heights[place : place + 1], PLAIN if row["name"][0].isupper() else SENT)
    words_above(axis, range(len(rows)), heights, [f"{height:.1f}" for height in heights], fontsize=8)
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.margins(y=0.15)
