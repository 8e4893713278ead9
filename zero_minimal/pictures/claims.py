"""Claims: a card with a claim, what would refute it, the run, the number and the verdict; and all verdicts."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from zero_minimal.pictures.style import LOOKS, PAGE, PLAIN, flat_bars

VERDICTS = ("true", "true if", "false", "not shown")
MARKS = {"true": ("o", "#009E73"), "true if": ("^", "#0072B2"), "false": ("X", "#D55E00"),
         "not shown": ("s", "#777777")}
LINE = 0.155  # inches: the height of a line of 9-point text


def draw_card(card: dict, bars: Sequence[tuple[str, float, bool]], axis_name: str) -> Figure:
    """One card, with a small plot of its measurements.

    Args:
        card: of measured.json: card, claim, refuted by, run, number, unit, verdict, value.
        bars: (name, value, whether the claim relies on it), the first one on top.
    """
    result = Figure(figsize=(PAGE, 4.6), layout="none")
    page = result.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, PAGE), ylim=(0, 4.6))
    page.axis("off")
    page.add_patch(FancyBboxPatch((0.12, 0.12), PAGE - 0.24, 4.36, boxstyle="round,pad=0,rounding_size=0.15",
                                  facecolor="#FBFBFB", edgecolor="black", linewidth=1.4))
    page.text(0.4, 4.12, f"card {card['card']}", fontsize=13, weight="bold", va="center")
    page.plot([0.4, PAGE - 0.4], [3.86, 3.86], color="black", linewidth=0.8)
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
        flat_bars(axis, -place, value, LOOKS["gradients"] if relied_on else PLAIN, height=0.5)
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
    result = Figure(figsize=(PAGE, height), layout="none")
    page = result.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, PAGE), ylim=(0, height))
    page.axis("off")
    columns = {verdict: 6.35 + 0.66 * place for place, verdict in enumerate(VERDICTS)}
    for verdict, x in columns.items():
        page.text(x, height - 0.2, verdict, fontsize=9, weight="bold", ha="center", va="center")
    page.text(PAGE - 0.1, height - 0.2, "number", fontsize=9, weight="bold", ha="right", va="center")
    y = height - 0.4
    for card, lines, tall in zip(cards, texts, heights, strict=True):
        page.plot([0.1, PAGE - 0.1], [y, y], color="#DDDDDD", linewidth=0.6)
        middle = y - tall / 2
        page.text(0.36, middle, str(card["card"]), fontsize=9, ha="right", va="center")
        page.text(0.5, middle, "\n".join(lines), fontsize=8.6, va="center", linespacing=1.15)
        mark, colour = MARKS[card["verdict"]]
        page.plot(columns[card["verdict"]], middle, marker=mark, color=colour, markersize=9)
        page.text(PAGE - 0.1, middle, valued(card), fontsize=9, ha="right", va="center")
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
