"""Region: an MLP that two ranks share, between f and g; forward, and below it backward."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from zero_minimal.pictures.style import LOOKS, PAGE

RANKS = ((LOOKS["parameters"][0], ""), ("#9AD0F0", "////"))
STREAM = "#333333"
X, F_AT, A_AT, GELU_AT, B_AT, G_AT, Y = 0.4, 1.7, 3.3, 5.0, 6.7, 8.3, 9.6
LINES = (0.75, -0.75)  # heights of rank 0 and rank 1


def draw_region() -> Figure:
    """No figures in it: where the parts of two matrices stand, and which way things go."""
    result = Figure(figsize=(PAGE, 4.9), layout="constrained")
    there, back = result.subplots(2, 1)
    for axis, title in ((there, "forward →"), (back, "← backward")):
        axis.set(xlim=(0, 10), ylim=(-1.6, 1.75))
        axis.axis("off")
        axis.set_title(title, fontsize=11, loc="left" if axis is there else "right")
        _parts(axis)
    _flow(there, 1, ("x, whole", "y, whole"))
    _flow(back, -1, ("gradient of x", "gradient of y"))
    return result


def _parts(axis: Axes) -> None:
    """The two ends, and between them each rank's part of the matrices A and B."""
    for place, name in ((F_AT, "f"), (G_AT, "g")):
        axis.add_patch(Rectangle((place - 0.2, -1.35), 0.4, 2.7, facecolor="#F0F0F0", edgecolor=STREAM))
        axis.text(place, 0, f"{name}\n?", ha="center", va="center", fontsize=13)
    for rank, (line, (colour, hatch)) in enumerate(zip(LINES, RANKS, strict=True)):
        for place, width, height, name in ((A_AT, 0.45, 0.95, "A"), (B_AT, 0.9, 0.5, "B")):
            axis.add_patch(Rectangle((place - width / 2, line - height / 2), width, height, facecolor=colour,
                                     hatch=hatch, edgecolor="white"))
            axis.text(place, line, f"{name}{'₀₁'[rank]}", ha="center", va="center", fontsize=11,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
        axis.text(GELU_AT, line, "GELU", ha="center", va="center", fontsize=10,
                  bbox={"facecolor": "white", "edgecolor": STREAM, "pad": 3.0})
        axis.text(2.05, line + 0.55, f"rank {rank}", fontsize=9, va="center")


def _flow(axis: Axes, way: int, ends: tuple[str, str]) -> None:
    """Arrows from left to right (1) or back (-1)."""
    for place, words in zip((X, Y), ends, strict=True):
        axis.text(place, 0.35, words, ha="center", va="bottom", fontsize=10)
    stations = (F_AT + 0.25, A_AT - 0.3, A_AT + 0.3, GELU_AT - 0.42,
                GELU_AT + 0.42, B_AT - 0.52, B_AT + 0.52, G_AT - 0.25)
    for line in LINES:
        for left, right in zip(stations[::2], stations[1::2], strict=True):
            _arrow(axis, (left, line), (right, line), way)
        _arrow(axis, (X - 0.3, line / 6), (F_AT - 0.25, line / 6), way)
        _arrow(axis, (G_AT + 0.25, line / 6), (Y + 0.3, line / 6), way)


def _arrow(axis: Axes, left: tuple, right: tuple, way: int) -> None:
    start, end = (left, right) if way > 0 else (right, left)
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=STREAM, linewidth=1.2,
                                   shrinkA=0, shrinkB=0))
