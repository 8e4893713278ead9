"""Examined: claims compared with runs. Losses of several runs; numbers of runs compared with the claimed one."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from zero_minimal.pictures import style
from zero_minimal.pictures.style import FORMULA, MARKERS, PAGE, PLAIN, STAGE_COLOURS

VERDICTS = {"true": "o", "true if": "^", "false": "X", "not shown": "D"}  # a marker each: readable without colour


def draw_losses(runs: dict[str, Sequence[float]], title: str = "") -> Figure:
    """A line for each run. runs: {name: the loss of each step}. Equal lines overlap: their markers alternate."""
    result, axes = style.figure(1, 1, PAGE, 3.6)
    axis = axes[0][0]
    for number, (name, losses) in enumerate(runs.items()):
        axis.plot(range(1, len(losses) + 1), losses, color=STAGE_COLOURS[number % len(STAGE_COLOURS)], label=name,
                  marker=MARKERS[number % len(MARKERS)], markevery=(number, len(runs)), linewidth=3 - 0.6 * number)
    axis.set(xlabel="step", ylabel="loss, nats", title=title)
    axis.legend(frameon=False, fontsize=9)
    return result


def draw_beside_claim(found: dict[str, float], claimed: float | None, unit: str, title: str = "",
                      claim: str = "claimed") -> Figure:
    """A bar for each run, and a line across all at the claimed number. found: {name: number}."""
    result, axes = style.figure(1, 1, PAGE, 3.4)
    axis, places = axes[0][0], list(range(len(found)))
    style.bars(axis, places, list(found.values()), PLAIN, width=0.55)
    style.words_above(axis, places, list(found.values()), [f"{value:.3g}" for value in found.values()], fontsize=9)
    if claimed is not None:
        axis.axhline(claimed, label=f"{claim}: {claimed:.3g}", **FORMULA | {"linestyle": "--"})
        axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 1.14))
    style.name_bars(axis, places, list(found))
    axis.set(ylabel=unit, title=title, xlim=(-0.6, len(found) - 0.4))
    axis.margins(y=0.15)
    return result


def draw_cards(examined: dict[str, tuple[str, float]], unit: str = "number that the run gave, log scale") -> Figure:
    """One line per card: its number on a logarithmic scale, marked by the verdict. examined: {name: (verdict, number)};
    the mark of a number 0 is at the left edge."""
    result, axes = style.figure(1, 1, PAGE, 1.2 + 0.34 * max(len(examined), 1))
    axis, names = axes[0][0], list(examined)
    values = [abs(number) for _, number in examined.values() if number]
    edge = min(values, default=1.0) / 10
    for place, (verdict, number) in enumerate(examined.values()):
        axis.plot(abs(number) or edge, place, VERDICTS.get(verdict, "."), color="black", markersize=8)
        axis.annotate(f"{verdict}: {number:.4g}", (abs(number) or edge, place), (9, 0), textcoords="offset points",
                      va="center", fontsize=9)
    axis.set_xscale("log")
    axis.set_xlim(edge / 2, max(values, default=1.0) * 40)
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel(unit)
    return result
