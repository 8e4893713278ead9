"""Allocators: the memory that a training needs with one that lacks best fit, splitting or merging."""

from matplotlib.figure import Figure

from zero_minimal.meters.allocator import MIB
from zero_minimal.pictures.style import GRID, PLAIN


def draw_least(pools: dict[str, int], used: float, with_slabs: int) -> Figure:
    """A bar for each allocator, {name: least bytes that are enough}, and one for the first of them with slabs; a line
    at the MiB that are in use at the peak."""
    bars = pools | {"the first one, with slabs": with_slabs}
    picture = Figure(figsize=(8.6, 2.9), layout="constrained")
    axis = picture.subplots()
    for place, size in enumerate(bars.values()):
        last = place == len(bars) - 1
        axis.barh(-place, size / MIB, 0.62, facecolor="white" if last else PLAIN[0], edgecolor=PLAIN[0],
                  hatch="//" if last else "", linewidth=1)
        axis.annotate(f"{size / MIB:,.0f} MiB", (size / MIB, -place), (5, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axis.axvline(used, color="black", linewidth=1.6, linestyle="--")
    axis.text(used, 0.5, f" in use at the peak: {used:,.0f} MiB", va="bottom", fontsize=9)
    axis.set_yticks([-place for place in range(len(bars))], list(bars))
    axis.set(xlabel="least memory, in MiB, that is enough for the same training", ylim=(None, 1.0),
             xlim=(0, 1.12 * max(bars.values()) / MIB))
    axis.grid(axis="x", **GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return picture
