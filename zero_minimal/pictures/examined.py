"""Examined: claims compared with runs. Losses of several runs; numbers of runs compared with the claimed one."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from zero_minimal.pictures import style

VERDICTS = {"true": "o", "true if": "^", "false": "X", "not shown": "D"}  # a marker each: readable without colour


def draw_losses(runs: dict[str, Sequence[float]], title: str = "") -> Figure:
    """A line for each run. runs: {name: the loss of each step}. Equal lines overlap: their markers alternate."""
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 3.6)
    for number, (name, losses) in enumerate(runs.items()):
        colour, marker = (some[number % len(some)] for some in (style.STAGE_COLOURS, style.MARKERS))
        axis.plot(range(1, len(losses) + 1), losses, color=colour, label=name, marker=marker,
                  markevery=(number, len(runs)), linewidth=3 - 0.6 * number)
    axis.set(xlabel="step", ylabel="loss, nats", title=title)
    axis.legend(frameon=False, fontsize=9)
    return result


def draw_beside_claim(found: dict[str, float], claimed: float | None, unit: str, title: str = "",
                      claim: str = "claimed") -> Figure:
    """A bar for each run, and a line across all at the claimed number. found: {name: number}."""
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 3.4)
    places = list(range(len(found)))
    style.bars(axis, places, list(found.values()), style.PLAIN, width=0.55)
    style.words_above(axis, places, list(found.values()), [f"{value:.3g}" for value in found.values()], fontsize=9)
    if claimed is not None:
        axis.axhline(claimed, label=f"{claim}: {claimed:.3g}", **style.FORMULA | {"linestyle": "--"})
        axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 1.14))
    style.name_bars(axis, places, list(found))
    axis.set(ylabel=unit, title=title, xlim=(-0.6, len(found) - 0.4))
    axis.margins(y=0.15)
    return result


def draw_cards(examined: dict[str, tuple[str, float]], unit: str = "number that the run gave, log scale") -> Figure:
    """One line per card: its number on a logarithmic scale, marked by the verdict. examined: {name: (verdict, number)};
    the mark of a number 0 is at the left edge."""
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 1.2 + 0.34 * max(len(examined), 1))
    names = list(examined)
    values = [abs(number) for _, number in examined.values() if number]
    edge = min(values, default=1.0) / 10
    for place, (verdict, number) in enumerate(examined.values()):
        axis.plot(abs(number) or edge, place, VERDICTS.get(verdict, "."), color="black", markersize=8)
        style.note(axis, f"{verdict}: {number:.4g}", (abs(number) or edge, place), (9, 0), va="center")
    axis.set_xscale("log")
    axis.set_xlim(edge / 2, max(values, default=1.0) * 40)
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel(unit)
    return result
