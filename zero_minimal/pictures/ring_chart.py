"""Ring: who holds what while chunks travel from neighbour to neighbour."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zero_minimal.pictures.style import PAGE, figure, rank_cells

HELD = ("#FFFFFF", "#D6E6F2", "#A6CBE3", "#6FAAD0", "#0072B2")  # of a sum: nothing, … , everybody's part in it
NEXT = {"edgecolor": "#D55E00", "linewidth": 2.6, "facecolor": "none"}  # what is sent in the next step


def draw_ring(states: list, sends: list, title: str) -> Figure:
    """Who holds what, step by step: a panel for each step, in it a line for each rank and a column for each chunk.

    Args:
        states: [step][rank][chunk], sums of 10^r over the ranks r that have added their part; NaN: nothing there yet.
        sends: [step][rank], the chunk that the rank sends next, or None.
    """
    world_size, chunks = len(states[0]), len(states[0][0])
    size = max(0.56 * chunks + 0.2, 1.3), 0.44 * world_size + 0.75  # inches of a panel
    columns = min(len(states), int((PAGE - 0.6) / size[0]))
    rows = -(-len(states) // columns)
    result, axes = figure(rows, columns, max(5.0, columns * size[0] + 0.6), rows * size[1] + 1.0)
    for panel, axis in enumerate(axes.flat):
        axis.set_visible(panel < len(states))
        if panel >= len(states):
            continue
        for rank in range(world_size):
            for chunk in range(chunks):
                held_cell(axis, rank, chunk, states[panel][rank][chunk], world_size)
            if panel < len(sends) and sends[panel][rank] is not None:
                axis.add_patch(Rectangle((sends[panel][rank] - 0.44, rank - 0.42), 0.88, 0.84, zorder=3, **NEXT))
        rank_cells(axis, world_size, range(chunks), margin=0.55, named=panel % columns == 0)
        axis.set_title("at the start" if panel == 0 else f"after step {panel}", fontsize=10)
        if panel + columns >= len(states):
            axis.set_xlabel("chunk", fontsize=9)
    result.suptitle(title, fontsize=12)
    between = " " if result.get_figwidth() > 7 else "\n"
    result.supxlabel(f"{meaning(states)}{between}Outlined: what a rank sends to its right neighbour in the next step.",
                     fontsize=9)
    return result


def meaning(states: list) -> str:
    """What the words in the cells say: of sums only where ranks add anything."""
    world_size = len(states[0])
    held = {frozenset(parts_of(value, world_size)) for ranks in states for chunks in ranks for value in chunks}
    sums = sorted((sorted(parts) for parts in held if 1 < len(parts)), key=lambda parts: (len(parts), parts))
    if not sums:
        return "A number: the rank that had this chunk at the start."
    example = "+".join(map(str, sums[0])) if len(sums[0]) < world_size else "all"
    whose = f"what ranks {sums[0][0]} and {sums[0][1]} had" if example != "all" else "what all ranks had"
    return f"{example}: the sum of {whose} at the start."


def parts_of(value: float, world_size: int) -> list[int]:
    """The ranks whose parts are in a chunk: the sum of 10^r over them. NaN: nothing is there yet."""
    return [] if value != value else [rank for rank in range(world_size) if int(value) // 10**rank % 10]


def held_cell(axis: Axes, rank: int, chunk: int, value: float, world_size: int) -> None:
    """One chunk of one rank: darker with each rank whose part is in it, and their numbers."""
    parts_cell(axis, rank, chunk, parts_of(value, world_size), world_size)


def parts_cell(axis: Axes, rank: int, chunk: int, parts: Sequence[int], world_size: int, size: float = 9) -> None:
    """The same, where the ranks whose parts are in it are known. size: of the letters, in points."""
    every = sorted(parts) == list(range(world_size))
    shade = HELD[-1] if every else HELD[min(len(parts), len(HELD) - 2)]
    axis.add_patch(Rectangle((chunk - 0.44, rank - 0.42), 0.88, 0.84, facecolor=shade, edgecolor="#999999",
                             linewidth=0.6))
    words = "all" if every and world_size > 1 else "+".join(map(str, parts))
    axis.text(chunk, rank, words, ha="center", va="center", fontsize=size,
              color="white" if shade == HELD[-1] else "black")
