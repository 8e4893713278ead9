"""Mesh: what D × M ranks share; memory and traffic from data parallelism to C5; and the effect of each part."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from zero_minimal.pictures import style


def draw_mesh(replicas: int, model_parallel: int) -> Figure:
    """The ranks as a grid: a row for each replica, a column for each part of the model; frames show the groups."""
    result, ((axis,),) = style.figure(1, 1, min(style.PAGE, 3.4 * model_parallel + 2.4), 1.55 * replicas + 1.2)
    axis.grid(False)
    for replica in range(replicas):
        row = replicas - 1 - replica
        _frame(axis, -0.47, row - 0.24, model_parallel - 0.06, 0.48, style.LOOKS["activations"][0], "-")
        axis.text(model_parallel - 0.45, row, f"sequences\nof replica {replica}", va="center", fontsize=9)
        for part in range(model_parallel):
            axis.text(part, row, f"rank {replica * model_parallel + part}\npart {part} of replica {replica}",
                      ha="center", va="center", fontsize=10)
    for part in range(model_parallel):
        _frame(axis, part - 0.4, -0.38, 0.8, replicas - 0.24, style.LOOKS["optimizer"][0], "--")
        axis.text(part, -0.46, f"part {part} of the weights", ha="center", va="top", fontsize=9)
    axis.set_xlim(-0.6, model_parallel + 0.35)
    axis.set_ylim(-0.7, replicas - 0.4)
    axis.set_axis_off()
    return result


def _frame(axis, left: float, bottom: float, width: float, height: float, colour: str, line: str) -> None:
    axis.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", fill=False,
                                  edgecolor=colour, linewidth=2.2, linestyle=line))


def draw_ladder(meshes: dict[str, dict[str, dict]]) -> Figure:
    """Peak memory of a rank, and what it sends in a step, for each way to train; ways on one mesh are side by side.

    meshes: {name of the mesh: {way: its row, with peak_by_category and sent, in bytes}}.
    """
    result, ((memory,), (traffic,)) = style.figure(2, 1, style.PAGE, 7.0)
    rows, positions, middles = {}, [], []
    for ways in meshes.values():
        first = positions[-1] + 2 if positions else 0  # a gap between two meshes
        positions += range(first, first + len(ways))
        middles.append(first + (len(ways) - 1) / 2)
        rows |= ways
    held = [row["peak_by_category"] for row in rows.values()]
    tops = style.stacked_bars(memory, positions, [
        (category, style.LOOKS[category], [own[category] / 1e6 for own in held]) for category in held[0]])
    style.words_above(memory, positions, tops, [f"{top:.1f}" for top in tops])
    memory.set_title("Memory of a rank at its peak", fontsize=11)
    sent = [row["sent"] / 1e6 for row in rows.values()]
    style.bars(traffic, positions, sent, style.SENT)
    style.words_above(traffic, positions, sent, [f"{size:.1f}" for size in sent])
    traffic.set_title("Sent by a rank in a step", fontsize=11)
    for axis in (memory, traffic):
        axis.set_xticks(positions, list(rows), rotation=20, ha="right", rotation_mode="anchor")
        axis.set_ylabel("MB")
        axis.set_ylim(0, 1.2 * axis.dataLim.ymax)
        for middle, mesh in zip(middles, meshes, strict=True):
            axis.text(middle, 0.97, mesh, transform=axis.get_xaxis_transform(), ha="center", va="top", weight="bold")
    style.legend_outside(result, style.entries_of([memory]))
    return result


def draw_worth(panels: dict[str, dict[str, dict]]) -> Figure:
    """How much each additional part changes the peak; a panel for each bucket size.

    panels: {title: {part: its row, with `peak` in bytes}}; the first row has no part.
    """
    result, axes = style.figure(1, len(panels), style.PAGE, 3.6)
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        names = list(rows)[1:][::-1]
        before = next(iter(rows.values()))["peak"]
        changes = [(rows[name]["peak"] - before) / 1e6 for name in names]
        axis.barh(range(len(names)), changes, 0.6, color=style.PLAIN[0])
        for place, change in enumerate(changes):
            style.note(axis, f"{change:+.1f}", (max(change, 0.0), place), (4, 0), va="center")
        axis.set_yticks(range(len(names)), names)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.margins(x=0.2)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("MB more at the peak")
    return result
