"""Replication: losses of a report's passes with one model object and with new models, and causes of the difference."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zero_minimal.pictures.style import PAGE, STAGE_COLOURS, figure, legend_outside, name_bars

COLOURS = {"standard": STAGE_COLOURS[0], "ZeRO": STAGE_COLOURS[2]}
FILLED = {"one object": True, "new model": False}
APART = 0.06  # distance between the points of neighbouring seeds


def draw_replication(told: dict) -> Figure:
    """Every seed is a point; lines join passes that continued with one object.

    told: {"passes": [(system, batch)], "losses": {name: {"one object": [seed][pass], "new models": the same}},
           "orders": {name: [((first system, second system), [seed](loss after the first, after the second))]},
           "gain": {name: {whose: [seed]}}}, all with the same two names of losses.
    """
    result, axes = figure(2, 3, PAGE, 6.6)
    for row, (name, losses) in zip(axes, told["losses"].items(), strict=True):
        passes_panel(row[0], told["passes"], losses)
        orders_panel(row[1], told["orders"][name])
        gain_panel(row[2], told["gain"][name])
        row[0].set_ylabel(f"{name}, nats a sentence")
        row[2].set_ylabel(f"lowers the {name} by")
    titles = ("The report's passes", "Two passes, one object", "Whose is the gain?")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=11)
    legend_outside(result, {f"{system}, {words}": Line2D([], [], **point(system, filled))
                            for system in COLOURS for words, filled in FILLED.items()})
    return result


def beside(middle: float, seed: int, seeds: int) -> float:
    """The position of a seed's point: none hides another."""
    return middle + (seed - (seeds - 1) / 2) * APART


def point(system: str, filled: bool = True) -> dict:
    """The look of a pass: hollow with a new model."""
    return {"marker": "o", "linestyle": "", "markersize": 5, "color": COLOURS[system],
            "markerfacecolor": COLOURS[system] if filled else "white"}


def joined(axis: Axes, places: list[float], losses: list[float], systems: list[str]) -> None:
    """Draw a seed's passes that continued with one object."""
    axis.plot(places, losses, color="#BBBBBB", linewidth=0.8, zorder=1)
    for place, loss, system in zip(places, losses, systems, strict=True):
        axis.plot(place, loss, **point(system))


def passes_panel(axis: Axes, passes: list, losses: dict[str, list[list[float]]]) -> None:
    """A column for each pass: filled if it continues earlier passes, hollow with a new model."""
    systems, seeds = [system for system, _ in passes], len(losses["one object"])
    for seed, (trained, afresh) in enumerate(zip(losses["one object"], losses["new models"], strict=True)):
        joined(axis, [beside(number - 0.18, seed, seeds) for number in range(len(passes))], trained, systems)
        for number, system in enumerate(systems):
            axis.plot(beside(number + 0.22, seed, seeds), afresh[number], **point(system, filled=False))
    name_bars(axis, range(len(passes)), [f"{system}\n{batch}" for system, batch in passes])


def orders_panel(axis: Axes, orders: list) -> None:
    """The loss after the first pass, and after the second with the same object; the first is on the left of each."""
    for group, (systems, seeds) in enumerate(orders):
        for seed, losses in enumerate(seeds):
            joined(axis, [beside(2 * group + number, seed, len(seeds)) for number in range(2)], losses, systems)
    names = [f"{words}\n{system}" for systems, _ in orders
             for words, system in zip(("first", "then"), systems, strict=True)]
    name_bars(axis, range(len(names)), names)


def gain_panel(axis: Axes, gain: dict[str, list[float]]) -> None:
    """A column for each cause."""
    axis.axhline(0, color="black", linewidth=0.8)
    for number, values in enumerate(gain.values()):
        places = [beside(number, seed, len(values)) for seed in range(len(values))]
        axis.plot(places, values, "D", color="black", markersize=4.5, clip_on=False)
    name_bars(axis, range(len(gain)), [whose.replace(" ", "\n", 1) for whose in gain])
    axis.set_xlim(-0.5, len(gain) - 0.5)
