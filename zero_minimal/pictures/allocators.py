"""Allocators: the memory that a training needs with one that lacks best fit, splitting or merging."""

from matplotlib.figure import Figure

from zero_minimal.meters.allocator import MIB
from zero_minimal.pictures.style import GRID, LOOKS, PLAIN


def draw_least(measured: dict) -> Figure:
    """A bar for each allocator of measured["pools"], {name: least capacity that is enough}, the complete one first; a
    line at what was in use at the peak."""
    picture = Figure(figsize=(8.6, 2.6), layout="constrained")
    axis = picture.subplots()
    names, held = list(measured["pools"]), [size / MIB for size in measured["pools"].values()]
    looks = [LOOKS["optimizer"], *[PLAIN] * (len(names) - 1)]
    for place, (size, (colour, hatch)) in enumerate(zip(held, looks, strict=True)):
        axis.barh(-place, size, 0.62, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0)
        axis.text(size, -place, f" {size:,.0f} MiB", va="center", fontsize=9)
    used = next(iter(measured["rows"].values()))["allocated"] / MIB
    axis.axvline(used, color="black", linewidth=1.6, linestyle="--")
    axis.text(used, 0.48, f"in use at the peak: {used:,.0f} MiB ", ha="right", va="bottom", fontsize=9)
    axis.set_yticks([-place for place in range(len(names))], names)
    axis.set(xlabel="least memory, in MiB, that is enough for the same requests", xlim=(0, 1.12 * max(held)),
             ylim=(None, 0.9))
    axis.grid(axis="x", **GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return picture
