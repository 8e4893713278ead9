"""Offloading: what is on the device, what is on its host, and what the bus between them costs."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrow, Rectangle

from zero_minimal.paper.formulas import STATES
from zero_minimal.paper.quantities import size_text
from zero_minimal.pictures import style

HOST = ("#999999", "..")


# ----------------------------------------------------------------------------------------------------------- the ladder


def draw_ladder(ladder: list[dict]) -> Figure:
    """Bytes per parameter on each rung: tensors on the device, and the memory of the two processes, with the formulas.
    ladder: reports of programs/offload_ladder.py."""
    result, axes = style.figure(1, 2, style.PAGE, 4.6)
    names = [rung["name"].replace(" ", "\n", 1) for rung in ladder]
    places = [float(place) for place in range(len(ladder))]
    tensors, memory = axes[0]
    tops = style.stacked_bars(tensors, places, [
        (state, style.LOOKS[state], [rung["ledger"][state] / rung["parameters"] for rung in ladder])
        for state in ladder[0]["ledger"]])
    style.formula_marks(tensors, places, [rung["formula"]["device"] for rung in ladder])
    style.words_above(tensors, places, tops, [f"{top:.4g}" for top in tops], gap=5)
    tensors.set_title("tensors on the device", fontsize=11)
    tensors.set_ylabel("bytes a parameter")
    for side, shift, look in (("device", -0.21, style.PLAIN), ("host", 0.21, HOST)):
        at = [place + shift for place in places]
        heights = [(rung["resident"] or {side: 0})[side] / rung["parameters"] for rung in ladder]
        style.bars(memory, at, heights, look, f"process of the {'rank' if side == 'device' else 'host'}", 0.38)
        style.formula_marks(memory, at, [rung["formula"][side] for rung in ladder], 0.4, label=None)
        style.words_above(memory, at, heights, [f"{height:.3g}" for height in heights], gap=5, fontsize=9)
    memory.set_title("resident memory, of the two processes", fontsize=11)
    for axis in axes[0]:
        style.name_bars(axis, places, names)
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])  # separate scales: a process holds more than the states
    style.legend_outside(result, style.entries_of(axes[0]))
    return result


# ---------------------------------------------------------------------------------------------------- two boxes, a pipe


def draw_boxes(rung: dict) -> Figure:
    """Device, bus and host, each with its bytes in the run. rung: the report of the lowest rung."""
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 3.9)
    psi = rung["parameters"]
    axis.set(xlim=(0, 100), ylim=(0, 44), xticks=[], yticks=[])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    device = {"parameters": rung["ledger"]["parameters"]}
    box(axis, (2, 4, 26, 32), f"device: {size_text(sum(device.values()))}", device, psi)
    box(axis, (70, 4, 28, 32), f"host: {size_text(rung['host'])}", rung["kept"], psi)
    for height, (what, count), start, step in ((27, ("gradients", rung["bus"]["to_host"]), 30, 38),
                                               (11, ("parameters", rung["bus"]["to_device"]), 68, -38)):
        axis.add_patch(FancyArrow(start, height, step, 0, width=3.4, head_width=6.5, head_length=4,
                                  length_includes_head=True, facecolor=style.LOOKS[what][0], edgecolor="none"))
        axis.text(49, height + 4.2, f"{what}: {size_text(count)} a step", ha="center", va="bottom", fontsize=10)
        axis.text(49, height - 4.4, f"{count / psi:.3g} bytes a parameter", ha="center", va="top", fontsize=9)
    axis.text(49, 40, "bus", ha="center", va="center", fontsize=12)
    return result


WORDS = {"masters": "fp32 masters", "exp_avg": "momentum", "exp_avg_sq": "variance"}


def box(axis: Axes, place: tuple, title: str, held: dict[str, int], psi: int) -> None:
    """A box with a bar for each thing that it holds, as high as its bytes per parameter."""
    left, bottom, width, height = place
    axis.add_patch(Rectangle((left, bottom), width, height, facecolor="none", edgecolor="#444444", linewidth=1.6))
    axis.text(left + width / 2, bottom + height + 4, title, ha="center", va="center", fontsize=12)
    below, unit = bottom + 1, (height - 2) / 14.2  # per byte of a parameter: the host's 14 fill the box
    for what, count in held.items():
        tall = count / psi * unit
        style.cell(axis, left + 1, below, width - 2, tall, style.LOOKS.get(what, style.LOOKS["optimizer"]), 0.8)
        axis.text(left + width / 2, below + tall / 2, f"{WORDS.get(what, what)}: {count / psi:.3g} bytes",
                  ha="center", va="center", fontsize=9, color="black", bbox=style.WHITE | {"pad": 1.0})
        below += tall


# --------------------------------------------------------------------------------------------- `compare --offload cpu`


def draw_offloaded(rows: list[dict], says: list[dict]) -> Figure:
    """Stages with and without offload: bytes per parameter on the device and on the host, bytes over the bus, time.

    Args: rows: reports of `compare --offload`; says: for each, the bytes by the formulas.
    """
    result, axes = style.figure(2, 2, style.PAGE, 7.0)
    places, psi = [place + (0.4 if "bus" in row else 0) for place, row in enumerate(rows)], rows[0]["parameters"]
    (device, host), (bus, time) = axes
    tops = style.stacked_bars(device, places, [
        (state, style.LOOKS[state], [row["memory"][state] / psi for row in rows])
        for state in ("parameters", "gradients", "optimizer")])
    beside(device, places, tops, [each["device"] / psi for each in says],
           "model states on the device, bytes a parameter")
    kept = [row.get("host_memory", 0) / psi for row in rows]
    style.bars(host, places, kept, HOST, "kept on the host")
    beside(host, places, kept, [each["host"] / psi for each in says], "kept on the host, bytes a parameter")
    for way, shift, what in (("to_host", -0.19, "gradients"), ("to_device", 0.19, "parameters")):
        at = [place + shift for place in places]
        crossed = [row.get("bus", {way: 0})[way] / psi for row in rows]
        style.bars(bus, at, crossed, style.LOOKS[what], None, 0.36)
        beside(bus, at, crossed, [each[way] / psi for each in says], "over the bus, a step: there, and back", 0.36)
    milliseconds = [row["step_seconds"] * 1e3 for row in rows]
    style.bars(time, places, milliseconds, style.PLAIN)
    style.words_above(time, places, milliseconds, [f"{each:,.0f}" for each in milliseconds], fontsize=9)
    time.set_title("milliseconds a step", fontsize=11)
    for axis in axes.flat:
        style.name_bars(axis, places, [row["name"].replace(", ", ",\n") for row in rows])
        axis.tick_params(axis="x", labelsize=8)
        axis.margins(y=0.12)
    style.legend_outside(result, style.entries_of(axes.flat))
    return result


def beside(axis: Axes, places: list, heights: list, formula: list, title: str, width: float = 0.8) -> None:
    """Add formula marks, numbers above the bars, and a title."""
    style.formula_marks(axis, places, formula, width)
    words = [f"{height:.3g}" if height else "" for height in heights]
    style.words_above(axis, places, heights, words, gap=4, fontsize=9)
    axis.set_title(title, fontsize=11)


# ----------------------------------------------------------------------------------------------------------- a slow bus

BUS, BELOW = style.LOOKS["buffers"], ("#BBBBBB", "..")


def draw_elsewhere(rungs: dict[str, dict[str, float]]) -> Figure:
    """Bytes per parameter, a bar for each rung: on the device by category, upward; on the host, downward. The number
    above a bar counts the model states.

    Args: rungs, {name: {state: bytes per parameter on the device, "bus": of its buffers, "host": on the host}}.
    """
    result, ((axis,),) = style.figure(1, 1, 7.5, 4.0)
    places = range(len(rungs))
    tops = style.stacked_bars(axis, places, [
        (state, style.LOOKS.get(state, BUS), [held[state] for held in rungs.values()]) for state in (*STATES, "bus")
    ], width=0.6)
    below = [held["host"] for held in rungs.values()]
    style.bars(axis, places, [-size for size in below], BELOW, "on the host", width=0.6)
    states = [sum(held[state] for state in STATES) for held in rungs.values()]
    style.words_above(axis, places, tops, [f"{size:.3g}" for size in states])
    style.words_above(axis, places, [-size for size in below], [f"{size:.3g}" if size else "" for size in below],
                      gap=-12)
    axis.axhline(0, color="black", linewidth=1)
    axis.set_ylim(-1.15 * max(below) - 1, 1.1 * max(tops))
    axis.set_yticks(range(-12, 17, 4), [abs(value) for value in range(-12, 17, 4)])
    axis.set_ylabel("bytes a parameter: host below, device above", fontsize=9)
    style.name_bars(axis, places, list(rungs))
    style.legend_outside(result, style.entries_of([axis]), side="upper")
    return result


def draw_slowed(slowed: dict[int, Sequence]) -> Figure:
    """How much longer a step takes with a slow bus, a line for each number of tokens.

    Args: slowed, {tokens of a rank: [(GB/s, step time divided by that with an infinitely fast bus)]}.
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 4.3)
    for (tokens, line), marker, colour in zip(slowed.items(), style.MARKERS, style.STAGE_COLOURS[1:], strict=False):
        speeds, times = zip(*line, strict=True)
        axis.plot(speeds, times, marker=marker, color=colour, label=f"{tokens:,} tokens a rank")
    axis.axhline(1, color="black", linewidth=1, label="a bus that takes no time")
    axis.set_xscale("log")
    axis.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("GB/s of a bus beside a GPU; here as much slower as this machine computes")
    axis.set_ylabel("times as long a step")
    axis.legend(fontsize=9, frameon=False)
    return result
