"""Tensor parallelism: an MLP that two ranks share; gradient errors of a wrongly cut model; traffic per batch size."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from zero_minimal.meters.layer_errors import label
from zero_minimal.pictures import style

# ------------------------------------------------------------------------------------------------------ between f and g

RANKS = ((style.LOOKS["parameters"][0], ""), ("#9AD0F0", "////"))
STREAM = "#333333"
X, F_AT, A_AT, GELU_AT, B_AT, G_AT, Y = 0.4, 1.7, 3.3, 5.0, 6.7, 8.3, 9.6
LINES = (0.75, -0.75)  # heights of rank 0 and rank 1


def draw_region() -> Figure:
    """Without numbers: the parts of two matrices, and the directions of forward and backward."""
    result = Figure(figsize=(style.PAGE, 4.9), layout="constrained")
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
    """The two ends f and g, and between them each rank's part of the matrices A and B."""
    for place, name in ((F_AT, "f"), (G_AT, "g")):
        axis.add_patch(Rectangle((place - 0.2, -1.35), 0.4, 2.7, facecolor="#F0F0F0", edgecolor=STREAM))
        axis.text(place, 0, f"{name}\n?", ha="center", va="center", fontsize=13)
    for rank, (line, look) in enumerate(zip(LINES, RANKS, strict=True)):
        for place, width, height, name in ((A_AT, 0.45, 0.95, "A"), (B_AT, 0.9, 0.5, "B")):
            style.cell(axis, place - width / 2, line - height / 2, width, height, look)
            axis.text(place, line, f"{name}{'₀₁'[rank]}", ha="center", va="center", fontsize=11,
                      bbox=style.WHITE | {"pad": 1.0})
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


# ------------------------------------------------------------------------------------------ models that are cut wrongly

WRONG, APART = style.LOOKS["gradients"], ("#D55E00", "xx")
RIGHT = 1e-5  # share of a gradient's norm: a larger error is not rounding
TOP = 0.8  # higher bars are cut off; their numbers give their heights


def draw_patients(models: dict[str, list[dict]]) -> Figure:
    """Args: models {title: what meters/layer_errors.py returned}; all have the same layers."""
    result, axes = style.figure(len(models), 1, style.PAGE, 1.75 * len(models) + 0.9)
    for (title, rows), axis in zip(models.items(), axes[:, 0], strict=True):
        _panel(axis, title, rows)
    rows = next(iter(models.values()))
    _names(axes[-1, 0], [row["layer"] for row in rows])
    for axis in axes[:-1, 0]:
        axis.set_xticks([])
    style.legend_outside(result, style.keys({
        "error of the gradient, as a share of its size": WRONG, "the ranks differ, where all hold the same": APART,
        "✓ right, but for rounding": ("none", "")}))
    return result


def _panel(axis: Axes, title: str, rows: list[dict]) -> None:
    places = range(len(rows))
    errors = [row["error"] if row["error"] > RIGHT else 0.0 for row in rows]
    spreads = [row["spread"] if (row["spread"] or 0) > RIGHT else 0.0 for row in rows]
    style.bars(axis, [place - 0.2 for place in places], [min(error, TOP) for error in errors], WRONG, width=0.4)
    style.bars(axis, [place + 0.2 for place in places], [min(spread, TOP) for spread in spreads], APART, width=0.4)
    words = [_share(error) if error else "✓" for error in errors]
    style.words_above(axis, [place - 0.22 * bool(error) for place, error in zip(places, errors, strict=True)],
                      [min(error, TOP) for error in errors], words, gap=2, fontsize=9)
    apart = [(place + 0.22, min(spread, TOP), _share(spread)) for place, spread in zip(places, spreads, strict=True)
             if spread]
    if apart:
        style.words_above(axis, *zip(*apart, strict=True), gap=2, fontsize=9)
    axis.set_ylim(0, 1.2 * TOP)
    axis.set_xlim(-0.7, len(rows) - 0.3)
    axis.set_yticks([0, 0.25, 0.5, 0.75], ["0", "25%", "50%", "75%"], fontsize=9)
    axis.set_title(title, fontsize=11, loc="left")


def _share(part: float) -> str:
    """The number of a bar that may be too low to be seen."""
    return "<1%" if part < 0.01 else f"{part:.0%}"


def _names(axis: Axes, layers: list[str]) -> None:
    """The names of layers below their bars, and of blocks below those."""
    style.name_bars(axis, range(len(layers)), [label(layer) for layer in layers])
    blocks: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        if layer.startswith("blocks."):
            blocks.setdefault(layer.split(".")[1], []).append(place)
    for number, places in blocks.items():
        style.note(axis, f"block {number}", ((places[0] + places[-1]) / 2, 0), (0, -26), ha="center",
                   xycoords=("data", "axes fraction"))
    axis.set_xlabel("forward →        ← backward, from the loss at the right end", fontsize=9, labelpad=16)


# --------------------------------------------------------------------------------------------------------- what is sent


def draw_sent_by_batch(sent: dict[int, int], of_data: int) -> Figure:
    """Bars for tensor parallelism, and a line for data parallelism.

    Args: sent {sequences in a batch: bytes}; of_data, bytes that data parallelism sends with any batch.
    """
    result, ((axis,),) = style.figure(1, 1, 0.6 * style.PAGE, 3.0)
    places = range(len(sent))
    heights = [count / 1e6 for count in sent.values()]
    style.bars(axis, places, heights, style.SENT, label="tensor parallelism")
    style.words_above(axis, places, heights, [f"{height:.2f}" for height in heights], fontsize=9)
    axis.axhline(of_data / 1e6, color=style.STAGE_COLOURS[0], linestyle="--", label="data parallelism")
    axis.set_ylabel("MB that a rank sends in a step", fontsize=9)
    axis.set_ylim(0, 1.25 * max(*heights, of_data / 1e6))
    style.name_bars(axis, places, [f"batch of {size}" for size in sent])
    axis.legend(fontsize=9, frameon=False, loc="upper left")
    return result
