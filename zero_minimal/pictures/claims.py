"""Claims: a card with a claim, what would refute it, the run, the number and the verdict; all verdicts; and what the
runs of a card gave, compared with what is claimed."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from zero_minimal.pictures import style

MARKS = {"true": ("o", "#009E73"), "true if": ("^", "#0072B2"), "false": ("X", "#D55E00"),
         "not shown": ("s", "#777777")}
LINE = 0.155  # inches: the height of a line of 9-point text


def draw_card(card: dict, bars: Sequence[tuple[str, float, bool]], axis_name: str) -> Figure:
    """One card, with a small plot of its measurements.

    Args:
        card: of measured.json: card, claim, refuted by, run, number, unit, verdict, value.
        bars: (name, value, whether the claim relies on it), the first one on top.
    """
    result = Figure(figsize=(style.PAGE, 4.6), layout="none")
    page = result.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, style.PAGE), ylim=(0, 4.6))
    page.axis("off")
    page.add_patch(FancyBboxPatch((0.12, 0.12), style.PAGE - 0.24, 4.36, boxstyle="round,pad=0,rounding_size=0.15",
                                  facecolor="#FBFBFB", edgecolor="black", linewidth=1.4))
    page.text(0.4, 4.12, f"card {card['card']}", fontsize=13, weight="bold", va="center")
    page.plot([0.4, style.PAGE - 0.4], [3.86, 3.86], color="black", linewidth=0.8)
    y = 3.66
    for title in ("claim", "refuted by", "run", "number"):
        lines = textwrap.wrap(_capital(card[title]), 62)
        page.text(0.4, y, title, fontsize=10, weight="bold", va="top")
        page.text(1.45, y, "\n".join(lines), fontsize=10, va="top", linespacing=1.25)
        y -= 0.19 * len(lines) + 0.16
    page.text(0.4, 0.42, "found", fontsize=10, weight="bold", va="center")
    page.text(1.45, 0.42, valued(card), fontsize=13, va="center")
    mark, colour = MARKS[card["verdict"]]
    page.plot(3.55, 0.42, marker=mark, color=colour, markersize=13)
    page.text(3.78, 0.42, card["verdict"], fontsize=15, weight="bold", va="center")
    _small_plot(result.add_axes((0.735, 0.24, 0.225, 0.5)), bars, axis_name)
    return result


def _small_plot(axis: Axes, bars: Sequence[tuple[str, float, bool]], axis_name: str) -> None:
    longest = max(value for _, value, _ in bars)
    for place, (name, value, relied_on) in enumerate(bars):
        style.flat_bars(axis, -place, value, style.LOOKS["gradients"] if relied_on else style.PLAIN, height=0.5)
        axis.text(0, -place + 0.32, name, fontsize=9, va="bottom")
        axis.text(value + 0.02 * longest, -place, f"{value:.2f}", fontsize=9, va="center")
    axis.set(xlim=(0, 1.22 * longest), ylim=(0.4 - len(bars), 0.75), yticks=[])
    axis.set_xlabel(axis_name, fontsize=9)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)


def draw_verdicts(cards: Sequence[dict]) -> Figure:
    """A line for each card: its claim, a mark in the column of its verdict, and its number."""
    texts = [textwrap.wrap(_capital(card["claim"]), 84) for card in cards]
    heights = [LINE * len(lines) + 0.12 for lines in texts]
    height = sum(heights) + 0.5
    result = Figure(figsize=(style.PAGE, height), layout="none")
    page = result.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, style.PAGE), ylim=(0, height))
    page.axis("off")
    columns = {verdict: 6.35 + 0.66 * place for place, verdict in enumerate(MARKS)}
    for verdict, x in columns.items():
        page.text(x, height - 0.2, verdict, fontsize=9, weight="bold", ha="center", va="center")
    page.text(style.PAGE - 0.1, height - 0.2, "number", fontsize=9, weight="bold", ha="right", va="center")
    y = height - 0.4
    for card, lines, tall in zip(cards, texts, heights, strict=True):
        page.plot([0.1, style.PAGE - 0.1], [y, y], color="#DDDDDD", linewidth=0.6)
        middle = y - tall / 2
        page.text(0.36, middle, str(card["card"]), fontsize=9, ha="right", va="center")
        page.text(0.5, middle, "\n".join(lines), fontsize=8.6, va="center", linespacing=1.15)
        mark, colour = MARKS[card["verdict"]]
        page.plot(columns[card["verdict"]], middle, marker=mark, color=colour, markersize=9)
        page.text(style.PAGE - 0.1, middle, valued(card), fontsize=9, ha="right", va="center")
        y -= tall
    return result


def valued(card: dict) -> str:
    """A card's number to three digits, with its unit."""
    value, unit = card["value"], card["unit"]
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def _capital(text: str) -> str:
    """Capitalise the first letter, unless it is the name f."""
    return text if text[:2] in ("f ", "f,") else text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------------------- runs of a card

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
