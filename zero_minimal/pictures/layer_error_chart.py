"""Layer error chart: errors of the gradients of a cut model by layer, one panel for each of several models."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero_minimal.meters.layer_errors import label
from zero_minimal.pictures.style import LOOKS, PAGE, bars, figure, legend_outside, words_above

WRONG, APART = LOOKS["gradients"], ("#D55E00", "xx")
RIGHT = 1e-5  # share of a gradient's size: more is no rounding any more
TOP = 0.8  # a bar that is higher is cut; its number says how high it is


def draw_patients(models: dict[str, list[dict]]) -> Figure:
    """Args: models {title: what meters/layer_errors.py found}; all of the same layers."""
    result, axes = figure(len(models), 1, PAGE, 1.75 * len(models) + 0.9)
    for (title, rows), axis in zip(models.items(), axes[:, 0], strict=True):
        _panel(axis, title, rows)
    rows = next(iter(models.values()))
    _names(axes[-1, 0], [row["layer"] for row in rows])
    for axis in axes[:-1, 0]:
        axis.set_xticks([])
    legend_outside(result, {
        "error of the gradient, as a share of its size": Patch(facecolor=WRONG[0], hatch=WRONG[1], edgecolor="white"),
        "the ranks differ, where all hold the same": Patch(facecolor=APART[0], hatch=APART[1], edgecolor="white"),
        "✓ right, but for rounding": Patch(facecolor="none")})
    return result


def _panel(axis: Axes, title: str, rows: list[dict]) -> None:
    places = range(len(rows))
    errors = [row["error"] if row["error"] > RIGHT else 0.0 for row in rows]
    spreads = [row["spread"] if (row["spread"] or 0) > RIGHT else 0.0 for row in rows]
    bars(axis, [place - 0.2 for place in places], [min(error, TOP) for error in errors], WRONG, width=0.4)
    bars(axis, [place + 0.2 for place in places], [min(spread, TOP) for spread in spreads], APART, width=0.4)
    words = [_share(error) if error else "✓" for error in errors]
    words_above(axis, [place - 0.22 * bool(error) for place, error in zip(places, errors, strict=True)],
                [min(error, TOP) for error in errors], words, gap=2, fontsize=9)
    apart = [(place + 0.22, min(spread, TOP), _share(spread)) for place, spread in zip(places, spreads, strict=True)
             if spread]
    if apart:
        words_above(axis, *zip(*apart, strict=True), gap=2, fontsize=9)
    axis.set_ylim(0, 1.2 * TOP)
    axis.set_xlim(-0.7, len(rows) - 0.3)
    axis.set_yticks([0, 0.25, 0.5, 0.75], ["0", "25%", "50%", "75%"], fontsize=9)
    axis.set_title(title, fontsize=11, loc="left")


def _share(part: float) -> str:
    """Of a bar that may be too low to be seen."""
    return "<1%" if part < 0.01 else f"{part:.0%}"


def _names(axis: Axes, layers: list[str]) -> None:
    """Layers below their bars, and below those the blocks."""
    axis.set_xticks(range(len(layers)), [label(layer) for layer in layers], fontsize=9)
    axis.tick_params(axis="x", length=0)
    blocks: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        if layer.startswith("blocks."):
            blocks.setdefault(layer.split(".")[1], []).append(place)
    for number, places in blocks.items():
        axis.annotate(f"block {number}", ((places[0] + places[-1]) / 2, 0), (0, -26), ha="center", fontsize=9,
                      xycoords=("data", "axes fraction"), textcoords="offset points")
    axis.set_xlabel("forward →        ← backward, from the loss at the right end", fontsize=9, labelpad=16)
