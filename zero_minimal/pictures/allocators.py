"""Allocators: the memory that a training needs with one that lacks best fit, splitting or merging."""

from matplotlib.figure import Figure

from zero_minimal.meters.allocator import MIB
from zero_minimal.pictures.style import GRID, PLAIN


def draw_least(measured: dict) -> Figure:
    """A bar for each allocator of measured["pools"], {name: least capacity that is enough}, and one for the run with
    slabs; a line at what was in use at the peak."""
    rows = list(measured["rows"].values())
    bars = measured["pools"] | {"the first one, with slabs": rows[1]["least"]}
    picture = Figure(figsize=(8.6, 2.9), layout="constrained")
    axis = picture.subplots()
    for place, size in enumerate(bars.values()):
        with_slabs = place == len(bars) - 1
        axis.barh(-place, size / MIB, 0.62, facecolor="white" if with_slabs else PLAIN[0], edgecolor=PLAIN[0],
                  hatch="//" if with_slabs else "", linewidth=1)
        axis.annotate(f"{size / MIB:,.0f} MiB", (size / MIB, -place), (5, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    used = rows[0]["allocated"] / MIB
    axis.axvline(used, color="black", linewidth=1.6, linestyle="--")
    axis.text(used, 0.5, f" in use at the peak: {used:,.0f} MiB", va="bottom", fontsize=9)
    axis.set_yticks([-place for place in range(len(bars))], list(bars))
    axis.set(xlabel="least memory, in MiB, that is enough for the same training", ylim=(None, 1.0),
             xlim=(0, 1.12 * max(bars.values()) / MIB))
    axis.grid(axis="x", **GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return picture
