"""Hunt panels: what instruments recorded in a broken run and in the healthy one. All hunts have these panels."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.meters.events import Collective
from zero_minimal.pictures import style
from zero_minimal.pictures.time_line import name_lanes, rank_lanes, span_bar

MB = 1e6
PALE, DARK = "#C9B8E8", "#5E3C99"  # the healthy and the broken run, unless a category has its own colour
HEALTHY = {"color": PALE, "linewidth": 4.5, "solid_capstyle": "round"}
POINTS = 40  # most points of a line: for a longer run, each is the mean of several steps
BEFORE = ("white", "////")
SHOWN = ("parameters", "gradients", "optimizer", "activations", "buffers")


def draw_hunt(hunt: dict) -> Figure:
    """Six panels, and the time line of one step of each run. `hunt`: a hunt's file."""
    healthy, broken = hunt["runs"]["healthy"], hunt["runs"]["broken"]
    lanes = 2 * len(healthy)
    result, axes = style.figure(4, 3, style.PAGE, 6.4 + 0.62 * lanes)
    grid = axes[0][0].get_gridspec()
    grid.set_height_ratios([2.6, 2.6, 0.36 * lanes, 0.36 * lanes])
    for row in (2, 3):
        for axis in axes[row]:
            axis.remove()
    draw_lines(axes[0][0], healthy, broken, "losses", "loss of each rank")
    draw_lines(axes[0][1], healthy, broken, "norms", "gradient norm that each rank reports")
    draw_apart(axes[0][2], healthy, broken)
    draw_memory(axes[1][0], healthy[0], broken[0], "at the end", "rank 0 at the end of a step, MB")
    draw_memory(axes[1][1], healthy[0], broken[0], "highest", "rank 0: the most of each kind, MB")
    draw_traffic(axes[1][2], healthy[0], broken[0])
    longest = 1000 * max(rank["time"]["seconds"] for rank in (*healthy, *broken))
    for row, (name, run) in zip((2, 3), hunt["runs"].items(), strict=True):
        axis = result.add_subplot(grid[row, :])
        axis.spines[["top", "right"]].set_visible(False)
        draw_step(axis, run, longest)
        axis.set_title(f"one step of the {name} run, ms", fontsize=9, loc="left")
        if row == 2:
            axis.tick_params(axis="x", labelbottom=False)
    lines = style.entries_of([*axes[0], *axes[1], *result.axes[-2:]])
    style.legend_outside(result, lines, side="lower", columns=4)
    return result


def draw_lines(axis: Axes, healthy: list, broken: list, key: str, title: str) -> None:
    """A line for each rank of the broken run, over broad pale ones of the healthy run."""
    every = -(-len(healthy[0][key]) // POINTS)
    for each in healthy:
        axis.plot(*means(each[key], every), label="healthy run, each rank", **HEALTHY)
    for rank, each in enumerate(broken):
        axis.plot(*means(each[key], every), color=style.STAGE_COLOURS[(rank + 1) % 4], linewidth=1.2,
                  marker=style.MARKERS[rank], markersize=3.5, markevery=max(1, len(each[key]) // every // 16),
                  linestyle=("-", "--", ":", "-.")[rank % 4], label=f"broken run, rank {rank}")
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("step" if every == 1 else f"step; each point is the mean of {every} steps", fontsize=8)
    axis.set_ylim(bottom=0 if key == "norms" else None)


def means(values: list[float], every: int) -> tuple[list[float], list[float]]:
    """Steps, from 1, and the mean of every `every` values; a remainder is left out."""
    starts = range(0, len(values) - every + 1, every)
    return [start + (every + 1) / 2 for start in starts], [sum(values[start:start + every]) / every for start in starts]


def draw_apart(axis: Axes, healthy: list, broken: list) -> None:
    """How far the ranks' parameters are from rank 0's."""
    axis.set_title("parameters: how far from rank 0's", fontsize=9, loc="left")
    axis.set_xlabel("step", fontsize=8)
    if not broken[0]["apart"]:
        axis.text(0.5, 0.5, "stage 3: each parameter\nhas one owner", ha="center", va="center", fontsize=9,
                  transform=axis.transAxes)
        axis.set_xticks([])
        axis.set_xlabel("")
        axis.set_yticks([])
        return
    axis.plot(range(len(healthy[0]["apart"])), [max(values) for values in
                                                zip(*(each["apart"] for each in healthy), strict=True)], **HEALTHY)
    for rank, each in enumerate(broken[1:], 1):
        axis.plot(range(len(each["apart"])), each["apart"], color=style.STAGE_COLOURS[(rank + 1) % 4], linewidth=1.2,
                  marker=style.MARKERS[rank], markersize=3.5, markevery=max(1, len(each["apart"]) // 16))
    if not any(any(each["apart"]) for each in (*healthy, *broken)):
        axis.set_ylim(-0.05, 1)


def draw_memory(axis: Axes, healthy: dict, broken: dict, key: str, title: str) -> None:
    """Memory by category in the second step and in the last watched one. Peaks of categories that may be at different
    moments get no sum above them."""
    last = len(broken["memory"])
    columns = [(run["memory"][step - 1][key], f"{name}\nstep {step}")
               for name, run in (("healthy", healthy), ("broken", broken)) for step in (2, last)]
    positions = [0, 1, 2.4, 3.4]
    layers = [(name, style.LOOKS[name], [column[name] / MB for column, _ in columns]) for name in SHOWN]
    tops = style.stacked_bars(axis, positions, layers)
    if key == "at the end":
        words = [f"{top:.2f}" if top < 10 else f"{top:.1f}" for top in tops]
        style.words_above(axis, positions, tops, words, fontsize=8)
    style.name_bars(axis, positions, [name for _, name in columns])
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_ylim(top=1.12 * max(tops))


def draw_traffic(axis: Axes, healthy: dict, broken: dict) -> None:
    """The payload of each collective in a step, with the number of calls above it."""
    names = sorted({name for run in (healthy, broken) for name in run["traffic"]["collectives"]})
    nothing = {"calls": 0, "bytes": 0}
    for shift, (run, look, label) in enumerate(((healthy, (PALE, ""), "healthy run, a step"),
                                                (broken, (DARK, ""), "broken run, a step"))):
        counts = [run["traffic"]["collectives"].get(name, nothing) for name in names]
        positions = [number - 0.2 + 0.4 * shift for number in range(len(names))]
        heights = [each["bytes"] / MB for each in counts]
        style.bars(axis, positions, heights, look, label, width=0.38)
        style.words_above(axis, positions, heights, [f"{each['calls']}×" for each in counts], fontsize=8)
    style.name_bars(axis, range(len(names)), [name.replace("_", "\n") for name in names])
    axis.set_title("collectives of a step: calls, MB", fontsize=9, loc="left")
    axis.set_ylim(top=1.15 * axis.get_ylim()[1])


def draw_step(axis: Axes, run: list, longest: float) -> None:
    """Two lanes for each rank: what it does and when it waits; and the collectives under way."""
    for rank, each in enumerate(run):
        own, messages = 2 * rank, 2 * rank + 0.85
        first = min(one[1] for one in (*each["time"]["computing"], *each["time"]["collectives"]))
        span_bar(axis, own, 0, first, BEFORE, "before forward: not recorded", edge="#999999")
        under_way = [Collective(*one) for one in each["time"]["collectives"]]
        rank_lanes(axis, own, messages, each["time"]["computing"], under_way, 0.3, 0.16,
                   "waits for a message, or sums it")
    name_lanes(axis, [2 * rank for rank in range(len(run))], [f"rank {rank}" for rank in range(len(run))])
    axis.set(xlim=(0, 1.02 * longest), ylim=(2 * len(run) - 0.6, -0.6))
